"""Gives access to MLflow: the URI, whether anything answers there, the client.

MLflow takes seconds to import, so it is imported inside the functions that need it. The only
environment variables read, or given a default, are MLflow's own.
"""

import os
import re
import shutil
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from bert_core.errors import ConfigError, ResourceError
from bert_core.wording import error_in_one_line, first_line, without_credentials
from tracking.cache import cache_folder
from tracking.store import page

if TYPE_CHECKING:
    from mlflow import MlflowClient

DATABASES = {"sqlite": None, "postgresql": 5432, "mysql": 3306, "mssql": 1433}
"""Where MLflow keeps runs without a server, with the port that the database listens on."""
SQLITE = "sqlite:///"
ARTIFACTS = "mlartifacts"
"""Folder beside a SQLite store with what its runs attach: copies of what stages wrote."""
PROBE_TIMEOUT_S = 5.0
# NOTE: an API call, since MLflow answers /health and /version to everyone, in any state.
PROBE = "/api/2.0/mlflow/experiments/search"
JSON = "application/json"
REFUSALS = (401, 403, 404, 405)
OF_ALLOWED_HOSTS = "Invalid Host header"
"""Begins MLflow's refusal of the name that it was called by."""
_PASSWORD = re.compile(r"(ssl)?(password|passwd|pwd)|odbc_connect", re.IGNORECASE)
"""Parameters with which the drivers of databases take a password."""
_MAKING = threading.Lock()


class RefusedError(ResourceError):
    """MLflow answers, but refuses the request, and will until somebody changes a setting."""


def tracking_uri(configured: str | None) -> str:
    """Return the URI to record to: as configured, else `MLFLOW_TRACKING_URI`, else SQLite under
    `runs/`.

    The path of a SQLite file is made absolute, since other processes may run in other folders.
    Raises: ConfigError for a folder or a `file:` URI, which MLflow 3 no longer records to.
    """
    uri = (
        configured
        or os.environ.get("MLFLOW_TRACKING_URI")
        or f"{SQLITE}{Path.cwd()}/runs/mlflow.db"
    )
    scheme = urlsplit(uri).scheme.partition("+")[0]
    is_of_databricks = "databricks" in (scheme, uri)  # the bare name means its default profile
    if scheme not in (*DATABASES, "http", "https") and not is_of_databricks:
        raise ConfigError(
            f"tracking_uri: wanted a server (http://…) or database (sqlite:///…, postgresql://…), "
            f"since MLflow 3 does not record to folders, got {without_password(uri)}: give "
            f"{SQLITE}{Path.cwd()}/runs/mlflow.db, or leave tracking_uri and "
            "MLFLOW_TRACKING_URI unset"
        )
    if uri.startswith(SQLITE):
        return f"{SQLITE}{Path(uri.removeprefix(SQLITE)).absolute()}"
    return uri


def without_password(uri: str) -> str:
    """Return the URI without credentials: `postgresql://me:secret@host/db` loses `me:secret@`, and
    `postgresql://host/db?user=me&password=secret` loses its last parameter."""
    uri = without_credentials(uri)
    base, _, query = uri.partition("?")
    parameters = query.split("&")
    kept = [each for each in parameters if not _PASSWORD.fullmatch(each.partition("=")[0])]
    if len(kept) == len(parameters):
        return uri
    return "?".join([base, "&".join(kept)]) if kept else base


