"""Tags of entities through the stages, in whatever scheme each file has them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bert_core.data.tokenizer import Tokenizer
from bert_core.metrics.entities import SCHEMES, Entity, Scheme, entities_of, tags_of
from bert_core.tasks.token_classification import TokenClassification, TokenClassificationOptions
from pipelines import evaluate, finetune, predict
from pipelines.corpus.labelled import LabelledConfig
from pipelines.evaluate import EvaluateConfig
from pipelines.finetune import FinetuneConfig
from pipelines.predict import PredictConfig

TYPES = {"file": "thing", "list": "thing", "bytes": "thing", "Open": "verb", "Close": "verb"}
LINES = [
    "Open the file", "Close a list bytes", "Return the bytes", "Open Close the list",
    "Raise an error", "Return a file list", "Open a file and close it", "Parse all bytes",
]  # fmt: skip


def entities(words: list[str]) -> list[Entity]:
    """Each word of `TYPES` is one of its own, but for `list bytes`, which are one."""
    found: list[Entity] = []
    for place, word in enumerate(words):
        if word in TYPES:
            joined = place and (words[place - 1], word) == ("list", "bytes")
            first = found.pop().first if joined else place
            found.append(Entity(TYPES[word], first, place + 1))
    return found


def written(path: Path, scheme: Scheme, lines: list[str] = LINES) -> LabelledConfig:
    """The lines as CoNLL writes them."""
    rows = [(words := line.split(), tags_of(entities(words), len(words), scheme)) for line in lines]
    path.write_text(
        "-DOCSTART- -X- O\n\n"
        + "\n".join("".join(map("{} x {}\n".format, words, tags)) for words, tags in rows)
    )
    return LabelledConfig(source=str(path), format="conll")


def tuning(pretrained: Any, folder: Path, train: LabelledConfig) -> FinetuneConfig:
    return replace(
        pretrained.finetune(folder),
        task="token-classification", train=train, held_out=None, rows_per_class=None, seeds=(0,),
        epochs=2.0, batch_size=4,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tagger(prepared: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose random weights find entities in every line."""
    from tests import tiny

    folder = tmp_path_factory.mktemp("tagger")
    tokenizer = Tokenizer.load(prepared.folder / "vocab")
    options = TokenClassificationOptions(entities=True, scheme="IOB1")
    task = TokenClassification(["B-thing", "B-verb", "I-thing", "I-verb", "O"], options=options)
    return tiny.bundle(folder / "bundle", tokenizer, task=task)


