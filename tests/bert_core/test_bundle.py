"""The bundle: transformers loads ours, we load theirs, and damage is refused by name."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from bert_core.bundle.format import About, Bundle, bundle_digest, load_bundle
from bert_core.bundle.layout import FORMAT_VERSION
from bert_core.bundle.weights import build_model
from bert_core.bundle.writing import save_bundle
from bert_core.data.tokenizer import Tokenizer
from bert_core.errors import ConfigError, FormatError
from bert_core.inference.predictor import Predictor
from bert_core.model.hf import encoder_config_to_huggingface
from bert_core.model.sharing import plain_state
from bert_core.objectives.base import Batch, ObjectiveModel
from bert_core.objectives.classification import Classification
from bert_core.objectives.mlm import MaskedLanguageModeling
from bert_core.objectives.sentence_pairs import NextSentencePrediction
from bert_core.objectives.span_boundary import SpanBoundary
from bert_core.tasks.base import Task
from bert_core.tasks.text_classification import TextClassification
from bert_core.tasks.text_ranking import TextRanking
from bert_core.tasks.text_regression import TextRegression
from bert_core.tasks.token_classification import TokenClassification, TokenClassificationOptions
from tests import tiny

TOKENIZER = tiny.tokenizer([*tiny.pieces(tiny.ALPHABET), "!", ",", "海"])
VOCABULARY = TOKENIZER.vocabulary
CONFIG = tiny.encoder_config(
    len(VOCABULARY), hidden_size=24, num_attention_heads=3, intermediate_size=48
)
TASK = TextClassification(["land", "sea", "sky"])
PLACES = TokenClassification(["B-sea", "O"])
FEATURES = TokenClassificationOptions(feature_based=True)
TEXTS = ["The sea, the sea!", "Café in a tree", "海 sea 🌊", "", "a" * 300, "x " * 100]


def model_of(*names: str) -> ObjectiveModel:
    objectives: dict[str, tiny.Build] = {
        "mlm": MaskedLanguageModeling,
        "nsp": NextSentencePrediction,
        "classification": lambda config: Classification(config, 3),
    }
    return tiny.model(CONFIG, *(objectives[name] for name in names), noise=0.1).eval()


def saved(folder: Path, *names: str, task: Task | None = None) -> ObjectiveModel:
    model = model_of(*names)
    lineage = {"corpus": "docstrings", "shards": "3f2a91"}
    save_bundle(
        folder, model, TOKENIZER, About(task=task, metrics={"accuracy": 0.75}, lineage=lineage)
    )
    return model


def padded_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    mask = (torch.arange(16) < torch.tensor([[16], [7], [10]])).long()
    return {
        "input_ids": torch.randint(5, 50, (3, 16), generator=generator) * mask,
        "token_type_ids": (torch.arange(16) > 4).long() * mask,
        "attention_mask": mask,
        "mlm_positions": torch.arange(48),
    }


def theirs(name: str, folder: Path) -> Any:
    """What transformers loads, after it agreed that every tensor was there and none too many."""
    import transformers

    model, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not info[kind], kind
    return model.eval()


def forward_of(model: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    return model(**{key: batch[key] for key in ("input_ids", "token_type_ids", "attention_mask")})


def test_transformers_loads_a_pretrained_bundle_with_equal_logits(tmp_path: Path) -> None:
    model, batch = saved(tmp_path / "bundle", "mlm", "nsp"), padded_batch()
    expected = forward_of(theirs("BertForPreTraining", tmp_path / "bundle"), batch)
    logits = model.logits(batch)
    torch.testing.assert_close(
        logits["mlm"], expected["prediction_logits"].flatten(0, 1), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        logits["nsp"], expected["seq_relationship_logits"], atol=1e-5, rtol=0
    )


def test_a_span_boundary_head_is_kept_beside_what_transformers_reads(tmp_path: Path) -> None:
    model = tiny.model(CONFIG, MaskedLanguageModeling, SpanBoundary).eval()
    folder = tmp_path / "bundle"
    save_bundle(folder, model, TOKENIZER, About())
    heads = load_file(folder / "objective.safetensors")
    assert {name.split(".")[1] for name in heads} == {"span_boundary"}
    batch = padded_batch() | {"mlm_positions": torch.tensor([2, 3, 18])}
    batch |= {"mlm_span_lengths": torch.tensor([2, 1])}
    scores = forward_of(theirs("AutoModelForMaskedLM", folder), batch)["logits"].flatten(0, 1)
    ours = model.logits(batch)
    torch.testing.assert_close(ours["mlm"], scores[[2, 3, 18]], atol=1e-5, rtol=0)
    fresh = [MaskedLanguageModeling(CONFIG), SpanBoundary(CONFIG)]
    again = build_model(load_bundle(folder), fresh, require_heads=True).eval()
    assert torch.equal(again.logits(batch)["span_boundary"], ours["span_boundary"])


def test_a_head_that_transformers_lacks_is_in_a_file_that_it_ignores(tmp_path: Path) -> None:
    import transformers

    task = TokenClassification(PLACES.labels, FEATURES)
    model = tiny.model(CONFIG, task.build_objective).eval()
    folder = tmp_path / "bundle"
    save_bundle(folder, model, TOKENIZER, About(task=task))
    heads = load_file(folder / "objective.safetensors")
    assert {name.split(".")[1] for name in heads} == {"feature_based_token_classification"}
    assert not [name for name in load_file(folder / "model.safetensors") if "objectives" in name]
    encoder, info = transformers.AutoModel.from_pretrained(folder, output_loading_info=True)
    assert all("pooler" in name for name in info["missing_keys"]), "which this model does without"
    assert not info["unexpected_keys"]
    batch = padded_batch() | {"token_positions": torch.arange(7)}
    hidden = forward_of(encoder.eval(), batch)["last_hidden_state"]
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(model.encode(batch).hidden[real], hidden[real], atol=1e-5, rtol=0)
    bundle = load_bundle(folder)
    assert isinstance(bundle.task, TokenClassification)
    assert bundle.task.chosen == task.chosen
    again = build_model(bundle, [bundle.task.build_objective(CONFIG)], require_heads=True).eval()
    (name,) = model.objectives
    assert torch.equal(again.logits(batch)[name], model.logits(batch)[name])
    save_file({k: v + 1 for k, v in heads.items()}, folder / "objective.safetensors")
    with pytest.raises(FormatError, match=r"objective\.safetensors: wanted sha256"):
        load_bundle(folder)


@pytest.mark.parametrize(
    ("learned", "wanted", "is_kept"),
    [
        (TASK, TextClassification(["land", "sea", "sky"]), True),
        (TASK, TextClassification(["land", "sea", "ski"]), False),
        (TASK, TextClassification(["sea", "sky", "land"]), False),
        (TextRegression(["LABEL_0"]), TextRegression(), True),
        (TextRegression(["LABEL_0"]), TextRanking(), True),
        (PLACES, TokenClassification(["B-land", "O"]), False),
        (
            TokenClassification(PLACES.labels, FEATURES),
            TokenClassification(["B-land", "O"], FEATURES),
            False,
        ),
    ],
)
def test_a_head_for_other_labels_of_rows_is_not_taken_over(
    learned: Task, wanted: Task, is_kept: bool, tmp_path: Path
) -> None:
    bundle = load_bundle(tiny.bundle(tmp_path / "bundle", TOKENIZER, CONFIG, task=learned))
    torch.manual_seed(1)
    model = build_model(bundle, [wanted.build_objective(CONFIG)], task=wanted)
    taken_over = {
        name: torch.equal(tensor, bundle.state[name])
        for name, tensor in plain_state(model).items()
        if tensor.ndim == 2  # biases are 0 in every new head
    }
    assert all(is_equal for name, is_equal in taken_over.items() if name.startswith("encoder."))
    heads = [is_equal for name, is_equal in taken_over.items() if name.startswith("objectives.")]
    assert heads == [is_kept] * len(heads) != []


def test_labels_take_the_order_of_a_head_for_the_same() -> None:
    backwards = TextClassification(["sky", "sea", "land"])
    assert TASK.in_order_of(backwards).labels == backwards.labels
    others = TextClassification(["land", "sea"]), TokenClassification(["sky", "sea", "land"]), None
    assert all(TASK.in_order_of(each) is TASK for each in others)


@pytest.mark.parametrize(
    ("names", "architecture"),
    [
        ((), "BertModel"),
        (("mlm",), "BertForMaskedLM"),
        (("nsp",), "BertForNextSentencePrediction"),
    ],
)
def test_a_bundle_names_the_class_that_loads_it(
    names: tuple[str, ...], architecture: str, tmp_path: Path
) -> None:
    model, batch = saved(tmp_path / "bundle", *names), padded_batch()
    entries = json.loads((tmp_path / "bundle" / "config.json").read_text())
    assert entries["architectures"] == [architecture]
    if names:
        output = forward_of(theirs(architecture, tmp_path / "bundle"), batch)
        logits = model.logits(batch)[names[0]]
        torch.testing.assert_close(
            output["logits"].reshape(logits.shape), logits, atol=1e-5, rtol=0
        )


def test_transformers_loads_a_fine_tuned_bundle_with_equal_logits(tmp_path: Path) -> None:
    model = saved(tmp_path / "bundle", "classification", task=TASK)
    batch = padded_batch()
    loaded = theirs("AutoModelForSequenceClassification", tmp_path / "bundle")
    assert loaded.config.id2label == {0: "land", 1: "sea", 2: "sky"}
    assert loaded.config.label2id == {"land": 0, "sea": 1, "sky": 2}
    torch.testing.assert_close(
        model.logits(batch)["classification"],
        forward_of(loaded, batch)["logits"],
        atol=1e-5,
        rtol=0,
    )


def test_transformers_tokenizer_gives_equal_ids(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    saved(tmp_path / "bundle", "mlm")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "bundle")
    expected = tokenizer(TEXTS, truncation=True, max_length=32)["input_ids"]
    ours = load_bundle(tmp_path / "bundle").tokenizer.encode(TEXTS, 32)
    assert [ids.tolist() for ids in ours] == expected


def write_with_transformers(folder: Path, name: str, **settings: object) -> nn.Module:
    import transformers
    from transformers import BertConfig, BertTokenizer

    torch.manual_seed(1)
    config = BertConfig(**encoder_config_to_huggingface(CONFIG) | settings)
    model = getattr(transformers, name)(config).eval()
    model.save_pretrained(folder)
    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    BertTokenizer(vocab=vocabulary).save_pretrained(folder)
    return model


def test_a_classifier_that_transformers_wrote_loads_with_equal_logits(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    labels = {0: "no", 1: "yes", 2: "perhaps"}
    expected = write_with_transformers(tmp_path, "BertForSequenceClassification", id2label=labels)
    bundle, batch = load_bundle(tmp_path), padded_batch()
    assert bundle.task is not None
    assert (bundle.task.name, bundle.task.labels) == (
        "text-classification",
        ["no", "yes", "perhaps"],
    )
    assert bundle.encoder_config == CONFIG
    assert (bundle.metrics, bundle.lineage) == ({}, {})
    model = build_model(bundle, [bundle.task.build_objective(CONFIG)], require_heads=True).eval()
    torch.testing.assert_close(
        model.logits(batch)["classification"],
        forward_of(expected, batch)["logits"],
        atol=1e-5,
        rtol=0,
    )
    ids = AutoTokenizer.from_pretrained(tmp_path)(TEXTS, truncation=True, max_length=32)[
        "input_ids"
    ]
    assert [row.tolist() for row in bundle.tokenizer.encode(TEXTS, 32)] == ids


def test_a_pretrained_model_that_transformers_wrote_loads_with_equal_logits(tmp_path: Path) -> None:
    expected, batch = write_with_transformers(tmp_path, "BertForPreTraining"), padded_batch()
    bundle = load_bundle(tmp_path)
    assert bundle.task is None
    objectives = [MaskedLanguageModeling(CONFIG), NextSentencePrediction(CONFIG)]
    model = build_model(bundle, objectives, require_heads=True).eval()
    logits, output = model.logits(batch), forward_of(expected, batch)
    torch.testing.assert_close(
        logits["mlm"], output["prediction_logits"].flatten(0, 1), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(logits["nsp"], output["seq_relationship_logits"], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("architecture", "settings", "name", "labels"),
    [
        ("SequenceClassification", {"num_labels": 1}, "text-regression", 1),
        (
            "SequenceClassification",
            {"num_labels": 1, "problem_type": "regression"},
            "text-regression",
            1,
        ),
        (
            "SequenceClassification",
            {"problem_type": "multi_label_classification"},
            "text-classification",
            2,
        ),
        ("TokenClassification", {"num_labels": 3}, "token-classification", 3),
        ("QuestionAnswering", {}, "question-answering", 0),
    ],
)
def test_a_head_has_the_task_that_its_config_names(
    architecture: str, settings: dict[str, Any], name: str, labels: int, tmp_path: Path
) -> None:
    expected = write_with_transformers(tmp_path, f"BertFor{architecture}", **settings)
    bundle, batch = load_bundle(tmp_path), padded_batch()
    assert bundle.task is not None
    assert bundle.task.name == name
    assert bundle.task.labels == [f"LABEL_{index}" for index in range(labels)]
    model = build_model(bundle, [bundle.task.build_objective(CONFIG)], require_heads=True).eval()
    rows, seq = batch["input_ids"].shape
    every = batch | {"token_positions": torch.arange(rows * seq)}
    (ours,) = model.logits(every).values()
    output = forward_of(expected, batch)
    if architecture == "QuestionAnswering":
        wanted = torch.stack([output["start_logits"], output["end_logits"]], -1)
        wanted = wanted.masked_fill(batch["attention_mask"][..., None] == 0, float("-inf"))
    else:
        wanted = output["logits"].view_as(ours)
    torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=0)
    save_bundle(tmp_path / "again", model, bundle.tokenizer, About(task=bundle.task))
    again = load_bundle(tmp_path / "again").task
    assert again is not None
    assert again.record == bundle.task.record
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    kinds = {"text-regression": "regression", "text-classification": "multi_label_classification"}
    assert written.get("problem_type") == kinds.get(name)


def test_weights_of_half_precision_come_as_fp32(tmp_path: Path) -> None:
    write_with_transformers(tmp_path, "BertModel").half().save_pretrained(tmp_path)  # type: ignore[operator]
    assert {tensor.dtype for tensor in load_bundle(tmp_path).state.values()} == {torch.float32}


def test_labels_without_names_get_those_of_transformers(tmp_path: Path) -> None:
    write_with_transformers(tmp_path, "BertForSequenceClassification", num_labels=2)
    task = load_bundle(tmp_path).task
    assert task is not None
    assert task.labels == ["LABEL_0", "LABEL_1"]


def test_labels_that_are_numbers_are_their_digits(tmp_path: Path) -> None:
    write_with_transformers(tmp_path, "BertForSequenceClassification", num_labels=2)
    path = tmp_path / "config.json"
    entries = json.loads(path.read_text()) | {"id2label": {"0": -1, "1": 1}}
    path.write_text(json.dumps(entries))
    [answer] = Predictor(tmp_path, device="cpu").predict(["the sea"])
    assert sorted(one["label"] for one in answer) == ["-1", "1"]


def test_a_tokenizer_that_pads_with_another_id_than_positions_count_by_is_refused(
    tmp_path: Path,
) -> None:
    import transformers

    entries = tiny.entries(len(VOCABULARY), pad_token_id=1, type_vocab_size=1)
    model = transformers.RobertaForMaskedLM(transformers.RobertaConfig(**entries))
    model.save_pretrained(tmp_path)
    TOKENIZER.save(tmp_path)
    with pytest.raises(FormatError, match=r"wanted pad_token_id 0, .* got 1, the id of '\[UNK\]'"):
        load_bundle(tmp_path)


@pytest.mark.parametrize("written", ["torch", "parts"])
def test_weights_in_other_files_are_read(written: str, tmp_path: Path) -> None:
    write_with_transformers(tmp_path, "BertForSequenceClassification", num_labels=2)
    wanted = load_bundle(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    if written == "torch":
        torch.save(weights, tmp_path / "pytorch_model.bin")
    else:
        names = sorted(weights)
        files = {name: f"model-{1 + index % 2:05d}-of-00002.safetensors"
                 for index, name in enumerate(names)}  # fmt: skip
        for file in set(files.values()):
            part = {name: weights[name] for name in names if files[name] == file}
            save_file(part, tmp_path / file)
        index = {"metadata": {}, "weight_map": files}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = load_bundle(tmp_path)
    assert found.state.keys() == wanted.state.keys()
    assert all(torch.equal(found.state[name], wanted.state[name]) for name in wanted.state)
    assert found.digest != wanted.digest
    if written == "parts":
        (tmp_path / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(FormatError, match=r"model-00002-of-00002.safetensors: wanted this fil"):
            load_bundle(tmp_path)


def test_weights_that_run_code_are_refused(tmp_path: Path) -> None:
    write_with_transformers(tmp_path, "BertModel")
    parts = tmp_path / "before"
    parts.mkdir()
    (tmp_path / "model.safetensors").rename(parts / "model.safetensors")
    torch.save({"x": Path("anything")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(FormatError, match=r"pytorch_model\.bin is not a file of tensors only"):
        load_bundle(tmp_path)
    tensors = load_file(parts / "model.safetensors")
    for saved, message in (
        ({"state_dict": tensors}, "'state_dict' is dict: save the model's state_dict"),
        (tensors | {"step": 3}, "'step' is int"),
        ([*tensors.values()], "wanted tensors by name, got list"),
    ):
        torch.save(saved, tmp_path / "pytorch_model.bin")
        with pytest.raises(FormatError, match=message):
            load_bundle(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"no zip")
    with pytest.raises(FormatError, match=r"pytorch_model\.bin is not a file of tensors only"):
        load_bundle(tmp_path)


def test_an_unknown_task_gives_the_encoder_alone(tmp_path: Path) -> None:
    write_with_transformers(tmp_path, "BertModel")
    entries = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(entries | {"architectures": ["BertForRelations"]})
    )
    bundle = load_bundle(tmp_path)
    assert bundle.task is None
    assert not [name for name in bundle.state if ".classification." in name]
    build_model(bundle, [Classification(CONFIG, 3)])


def test_a_bundle_keeps_what_it_was_given(tmp_path: Path) -> None:
    model = saved(tmp_path / "bundle", "classification", task=TASK)
    bundle = load_bundle(tmp_path / "bundle")
    assert bundle.task is not None
    assert (bundle.task.name, bundle.task.labels) == (TASK.name, TASK.labels)
    assert bundle.metrics == {"accuracy": 0.75}
    assert bundle.lineage == {"corpus": "docstrings", "shards": "3f2a91"}
    assert bundle.tokenizer.digest == TOKENIZER.digest
    state = model.state_dict()
    assert bundle.state.keys() == state.keys()
    assert all(torch.equal(bundle.state[name], state[name]) for name in state)


def test_examples_of_a_bundle_are_for_its_task_and_not_in_its_digest(tmp_path: Path) -> None:
    examples = ["Café in a tree", {"text": "a sea", "text_pair": "the sea"}]
    plain = load_bundle(tiny.bundle(tmp_path / "plain", TOKENIZER, CONFIG, task=TASK))
    folder = tiny.bundle(tmp_path / "shown", TOKENIZER, CONFIG, task=TASK, examples=examples)
    shown = load_bundle(folder)
    assert (plain.examples, shown.examples) == ((), tuple(examples))
    assert plain.digest == shown.digest
    assert plain.examples_for(TASK) == ()
    assert shown.examples_for(TASK) == tuple(examples)
    assert shown.examples_for(TokenClassification(["O"])) == ()
    assert list(Predictor(folder, device="cpu").examples) == examples
    assert Predictor(tmp_path / "plain", device="cpu").examples == TASK.examples
    vectors = Predictor(folder, device="cpu", task="feature-extraction")
    assert vectors.examples == vectors.task.examples
    (folder / "raybert.json").unlink()
    assert load_bundle(folder).examples == ()


def test_a_bundle_knows_the_rows_that_its_weights_have_seen(tmp_path: Path) -> None:
    task = TextClassification(["a", "b", "c"])
    rows = [{"text": text} for text in ("an axis", "a row", "an axis")]
    seen = task.digests(rows)
    save_bundle(
        tmp_path / "x", model_of("classification"), TOKENIZER, About(task=task, trained_rows=seen)
    )
    bundle = load_bundle(tmp_path / "x")
    asked = [{"text": "a column"}, {"text": "a row"}, {"text": "an axis"}]
    assert bundle.has_seen(task, asked).tolist() == [False, True, True]
    assert len(bundle.trained_rows) == 2, "a row that is there twice is one"
    saved(tmp_path / "none", "mlm")
    assert not load_bundle(tmp_path / "none").has_seen(task, asked).any()
    assert not (tmp_path / "none" / "trained_rows.npy").exists()
    record = (tmp_path / "x" / "raybert.json").read_bytes()
    (tmp_path / "x" / "raybert.json").unlink()
    assert load_bundle(tmp_path / "x").has_seen(task, asked).tolist() == [False, True, True]
    (tmp_path / "x" / "raybert.json").write_bytes(record)
    (tmp_path / "x" / "trained_rows.npy").write_bytes(b"")
    with pytest.raises(FormatError, match=r"trained_rows.npy: wanted sha256"):
        load_bundle(tmp_path / "x")


def test_one_model_has_one_digest_and_another_another(tmp_path: Path) -> None:
    saved(tmp_path / "a", "mlm", "nsp")
    saved(tmp_path / "b", "mlm", "nsp")
    saved(tmp_path / "c", "mlm")
    assert bundle_digest(tmp_path / "a") == load_bundle(tmp_path / "b").digest
    assert bundle_digest(tmp_path / "a") != bundle_digest(tmp_path / "c")


def test_heads_start_fresh_where_the_bundle_has_none_that_fit(tmp_path: Path) -> None:
    pretrained = saved(tmp_path / "bundle", "mlm", "nsp")
    bundle = load_bundle(tmp_path / "bundle")
    model = build_model(bundle, [Classification(CONFIG, 3)])
    assert not model.state_dict()["objectives.classification.head.linear.bias"].any()
    for name, tensor in pretrained.encoder.state_dict().items():
        assert torch.equal(model.encoder.state_dict()[name], tensor)
    with pytest.raises(FormatError, match=r"wanted objectives\.classification\.head.*got none"):
        build_model(bundle, [Classification(CONFIG, 3)], require_heads=True)


def test_a_head_for_other_labels_is_not_taken(tmp_path: Path) -> None:
    saved(tmp_path / "bundle", "classification", task=TASK)
    bundle = load_bundle(tmp_path / "bundle")
    model = build_model(bundle, [Classification(CONFIG, 4)])
    assert not model.state_dict()["objectives.classification.head.linear.bias"].any()
    with pytest.raises(FormatError, match=r"of shape \(4, 24\), got shape \(3, 24\)"):
        build_model(bundle, [Classification(CONFIG, 4)], require_heads=True)


def test_an_encoder_that_lacks_a_tensor_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "bundle", "mlm")
    bundle = load_bundle(tmp_path / "bundle")
    del bundle.state["encoder.layers.1.attention.qkv.weight"]
    with pytest.raises(FormatError, match=r"wanted encoder\.layers\.1\.attention\.qkv\.weight"):
        build_model(bundle, [MaskedLanguageModeling(CONFIG)])


def test_the_bundle_keeps_its_weights_when_the_model_trains(tmp_path: Path) -> None:
    saved(tmp_path / "bundle", "mlm")
    bundle = load_bundle(tmp_path / "bundle")
    before = {name: tensor.clone() for name, tensor in bundle.state.items()}
    with torch.no_grad():
        for parameter in build_model(bundle, [MaskedLanguageModeling(CONFIG)]).parameters():
            parameter.zero_()
    assert all(torch.equal(bundle.state[name], before[name]) for name in before)


def test_an_encoder_alone_becomes_a_model_with_a_fresh_pooler(tmp_path: Path) -> None:
    saved(tmp_path / "bundle", "mlm")  # masked words alone need no pooler
    assert build_model(load_bundle(tmp_path / "bundle"), [NextSentencePrediction(CONFIG)])


def test_a_bundle_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        save_bundle(
            tmp_path / "bundle", model_of("mlm"), TOKENIZER, About(lineage={"no": object()})
        )
    assert list(tmp_path.iterdir()) == []


def test_existing_files_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "thesis.txt").write_text("precious")
    message = "wanted a path that does not exist yet.*remove it, or use another output"
    with pytest.raises(ConfigError, match=message):
        saved(tmp_path / "bundle", "mlm")
    assert [path.name for path in tmp_path.rglob("*")] == ["bundle", "thesis.txt"]


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    large = Tokenizer.from_vocabulary([*VOCABULARY, "one", "more"], lowercase=True)
    with pytest.raises(ConfigError, match=r"at most 60 tokens.*got 62 in the tokenizer"):
        save_bundle(tmp_path / "bundle", model_of("mlm"), large, About())


FILES = (
    "config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
)


@pytest.mark.parametrize("name", FILES)
def test_a_changed_file_is_named_with_both_digests_and_the_way_out(
    name: str, tmp_path: Path
) -> None:
    saved(tmp_path / "bundle", "mlm")
    path = tmp_path / "bundle" / name
    wanted = json.loads((tmp_path / "bundle" / "raybert.json").read_text())["files"][name]
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    for load in (load_bundle, bundle_digest):
        with pytest.raises(FormatError) as caught:
            load(tmp_path / "bundle")
        assert re.search(
            rf"{name}: wanted sha256 {wanted[:12]}, got [0-9a-f]{{12}}: the file has changed since "
            "the bundle was written; copy or write the bundle again",
            str(caught.value),
        )


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    saved(tmp_path / "bundle", "mlm")
    (tmp_path / "bundle" / name).unlink()
    with pytest.raises(FormatError, match=f"{name}: wanted this file of the bundle, it is missing"):
        load_bundle(tmp_path / "bundle")


def truncate_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def empty_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def drop_vocabulary(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.txt").unlink(missing_ok=True)


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def list_config(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def other_family(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama"}')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate_weights, "cannot be read: .*copy or write the bundle again"),
        (empty_weights, "cannot be read: .*copy or write the bundle again"),
        (drop_vocabulary, "wanted tokenizer.json or vocab.txt, found neither"),
        (break_config, r"config\.json: wanted JSON, it cannot be read"),
        (list_config, r"config\.json: wanted an object, got a list"),
        (other_family, "model_type = 'llama': wanted one of the families bert, roberta"),
    ],
)
def test_damage_to_a_folder_of_transformers_is_refused(
    damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    write_with_transformers(tmp_path, "BertModel")
    damage(tmp_path)
    with pytest.raises(FormatError, match=message):
        load_bundle(tmp_path)


def test_no_folder_is_an_error_that_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"config\.json: wanted this file.*it is missing"):
        load_bundle(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"format_version": FORMAT_VERSION + 1},
            f"wanted format_version {FORMAT_VERSION} or older, got {FORMAT_VERSION + 1}: "
            "it was made by a newer raybert, update this one",
        ),
        ({"format_version": None}, "wanted a format_version, got none"),
        ({"files": {}}, "wanted the sha256 of at least config.json and model.safetensors"),
        (
            {"task": "palmistry", "format_version": 1, "digest": ""},
            "wanted one of the tasks .*, got 'palmistry'",
        ),
    ],
)
def test_a_record_that_cannot_be_trusted_is_refused(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    saved(tmp_path / "bundle", "mlm")
    path = tmp_path / "bundle" / "raybert.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(FormatError, match=message):
        load_bundle(tmp_path / "bundle")


def test_files_that_do_not_belong_to_the_bundle_are_no_damage(tmp_path: Path) -> None:
    saved(tmp_path / "bundle", "mlm")
    (tmp_path / "bundle" / "README.md").write_text("a model card")
    assert isinstance(load_bundle(tmp_path / "bundle"), Bundle)
