"""Our server against others, against its own model without HTTP, and against the clock.

Every server runs alone on all cores of the machine with the client, whose own CPU time each line
has, and answers the same texts from the same model files: all-MiniLM-L6-v2 (`make checkpoints`) and
heads on it, and random weights in the shape of BERT-base. A ratio is one of answers per second in a
closed loop of 64 connections, ours and the peer's in turn; the settings of a line also have closed
loops of 1 and 8 connections, an open loop at one rate for both, and the highest rate at which the
99th percentile stays within 100 ms.

Ours is `raybert serve`, with HAProxy and `backend = auto`, of what `raybert export` makes of the
model: in fp32 for the lines that end in `_fp32`, against peers in fp32; calibrated in 8 bits for
those that end in `_int8`, against peers at the fastest precision that they document. It stays up
while a peer is measured, and `idle_cpus` is what that costs. All have OpenMP's threads sleep where
they wait (`benchmarks.passive`).

Peers are installed on demand: see `benchmarks.servers`.
"""

import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import psutil

import benchmarks.passive  # noqa: F401 (before torch)
from benchmarks.harness import Comparison, Planned, compared, in_turn, main
from benchmarks.loops import LIMIT_MS, closed, highest_rate, opened, p99_of, shown
from benchmarks.peer_servers import Peer, bentoml, infinity, litserve, mlflow, pipeline
from benchmarks.served import (
    BASE,
    CLASSIFIER,
    QUESTIONS,
    VECTORS,
    Texts,
    bundles,
    data_folder,
    difference,
    exported,
    paragraphs,
    questions,
    sentences,
    texts,
)
from benchmarks.servers import ServerError, running
from bert_core.bundle.layout import Execution
from bert_core.inference.predictor import Predictor
from pipelines.commands.load import Target
from tracking.store.ports import free_ports

CORES = os.cpu_count() or 1
PROJECT = Path(__file__).parents[1]
CONNECTIONS = 64
WARM_S, LOOP_S, QUICK_LOOP_S = 4.0, 4.0, 1.5
SETTLE_S = 10.0
"""What a cluster that has just started is still busy for."""
CHECKED, LARGEST = 32, 1e-5
"""Answers that are compared with the predictor's own, and the largest difference allowed."""
TOGETHER = 128
"""Texts that the bare model is given at once, to batch by length."""
BAR_MS = 2.0
"""What an answer may take over its pass."""
OURS = {"threads": CORES, "num_replicas": 1, "backend": "auto"}
"""Settings of each model of ours."""
FP32, INT8 = "fp32", "int8"

Reader = Callable[[Path], Sequence[Any]]
Workload = tuple[str, str, Reader]
"""Model, words for the texts, and what reads them."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A peer, and the workloads that it is compared on."""

    name: str
    workloads: tuple[Workload, ...]
    peers: tuple[Peer, ...]
    """Settings of which the fastest counts; the first in a quick run."""
    precision: str = FP32
    """Ours."""


SENTENCES, PARAGRAPHS = "sentences of SST-2", "paragraphs of WikiText-2"
PASSAGES = "questions about passages of SQuADShifts"
OF_VECTORS = ((VECTORS, SENTENCES, sentences), (VECTORS, PARAGRAPHS, paragraphs))
OF_CLASSES = ((CLASSIFIER, SENTENCES, sentences), (CLASSIFIER, PARAGRAPHS, paragraphs))
OF_ANSWERS = ((QUESTIONS, PASSAGES, questions),)
PIPELINES = (pipeline(32), pipeline(1))
MLFLOWS = (mlflow(1), mlflow(CORES))
INFINITIES = (infinity("torch", "float32"), infinity("optimum", "float32"))
LITSERVES = (litserve(64, 1), litserve(64, CORES))
BENTOMLS = (bentoml(64, 1), bentoml(64, CORES))
FASTER_INFINITIES = (infinity("torch", "bfloat16"), infinity("torch", "int8"), *INFINITIES)
LINES = (
    Line(
        name="serve_vs_infinity_int8", workloads=OF_VECTORS, peers=FASTER_INFINITIES, precision=INT8
    ),
    Line(name="serve_vs_litserve_int8", workloads=OF_VECTORS, peers=LITSERVES, precision=INT8),
    Line(name="serve_vs_bentoml_int8", workloads=OF_VECTORS, peers=BENTOMLS, precision=INT8),
    Line(name="serve_vs_infinity_fp32", workloads=OF_VECTORS, peers=INFINITIES),
    Line(name="serve_vs_litserve_fp32", workloads=OF_VECTORS, peers=LITSERVES),
    Line(name="serve_vs_bentoml_fp32", workloads=OF_VECTORS, peers=BENTOMLS),
    Line(name="serve_vs_pipeline_int8", workloads=OF_CLASSES, peers=PIPELINES, precision=INT8),
    Line(name="serve_vs_mlflow_int8", workloads=OF_CLASSES, peers=MLFLOWS, precision=INT8),
    Line(name="serve_vs_pipeline_fp32", workloads=OF_CLASSES, peers=PIPELINES),
    Line(name="serve_vs_mlflow_fp32", workloads=(*OF_CLASSES, *OF_ANSWERS), peers=MLFLOWS),
)
SERVED = {VECTORS: (FP32, INT8), CLASSIFIER: (FP32, INT8), QUESTIONS: (FP32,), BASE: (FP32,)}
"""Precisions of each model of ours."""


