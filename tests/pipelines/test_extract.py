"""Documents to records: one each, in order, with characters that are where they are said to be."""

import hashlib
import json
import random
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bert_core.errors import ConfigError, CorpusError, FormatError
from bert_core.tasks.base import Task
from bert_core.tasks.question_answering import (
    QuestionAnswering,
    QuestionAnsweringOptions,
    QuestionAnsweringParameters,
)
from bert_core.tasks.token_classification import TokenClassification, TokenClassificationOptions
from pipelines import extract
from pipelines.extract import ExtractConfig, ReaderConfig, TaggerConfig
from tests.pipelines.interruption import run_interrupted

WORDS = ["the", "sea", "is", "blue", "tree", "anna", "rome", "when", "?", "."]
TASKS: dict[str, Task] = {
    "tagger": TokenClassification(
        ["B-person", "B-place", "I-person", "I-place", "O"],
        TokenClassificationOptions(label_parts=True, inner_marks="."),  # as training makes it
    ),
    "reader": QuestionAnswering(options=QuestionAnsweringOptions(no_answer=True, doc_stride=4)),
}
_RNG = random.Random(0)
# Of one word to several windows' length.
TEXTS = [" ".join(_RNG.choices(WORDS, k=1 + 3 * n)).capitalize() for n in range(30)]
# Words of several parts.
TEXTS += [f"The {a}.{b} is blue ." for a in ("anna", "rome") for b in ("rome", "sea", "tree")]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    from tests import tiny

    folder, words = tmp_path_factory.mktemp("bundles"), tiny.tokenizer(WORDS)
    encoder = tiny.encoder_config(
        words.vocab_size, max_position_embeddings=32, initializer_range=0.5
    )
    for seed, (name, task) in enumerate(TASKS.items()):
        tiny.bundle(folder / name, words, encoder, task=task, seed=seed)
    return {name: str(folder / name) for name in TASKS}


@pytest.fixture
def config(bundles: dict[str, str], tmp_path: Path) -> ExtractConfig:
    return ExtractConfig(
        output=str(tmp_path / "out"),
        source=str(tmp_path / "documents.jsonl"),
        tagger=TaggerConfig(
            model=bundles["tagger"], fields={"people": "person", "places": "place"}
        ),
        reader=ReaderConfig(
            model=bundles["reader"], fields={"when": "When ?", "colour": "the sea is ?"}
        ),
        part_bytes=700,
        num_workers=0,
        tracking_uri=f"sqlite:///{tmp_path}/mlflow.db",
    )


