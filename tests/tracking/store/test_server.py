import os
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bert_core.cache import FOLDER
from bert_core.errors import ConfigError, ResourceError
from tracking.store import server
from tracking.store.ports import free_ports
from tracking.store.server import (
    connect,
    experiment_id,
    in_short,
    require_answer,
    tracking_uri,
    without_password,
)


def test_the_uri_is_the_configured_one_then_mlflows_variable_then_sqlite_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking_uri(None) == f"sqlite:///{tmp_path}/runs/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracking:5000")
    assert tracking_uri(None) == "http://tracking:5000"
    assert tracking_uri("sqlite:///mine.db") == f"sqlite:///{tmp_path}/mine.db"
    for uri in ("postgresql+psycopg://db/mlflow", "databricks", "databricks://profile"):
        assert tracking_uri(uri) == uri


@pytest.mark.parametrize("uri", ["file:///tmp/mlruns", "mlruns", "/tmp/mlruns"])
def test_a_folder_is_refused_with_a_way_out(uri: str) -> None:
    with pytest.raises(ConfigError, match=rf"tracking_uri: wanted .*, got {uri}: give sqlite:///"):
        tracking_uri(uri)


def test_a_password_is_not_written_down() -> None:
    assert without_password("postgresql://me:se@cret@db:5432/ml") == "postgresql://db:5432/ml"
    for password in ("a/b", "a?b", "a#b", "12ab/x"):
        assert without_password(f"postgresql://me:{password}@db/ml") == "postgresql://db/ml"
    assert without_password("postgresql://me@db:5432/a@b") == "postgresql://db:5432/a@b"
    in_query = "postgresql://db/ml?user=me&password=secret"
    assert without_password(in_query) == "postgresql://db/ml?user=me"
    assert without_password("mysql://db/ml?passwd=a&ssl=1&PWD=b") == "mysql://db/ml?ssl=1"
    assert without_password("mssql:///?odbc_connect=PWD%3Dsecret") == "mssql:///"
    with pytest.raises(ConfigError, match=r"got postgres://db/ml: give sqlite") as refused:
        tracking_uri("postgres://me:secret@db/ml")
    assert "secret" not in str(refused.value)
    assert without_password("http://tracking:5000") == "http://tracking:5000"
    for plain in ("http://[::1]:5000/a@b", "http://tracking:5000/a@b", "postgresql://db/a?b=c@d"):
        assert without_password(plain) == plain
    assert without_password("sqlite:////home/a@b/mlflow.db") == "sqlite:////home/a@b/mlflow.db"


def test_a_server_that_does_not_answer_is_named() -> None:
    uri = f"http://127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(ResourceError, match=f"wanted MLflow at {uri}, it does not answer"):
        require_answer(uri)


@pytest.mark.parametrize("scheme", ["postgresql", "mysql+pymysql"])
def test_a_database_where_nobody_listens_is_named_at_once(scheme: str) -> None:
    [port] = free_ports(1)
    with pytest.raises(ResourceError) as error:
        connect(f"{scheme}://me:secret@127.0.0.1:{port}/runs")
    assert str(error.value) == (
        f"wanted MLflow at {scheme}://127.0.0.1:{port}/runs, it does not answer: start it, or give "
        "another tracking_uri ([Errno 111] Connection refused)"
    )


def test_a_file_that_is_not_a_database_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "runs.db").write_text("no database")
    with pytest.raises(ResourceError, match=r"runs\.db does not do what was asked: .* not a datab"):
        connect(f"sqlite:///{tmp_path}/runs.db")


def test_a_failed_connection_is_reported_with_its_cause() -> None:
    from urllib3.exceptions import MaxRetryError, NewConnectionError

    nowhere: Any = None
    refused = NewConnectionError(nowhere, "[Errno 111] Connection refused")
    retried = MaxRetryError(nowhere, "/api", refused)
    assert in_short(str(retried)) == "[Errno 111] Connection refused"
    assert in_short("it answered 500\nand more") == "it answered 500"


def test_threads_make_their_stores_one_after_the_other(tmp_path: Path) -> None:
    uris = [f"sqlite:///{tmp_path}/{number}/mlflow.db" for number in range(2)]
    with ThreadPoolExecutor(len(uris)) as threads:
        clients = list(threads.map(connect, uris))
    for client, uri in zip(clients, uris, strict=True):
        assert experiment_id(client, uri, "e")


@pytest.mark.guard
def test_a_process_killed_while_it_makes_the_store_leaves_none_that_is_broken(
    tmp_path: Path,
) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    cache = {**os.environ, FOLDER: str(tmp_path / "cache")}  # where no store was made before
    code = """if True:
        import sys
        from tracking.store.server import connect, experiment_id
        assert experiment_id(connect(sys.argv[1]), sys.argv[1], "e")
    """
    command = [sys.executable, "-c", code, uri]
    with subprocess.Popen(command, env=cache) as process:
        while not list(tmp_path.rglob("*.part")):
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(0.4)  # of the second or more that the migrations take
        process.kill()
    assert not Path(tmp_path, "mlflow.db").exists()
    subprocess.run(command, env=cache, check=True, timeout=120)


def test_the_tables_of_a_store_are_made_once_and_copied_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "cache"))
    connect(f"sqlite:///{tmp_path}/first.db")
    monkeypatch.setattr(server, "_make_tables", lambda path: pytest.fail(f"made again: {path}"))
    uri = f"sqlite:///{tmp_path}/second.db"
    assert experiment_id(connect(uri), uri, "e")
    (kept,) = (tmp_path / "cache").iterdir()
    with sqlite3.connect(kept) as database:  # nothing of a user's
        assert database.execute("SELECT count(*) FROM experiments").fetchone() == (0,)


def test_a_store_is_made_even_if_no_template_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(FOLDER, str(tmp_path / "file" / "cache"))
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert experiment_id(connect(uri), uri, "e")


def test_a_client_without_mlflows_server_is_told_what_a_database_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)  # as if it were not installed
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    with pytest.raises(ResourceError, match=r"wanted MLflow in sqlite.*run `pip .*\.\[train\]"):
        connect(uri)
    assert list(tmp_path.iterdir()) == []
