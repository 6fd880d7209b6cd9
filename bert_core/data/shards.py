"""The contract between prepare and pretrain: Arrow IPC files of rows that are ready to train on.

One uncompressed record batch per shard, so that a mapped file is the arrays themselves. Columns and
dtypes are in docs/formats.md. The order in which rows are trained on is in `order`.
"""

import hashlib
import weakref
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Integer, UInt8

from bert_core import files
from bert_core.cache import SHARDS, Cache, CacheEntry
from bert_core.data.masking import Masker, MaskingConfig
from bert_core.data.pairs import LABELS
from bert_core.errors import FormatError
from bert_core.manifest import Manifest, read_manifest

FORMAT = "raybert.shard"
FORMAT_VERSION = 2  # 1 had no dynamic masks, and next_sentence_label as its only label
WAY_OUT = "run `raybert prepare` again with --force, or copy the shards again"


def _none() -> Integer[np.ndarray, "0"]:
    return np.empty(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class ShardRows:
    """The rows of a shard. Flat columns are divided by their offsets (rows + 1).

    If masks are static, `input_ids` are what the model sees and `masked_positions` count from the
    row's beginning. If masks are drawn at training time, there are no masked columns, and
    `begins_word` has one bit per token, lowest first: whether it is the first piece of a word.
    `labels` are the columns in `LABELS` that these rows have, at most one.
    """

    input_ids: Integer[np.ndarray, "tokens"]
    offsets: Integer[np.ndarray, "rows_1"]
    segment_b_start: Integer[np.ndarray, "rows"]
    labels: dict[str, UInt8[np.ndarray, "rows"]] = field(default_factory=dict)
    masked_positions: Integer[np.ndarray, "picked"] = field(default_factory=_none)
    masked_labels: Integer[np.ndarray, "picked"] = field(default_factory=_none)
    masked_offsets: Integer[np.ndarray, "rows_1_or_0"] = field(default_factory=_none)
    begins_word: UInt8[np.ndarray, "bytes"] | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def length(self, row: int) -> int:
        """Return the number of tokens of a row."""
        return int(self.offsets[row + 1] - self.offsets[row])

    def row(self, row: int) -> "ShardRow":
        """Return a row; its ids and labels are views of the mapped file."""
        first, last = int(self.offsets[row]), int(self.offsets[row + 1])
        whole = ShardRow(
            input_ids=self.input_ids[first:last],
            segment_b_start=int(self.segment_b_start[row]),
            labels={name: int(column[row]) for name, column in self.labels.items()},
        )
        if self.begins_word is not None:
            bits = np.unpackbits(self.begins_word[first // 8 : -(-last // 8)], bitorder="little")
            return replace(whole, begins_word=bits[first % 8 :][: last - first].astype(bool))
        masked = slice(self.masked_offsets[row], self.masked_offsets[row + 1])
        return replace(
            whole,
            masked_positions=self.masked_positions[masked].astype(np.int64),
            masked_labels=self.masked_labels[masked],
        )


@dataclass(frozen=True, kw_only=True)
class ShardRow:
    """One row, with the columns of `ShardRows`; `begins_word` has one bool per token."""

    input_ids: Integer[np.ndarray, "tokens"]
    segment_b_start: int
    labels: dict[str, int]
    masked_positions: Integer[np.ndarray, "picked"] = field(default_factory=_none)
    masked_labels: Integer[np.ndarray, "picked"] = field(default_factory=_none)
    begins_word: Bool[np.ndarray, "tokens_or_0"] = field(default_factory=lambda: np.empty(0, bool))


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """A shard's entry in the manifest."""

    name: str
    split: str
    rows: int
    tokens: int
    size_bytes: int
    sha256: str


def shard_name(split: str, index: int, count: int) -> str:
    return f"{split}-{index:05d}-of-{count:05d}.arrow"


def write_shard(
    sink: BinaryIO | BytesIO, rows: ShardRows, *, id_type: pa.DataType, metadata: dict[str, str]
) -> None:
    """Write the shard's file without copying its rows. The same rows give the same bytes."""
    columns = {
        "input_ids": _lists(rows.input_ids, rows.offsets, id_type),
        "segment_b_start": pa.array(rows.segment_b_start, pa.uint16()),
        **{name: pa.array(column, pa.uint8()) for name, column in rows.labels.items()},
    }
    if rows.begins_word is not None:
        bits = pa.py_buffer(rows.begins_word.tobytes())
        flags = pa.Array.from_buffers(pa.bool_(), len(rows.input_ids), [None, bits])
        columns["begins_word"] = pa.ListArray.from_arrays(
            pa.array(rows.offsets.astype(np.int32)), flags
        )
    else:
        positions, offsets = rows.masked_positions, rows.masked_offsets
        columns["masked_positions"] = _lists(positions, offsets, pa.uint16())
        columns["masked_labels"] = _lists(rows.masked_labels, offsets, id_type)
    batch = pa.record_batch(columns)
    schema = batch.schema.with_metadata(
        {"format": FORMAT, "format_version": str(FORMAT_VERSION), **metadata}
    )
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(batch.replace_schema_metadata(schema.metadata))


def _lists(flat: np.ndarray, offsets: np.ndarray, value_type: pa.DataType) -> pa.ListArray:
    values = pa.array(flat.astype(value_type.to_pandas_dtype(), copy=False), value_type)
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values)


def open_shard(path: str | Path, info: ShardInfo | None = None) -> ShardRows:
    """Map a shard; nothing is copied until rows are taken.

    Args:
        info: the shard's entry in the manifest; if given, size and sha256 are checked against it.
    Raises: FormatError naming the shard if it is missing, truncated, changed or not a shard.
    """
    path = Path(path)
    if not path.is_file():
        raise FormatError(f"{path}: wanted a shard, there is no such file: {WAY_OUT}")
    if info is not None:
        _check_size(str(path), info)
        _check_sha256(str(path), files.sha256_of(str(path)), info)
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        metadata = reader.schema.metadata or {}
        batch = reader.get_batch(0)
    except ValueError as error:  # ArrowInvalid is one
        raise FormatError(
            f"{path}: wanted an Arrow IPC file with one record batch, cannot be read ({error}): "
            f"the file is truncated or not a shard; {WAY_OUT}"
        ) from error
    if metadata.get(b"format") != FORMAT.encode():
        raise FormatError(
            f"{path}: wanted an Arrow file of format {FORMAT}, this has another one; {WAY_OUT}"
        )
    version = int(metadata[b"format_version"])
    if version > FORMAT_VERSION:
        raise FormatError(
            f"{path}: wanted format_version {FORMAT_VERSION} or older, got {version}: "
            "it was made by a newer raybert, update this one"
        )

    names = batch.schema.names

    def flat(name: str) -> np.ndarray:
        array = batch.column(name)
        array = array.values if pa.types.is_list(array.type) else array
        if pa.types.is_boolean(array.type):
            return np.frombuffer(array.buffers()[1], dtype=np.uint8)
        return array.to_numpy(zero_copy_only=True)

    rows = ShardRows(
        input_ids=flat("input_ids"),
        offsets=batch.column("input_ids").offsets.to_numpy(),
        segment_b_start=flat("segment_b_start"),
        labels={name: flat(name) for name in LABELS.values() if name and name in names},
    )
    if "begins_word" in names:
        return replace(rows, begins_word=flat("begins_word"))
    return replace(
        rows,
        masked_positions=flat("masked_positions"),
        masked_labels=flat("masked_labels"),
        masked_offsets=batch.column("masked_positions").offsets.to_numpy(),
    )


def _check_size(path: str, info: ShardInfo) -> None:
    try:
        size_bytes = files.size_bytes(path)
    except FileNotFoundError as error:
        raise FormatError(f"{path}: wanted a shard, there is no such file: {WAY_OUT}") from error
    if size_bytes != info.size_bytes:
        raise FormatError(
            f"{path}: wanted {info.size_bytes:,} bytes as its manifest says, got "
            f"{size_bytes:,}: the shard is truncated or was replaced; {WAY_OUT}"
        )


def _check_sha256(path: str, sha256: str, info: ShardInfo) -> None:
    if sha256 != info.sha256:
        raise FormatError(
            f"{path}: wanted sha256 {info.sha256[:12]}… as its manifest says, got "
            f"{sha256[:12]}…: the shard was changed; {WAY_OUT}"
        )


@dataclass(frozen=True)
class ShardSet:
    """The finished output of `raybert prepare`: its location and what its manifest says."""

    folder: str
    manifest: Manifest
    shards: list[ShardInfo]
    tokenizer_digest: str
    vocab_size: int
    max_length: int
    special_ids: Integer[np.ndarray, "special"]
    """Ids that are never predicted."""
    label: str | None
    """The column of labels that the rows have."""
    masker: Masker | None
    """Draws the masks at training time, if the shards have none."""

    @classmethod
    def read(cls, folder: str) -> "ShardSet":
        """Read the manifest in `folder`.

        Raises: FormatError if `folder` is not a finished output of `raybert prepare`.
        """
        manifest = read_manifest(folder)
        if manifest.stage != "prepare":
            raise FormatError(
                f"{folder}: wanted shards that `raybert prepare` wrote, "
                f"got the output of `raybert {manifest.stage}`"
            )
        counts = manifest.counts
        if "masking" not in counts:
            raise FormatError(
                f"{folder}: wanted shards of format_version {FORMAT_VERSION}, these were made by "
                "an older raybert: run `raybert prepare` again with --force"
            )
        return cls(
            folder=folder,
            manifest=manifest,
            shards=[ShardInfo(**info) for info in counts["shards"]],
            tokenizer_digest=counts["tokenizer_digest"],
            vocab_size=counts["vocab_size"],
            max_length=counts["max_length"],
            special_ids=np.array(counts["special_ids"]),
            label=counts["label"],
            masker=_masker(counts) if counts["masking"]["dynamic"] else None,
        )

    def split(self, name: str) -> list[ShardInfo]:
        """Return the shards of a split, in order."""
        return [shard for shard in self.shards if shard.split == name]

    def check_size(self, info: ShardInfo) -> None:
        """Check that a shard exists and has the size in its manifest, without reading it.

        Raises: FormatError naming the shard if not.
        """
        _check_size(files.join(self.folder, info.name), info)

    def open(self, info: ShardInfo, cache: Cache) -> ShardRows:
        """Map a shard in place or, if it is remote, a verified copy of it in `cache`. The copy
        stays in the cache as long as the rows are referenced."""
        path = files.join(self.folder, info.name)
        local = files.local_path(path)
        if local:
            return open_shard(local, info)
        copy = _local_copy(path, info, cache)
        try:
            rows = open_shard(copy.path, info)
        except FormatError:  # the copy was damaged after it was fetched and verified
            cache.drop(copy)
            copy = _local_copy(path, info, cache)
            rows = open_shard(copy.path, info)
        weakref.finalize(rows, copy.close)
        return rows

    def check_tokenizer(self, digest: str, source: str) -> None:
        """Check that these shards were made with the tokenizer of this digest.

        Args:
            source: names the tokenizer in the message.
        Raises: FormatError if they were made with another.
        """
        if digest != self.tokenizer_digest:
            raise FormatError(
                f"{self.folder} was made with vocabulary {self.tokenizer_digest[:6]}, "
                f"{source} has {digest[:6]}: run `raybert prepare` again with that vocabulary, "
                "or give the one that the shards were made with"
            )


def _masker(counts: dict[str, Any]) -> Masker:
    return Masker(
        MaskingConfig(**counts["masking"]),
        vocab_size=counts["vocab_size"],
        special_ids=np.array(counts["special_ids"]),
        mask_id=counts["mask_id"],
    )


def _local_copy(path: str, info: ShardInfo, cache: Cache) -> CacheEntry:
    """Return a local copy of the shard at `path`, which is fetched if `cache` does not have it.

    Raises: FormatError naming `path` if the file is not the shard of the manifest; ResourceError.
    """

    def fetch(copy: Path) -> None:
        _check_size(path, info)
        data = files.read_bytes(path)
        _check_sha256(path, hashlib.sha256(data).hexdigest(), info)
        files.write_bytes(str(copy), data)

    return cache.open(f"{SHARDS}/{info.sha256[:16]}-{info.name}", info.size_bytes, fetch)
