"""Pairs of texts + passages → the pairs with hard negatives: passages that a model finds near the
first text, but not too near.

Passages are embedded in parts, and so are the pairs, each of which is searched for among all
passages. A part is done once: a killed run goes on with the next. A part's bytes depend on the
inputs alone, and a worker's memory on the size of a part.
"""

import base64
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float, Int

from bert_core import files
from bert_core.checks import NonNegativeFloat, NonNegativeInt, PositiveInt
from bert_core.errors import ConfigError, CorpusError
from bert_core.manifest import Manifest
from bert_core.tasks.digests import Digests, row_digests
from bert_core.tasks.shapes import Row
from bert_core.tasks.texts import PairInput
from pipelines.answering.embedding import Embedded, embedded
from pipelines.answering.mining import (
    DIGEST,
    TEXT,
    VECTOR,
    NearnessConfig,
    belonging,
    candidates,
    first_places,
    nearest,
    texts_at,
)
from pipelines.answering.parts import (
    OutputPart,
    PartsCounts,
    Read,
    RowsConfig,
    check_files,
    finish_part,
    is_table,
    make_parts,
    read_tables,
    read_texts,
    row_file,
    usual_part_bytes,
)
from pipelines.answering.predictors import options_text, predictor_of
from pipelines.corpus.blocks import plan_blocks
from pipelines.corpus.digest import ordered_corpus_input
from pipelines.corpus.readers.base import Block
from pipelines.corpus.sources import Corpus, list_corpus
from pipelines.runtime.distribute import run_tasks
from pipelines.runtime.inputs import bundle_input
from pipelines.runtime.outputs import local_outputs
from pipelines.runtime.progress import CUT, counted, meter
from pipelines.runtime.result import Result
from pipelines.runtime.stage import run_stage
from pipelines.runtime.stage_config import INPUT
from tracking.runs.recorder import DatasetInput

if TYPE_CHECKING:
    from bert_core.inference.predictor import Predictor

PASSAGES, RELEVANT = "passages", "relevant.npy"
"""The embedded passages, and the digests of all queries with those of their passages."""
NEGATIVES, SCORES = "negatives", "scores"
"""The columns that are added."""
PICTURE = "margins.png"
ROWS_AT_ONCE = 1024
TOO_NEAR, RULED_OUT = "candidates_too_near", "candidates_ruled_out_by_the_ranker"
FEWER, NEGATIVE_COUNT = "rows_with_fewer_negatives", "negatives"
EDGES = np.round(np.linspace(-0.5, 1.5, 41), 2)
"""Edges of the bins of margins: how far the cosine of a negative is below that of the row's own
passage. What is beyond them is in the last ones."""
BIN = "margin_bin_"


@dataclass(frozen=True, kw_only=True)
class MineConfig(RowsConfig):
    """Which pairs to find negatives for, among which passages; a pair has `text` and `text_pair`,
    which belongs to it."""

    model: str = field(metadata=INPUT)
    """Bundle whose vectors find the passages: a folder, a URI, models:/name@alias, or owner/name or
    owner/name@revision of the Hugging Face hub."""
    passages: str | tuple[str, ...] = field(default=(), metadata=INPUT)
    """Passages to draw from, in files as `source`, with a text each; by default the second texts of
    all pairs."""
    passage_column: str = "text"
    """Column of a passage's text."""
    task: str | None = None
    """`feature-extraction` for a model that was not trained for vectors."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the task, as in `predict`."""
    negatives: PositiveInt = 4
    """Negatives per row; fewer where there are not as many."""
    near: NearnessConfig = field(default_factory=NearnessConfig)
    """Which passages are too near, or too far, to be negatives."""
    draw: Literal["at_random", "nearest"] = "at_random"
    """Which of those that remain are taken."""
    seed: NonNegativeInt = 0
    """Seed of what is drawn at random; a row's draw depends on it and on the row's texts alone."""
    ranker: str | None = field(default=None, metadata=INPUT)
    """Bundle for text ranking that reads the text with each passage: passages that it finds as
    relevant as the row's own are left out. Its scores of the own passage and of the negatives
    become the column `scores`, for training with a teacher."""
    ranker_margin: NonNegativeFloat = 0.0
    """How far the ranker's score of a negative must be below that of the own passage, before the
    sigmoid."""


