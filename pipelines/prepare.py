"""Corpus → shards of rows, in two passes over Ray Data.

The first encodes each block of the corpus into a fragment that holds one batch per shard; the
second reads batch s of every fragment and makes shard s: documents ordered by id, paired, permuted,
masked. The output does not depend on workers, blocks or restarts, and a restart makes only what is
missing.

One pool of workers does both, since starting a pool takes a second of every CPU: shards are handed
out after the blocks, and wait until the last fragment exists.
"""

import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bert_core import files
from bert_core.checks import NonNegativeInt, Range
from bert_core.data.documents import document_fraction, split_sentences
from bert_core.data.fragments import (
    FragmentPart,
    as_documents,
    distinct,
    read_counts,
    read_shard,
    write_fragment,
)
from bert_core.data.masking import MaskingConfig
from bert_core.data.pairs import LABELS, PairsConfig
from bert_core.data.quality import QualityConfig
from bert_core.data.ragged import offsets_of
from bert_core.data.row_maker import RowMaker
from bert_core.data.shards import ShardInfo, shard_name, write_shard
from bert_core.data.splits import HELD_OUT, TRAIN
from bert_core.data.tokenizer import Tokenizer
from bert_core.errors import CorpusError, ResourceError
from bert_core.manifest import Headline, Manifest, Output
from bert_core.train.hardware import peak_memory_bytes
from bert_core.wording import without_secrets
from pipelines.corpus import data_card
from pipelines.corpus.blocks import plan_blocks
from pipelines.corpus.config import CorpusConfig
from pipelines.corpus.digest import corpus_input
from pipelines.corpus.readers.base import Block
from pipelines.corpus.screen import (
    Kept,
    copies_of,
    dropped_digests,
    dropped_documents,
    evaluation_files,
    evaluation_inputs,
    find_near_duplicates,
    in_parts,
    kept_documents,
    pop_overlaps,
)
from pipelines.corpus.sources import Corpus, corpus_size_bytes, list_corpus
from pipelines.runtime.description import CARD_OF_DATA
from pipelines.runtime.distribute import run_tasks
from pipelines.runtime.inputs import tokenizer_input
from pipelines.runtime.progress import counted, meter
from pipelines.runtime.result import SPREAD, Counts, Result
from pipelines.runtime.stage import run_stage
from pipelines.runtime.stage_config import INPUT, REMARK, StageConfig
from tracking.models.references import Reference
from tracking.runs.story import amount

ByteSize = Annotated[int, Range(least=1024)]

FRAGMENTS = "fragments"
CONTAMINATION = "contamination.jsonl"
PATIENCE_S = 600.0  # longer than a block takes, except for a large file that cannot be split
ABORTED_FILE = "stopped"  # a file among the fragments: the run was aborted


@dataclass(frozen=True, kw_only=True)
class PrepareConfig(StageConfig):
    """Make rows from the corpus."""

    tokenizer: str = field(metadata=INPUT)
    """Folder written by `raybert vocab`, a tokenizer in Hugging Face layout, or owner/name of the
    Hugging Face hub."""
    compare_with: str | None = field(default=None, metadata=REMARK)
    """A tokenizer whose fertility the data card shows for comparison, as in `tokenizer`; by default
    bert-base-uncased, or -cased, if this machine's Hugging Face cache has it."""
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    """The text to prepare."""
    quality: QualityConfig = field(default_factory=QualityConfig)
    """Which documents to leave out."""
    pairs: PairsConfig = field(default_factory=PairsConfig)
    """How sentences become rows."""
    masking: MaskingConfig = field(default_factory=MaskingConfig)
    """Which tokens of a row are predicted."""
    shard_bytes: ByteSize = 8 << 20
    """Target size of a shard, in bytes of text; a worker holds one shard in memory."""
    block_bytes: ByteSize = 8 << 20
    """Bytes of a file to read at once; does not affect the shards."""
    seed: NonNegativeInt = 0
    """Seed of all random draws."""


