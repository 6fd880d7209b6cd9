"""Corpus → masked shards, in two passes over Ray Data.

The first encodes each block of the corpus into a fragment that holds one batch a shard; the second
reads batch s of every fragment and makes shard s: documents ordered by id, paired, permuted,
masked. Nothing depends on workers, blocks or restarts, and a restart makes only what is missing.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from itertools import pairwise

import numpy as np
import pyarrow as pa
from jaxtyping import Integer

from bert_core import files
from bert_core.data.documents import clean, document_digest, document_fraction, split_sentences
from bert_core.data.draws import row_keys
from bert_core.data.masking import Masker, MaskingConfig
from bert_core.data.pairs import LABELS, Documents, PairsConfig, Segments, assemble, make_rows
from bert_core.data.shards import (
    HELD_OUT,
    TRAIN,
    ShardInfo,
    ShardRows,
    shard_name,
    to_bytes,
)
from bert_core.data.tokenizer import CONTINUATION, Tokenizer
from bert_core.errors import ConfigError, CorpusError
from bert_core.manifest import Manifest, Output
from pipelines.distribute import run_tasks
from pipelines.report import meter, say
from pipelines.sources import (
    Block,
    CorpusConfig,
    corpus_input,
    corpus_size_bytes,
    plan_blocks,
    read_block,
)
from pipelines.stage import INPUT, Result, StageConfig, run_stage
from tracking.runs import DatasetInput

FRAGMENTS = "fragments"
SLICE_TOKENS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(StageConfig):
    """What rows to make of the corpus."""

    tokenizer: str = field(metadata=INPUT)
    """Folder of `raybert vocab`, or one in Hugging Face layout."""
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    """The text to prepare."""
    pairs: PairsConfig = field(default_factory=PairsConfig)
    """How sentences become rows."""
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    """What is predicted in a row."""
    shard_bytes: int = 16 << 20
    """Bytes of text that a shard aims at; a worker holds one shard in memory."""
    block_bytes: int = 8 << 20
    """Bytes of a file that are read at once; changes nothing in the shards."""
    seed: int = 0
    """Seed of everything that is drawn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("shard_bytes", "block_bytes"):
            if getattr(self, name) < 1024:
                raise ConfigError(f"{name}: wanted at least 1024, got {getattr(self, name)}")


@dataclass(frozen=True)
class Plan:
    """What both passes need to know; a function of corpus and config."""

    config: PrepareConfig
    train_shards: int
    held_out_shards: int

    @property
    def shards(self) -> list[tuple[str, str]]:
        """(split, file name) of every shard, training first; the position is the shard's number."""
        return [
            (split, shard_name(split, index, count))
            for split, count in ((TRAIN, self.train_shards), (HELD_OUT, self.held_out_shards))
            for index in range(count)
        ]

    def shard_of(self, digest: bytes, split: str | None) -> int:
        """The shard of a document: by what its corpus says of it, else by its hash."""
        seed = self.config.seed
        if split is None:
            fraction = document_fraction(digest, seed, "split")
            split = HELD_OUT if fraction < self.config.corpus.held_out_share else TRAIN
        if split == HELD_OUT and self.held_out_shards:
            first, count = self.train_shards, self.held_out_shards
        else:
            first, count = 0, self.train_shards
        return first + int(document_fraction(digest, seed, "shard") * count)

    def neighbours(self, shard: int) -> Iterator[int]:
        """The shards that a shard borrows from, in order; training never sees held-out ones."""
        train = range(self.train_shards)
        held_out = range(self.train_shards, self.train_shards + self.held_out_shards)
        own = train if shard in train else held_out
        yield from (number for number in own if number > shard)
        yield from (number for number in own if number < shard)
        if own == held_out:
            yield from train


def run(config: PrepareConfig) -> Manifest:
    """Write the shards of the corpus."""
    # Workers may run in another folder.
    config = replace(
        config,
        output=files.absolute(config.output),
        tokenizer=files.absolute(config.tokenizer),
    )
    size_bytes = corpus_size_bytes(config.corpus)
    tokenizer = _tokenizer(config.tokenizer)
    inputs = [
        corpus_input(config.corpus),
        DatasetInput("tokenizer", tokenizer.digest, config.tokenizer),
    ]
    return run_stage("prepare", config, inputs, lambda _: _prepare(config, size_bytes))