@dataclass(frozen=True, kw_only=True)
class MineCounts(PartsCounts):
    passages: int = 0
    """Different passages that were searched."""

    @property
    def line(self) -> str:
        return f"{self._negatives} for {counted(self.rows, 'row')}"

    @property
    def sentence(self) -> str:
        passages = counted(self.passages, "passage")
        return f"Mined {self._negatives} for {counted(self.rows, 'row')}, from {passages}."

    @property
    def _negatives(self) -> str:
        return counted(self.remarks.get(NEGATIVE_COUNT, 0), "negative")


class Models(NamedTuple):
    """The local folders of the models."""

    embedder: Path
    ranker: Path | None


class PassagePart(NamedTuple):
    """A part of the passages: its number, its block, and which of its texts occur there first."""

    number: int
    block: Block
    kept: bytes


@dataclass(frozen=True, kw_only=True)
class PassageInput:
    """A passage."""

    text: str
    """Its text."""


def run(config: MineConfig) -> Manifest:
    """Write every pair with its negatives, in input order."""
    folder, model = bundle_input(config, config.model)
    predictor_of.cache_clear()  # an earlier run in this process may have read other contents
    inputs, ranker = [model], None
    if config.ranker is not None:
        ranker, of_ranker = bundle_input(config, config.ranker)
        ranker = ranker.absolute()
        inputs.append(replace(of_ranker, name="ranker"))
    pairs = list_corpus(config.corpus, config.output)
    rows = ordered_corpus_input(pairs, config)
    inputs.append(DatasetInput("rows", rows.digest, rows.source))
    passages = pairs
    if config.passages:
        passages = list_corpus(_passages_config(config).corpus, config.output)
        of_passages = ordered_corpus_input(passages, config)
        inputs.append(DatasetInput(PASSAGES, of_passages.digest, of_passages.source))
    models = Models(folder.absolute(), ranker)
    return run_stage("mine", config, inputs, lambda _: _mine(config, pairs, passages, models))


def _passages_config(config: MineConfig) -> MineConfig:
    """Return the config with the passages as the rows to read."""
    columns = {"text": config.columns.get("text_pair", "text_pair")}
    if config.passages:
        columns = {"text": config.passage_column}
    return replace(config, source=config.passages or config.source, columns=columns)


def _mine(config: MineConfig, pairs: Corpus, passages: Corpus, models: Models) -> Result:
    _check_models(config, models)
    check_files(config, pairs, PairInput, _check_free)
    of_passages = _passages_config(config)
    if config.passages:
        check_files(of_passages, passages, PassageInput, lambda names, where: None)
    _index_pairs(config, pairs)
    count = _embed_passages(of_passages, passages, models.embedder)
    work = partial(make_part, config, models, count)
    result = make_parts("mine", config, pairs, work, MineCounts)
    counts = result.counts
    bins = [counts.remarks.get(f"{BIN}{place}", 0) for place in range(len(EDGES) - 1)]
    remarks = {name: n for name, n in counts.remarks.items() if not name.startswith(BIN)}
    from tracking.runs.plots import plot_margins

    picture = plot_margins(bins, EDGES, config.local_folder / PICTURE)
    return Result(
        outputs={**result.outputs, **local_outputs(config, [picture])},
        counts=replace(counts, remarks=remarks, passages=count),
        artifacts=[picture],
    )


def _check_models(config: MineConfig, models: Models) -> None:
    """Raise ConfigError unless the models are for vectors, and for ranking."""
    from bert_core.tasks.searching import Searching

    task = _embedder(config, models.embedder).task
    if not (task.headless and isinstance(task, Searching)):  # sparse vectors have a head
        raise ConfigError(
            f"model: wanted one for vectors, got {config.model}, which is for {task.name}: give "
            "another, or --task feature-extraction for the vectors of its encoder"
        )
    if models.ranker is not None:
        ranker = predictor_of(models.ranker, config.threads_per_worker).task
        if ranker.name != "text-ranking":
            raise ConfigError(
                f"ranker: wanted a model for text-ranking, got {config.ranker}, which is for "
                f"{ranker.name}: give another, or leave it out"
            )


def _check_free(names: Iterable[str], where: str) -> None:
    for name in names:
        if name in (NEGATIVES, SCORES):
            raise CorpusError(
                f"{where}: wanted no column {name!r}, which is added here: rename or remove it"
            )