@dataclass(frozen=True, kw_only=True)
class PrepareCounts(Counts):
    source: str
    read: Mapping[str, int] = field(metadata=SPREAD)
    """Counts of the corpus, with duplicates."""
    written: Mapping[str, int] = field(metadata=SPREAD)
    """Counts of the shards; they replace those of the corpus with the same name."""
    documents: int
    tokens: int
    rows: int
    corpus_bytes: int
    peak_memory_bytes: int
    tokenizer_digest: str
    vocab_size: int
    max_length: int
    layout: Mapping[str, Any] = field(metadata=SPREAD)
    """The layout that a reader of the shards needs to know."""

    @property
    def line(self) -> str:
        return f"{amount(self.tokens)} tokens, {counted(self.rows, 'row')}"

    @property
    def sentence(self) -> str:
        return (
            f"{counted(self.documents, 'document')} with {amount(self.tokens)} tokens "
            f"{'was' if self.documents == 1 else 'were'} cut into {counted(self.rows, 'row')} of "
            f"up to {self.max_length} tokens."
        )

    @property
    def headline(self) -> Headline:
        return Headline(label="tokens", value=amount(self.tokens), beside=counted(self.rows, "row"))


@dataclass(frozen=True)
class ShardPlan:
    """The plan that both passes share; determined by the corpus and the config."""

    config: PrepareConfig
    train_shards: int
    held_out_shards: int
    near_duplicates: str | None = None
    """Path of the file that lists them."""

    @property
    def shards(self) -> list[tuple[str, str]]:
        """Return (split, file name) of every shard, training first; the position is the shard's
        number."""
        return [
            (split, shard_name(split, index, count))
            for split, count in ((TRAIN, self.train_shards), (HELD_OUT, self.held_out_shards))
            for index in range(count)
        ]

    def shard_of(self, digest: bytes, split: str | None) -> int:
        """Return the number of a document's shard. The split is the one that the corpus assigns, or
        else drawn by the document's hash."""
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
        """Yield the shards that a shard borrows from, in order; a training shard never borrows from
        held-out ones."""
        train = range(self.train_shards)
        held_out = range(self.train_shards, self.train_shards + self.held_out_shards)
        same_split = train if shard in train else held_out
        yield from (number for number in same_split if number > shard)
        yield from (number for number in same_split if number < shard)
        if same_split == held_out:
            yield from train


def run(config: PrepareConfig) -> Manifest:
    """Write the shards of the corpus."""
    # Workers may run in another working directory.
    place, tokenizer, vocabulary = tokenizer_input(config, config.tokenizer)
    config = replace(
        config,
        output=files.absolute(config.output),
        tokenizer=files.absolute(place),
        quality=replace(config.quality, contamination=evaluation_files(config.quality)),
    )
    for cached in (_tokenizer, _row_maker):
        cached.cache_clear()  # an earlier run in this process may have read other contents
    tokenizer.check_casing(config.tokenizer)
    if config.compare_with is not None:
        Reference.parse(config.compare_with).tokenizer()  # finds a mistake in it early
    corpus = list_corpus(config.corpus, config.output)
    size_bytes = corpus_size_bytes(corpus)
    corpus, documents = corpus_input(corpus, config)
    inputs = [documents, vocabulary, *evaluation_inputs(config.quality)]
    return run_stage("prepare", config, inputs, lambda _: _prepare(config, corpus, size_bytes))


