"""`raybert quickstart`: the whole pipeline on real text, stage by stage, as a user would run it.

Every stage is one of the commands that it prints, with a shipped config. Finished stages are
skipped; an interrupted one resumes.
"""

import importlib
import json
import os
import re
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bert_core.checks import Port, check_fields
from bert_core.errors import RaybertError
from bert_core.manifest import Manifest
from bert_core.wording import shortened
from pipelines.commands.report import attach, summary, write_report
from pipelines.commands.report_runs import runs_of
from pipelines.commands.server_process import ServerProcess
from pipelines.configure import CONFIGS, STAGES, parse
from pipelines.corpus import docstrings
from pipelines.corpus.config import DOCSTRINGS
from pipelines.corpus.labelled import LabelledConfig, labelled_rows
from pipelines.runtime import cluster
from pipelines.runtime.progress import console, say
from tracking.runs import metric_names as names
from tracking.runs.story import percent
from tracking.store.ports import free_port
from tracking.store.server import tracking_uri

NAME, SERVED = "docstrings", "quickstart"
"""Configs of the stages and of the server."""
FOLDER = "runs/quickstart"
FOLDERS = (
    "vocab", "shards", "pretrain", "finetune", "from_scratch", "embedding", "evaluate", "publish",
)  # fmt: skip
REPORT = "report.html"
MASKED = (
    "random_state : int, RandomState instance or None, [MASK]=None",
    "Parameters ---------- x : array_like Input [MASK]. Returns ------- out : ndarray",
)
QUERIES = (
    "Find the shortest path between two nodes of a graph.",
    "Compute the eigenvalues of a matrix.",
)
QUESTIONS, SHOWN = 5, 88
"""Docstrings to ask about, and characters of each to show."""
AT_ONCE = 32
"""Texts per request."""
Asked = tuple[str, list[tuple[str, str]]]
"""A question, and its answers, each after its score."""


@dataclass(frozen=True, kw_only=True)
class QuickstartConfig:
    """The whole pipeline, in minutes, on this machine."""

    force: bool = False
    """Run everything again."""
    port: Port = 8000
    """Port of the server to query; if it is in use, another one is taken."""
    allow_open_cluster: bool = False
    """Use a Ray cluster even if it requires no token, so that anyone who reaches its ports can run
    code there."""

    def __post_init__(self) -> None:
        check_fields(self)


def run(config: QuickstartConfig) -> None:
    """Run every stage, query the served model, and print the results."""
    began = time.monotonic()
    say("raybert quickstart: from the docstrings on this machine to a served answer\n")
    cluster.connect(allow_open_cluster=config.allow_open_cluster)
    done = dict(_stages(config))
    cluster.disconnect()  # the server is a separate process with its own Ray
    questions = _query(config)
    _report(done, questions, time.monotonic() - began)


def _stages(config: QuickstartConfig) -> Iterator[tuple[str, Manifest]]:
    _title(
        "corpus", "Reading the docstrings of the standard library and of raybert's dependencies."
    )
    yield "corpus", docstrings.corpus(force=config.force)
    _title("vocab", "Learning which pieces words are made of.")
    yield "vocab", _stage("vocab", config)
    _title("prepare", "Cutting the text into pairs of passages and hiding 30 % of the tokens.")
    yield "prepare", _stage("prepare", config)
    _title(
        "pretrain", "Teaching a small BERT to fill gaps and to tell if a passage follows another."
    )
    yield "pretrain", _stage("pretrain", config)
    _title("finetune", "Teaching it, with some labelled rows, which library a docstring is from.")
    yield "finetune", _stage("finetune", config)
    _title("finetune", "The same from random weights, to see what the pretraining was worth.")
    scratch = ["--from_scratch", "--output", f"{FOLDER}/from_scratch"]
    yield "from_scratch", _stage("finetune", config, *scratch)
    _title("finetune", "Teaching it which text a summary sums up, to find docstrings by meaning.")
    pairs = [("--train.source", "train"), ("--held_out.source", "held_out")]
    sources = [
        word for name, split in pairs for word in (name, _relative(docstrings.pairs_file(split)))
    ]
    yield "embedding", _stage("finetune", config, *sources, name="docstring_search")
    _title("evaluate", "Measuring it on modules that no stage has seen.")
    yield "evaluate", _stage("evaluate", config)
    _title("publish", "Registering it in MLflow; the alias `champion` marks what is served.")
    yield "publish", _stage("publish", config)


def _relative(path: str) -> str:
    """Return a relative path, so that the printed commands work elsewhere too."""
    return os.path.relpath(path)


def _title(stage: str, text: str) -> None:
    console.print(f"\n[bold]{stage}[/bold]  {text}")


def _stage(word: str, config: QuickstartConfig, *more: str, name: str = NAME) -> Manifest:
    path = CONFIGS / word / f"{name}.toml"
    arguments = ["--config", f"configs/{word}/{name}.toml", *more]
    say(f"$ raybert {word} {' '.join(arguments)}")
    arguments[1] = str(path)
    stage = importlib.import_module(STAGES[word].module)
    return stage.run(parse(word, [*arguments, *(["--force"] if config.force else [])]))


