"""Folders as the most used encoders are published, in small: their vectors, pairs and masks are
those of sentence-transformers and transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bert_core.bundle.format import About, load_bundle
from bert_core.bundle.weights import build_model
from bert_core.bundle.writing import save_bundle
from bert_core.data.windows import ids_of, with_special_tokens
from bert_core.errors import ConfigError, FormatError, InputError
from bert_core.inference.predictor import Predictor
from bert_core.tasks.feature_extraction import FeatureExtractionParameters
from tests import tiny

TEXTS = [
    "the sea is blue",
    "",
    "A  tree, a sea",
    "ünknown words",
    "blue tree " * 20,
    "cat and dog " * 9,
]
PAIRS = [("the sea is", "a blue tree"), ("ab cd", ""), ("a tree " * 5, "the sea " * 6)]
WIDTH, LONGEST = 32, 24
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 48,
    "initializer_range": 0.5,
}
ROBERTA = {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1}
# Published name → model type, its entries, tokenizer, pooling, whether vectors are normalised.
Published = tuple[str, dict[str, Any], Callable[[], Any], str, bool]
PUBLISHED: dict[str, Published] = {
    "multilingual-e5-base": ("xlm-roberta", ROBERTA, tiny.xlm_roberta_tokenizer, "mean", True),
    "bge-m3": ("xlm-roberta", ROBERTA, tiny.xlm_roberta_tokenizer, "cls", True),
    "all-mpnet-base-v2": ("mpnet", {}, tiny.mpnet_tokenizer, "mean", True),
    # BERT with the vocabulary of XLM-RoBERTa: the model's padding is 0, the tokenizer's is 1.
    "paraphrase-multilingual-MiniLM-L12-v2": (
        "bert",
        {"pad_token_id": 0, "type_vocab_size": 2},
        tiny.xlm_roberta_tokenizer,
        "mean",
        False,
    ),
}
# Modules and settings as sentence-transformers wrote them before version 6.
MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")


def written(folder: Path, name: str, class_ending: str = "Model", **entries: Any) -> Any:
    """Write a random model of transformers and its tokenizer; the tokenizer."""
    import transformers

    kind, its, make, _, _ = PUBLISHED[name]
    tokenizer = make()
    tokenizer.model_max_length = 46
    sizes = SIZES | {"vocab_size": len(tokenizer) + 3}  # as multilingual MiniLM, has unused rows
    config = transformers.AutoConfig.for_model(kind, **sizes, **its, **entries)
    torch.manual_seed(0)
    title = {"xlm-roberta": "XLMRoberta", "mpnet": "MPNet", "bert": "Bert"}[kind]
    model = getattr(transformers, f"{title}{class_ending}")(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def as_sentence_transformers(folder: Path, name: str) -> None:
    """The folder that today's sentence-transformers writes."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules.transformer import Transformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

    _, _, _, pooling, normalised = PUBLISHED[name]
    written(folder / "encoder", name)
    encoder = Transformer(str(folder / "encoder"))
    encoder.max_seq_length = LONGEST
    modules = [encoder, Pooling(WIDTH, pooling), *([Normalize()] if normalised else [])]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder / "st"))