def benchmark(rounds: int, quick: bool) -> Iterator[Planned]:
    # What was started is ended then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as ending:
        bench = Bench(Path(scratch), rounds, ending, quick=quick)
        planned = [
            (
                _served(workload[0], line.precision),
                line.name,
                partial(bench.against_peer, line, *workload),
            )
            for line in LINES
            if not (quick and line.precision == FP32)
            for workload in (line.workloads[:1] if quick else line.workloads)
        ]
        base = (FP32, (BASE, PARAGRAPHS, paragraphs))
        bare = [(precision, of) for precision in (INT8, FP32) for of in reversed(OF_VECTORS)]
        for precision, workload in bare if quick else [*bare, base]:
            name = f"serve_vs_bare_model_{precision}"
            make = partial(bench.against_bare, name, precision, *workload)
            planned.append((_served(workload[0], precision), name, make))
        for precision in (INT8, FP32):
            name = f"latency_over_model_{precision}"
            make = partial(bench.latency, name, precision, *OF_VECTORS[0])
            planned.append((_served(VECTORS, precision), name, make))
        # Those of one model of ours after each other, since the server is started for it.
        for _, name, make in sorted(planned, key=itemgetter(0)):
            yield Planned(name, make)


def _served(model: str, precision: str) -> str:
    """The name by which our server has a model."""
    return f"{model}-{precision}"


