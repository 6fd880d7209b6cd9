"""Shards: what goes in comes out of the mapped file, and damage is refused by name."""

import hashlib
import io
import os
import re
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from bert_core import cache as cache_module
from bert_core import files
from bert_core.cache import SHARDS, Cache
from bert_core.data.masking import MaskingConfig
from bert_core.data.ragged import offsets_of
from bert_core.data.shards import (
    FORMAT,
    FORMAT_VERSION,
    ShardInfo,
    ShardRows,
    ShardSet,
    open_shard,
    shard_name,
    write_shard,
)
from bert_core.data.splits import HELD_OUT, TRAIN
from bert_core.errors import FormatError, ResourceError
from bert_core.manifest import Manifest, write_manifest

DIGEST = "3f2a91" + "0" * 58


def rows_of(count: int = 50, seed: int = 0, dynamic: bool = False) -> ShardRows:
    """Rows as prepare makes them, of lengths that differ; with word starts where `dynamic`."""
    rng = np.random.default_rng(seed)
    lengths, picks = rng.integers(8, 40, count), rng.integers(0, 6, count)
    positions = [np.sort(rng.permutation(n)[:k]) for n, k in zip(lengths, picks, strict=True)]
    rows = ShardRows(
        input_ids=rng.integers(0, 60_000, lengths.sum()),
        offsets=offsets_of(lengths),
        segment_b_start=lengths // 2,
        labels={"next_sentence_label": rng.integers(0, 2, count).astype(np.uint8)},
    )
    if dynamic:
        begins_word = rng.random(lengths.sum()) < 0.7
        return replace(rows, labels={}, begins_word=np.packbits(begins_word, bitorder="little"))
    return replace(
        rows,
        masked_positions=np.concatenate([np.zeros(0, np.int64), *positions]),
        masked_labels=rng.integers(0, 60_000, picks.sum()),
        masked_offsets=offsets_of(picks),
    )


def columns_of(rows: ShardRows) -> dict[str, np.ndarray]:
    """Every column that the rows have, by name."""
    columns = {name.name: getattr(rows, name.name) for name in fields(rows)}
    found = {**columns.pop("labels"), **columns}
    return {name: column for name, column in found.items() if column is not None and column.size}


def bytes_of(rows: ShardRows, id_type: pa.DataType | None = None, **metadata: str) -> bytes:
    metadata = {"tokenizer_digest": DIGEST, **metadata}
    sink = io.BytesIO()
    write_shard(sink, rows, id_type=id_type or pa.uint16(), metadata=metadata)
    return sink.getvalue()


def write(folder: Path, rows: ShardRows, name: str = "train-00000-of-00001.arrow") -> ShardInfo:
    data = bytes_of(rows)
    files.write_bytes(f"{folder}/{name}", data)
    return info_of(data, rows, name)


def info_of(data: bytes, rows: ShardRows, name: str) -> ShardInfo:
    return ShardInfo(
        name=name,
        split=TRAIN,
        rows=len(rows),
        tokens=len(rows.input_ids),
        size_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
    )


def shard_set(
    folder: str,
    infos: list[ShardInfo],
    stage: str = "prepare",
    masking: MaskingConfig = MaskingConfig(),  # noqa: B008  (it is frozen)
) -> ShardSet:
    """Write the manifest of a folder of shards and read it back."""
    counts = {
        "tokenizer_digest": DIGEST,
        "vocab_size": 60_000,
        "max_length": 64,
        "label": "next_sentence_label",
        "masking": asdict(masking),
        "mask_id": 4,
        "special_ids": [0, 1, 2, 3, 4],
        "shards": [asdict(info) for info in infos],
    }
    write_manifest(folder, Manifest(stage=stage, digest="d", config={}, counts=counts))
    return ShardSet.read(folder)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("count", [0, 1, 50])
@pytest.mark.parametrize("id_type", [pa.uint16(), pa.uint32()])
def test_rows_come_back_as_they_went_in(
    tmp_path: Path, count: int, id_type: pa.DataType, dynamic: bool
) -> None:
    rows = rows_of(count, dynamic=dynamic)
    (tmp_path / "a.arrow").write_bytes(bytes_of(rows, id_type))
    opened = open_shard(tmp_path / "a.arrow")
    assert len(opened) == count
    assert opened.input_ids.dtype == id_type.to_pandas_dtype()
    given, found = columns_of(rows), columns_of(opened)
    assert given.keys() == found.keys()
    for name, column in given.items():
        assert found[name].tolist()[: len(column)] == column.tolist()


def test_a_row_is_its_slice_of_every_column(tmp_path: Path) -> None:
    rows = rows_of()
    opened = open_shard(tmp_path / write(tmp_path, rows).name)
    for number in range(len(rows)):
        row = opened.row(number)
        tokens = slice(rows.offsets[number], rows.offsets[number + 1])
        masked = slice(*rows.masked_offsets[number : number + 2])
        assert opened.length(number) == len(row.input_ids) == tokens.stop - tokens.start
        assert row.input_ids.tolist() == rows.input_ids[tokens].tolist()
        assert row.masked_positions.tolist() == rows.masked_positions[masked].tolist()
        assert row.masked_labels.tolist() == rows.masked_labels[masked].tolist()
        assert row.segment_b_start == rows.segment_b_start[number]
        assert row.labels == {"next_sentence_label": rows.labels["next_sentence_label"][number]}