def _prepare(config: PrepareConfig, corpus: Corpus, size_bytes: int) -> Result:
    blocks = plan_blocks(corpus, config.block_bytes)
    folder = files.join(config.output, FRAGMENTS)
    train_shards = max(1, round(size_bytes / config.shard_bytes))
    share = config.corpus.held_out_share
    weighted = replace(config, corpus=corpus.config)
    plan = ShardPlan(weighted, train_shards, max(1, round(train_shards * share)) if share else 0)
    if config.quality.near_duplicates is not None:
        near_duplicates = find_near_duplicates(blocks, config.quality, folder, config.seed, config)
        plan = replace(plan, near_duplicates=near_duplicates)
    fragments = [files.join(folder, f"block-{index:06d}.arrow") for index in range(len(blocks))]
    results = _make(plan, blocks, fragments)
    encoded, rows, infos = results.encoded, results.rows, results.infos
    overlaps = pop_overlaps(encoded)
    outputs = {info.name: Output(size_bytes=info.size_bytes, sha256=info.sha256) for info in infos}
    if config.quality.contamination:
        path = files.join(config.output, CONTAMINATION)
        files.write_bytes(path, "".join(f"{json.dumps(row)}\n" for row in overlaps).encode())
        outputs[CONTAMINATION] = Output.of(path)
    files.remove(folder)
    tokenizer = _tokenizer(config.tokenizer)
    counts = PrepareCounts(
        source=without_secrets(corpus.name),
        read=encoded,
        written=rows,
        documents=rows["documents"],
        tokens=rows["tokens"],
        rows=rows["rows"],
        corpus_bytes=size_bytes,
        peak_memory_bytes=results.peak_memory_bytes,
        tokenizer_digest=tokenizer.digest,
        vocab_size=tokenizer.vocab_size,
        max_length=config.pairs.max_length,
        layout={
            "label": LABELS[config.pairs.kind],
            "masking": asdict(config.masking),
            "mask_id": tokenizer.mask_id,
            "special_ids": tokenizer.special_ids.tolist(),
            "shards": [asdict(info) for info in infos],
        },
    )
    pictures = data_card.write(
        config.local_folder,
        output=config.output,
        corpus=corpus,
        blocks=blocks,
        tokenizer=tokenizer,
        compare_with=config.compare_with,
        pairs=config.pairs,
        masking=config.masking,
        counts=counts.entries(),
        lengths=results.lengths,
        overlaps=overlaps,
    )
    return Result(outputs=outputs, counts=counts, artifacts=pictures, cards=CARD_OF_DATA)


def _check_encoded(sources: Sequence[str], pairs: PairsConfig, encoded: Counter[str]) -> None:
    """Raise CorpusError if there is nothing to make rows from."""
    source = ", ".join(sources)
    if not encoded["documents"]:
        dropped = dropped_documents(encoded)
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
        raise CorpusError(
            f"{source}: wanted documents with text, got none ({reasons or 'no document at all'}): "
            "check the corpus, corpus.text_column and quality"
        )
    if pairs.is_pairs and encoded["sentences"] == encoded["documents"]:
        raise CorpusError(
            f"{source}: wanted documents of several sentences for pairs.kind {pairs.kind}, "
            f"got {encoded['documents']:,} of one sentence each: set corpus.document_boundary to "
            "what ends a document here, or pairs.kind to full_sentences"
        )


@dataclass
class _Made:
    """The combined reports of the workers: counts of both passes, shards by number, rows by
    length."""

    encoded: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)
    shards: dict[int, ShardInfo] = field(default_factory=dict)
    lengths: Counter[int] = field(default_factory=Counter)
    peak_memory_bytes: int = 0

    @property
    def infos(self) -> list[ShardInfo]:
        return [info for _, info in sorted(self.shards.items())]


def _make(plan: ShardPlan, blocks: list[Block], fragments: list[str]) -> _Made:
    """Make the missing fragments, then the missing shards."""
    results = _Made()
    pairs = list(zip(blocks, fragments, strict=True))
    missing = [(block, path) for block, path in pairs if not files.exists(path)]
    tasks: list[tuple[Block, str] | int] = [*missing, *range(len(plan.shards))]
    aborted = files.join(plan.config.output, FRAGMENTS, ABORTED_FILE)
    files.remove(aborted)
    with closing(run_tasks(partial(_work, plan, pairs), tasks, plan.config)) as answers:
        try:
            with meter("encoding", len(blocks), "blocks") as progress:
                progress.set(len(blocks) - len(missing))
                encoded = 0
                while encoded < len(missing):
                    _, answer = next(answers)
                    _take(answer, results)
                    if "shard" not in answer:  # the first shards may overtake the last blocks
                        encoded += 1
                        progress.add()
            for path in fragments:
                results.encoded.update(read_counts(path))
            _check_encoded(plan.config.corpus.sources, plan.config.pairs, results.encoded)
            with meter("pairing and masking", len(plan.shards), "shards") as progress:
                progress.set(len(results.shards))
                for _, answer in answers:
                    _take(answer, results)
                    progress.add()
        except BaseException:
            with suppress(ResourceError):  # e.g. on a full disk: the first error is reported
                files.write_bytes(aborted, b"")  # so that no worker keeps waiting
            raise
    return results


