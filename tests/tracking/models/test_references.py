import pickle
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bert_core import cache as cache_module
from bert_core import files
from bert_core.bundle.format import bundle_digest
from bert_core.cache import BUNDLES, Cache
from bert_core.errors import ConfigError, FormatError, ResourceError
from tracking.cache import local_cache
from tracking.models.downloads import cached, download, fetch_remote, release
from tracking.models.hub import HubModel, on_this_machine
from tracking.models.references import Folder, OnHub, Reference, Registered, Remote
from tracking.models.registry import Release, publish
from tracking.store.server import connect

if TYPE_CHECKING:
    from tests.mlflow_server import Server

NAME = "resolved"


def bundle_at(reference: str | Path, *, uri: str | None = None, cache: Cache | None = None) -> Path:
    return Reference.parse(reference).fetch(uri=uri, cache=cache)


@pytest.fixture(scope="module")
def registry(store: str, bundles: list[Path]) -> str:
    """URI of a registry with two versions, the second the champion."""
    for bundle in bundles[:2]:
        publish(
            Release(bundle=bundle, name=NAME, metrics={"accuracy": 0.5}, input_example=["abc"]),
            uri=store,
            force=True,
        )
    return store


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("models:/docs@champion", Registered("docs", alias="champion")),
        ("models:/docs/3", Registered("docs", version="3")),
        ("hf://owner/name@main", OnHub(HubModel("owner/name", "main"), "hf://owner/name@main")),
        ("owner/name", OnHub(HubModel("owner/name"), "owner/name")),
        ("hf://datasets/owner/name", Remote("hf://datasets/owner/name")),
        ("s3://bucket/run", Remote("s3://bucket/run")),
        ("file:///srv/bundle", Folder("file:///srv/bundle")),
        ("runs/books/sst2", Folder("runs/books/sst2")),
        ("./bert", Folder("./bert")),
    ],
)
def test_a_reference_is_a_value_that_is_written_as_it_was_given(
    text: str, value: Reference
) -> None:
    parsed = Reference.parse(text)
    assert (parsed, str(parsed), pickle.loads(pickle.dumps(parsed))) == (value, text, value)  # noqa: S301
    assert Registered.match(text) == (value if isinstance(value, Registered) else None)


def test_a_folder_may_be_called_as_a_model_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert Reference.parse("owner/name") == Folder("owner/name")
    assert Folder("owner/name").absolute() == Folder(f"{tmp_path}/owner/name")
    model = Reference.parse("hf://owner/name")
    assert isinstance(model, OnHub)
    assert Reference.parse(model.uri) == model


def test_an_alias_is_pinned_to_its_version(registry: str) -> None:
    alias = Registered(NAME, alias="champion")
    assert alias.pinned(uri=registry) == alias.at("2") == Registered(NAME, version="2")
    assert alias.at("1").pinned(uri="http://127.0.0.1:9") == alias.at("1")


def test_a_folder_is_itself(bundles: list[Path]) -> None:
    assert bundle_at(bundles[0]) == bundles[0]
    assert bundle_at(bundles[0].as_uri()) == bundles[0]


def test_the_output_of_a_stage_means_the_bundle_in_it(tmp_path: Path, bundles: list[Path]) -> None:
    inside = shutil.copytree(bundles[0], tmp_path / "run" / "bundle")
    assert bundle_at(tmp_path / "run") == inside
    assert bundle_at(f"{tmp_path}/run/") == inside
    assert bundle_at((tmp_path / "run").as_uri()) == inside
    (inside / "config.json").unlink()
    with pytest.raises(FormatError, match=r"bundle/config.json: wanted this file of the bundle"):
        bundle_at(tmp_path / "run")
    shutil.rmtree(inside)
    with pytest.raises(ConfigError, match=r"run: .* neither config.json nor bundle/config.json in"):
        bundle_at(tmp_path / "run")


def test_the_output_of_a_stage_in_a_bucket_means_the_bundle_in_it(
    tmp_path: Path, object_store: str, bundles: list[Path]
) -> None:
    for path in bundles[0].iterdir():
        files.write_bytes(f"{object_store}/run/bundle/{path.name}", path.read_bytes())
    files.write_bytes(f"{object_store}/run/checkpoints/step", b"large")
    for reference in ("run", "run/", "run/bundle"):
        kept = bundle_at(f"{object_store}/{reference}", cache=Cache(tmp_path))
        assert kept == tmp_path / BUNDLES / files.sha256_of(str(bundles[0] / "raybert.json"))
        assert bundle_digest(kept) == bundle_digest(bundles[0])
    with pytest.raises(ConfigError, match=r"checkpoints: .* neither config.json nor bundle/config"):
        bundle_at(f"{object_store}/run/checkpoints", cache=Cache(tmp_path))
    assert list((tmp_path / BUNDLES).iterdir()) == [kept]