def _embedder(config: MineConfig, folder: Path) -> "Predictor":
    return predictor_of(
        folder, config.threads_per_worker, config.task, options_text(config.options)
    )


def _rows_of(block: Block, part: OutputPart) -> Iterator[tuple[pa.Table | None, list[Read]]]:
    """Yield the rows of a block in batches, each with its table if it is from Parquet."""
    if is_table(block):
        yield from read_tables(block, part, ROWS_AT_ONCE)
        return
    texts = read_texts(block, part)
    while rows := list(islice(texts, ROWS_AT_ONCE)):
        yield None, rows


def _inputs_of(config: MineConfig, shape: type, block: Block) -> Iterator[Row]:
    """Yield the rows of a block that have the input; the others are named when they are used."""
    part = OutputPart(config, shape)
    for _, rows in _rows_of(block, part):
        yield from filter(None, map(part.input_of, rows))


def _index_pairs(config: MineConfig, pairs: Corpus) -> None:
    """Write the digests of all queries with those of their passages, if an earlier run has not."""
    path = files.join(config.output, RELEVANT)
    if files.exists(path):
        return
    blocks = plan_blocks(pairs, config.part_bytes or usual_part_bytes(pairs))
    found = _digests(partial(_pair_digests, config), blocks, config, "reading pairs")
    both = np.concatenate(found).reshape(-1, 2)
    with files.writing(path) as sink:
        np.save(sink, np.unique(both, axis=0))


def _digests(work: Any, blocks: Sequence[Block], config: MineConfig, title: str) -> list[Digests]:
    found: list[Digests] = [np.zeros(0, "<u8")] * len(blocks)
    with meter(title, len(blocks), "parts") as progress:
        for index, packed in run_tasks(work, blocks, config):
            found[index] = np.frombuffer(base64.b64decode(packed), "<u8")
            progress.add()
    return found


def _pair_digests(config: MineConfig, block: Block) -> str:
    rows = list(_inputs_of(config, PairInput, block))
    both = np.stack([row_digests(rows, ["text"]), _of_texts([r["text_pair"] for r in rows])], 1)
    return base64.b64encode(np.ascontiguousarray(both).data).decode()


def _passage_digests(config: MineConfig, block: Block) -> str:
    rows = list(_inputs_of(config, PassageInput, block))
    return base64.b64encode(row_digests(rows, ["text"]).data).decode()


def _of_texts(texts: Sequence[str]) -> Digests:
    return row_digests([{"text": text} for text in texts], ["text"])


def _embed_passages(config: MineConfig, passages: Corpus, folder: Path) -> int:
    """Embed each different passage once, part by part; return their number.

    Args:
        config: the one of `_passages_config`.
    """
    blocks = plan_blocks(passages, config.part_bytes or usual_part_bytes(passages))
    found = _digests(partial(_passage_digests, config), blocks, config, "reading passages")
    kept = first_places(found) if found else []
    parts = [
        PassagePart(number, block, np.packbits(own).tobytes())
        for number, (block, own) in enumerate(zip(blocks, kept, strict=True))
        if not files.exists(_passage_file(config, number))
    ]
    with meter("embedding passages", len(blocks), "parts") as progress:
        progress.set(len(blocks) - len(parts))
        for _ in run_tasks(partial(_embed_part, config, folder), parts, config, use_gpu=True):
            progress.add()
    count = int(sum(own.sum() for own in kept))
    if not count:
        raise CorpusError(f"{passages.name}: wanted at least one passage, got none: name another")
    return count


def _passage_file(config: MineConfig, number: int) -> str:
    return files.join(config.output, PASSAGES, f"part-{number:05d}.parquet")


def _embed_part(config: MineConfig, folder: Path, part: PassagePart) -> int:
    """Write the passages of a part that occur there first, with their vectors."""
    import pyarrow.parquet as pq

    rows = list(_inputs_of(config, PassageInput, part.block))
    kept: Bool[np.ndarray, _] = np.unpackbits(np.frombuffer(part.kept, np.uint8)).astype(bool)
    texts = [row["text"] for row, keeps in zip(rows, kept, strict=False) if keeps]
    predictor = _embedder(config, folder)
    schema = pa.schema(
        {TEXT: pa.string(), DIGEST: pa.uint64(), VECTOR: pa.list_(pa.float32(), _size(predictor))}
    )
    with (
        files.writing(_passage_file(config, part.number)) as sink,
        pq.ParquetWriter(sink, schema, compression="zstd") as writer,
    ):
        for start in range(0, len(texts), ROWS_AT_ONCE):
            own = texts[start : start + ROWS_AT_ONCE]
            vectors = _dense(embedded(predictor, own, "document"))
            flat = pa.array(vectors.ravel())
            columns = [
                pa.array(own, pa.string()),
                pa.array(_of_texts(own)),
                pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1]),
            ]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))
    return len(texts)