def settle_environment() -> None:
    """Set our defaults for MLflow's environment variables; those that the user has set stay.

    NOTE: call it before MLflow is imported, and not from a second thread while others may read
    the environment (setenv and getenv in C are not thread-safe).
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")


def give_up_soon() -> None:
    """Let MLflow's calls fail once the server has been silent for half a minute.

    For a process that retries by itself: by default MLflow's calls retry for many minutes. Settings
    that the user has made are kept. The note at `settle_environment` applies here too.
    """
    # A server that forwards a bundle from a store is silent until it has a whole file.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")


def connect(uri: str) -> "MlflowClient":
    """Return a client for tracking and registry at `uri`; a SQLite file and its folder are created.

    Raises: ResourceError if a server does not answer, a database needs parts of MLflow that are not
        installed, or the database cannot be opened.
    """
    client = client_of(uri)
    if is_database(uri):
        with refusals_told(uri):
            client.search_experiments(max_results=1)
    return client


def client_of(uri: str) -> "MlflowClient":
    """Do the same as `connect`, but leave it to the first query to open the database: for a caller
    that asks at once, inside `refusals_told`."""
    settle_environment()
    require_answer(uri)
    if is_database(uri) and find_spec("sqlalchemy") is None:
        raise ResourceError(
            f"wanted MLflow in {without_password(uri)}, a database, got the client for its server "
            "alone: run `pip install --constraint constraints.txt '.[train]'` in raybert's "
            "checkout, or give the address of a server, http://…"
        )
    if uri.startswith(SQLITE):
        _make_database(Path(uri.removeprefix(SQLITE)))
    from mlflow import MlflowClient

    with refusals_told(uri):
        return MlflowClient(tracking_uri=uri)


@contextmanager
def refusals_told(uri: str) -> Iterator[None]:
    """Turn errors of MLflow or its database inside the context into one of ours, with a message of
    a single line. Raises: ResourceError."""
    from mlflow.exceptions import MlflowException

    kinds: tuple[type[Exception], ...] = (MlflowException,)
    if find_spec("sqlalchemy") is not None:
        from sqlalchemy.exc import SQLAlchemyError

        kinds += (SQLAlchemyError,)
    try:
        yield
    except kinds as error:
        raise ResourceError(
            f"MLflow at {without_password(uri)} does not do what was asked: "
            f"{without_credentials(error_in_one_line(error))}: see what `raybert doctor` says of "
            "it, and whether you may write there; or give another tracking_uri"
        ) from error


def is_database(uri: str) -> bool:
    """Whether `uri` is a database that MLflow opens directly, without a server."""
    return urlsplit(uri).scheme.partition("+")[0] in DATABASES


def _make_database(path: Path) -> None:
    """Create a SQLite file with MLflow's tables, atomically, unless it exists.

    MLflow runs about fifty migrations for this, which takes seconds. So an empty database of this
    version of MLflow is kept in the cache, if the cache is writable, and copied from then on.

    NOTE: MLflow creates the tables in place; killed during the migrations it leaves a file that it
    can neither use nor repair. The migrations rely on process-wide state: two threads at once, such
    as one of an abandoned run, mix up their files.
    """
    with _MAKING:
        if path.exists():
            return
        empty = cache_folder() / f"mlflow-{version('mlflow')}.db"
        with suppress(OSError):  # the cache is not writable
            _appear(empty, _make_tables)
        is_cached = empty.is_file()
        _appear(path, partial(shutil.copyfile, empty) if is_cached else _make_tables)


def _appear(path: Path, make: Callable[[Path], object]) -> None:
    """Let `make` write a file, which then appears at `path` atomically, unless a file exists
    there."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    neighbour = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        neighbour.touch()
        make(neighbour)
        # A link, not a rename: if another process was faster, its file stays.
        with suppress(FileExistsError):
            os.link(neighbour, path)
    finally:
        neighbour.unlink(missing_ok=True)


def _make_tables(path: Path) -> None:
    from mlflow.store.db.utils import _initialize_tables, create_sqlalchemy_engine

    engine = create_sqlalchemy_engine(f"{SQLITE}{path}")
    try:
        _initialize_tables(engine)
    finally:
        engine.dispose()


@contextmanager
def as_default(uri: str) -> "Iterator[MlflowClient]":
    """Provide a client for `uri`, with MLflow's process-wide URI set to the same.

    NOTE: this is needed to register a model, since MLflow's SQL registry looks up the logged model
    at the process-wide URI, whatever URI the client has. Setting it also sets MLflow's environment
    variable, which is restored afterwards.
    """
    client = connect(uri)
    from mlflow.tracking._tracking_service.utils import _use_tracking_uri

    before = os.environ.get("MLFLOW_TRACKING_URI")
    try:
        with _use_tracking_uri(uri), refusals_told(uri):
            yield client
    finally:
        if before is not None:
            os.environ["MLFLOW_TRACKING_URI"] = before