def in_the_old_form(folder: Path, settings: str) -> None:
    """Rewrite the folder as older versions wrote it, with weights saved by torch."""
    import transformers

    modules = json.loads((folder / "modules.json").read_text())
    for module in modules:
        module["type"] = f"sentence_transformers.models.{module['type'].rpartition('.')[2]}"
    (folder / "modules.json").write_text(json.dumps(modules))
    pooling = json.loads((folder / "1_Pooling" / "config.json").read_text())["pooling_mode"]
    modes = {f"pooling_mode_{mode}": mode.startswith(f"{pooling}_to") for mode in MODES}
    config = {"word_embedding_dimension": WIDTH, **modes}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    (folder / "sentence_bert_config.json").unlink()
    (folder / settings).write_text(json.dumps({"max_seq_length": 12, "do_lower_case": False}))
    weights = transformers.AutoModel.from_pretrained(folder).state_dict()
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize("settings", [None, "sentence_bert_config", "sentence_xlm-roberta_config"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_vectors_are_those_of_sentence_transformers(
    name: str, settings: str | None, tmp_path: Path
) -> None:
    from sentence_transformers import SentenceTransformer

    as_sentence_transformers(tmp_path, name)
    folder = tmp_path / "st"
    if settings is not None:
        in_the_old_form(folder, f"{settings}.json")
    theirs = SentenceTransformer(str(folder), device="cpu")
    assert theirs.max_seq_length == (LONGEST if settings is None else 12)
    wanted = theirs.encode(TEXTS)
    ours = Predictor(folder, device="cpu")
    assert ours.task.name == "feature-extraction"
    longest = theirs.max_seq_length
    with pytest.raises(InputError, match=rf"wanted at most {longest} tokens .*: set the"):
        ours.predict(["word " * longest])
    cut = FeatureExtractionParameters(truncate=True)
    np.testing.assert_allclose(ours.predict(TEXTS, cut), wanted, atol=1e-5)
    bundle = load_bundle(folder)
    model = build_model(bundle, [])
    save_bundle(tmp_path / "again", model, bundle.tokenizer, About(task=bundle.task))
    back = SentenceTransformer(str(tmp_path / "again"), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(back, wanted, atol=1e-5)
    np.testing.assert_allclose(
        Predictor(tmp_path / "again", device="cpu").predict(TEXTS, cut), wanted, atol=1e-5
    )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("dense", r"Dense, Normalize\)"),
        ("max", r"Pooling \(pooling_mode_max_tokens\)"),
        ("prompt", r"include_prompt = false"),
        ("lower case", r"Transformer \(do_lower_case\)"),
        ("path", r"Transformer, Pooling"),
        ("settings", r"Normalize; truncate_dim, processing_kwargs"),
        ("normalize", r"Normalize; module_input_name of Normalize"),
        ("class", r"Transformer, mine\.Pooling"),
    ],
)
def test_vectors_that_differ_from_sentence_transformers_are_not_given(
    changed: str, said: str, tmp_path: Path
) -> None:
    as_sentence_transformers(tmp_path, "multilingual-e5-base")
    folder = tmp_path / "st"
    modules = json.loads((folder / "modules.json").read_text())
    pooling = {"pooling_mode_mean_tokens": changed != "max", "include_prompt": changed != "prompt"}
    pooling |= {"pooling_mode_max_tokens": changed == "max"}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(dict(sorted(pooling.items()))))
    if changed == "dense":
        dense = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.Dense"}
        modules.insert(2, dense)
    if changed == "lower case":
        settings = {"max_seq_length": LONGEST, "do_lower_case": True}
        (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    if changed == "path":
        (folder / "1_Pooling").rename(folder / "1_Mean")
        modules[1]["path"] = "1_Mean"
    if changed == "settings":
        short = {"processing_kwargs": {"text": {"max_length": 6}}}
        (folder / "sentence_bert_config.json").write_text(json.dumps(short))
        (folder / "config_sentence_transformers.json").write_text('{"truncate_dim": 16}')
    if changed == "normalize":
        (folder / modules[2]["path"]).mkdir(exist_ok=True)
        normalized = '{"module_input_name": "token_embeddings"}'
        (folder / modules[2]["path"] / "config.json").write_text(normalized)
    if changed == "class":
        modules[1]["type"] = "mine.Pooling"
    (folder / "modules.json").write_text(json.dumps(modules))
    for task in ("feature-extraction", "sentence-similarity"):
        with pytest.raises(ConfigError, match=rf"wanted a pooling.*{said}"):
            Predictor(folder, device="cpu", task=task)
        Predictor(folder, device="cpu", task=task, options={"pooling": "mean"})
    with pytest.raises(FormatError, match="wanted a bundle for a task"):
        Predictor(folder, device="cpu")


@pytest.mark.parametrize("name", ["bge-m3", "all-mpnet-base-v2", list(PUBLISHED)[-1]])
def test_a_pair_is_scored_as_transformers_scores_it(name: str, tmp_path: Path) -> None:
    import transformers

    tokenizer = written(tmp_path, name, "ForSequenceClassification", num_labels=3)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    rows = [{"text": first, "text_pair": second} for first, second in PAIRS]
    answers = Predictor(tmp_path, device="cpu").predict(rows)
    ours = load_bundle(tmp_path).tokenizer
    for (first, second), answer in zip(PAIRS, answers, strict=True):
        batch = tokenizer([first], [second], return_tensors="pt")
        one, other = ids_of(ours, [first, second])
        row, segments = with_special_tokens(ours, one, other), batch.get("token_type_ids")
        assert row.ids.tolist() == batch["input_ids"][0].tolist()
        assert segments is None or not segments.any()
        assert row.segment_b_start == len(row.ids)
        # As its pipeline asks, where an empty second text is none.
        asked = tokenizer(first, second or None, return_tensors="pt")
        with torch.inference_mode():
            wanted = theirs(**asked).logits.softmax(-1)[0]
        scores = {label["label"]: label["score"] for label in answer}
        named = [scores[f"LABEL_{number}"] for number in range(3)]
        np.testing.assert_allclose(named, wanted, atol=1e-5)


@pytest.mark.parametrize("name", ["bge-m3", "all-mpnet-base-v2", list(PUBLISHED)[-1]])
def test_masks_are_filled_as_transformers_fills_them(name: str, tmp_path: Path) -> None:
    import transformers

    tokenizer = written(tmp_path, name, "ForMaskedLM")
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    text = "the <mask> is blue"
    batch = tokenizer(text, return_tensors="pt")
    with torch.inference_mode():
        logits = theirs(**batch).logits[batch["input_ids"] == tokenizer.mask_token_id][0]
    wanted = logits.softmax(-1).topk(3)
    answers = Predictor(tmp_path, device="cpu", task="fill-mask").predict([text])[0][:3]
    assert [one["token"] for one in answers] == wanted.indices.tolist()
    np.testing.assert_allclose([one["score"] for one in answers], wanted.values, atol=1e-5)
