"""The functions of the package `raybert`: they take what the commands of the same names take."""

import inspect
import os
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raybert
from bert_core.errors import ConfigError
from bert_core.manifest import Manifest, read_manifest
from bert_core.tasks.fill_mask import FillMask
from pipelines.configure import STAGES, config_class, parse
from pipelines.corpus.labelled import LabelledConfig
from raybert.fields import configured
from site_builder import stubs
from tests import tiny
from tests.waiting import wait_until

NOTHING = Manifest(stage="", digest="", config={})
NEEDED: dict[str, Any] = {
    "model": "runs/pretrain",
    "task": "text-classification",
    "output": "runs/tuned",
    "train": "rows.csv",
}
"""The fields without which there is no fine-tuning."""


def test_a_stage_says_what_it_wrote_and_skips_what_is_complete(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"the {word} is here\n\n" for word in tiny.WORDS))
    settings: dict[str, Any] = {
        "corpus": text,
        "vocab_size": np.int64(100),
        "output": tmp_path / "vocab",
        "num_workers": 0,
        "tracking_uri": f"sqlite:///{tmp_path}/mlflow.db",
    }
    made = raybert.vocab(**settings)
    assert made.folder == str(tmp_path / "vocab")
    assert made.manifest == read_manifest(made.folder)
    assert made.metrics["documents"] == len(tiny.WORDS)
    assert str(made) == f"{made.folder}: {made.manifest.sentence}"
    assert raybert.vocab(**settings) == made  # it was complete


def test_a_model_is_loaded_from_the_output_of_a_stage(tmp_path: Path) -> None:
    bundle = tiny.bundle(tmp_path / "out" / "bundle", tiny.tokenizer(), task=FillMask())
    tuned = raybert.Outcome(folder=str(tmp_path / "out"), manifest=NOTHING)
    answers = raybert.load(tuned, threads=1).predict(["the [MASK]"])
    assert answers == raybert.load(bundle).predict(["the [MASK]"])
    with pytest.raises(ConfigError, match="nowhere"):
        raybert.load(tmp_path / "nowhere")


def test_every_stage_is_a_function_with_the_fields_of_its_config() -> None:
    for word in STAGES:
        function = getattr(raybert, word)
        parameters = inspect.signature(function).parameters
        named = [field.name for field in fields(config_class(word))]
        assert {*parameters} == {"config", *named}
        assert next(iter(parameters)) != "config", word  # what must be given comes first
        lines = (inspect.getdoc(function) or "").splitlines()
        for name in named:
            (line,) = [line for line in lines if line.startswith(f"    {name}: ")]
            assert len(line) > len(name) + 10
    # A type checker knows them too.
    with pytest.raises(ConfigError, match=r"epoch: wanted a field .* \(did you mean epochs\?\)"):
        raybert.finetune(epoch=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="output: wanted a value, got none"):
        raybert.finetune(model="runs/pretrain", task="text-classification", train="rows.csv")


def test_the_signatures_for_type_checkers_are_those_of_the_configs() -> None:
    told = "run `python -m site_builder.stubs`"
    assert stubs.STUB.read_text(encoding="utf-8") == stubs.stub(), told


def test_values_may_be_what_python_has_for_them(tmp_path: Path) -> None:
    columns: Any = {"text": "body"}
    given = LabelledConfig(source="rows.csv", columns=columns)
    command = [
        *("--model", "runs/pretrain", "--task", "text-classification"),
        *("--output", "runs/tuned", "--train.source", "rows.csv"),
    ]
    with_columns = parse("finetune", [*command, "--train.columns", '{"text": "body"}'])
    assert configured("finetune", None, NEEDED) == parse("finetune", command)
    train: Any
    for train in (given, {"source": Path("rows.csv"), "columns": columns}):
        assert configured("finetune", None, NEEDED | {"train": train}) == with_columns
    tuned = raybert.Outcome(folder="runs/pretrain", manifest=NOTHING)
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"model": tuned}, []),
        ({"seeds": (0, 1)}, ["--seeds", "0,1"]),
        ({"seeds": np.arange(2)}, ["--seeds", "0,1"]),
        ({"force": True, "epochs": np.float32(1.5)}, ["--force", "--epochs", "1.5"]),
        ({"num_workers": [1, 2]}, ["--num_workers", "1,2"]),
        ({"rows_per_class": None}, []),
        ({"options": {"threshold": 0.25}}, ["--options", '{"threshold": 0.25}']),
    ]
    for values, options in cases:
        expected = parse("finetune", [*command, *options])
        assert configured("finetune", None, NEEDED | values) == expected
    file = tmp_path / "mine.toml"
    file.write_text('epochs = 9\nmodel = "another"\n')
    assert configured("finetune", file, NEEDED) == parse("finetune", [*command, "--epochs", "9"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochs": "three"}, "epochs: wanted a number, got three"),
        ({"epochs": -1}, "epochs: wanted above 0 and finite, got -1.0"),
        ({"train": {"sorce": "x"}}, r"train.sorce: wanted a field .*did you mean train.source"),
        ({"model": object()}, "model: wanted text, a number, a path, .*, got object"),
        ({"train": {"source": b"rows"}}, "train.source: wanted text, a number, .* got bytes"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:12],
)
def test_a_value_that_cannot_be_right_is_refused_as_in_the_command(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        raybert.finetune(**(NEEDED | values))


def test_a_server_on_a_cluster_is_left_to_the_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"status: wanted none, .* give it to `raybert serve`"):
        raybert.serve({"a": tmp_path}, status=True)
    with pytest.raises(ConfigError, match=r"num_replica: .*did you mean num_replicas"):
        raybert.serve({"a": tmp_path}, num_replica=2)


def test_a_command_ends_when_nothing_can_write_to_its_input_any_more() -> None:
    code = "import time; from raybert.attached import end_with_input; end_with_input(0); print(1)"
    command = [sys.executable, "-c", f"{code}; time.sleep(60)"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(20) == -signal.SIGTERM


@pytest.mark.ray
@pytest.mark.drill
def test_a_server_answers_and_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    import httpx
    import psutil

    bundle = tiny.bundle(tmp_path / "bundle", tiny.tokenizer(), task=FillMask())
    code = (
        f"import raybert, time; server = raybert.serve({{'a': {str(bundle)!r}}}); "
        "print(server.url, server.process.pid, flush=True); time.sleep(600)"
    )
    environment = {name: value for name, value in os.environ.items() if name[:3] != "RAY"}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        url, pid = process.stdout.readline().split()
        body = {"inputs": ["the [MASK]"]}
        assert httpx.post(f"{url}/v1/models/a", json=body, timeout=30).status_code == 200
        family = [psutil.Process(int(pid)), *psutil.Process(int(pid)).children(recursive=True)]
        process.kill()
    wait_until("the server has ended", lambda: psutil.wait_procs(family, 0)[1] == [], timeout_s=60)