def _take(answer: dict[str, Any], results: _Made) -> None:
    results.peak_memory_bytes = max(results.peak_memory_bytes, answer["peak_memory_bytes"])
    if "shard" in answer:
        results.shards[answer["shard"]] = ShardInfo(**answer["info"])
        results.rows.update(answer["counts"])
        results.lengths.update({int(length): rows for length, rows in answer["lengths"].items()})


def _work(
    plan: ShardPlan, pairs: list[tuple[Block, str]], task: tuple[Block, str] | int
) -> dict[str, Any]:
    """Encode a block, or make a shard when all blocks are encoded."""
    if isinstance(task, tuple):
        _encode_block(plan, *task)
        return {"peak_memory_bytes": peak_memory_bytes()}
    _await(plan, pairs)
    made = _make_shard(plan, [path for _, path in pairs], task)
    return {**made, "peak_memory_bytes": peak_memory_bytes()}


def _await(plan: ShardPlan, pairs: list[tuple[Block, str]]) -> None:
    """Wait until all fragments exist; blocks are handed out before shards.

    If none has appeared for `PATIENCE_S`, the worker of the next one is assumed dead and it is made
    here. Making it twice is harmless, since the bytes are the same.
    """
    folder = files.join(plan.config.output, FRAGMENTS)
    present: set[str] = set()
    began = time.monotonic()
    while True:
        current = set(files.list_names(folder))
        if ABORTED_FILE in current:
            raise CorpusError("preparation was stopped: the first error says why")
        missing = [pair for pair in pairs if pair[1].rpartition("/")[2] not in current]
        if not missing:
            return
        if current != present:
            present, began = current, time.monotonic()
        waited_s = time.monotonic() - began
        if waited_s > PATIENCE_S:
            _encode_block(plan, *missing[0])
        time.sleep(max(0.02, 0.1 * waited_s))  # adds at most a tenth to the wait


def _encode_block(plan: ShardPlan, block: Block, path: str) -> None:
    """Write a fragment: the block's encoded documents, by shard."""
    counts: Counter[str] = Counter()
    dropped = dropped_digests(plan.near_duplicates)
    documents = kept_documents(block, plan.config.quality, counts, dropped)
    parts = (_encode(plan, part, counts) for part in in_parts(documents, plan.config.block_bytes))
    with files.writing(path) as sink:
        id_type = _tokenizer(plan.config.tokenizer).id_type
        write_fragment(sink, parts, len(plan.shards), counts, id_type)


def _encode(plan: ShardPlan, documents: list[Kept], counts: Counter[str]) -> FragmentPart:
    config = plan.config
    tokenizer = _tokenizer(config.tokenizer)
    split_up = [split_sentences(document.text) for document in documents]
    if tokenizer.reads_spaces:  # the space between two sentences belongs to the second
        split_up = [[*parts[:1], *(f" {part}" for part in parts[1:])] for parts in split_up]
    sentences = list(chain.from_iterable(split_up))
    sentence_counts = np.array([len(parts) for parts in split_up])
    encoded = tokenizer.encode_column(pa.array(sentences, pa.string()))
    copies = np.array([copies_of(document, config.corpus, config.seed) for document in documents])
    document_offsets = offsets_of(sentence_counts).astype(np.int32)
    counts.update(
        {
            "documents": int((copies > 0).sum()),
            "sentences": int(sentence_counts[copies > 0].sum()),
            "dropped_by_weight": int((copies == 0).sum()),
        }
    )
    return FragmentPart(
        digests=[document.digest for document in documents],
        copies=copies,
        sources=np.array([document.source for document in documents]),
        shards=np.array([plan.shard_of(document.digest, document.split) for document in documents]),
        sentences=pa.ListArray.from_arrays(pa.array(document_offsets), encoded),
    )


