"""Rows of several adapters in one pass: each as the merged model answers it, alone or not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bert_core.bundle.adapter_layout import ADAPTER, WEIGHTS
from bert_core.bundle.format import About, load_bundle
from bert_core.bundle.weights import build_model
from bert_core.bundle.writing import save_bundle
from bert_core.errors import ConfigError, FormatError, InputError
from bert_core.inference.adapted import AdaptedPredictors
from bert_core.inference.predictor import Predictor
from bert_core.model.config import EncoderConfig
from bert_core.model.variants import VARIANTS
from bert_core.tasks.base import Task
from bert_core.tasks.question_answering import QuestionAnswering
from bert_core.tasks.text_classification import TextClassification
from bert_core.tasks.token_classification import TokenClassification
from bert_core.train.adapting import adapt
from bert_core.train.config import AdapterConfig
from tests import tiny
from tests.exactness import same

NAMES = ("bert-tiny", "albert-base", "roberta-base", "distilbert", "mpnet-base",
         "modernbert-base", "electra-small")  # fmt: skip
TASKS: dict[str, tuple[Task, AdapterConfig]] = {
    "colours": (TextClassification(["blue", "green"]), AdapterConfig(rank=2)),
    "places": (
        TextClassification(["sea", "land", "sky"]),
        AdapterConfig(rank=3, targets=("all-linear",), rank_stabilized=True),
    ),
    "names": (TokenClassification(["O", "B-tree", "I-tree"]), AdapterConfig(rank=1)),
    "answers": (QuestionAnswering(), AdapterConfig(rank=2, alpha=1)),
}
INPUTS: list[tuple[str, Any]] = [
    ("colours", "the sea is blue"),
    ("names", "a tree is the tree"),
    ("places", "a blue tree"),
    ("colours", "a tree a tree a tree a tree"),
    ("answers", {"question": "is the sea blue", "context": "the sea is a tree"}),
    ("places", "the sea"),
]


def config_of(name: str) -> EncoderConfig:
    variant = VARIANTS[name].config
    small = replace(
        variant, hidden_size=48, num_hidden_layers=2, initializer_range=0.2,
        feed_forward=replace(variant.feed_forward, intermediate_size=64),
    )  # fmt: skip
    return small.adapted(vocab_size=11, pad_token_id=1)


def made(folder: Path, base: Path, task: Task, adapter: AdapterConfig, seed: int) -> Path:
    """A bundle with an adapter, all of whose learning weights are random."""
    bundle = load_bundle(base)
    config = task.encoder_config(bundle.encoder_config)
    torch.manual_seed(seed)
    objective = task.build_objective(config)
    model = build_model(replace(bundle, encoder_config=config), [objective], task=task)
    adapt(model, adapter)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.2 * torch.randn_like(weight))
    about = About(task=task, lineage={"parent": bundle.digest})
    save_bundle(folder, model, bundle.tokenizer, about, base="owner/base")
    return folder


def near(answer: Any) -> Any:
    match answer:
        case float():
            return pytest.approx(answer, rel=0, abs=1e-5)
        case dict():
            return {name: near(value) for name, value in answer.items()}
        case list():
            return [near(value) for value in answer]
    return answer


def adapters_of(folder: Path, name: str) -> tuple[Path, dict[str, Path]]:
    base = tiny.bundle(folder / "base", tiny.tokenizer(), config_of(name), objectives=[])
    return base, {
        key: made(folder / key, base, task, adapter, seed)
        for seed, (key, (task, adapter)) in enumerate(TASKS.items())
    }


@pytest.mark.parametrize("name", NAMES)
def test_every_adapter_answers_as_its_merged_model_whatever_shares_the_pass(
    name: str, tmp_path: Path
) -> None:
    base, bundles = adapters_of(tmp_path, name)
    models = AdaptedPredictors(base)
    for key, folder in bundles.items():
        models.add(key, folder / ADAPTER)
    together = models.predict(INPUTS)
    whole = {key: Predictor(folder, device="cpu") for key, folder in bundles.items()}
    for (key, given), answer in zip(INPUTS, together, strict=True):
        assert answer == near(whole[key].predict([given])[0])
        assert models.predict([(key, given)]) == [same(answer)]
    assert models.predict(INPUTS[::-1]) == [same(answer) for answer in together[::-1]]


def test_adapters_come_and_go_and_the_encoder_is_in_memory_once(tmp_path: Path) -> None:
    base, bundles = adapters_of(tmp_path, "bert-tiny")
    models = AdaptedPredictors(base)
    digests = {key: models.add(key, folder / ADAPTER) for key, folder in bundles.items()}
    assert len(set(digests.values())) == len(models.names) == 4
    encoders = [each.model.encoder for each in models._predictors.values()]
    assert len({id(each.layers) for each in encoders}) == 1
    assert len({id(each.pooler) for each in encoders if each.pooler is not None}) == 2
    [before] = models.predict(INPUTS[:1])
    models.add("again", bundles["colours"] / ADAPTER)
    models.drop("places")
    models.add("colours", bundles["places"] / ADAPTER)
    assert models.predict([("again", INPUTS[0][1])]) == [same(before)]
    assert {each["label"] for each in models.predict(INPUTS[:1])[0]} == {"sea", "land", "sky"}
    with pytest.raises(InputError, match=r"adapter: wanted one of .*again.*, got 'places'"):
        models.predict(INPUTS)
    with pytest.raises(InputError, match="adapter: wanted one of"):
        models.drop("places")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("embeddings.word_embeddings.weight", "embeddings.word_embeddings.weight"),
        ("encoder.layer.0.output.dense.bias", "layers.0.feed_forward.down.bias"),
    ],
)
def test_an_adapter_that_changes_more_than_weights_of_linear_layers_is_refused(
    theirs: str, ours: str, tmp_path: Path
) -> None:
    base = tiny.bundle(tmp_path / "base", tiny.tokenizer(), config_of("bert-tiny"), objectives=[])
    folder = made(tmp_path / "colours", base, *TASKS["colours"], 0) / ADAPTER
    weights = load_file(folder / WEIGHTS)
    own = load_bundle(base).state[f"encoder.{ours}"]
    models = AdaptedPredictors(base)
    save_file(weights | {f"base_model.model.bert.{theirs}": own}, folder / WEIGHTS)
    models.add("as the base has it", folder)
    save_file(weights | {f"base_model.model.bert.{theirs}": own + 1}, folder / WEIGHTS)
    with pytest.raises(FormatError, match=rf"changes of linear.* got another encoder\.{ours}: mer"):
        models.add("colours", folder)
    assert models.names == ["as the base has it"]


def test_what_cannot_share_a_pass_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    _, bundles = adapters_of(tmp_path / "a", "bert-tiny")
    other = tiny.bundle(tmp_path / "b", tiny.tokenizer(), config_of("bert-tiny"), objectives=[],
                        seed=1)  # fmt: skip
    with pytest.raises(FormatError, match="wanted the base that the adapter was trained on"):
        AdaptedPredictors(other).add("colours", bundles["colours"] / ADAPTER)
    distances = tiny.bundle(
        tmp_path / "c", tiny.tokenizer(), config_of("deberta-v3-tiny"), objectives=[]
    )
    with pytest.raises(ConfigError, match=r"adapters: wanted a family whose linear .*deberta-v2"):
        AdaptedPredictors(distances)