def test_training_does_not_depend_on_the_scheme_of_a_file(
    pretrained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from bert_core.bundle.format import load_bundle

    found = []
    for scheme, other in zip(SCHEMES[::2], SCHEMES[1::2], strict=True):
        train = written(tmp_path / f"{scheme}.train", scheme)
        held_out = written(tmp_path / f"{scheme}.dev", other)
        config = replace(tuning(pretrained, tmp_path / scheme, train), held_out=held_out)
        counts = finetune.run(config).counts
        assert (counts["train_tag_scheme"], counts["held_out_tag_scheme"]) == (scheme, other)
        assert counts["train_tags_that_break_their_scheme"] == 0
        told = capsys.readouterr().out
        assert f"finetune: tag scheme: {scheme} in {train.source} (train)" in told
        assert f"finetune: tag scheme: {other} in {held_out.source} (held_out)" in told
        assert "break" not in told
        bundle = load_bundle(tmp_path / scheme / "bundle")
        assert bundle.task is not None
        assert bundle.task.labels == ["B-thing", "B-verb", "I-thing", "I-verb", "O"]
        assert bundle.task.record["options"]["scheme"] == scheme
        metrics = [counts[name] for name in ("f1_mean", "precision_mean", "recall_mean")]
        found.append([*metrics, *(each.sum().item() for each in bundle.state.values())])
    assert found[0] == found[1]


def test_a_file_is_scored_alike_in_every_scheme_whatever_the_model_learned_from(
    tagger: Path, prepared: Any, tmp_path: Path
) -> None:
    found = []
    for scheme in SCHEMES:
        config = EvaluateConfig(
            output=str(tmp_path / scheme), model=str(tagger), num_workers=0,
            held_out=written(tmp_path / f"{scheme}.dev", scheme),
            tracking_uri=prepared.tracking_uri,
        )  # fmt: skip
        counts = evaluate.run(config).counts
        assert (counts["tag_scheme"], counts["tags_that_break_their_scheme"]) == (scheme, 0)
        names = ("f1", "precision", "recall", "surface_f1", "text_f1", "text_recall")
        found.append({name: counts[name] for name in names})
        assert (counts["text_f1"], counts["baseline_text_f1"]) == (counts["f1"], 0.0)  # plain words
    assert found == [found[0]] * len(SCHEMES)
    assert 0 < found[0]["f1"] < 1


def test_a_type_without_training_rows_is_reported_but_does_not_end_the_run(
    pretrained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = written(tmp_path / "train.conll", "BIO")
    (tmp_path / "dev.conll").write_text("Open B-verb\nit I-verb\nSocket B-place\nnow I-place\n")
    held_out = LabelledConfig(source=str(tmp_path / "dev.conll"), format="conll")
    config = replace(tuning(pretrained, tmp_path / "finetune", train), held_out=held_out)
    counts = finetune.run(config).counts
    assert counts["held_out_words_with_unknown_tags"] == 2
    assert counts["train_words_with_unknown_tags"] == 0
    assert counts["recall_mean"] <= 0.5
    told = capsys.readouterr().out
    assert f"finetune: 2 words with unknown tags in {held_out.source} (held_out)" in told
    assert f"finetune: unknown tags: place in {held_out.source} (held_out)" in told
    evaluation = EvaluateConfig(
        output=str(tmp_path / "evaluate"), model=str(tmp_path / "finetune" / "bundle"),
        held_out=held_out, num_workers=0, tracking_uri=pretrained.tracking_uri,
    )  # fmt: skip
    measured = evaluate.run(evaluation).counts
    assert measured["words_with_unknown_tags"] == 2
    assert measured["recall"] <= 0.5
    assert f"evaluate: unknown tags: place in {held_out.source}" in capsys.readouterr().out


def predicted(tagger: Path, folder: Path, uri: str, parameters: dict[str, Any]) -> list[Any]:
    folder.mkdir()
    (folder / "lines.txt").write_text("\n".join(LINES))
    config = PredictConfig(
        output=str(folder / "predict"), model=str(tagger), source=str(folder / "lines.txt"),
        parameters=parameters, num_workers=0, tracking_uri=uri,
    )  # fmt: skip
    predict.run(config)
    rows = (folder / "predict" / "rows" / "part-00000.jsonl").read_text().splitlines()
    return [json.loads(row)["answer"] for row in rows]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_predict_writes_tags_in_the_scheme_that_is_asked_for(
    scheme: Scheme, tagger: Path, prepared: Any, tmp_path: Path
) -> None:
    uri = prepared.tracking_uri
    groups = predicted(tagger, tmp_path / "groups", uri, {})
    asked: dict[str, Any] = {"scheme": scheme, "ignore_labels": []}
    tagged = predicted(tagger, tmp_path / "tags", uri, asked)
    assert sum(map(len, groups)) > len(LINES)
    for line, its, words in zip(LINES, groups, tagged, strict=True):
        assert [one["word"] for one in words] == line.split()
        tags = [one["entity"] for one in words]
        assert tags == tags_of(entities_of(tags), len(tags), scheme)
        assert [(one["entity_group"], one["word"]) for one in its] == [
            (one.type, " ".join(line.split()[one.first : one.end])) for one in entities_of(tags)
        ]