@pytest.fixture
def documents(config: ExtractConfig) -> None:
    rows = [{"text": text, "id": n, "other": [n]} for n, text in enumerate(TEXTS)]
    Path(str(config.source)).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def records_of(config: ExtractConfig) -> list[dict[str, Any]]:
    text = Path(config.output, "records.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_documents_may_be_rows_of_a_table_of_text(config: ExtractConfig, tmp_path: Path) -> None:
    rows = "".join(f'{n or ""},"{text}\n{text}"\n' for n, text in enumerate(TEXTS))
    (tmp_path / "documents.csv").write_text(f"id,text\n{rows}")
    config = replace(config, source=str(tmp_path / "documents.csv"), keep_text=True)
    assert extract.run(config).counts["parts"] > 3
    records = records_of(config)
    assert [record["text"] for record in records] == [f"{text}\n{text}" for text in TEXTS]
    digest = hashlib.sha256(f"{TEXTS[0]}\n{TEXTS[0]}".encode()).hexdigest()
    assert [record["id"] for record in records] == [digest, *map(str, range(1, len(TEXTS)))]


def near(found: Mapping[str, Any] | None, wanted: Mapping[str, Any] | None) -> bool:
    """Whether both are one span; scores differ in their last digits by what was asked with it."""
    if found is None or wanted is None:
        return found is wanted
    same = all(found[name] == wanted[name] for name in ("text", "start", "end"))
    return same and found["score"] == pytest.approx(wanted["score"], abs=1e-5)


@pytest.mark.usefixtures("documents")
def test_a_record_a_document_in_order_says_what_the_models_say(
    config: ExtractConfig, bundles: dict[str, str]
) -> None:
    from bert_core.inference.predictor import Predictor

    counts = extract.run(replace(config, keep_text=True)).counts
    assert counts["parts"] > 3
    assert (counts["rows"], counts["rejected"]) == (len(TEXTS), 0)
    tagger, reader = (Predictor(bundles[name], device="cpu") for name in TASKS)
    records = records_of(config)
    assert [record["id"] for record in records] == list(range(len(TEXTS)))
    assert not Path(config.output, "rows").exists()
    found = {"people": 0, "places": 0, "when": 0, "colour": 0}
    for text, record in zip(TEXTS, records, strict=True):
        assert list(record) == ["id", "text", "people", "places", "when", "colour"]
        assert record["text"] == text
        (entities,) = tagger.predict([text])
        for name, kind in (("people", "person"), ("places", "place")):
            of_kind = [one for one in entities if one["entity_group"] == kind]
            assert len(record[name]) == len(of_kind)
            for ours, one in zip(record[name], of_kind, strict=True):
                assert near(ours, one | {"text": one["word"]})
                assert text[ours["start"] : ours["end"]] == ours["text"]
                assert not re.search(r"\w\.$", text[: ours["start"]]), "a word is never cut"
                assert not re.match(r"\.\w", text[ours["end"] :]), "a word is never cut"
            found[name] += len(of_kind)
        for name, question in (("when", "When ?"), ("colour", "the sea is ?")):
            (answer,) = reader.predict([{"question": question, "context": text}])
            wanted = answer | {"text": answer["answer"]} if answer["answer"] else None
            assert near(record[name], wanted)
            found[name] += wanted is not None
    assert all(found[name] > 0 for name in found)
    assert any(record["when"] is None or record["colour"] is None for record in records)
    assert {f"{name}_found": count for name, count in found.items()}.items() <= counts.items()


@pytest.mark.usefixtures("documents")
def test_a_minimum_score_leaves_out_less_certain_answers(config: ExtractConfig) -> None:
    assert config.tagger is not None
    assert config.reader is not None
    extract.run(config)
    every = records_of(config)
    scores = sorted(one["score"] for record in every for one in record["people"])
    answers = sorted(record["when"]["score"] for record in every if record["when"])
    half, middle = scores[len(scores) // 2], answers[len(answers) // 2]
    sure = replace(
        config,
        output=f"{config.output}-sure",
        tagger=replace(config.tagger, least_score=half),
        reader=replace(config.reader, least_score=middle),
    )
    extract.run(sure)
    for all_of_it, record in zip(every, records_of(sure), strict=True):
        kept = [one for one in all_of_it["people"] if one["score"] >= half]
        assert record["people"] == kept
        answer = all_of_it["when"]
        assert record["when"] == (answer if answer and answer["score"] >= middle else None)
    assert len(scores) > sum(len(record["people"]) for record in records_of(sure)) > 0


@pytest.mark.usefixtures("documents", "forked")
def test_workers_and_tables_change_nothing(config: ExtractConfig, tmp_path: Path) -> None:
    extract.run(config)
    pq.write_table(
        pa.table({"id": range(len(TEXTS)), "body": TEXTS}), tmp_path / "t.parquet", row_group_size=7
    )
    tables = replace(
        config,
        output=str(tmp_path / "tables"),
        source=str(tmp_path / "t.parquet"),
        columns={"text": "body"},
        num_workers=2,
    )
    extract.run(tables)
    for record, other in zip(records_of(config), records_of(tables), strict=True):
        assert record["id"] == other["id"]
        assert all(map(near, record["people"], other["people"]))
        assert near(record["when"], other["when"])


@pytest.mark.parametrize("boundary", ["blank_line", "line", "file", "heading"])
def test_a_text_file_is_divided_as_it_is_said(
    config: ExtractConfig, tmp_path: Path, boundary: Any
) -> None:
    texts = ["# Anna is the sea.\nRome é.", "## Rome\nblue tree"]
    (tmp_path / "a.txt").write_text("\ufeff" + "\n\n".join(texts) + "\n", encoding="utf-8")
    wanted = {"line": [line for text in texts for line in text.splitlines()]}
    wanted |= {"file": ["\n\n".join(texts)]}
    config = replace(
        config,
        source=str(tmp_path / "a.txt"),
        document_boundary=boundary,
        keep_text=True,
        part_bytes=1_000_000,
    )
    extract.run(config)
    records = records_of(config)
    assert [record["text"] for record in records] == wanted.get(boundary, texts)
    for record in records:
        assert record["id"] == hashlib.sha256(record["text"].encode()).hexdigest()
        for one in record["people"] + record["places"]:
            assert record["text"][one["start"] : one["end"]] == one["text"]


@pytest.mark.usefixtures("documents")
def test_a_killed_run_makes_only_what_is_missing(
    config: ExtractConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_interrupted(extract, config, parts=2)
    first = {path: path.stat().st_mtime_ns for path in Path(config.output, "parts").iterdir()}
    assert len(first) == 2

    def killed_again(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # after the parts were joined, before the manifest
        patch.setattr(extract, "replace", killed_again)
        with pytest.raises(KeyboardInterrupt):
            extract.run(config)
    assert not Path(config.output, "rows").exists()
    assert extract.run(config).counts["rows"] == len(TEXTS)
    assert all(path.stat().st_mtime_ns == written for path, written in first.items())
    whole = replace(config, output=f"{config.output}-whole")
    assert extract.run(whole).outputs == extract.run(config).outputs


def test_unreadable_documents_are_set_aside(config: ExtractConfig) -> None:
    lines = [
        b'{"text": "anna", "id": "a"}',
        b'{"text": null}',
        b"not json",
        b'{"body": "x"}',
        b'{"text": "rome", "id": 1.5}',
        b'{"text": ""}',
        b'{"text": "\xff"}',
        b'{"text": "the tree", "id": null}',
    ]
    Path(str(config.source)).write_bytes(b"\xef\xbb\xbf\n" + b"\n".join(lines))
    counts = extract.run(replace(config, part_bytes=1_000_000)).counts
    assert (counts["rows"], counts["rejected"]) == (3, 5)
    assert (counts["rejected_unreadable"], counts["rejected_without_the_input"]) == (2, 3)
    empty = hashlib.sha256(b"").hexdigest()
    first, second, third = records_of(config)
    assert (first["id"], second["id"]) == ("a", empty)
    assert (second["people"], second["when"]) == ([], None)
    assert third["id"] == hashlib.sha256(b"the tree").hexdigest()
    aside = Path(config.output, "rejected", "part-00000.jsonl").read_text().splitlines()
    reasons = [json.loads(line)["reason"] for line in aside]
    assert "row.text: wanted text, got nothing" in reasons


@pytest.mark.usefixtures("documents")
def test_either_model_may_be_left_out(config: ExtractConfig) -> None:
    tags = replace(config, reader=None)
    extract.run(tags)
    assert {tuple(record) for record in records_of(tags)} == {("id", "people", "places")}
    answers = replace(config, tagger=None, output=f"{config.output}-answers")
    extract.run(answers)
    assert {tuple(record) for record in records_of(answers)} == {("id", "when", "colour")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"tagger": None, "reader": None},
            "tagger, reader: wanted a model in at least one of them",
        ),
        ({"reader": {"fields": {}}}, "reader.fields: wanted at least one, .* got none"),
        (
            {"reader": {"fields": {"people": "Who?"}}},
            "reader.fields: wanted unique names, got 'people', which is already in tagger.fields",
        ),
        ({"tagger": {"fields": {"id": "person"}}}, "got 'id', which is already in every record"),
        ({"tagger": {"least_score": 1.5}}, "tagger.least_score: wanted 0 to 1, got 1.5"),
        ({"part_bytes": 0}, "part_bytes: wanted at least 1, got 0"),
    ],
)
def test_impossible_settings_are_refused(
    config: ExtractConfig, change: dict[str, Any], message: str
) -> None:
    changed = {
        name: replace(getattr(config, name), **value) if isinstance(value, dict) else value
        for name, value in change.items()
    }
    with pytest.raises(ConfigError, match=message):
        replace(config, **changed)


@pytest.mark.usefixtures("documents")
def test_unknown_types_tasks_and_columns_are_refused(
    config: ExtractConfig, bundles: dict[str, str], tmp_path: Path
) -> None:
    assert config.tagger is not None
    wrong = replace(config.tagger, fields={"people": "per"})
    with pytest.raises(
        ConfigError, match=r"tagger.fields.people: wanted one of person, place, .* got 'per'"
    ):
        extract.run(replace(config, tagger=wrong))
    swapped = replace(config.tagger, model=bundles["reader"])
    with pytest.raises(
        FormatError, match="wanted a bundle for token-classification, this one is for question"
    ):
        extract.run(replace(config, tagger=swapped))
    with pytest.raises(ConfigError, match="columns: wanted names of the fields text, id, got body"):
        extract.run(replace(config, columns={"body": "text"}))
    pq.write_table(pa.table({"body": TEXTS}), tmp_path / "t.parquet")
    with pytest.raises(CorpusError, match="wanted a column 'text', there are: body: map it with"):
        extract.run(replace(config, source=str(tmp_path / "t.parquet")))


def test_a_document_of_many_thousand_words_is_read_to_its_end(config: ExtractConfig) -> None:
    text = " ".join(random.Random(1).choices(WORDS, k=12_000))
    Path(str(config.source)).write_text(json.dumps({"text": text}))
    assert config.reader is not None
    one = replace(config.reader, fields={"when": "When ?"})
    extract.run(replace(config, reader=one))
    (record,) = records_of(config)
    assert record["people"][-1]["start"] > len(text) * 0.99
    assert all(text[one["start"] : one["end"]] == one["text"] for one in record["places"])
    assert QuestionAnsweringParameters().max_answer_len >= len(
        (record["when"] or {"text": ""})["text"].split()
    )