def _prepare(config: PrepareConfig, size_bytes: int) -> Result:
    from tracking.plots import plot_lengths

    train_shards = max(1, round(size_bytes / config.shard_bytes))
    share = config.corpus.held_out_share
    plan = Plan(config, train_shards, max(1, round(train_shards * share)) if share else 0)
    blocks = plan_blocks(config.corpus, config.block_bytes)
    fragments = [
        files.join(config.output, FRAGMENTS, f"block-{index:06d}.arrow")
        for index in range(len(blocks))
    ]
    _encode_blocks(plan, blocks, fragments)
    encoded = sum((_counts_of(path) for path in fragments), Counter())
    if not encoded["documents"]:
        raise CorpusError(
            f"{', '.join(config.corpus.sources)}: wanted text, found only empty documents: "
            "check the corpus and corpus.text_column"
        )
    infos, rows, lengths = _make_shards(plan, fragments)
    files.remove(files.join(config.output, FRAGMENTS))
    tokenizer = _tokenizer(config.tokenizer)
    counts = {
        **encoded,
        **rows,
        "corpus_bytes": size_bytes,
        "tokenizer_digest": tokenizer.digest,
        "vocab_size": tokenizer.vocab_size,
        "max_length": config.pairs.max_length,
        "label": LABELS[config.pairs.kind],
        "masking": asdict(config.masking),
        "mask_id": tokenizer.mask_id,
        "special_ids": tokenizer.special_ids.tolist(),
        "shards": [asdict(info) for info in infos],
    }
    say(
        f"prepare: {encoded['documents']:,} documents, {encoded['tokens']:,} tokens "
        f"→ {rows['rows']:,} rows in {len(infos)} shards in {config.output}"
    )
    outputs = {info.name: Output(size_bytes=info.size_bytes, sha256=info.sha256) for info in infos}
    picture = plot_lengths(lengths, config.local_folder / "lengths.png")
    return Result(outputs=outputs, counts=counts, artifacts=[picture])


def _encode_blocks(plan: Plan, blocks: list[Block], fragments: list[str]) -> None:
    missing = [
        (block, path)
        for block, path in zip(blocks, fragments, strict=True)
        if not files.exists(path)
    ]
    with meter("encoding", len(blocks), "blocks") as progress:
        progress.set(len(blocks) - len(missing))
        for _ in run_tasks(partial(_encode_block, plan), missing, plan.config):
            progress.add()


def _encode_block(plan: Plan, task: tuple[Block, str]) -> None:
    """Write a fragment: for every shard a batch of its documents, encoded."""
    block, path = task
    tokenizer = _tokenizer(plan.config.tokenizer)
    shards, digests, sentences, sentence_counts = [], [], [], []
    for document in read_block(block):
        text = clean(document.text)
        split_up = split_sentences(text)
        if split_up:
            digest = document_digest(text)
            shards.append(plan.shard_of(digest, document.split))
            digests.append(digest)
            sentences.extend(split_up)
            sentence_counts.append(len(split_up))
    encoded = tokenizer.encode_column(pa.array(sentences, pa.string()))
    counts = {
        "documents": len(digests),
        "sentences": len(sentences),
        "tokens": len(encoded.values),
        "unknown_tokens": int((encoded.values.to_numpy() == tokenizer.unk_id).sum()),
    }
    bounds = np.concatenate([[0], np.cumsum(sentence_counts)]).astype(np.int32)
    documents = pa.ListArray.from_arrays(pa.array(bounds), encoded)
    table = pa.record_batch({"digest": pa.array(digests, pa.binary(32)), "sentences": documents})
    order = np.argsort(shards, kind="stable")
    cuts = np.searchsorted(np.asarray(shards)[order], np.arange(len(plan.shards) + 1))
    sink = pa.BufferOutputStream()
    schema = table.schema.with_metadata({"counts": json.dumps(counts)})
    with pa.ipc.new_file(sink, schema) as writer:
        for start, end in pairwise(cuts):
            writer.write_batch(table.take(pa.array(order[start:end])))
    files.write_bytes(path, sink.getvalue())


