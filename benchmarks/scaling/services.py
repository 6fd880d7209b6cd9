"""Preparing a corpus and answering requests, from cores to hosts, from what two cores do."""

import math
from dataclasses import dataclass
from typing import Literal

CORES_PER_HOST = 64
BLOCK_BYTES = SHARD_BYTES = 8 << 20
"""`raybert prepare`'s defaults."""
CORPUS_WORDS = 3.3e9
"""Wikipedia and BooksCorpus (Devlin et al. 2019)."""
PrepareLimit = Literal["start", "work", "driver", "object store"]


@dataclass(frozen=True, kw_only=True)
class PrepareRates:
    """What preparing costs: masks drawn once (`dupe_factor` 1), from plain text."""

    words_per_core_s: float = 2.23e6
    """docs/benchmarks/prepare.md, one worker of an EPYC; 2.5e6 on a Xeon."""
    core_efficiency: float = 0.86
    """Two workers against one: 0.81 to 0.95 of twice. Assumed to hold on any number of cores."""
    bytes_per_word: float = 5.7
    """classic_books: 81.2 MB for 14.26 M words."""
    start_s: float = 10.6
    """results/2026-11-25-checkouts.json: a run on 5 kB, Ray's start included."""
    driver_s_per_item: float = 0.01
    """The driver takes 1 s of CPU for the 20 blocks and shards of 80 MB, start included: at most
    50 ms each. `benchmarks.scaling.plan` does not measure it; 10 ms is assumed."""
    requests_per_batch: float = 4
    """A shard reads its batch in every fragment; counted at moto's S3 server (the tests)."""
    requests_per_s: float = 5_500
    """GET and HEAD requests per second and prefix that S3 promises."""


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Seconds that each part takes; the longest of those after the start decides."""

    start_s: float
    work_s: float
    driver_s: float
    store_s: float
    """If fragments are in an object store; they are all below one prefix."""

    @property
    def total_s(self) -> float:
        return self.start_s + max(self.work_s, self.driver_s, self.store_s)

    @property
    def limit(self) -> PrepareLimit:
        parts: dict[PrepareLimit, float] = {
            "start": self.start_s,
            "work": self.work_s,
            "driver": self.driver_s,
            "object store": self.store_s,
        }
        return max(parts, key=lambda name: parts[name])


def prepare(
    words: float,
    cores: int,
    rates: PrepareRates | None = None,
    *,
    block_bytes: int = BLOCK_BYTES,
    shard_bytes: int = SHARD_BYTES,
    object_store: bool = False,
) -> Preparation:
    """Preparing a corpus of that many words."""
    rates = rates or PrepareRates()
    size_bytes = words * rates.bytes_per_word
    blocks, shards = math.ceil(size_bytes / block_bytes), math.ceil(size_bytes / shard_bytes)
    working = min(cores, max(blocks, shards))  # a block or a shard is one worker's
    efficiency = 1.0 if working == 1 else rates.core_efficiency
    requests = blocks * shards * rates.requests_per_batch if object_store else 0
    return Preparation(
        start_s=rates.start_s,
        work_s=words / (rates.words_per_core_s * working * efficiency),
        driver_s=(blocks + shards) * rates.driver_s_per_item,
        store_s=requests / rates.requests_per_s,
    )


@dataclass(frozen=True, kw_only=True)
class ServeRates:
    """all-MiniLM-L6-v2 in int8 and bfloat16 on two cores with AMX, HAProxy and client included
    (results/2026-11-26-serve-quick.json)."""

    sentences_per_core_s: float = 212
    """424 answers/s of 25 tokens on two cores; 390 to 493 in four lines."""
    paragraphs_per_core_s: float = 85
    """171 answers/s of 137 tokens on two cores."""
    load: float = 0.5
    """Share of the most that is asked: at 0.47 of it, 99 % of the answers came within 30 ms."""
    requests_per_proxy_s: float = 2_663
    """HAProxy and replicas without work on two cores; more cores are not measured."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What a rate of requests needs."""

    cores: int
    hosts: int
    proxies: int
    """Hosts that HAProxy needs at the rate that two cores showed."""


def serve(
    answers_per_s: float, rates: ServeRates | None = None, *, paragraphs: bool = False
) -> Serving:
    """Cores and hosts for that many answers per second, each of one text."""
    rates = rates or ServeRates()
    per_core_s = rates.paragraphs_per_core_s if paragraphs else rates.sentences_per_core_s
    cores = math.ceil(answers_per_s / (rates.load * per_core_s))
    return Serving(
        cores=cores,
        hosts=math.ceil(cores / CORES_PER_HOST),
        proxies=math.ceil(answers_per_s / (rates.load * rates.requests_per_proxy_s)),
    )