def test_a_row_whose_masks_are_drawn_later_knows_where_its_words_begin(tmp_path: Path) -> None:
    rows = rows_of(dynamic=True)
    assert rows.begins_word is not None
    begins_word = np.unpackbits(rows.begins_word, bitorder="little").astype(bool)
    opened = open_shard(tmp_path / write(tmp_path, rows).name)
    for number in range(len(rows)):
        row = opened.row(number)
        assert row.labels == {}
        assert len(row.masked_positions) == len(row.masked_labels) == 0
        tokens = slice(rows.offsets[number], rows.offsets[number + 1])
        assert row.begins_word.tolist() == begins_word[tokens].tolist()


def test_the_same_rows_give_the_same_bytes_and_others_do_not() -> None:
    data = bytes_of(rows_of())
    assert bytes_of(rows_of()) == data
    assert bytes_of(rows_of(seed=1)) != data
    assert bytes_of(rows_of(), tokenizer_digest="other") != data


def test_a_shard_is_mapped_not_read(tmp_path: Path) -> None:
    path = tmp_path / write(tmp_path, rows_of(20_000)).name
    allocated = pa.total_allocated_bytes()
    opened = open_shard(path)
    assert pa.total_allocated_bytes() - allocated < path.stat().st_size / 100
    columns = columns_of(opened)
    assert len(columns) == 7
    assert not any(column.flags.owndata for column in columns.values())
    maps = Path("/proc/self/maps").read_text()
    [mapped] = [line.split()[0] for line in maps.splitlines() if line.endswith(str(path))]
    start, end = (int(address, 16) for address in mapped.split("-"))
    for column in columns.values():
        assert start <= column.ctypes.data < end


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def change_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"wanted [\d,]+ bytes as its manifest says, got [\d,]+: the shard is truncated"),
        (grow, r"wanted [\d,]+ bytes as its manifest says, got [\d,]+: the shard is truncated or"),
        (change_a_byte, "wanted sha256 .{12}… as its manifest says, got .{12}…: the shard was ch"),
        (os.unlink, "wanted a shard, there is no such file: run `raybert prepare` again"),
    ],
)
def test_a_damaged_shard_is_refused_by_name(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    info = write(tmp_path, rows_of())
    found = shard_set(str(tmp_path), [info])
    damage(tmp_path / info.name)
    with pytest.raises(FormatError, match=f"{info.name}: {message}"):
        found.open(info, Cache(tmp_path / "cache"))
    if damage is not change_a_byte:  # which a look at the size does not see
        with pytest.raises(FormatError, match=f"{info.name}: wanted"):
            found.check_size(info)


def arrow_file(metadata: dict[str, str], batches: int = 1) -> bytes:
    batch = pa.record_batch({"x": [1, 2]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema.with_metadata(metadata)) as writer:
        for _ in range(batches):
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "wanted an Arrow IPC file with one record batch, cannot be read"),
        (b"This is a text, not a shard.\n" * 20, "cannot be read (.*): the file is truncated or"),
        (arrow_file({}, batches=0), "wanted an Arrow IPC file with one record batch"),
        (arrow_file({}), "wanted an Arrow file of format raybert.shard, this has another one; run"),
        (arrow_file({"format": "x"}), "wanted an Arrow file of format raybert.shard"),
        (
            arrow_file({"format": FORMAT, "format_version": str(FORMAT_VERSION + 1)}),
            f"wanted format_version {FORMAT_VERSION} or older, got {FORMAT_VERSION + 1}: "
            "it was made by a newer raybert, update this one",
        ),
    ],
)
def test_a_foreign_file_is_refused_by_name(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "train-00000-of-00001.arrow"
    path.write_bytes(data)
    pattern = re.escape(message).replace(r"\(\.\*\)", r"\(.*\)")
    with pytest.raises(FormatError, match=f"{path}: .*{pattern}"):
        open_shard(path)


def test_a_shard_cut_anywhere_is_refused_without_its_manifest_too(tmp_path: Path) -> None:
    data, path = bytes_of(rows_of(20)), tmp_path / "a.arrow"
    for end in range(0, len(data), 97):
        path.write_bytes(data[:end])
        with pytest.raises(FormatError, match="the file is truncated or not a shard"):
            open_shard(path)


def test_a_folder_of_shards_says_what_is_in_it(tmp_path: Path) -> None:
    names = [shard_name(TRAIN, 0, 2), shard_name(TRAIN, 1, 2), shard_name(HELD_OUT, 0, 1)]
    assert names[1:] == ["train-00001-of-00002.arrow", "held_out-00000-of-00001.arrow"]
    infos = [write(tmp_path, rows_of(seed=n), name) for n, name in enumerate(names)]
    infos[2] = replace(infos[2], split=HELD_OUT)
    found = shard_set(str(tmp_path), infos)
    assert found.split(TRAIN) == infos[:2]
    assert found.split(HELD_OUT) == infos[2:]
    assert (found.vocab_size, found.max_length) == (60_000, 64)


def test_shards_of_an_older_raybert_are_refused(tmp_path: Path) -> None:
    write_manifest(str(tmp_path), Manifest(stage="prepare", digest="d", config={}, counts={}))
    with pytest.raises(FormatError, match="older raybert: run `raybert prepare` again with --for"):
        ShardSet.read(str(tmp_path))


def test_another_vocabulary_is_refused_with_both_digests(tmp_path: Path) -> None:
    found = shard_set(str(tmp_path), [write(tmp_path, rows_of())])
    found.check_tokenizer(DIGEST, "runs/vocab")
    message = (
        f"{tmp_path} was made with vocabulary 3f2a91, runs/vocab has 91bc07: "
        "run `raybert prepare` again with that vocabulary"
    )
    with pytest.raises(FormatError, match=re.escape(message)):
        found.check_tokenizer("91bc07" + "0" * 58, "runs/vocab")


def test_another_stages_output_is_not_a_folder_of_shards(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"wanted the folder of a finished stage, it has no man"):
        ShardSet.read(str(tmp_path))
    with pytest.raises(
        FormatError, match="wanted shards that `raybert prepare` wrote, got the output of `raybert "
    ):
        shard_set(str(tmp_path), [], stage="vocab")


def test_shards_at_a_file_uri_are_mapped_where_they_lie(tmp_path: Path) -> None:
    info = write(tmp_path, rows_of())
    found = shard_set(f"file://{tmp_path}", [info])
    assert len(found.open(info, Cache(tmp_path / "cache"))) == 50
    assert not (tmp_path / "cache").exists()


def remote(object_store: str, count: int) -> tuple[ShardSet, list[ShardInfo]]:
    """Shards of one size in an object store."""
    infos = []
    for number in range(count):
        rows = replace(rows_of(), segment_b_start=np.full(50, number))
        data, name = bytes_of(rows), shard_name(TRAIN, number, count)
        files.write_bytes(f"{object_store}/shards/{name}", data)
        infos.append(info_of(data, rows, name))
    return shard_set(f"{object_store}/shards", infos), infos


def test_shards_elsewhere_are_fetched_once_into_a_cache_of_limited_size(
    tmp_path: Path, object_store: str
) -> None:
    found, infos = remote(object_store, 3)
    cache = Cache(tmp_path, 2 * infos[0].size_bytes)
    for number in [0, 1, 0, 2]:
        assert int(found.open(infos[number], cache).segment_b_start[0]) == number
    kept = sorted(path.name.split("-", 1)[1] for path in (tmp_path / SHARDS).iterdir())
    assert kept == [infos[0].name, infos[2].name]  # those used last
    files.remove(f"{object_store}/shards/{infos[2].name}")
    assert len(found.open(infos[2], cache)) == 50


def test_a_shard_stays_in_the_cache_while_its_rows_are_used(
    tmp_path: Path, object_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, infos = remote(object_store, 3)
    cache = Cache(tmp_path, 2 * infos[0].size_bytes)
    first, second = (found.open(info, cache) for info in infos[:2])
    monkeypatch.setattr(cache_module, "PATIENCE_S", 0.2)
    with pytest.raises(ResourceError, match="are in use by this and other processes: set RAYBERT_"):
        found.open(infos[2], cache)
    del first
    third = found.open(infos[2], cache)
    assert [int(rows.segment_b_start[0]) for rows in (second, third)] == [1, 2]
    kept = sorted(path.name.split("-", 1)[1] for path in (tmp_path / SHARDS).iterdir())
    assert kept == [infos[1].name, infos[2].name]


@pytest.mark.parametrize("damage", [truncate, change_a_byte])
def test_a_copy_that_was_damaged_is_fetched_again(
    tmp_path: Path, object_store: str, damage: Callable[[Path], None]
) -> None:
    found, [info] = remote(object_store, 1)
    found.open(info, Cache(tmp_path))
    [copy] = (tmp_path / SHARDS).iterdir()
    damage(copy)
    assert found.open(info, Cache(tmp_path)).input_ids.tolist() == rows_of().input_ids.tolist()


def test_a_damaged_shard_elsewhere_is_named_where_it_lies(
    tmp_path: Path, object_store: str
) -> None:
    found, [info] = remote(object_store, 1)
    path = f"{object_store}/shards/{info.name}"
    data = files.read_bytes(path)
    for changed, message in [
        (data[:-1], "wanted .* bytes as its manifest says"),
        (data[:-1] + b"\1", "wanted sha256 .* as its manifest says"),
    ]:
        files.write_bytes(path, changed)
        with pytest.raises(FormatError, match=f"{path}: {message}"):
            found.open(info, Cache(tmp_path))
    files.remove(path)
    with pytest.raises(FormatError, match=f"{path}: wanted a shard, there is no such file"):
        found.open(info, Cache(tmp_path))
    assert list((tmp_path / SHARDS).iterdir()) == []