def _make_shard(plan: ShardPlan, fragments: list[str], shard: int) -> dict:
    """Make one shard, unless a killed run already did; return its entry in the manifest."""
    split, name = plan.shards[shard]
    path = files.join(plan.config.output, name)
    if not files.exists(path):
        _write_shard(plan, fragments, shard, path)
    output = Output.of(path)
    with files.open_input(path) as file:
        metadata = pa.ipc.open_file(file).schema.metadata
    counts, lengths = (json.loads(metadata[name]) for name in (b"counts", b"lengths"))
    info = ShardInfo(
        name=name,
        split=split,
        rows=counts["rows"],
        tokens=counts["row_tokens"],
        size_bytes=output.size_bytes,
        sha256=output.sha256,
    )
    return {"shard": shard, "info": asdict(info), "counts": counts, "lengths": lengths}


def _write_shard(plan: ShardPlan, fragments: list[str], shard: int, path: str) -> None:
    config = plan.config
    tokenizer = _tokenizer(config.tokenizer)
    read = partial(read_shard, fragments, shards=len(plan.shards))
    used = read(shard)
    used = used.filter(pc.greater(used.column("copies"), 0))
    unique = config.quality.exact_duplicates or plan.near_duplicates is not None
    main = distinct(used) if unique else used
    borrowed: list[pa.Table] = []
    if config.pairs.kind == "nsp" and len(main):
        for neighbour in plan.neighbours(shard):
            digests = chain(*(table.column("digest").to_pylist() for table in (main, *borrowed)))
            if len(set(digests)) > 1:
                break
            borrowed.append(read(neighbour))
    rows, counts = _row_maker(plan)(as_documents(main, borrowed), config.seed, shard)
    counts["dropped_exact_duplicate"] = len(used) - len(main)
    counts.update(_counts_of(main, tokenizer))
    lengths = dict(sorted(Counter(np.diff(rows.offsets).tolist()).items()))
    metadata = {
        "tokenizer_digest": tokenizer.digest,
        "counts": json.dumps(counts),
        "lengths": json.dumps(lengths),
    }
    with files.writing(path) as sink:
        write_shard(sink, rows, id_type=tokenizer.id_type, metadata=metadata)


def _counts_of(documents: pa.Table, tokenizer: Tokenizer) -> Counter[str]:
    """Count what documents hold. Each document counts once, except that a source's tokens count
    each copy."""
    sentences = documents.column("sentences").combine_chunks()
    encoded = sentences.flatten()
    ids = encoded.flatten().to_numpy()
    ends = offsets_of(encoded.value_lengths().to_numpy())
    tokens = np.diff(ends[np.asarray(sentences.offsets) - sentences.offsets[0].as_py()])
    counts = Counter(
        {
            "documents": len(documents),
            "sentences": len(encoded),
            "tokens": len(ids),
            "words": int(tokenizer.begins_word[ids].sum()),
            "unknown_tokens": int((ids == tokenizer.unk_id).sum()),
        }
    )
    copies, sources = (documents.column(name).to_numpy() for name in ("copies", "source"))
    for source in np.unique(sources):
        mine = sources == source
        counts[f"source_{source}_documents"] = int(mine.sum())
        counts[f"source_{source}_tokens"] = int((tokens * copies)[mine].sum())
    powers = np.bincount(np.ceil(np.log2(np.maximum(tokens, 1))).astype(np.int64))
    counts.update({f"tokens_up_to_{1 << power}": int(n) for power, n in enumerate(powers) if n})
    return counts


@lru_cache(maxsize=4)
def _tokenizer(folder: str) -> Tokenizer:
    """Return the tokenizer, built once per process."""
    return Reference.parse(folder).tokenizer()


@lru_cache(maxsize=1)
def _row_maker(plan: ShardPlan) -> RowMaker:
    return RowMaker(_tokenizer(plan.config.tokenizer), plan.config.pairs, plan.config.masking)