def test_a_worker_on_another_machine_fetches_the_bundle_that_its_driver_has(
    tmp_path: Path, object_store: str, bundles: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent to it is the folder of the driver's machine."""

    def put(bundle: Path) -> None:
        for path in bundle.iterdir():
            files.write_bytes(f"{object_store}/run/{path.name}", path.read_bytes())

    put(bundles[0])
    monkeypatch.setenv("RAYBERT_CACHE", str(tmp_path / "driver"))
    folder = bundle_at(f"{object_store}/run")
    sent = pickle.dumps(folder)
    assert on_this_machine(pickle.loads(sent)) == folder  # noqa: S301
    release(folder)
    (tmp_path / "driver").rename(tmp_path / "elsewhere")
    monkeypatch.setenv("RAYBERT_CACHE", str(tmp_path / "worker"))
    fetched = on_this_machine(pickle.loads(sent))  # noqa: S301
    assert fetched.is_relative_to(tmp_path / "worker")
    assert bundle_digest(fetched) == bundle_digest(bundles[0])
    put(bundles[1])
    with pytest.raises(FormatError, match=r"wanted the bundle .* that the run began with"):
        on_this_machine(pickle.loads(sent))  # noqa: S301


def test_a_registered_version_is_the_bundle_that_was_published(
    tmp_path: Path, registry: str, bundles: list[Path]
) -> None:
    for reference, bundle in ((f"models:/{NAME}/1", 0), (f"models:/{NAME}@champion", 1)):
        folder = bundle_at(reference, uri=registry, cache=Cache(tmp_path / "cache"))
        assert bundle_digest(folder) == bundle_digest(bundles[bundle])
    assert not (tmp_path / "cache").exists(), "it lies on this disk already"


@pytest.mark.parametrize("folder", ["my bundle", "模型", "a%20b", "v1#2"])
def test_a_registered_bundle_is_found_whatever_its_folder_was_called(
    tmp_path: Path, store: str, bundles: list[Path], folder: str
) -> None:
    shutil.copytree(bundles[0], tmp_path / folder)
    name = f"folder {folder}".replace("%", " ")
    publish(
        Release(
            bundle=tmp_path / folder,
            name=name,
            metrics={},
            input_example=["abc"],
            experiment="resolve",
        ),
        uri=store,
    )
    found = bundle_at(f"models:/{name}@champion", uri=store)
    assert bundle_digest(found) == bundle_digest(bundles[0])


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (
            "models:/nobody@champion",
            "no model 'nobody' is registered in sqlite:.*/mlflow.db, there are: .*resolved",
        ),
        (
            f"models:/{NAME}@best",
            "model resolved in sqlite:.*/mlflow.db has no alias 'best', it has: champion",
        ),
        (
            f"models:/{NAME}/9",
            "model resolved in sqlite:.*/mlflow.db has no version 9, it has: 1, 2",
        ),
        (f"models:/{NAME}", "wanted models:/<name>@<alias> or models:/<name>/<version>"),
        ("runs/a/nothing", "runs/a/nothing: wanted the folder of a bundle, got nothing there"),
        (
            str(Path(__file__).with_suffix("")),
            r"got nothing there \(did you mean .*/test_references.py\?",
        ),
        ("", "wanted the folder of a bundle, got an empty string"),
        (__file__, "test_references.py: wanted the folder of a bundle, got a file"),
        ("nosuch://host/bundle", "nosuch://host/bundle: wanted a folder, or a URI that can be"),
    ],
)
def test_a_reference_to_nothing_lists_what_exists(
    registry: str, reference: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        bundle_at(reference, uri=registry)


def test_a_version_that_someone_else_registered_is_refused(tmp_path: Path, registry: str) -> None:
    client = connect(registry)
    client.create_registered_model("foreign")
    client.create_model_version("foreign", f"file://{tmp_path}")
    with pytest.raises(FormatError, match="version 1 has no bundle, it was not registered by"):
        bundle_at("models:/foreign/1", uri=registry)


def test_a_bundle_that_was_changed_is_refused(tmp_path: Path, bundles: list[Path]) -> None:
    changed = shutil.copytree(bundles[0], tmp_path / "changed")
    with open(changed / "config.json", "a") as file:
        file.write(" ")
    with pytest.raises(FormatError, match=r"config\.json: wanted sha256"):
        bundle_at(changed)


def test_a_registered_bundle_that_was_exchanged_is_refused(store: str, bundles: list[Path]) -> None:
    publish(
        Release(bundle=bundles[2], name="exchanged", metrics={}, input_example=["abc"]), uri=store
    )
    folder = bundle_at("models:/exchanged@champion", uri=store)
    shutil.rmtree(folder)
    shutil.copytree(bundles[0], folder)
    with pytest.raises(FormatError, match=r"wanted the bundle with digest .* publish the bundle"):
        bundle_at("models:/exchanged@champion", uri=store)


def test_files_are_fetched_once_and_again_if_the_copy_is_damaged(
    tmp_path: Path, bundles: list[Path]
) -> None:
    # A folder stands for a bucket: the way there is pyarrow's, and the same for both.
    source, cache = str(bundles[0]), Cache(tmp_path)
    kept = fetch_remote(source, cache)
    assert bundle_digest(kept) == bundle_digest(bundles[0])
    inode = (kept / "config.json").stat().st_ino
    assert fetch_remote(source, cache) == kept
    assert (kept / "config.json").stat().st_ino == inode
    (kept / "model.safetensors").write_bytes(b"")
    assert fetch_remote(source, cache) == kept
    assert bundle_digest(kept) == bundle_digest(bundles[0])
    assert list((tmp_path / BUNDLES).iterdir()) == [kept]


def test_a_download_that_fails_leaves_nothing_behind(
    tmp_path: Path, store: str, bundles: list[Path]
) -> None:
    stored, cache = shutil.copytree(bundles[0], tmp_path / "stored"), Cache(tmp_path / "cache")

    def fetch(arriving: Path) -> None:
        download(str(stored), store, arriving)

    whole = cached(cache, "whole", lambda: 1_000_000, fetch)
    assert bundle_digest(whole) == bundle_digest(bundles[0])
    (stored / "gone.json").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OSError, match=r"gone\.json"):
        cached(cache, "part", lambda: 1_000_000, fetch)
    assert list(whole.parent.iterdir()) == [whole]