def _counts_of(fragment: str) -> Counter[str]:
    with files.open_input(fragment) as file:
        metadata = pa.ipc.open_file(file).schema.metadata
    return Counter(json.loads(metadata[b"counts"]))


def _make_shards(
    plan: Plan, fragments: list[str]
) -> tuple[list[ShardInfo], Counter[str], Counter[int]]:
    """Every shard's line of the manifest, what was counted in all, and rows by their length."""
    infos: dict[int, ShardInfo] = {}
    totals: Counter[str] = Counter()
    lengths: Counter[int] = Counter()
    numbers = list(range(len(plan.shards)))
    with meter("pairing and masking", len(numbers), "shards") as progress:
        for shard, answer in run_tasks(partial(_make_shard, plan, fragments), numbers, plan.config):
            infos[shard] = ShardInfo(**answer["info"])
            totals.update(answer["counts"])
            lengths.update({int(length): rows for length, rows in answer["lengths"].items()})
            progress.add()
    return [infos[shard] for shard in numbers], totals, lengths


def _make_shard(plan: Plan, fragments: list[str], shard: int) -> dict:
    """Make one shard, unless a killed run has made it; give its line of the manifest."""
    split, name = plan.shards[shard]
    path = files.join(plan.config.output, name)
    if files.exists(path):
        data = files.read_bytes(path)
    else:
        data = _shard_bytes(plan, fragments, shard)
        files.write_bytes(path, data)
    output = Output.of(path)
    metadata = pa.ipc.open_file(pa.py_buffer(data)).schema.metadata
    counts, lengths = (json.loads(metadata[name]) for name in (b"counts", b"lengths"))
    info = ShardInfo(
        name=name,
        split=split,
        rows=counts["rows"],
        tokens=counts["row_tokens"],
        size_bytes=output.size_bytes,
        sha256=output.sha256,
    )
    return {"info": asdict(info), "counts": counts, "lengths": lengths}


def _shard_bytes(plan: Plan, fragments: list[str], shard: int) -> pa.Buffer:
    config = plan.config
    tokenizer = _tokenizer(config.tokenizer)
    documents = _documents_of(plan, fragments, shard)
    begins_word = _word_start_ids(config.tokenizer)[documents.input_ids]
    segments = Segments.concatenate(
        [
            make_rows(
                documents,
                begins_word,
                config.pairs,
                np.random.default_rng([config.seed, shard, duplicate]),
            )
            for duplicate in range(config.pairs.dupe_factor)
        ]
    )
    rng = np.random.default_rng([config.seed, shard, config.pairs.dupe_factor])
    segments = segments.take(rng.permutation(len(segments)))
    rows = _finish(plan, shard, documents.input_ids, segments)
    counts = {
        "rows": len(rows),
        "row_tokens": len(rows.input_ids),
        "masked_tokens": len(rows.masked_labels),
        **{f"{name}_1": int(column.sum()) for name, column in rows.labels.items()},
    }
    lengths = dict(sorted(Counter(np.diff(rows.offsets).tolist()).items()))
    return to_bytes(
        rows,
        id_type=tokenizer.id_type,
        metadata={
            "tokenizer_digest": tokenizer.digest,
            "counts": json.dumps(counts),
            "lengths": json.dumps(lengths),
        },
    )


