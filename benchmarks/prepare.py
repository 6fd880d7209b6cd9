"""Corpus to shards, against `encode_batch_fast` alone and against `datasets.map`.

On WikiText-2 and classic books if RAYBERT_DATA names their folder, else on docstrings.
"""

import io
import os
import shutil
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import Comparison, Planned, compare, main
from bert_core.data.masking import MaskingConfig
from bert_core.data.pairs import PairsConfig
from bert_core.data.tokenizer import Tokenizer, TokenizerKind
from bert_core.data.vocabulary import train_tokenizer
from bert_core.manifest import read_manifest

# Of BERT, RoBERTa and ALBERT.
VOCAB_SIZES: dict[TokenizerKind, int] = {"wordpiece": 30_522, "bpe": 50_265, "unigram": 30_000}
VOCAB_BYTES = 6 << 20
QUICK_BYTES, QUICK_WORDS_BYTES = 64 << 20, 8 << 20
PEER_TEXTS = 10_000  # per call, where it is fastest: with all at once Unigram takes longer
PAPER_WORDS = 3.3e9  # Wikipedia and BooksCorpus, Devlin et al. 2019, section 3.1
LENGTH = 128
BERT = (PairsConfig(max_length=LENGTH, dupe_factor=1), MaskingConfig())
ROBERTA = (
    PairsConfig(kind="full_sentences", max_length=512, dupe_factor=1),
    MaskingConfig(max_predictions_per_seq=77, dynamic=True),
)
WORKERS = 2
BLOCK_BYTES = 4 << 20  # small, so that two workers get equal shares of the work


def benchmark(rounds: int, quick: bool) -> Iterator[Planned]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as scratch:
        corpora = _corpora(QUICK_BYTES if quick else None)
        for name, texts in corpora.items():
            sample = _head(texts, QUICK_WORDS_BYTES) if quick else texts
            some = _head(texts, VOCAB_BYTES)
            trained = {
                kind: train_tokenizer(kind, some, vocab_size=size, lowercase=kind != "bpe")
                for kind, size in VOCAB_SIZES.items()
            }
            for kind, tokenizer in trained.items():
                yield _words_once(kind, name, sample, tokenizer, rounds)
        name, texts = list(corpora.items())[-1]
        tokenizer = trained["wordpiece"]
        roberta = _Prepare(Path(scratch) / "roberta", texts, trained["bpe"], *ROBERTA)
        yield compare(
            "prepare_roberta_vs_encode_batch_fast",
            lambda: roberta.rate(WORKERS),
            lambda: _encode_in_parallel(texts, trained["bpe"]),
            unit="tokens/s",
            rounds=rounds,
            warm_up=not quick,
            what=f"{name}: RoBERTa's recipe to shards, against the tokenizer alone on all cores",
            corpus=name,
            **roberta.settings,
        )
        prepare = _Prepare(Path(scratch) / "bert", texts, tokenizer, *BERT)
        for workers in (1, 2):
            prepare.rate(workers)
        settings: dict[str, Any] = {"corpus": name, **prepare.settings}
        yield compare(
            "prepare_vs_encode_batch_fast",
            lambda: prepare.rate(WORKERS),
            lambda: _encode_in_parallel(texts, tokenizer),
            unit="tokens/s",
            rounds=rounds,
            what=f"{name}: read to shards, against the tokenizer alone on all cores",
            **settings,
        )
        yield compare(
            "prepare_vs_datasets_map",
            lambda: prepare.rate(WORKERS),
            _datasets_map(texts, tokenizer, Path(scratch) / "bert"),
            unit="tokens/s",
            rounds=min(rounds, 3),
            warm_up=not quick,
            what=f"{name}: tokenise and group, as transformers' examples do",
            peer_settings=f"num_proc={WORKERS}, batched, load_from_cache_file=False",
            **settings,
        )
        scaling = compare(
            "prepare_2_workers_vs_1",
            lambda: prepare.rate(2, without_fixed=True),
            lambda: prepare.rate(1, without_fixed=True),
            unit="tokens/s",
            rounds=rounds,
            warm_up=not quick,  # both have run before
            quiet=True,
            what=f"{name}: without the fixed cost of a run, measured next to each",
            seconds=prepare.seconds,
            fixed_cost_s=prepare.fixed_s,
            **settings,
        )

        def with_hours() -> Comparison:
            result, words = scaling.make(), sum(len(text.split()) for text in texts)
            words_per_s = result.peer * words / prepare.tokens
            hours = {"core_hours_for_3_3e9_words": round(PAPER_WORDS / words_per_s / 3600, 2)}
            return replace(result, settings=result.settings | {"words": words} | hours)

        yield Planned(scaling.name, with_hours)


def _corpora(most_bytes: int | None) -> dict[str, list[str]]:
    """Lines of each corpus; `prepare` is measured on the last one."""
    folder = os.environ.get("RAYBERT_DATA")
    if folder:
        wikitext = (Path(folder) / "wikitext2" / "train.txt").read_text(encoding="utf-8")
        books = sorted((Path(folder) / "classic_books").rglob("*.md"))
        corpora = {
            "wikitext2": wikitext,
            "classic_books": "\n".join(path.read_text(encoding="utf-8") for path in books),
        }
    else:
        from pipelines.corpus import docstrings

        docstrings.corpus()
        table = pq.read_table(docstrings.corpus_file())
        corpora = {"docstrings": "\n\n".join(table.column("text").to_pylist())}
    return {name: text[:most_bytes].split("\n") for name, text in corpora.items()}


def _head(texts: list[str], most_bytes: int) -> list[str]:
    ends = list(accumulate(len(text) + 1 for text in texts))
    return texts[: bisect_left(ends, most_bytes) + 1]


