"""Pretraining and requests that go on while something befalls the hosts."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tests.cluster.on_hosts import (
    BUCKET,
    CLIENT,
    MLFLOW,
    SERVE_PORT,
    Cluster,
    wait_until,
)

STEPS = 50
CHECKPOINT_EVERY_STEPS = 10
TRAINING = (
    *("--loop.max_steps", str(STEPS), "--checkpoint_every_steps", str(CHECKPOINT_EVERY_STEPS)),
    *("--log_every_steps", "1"),
    # The controller takes a report every half a second, so no machine trains faster than that.
    *("--report_every_s", "0"),
)


@dataclass(frozen=True)
class Point:
    """Of a curve in MLflow."""

    step: int
    value: float
    time: float
    """Seconds since 1970, when it was recorded."""


class Submitted:
    """A stage that was submitted at the client."""

    def __init__(
        self, cluster: Cluster, stage: str, output: str, *options: str, before: str = ""
    ) -> None:
        self.cluster, self.output = cluster, output
        command = cluster.submission(stage, *options, before=before, output=output)
        self._says = cluster.start(CLIENT, command)
        self._process = cluster.started[-1]

    @property
    def says(self) -> str:
        return self._says.read_text()

    def wait_until(self, what: str, done: Callable[[], Any], *, timeout_s: float = 240) -> Any:
        """Until `done`, as long as it runs."""

        def look() -> Any:
            assert self._process.poll() is None, f"ended before {what}: {self.says}"
            return done()

        return wait_until(what, look, timeout_s=timeout_s)

    def wait_for_words(self, words: str) -> None:
        self.wait_until(f"it says {words}", lambda: words in self.says)

    def ends(self, *, timeout_s: float = 400) -> int:
        """Its exit code."""
        return self._process.wait(timeout=timeout_s)

    def ends_well(self) -> None:
        assert self.ends() == 0, self.says


class Pretraining(Submitted):
    """A run of two workers, unless the options say otherwise."""

    def __init__(self, cluster: Cluster, output: str, *options: str, before: str = "") -> None:
        super().__init__(cluster, "pretrain", output, *TRAINING, *options, before=before)

    @property
    def curve(self) -> list[Point]:
        """What MLflow has of the loss."""
        record = self.cluster.content(f"{self.output}/record/mlflow_run.json")
        if record is None:
            return []
        query = f"run_id={json.loads(record)['run_id']}&metric_key=loss&max_results=1000"
        history = json.loads(self.cluster.get(f"{MLFLOW}/metrics/get-history?{query}") or "{}")
        return [
            Point(int(each["step"]), float(each["value"]), each["timestamp"] / 1000)
            for each in history.get("metrics", [])
        ]

    @property
    def checkpoints(self) -> list[int]:
        """Steps of those in the bucket."""
        listed = self.cluster.content(f"?list-type=2&prefix={self.output}/checkpoints/") or ""
        return sorted({int(step) for step in re.findall(r"step-(\d+)/checkpoint\.json", listed)})

    @property
    def weights(self) -> dict[str, str]:
        """Their digest."""
        return self.cluster.digests(f"{BUCKET}/{self.output}/bundle", ".safetensors")

    def reaches(self, step: int, *, timeout_s: float = 240) -> None:
        """Wait until it has."""
        self.wait_until(
            f"step {step}",
            lambda: any(each.step >= step for each in self.curve),
            timeout_s=timeout_s,
        )

    def recovered_s(self, since: float) -> float:
        """From a moment to the end of the longest pause in its curve after that."""
        times = [each.time for each in self.curve]
        pauses = [(after - before, after) for before, after in pairwise(times) if after > since]
        return max(pauses)[1] - since

    def is_whole(self) -> None:
        """There is one MLflow run, which has finished, with every step once."""
        output = f"tags.output = '{BUCKET}/{self.output}'"
        query = {"experiment_ids": [str(number) for number in range(9)], "filter": output}
        answer = self.cluster.get(f"{MLFLOW}/runs/search", "--json", json.dumps(query))
        [run] = json.loads(answer or "{}")["runs"]
        assert run["info"]["status"] == "FINISHED"
        assert [each.step for each in self.curve] == list(range(1, STEPS + 1))

    def is_the_same_as(self, other: "Pretraining") -> None:
        """In every bit."""
        self.is_whole()
        assert self.weights == other.weights
        assert [each.value for each in self.curve] == [each.value for each in other.curve]


LOAD = """
import asyncio, json, pathlib, sys, time
import httpx

key, port, concurrency = sys.argv[1], *map(int, sys.argv[2:])
hosts = pathlib.Path("balancer")  # those that a load balancer sends requests to


async def ask(number, answers):
    async with httpx.AsyncClient(
        headers={"Authorization": f"Bearer {key}"}, timeout=httpx.Timeout(60, connect=3)
    ) as client:
        turn = number
        while known := hosts.read_text().split():
            turn += 1
            host, began = known[turn % len(known)], time.time()
            url = f"http://{host}:{port}/v1/models/docstrings"
            try:
                answer = await client.post(url, json={"inputs": f"Parse text {began}."})
                status = str(answer.status_code)
            except httpx.TransportError as error:
                status = type(error).__name__
            answers.append([host, began, time.time(), status])
            await asyncio.sleep(0.05)


async def main():
    answers = []
    await asyncio.gather(*(ask(number, answers) for number in range(concurrency)))
    print(json.dumps(answers))


asyncio.run(main())
"""
CLIENTS = 4


@dataclass(frozen=True)
class Answer:
    host: str
    began: float
    ended: float
    status: str
    """Of HTTP, or the name of an error of the connection."""


class Load:
    """Clients that ask the model without a pause, on the hosts that they are sent to."""

    def __init__(self, cluster: Cluster, key: str, *hosts: str) -> None:
        self._cluster = cluster
        self.send_to(*hosts)
        cluster[CLIENT].write("~/load.py", LOAD)
        self._says = cluster.start(CLIENT, f"python ~/load.py {key} {SERVE_PORT} {CLIENTS}")
        self._process = cluster.started[-1]

    def send_to(self, *hosts: str) -> None:
        """As a load balancer does when its health checks, or its operator, say so."""
        self._cluster[CLIENT].write("~/balancer.new", " ".join(hosts))
        self._cluster[CLIENT].run("mv ~/balancer.new ~/balancer")

    def end(self) -> list[Answer]:
        """What was answered, each request once."""
        self.send_to()
        assert self._process.wait(timeout=120) == 0, self._says.read_text()
        return [Answer(*each) for each in json.loads(self._says.read_text().splitlines()[-1])]