class Bench:
    """Our server, started when it is first needed, the models behind it, and the comparisons."""

    def __init__(self, scratch: Path, rounds: int, ending: ExitStack, *, quick: bool) -> None:
        self._scratch, self._rounds, self._ending, self._quick = scratch, rounds, ending, quick
        self._loop_s = QUICK_LOOP_S if quick else LOOP_S
        self._data = data_folder()
        self._predictors: dict[str, Predictor] = {}
        self._fastest: dict[tuple[Peer, ...], tuple[Peer, dict[str, float]]] = {}
        self._serves = self._url = ""
        self._serving = self._ending.enter_context(ExitStack())

    @cached_property
    def _models(self) -> dict[str, Path]:
        """With weights: what peers are given."""
        return bundles(self._scratch)

    @cached_property
    def _exported(self) -> dict[str, Path]:
        """What our server is given, by model and precision."""
        return {
            f"{name}-{precision}": exported(
                name, self._models[name], self._scratch, self._data, precision
            )
            for name, precisions in SERVED.items()
            for precision in precisions
        }

    def _ours(self, name: str) -> str:
        """The address of our server with one model, which replaces that with another.

        A cluster takes some CPU per model even while no requests come.
        """
        if self._serves != name:
            self._serving.close()
            (port,) = free_ports(1)
            settings = {
                **OURS,
                "port": port,
                "num_cpus": 1,
                "models": [f"{name}={self._exported[name]}"],
            }
            config = self._scratch / "serve.toml"
            lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
            config.write_text("\n".join(lines) + "\n")
            self._url, self._serves = f"http://127.0.0.1:{port}", name
            environment = {"PYTHONPATH": str(PROJECT), "RAY_ADDRESS": "local"}
            command = [sys.executable, "-m", "pipelines.cli", "serve", "--config", str(config)]
            self._server = self._serving.enter_context(
                running(command, f"{self._url}/readyz", self._scratch / "ours", environment)
            )
            time.sleep(SETTLE_S)
        return self._url

    def _run(self, model: str, precision: str) -> Execution:
        """What our server has chosen."""
        name = _served(model, precision)
        card = httpx.get(f"{self._ours(name)}/v1/models/{name}", timeout=30).json()
        return Execution(card["backend"], card["precision"])

    def _predictor(self, model: str, precision: str) -> Predictor:
        """What our server runs, in this process."""
        name = _served(model, precision)
        if name not in self._predictors:
            run = self._run(model, precision)
            self._predictors[name] = Predictor(
                self._exported[name],
                device="cpu",
                threads=CORES,
                backend=run.engine,
                precision=run.precision,
            )
        return self._predictors[name]

    def _texts(self, model: str, read: Reader) -> Texts:
        return texts(read(self._data), self._weights(model))

    def _weights(self, model: str) -> Predictor:
        """The model itself, in fp32 by torch."""
        if model not in self._predictors:
            self._predictors[model] = Predictor(self._models[model], device="cpu", threads=CORES)
        return self._predictors[model]

    def _target(self, model: str, precision: str, sample: Texts) -> Target:
        """Our server's, on the surface that the model's clients use."""
        is_vectors = model in (VECTORS, BASE)
        name, path = _served(model, precision), "/v1/embeddings" if is_vectors else ""
        key = "input" if is_vectors else "inputs"
        bodies = [json.dumps({key: each}).encode() for each in sample.inputs]
        return Target(url=f"{self._ours(name)}/v1/models/{name}{path}", bodies=bodies)

    def against_peer(self, line: Line, model: str, what: str, read: Reader) -> Comparison:
        """Ours and a peer in turn, in the closed loop that counts, and the other loops."""
        sample = self._texts(model, read)
        ours = self._target(model, line.precision, sample)
        checks = {"ours": self._check(model, line.precision, sample, ours)}
        peer, tried = self._choose(line, model, sample)
        with self._started(peer, model, line.precision) as url:
            theirs = _target_of(peer, url, sample)
            checks["peer"] = self._difference(
                self._weights(model), sample, theirs, peer.read, only_best=peer.only_best
            )
            both = {"ours": ours, "peer": theirs}
            for target in both.values():
                closed(target, CONNECTIONS, WARM_S)
            idle_cpus = self._idle_cpus()
            pairs, cpu_of_others = in_turn(
                partial(closed, ours, CONNECTIONS, self._loop_s),
                partial(closed, theirs, CONNECTIONS, self._loop_s),
                self._rounds,
            )
            rates = [(mine.answered_per_s, its.answered_per_s) for mine, its in pairs]
            loops = self._loops(both, rates, whole=what == line.workloads[0][1] and not self._quick)
        mine, its = pairs[-1]
        loops[f"closed_{CONNECTIONS}"] = {"ours": shown(mine), "peer": shown(its)}
        return compared(
            line.name,
            rates,
            cpu_of_others,
            unit="answers/s",
            what=f"{what}, {sample.settings['mean_tokens']} tokens on average",
            **sample.settings,
            cores=CORES,
            ours_settings=self._settings(model, line.precision),
            peer_settings=peer.settings,
            peer_versions=dict(peer.versions()),
            peers_tried=tried,
            largest_difference_from_predictor=checks,
            idle_cpus=idle_cpus,
            **loops,
        )

    def _loops(
        self, both: Mapping[str, Target], rates: Sequence[tuple[float, float]], *, whole: bool
    ) -> dict[str, Any]:
        """The loops beside the one that counts: at one rate for both and, if `whole`, the rest."""
        slower = min(statistics.median(side) for side in zip(*rates, strict=True))
        results: dict[str, Any] = {}
        rate = round(slower / 2, 1)  # which both should sustain
        results[f"open_{rate:g}_per_s"] = {
            side: shown(opened(target, rate, self._loop_s)) for side, target in both.items()
        }
        if not whole:
            return results
        for connections in (1, 8):
            results[f"closed_{connections}"] = {
                side: shown(closed(target, connections, self._loop_s))
                for side, target in both.items()
            }
        most = [1.1 * statistics.median(side) for side in zip(*rates, strict=True)]
        results[f"highest_rate_with_p99_within_{LIMIT_MS:g}_ms"] = {
            side: round(highest_rate(partial(self._p99_ms, target), top), 1)
            for (side, target), top in zip(both.items(), most, strict=True)
        }
        return results

    def _p99_ms(self, target: Target, per_s: float) -> float:
        return p99_of(opened(target, per_s, self._loop_s))

    def _choose(self, line: Line, model: str, sample: Texts) -> tuple[Peer, dict[str, float]]:
        """The fastest of a line's settings, and what each reached in a short closed loop."""
        if len(line.peers) == 1 or self._quick:
            return line.peers[0], {}
        if line.peers not in self._fastest:
            reached = {}
            for peer in line.peers:
                with self._started(peer, model, line.precision) as url:
                    target = _target_of(peer, url, sample)
                    closed(target, CONNECTIONS, WARM_S)
                    reached[peer.settings] = round(
                        closed(target, CONNECTIONS, self._loop_s).answered_per_s, 1
                    )
            best = max(line.peers, key=lambda peer: reached[peer.settings])
            self._fastest[line.peers] = best, reached
        return self._fastest[line.peers]

    @contextmanager
    def _started(self, peer: Peer, model: str, precision: str) -> Iterator[str]:
        """A peer's address while it runs."""
        (port,) = free_ports(1)
        reads_ours = peer.reads_exported and precision != FP32
        folder = self._exported[_served(model, precision)] if reads_ours else self._models[model]
        launch = peer.launch(folder, port, self._scratch)
        url = f"http://127.0.0.1:{port}"
        with running(
            launch.command,
            url + peer.ready,
            self._scratch / f"peer-{port}",
            launch.environment,
            launch.working,
        ):
            yield url

    def _settings(self, model: str, precision: str) -> dict[str, Any]:
        """How our server answers, for a line."""
        return {**OURS, "runs": str(self._run(model, precision)), "proxy": "HAProxy"}

    def _check(self, model: str, precision: str, sample: Texts, target: Target) -> float:
        """How far our server's answers are from the predictor's.

        Raises: ServerError beyond a bound.
        """
        read = (lambda answer: answer["data"][0]["embedding"]) if model in (VECTORS, BASE) else None
        predictor = self._predictor(model, precision)
        apart = self._difference(predictor, sample, target, read or (lambda answer: answer))
        if not apart <= LARGEST:
            raise ServerError(
                f"{target.url}: wanted the answers of the model itself, to {LARGEST:g}, got "
                f"{apart:g} from them: a fast server that is wrong is not to be measured"
            )
        return apart

    def _difference(
        self,
        predictor: Predictor,
        sample: Texts,
        target: Target,
        read: Callable[[Any], Any],
        *,
        only_best: bool = False,
    ) -> float:
        """Of answers to texts sent at once from those of a predictor."""
        answers = asyncio.run(_answers(target, target.bodies[:CHECKED]))
        expected = predictor.predict(sample.inputs[:CHECKED])
        return max(
            difference(
                read(answer), _plain(best[:1] if only_best and isinstance(best, list) else best)
            )
            for answer, best in zip(answers, expected, strict=True)
        )

    def _idle_cpus(self) -> float:
        """CPUs that our server takes without requests."""
        before, began_s = self._cpu_s(), time.perf_counter()
        time.sleep(1.0)
        return round((self._cpu_s() - before) / (time.perf_counter() - began_s), 3)

    def _cpu_s(self) -> float:
        root = psutil.Process(self._server.pid)
        return sum(
            sum(process.cpu_times()[:2]) for process in (root, *root.children(recursive=True))
        )

    def against_bare(
        self, name: str, precision: str, model: str, what: str, read: Reader
    ) -> Comparison:
        """Ours, and full batches of the same texts through the same backend in this process."""
        sample = self._texts(model, read)
        target = self._target(model, precision, sample)
        predictor = self._predictor(model, precision)
        checked = self._check(model, precision, sample, target)
        mean_tokens = sample.settings["mean_tokens"]
        # Enough of them for 64 connections to matter little at the beginning and the end.
        seconds = self._loop_s * (4 if model == BASE else 1)
        closed(target, CONNECTIONS, WARM_S)
        pairs, cpu_of_others = in_turn(
            lambda: closed(target, CONNECTIONS, seconds),
            lambda: _bare_rate(predictor, sample, seconds),
            self._rounds,
        )
        return compared(
            name,
            [(mine.answered_per_s, bare) for mine, bare in pairs],
            cpu_of_others,
            unit="answers/s",
            what=f"{'BERT-base' if model == BASE else 'MiniLM'}, {what}, {mean_tokens} tokens on "
            "average",
            **sample.settings,
            cores=CORES,
            ours_settings=self._settings(model, precision),
            peer_settings=f"the backend in full batches, {CORES} threads, no tokenizing",
            largest_difference_from_predictor={"ours": checked},
            **{f"closed_{CONNECTIONS}": {"ours": shown(pairs[-1][0])}},
        )

    def latency(self, name: str, precision: str, model: str, what: str, read: Reader) -> Comparison:
        """What one client waits for beyond the model's own pass."""
        sample = self._texts(model, read)
        target = self._target(model, precision, sample)
        predictor = self._predictor(model, precision)
        checked = self._check(model, precision, sample, target)
        closed(target, 1, WARM_S)
        pairs, cpu_of_others = in_turn(
            lambda: closed(target, 1, self._loop_s),
            lambda: _pass_ms(predictor, sample, self._loop_s),
            self._rounds,
        )
        over_ms = [mine.percentile_ms(50) - bare for mine, bare in pairs]
        return Comparison(
            name=name,
            ours=statistics.median(over_ms),
            peer=BAR_MS,
            unit="ms",
            ratio=statistics.median(BAR_MS / each for each in over_ms),
            settings={
                "what": f"{what}: p50 of one connection less the pass; the ratio is {BAR_MS:g} ms "
                "over it",
                **sample.settings,
                "cores": CORES,
                "ours_settings": self._settings(model, precision),
                "p50_ms": [round(mine.percentile_ms(50), 3) for mine, _ in pairs],
                "pass_ms": [round(bare, 3) for _, bare in pairs],
                "client_cpus": shown(pairs[-1][0])["client_cpus"],
                "largest_difference_from_predictor": {"ours": checked},
                "rounds": len(pairs),
                "cpu_share_of_others": [round(share, 3) for share in cpu_of_others],
            },
        )


