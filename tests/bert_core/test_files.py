"""Files at a path and at a URI: whole or not at all, found by one set of rules."""

import bz2
import gzip
import hashlib
import io
import lzma
import pickle
import resource
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiohttp import web

from bert_core import conditional, files
from bert_core.compression import COMPRESSIONS, PIECE_BYTES
from bert_core.errors import ConfigError, CorpusError, ResourceError
from tests.web_server import WebServer
from tracking.store.ports import free_ports

# What `zstd` writes of CHECKED: a frame that ends in a checksum, which those of pyarrow lack.
CHECKED = bytes(range(256))
CHECKED_FRAME = bytes.fromhex("28b52ffd0458010800") + CHECKED + bytes.fromhex("4b90cd06")

NOISE = np.random.default_rng(0).integers(97, 113, 400_000, dtype=np.uint8).tobytes()


@pytest.fixture(params=["path", "file", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty folder, named in each of the ways that a folder can be."""
    if request.param == "s3":
        return request.getfixturevalue("object_store") + "/runs"
    (tmp_path / "runs").mkdir()
    return f"file://{tmp_path}/runs" if request.param == "file" else f"{tmp_path}/runs"


def fill(folder: str, *names: str) -> None:
    for name in names:
        files.write_bytes(files.join(folder, name), name.encode())


@pytest.fixture
def website(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Path]]:
    """Address of a web server on this machine that knows ranges, and the folder that it shows."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    folder = tmp_path / "site"
    folder.mkdir()

    async def without_length(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"text")
        return response

    async def refusal(request: web.Request) -> web.Response:
        return web.Response(status=403)

    site = web.Application()
    site.router.add_get("/stream.txt", without_length)
    site.router.add_get("/refused.txt", refusal)
    site.router.add_static("/", folder)
    with WebServer(site) as server:
        yield server.url, folder


def names_of(folder: str, pattern: str = "") -> list[str]:
    return [path.removeprefix(folder)[1:] for path in files.find_files(folder + pattern)]


def test_written_files_can_be_read_sized_listed_and_removed(place: str) -> None:
    path = files.join(place, "a", "data.bin")
    assert not files.exists(path)
    assert files.list_names(files.join(place, "a")) == []
    files.write_bytes(path, b"0123456789")
    assert files.exists(path)
    assert files.read_bytes(path) == b"0123456789"
    assert files.size_bytes(path) == 10
    assert files.sha256_of(path) == hashlib.sha256(b"0123456789").hexdigest()
    assert files.list_names(files.join(place, "a")) == ["data.bin"]
    with files.open_input(path) as file:
        file.seek(4)
        assert file.read(3) == b"456"
    files.write_bytes(path, b"new")
    assert files.read_bytes(path) == b"new"
    files.remove(path)
    assert not files.exists(path)
    files.remove(path)


def test_a_folder_is_removed_with_all_that_is_in_it(place: str) -> None:
    fill(place, "keep/a", "drop/a", "drop/b/c")
    files.remove(files.join(place, "drop"))
    assert names_of(place) == ["keep/a"]


def test_json_survives_a_round_trip(place: str) -> None:
    value = {"b": [1, 2.5, None], "a": "é海"}
    files.write_json(files.join(place, "x.json"), value)
    assert files.read_json(files.join(place, "x.json")) == value
    assert list(files.read_json(files.join(place, "x.json"))) == ["b", "a"]


def test_a_missing_file_is_an_error_of_its_own_kind(place: str) -> None:
    for read in (
        files.read_bytes, files.size_bytes, files.sha256_of, files.read_json,
        conditional.read_tagged,
    ):  # fmt: skip
        with pytest.raises(FileNotFoundError):
            read(files.join(place, "nothing.bin"))


def test_a_file_is_created_only_if_there_is_none(place: str) -> None:
    path = files.join(place, "a", "lease.json")
    tag = conditional.create(path, b"mine")
    assert tag is not None
    assert conditional.create(path, b"other") is None
    assert conditional.create(path, b"mine") is None  # a second time is no success either
    assert conditional.read_tagged(path) == (b"mine", tag)
    assert names_of(place) == ["a/lease.json"]
    files.remove(path)
    assert conditional.create(path, b"other") is not None
    assert files.read_bytes(path) == b"other"


def test_only_one_of_many_concurrent_creators_succeeds(tmp_path: Path) -> None:
    path = f"{tmp_path}/lease.json"
    with ThreadPoolExecutor(8) as pool:
        tags = list(
            pool.map(lambda data: conditional.create(path, data), map(str.encode, "abcdefgh"))
        )
    [number] = [number for number, tag in enumerate(tags) if tag is not None]
    assert files.read_bytes(path) == b"abcdefgh"[number : number + 1]
    assert names_of(str(tmp_path)) == ["lease.json"]


def test_a_file_is_replaced_only_in_the_version_that_was_read(place: str) -> None:
    path = files.join(place, "lease.json")
    assert conditional.replace_if(path, b"0", "no such tag") is None
    assert not files.exists(path)
    first = conditional.create(path, b"1")
    assert first is not None
    second = conditional.replace_if(path, b"2", first)
    assert second not in (None, first)
    assert conditional.replace_if(path, b"3", first) is None
    assert conditional.read_tagged(path) == (b"2", second)
    files.remove(path)
    assert conditional.replace_if(path, b"3", str(second)) is None
    assert files.list_names(place) == []


def test_only_one_of_many_concurrent_replacements_succeeds(tmp_path: Path) -> None:
    path = f"{tmp_path}/lease.json"
    tag = str(conditional.create(path, b"0"))
    with ThreadPoolExecutor(8) as pool:
        versions = map(str.encode, "abcdefgh")
        tags = list(pool.map(lambda data: conditional.replace_if(path, data, tag), versions))
    [number] = [number for number, new in enumerate(tags) if new is not None]
    assert conditional.read_tagged(path) == (b"abcdefgh"[number : number + 1], tags[number])


def test_a_file_on_the_web_is_not_created(website: tuple[str, Path]) -> None:
    with pytest.raises(ConfigError, match="wanted a local path, or storage with conditional"):
        conditional.create(f"{website[0]}/a.txt", b"a")


def test_a_folder_is_searched_deep_and_hidden_names_are_passed_over(place: str) -> None:
    fill(
        place, "b.txt", "a/deep/c.txt", ".hidden", "_SUCCESS", ".git/config", "a/_tmp/d.txt", "x_y"
    )
    assert names_of(place) == ["a/deep/c.txt", "b.txt", "x_y"]


def test_a_file_is_found_by_its_own_name(place: str) -> None:
    fill(place, "_a.txt")
    path = files.join(place, "_a.txt")
    assert files.find_files(path) == [path]


def test_globs_mean_the_same_at_a_path_and_at_a_uri(place: str) -> None:
    fill(place, "a.txt", "b1.txt", "b2.txt", "c.md", "_e.txt", "deep/c.txt", "deep/er/d.txt")
    found = {
        "/*.txt": ["a.txt", "b1.txt", "b2.txt"],
        "/**/*.txt": ["a.txt", "b1.txt", "b2.txt", "deep/c.txt", "deep/er/d.txt"],
        "/b?.txt": ["b1.txt", "b2.txt"],
        "/b[2-9].txt": ["b2.txt"],
        "/b[!2].txt": ["b1.txt"],
        "/*/c.txt": ["deep/c.txt"],
        "/_*.txt": ["_e.txt"],
    }
    assert {pattern: names_of(place, pattern) for pattern in found} == found


def test_names_with_blanks_and_signs_can_be_found_and_read(place: str) -> None:
    names = ["Jane Austen/Emma & co.txt", "a=1/100%.txt", "é.txt"]
    fill(place, *(quote(name) if files.is_uri(place) else name for name in names))
    for pattern in (place, files.join(place, "**/*.txt")):
        found = files.find_files(pattern)
        assert sorted(unquote(path.removeprefix(place)[1:]) for path in found) == names
        assert all(files.size_bytes(path) for path in found)


def test_a_folder_is_fetched_whole(place: str, tmp_path: Path) -> None:
    fill(place, "config.json", "sub/x%20y.txt" if files.is_uri(place) else "sub/x y.txt")
    fetched = files.fetch_folder(place, tmp_path / "copies" / "one")
    assert sorted(path.name for path in fetched.rglob("*")) == ["config.json", "sub", "x y.txt"]
    assert [path.name for path in (tmp_path / "copies").iterdir()] == ["one"]


def test_a_fetch_that_fails_leaves_nothing(tmp_path: Path) -> None:
    fill(f"{tmp_path}/source", "a", "b")
    (tmp_path / "copies" / "one" / "in the way").mkdir(parents=True)
    with pytest.raises(OSError, match="one"):
        files.fetch_folder(f"{tmp_path}/source", tmp_path / "copies" / "one")
    assert [path.name for path in (tmp_path / "copies").iterdir()] == ["one"]


def test_a_file_written_in_pieces_appears_when_it_is_whole(place: str) -> None:
    path = files.join(place, "a", "data.bin")
    with files.writing(path) as file:
        file.write(b"0123")
        file.write(memoryview(b"4567"))
        assert not files.exists(path)
        assert file.tell() == 8
    assert files.read_bytes(path) == b"01234567"
    with files.writing(path):
        pass
    assert files.read_bytes(path) == b""
    assert names_of(place) == ["a/data.bin"]


def test_a_parquet_file_can_be_written_as_a_stream(place: str) -> None:
    table = pa.table({"text": ["a", "b"]})
    with (
        files.writing(files.join(place, "a.parquet")) as file,
        pq.ParquetWriter(file, table.schema) as writer,
    ):
        writer.write_table(table)
    with files.open_input(files.join(place, "a.parquet")) as file:
        assert pq.read_table(file) == table


@pytest.mark.parametrize("error", [ValueError("mine"), OSError(5, "mine"), KeyboardInterrupt()])
def test_a_block_that_raises_leaves_the_old_file_and_nothing_else(
    place: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spool").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", f"{tmp_path}/spool")
    path = files.join(place, "a.bin")
    files.write_bytes(path, b"old")

    def write() -> None:
        with files.writing(path) as file:
            file.write(b"new")
            raise error

    with pytest.raises(type(error)) as raised:
        write()
    assert raised.value is error
    assert files.read_bytes(path) == b"old"
    assert names_of(place) == ["a.bin"]
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    files.write_bytes(str(path), b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(ResourceError, match=r"a\.bin: could not be written: File too large"):
            files.write_bytes(str(path), bytes(2000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_named_with_the_needed_and_the_free_space(
    small_disk: Callable[[str], Path],
) -> None:
    disk = small_disk("size=1m")
    files.write_bytes(f"{disk}/old.bin", bytes(1 << 19))
    said = (
        rf"^{disk}/new\.bin: could not be written: No space left on device: wanted 2,000,000 bytes "
        rf"or more, 524,288 are free in {disk}: free some space or give another output; "
        "finished work is kept: the same command continues from there$"
    )
    with pytest.raises(ResourceError, match=said) as raised:
        files.write_bytes(f"{disk}/new.bin", bytes(2_000_000))
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)  # noqa: S301

    def write_in_pieces() -> None:
        with files.writing(f"{disk}/new.bin") as file:
            for _ in range(2000):
                file.write(bytes(1000))

    with pytest.raises(ResourceError, match=r"wanted [\d,]+ bytes or more, 524,288 are free"):
        write_in_pieces()
    assert [path.name for path in disk.iterdir()] == ["old.bin"]


def test_a_disk_that_fills_during_the_last_piece_is_reported_as_a_full_disk(
    small_disk: Callable[[str], Path],
) -> None:
    disk = small_disk("size=1m")
    files.write_bytes(f"{disk}/old.bin", bytes(1 << 20))
    with pytest.raises(ResourceError, match="wanted 3 bytes or more, 0 are free"):
        files.write_bytes(f"{disk}/new.bin", b"new")
    with pytest.raises(ResourceError, match="wanted 3 bytes or more, 0 are free"):
        files.write_bytes(f"{disk}/old.bin", b"new")
    assert files.size_bytes(f"{disk}/old.bin") == 1 << 20
    assert [path.name for path in disk.iterdir()] == ["old.bin"]


def test_a_full_temporary_disk_is_named_too(
    small_disk: Callable[[str], Path], object_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = small_disk("size=1m")
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    with (
        pytest.raises(ResourceError, match=rf"{object_store}/a: .* free in {disk}: .* TMPDIR"),
        files.writing(f"{object_store}/a") as file,
    ):
        file.write(bytes(2_000_000))
    assert list(disk.iterdir()) == []
    assert not files.exists(f"{object_store}/a")


def test_a_fetch_onto_a_full_disk_leaves_nothing(
    small_disk: Callable[[str], Path], tmp_path: Path
) -> None:
    files.write_bytes(f"{tmp_path}/source/a.bin", bytes(2_000_000))
    disk = small_disk("size=1m")
    with pytest.raises(ResourceError, match=rf"{disk}/.*a\.bin: .*No space left on device"):
        files.fetch_folder(f"{tmp_path}/source", disk / "copy")
    assert list(disk.iterdir()) == []


def test_a_read_only_disk_is_named(small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("size=1m,ro")
    for path in (f"{disk}/a.bin", f"{disk}/folder/a.bin"):
        with pytest.raises(ResourceError, match=f"{path}: .*: Read-only file system: fix that, or"):
            files.write_bytes(path, b"a")


def test_a_file_in_the_way_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(ResourceError, match=r"a/b/c\.bin: could not be written: Not a directory"):
        files.write_bytes(f"{tmp_path}/a/b/c.bin", b"")
    (tmp_path / "b").mkdir()
    with pytest.raises(ResourceError, match=r"b: could not be written: Is a directory"):
        files.write_bytes(f"{tmp_path}/b", b"")


def test_unsupported_object_store_options_are_named(object_store: str) -> None:
    path = f"{object_store}-of-nobody/a.bin"
    with pytest.raises(
        ResourceError, match=rf"^{path}: could not be written: 404 NoSuchBucket .*: check the addr"
    ):
        files.write_bytes(path, b"a")
    with pytest.raises(ResourceError, match=path), files.writing(path) as file:
        file.write(b"a")


def test_a_pattern_that_matches_nothing_is_named(place: str) -> None:
    for pattern in ("", "/nothing.txt", "/*.md"):
        with pytest.raises(CorpusError, match=r"wanted a file, a folder .* found none: check"):
            files.find_files(place + pattern)


@pytest.mark.parametrize("uri", ["s3://bucket/a b.txt", "nonsense://x", "sftp://host/a.txt"])
def test_a_uri_that_cannot_be_opened_is_refused_by_name(uri: str) -> None:
    with pytest.raises(ConfigError, match=f"{uri}: wanted a path, or a URI that obstore opens"):
        files.read_bytes(uri)


def test_paths_and_uris_are_told_apart_and_joined(tmp_path: Path) -> None:
    assert files.is_uri("s3://bucket/x")
    assert files.is_uri("file:///x")
    assert not files.is_uri("/x")
    assert not files.is_uri("C:/x")
    assert files.join("s3://bucket/", "a", "b") == "s3://bucket/a/b"
    assert files.join("/", "a") == "/a"
    assert files.local_path(f"file://{tmp_path}") == tmp_path
    assert files.absolute("s3://bucket/x") == "s3://bucket/x"
    assert files.absolute("x") == f"{Path.cwd()}/x"


def test_a_file_on_the_web_is_read_like_any_other(website: tuple[str, Path]) -> None:
    address, folder = website
    (folder / "a b.txt").write_bytes(CHECKED * 50_000)  # more than is fetched at once
    path = f"{address}/a%20b.txt"
    assert files.find_files(path) == [path]
    assert files.find_files(f"{path}?download=[*]") == [f"{path}?download=[*]"]
    assert files.exists(path)
    assert files.size_bytes(path) == 256 * 50_000
    assert files.read_bytes(path) == CHECKED * 50_000
    assert files.sha256_of(path) == hashlib.sha256(CHECKED * 50_000).hexdigest()
    with files.open_input(path) as file:
        file.seek(256 * 40_000 + 7)
        assert file.read(3) == b"\x07\x08\x09"
    with files.open_stream(path) as stream:
        assert stream.read(300) == CHECKED + CHECKED[:44]


def test_a_parquet_file_in_the_web_is_read_by_its_row_groups(website: tuple[str, Path]) -> None:
    address, folder = website
    pq.write_table(pa.table({"text": ["a", "b"]}), folder / "a.parquet", row_group_size=1)
    with files.open_input(f"{address}/a.parquet") as file:
        assert pq.ParquetFile(file).read_row_group(1).to_pydict() == {"text": ["b"]}


def test_a_compressed_file_in_the_web_is_read_decompressed(website: tuple[str, Path]) -> None:
    address, folder = website
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(b"text"))
    with files.open_stream(f"{address}/a.jsonl.gz?download=true") as stream:
        assert stream.read() == b"text"


def test_a_missing_file_on_the_web_is_distinguished_from_an_unreachable_one(
    website: tuple[str, Path],
) -> None:
    address, _ = website
    [nobody] = free_ports(1)
    absent = f"{address}/nothing.txt"
    assert not files.exists(absent)
    with pytest.raises(FileNotFoundError):
        files.open_input(absent)
    with pytest.raises(CorpusError, match=r"nothing\.txt: .* found none"):
        files.find_files(absent)
    for path, error in (
        (f"{address}/refused.txt", "403"),
        (f"http://127.0.0.1:{nobody}/a", "onnect"),
    ):
        for read in (files.find_files, files.exists, files.size_bytes, files.read_bytes):
            with pytest.raises(ResourceError, match=rf"{path}: could not be read .*{error}.*check"):
                read(path)


def test_a_server_that_disconnects_while_a_file_is_read_is_named(website: tuple[str, Path]) -> None:
    address, folder = website
    (folder / "a.txt").write_bytes(bytes(20_000_000))
    with files.open_stream(f"{address}/a.txt") as stream:
        stream.read(10)
        (folder / "a.txt").unlink()
        with pytest.raises(ResourceError, match=r"a\.txt: could not be read .*404"):
            stream.read()


def test_a_web_server_that_tells_no_length_is_named(website: tuple[str, Path]) -> None:
    with pytest.raises(ResourceError, match=r"stream\.txt: wanted a server that reports the size"):
        files.size_bytes(f"{website[0]}/stream.txt")


def test_a_file_in_the_web_cannot_be_written_or_removed(website: tuple[str, Path]) -> None:
    address, folder = website
    with pytest.raises(ResourceError, match=r"a\.txt: could not be written: NotImplementedError"):
        files.write_bytes(f"{address}/a.txt", b"")
    (folder / "a.txt").write_bytes(b"kept")
    for name in ("a.txt", "refused.txt"):
        with pytest.raises(ResourceError, match=rf"{address}/{name}: could not be removed \("):
            files.remove(f"{address}/{name}")


def test_paths_that_only_fsspec_opens_are_found_read_and_written() -> None:
    folder = "memory://raybert/a%20b"
    fill(folder, "c%20d.txt", "deep/e.txt", "_hidden.txt")
    assert names_of(folder) == ["c%20d.txt", "deep/e.txt"]
    assert names_of(folder, "/*.txt") == ["c%20d.txt"]
    assert files.list_names(folder) == ["_hidden.txt", "c d.txt", "deep"]
    assert files.read_bytes(f"{folder}/c%20d.txt") == b"c%20d.txt"
    files.remove(folder)
    assert not files.exists(folder)


@pytest.mark.parametrize("path", ["hf://datasets/a/b/c.jsonl", "hf://datasets/a/b/*.jsonl"])
def test_a_hub_that_does_not_answer_is_named(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub  # here: it takes a second

    nobody = f"http://127.0.0.1:{free_ports(1)[0]}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", nobody)
    huggingface_hub.HfFileSystem.clear_instance_cache()
    with pytest.raises(ResourceError, match=r"hf://datasets/a/b.*: could not be read \(Connect"):
        files.find_files(path)


def cut_in_frames(data: bytes, suffix: str, frames: int) -> list[bytes]:
    """`data` in frames of `suffix` that follow each other, as parallel compressors write them."""
    compress: dict[str, Callable[[bytes], bytes]] = {
        "gz": gzip.compress,
        "bz2": bz2.compress,
        "zst": lambda piece: pa.Codec("zstd").compress(piece, asbytes=True),
        "xz": lzma.compress,
    }
    if not data:
        return [compress[suffix](data)] * frames
    size = len(data) // frames
    return [compress[suffix](data[at : at + size]) for at in range(0, len(data), size)]


@pytest.mark.parametrize("suffix", COMPRESSIONS)
@pytest.mark.parametrize("frames", [1, 4])
def test_a_compressed_file_is_read_as_what_it_holds(place: str, suffix: str, frames: int) -> None:
    path = files.join(place, f"a.txt.{suffix}")
    files.write_bytes(path, b"".join(cut_in_frames(NOISE, suffix, frames)))
    with files.open_stream(path) as stream:
        assert stream.read(10) == NOISE[:10]
        assert stream.read() == NOISE[10:]
        assert stream.read() == b""
    with files.open_stream(path) as stream, io.TextIOWrapper(stream, "ascii") as text:
        assert text.read() == NOISE.decode()


@pytest.mark.parametrize("suffix", COMPRESSIONS)
@pytest.mark.parametrize("frames", [1, 4])
@pytest.mark.parametrize("share", [0.0, 0.00001, 0.3, 0.6, 0.99999])
def test_a_compressed_file_that_breaks_off_is_an_error(
    tmp_path: Path, suffix: str, frames: int, share: float
) -> None:
    data = b"".join(cut_in_frames(NOISE, suffix, frames))
    (tmp_path / f"a.{suffix}").write_bytes(data[: int(len(data) * share)])
    with (
        files.open_stream(f"{tmp_path}/a.{suffix}") as stream,
        pytest.raises(CorpusError) as raised,
    ):
        stream.read()
    message = str(raised.value)
    assert (
        f"{tmp_path}/a.{suffix}: wanted whole .{suffix} data, it cannot be read beyond " in message
    )
    assert ": copy or download it again" in message
    assert ("Truncated" in message) == (share > 0)


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_a_compressed_file_may_hold_nothing(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(b"".join(cut_in_frames(b"", suffix, 1)))
    assert path.stat().st_size > 0
    assert files.read_contents(str(path)) == b""


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_where_a_compressed_file_breaks_off_is_told(tmp_path: Path, suffix: str) -> None:
    frames = cut_in_frames(NOISE, suffix, 4)
    (tmp_path / f"a.{suffix}").write_bytes(b"".join(frames[:3]) + frames[3][:-1])
    with files.open_stream(f"{tmp_path}/a.{suffix}") as stream:
        assert stream.read(3 * PIECE_BYTES) == NOISE[: 3 * PIECE_BYTES]
        with pytest.raises(
            CorpusError, match=r"beyond (400,000|(26|29|32|39)\d,\d{3}) decompressed bytes"
        ):
            stream.read()


@pytest.mark.parametrize("suffix", COMPRESSIONS)
@pytest.mark.parametrize("frames", [1, 4])
def test_damage_in_a_compressed_file_is_an_error(tmp_path: Path, suffix: str, frames: int) -> None:
    pieces = cut_in_frames(NOISE, suffix, frames)
    if suffix == "zst":
        pieces = [CHECKED_FRAME] * frames
    middle = len(pieces[0]) // 2
    for at in (middle, sum(map(len, pieces)) - middle):
        data = bytearray(b"".join(pieces))
        data[at] ^= 1
        (tmp_path / f"a.{suffix}").write_bytes(data)
        with (
            files.open_stream(f"{tmp_path}/a.{suffix}") as stream,
            pytest.raises(CorpusError, match=rf"a\.{suffix}: .*: copy or download it again"),
        ):
            stream.read()


ZEROS = bytes(4 * 512)  # xz allows padding by multiples of four


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz"])
def test_members_without_content_and_zeros_behind_the_last_one_are_read(
    tmp_path: Path, suffix: str
) -> None:
    [nothing], [first, second] = cut_in_frames(b"", suffix, 1), cut_in_frames(NOISE, suffix, 2)
    peers: dict[str, Callable[[bytes], bytes]] = {
        "gz": gzip.decompress,
        "bz2": bz2.decompress,
        # NOTE: Python's lzma reads no padding; the format has it (2.2 of its specification).
        "xz": lambda data: lzma.decompress(data.removesuffix(ZEROS)),
    }
    for data in (
        nothing + first + nothing + nothing + second + nothing,
        first + second + ZEROS,
        nothing + ZEROS,
    ):
        wanted = peers[suffix](data)  # Python 3.11's module of that name
        assert wanted in (NOISE, b"")
        for name in (f"a.{suffix}", "a.txt", "a"):
            (tmp_path / name).write_bytes(data)
            assert files.read_contents(f"{tmp_path}/{name}") == wanted
    (tmp_path / "a").write_bytes(first + b"rest")
    with pytest.raises(CorpusError, match="behind its end there are bytes that do not belong"):
        files.read_contents(f"{tmp_path}/a")


def test_a_checked_frame_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.zst").write_bytes(CHECKED_FRAME * 2)
    with files.open_stream(f"{tmp_path}/a.zst") as stream:
        assert stream.read() == CHECKED * 2


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_a_file_that_is_not_what_its_name_says_is_an_error(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"a.{suffix}").write_bytes(b"<html>Sign in to go on</html>")
    with (
        files.open_stream(f"{tmp_path}/a.{suffix}") as stream,
        pytest.raises(CorpusError, match=rf"beyond 0 .* not compressed, remove \.{suffix} from "),
    ):
        stream.read()


def test_a_file_that_is_not_compressed_is_streamed_as_it_is(place: str) -> None:
    fill(place, "a.txt", "b.gz.txt")
    with files.open_stream(files.join(place, "a.txt")) as stream:
        assert stream.read() == b"a.txt"
    with files.open_stream(files.join(place, "b.gz.txt")) as stream:
        assert list(stream) == [b"b.gz.txt"]
    with pytest.raises(FileNotFoundError):
        files.open_stream(files.join(place, "c.txt.gz"))


def test_a_format_is_recognised_inside_its_compression() -> None:
    assert files.suffixes("/a.b/x.JSONL.gz") == ("jsonl", "gz")
    assert files.suffixes("s3://a/x.y.txt.BZ2") == ("txt", "bz2")
    assert files.suffixes("x.zst") == ("", "zst")
    assert files.suffixes("x.json.gzip") == ("json", "gz")
    assert files.suffixes("a.b/x.md") == ("md", None)
    assert files.suffixes("a.b/README") == ("", None)
    assert files.suffixes("https://a.org/x.xml.bz2?from=a.txt") == ("xml", "bz2")
    assert files.suffixes("/a/what?.txt") == ("txt", None)


@pytest.mark.parametrize("pattern", ["/a.txt", "", "/a/*.txt"])
def test_a_missing_bucket_is_distinguished_from_a_misspelt_path(
    object_store: str, pattern: str
) -> None:
    files.write_bytes(f"{object_store}/b.txt", b"x")
    with pytest.raises(ResourceError, match=r"^s3://nobody-s/.*: there is no bucket 'nobody-s' at"):
        files.find_files(f"s3://nobody-s{pattern}")
    with pytest.raises(
        CorpusError, match="wanted a file, a folder or a glob with at least one fil"
    ):
        files.find_files(f"{object_store}{pattern or '/nothing'}")


def test_a_local_path_with_the_marks_of_a_glob_is_itself_where_it_exists(tmp_path: Path) -> None:
    folder = tmp_path / "run [2024]"
    folder.mkdir()
    for name in ("b [1].txt", "b 1.txt", "what?.txt"):
        (folder / name).touch()
    assert len(files.find_files(str(folder))) == 3
    assert files.find_files(str(folder / "b [1].txt")) == [str(folder / "b [1].txt")]
    assert files.find_files(f"{tmp_path}/run ?2024?/b [1].txt") == [str(folder / "b 1.txt")]
    assert files.find_files(str(folder / "what?.txt")) == [str(folder / "what?.txt")]


def test_missing_paths_are_reported_with_similar_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "questions.csv").touch()
    for missing, told in {
        "runs/question.csv": f" (did you mean {tmp_path}/runs/questions.csv?)",
        "rnus/questions.csv": f" (did you mean {tmp_path}/runs?)",
        "runs/questions.csv": "",
        "runs/x": "",
        "runs/questions.csv/train": "",
    }.items():
        assert files.similar(str(tmp_path / missing)) == told
    assert files.similar("s3://bucket/question.csv") == ""
    monkeypatch.chdir(tmp_path / "runs")
    assert files.similar("question.csv") == " (did you mean questions.csv?)"
    assert files.similar("../rnus") == " (did you mean ../runs?)"
    with pytest.raises(
        CorpusError, match=r"found none \(did you mean .*/runs/questions.csv\?\): check the"
    ):
        files.find_files(str(tmp_path / "runs" / "question.csv"))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "a text given in place of a path " * 9,
            r"given in…: wanted a path, .* got one of 288: if it",
        ),
        ("a/\0/b", r"^'a/\\x00/b': wanted a path, got NUL characters in it: remove them$"),
    ],
)
def test_a_text_in_place_of_a_path_is_told_as_such(path: str, message: str) -> None:
    for read in (files.find_files, files.read_bytes, files.exists, files.local_path):
        with pytest.raises(ConfigError, match=message):
            read(path)


def test_a_glob_with_a_range_that_runs_backwards_is_told_as_such(tmp_path: Path) -> None:
    pattern = f"file://{tmp_path}/[z-a].txt"
    with pytest.raises(CorpusError, match=r"got \[z-a\] in it, which is no set of characters"):
        files.find_files(pattern)
