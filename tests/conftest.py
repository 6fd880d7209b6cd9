"""What every test shares: checked types, the one local Ray cluster, the real data sets."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

# Before the first import of ours: from here on a wrong type or shape is an error, in this process
# only (Ray's workers import the packages unchecked, as in production). An int counts as a float.
install_import_hook(
    ["bert_core", "pipelines", "serve", "tracking"],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """One cluster of this test session on this machine, four CPUs whatever the machine has."""
    from pipelines import cluster

    cluster.connect(address="local", num_cpus=4)
    yield
    cluster.disconnect()


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder that holds `wikitext2`, `sst2`, …, named by RAYBERT_DATA; skips without it."""
    folder = os.environ.get("RAYBERT_DATA")
    if not folder:
        pytest.skip("RAYBERT_DATA is not set: it names the folder that holds wikitext2, sst2, …")
    if not Path(folder).is_dir():
        pytest.fail(f"RAYBERT_DATA is {folder}, which is not a folder: correct it, or unset it")
    return Path(folder)
