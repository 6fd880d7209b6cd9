"""From an annotation tool's export to a served model that is asked, by the commands of
docs/guides/annotate.md, with a tiny encoder in place of a published one."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from bert_core.data.tokenizer import Tokenizer
from bert_core.data.vocabulary import train_vocabulary
from bert_core.manifest import read_manifest
from pipelines import cli
from tests import tiny
from tests.serve import live
from tracking.store.server import connect

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "annotate.md"
COMMAND = re.compile(r"^```text\n(raybert finetune .*?)^```$", re.MULTILINE | re.DOTALL)
SMALL = ("--max_length=24", "--batch_size=4", "--epochs=12", "--lr=4e-3", "--precision=fp32",
    "--num_workers=0", "--selection.share=0")  # fmt: skip
PEOPLE, PLACES = ("Ada", "Bob", "Cy"), ("Rome", "Oslo", "Lima", "Kiev")
PAIRS = [(person, place) for person in PEOPLE for place in PLACES]
TEXTS = [f"{person} lives in {place}." for person, place in PAIRS]


def spans(number: int) -> list[dict[str, Any]]:
    person, place = PAIRS[number]
    start = TEXTS[number].index(place)
    return [
        {"start": 0, "end": len(person), "label": "person", "text": person},
        {"start": start, "end": start + len(place), "label": "place", "text": place},
    ]


def jsonl(folder: Path, name: str, rows: list[Any]) -> None:
    (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def label_studio(folder: Path) -> None:
    tasks = []
    for number, text in enumerate(TEXTS):
        results = [
            {"type": "labels", "from_name": "ner", "to_name": "text", "value":
                {"start": one["start"], "end": one["end"], "text": one["text"],
                 "labels": [one["label"]]}}
            for one in spans(number)
        ]  # fmt: skip
        done = {"completed_by": 1, "was_cancelled": False, "result": results}
        skipped = {"completed_by": 2, "was_cancelled": True, "result": []}
        tasks.append({"id": number, "data": {"text": text}, "annotations": [done, skipped]})
    (folder / "project.json").write_text(json.dumps(tasks))


def doccano(folder: Path) -> None:
    rows = [
        {"id": n, "text": text, "label": [[s["start"], s["end"], s["label"]] for s in spans(n)]}
        for n, text in enumerate(TEXTS)
    ]
    jsonl(folder, "admin.jsonl", rows)


def prodigy(folder: Path) -> None:
    """Rows about one label, of which those about Oslo and Lima are rejected, and one is ignored."""
    rows = [
        {"text": text, "label": "SOUTH", "_task_hash": n, "_input_hash": n, "_view_id": "textcat",
         "answer": "accept" if PAIRS[n][1] in ("Rome", "Lima") else "reject"}
        for n, text in enumerate(TEXTS)
    ]  # fmt: skip
    jsonl(folder, "names.jsonl", [*rows, rows[0] | {"answer": "ignore"}])


def brat(folder: Path) -> None:
    (folder / "collection").mkdir()
    for number, text in enumerate(TEXTS):
        (folder / "collection" / f"{number}.txt").write_text(text)
        lines = [
            f"T{n}\t{one['label']} {one['start']} {one['end']}\t{one['text']}\n"
            for n, one in enumerate([*spans(number), spans(number)[1] | {"label": "inner"}])
        ]
        lines[2] = f"T2\tinner {len(text) - 3} {len(text) - 1}\t{text[-3:-1]}\n"
        (folder / "collection" / f"{number}.ann").write_text("".join(lines))


def table(folder: Path) -> None:
    (folder / "emotions.txt").write_text("joy\nfear\nlove\n")
    numbers = {"Rome": "0,2", "Oslo": "1", "Lima": "0", "Kiev": "1,2"}
    rows = [f"{text}\t{numbers[place]}\tx\n" for text, (_, place) in zip(TEXTS, PAIRS, strict=True)]
    (folder / "train.tsv").write_text("".join(rows))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vocabulary = train_vocabulary(TEXTS, vocab_size=120, lowercase=True, min_frequency=1)
    tokenizer = Tokenizer.from_vocabulary(vocabulary, lowercase=True)
    connect(f"sqlite:///{tmp_path_factory.getbasetemp()}/first_hours.db").search_experiments()
    return tiny.bundle(tmp_path_factory.mktemp("encoder") / "bundle", tokenizer)


def command_under(heading: str) -> list[str]:
    """The words of the first command of a section of the guide."""
    section = GUIDE.read_text().partition(f"\n## {heading}\n")[2]
    match = COMMAND.search(section)
    assert match is not None
    return shlex.split(match[1].replace("\\\n", " "))


@pytest.mark.trained
@pytest.mark.parametrize(
    ("heading", "export", "told"),
    [
        ("Label Studio", label_studio, "project.json: left out 12 rows: 12 cancelled"),
        ("doccano", doccano, ""),
        ("Prodigy", prodigy, "names.jsonl: left out 1 row: 1 ignored"),
        ("brat", brat, "12 spans left out since they overlap"),
        ("A table with several labels in a cell", table, ""),
    ],
)
def test_an_export_becomes_a_served_model(
    heading: str,
    export: Callable[[Path], None],
    told: str,
    encoder: Path,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    export(tmp_path)
    monkeypatch.chdir(tmp_path)
    raybert, *arguments = command_under(heading)
    assert raybert == "raybert"
    arguments[arguments.index("--model") + 1] = str(encoder)
    uri = f"sqlite:///{tmp_path_factory.getbasetemp()}/first_hours.db"
    with pytest.raises(SystemExit) as ended:
        cli.main([*arguments, *SMALL, f"--tracking_uri={uri}"])
    assert ended.value.code == 0
    assert told in " ".join(capsys.readouterr().out.split())
    output = Path(arguments[arguments.index("--output") + 1])
    assert read_manifest(str(output)).counts["train_rows_left_out_as_bad"] == 0
    with live.served(output / "bundle") as url:
        answer = httpx.post(f"{url}/invocations", json={"inputs": [TEXTS[0]]}, timeout=30).json()
    [predicted] = answer["predictions"] if isinstance(answer, dict) else answer
    if "token-classification" in arguments:
        assert [(one["entity_group"], one["word"]) for one in predicted["entities"]] == [
            ("person", "Ada"),
            ("place", "Rome"),
        ]
        for one in predicted["entities"]:
            assert TEXTS[0][one["start"] : one["end"]] == one["word"]
    elif heading == "Prodigy":
        assert predicted["label"] == "SOUTH"
    else:
        assert sorted(predicted["labels"]) == ["joy", "love"]