def _query(config: QuickstartConfig) -> list[Asked]:
    """Serve the models in a child process, as a user would, and ask them over HTTP."""
    _title("serve", "Starting the server and asking its three models over HTTP.")
    port = free_port(config.port)
    with _server(port) as server:
        address = server.url
        questions = [*_fill_masks(address), *_search(address), *_classify(address)]
    for text, answers in questions:
        say(f"\n  {text}")
        for score, answer in answers:
            say(f"    {score:>6}  {answer}")
    return questions


def _fill_masks(address: str) -> Iterator[Asked]:
    """Ask for words in place of a mask."""
    for text in MASKED:
        best = _post(f"{address}/v1/models/masks", {"inputs": text, "parameters": {"top_k": 3}})
        yield text, [(percent(each["score"]), each["token_str"]) for each in best]


def _search(address: str) -> Iterator[Asked]:
    """Ask for the held-out docstrings nearest to a question."""
    texts = [row["text"] for row in _rows()]
    vectors = _vectors(address, texts)
    for query in QUERIES:
        similarities = (vectors @ _vectors(address, [query])[0]).round(3)
        best = np.argsort(-similarities, kind="stable")[:3]
        answers = [(f"{similarities[n]:.2f}", shortened(texts[n], SHOWN)) for n in best]
        yield query, answers


def _vectors(address: str, texts: list[str]) -> np.ndarray:
    url, parameters = f"{address}/v1/models/vectors", {"truncate": True}
    parts = [
        _post(url, {"inputs": texts[start : start + AT_ONCE], "parameters": parameters})
        for start in range(0, len(texts), AT_ONCE)
    ]
    return np.array([vector for part in parts for vector in part], dtype=np.float32)


def _classify(address: str) -> Iterator[Asked]:
    """Ask which library held-out docstrings are from, and give the true library beside the
    answer."""
    rows = _rows()
    for place in np.random.default_rng(0).choice(len(rows), QUESTIONS, replace=False):
        row = rows[place]
        best = _post(f"{address}/v1/models/{NAME}", {"inputs": row["text"]})[0][0]
        truth = "right" if best["label"] == row["label"] else f"it is from {row['label']}"
        answer = f"{best['label']} ({truth})"
        yield shortened(row["text"], SHOWN), [(percent(best["score"]), answer)]


def _rows() -> list[dict[str, str]]:
    """Return the held-out rows that are prose: neither ruled tables nor lists of names."""
    from bert_core.tasks.text_classification import OneLabel
    from bert_core.tasks.texts import TextInput

    rows = labelled_rows(LabelledConfig(source=DOCSTRINGS), "held_out", (TextInput, OneLabel)).rows
    return [row for row in rows if not re.search(r"(\W)\1{3}|>>>", row["text"])]


def _server(port: int) -> ServerProcess:
    """Run `raybert serve` as a user would."""
    config = CONFIGS / "serve" / f"{SERVED}.toml"
    arguments = ["--config", str(config), "--port", str(port)]
    return ServerProcess.start(arguments, Path(FOLDER) / "serve.log")


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


def _report(done: dict[str, Manifest], questions: list[Asked], seconds: float) -> None:
    """Print the results and what to do next, and write the page to share."""
    page = Path(FOLDER) / REPORT
    folders = [_relative(docstrings.folder()), *(f"{FOLDER}/{name}" for name in FOLDERS)]
    runs = runs_of(folders, None)
    console.print()
    for text in summary(runs):
        say(text)
    table = Table("stage", "speed", box=None, pad_edge=False, header_style="bold")
    for row in _speeds(done, seconds):
        table.add_row(*row)
    console.print()
    console.print(table)
    write_report(str(page), runs, title="raybert quickstart", tried=questions)
    with suppress(RaybertError):  # MLflow may be away
        attach(str(page), runs, tracking_uri(None))
    body = json.dumps({"inputs": "Return the eigenvalues of a symmetric matrix."})
    say(
        "\nNext:\n"
        f"  {page}                       what was learnt, to read or to send\n"
        "  raybert ui                                        open the MLflow page\n"
        f"  raybert serve --config configs/serve/{SERVED}.toml   try more on the page\n"
        "                                                    http://127.0.0.1:8000\n"
        "and in another terminal, while that server runs:\n"
        f"  curl http://127.0.0.1:8000/v1/models/{NAME} "
        f"-H 'Content-Type: application/json' -d '{body}'"
    )


def _speeds(done: dict[str, Manifest], seconds: float) -> Iterator[tuple[str, str]]:
    """Yield the speed of each stage, and the total time."""
    for stage, manifest in done.items():
        counts = manifest.counts
        if names.WORDS_PER_S in counts:
            yield stage, f"{counts[names.WORDS_PER_S]:,.0f} words/s"
        elif names.TOKENS_PER_S in counts:
            yield stage, f"{counts[names.TOKENS_PER_S]:,.0f} tokens/s"
        elif names.TOKENS in counts:
            yield stage, f"{counts[names.TOKENS] / counts['seconds']:,.0f} tokens/s"
    yield "all", f"{seconds:,.0f} s"