def test_a_folder_that_transformers_wrote_is_fetched_whenever_it_is_asked_for(
    tmp_path: Path, bundles: list[Path]
) -> None:
    foreign = shutil.copytree(bundles[0], tmp_path / "foreign")
    (foreign / "raybert.json").unlink()
    first = fetch_remote(str(foreign), Cache(tmp_path / "cache"))
    assert fetch_remote(str(foreign), Cache(tmp_path / "cache")) == first
    shutil.copy(bundles[1] / "model.safetensors", foreign)
    assert fetch_remote(str(foreign), Cache(tmp_path / "cache")) != first


@pytest.mark.guard
def test_a_bundle_of_a_server_is_fetched_once_and_again_if_the_copy_is_cut(
    tmp_path: Path, server: "Server", bundles: list[Path]
) -> None:
    server.start()
    publish(
        Release(bundle=bundles[0], name=NAME, metrics={}, input_example=["abc"]), uri=server.uri
    )
    kept = bundle_at(f"models:/{NAME}@champion", uri=server.uri, cache=Cache(tmp_path))
    assert kept == tmp_path / BUNDLES / bundle_digest(bundles[0])
    assert bundle_digest(kept) == kept.name
    with open(kept / "model.safetensors", "r+b") as file:
        file.truncate(100)
    assert bundle_at(f"models:/{NAME}@champion", uri=server.uri, cache=Cache(tmp_path)) == kept
    assert bundle_digest(kept) == kept.name
    assert list((tmp_path / BUNDLES).iterdir()) == [kept]


@pytest.mark.parametrize("is_in_message", [False, True])
def test_a_download_that_fills_the_disk_leaves_nothing(
    tmp_path: Path, *, is_in_message: bool
) -> None:
    def fill(folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("half of a")
        try:
            Path("/dev/full").write_bytes(b"disk")
        except OSError as error:
            if not is_in_message:
                raise
            raise RuntimeError(f"these failed: {error}") from None  # as MLflow puts it

    message = rf"{tmp_path}/bundles/key: wanted more of free space for a download, got too l"
    with pytest.raises(ResourceError, match=message):
        cached(Cache(tmp_path), "key", lambda: 9, fill)
    assert list((tmp_path / BUNDLES).iterdir()) == []


def test_a_bundle_stays_in_the_cache_until_it_is_released(
    tmp_path: Path, bundles: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    size_bytes = sum(path.stat().st_size for path in bundles[0].rglob("*"))
    cache = Cache(tmp_path, size_bytes * 3 // 2)
    first = fetch_remote(str(bundles[0]), cache)
    assert fetch_remote(str(bundles[0]), cache) == first
    monkeypatch.setattr(cache_module, "PATIENCE_S", 0.2)
    for _ in range(2):  # as often as it was fetched
        with pytest.raises(ResourceError, match="are in use by this and other processes"):
            fetch_remote(str(bundles[1]), cache)
        release(first)
    second = fetch_remote(str(bundles[1]), cache)
    assert list((tmp_path / BUNDLES).iterdir()) == [second]
    release(tmp_path)  # was not given by the cache


def test_the_environment_sets_the_folder_and_size_of_the_download_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYBERT_CACHE", str(tmp_path))
    assert local_cache().folder == tmp_path
    assert local_cache().most_bytes == pytest.approx(shutil.disk_usage(tmp_path).total / 4, abs=1)
    monkeypatch.setenv("RAYBERT_CACHE_GB", "0.5")
    assert local_cache().most_bytes == 500_000_000
    for wrong in ("half", "0", "-1", "nan", "inf"):
        monkeypatch.setenv("RAYBERT_CACHE_GB", wrong)
        with pytest.raises(ConfigError, match=f"RAYBERT_CACHE_GB: wanted .*, got '{wrong}'"):
            local_cache()