def _size(predictor: "Predictor") -> int:
    return predictor.bundle.encoder_config.hidden_size


def _dense(texts: Embedded) -> Float[np.ndarray, "texts size"]:
    assert isinstance(texts.vectors, np.ndarray)
    return texts.vectors


@dataclass(frozen=True)
class Mined:
    """The negatives of a pair."""

    negatives: list[str]
    margins: Float[np.ndarray, "negatives"]
    """How far the cosine of each is below that of the row's own passage."""
    scores: list[float]
    """The ranker's scores of the own passage and of the negatives; empty without a ranker."""


@dataclass(frozen=True)
class Found:
    """The candidates of the pairs of a part."""

    paths: list[str]
    """The passages' files."""
    drawn: list[Int[np.ndarray, "_"]]
    """Places of the candidates of each pair among all passages, in the order in which they are
    taken."""
    margins: list[Float[np.ndarray, "_"]]
    """How far the cosine of each is below that of the row's own passage."""


class _Mining(OutputPart):
    """Finds negatives for the pairs of a part."""

    def __init__(self, config: MineConfig, models: Models) -> None:
        super().__init__(config, PairInput)
        self.config, self.models = config, models
        self.batches: list[tuple[pa.Table | None, list[Read]]] = []
        self.pairs: list[Row] = []

    def check_names(self, names: Iterable[str], where: str) -> None:
        _check_free(names, where)

    def read(self, block: Block) -> None:
        """Read the rows of the part; put those aside that are no pairs."""
        for table, rows in _rows_of(block, self):
            inputs = [(row, self.input_of(row)) for row in rows]
            self.batches.append((table, [row for row, pair in inputs if pair is not None]))
            self.pairs += [pair for _, pair in inputs if pair is not None]
        self.take(self.pairs)

    def mine(self, passages: int) -> list[Mined]:
        """Return the negatives of every pair, in order.

        Args:
            passages: how many there are.
        """
        if not self.pairs:
            return []
        found = self._found(passages)
        taken, scores = self._taken(found)
        drawn = [places[own] for places, own in zip(found.drawn, taken, strict=True)]
        places = np.unique(np.concatenate(drawn))
        text_of = dict(zip(places.tolist(), texts_at(found.paths, places), strict=True))
        mined = []
        for number, own in enumerate(taken):
            negatives = [text_of[place] for place in drawn[number].tolist()]
            mined.append(Mined(negatives, found.margins[number][own], scores[number]))
            self.counts[NEGATIVE_COUNT] += len(negatives)
            self.counts[FEWER] += len(negatives) < self.config.negatives
            inside = np.clip(mined[-1].margins, EDGES[0], EDGES[-1] - 1e-6)
            for place, count in enumerate(np.histogram(inside, EDGES)[0].tolist()):
                if count:
                    self.counts[f"{BIN}{place}"] += count
        return mined

    def _found(self, passages: int) -> Found:
        config, predictor = self.config, _embedder(self.config, self.models.embedder)
        texts, own_texts = ([pair[name] for pair in self.pairs] for name in ("text", "text_pair"))
        asked = embedded(predictor, texts, "query")
        owned = embedded(predictor, own_texts, "document")
        self.tokens += asked.tokens + owned.tokens
        self.counts[CUT] += asked.cut + owned.cut
        queries = _dense(asked)
        own_scores = (queries * _dense(owned)).sum(1)
        relevant = np.load(io.BytesIO(files.read_bytes(files.join(config.output, RELEVANT))))
        keys = np.stack([_of_texts(texts), _of_texts(own_texts)], axis=1)
        excluded = [belonging(int(query), relevant) for query in keys[:, 0]]
        count = config.near.last_rank + max(map(len, excluded))
        paths = files.find_files(files.join(config.output, PASSAGES))
        scores, places, digests = nearest(queries, paths, min(count, passages))
        drawn, margins = [], []
        for number, (key, none_of) in enumerate(zip(keys.tolist(), excluded, strict=True)):
            own_score = float(own_scores[number])
            here = digests[places[number]]
            found = candidates(scores[number], here, own_score, none_of, config.near)
            self.counts[TOO_NEAR] += found.too_near
            order = found.places
            if config.draw == "at_random":
                order = np.random.default_rng([config.seed, *key]).permutation(order)
            drawn.append(places[number][order])
            margins.append(own_score - scores[number][order].astype(np.float64))
        return Found(paths, drawn, margins)

    def _taken(self, found: Found) -> tuple[list[Int[np.ndarray, "_"]], list[list[float]]]:
        """Return which of the candidates of each pair are taken, and the ranker's scores."""
        wanted = self.config.negatives
        if self.models.ranker is None:
            return [np.arange(min(wanted, len(own))) for own in found.drawn], [[]] * len(self.pairs)
        own = self._ranked([(pair["text"], pair["text_pair"]) for pair in self.pairs])
        taken: list[list[int]] = [[] for _ in self.pairs]
        scores = [[score] for score in own]
        asked = 0
        while True:  # as many candidates of each pair at a time as it still may want
            batch = [
                (number, place)
                for number, drawn in enumerate(found.drawn)
                if len(taken[number]) < wanted
                for place in range(asked, min(asked + wanted, len(drawn)))
            ]
            if not batch:
                break
            at = np.array([found.drawn[number][place] for number, place in batch])
            places, index = np.unique(at, return_inverse=True)
            texts = texts_at(found.paths, places)
            pairs = [
                (self.pairs[number]["text"], texts[i])
                for (number, _), i in zip(batch, index.tolist(), strict=True)
            ]
            for (number, place), score in zip(batch, self._ranked(pairs), strict=True):
                if score > own[number] - self.config.ranker_margin:
                    self.counts[RULED_OUT] += 1
                elif len(taken[number]) < wanted:
                    taken[number].append(place)
                    scores[number].append(score)
            asked += wanted
        return [np.array(own, dtype=np.int64) for own in taken], scores

    def _ranked(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Return the ranker's score of each text with a passage, before the sigmoid."""
        assert self.models.ranker is not None
        ranker = predictor_of(self.models.ranker, self.config.threads_per_worker)
        parameters: Any = ranker.task.parameters
        rows = [{"text": text, "text_pair": passage} for text, passage in pairs]
        answers = self.ask(ranker, rows, parameters(truncation=True, raw_scores=True))
        return [float(ranker.task.cells(answer)["score"]) for answer in answers]


def make_part(
    config: MineConfig, models: Models, passages: int, item: tuple[int, Block]
) -> dict[str, Any]:
    """Find negatives for the pairs of one block, and write the pairs with them."""
    number, block = item
    part = _Mining(config, models)
    part.read(block)
    mined = iter(part.mine(passages))
    suffix, write = ("parquet", _write_tables) if is_table(block) else ("jsonl", _write_lines)
    with files.writing(files.join(config.output, row_file(number, suffix))) as sink:
        write(sink, part, mined)
    return finish_part(config, number, part, suffix)


def _columns(mined: Mined) -> dict[str, Any]:
    return {NEGATIVES: mined.negatives, **({SCORES: mined.scores} if mined.scores else {})}


def _write_lines(sink: BinaryIO, part: _Mining, mined: Iterator[Mined]) -> None:
    for _, rows in part.batches:
        for row in rows:
            line = json.dumps(row.columns | _columns(next(mined)), ensure_ascii=False)
            sink.write(f"{line}\n".encode())


def _write_tables(sink: BinaryIO, part: _Mining, mined: Iterator[Mined]) -> None:
    import pyarrow.parquet as pq

    writer: pq.ParquetWriter | None = None
    for table, rows in part.batches:
        assert table is not None
        own = [next(mined) for _ in rows]
        written = table.take(pa.array([row.place for row in rows], pa.int64()))
        negatives = pa.array([each.negatives for each in own], pa.list_(pa.string()))
        written = written.append_column(NEGATIVES, negatives)
        if part.models.ranker is not None:
            scores = pa.array([each.scores for each in own], pa.list_(pa.float64()))
            written = written.append_column(SCORES, scores)
        if writer is None:
            writer = pq.ParquetWriter(sink, written.schema, compression="zstd")
        writer.write_table(written)
    if writer is not None:
        writer.close()