def require_consent(uri: str) -> None:
    """Check within a few seconds that a server does not refuse us; a server that is down passes,
    since it may come back.

    Raises: RefusedError.
    """
    settle_environment()
    try:
        require_answer(uri)
    except RefusedError:
        raise
    except ResourceError:
        return


def require_answer(uri: str) -> None:
    """Check within a few seconds that a server answers; MLflow's own calls retry for minutes.

    For a database, this only checks that something listens there; opening it shows the rest.
    Raises: RefusedError if it refuses us, ResourceError if it does not answer.
    """
    if is_database(uri):
        _knock(uri)
    if not uri.startswith(("http://", "https://")):
        return
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request

    try:
        response = http_request(
            get_default_host_creds(uri),
            PROBE,
            "POST",
            json={"max_results": 1},
            max_retries=0,
            timeout=PROBE_TIMEOUT_S,
            raise_on_status=False,
        )
    except Exception as error:
        reason = str(error)
    else:
        if response.ok and response.headers.get("Content-Type", "").startswith(JSON):
            return
        if response.ok or response.status_code in REFUSALS:
            raise _refusal(uri, response.status_code, response.text)
        reason = f"it answered {response.status_code}"
    raise _silent(uri, reason)


def _knock(uri: str) -> None:
    """Check that something listens at a database's address: MLflow itself would retry for minutes.
    Raises: ResourceError.
    """
    if find_spec("sqlalchemy") is None:
        return
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        url = make_url(uri)
    except ArgumentError:  # several hosts, or no address: opening the database reports it
        return
    port = url.port or DATABASES[url.get_backend_name()]
    if not url.host or port is None:
        return
    try:
        socket.create_connection((url.host, port), timeout=PROBE_TIMEOUT_S).close()
    except OSError as error:
        raise _silent(uri, str(error)) from error


def _silent(uri: str, reason: str) -> ResourceError:
    return ResourceError(
        f"wanted MLflow at {without_password(uri)}, it does not answer: start it, or give another "
        f"tracking_uri ({in_short(reason)})"
    )


def in_short(reason: str) -> str:
    """Return a library's message about a connection, shortened to the cause that it names last.

    `HTTPConnectionPool(…): Max retries exceeded … Connection refused'))` → `Connection refused`.
    """
    named = re.findall(r"\[Errno -?\d+\] [^'\")]+|timed out|CERTIFICATE_VERIFY_FAILED[^)]*", reason)
    return named[-1].strip() if named else first_line(reason)


def _refusal(uri: str, status: int, text: str) -> RefusedError:
    place = without_password(uri)
    host = urlsplit(place).netloc
    if status == 403 and text.startswith(OF_ALLOWED_HOSTS):
        refused = (
            f"it refuses to be called {host}: start it with --allowed-hosts {host} (names of "
            "hosts, with their ports, separated by commas)"
        )
    elif status in (401, 403):
        refused = (
            f"it refuses these credentials ({status}): set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        )
    else:
        refused = f"what answers there is not MLflow ({status}): correct tracking_uri"
    return RefusedError(f"wanted MLflow at {place}, {refused}")


def experiment_id(client: "MlflowClient", uri: str, name: str) -> str:
    """Return the experiment's id; the experiment is created if missing.

    With SQLite, its artifacts go next to the database file. The tags of the experiment say how
    MLflow's page shows it. If its tags may not be changed, they are left as they are.
    """
    from mlflow.exceptions import MlflowException

    if (known := client.get_experiment_by_name(name)) is not None:
        with suppress(MlflowException):  # it is deleted, or another user's
            for key, value in page.missing_tags(known.tags).items():
                client.set_experiment_tag(known.experiment_id, key, value)
        return known.experiment_id
    location: dict[str, Any] = {}
    if uri.startswith(SQLITE):
        folder = Path(uri.removeprefix(SQLITE)).absolute().parent / ARTIFACTS
        location = {"artifact_location": folder.as_uri()}
    try:
        return client.create_experiment(name, tags=page.experiment_tags(), **location)
    except MlflowException:
        # Another process may have created it in the meantime.
        if (known := client.get_experiment_by_name(name)) is None:
            raise
        return known.experiment_id
