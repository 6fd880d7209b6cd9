"""Files at a path and at a URI: whole or not at all, found by one set of rules."""

import hashlib
import resource
from pathlib import Path
from urllib.parse import quote, unquote

import pytest

from bert_core import files
from bert_core.errors import ConfigError, CorpusError


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


def names_of(folder: str, pattern: str = "") -> list[str]:
    return [path.removeprefix(folder)[1:] for path in files.find_files(folder + pattern)]


def test_what_is_written_can_be_read_sized_listed_and_removed(place: str) -> None:
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
    for read in (files.read_bytes, files.size_bytes, files.sha256_of, files.read_json):
        with pytest.raises(FileNotFoundError):
            read(files.join(place, "nothing.bin"))


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


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    files.write_bytes(str(path), b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            files.write_bytes(str(path), bytes(2000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_no_pattern_finds_is_said_with_the_pattern(place: str) -> None:
    for pattern in ("", "/nothing.txt", "/*.md"):
        with pytest.raises(CorpusError, match=r"wanted a file, a folder .* found none: check"):
            files.find_files(place + pattern)


@pytest.mark.parametrize("uri", ["http://example.org/a.txt", "s3://bucket/a b.txt", "nonsense://x"])
def test_a_uri_that_cannot_be_opened_is_refused_by_name(uri: str) -> None:
    with pytest.raises(ConfigError, match=f"{uri}: wanted a path, or a URI that pyarrow opens"):
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
