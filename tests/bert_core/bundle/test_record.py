"""The record of a bundle: its digest covers what decides an answer, and an edit is noticed."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from bert_core.bundle.format import bundle_digest, bundle_files, load_bundle
from bert_core.bundle.layout import digest_of
from bert_core.bundle.record import renew
from bert_core.errors import FormatError
from bert_core.inference.predictor import Predictor
from bert_core.tasks.feature_extraction import FeatureExtraction
from bert_core.tasks.text_classification import TextClassification
from tests import tiny

LABELS = ["land", "sea"]


def bundle(folder: Path, labels: list[str] = LABELS) -> Path:
    return tiny.bundle(folder, tiny.tokenizer(), task=TextClassification(labels))


def entries_of(folder: Path, name: str = "raybert.json") -> dict[str, Any]:
    return json.loads((folder / name).read_text())


def edit(folder: Path, changes: dict[str, Any], name: str = "raybert.json") -> None:
    (folder / name).write_text(json.dumps(entries_of(folder, name) | changes))


def as_before_version_2(folder: Path) -> str:
    """Make its record one of version 1. Returns its digest then: sha256 over the names and sha256
    of the files (docs/formats.md at version 0.2.0)."""
    entries = entries_of(folder)
    del entries["digest"]
    (folder / "raybert.json").write_text(json.dumps(entries | {"format_version": 1}))
    return digest_of(entries["files"])


def follow_the_way_out(folder: Path, error: FormatError) -> None:
    """Run the program that a message ends with."""
    command = str(error).partition("as another model, with ")[2]
    python, flag, program = shlex.split(command)
    assert (python, flag) == ("python", "-c")
    exec(program, {})


EDITS: dict[str, dict[str, Any]] = {
    "task": {"task": "text-ranking"},
    "labels": {"labels": LABELS[::-1]},
    "options": {"options": {"multi_label": True}},
    "runs": {"runs": [{"engine": "torch", "precision": "fp32"}]},
    "files": {"files": {"config.json": "0", "model.safetensors": "0"}},
    "digest": {"digest": "0" * 64},
}


@pytest.mark.parametrize("changes", EDITS.values(), ids=EDITS)
def test_an_edit_of_what_decides_an_answer_is_refused(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = bundle(tmp_path / "bundle")
    edit(folder, changes)
    for read in (load_bundle, bundle_digest, bundle_files):
        with pytest.raises(FormatError, match=r"raybert.json: wanted the digest .* it was edited"):
            read(folder)


def test_the_way_out_of_an_edited_record_makes_it_another_model(tmp_path: Path) -> None:
    folder, whole = bundle(tmp_path / "it's a bundle"), bundle(tmp_path / "whole")
    edit(folder, {"labels": LABELS[::-1]})
    with pytest.raises(FormatError) as caught:
        load_bundle(folder)
    follow_the_way_out(folder, caught.value)
    assert bundle_digest(folder) == bundle_digest(bundle(tmp_path / "new", LABELS[::-1]))
    assert bundle_digest(folder) != bundle_digest(whole)
    assert entries_of(folder, "config.json")["id2label"] == {"0": "sea", "1": "land"}
    (mine,), (theirs,) = (Predictor(each).predict(["the sea"]) for each in (folder, whole))
    assert [each["score"] for each in mine] == [each["score"] for each in theirs]
    assert [each["label"] for each in mine] == [each["label"] for each in theirs][::-1]


def test_labels_edited_in_the_config_go_into_the_record(tmp_path: Path) -> None:
    folder = bundle(tmp_path / "bundle")
    edit(folder, {"id2label": {"0": "sea", "1": "land"}}, "config.json")
    with pytest.raises(FormatError, match=r"config.json: wanted sha256") as caught:
        load_bundle(folder)
    follow_the_way_out(folder, caught.value)
    task = load_bundle(folder).task
    assert task is not None
    assert task.labels == ["sea", "land"]
    edit(folder, {"id2label": {"0": "a", "1": "b"}}, "config.json")
    edit(folder, {"labels": ["c", "d"]})
    with pytest.raises(FormatError, match=r'both of which were edited, got \["c", "d"\] and'):
        renew(folder)


def test_fields_that_decide_no_answer_may_be_edited(tmp_path: Path) -> None:
    folder = bundle(tmp_path / "bundle")
    digest = bundle_digest(folder)
    edit(folder, {"examples": ["the sea"], "metrics": {"accuracy": 1.0}, "lineage": {}})
    assert bundle_digest(folder) == digest


def test_a_bundle_of_version_1_keeps_its_digest(tmp_path: Path) -> None:
    folder = bundle(tmp_path / "bundle")
    new = bundle_digest(folder)
    old = as_before_version_2(folder)
    assert load_bundle(folder).digest == bundle_digest(folder) == old != new
    assert renew(folder) == bundle_digest(folder) == new
    as_before_version_2(folder)
    edit(folder, {"labels": LABELS[::-1]})
    message = r'wanted the labels in config.json, \["land", "sea"\], got \["sea", "land"\]'
    with pytest.raises(FormatError, match=message) as caught:
        bundle_digest(folder)
    follow_the_way_out(folder, caught.value)
    assert bundle_digest(folder) not in (old, new)


def test_options_are_in_the_digest(tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [
        {}, {"max_length": 9}, {"normalize": True}, {"prompts": {"query": "sea "}}
    ]  # fmt: skip
    digests = {
        bundle_digest(
            tiny.bundle(
                tmp_path / str(number),
                tiny.tokenizer(),
                task=FeatureExtraction(options=FeatureExtraction.options(**each)),
            )
        )
        for number, each in enumerate(options)
    }
    assert len(digests) == len(options)


def test_a_file_that_the_record_does_not_name_does_not_count(tmp_path: Path) -> None:
    folder = bundle(tmp_path / "bundle")
    digest, answers = bundle_digest(folder), Predictor(folder).predict(["the sea"])
    ids = load_bundle(folder).tokenizer.ids(["sea [new]"])[0].tolist()
    (folder / "added_tokens.json").write_text('{"[new]": 11}')
    (folder / "vocab.txt").write_text("damaged")
    entries = entries_of(folder)
    del entries["files"]["vocab.txt"]
    (folder / "raybert.json").write_text(json.dumps(entries))
    renew(folder)
    objective = {"objectives.classification.head.linear.bias": load_bundle(folder).state[
        "objectives.classification.head.linear.bias"] + 1}  # fmt: skip
    save_file(objective, folder / "objective.safetensors")
    shutil.copytree(bundle(tmp_path / "other"), folder / "generator")
    read = load_bundle(folder)
    assert read.digest == bundle_digest(folder) != digest
    assert read.tokenizer.ids(["sea [new]"])[0].tolist() == ids
    assert read.submodels == {}
    assert Predictor(folder).predict(["the sea"]) == answers
    assert not re.search("added_tokens|objective|generator", " ".join(bundle_files(folder)))
