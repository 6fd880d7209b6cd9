"""Stages with everything in a container of Azure's object store, which Azurite emulates."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from safetensors.numpy import load, load_file

from bert_core import conditional, files
from bert_core.errors import ConfigError, ResourceError
from bert_core.manifest import read_manifest
from bert_core.storage.stores import PIECE_BYTES
from pipelines import prepare, pretrain, vocab
from pipelines.runtime import lease
from pipelines.runtime.storage_checks import check_storage
from tests.azurite import ACCOUNT, KEY, create_container, running_azurite
from tests.fault_proxy import fault_proxy, seeded


@pytest.fixture(scope="module")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_azurite(tmp_path_factory.mktemp("azurite")) as address:
        yield address


@pytest.fixture
def container(azurite: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """URI of an empty container; `az://` leads to Azurite while the test runs."""
    monkeypatch.setenv("RAYBERT_STORAGE_ENDPOINT", azurite)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    # Of another store, and in nobody's way.
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    name = f"container-{uuid4().hex[:8]}"
    create_container(azurite, name)
    return f"az://{name}"


@pytest.mark.guard
def test_a_container_supports_everything_that_a_bucket_does(
    container: str, azurite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = np.random.default_rng(0).bytes(2 * PIECE_BYTES + 12_345)
    monkeypatch.setenv("RAYBERT_STORAGE_TIMEOUT_S", "0.5")
    with fault_proxy(azurite, seeded(0, share=0.2), silence_s=0.75) as proxy:
        endpoint = proxy.address + "/" + ACCOUNT
        monkeypatch.setenv("RAYBERT_STORAGE_ENDPOINT", endpoint)
        written = {f"{container}/large.bin": data, f"{container}/a/empty": b""}
        written |= {f"{container}/a/b%20c/{number}.json": b"{}" for number in range(3)}
        for path, content in written.items():
            files.write_bytes(path, content)
        assert files.find_files(container) == sorted(written)
        assert files.list_names(f"{container}/a") == ["b c", "empty"]
        for path, content in written.items():
            assert files.read_bytes(path) == content, path
            assert files.size_bytes(path) == len(content), path
        files.remove(f"{container}/a")
        assert files.find_files(container) == [f"{container}/large.bin"]
        tag = conditional.create(f"{container}/lease", b"1")
        assert tag is not None
        assert conditional.create(f"{container}/lease", b"2") is None
        new = conditional.replace_if(f"{container}/lease", b"3", tag)
        assert new is not None
        assert conditional.replace_if(f"{container}/lease", b"4", tag) is None
        assert conditional.read_tagged(f"{container}/lease") == (b"3", new)
        assert any(request.fault for request in proxy.seen)
    monkeypatch.setenv("RAYBERT_STORAGE_ENDPOINT", azurite)
    monkeypatch.delenv("RAYBERT_STORAGE_TIMEOUT_S")
    assert len(list(check_storage(f"{container}/out"))) == 5


@pytest.mark.guard
def test_an_output_in_a_container_has_one_writer(container: str) -> None:
    output = f"{container}/out"
    with lease.held(output), pytest.raises(ResourceError, match="has been writing it since"):
        lease.held(output).__enter__()
    with lease.held(output) as second:
        second.check()
        assert files.read_json(f"{output}/{lease.NAME}")["number"] == 2


@pytest.mark.guard
def test_errors_name_what_azure_calls_it(container: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ResourceError, match=r"there is no bucket 'absent' .* or set RAYBERT_"):
        files.write_bytes("az://absent/a", b"a")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", f"{KEY[:-6]}AAAA==")
    with pytest.raises(ResourceError, match=r"403 .*these credentials may not write to it"):
        files.write_bytes(f"{container}/a", b"a")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "not a key")
    with pytest.raises(ConfigError, match=r"az://container-\w+/: .*Invalid Access Key: "):
        files.write_bytes(f"{container}/a", b"a")


@pytest.mark.guard
def test_stages_work_on_a_container(prepared: Any, container: str, tmp_path: Path) -> None:
    """The same bytes as on this disk."""
    files.write_bytes(f"{container}/text.txt", prepared.text.read_bytes())
    tracking_uri = f"sqlite:///{tmp_path}/mlflow.db"
    made = prepared.vocab(tmp_path)
    corpus = replace(prepared.corpus, source=f"{container}/text.txt")
    common: dict[str, Any] = {"tracking_uri": tracking_uri}
    vocab.run(replace(made, corpus=corpus, output=f"{container}/vocab", **common))
    common["tokenizer"] = f"{container}/vocab"
    made = prepared.prepare(tmp_path)
    prepare.run(replace(made, corpus=corpus, output=f"{container}/shards", **common))
    for name in ("vocab", "shards"):
        expected = read_manifest(str(prepared.folder / name)).outputs
        assert read_manifest(f"{container}/{name}").outputs == expected
    alone = prepared.pretrain(tmp_path / "alone", steps=4)
    common["shards"] = f"{container}/shards"
    pretrain.run(replace(alone, output=f"{container}/pretrain", **common))
    pretrain.run(alone)
    trained = load(files.read_bytes(f"{container}/pretrain/bundle/model.safetensors"))
    for name, tensor in load_file(tmp_path / "alone/bundle/model.safetensors").items():
        np.testing.assert_array_equal(trained[name], tensor, err_msg=name)
