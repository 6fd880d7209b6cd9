"""`raybert bench` against a live server whose times are known."""

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from bert_core.errors import ConfigError, CorpusError, ResourceError
from pipelines.commands.bench import PLOT, RESULTS, BenchConfig, bodies_of, inputs_of, run
from pipelines.commands.load import OK, Target, closed_loop, open_loop
from pipelines.configure import parse
from tests.web_server import WebServer

ANSWER_S = 0.02


class Server:
    """Answers after a fixed time."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.stall_s = 0.0
        """How long nothing is answered from the next request on."""
        self.status = 200
        self._stalls_until_s = 0.0

    async def answer(self, request: web.Request) -> web.Response:
        self.bodies.append((request.path, await request.json()))
        self.headers.append(dict(request.headers))
        now_s = time.perf_counter()
        if self.stall_s:
            self._stalls_until_s, self.stall_s = now_s + self.stall_s, 0.0
        await asyncio.sleep(max(ANSWER_S, self._stalls_until_s - now_s))
        return web.json_response([], status=self.status)


@contextmanager
def serving() -> Iterator[tuple[str, Server]]:
    server, app = Server(), web.Application()
    app.router.add_post("/{path:.*}", server.answer)
    with WebServer(app) as web_server:
        yield web_server.url, server


def config_of(url: str, folder: Path, **settings: Any) -> BenchConfig:
    source = folder / "texts.txt"
    source.write_text("one\ntwo\n\nthree\n")
    usual: dict[str, Any] = {"seconds": 0.5, "warmup_s": 0.1, "connections": (1, 4)}
    return BenchConfig(url=url, source=str(source), **usual | settings)


@pytest.mark.drill
def test_a_closed_loop_asks_as_fast_as_it_is_answered() -> None:
    with serving() as (url, _):
        target = Target(url=url, bodies=[b'{"inputs": "a"}'])
        one, four = (asyncio.run(closed_loop(target, number, 1.0)) for number in (1, 4))
    # At most one answer per connection and `ANSWER_S`.
    assert 0 < one.answered_per_s <= 1 / ANSWER_S
    assert one.answered_per_s < four.answered_per_s <= 4 / ANSWER_S
    assert one.percentile_ms(0) >= 1e3 * ANSWER_S
    assert set(one.outcomes) == {OK}
    assert one.client_cpu_s > 0


@pytest.mark.drill
def test_an_open_loop_charges_a_stall_to_all_who_would_have_asked() -> None:
    with serving() as (url, server):
        target = Target(url=url, bodies=[b'{"inputs": "a"}'])
        server.stall_s = 1.0
        measured = asyncio.run(open_loop(target, 40.0, 2.0, seed=1))
    # A Poisson process of 80: within four standard deviations.
    assert 80 - 36 <= measured.outcomes[OK] <= 80 + 36
    # Half of them fell due during the stall, and waited half of it on average.
    waited = [latency_ms for latency_ms in measured.latencies_ms if latency_ms > 200]
    assert len(waited) > 16
    assert 300 < sum(waited) / len(waited) < 900


@pytest.mark.drill
def test_failures_are_counted_by_kind() -> None:
    with serving() as (url, server):
        server.status = 503
        target = Target(url=url, bodies=[b'{"inputs": "a"}'])
        refused = asyncio.run(closed_loop(target, 2, 0.2))
        server.status, server.stall_s = 200, 3.0
        late = asyncio.run(
            closed_loop(Target(url=url, bodies=target.bodies, timeout_s=0.3), 1, 0.1)
        )
    assert set(refused.outcomes) == {"503"}
    assert refused.latencies_ms == []
    assert "TimeoutError" in "".join(late.outcomes)
    gone = asyncio.run(closed_loop(target, 1, 0.1))
    assert OK not in gone.outcomes


@pytest.mark.drill
def test_a_run_prints_a_table_and_leaves_figures_and_a_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as (url, _):
        loops = run(config_of(url, tmp_path, rates=(20.0,), output=str(tmp_path / "bench")))
    assert [(loop.kind, loop.load) for loop in loops] == [
        ("closed", 1), ("closed", 4), ("open", 20.0),
    ]  # fmt: skip
    printed = capsys.readouterr().out
    assert "closed, 4 connections" in printed
    assert "open, 20/s" in printed
    content = json.loads((tmp_path / "bench" / RESULTS).read_text())
    assert [loop["answers_per_s"] for loop in content["loops"]] == [
        loop.answers_per_s for loop in loops
    ]
    assert (tmp_path / "bench" / PLOT).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("surface", "path", "body"),
    [
        ("huggingface", "/", {"inputs": ["one", "two"], "model": "docs"}),
        ("openai", "/v1/embeddings", {"input": ["one", "two"], "model": "docs"}),
        ("tei", "/embed", {"inputs": ["one", "two"], "model": "docs"}),
    ],
)
def test_each_surface_is_called_in_its_own_format(
    surface: Any, path: str, body: dict[str, Any], tmp_path: Path
) -> None:
    with serving() as (url, server):
        config = config_of(
            url, tmp_path, surface=surface, batch_size=2, model="docs", key="rb-x", seconds=0.1
        )
        run(config)
    assert server.bodies[0] == (path, body)
    assert server.headers[0]["Authorization"] == "Bearer rb-x"
    sent = {text for _, each in server.bodies for text in each.get("inputs", each.get("input"))}
    assert sent == {"one", "two", "three"}


def test_loops_are_separated_by_commas() -> None:
    line = ["--url", "http://x", "--source", "x", "--connections", "1,16", "--rates=50,100.5"]
    config = parse("bench", line)
    assert (config.connections, config.rates) == ((1, 16), (50.0, 100.5))


def test_objects_are_sent_as_they_are(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"text": "a"}\n{"question": "who", "context": "she"}\n')
    inputs = inputs_of(str(source))
    assert inputs == ["a", {"question": "who", "context": "she"}]
    bodies = bodies_of(BenchConfig(url="http://x", source=str(source)), inputs)
    assert [json.loads(body)["inputs"] for body in bodies] == inputs


def test_only_line_ends_part_inputs(tmp_path: Path) -> None:
    text, rows = tmp_path / "texts.txt", tmp_path / "rows.jsonl"
    text.write_bytes("\ufeffone\x0cstill\u2028one\r\n\ntwo \n".encode())
    assert inputs_of(str(text)) == ["one\x0cstill\u2028one", "two "]
    rows.write_bytes('\ufeff{"text": "a\u2028b"}\n\n{"text": "c\x85d"}\n'.encode())
    assert inputs_of(str(rows)) == ["a\u2028b", "c\x85d"]


@pytest.mark.parametrize(("kind", "mark"), [("csv", ","), ("tsv", "\t")])
def test_only_the_texts_of_a_table_are_sent(kind: str, mark: str, tmp_path: Path) -> None:
    table = tmp_path / f"rows.{kind}"
    table.write_text(f"label{mark}text\na{mark}one\nb{mark}two words\nc{mark}\n")
    assert inputs_of(str(table)) == ["one", "two words"]
    table.write_text(f"a{mark}b\n1{mark}2\n")
    with pytest.raises(CorpusError, match=rf"wanted a column text in {table}, there are: a, b: re"):
        inputs_of(str(table))


def test_a_source_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    latin, odd, cells = (tmp_path / name for name in ("latin.txt", "odd.jsonl", "cells.csv"))
    cells.write_text("label,text\na,one\nb,two,words\n")
    with pytest.raises(CorpusError, match=r"cells.csv, line 3: wanted 2 cells, .* got 3: quote"):
        inputs_of(str(cells))
    latin.write_bytes(b"caf\xe9\n")
    odd.write_text('"a text"\n')
    with pytest.raises(CorpusError, match=r"latin.txt: wanted UTF-8, byte 0xe9 at offset 3 is not"):
        inputs_of(str(latin))
    with pytest.raises(CorpusError, match=r"odd.jsonl, .*: wanted a JSON object"):
        inputs_of(str(odd))
    for source in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(CorpusError, match=rf"source: wanted a file with texts, {source} cann"):
            inputs_of(str(source))


@pytest.mark.drill
def test_a_missed_bar_fails(tmp_path: Path) -> None:
    with serving() as (url, _):
        run(config_of(url, tmp_path, max_p99_ms=10_000, min_per_s=1))
        with pytest.raises(ResourceError, match="max_p99_ms: wanted at most 1 ms, got"):
            run(config_of(url, tmp_path, max_p99_ms=1))
        with pytest.raises(ResourceError, match="min_per_s: wanted at least 1e"):
            run(config_of(url, tmp_path, min_per_s=1e6))


def test_servers_that_cannot_be_measured_are_reported(tmp_path: Path) -> None:
    with pytest.raises(
        ResourceError, match=r"wanted answers, got Cannot connect to host .*: check the"
    ):
        run(config_of("http://127.0.0.1:9", tmp_path))
    with serving() as (url, server):
        server.status = 401
        said = r'got 401: \[\]: check the address.* begins with \{"inputs": "one"\}$'
        with pytest.raises(ResourceError, match=said):
            run(config_of(url, tmp_path))
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    with pytest.raises(CorpusError, match="source: wanted texts in"):
        inputs_of(str(empty))
    with pytest.raises(ConfigError, match="url: wanted an address"):
        BenchConfig(url="localhost:8000", source="x")
    with pytest.raises(ConfigError, match="connections: wanted at least one loop"):
        BenchConfig(url="http://x", source="x", connections=())
