"""`raybert bench`: how fast a server answers, ours or anybody's."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bert_core import files
from bert_core.checks import PositiveFloat, PositiveInt, check_fields
from bert_core.data.formats import text_documents
from bert_core.data.json_rows import jsonl_rows
from bert_core.data.tables import DIVIDERS, TextTable
from bert_core.errors import ConfigError, CorpusError, ResourceError
from bert_core.wording import shortened
from pipelines.commands.load import OK, Measured, Target, closed_loop, open_loop
from pipelines.runtime.progress import say

Surface = Literal["huggingface", "openai", "tei"]
PATHS: dict[Surface, str] = {"huggingface": "", "openai": "/v1/embeddings", "tei": "/embed"}
TEXT = "text"
"""Column of the texts to send."""
RESULTS, PLOT = "results.json", "latency.png"


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Measure how fast a server answers, over more and more connections, and at fixed rates."""

    url: str
    """The server's address; for `huggingface` a model's own URL."""
    source: str
    """The texts to send in turn: a text file with one per line, JSONL whose lines have `text`, or
    the object that a task's input is, or CSV or TSV with a column `text`."""
    surface: Surface = "huggingface"
    """API to use: `huggingface` posts {"inputs": …} to the address, `openai` uses /v1/embeddings,
    `tei` uses /embed."""
    model: str | None = None
    """Name of the model to send in every request, for a server that requires one."""
    key: str | None = None
    """API key, sent as a bearer token."""
    batch_size: PositiveInt = 1
    """Texts per request."""
    connections: tuple[PositiveInt, ...] = (1, 8, 64)
    """Connections of each closed loop; each sends its next request when the last is answered."""
    rates: tuple[PositiveFloat, ...] = ()
    """Requests per second of each open loop: they are sent at random intervals, whatever the
    answers, and latency counts from when a request was due."""
    seconds: PositiveFloat = 10.0
    """Length of each loop."""
    warmup_s: PositiveFloat = 2.0
    """Length of a closed loop of 8 connections beforehand, which does not count."""
    max_p99_ms: PositiveFloat | None = None
    """Fail if the 99th percentile of any loop is higher."""
    min_per_s: PositiveFloat | None = None
    """Fail if no loop reaches this many answers per second."""
    output: str | None = None
    """Folder for `results.json` and `latency.png`; by default only the table is printed."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"url: wanted an address such as http://127.0.0.1:8000/v1/models/docs, got "
                f"{self.url}"
            )
        if not (self.connections or self.rates):
            raise ConfigError("connections: wanted at least one loop, or a rate, got none")


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The result of one load loop."""

    kind: Literal["closed", "open"]
    load: float
    """Connections of a closed loop; requests per second of an open one."""
    answers_per_s: float
    texts_per_s: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    failed: dict[str, int]
    """Requests without an answer, by status or kind of failure."""
    client_cpu: float
    """CPUs that asking took; near 1, the asking is what is slow."""


def run(config: BenchConfig) -> list[Loop]:
    """Measure, print the table as it grows, and write the results to `output`.

    Raises: CorpusError without texts; ResourceError if the server does not answer, or misses
        `max_p99_ms` or `min_per_s`.
    """
    target = Target(
        url=config.url.rstrip("/") + PATHS[config.surface],
        bodies=bodies_of(config, inputs_of(config.source)),
        headers={} if config.key is None else {"Authorization": f"Bearer {config.key}"},
    )
    loops = asyncio.run(_measure(config, target))
    if config.output is not None:
        folder = Path(config.output)
        folder.mkdir(parents=True, exist_ok=True)
        content = {"url": config.url, "surface": config.surface, "batch_size": config.batch_size}
        content |= {"seconds": config.seconds, "loops": [vars(loop) for loop in loops]}
        files.write_json(str(folder / RESULTS), content)
        plot(loops, folder / PLOT)
        say(f"{folder / RESULTS}, {folder / PLOT}")
    _judge(config, loops)
    return loops


async def _measure(config: BenchConfig, target: Target) -> list[Loop]:
    warm = await closed_loop(target, 8, config.warmup_s)
    if not warm.outcomes[OK]:
        (outcome, _), *_ = warm.outcomes.most_common(1)
        raise ResourceError(
            f"{target.url}: wanted answers, got {warm.reasons.get(outcome, outcome)}: check the "
            "address, the surface and the key; what was sent begins with "
            f"{shortened(target.bodies[0].decode())}"
        )
    say(HEADER)
    loops = []
    for connections in config.connections:
        measured = await closed_loop(target, connections, config.seconds)
        loops.append(_loop("closed", connections, measured, config.batch_size))
        say(line(loops[-1]))
    for rate in config.rates:
        measured = await open_loop(target, rate, config.seconds)
        loops.append(_loop("open", rate, measured, config.batch_size))
        say(line(loops[-1]))
    return loops


def _loop(kind: Literal["closed", "open"], load: float, of: Measured, batch_size: int) -> Loop:
    return Loop(
        kind=kind,
        load=load,
        answers_per_s=of.answered_per_s,
        texts_per_s=of.answered_per_s * batch_size,
        p50_ms=of.percentile_ms(50),
        p90_ms=of.percentile_ms(90),
        p99_ms=of.percentile_ms(99),
        max_ms=of.percentile_ms(100),
        failed={name: number for name, number in of.outcomes.items() if name != OK},
        client_cpu=of.client_cpu_s / of.duration_s,
    )


