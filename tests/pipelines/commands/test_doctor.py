"""The doctor tells of a machine, a cluster, a storage and MLflow what is wrong, line by line."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from bert_core.errors import ResourceError
from pipelines.commands.doctor import DoctorConfig, Finding, examine, run
from pipelines.runtime.doctor_checks import NODE_CHECKS


def by_check(findings: list[Finding]) -> dict[str, list[Finding]]:
    return {one.check: [each for each in findings if each.check == one.check] for one in findings}


def test_this_machine_a_folder_and_a_store_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    config = DoctorConfig(storage=f"{tmp_path}/out", tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    told = by_check(list(examine(config)))
    assert list(told) == [*NODE_CHECKS, "token", "ports", "storage", "mlflow"]
    assert all(each.ok for name in ("token", "storage", "ports") for each in told[name])
    [mlflow] = told["mlflow"]
    assert mlflow.text.endswith("does not exist yet: the first run creates it")
    assert not (tmp_path / "mlflow.db").exists()


def test_a_run_is_written_to_the_store_and_deleted(tmp_path: Path) -> None:
    from mlflow.entities import ViewType

    from tracking.store.server import connect

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = connect(uri)
    [told] = by_check(list(examine(DoctorConfig(tracking_uri=uri))))["mlflow"]
    assert told.ok, told.text
    [experiment] = client.search_experiments(filter_string="name = 'raybert-doctor'")
    assert client.search_runs([experiment.experiment_id]) == []
    [run] = client.search_runs([experiment.experiment_id], run_view_type=ViewType.DELETED_ONLY)
    assert [path for path in tmp_path.rglob("*") if path.name == "probe.txt"] == []
    assert run.data.metrics == {"probe": 1.0}


def test_failed_checks_are_counted_and_the_rest_are_run_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    config = DoctorConfig(storage=f"{tmp_path}/file", tracking_uri="http://127.0.0.1:9", json=True)
    with pytest.raises(ResourceError, match=r"^\d+ of \d+ checks found something wrong"):
        run(config)
    told = by_check([Finding(**each) for each in json.loads(capsys.readouterr().out)])
    assert [each.ok for each in told["storage"]] == [False]
    [mlflow] = told["mlflow"]
    assert "wanted MLflow at http://127.0.0.1:9, it does not answer: start it" in mlflow.text


def test_a_token_that_others_can_read_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    path = tmp_path / "token"
    path.write_text("0123456789abcdef" * 4)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    config = DoctorConfig(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    path.chmod(0o644)
    [told] = [each for each in examine(config) if not each.ok and str(path) in each.text]
    assert told.check == "key files"
    assert f"run `chmod 600 {path}" in told.text
    path.chmod(0o600)
    [token] = by_check(list(examine(config)))["token"]
    assert token == Finding(check="token", where="", ok=True, text=f"in {path}")


def findings_of(done: Any) -> dict[str, list[Finding]]:
    return by_check([Finding(**each) for each in json.loads(done.stdout)])


@pytest.mark.guard
@pytest.mark.parametrize("kind", ["host:port", "job server"])
def test_a_cluster_is_checked_on_its_nodes(kind: str, head: Any, tmp_path: Path) -> None:
    addresses = {**head.addresses, "job server": head.environment["RAY_API_SERVER_ADDRESS"]}
    # As if another torch were installed here.
    other = tmp_path / "torch-1.0.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0.0\n")
    done = head.raybert(
        "doctor", "--json", "--address", addresses[kind], "--storage", f"{tmp_path}/out",
        PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
        MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path}/mlflow.db",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    told = findings_of(done)
    assert told["cluster"][0].text == f"1 node at {addresses[kind]}: 1 CPUs, 0 GPUs"
    [versions] = told["versions"]
    assert not versions.ok
    assert "not 1.0.0: run `pip install torch==1.0.0` there" in versions.text
    assert versions.where.endswith(")"), "the node is named"
    for name in ("gpus", "disk", "connections", "shared", "storage"):
        assert all(each.ok for each in told[name]), told[name]


@pytest.mark.guard
@pytest.mark.parametrize("kind", ["host:port", "ray://", "job server"])
@pytest.mark.parametrize(
    ("variables", "got"),
    [
        ({"RAY_AUTH_TOKEN": "f" * 64}, "another one in RAY_AUTH_TOKEN"),
        ({"RAY_AUTH_TOKEN": "", "HOME": "/nonexistent"}, "none in /nonexistent/.ray/auth_token"),
    ],
    ids=["another", "none"],
)
def test_a_wrong_token_is_reported(
    kind: str, variables: dict[str, str], got: str, head: Any, tmp_path: Path
) -> None:
    addresses = {**head.addresses, "job server": head.environment["RAY_API_SERVER_ADDRESS"]}
    done = head.raybert(
        "doctor", "--json", "--address", addresses[kind],
        MLFLOW_TRACKING_URI=f"sqlite:///{tmp_path}/mlflow.db", **variables,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert findings_of(done)["cluster"][0].text == (
        f"wanted the token of the Ray cluster at {addresses[kind]}, could not reach or join it "
        f"with {got}: copy the cluster's, which `ray get-auth-token` prints on its head, to "
        "~/.ray/auth_token or RAY_AUTH_TOKEN"
    )
