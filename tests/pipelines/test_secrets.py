"""What is secret in an address is shown nowhere, whatever is wrong with what is there."""

import json
from copy import copy
from pathlib import Path

import pytest

from bert_core import errors
from bert_core.errors import RaybertError
from bert_core.wording import without_secrets
from pipelines import cli
from pipelines.runtime.progress import say

PLACE = "http://reader:pass@word@127.0.0.1:9/texts.txt?signature=hush&expires=12:30"
SHOWN = "http://127.0.0.1:9/texts.txt"
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type)]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"{PLACE}: wanted a file", f"{SHOWN}: wanted a file"),
        (f"see {PLACE}.", f"see {SHOWN}."),
        (f'{{"a": "{PLACE}", "b": 1}}', f'{{"a": "{SHOWN}", "b": 1}}'),
        (f"({PLACE}), {PLACE}; and", f"({SHOWN}), {SHOWN}; and"),
        ("s3://key:secret@bucket/a: no", "s3://bucket/a: no"),
        (
            "http://127.0.0.1:5000/#/runs/1?view=a: open it",
            "http://127.0.0.1:5000/#/runs/1?view=a: open it",
        ),
        ("az://container@account/a", "az://container@account/a"),
        ("models:/x@champion and me@there.example?", "models:/x@champion and me@there.example?"),
    ],
)
def test_an_address_is_shown_without_its_secrets(text: str, shown: str) -> None:
    assert without_secrets(text) == shown


@pytest.mark.parametrize("kind", [kind for kind in KINDS if issubclass(kind, RaybertError)])
def test_no_error_shows_it(kind: type[RaybertError]) -> None:
    texts = [f"{PLACE}: wanted a file", None][: 2 if kind is errors.TooLongError else 1]
    error = kind(*texts)  # type: ignore[arg-type]
    assert str(error).startswith(f"{SHOWN}: wanted a file")
    assert str(copy(error)) == str(error)
    assert "hush" not in repr(error)


def test_no_line_of_a_stage_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"reading {PLACE}")
    assert capsys.readouterr().out == f"reading {SHOWN}\n"


@pytest.mark.parametrize(
    "command",
    [
        ["vocab", "--corpus.source", PLACE],
        ["prepare", "--tokenizer", "t", "--corpus.source", PLACE],
        ["prepare", "--tokenizer", PLACE],
        ["pretrain", "--tokenizer", "t", "--shards", PLACE],
        ["finetune", "--model", PLACE, "--train.source", "a.csv"],
        ["evaluate", "--model", PLACE, "--held_out.source", "a.csv"],
        ["predict", "--model", "m", "--source", PLACE],
        ["publish", "--model", PLACE, "--evaluation", PLACE, "--name", "a"],
    ],
)
def test_no_command_shows_it(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYBERT_STORAGE_RETRY_S", "0")
    with pytest.raises(SystemExit):
        cli.main([*command, "--output", f"{tmp_path}/o", "--num_workers", "0"])
    told = json.dumps(capsys.readouterr())
    assert "raybert" in told
    assert not any(secret in told for secret in ("pass", "word@", "hush"))