HEADER = (
    f"{'loop':<22}{'answers/s':>10}{'texts/s':>10}{'p50 ms':>9}{'p90 ms':>9}{'p99 ms':>9}"
    f"{'max ms':>9}{'client CPU':>12}  failed"
)


def line(loop: Loop) -> str:
    """Format a row of the table."""
    load = f"{loop.load:g} connections" if loop.kind == "closed" else f"{loop.load:g}/s"
    times = "".join(
        f"{value:>9.1f}" for value in (loop.p50_ms, loop.p90_ms, loop.p99_ms, loop.max_ms)
    )
    failed = ", ".join(f"{number} × {name}" for name, number in loop.failed.items()) or "none"
    return (
        f"{loop.kind + ', ' + load:<22}{loop.answers_per_s:>10,.1f}{loop.texts_per_s:>10,.1f}"
        f"{times}{loop.client_cpu:>12.2f}  {failed}"
    )


def _judge(config: BenchConfig, loops: Sequence[Loop]) -> None:
    for loop in loops:
        # NaN, if nothing was answered, is not fast enough either.
        if config.max_p99_ms is not None and not loop.p99_ms <= config.max_p99_ms:
            raise ResourceError(
                f"max_p99_ms: wanted at most {config.max_p99_ms:g} ms, got {loop.p99_ms:.1f} ms in "
                f"the {loop.kind} loop of {loop.load:g}"
            )
    best = max(loop.answers_per_s for loop in loops)
    if config.min_per_s is not None and best < config.min_per_s:
        raise ResourceError(
            f"min_per_s: wanted at least {config.min_per_s:g} answers per second, got {best:.1f}"
        )


def inputs_of(source: str) -> list[Any]:
    """Read the inputs in a file, cut as `raybert predict` cuts it: texts, or objects.

    Raises: CorpusError if there is none, or it cannot be read.
    """
    try:
        if source.endswith(tuple(f".{kind}" for kind in DIVIDERS)):
            return _column_of(source)
        data = files.read_bytes(source)
    except OSError as error:
        raise CorpusError(
            f"source: wanted a file with texts, {source} cannot be read ({error}): give the path "
            "of a text file, of JSONL, CSV or TSV"
        ) from error
    inputs: list[Any]
    if source.endswith((".jsonl", ".ndjson")):
        rows = [row for row in jsonl_rows(data, source) if row is not None]
        inputs = [row["text"] if set(row) == {"text"} else row for row in rows]
    else:
        lines = [text or "" for text in text_documents(data, "line", source)]
        texts = [line.removeprefix("\ufeff").rstrip("\r\n") for line in lines]
        inputs = [text for text in texts if text.strip()]
    if not inputs:
        raise CorpusError(f"source: wanted texts in {source}, got none")
    return inputs


def _column_of(source: str) -> list[str]:
    """Return the texts in the column `text` of a CSV or TSV file. Raises: CorpusError naming a row
    that cannot be read."""
    with files.open_stream(source) as stream:
        table = TextTable(stream, source)
        if TEXT not in table.columns:
            raise CorpusError(
                f"source: wanted a column {TEXT} in {source}, there are: "
                f"{', '.join(table.columns)}: rename one, or write JSONL"
            )
        place = table.columns.index(TEXT)
        texts = []
        for row in table.rows():
            if row.fault:
                raise CorpusError(f"{source}, line {row.line:,}: {row.fault}")
            if row.cells:
                texts.append(row.cells[place])
    if not any(text.strip() for text in texts):
        raise CorpusError(f"source: wanted texts in {source}, got none")
    return [text for text in texts if text.strip()]


def bodies_of(config: BenchConfig, inputs: Sequence[Any]) -> list[bytes]:
    """Return request bodies that together contain every input at least once."""
    size = config.batch_size
    count = -(-len(inputs) // size)
    bodies = []
    for number in range(count):
        batch = [inputs[(number * size + place) % len(inputs)] for place in range(size)]
        asked = batch[0] if size == 1 else batch
        body = {"input" if config.surface == "openai" else "inputs": asked}
        body |= {} if config.model is None else {"model": config.model}
        bodies.append(json.dumps(body, ensure_ascii=False).encode())
    return bodies


def plot(loops: Sequence[Loop], path: Path) -> None:
    """Plot latency against answers per second: the 50th and 99th percentile for each kind of
    loop."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    colours = {"closed": "#1f5aa6", "open": "#d9622b"}
    for kind, colour in colours.items():
        of_kind = sorted(
            (loop for loop in loops if loop.kind == kind), key=lambda loop: loop.answers_per_s
        )
        if not of_kind:
            continue
        rates = [loop.answers_per_s for loop in of_kind]
        for name, style in (("p50_ms", "-"), ("p99_ms", "--")):
            axes.plot(
                rates,
                [getattr(loop, name) for loop in of_kind],
                style,
                marker="o",
                markersize=4,
                color=colour,
                label=f"{kind} loop, {name.removesuffix('_ms')}",
            )
        for loop in of_kind:
            unit = " conn." if kind == "closed" else "/s"
            axes.annotate(
                f"{loop.load:g}{unit}",
                (loop.answers_per_s, loop.p99_ms),
                textcoords="offset points",
                xytext=(-4, 6),
                ha="right",
                fontsize=8,
                color=colour,
            )
    axes.set(xlabel="answers per second", ylabel="latency, ms", yscale="log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="best")
    figure.savefig(path, dpi=150)