def _target_of(peer: Peer, url: str, sample: Texts) -> Target:
    bodies = [json.dumps(peer.body(each)).encode() for each in sample.inputs]
    return Target(url=url + peer.path, bodies=bodies)


async def _answers(target: Target, bodies: Sequence[bytes]) -> list[Any]:
    """Of all bodies, sent at once. Raises: aiohttp.ClientResponseError."""
    headers = {"Content-Type": "application/json", **target.headers}

    async def ask(session: aiohttp.ClientSession, body: bytes) -> Any:
        async with session.post(target.url, data=body) as response:
            response.raise_for_status()
            return await response.json()

    async with aiohttp.ClientSession(headers=headers) as session:
        return await asyncio.gather(*(ask(session, body) for body in bodies))


def _plain(answer: Any) -> Any:
    """An answer of the predictor as JSON gives it."""
    if isinstance(answer, Mapping):
        return {name: _plain(value) for name, value in answer.items()}
    if isinstance(answer, list | tuple):
        return [_plain(each) for each in answer]
    return answer.tolist() if hasattr(answer, "tolist") else answer


def _bare_rate(predictor: Predictor, sample: Texts, seconds: float) -> float:
    """Texts per second of the backend, `TOGETHER` after the other, for about that long."""
    done, began_s = 0, time.perf_counter()
    while (taken_s := time.perf_counter() - began_s) < seconds:
        first = done % (len(sample.windows) - TOGETHER + 1)
        predictor.forward(sample.windows[first : first + TOGETHER])
        done += TOGETHER
    return done / taken_s


def _pass_ms(predictor: Predictor, sample: Texts, seconds: float) -> float:
    """The median pass of one text."""
    taken_ms: list[float] = []
    end_s = time.perf_counter() + seconds
    while (began_s := time.perf_counter()) < end_s:
        predictor.forward([sample.windows[len(taken_ms) % len(sample.windows)]])
        taken_ms.append(1e3 * (time.perf_counter() - began_s))
    return statistics.median(taken_ms)


if __name__ == "__main__":
    main(benchmark, "serve")
