"""Training on shards that are not on this machine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from bert_core import files
from bert_core.cache import SHARDS
from bert_core.errors import ResourceError
from pipelines import pretrain


@pytest.mark.guard
def test_shards_of_a_bucket_are_trained_on_from_a_cache_that_has_room_for_a_window(
    pretrained: Any, object_store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (pretrained.folder / "shards").glob("*.*"):
        files.write_bytes(f"{object_store}/shards/{path.name}", path.read_bytes())
    config = replace(pretrained.pretrain(tmp_path / "out"), shards=f"{object_store}/shards")
    monkeypatch.setenv("RAYBERT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RAYBERT_CACHE_GB", "0.0001")
    message = r"that are open at a time, the cache may take 100,000: set RAYBERT_CACHE_GB to at lea"
    with pytest.raises(ResourceError, match=message):
        pretrain.run(config)
    assert not (tmp_path / "cache" / SHARDS).exists(), "found before anything is fetched"
    monkeypatch.setenv("RAYBERT_CACHE_GB", "0.1")
    pretrain.run(config)
    trained, local = (
        load_file(folder / "bundle" / "model.safetensors")
        for folder in (tmp_path / "out", pretrained.folder / "pretrain")
    )
    for name, tensor in local.items():
        np.testing.assert_array_equal(trained[name], tensor, err_msg=name)
    assert list((tmp_path / "cache" / SHARDS).glob("*train-*"))