def _finish(
    plan: Plan, shard: int, input_ids: Integer[np.ndarray, "tokens"], segments: Segments
) -> ShardRows:
    """Lay the rows out and mask them, a slice at a time: masking takes 60 bytes a token."""
    config = plan.config
    tokenizer = _tokenizer(config.tokenizer)
    label = LABELS[config.pairs.kind]
    masker = _masker(plan)
    lengths = segments.lengths()
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    seen = np.empty(offsets[-1], dtype=input_ids.dtype)
    b_starts, positions, labels, masked_offsets = [], [], [], [np.zeros(1, np.int64)]
    cuts = np.unique(np.searchsorted(offsets, np.arange(0, offsets[-1], SLICE_TOKENS)))
    for first, last in pairwise([*cuts.tolist(), len(segments)]):
        rows = assemble(
            input_ids,
            segments.take(np.arange(first, last)),
            cls_id=tokenizer.cls_id,
            sep_id=tokenizer.sep_id,
        )
        inside = slice(offsets[first], offsets[last])
        b_starts.append(rows.segment_b_start)
        if config.masking.dynamic:
            seen[inside] = rows.input_ids
            continue
        masked = masker(
            rows.input_ids,
            rows.offsets,
            _word_start_ids(config.tokenizer)[rows.input_ids],
            row_keys(config.seed, shard, np.arange(first, last)),
        )
        seen[inside] = masked.input_ids
        row = np.searchsorted(rows.offsets, masked.positions, side="right") - 1
        positions.append((masked.positions - rows.offsets[row]).astype(np.uint16))
        labels.append(masked.labels)
        ends = np.searchsorted(masked.positions, rows.offsets[1:])
        masked_offsets.append(ends + masked_offsets[-1][-1])
    finished = ShardRows(
        input_ids=seen,
        offsets=offsets,
        segment_b_start=np.concatenate([np.zeros(0, np.int64), *b_starts]),
        labels={label: segments.labels} if label else {},
    )
    if config.masking.dynamic:
        bits = np.packbits(_word_start_ids(config.tokenizer)[seen], bitorder="little")
        return replace(finished, begins_word=bits)
    return replace(
        finished,
        masked_positions=np.concatenate([np.zeros(0, np.uint16), *positions]),
        masked_labels=np.concatenate([np.zeros(0, input_ids.dtype), *labels]),
        masked_offsets=np.concatenate(masked_offsets),
    )


def _masker(plan: Plan) -> Masker:
    tokenizer = _tokenizer(plan.config.tokenizer)
    return Masker(
        plan.config.masking,
        vocab_size=tokenizer.vocab_size,
        special_ids=tokenizer.special_ids,
        mask_id=tokenizer.mask_id,
    )


def _documents_of(plan: Plan, fragments: list[str], shard: int) -> Documents:
    """A shard's documents by id; where all have one text, its neighbours' are borrowed."""
    own = _read_batches(fragments, shard)
    tables = [own]
    for neighbour in plan.neighbours(shard) if plan.config.pairs.kind == "nsp" else ():
        if len(set(pa.concat_tables(tables).column("digest").to_pylist())) > 1 or not len(own):
            break
        tables.append(_read_batches(fragments, neighbour))
    table = pa.concat_tables(tables)
    sentences = table.column("sentences").combine_chunks()
    encoded = sentences.flatten()
    lengths = encoded.value_lengths().to_numpy()
    kept = np.flatnonzero(lengths)  # a sentence of white space and control characters has no ids
    before = np.concatenate([[0], np.cumsum(lengths > 0)])
    document_offsets = before[np.asarray(sentences.offsets) - sentences.offsets[0].as_py()]
    has_sentences = np.flatnonzero(np.diff(document_offsets))
    digests = table.column("digest").to_pylist()
    return Documents(
        input_ids=encoded.flatten().to_numpy(),
        sentence_offsets=np.concatenate([[0], np.cumsum(lengths[kept])]).astype(np.int64),
        document_offsets=np.append(document_offsets[has_sentences], len(kept)),
        digests=[digests[index] for index in has_sentences],
        own=int((has_sentences < len(own)).sum()),
    )


def _read_batches(fragments: list[str], shard: int) -> pa.Table:
    """Batch `shard` of every fragment, its documents in the order of their digests."""
    batches = []
    for path in fragments:
        with files.open_input(path) as file:
            batches.append(pa.ipc.open_file(file).get_batch(shard))
    table = pa.Table.from_batches(batch.replace_schema_metadata(None) for batch in batches)
    digests = np.array(table.column("digest").to_pylist(), dtype=object)
    return table.take(pa.array(np.argsort(digests)))


@lru_cache(maxsize=4)
def _tokenizer(folder: str) -> Tokenizer:
    """The tokenizer, built once a process."""
    return Tokenizer.load(folder)


@lru_cache(maxsize=4)
def _word_start_ids(folder: str) -> np.ndarray:
    """For every id whether it begins a word."""
    vocabulary = _tokenizer(folder).vocabulary
    return np.array([not token.startswith(CONTINUATION) for token in vocabulary])