def _words_once(
    kind: TokenizerKind, name: str, texts: list[str], tokenizer: Tokenizer, rounds: int
) -> Planned:
    column = pa.array(texts)

    def ours() -> float:
        began = time.perf_counter()
        ids = Tokenizer(tokenizer.inner).encode_column(column).values  # knows no word yet
        return len(ids) / (time.perf_counter() - began)

    return compare(
        f"{kind}_vs_encode_batch_fast",
        ours,
        lambda: _encode(texts, tokenizer),
        unit="tokens/s",
        rounds=rounds,
        what=f"{name}, one core",
        corpus=name,
        vocab_size=tokenizer.vocab_size,
        texts=len(texts),
        bytes=column.nbytes,
    )


def _encode(texts: list[str], tokenizer: Tokenizer) -> float:
    began = time.perf_counter()
    tokens = 0
    for start in range(0, len(texts), PEER_TEXTS):
        some = texts[start : start + PEER_TEXTS]
        tokens += sum(map(len, tokenizer.inner.encode_batch_fast(some, add_special_tokens=False)))
    return tokens / (time.perf_counter() - began)


def _encode_in_parallel(texts: list[str], tokenizer: Tokenizer) -> float:
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        return _encode(texts, tokenizer)
    finally:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"


class _Prepare:
    """`raybert prepare` on a running Ray; every run writes into a new folder."""

    def __init__(
        self,
        folder: Path,
        texts: list[str],
        tokenizer: Tokenizer,
        pairs: PairsConfig,
        masking: MaskingConfig,
    ) -> None:
        from pipelines.runtime import cluster

        self._rows: dict[str, Any] = {"pairs": pairs, "masking": masking}
        self.settings: dict[str, Any] = {
            "max_length": pairs.max_length,
            "dupe_factor": pairs.dupe_factor,
            "workers": WORKERS,
        }
        self.seconds: dict[int, list[float]] = {1: [], 2: []}
        self.fixed_s: dict[int, list[float]] = {1: [], 2: []}
        self.tokens = 0
        self._folder = folder
        self._runs = 0
        tokenizer.save(folder / "vocab")
        (folder / "corpus").mkdir(parents=True)
        # A document is a chapter of a book, or a module.
        (folder / "corpus" / "text.txt").write_text("\n".join(texts), encoding="utf-8")
        # Enough to give two workers a block and a shard each.
        small = "".join(f"## Chapter\nThis is number {n}. Two. Three.\n" for n in range(150))
        (folder / "small.txt").write_text(small)
        cluster.connect(address="local", num_cpus=WORKERS)

    def rate(self, workers: int, *, without_fixed: bool = False) -> float:
        """Tokens of the corpus per second, from the first byte read to the manifest.

        The fixed cost is the time of a run on 5 kB right before this one, since a machine's speed
        drifts.
        """
        fixed_s = 0.0
        if without_fixed:
            small, fixed_s = self._run("small.txt", workers, 2 << 10)
            shutil.rmtree(small)
            self.fixed_s[workers].append(fixed_s)
        output, seconds = self._run("corpus", workers)
        self.tokens = read_manifest(str(output)).counts["tokens"]
        shutil.rmtree(output)
        self.seconds[workers].append(seconds)
        return self.tokens / (seconds - fixed_s)

    def _run(self, source: str, workers: int, block_bytes: int = BLOCK_BYTES) -> tuple[Path, float]:
        from pipelines import prepare
        from pipelines.corpus.config import CorpusConfig

        self._runs += 1
        output = self._folder / f"shards-{self._runs}"
        config = prepare.PrepareConfig(
            output=str(output),
            tokenizer=str(self._folder / "vocab"),
            corpus=CorpusConfig(source=str(self._folder / source), document_boundary="heading"),
            **self._rows,
            shard_bytes=block_bytes,
            block_bytes=block_bytes,
            num_workers=workers,
            tracking_uri=f"sqlite:///{self._folder}/mlflow.db",
        )
        began = time.perf_counter()
        with redirect_stdout(io.StringIO()):  # its output would end up in the table
            prepare.run(config)
        return output, time.perf_counter() - began


def _datasets_map(texts: list[str], tokenizer: Tokenizer, folder: Path) -> Callable[[], float]:
    """The steps of run_mlm.py: tokenise, join, cut into rows of one length, write."""
    import datasets

    datasets.disable_progress_bars()
    path = folder / "corpus" / "text.txt"

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encodings = tokenizer.inner.encode_batch_fast(batch["text"], add_special_tokens=True)
        return {"input_ids": [encoding.ids for encoding in encodings]}

    def group(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        ids = [id_ for row in batch["input_ids"] for id_ in row]
        total = len(ids) // LENGTH * LENGTH
        return {"input_ids": [ids[start : start + LENGTH] for start in range(0, total, LENGTH)]}

    def rate() -> float:
        cache = folder / "datasets"
        shutil.rmtree(cache, ignore_errors=True)
        began = time.perf_counter()
        rows = datasets.load_dataset(
            "text", data_files=str(path), split="train", cache_dir=str(cache)
        )
        options = {"batched": True, "num_proc": WORKERS, "load_from_cache_file": False}
        encoded = rows.map(encode, remove_columns=["text"], **options)
        encoded.map(group, **options).save_to_disk(str(cache / "rows"))
        seconds = time.perf_counter() - began
        special = 2 * len(encoded)  # [CLS] and [SEP] of every line are not tokens of the corpus
        return (sum(map(len, encoded["input_ids"])) - special) / seconds

    return rate


if __name__ == "__main__":
    main(benchmark, "prepare")
