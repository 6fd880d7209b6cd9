"""Packages what is sent with a job: raybert's code, its configs, and the user's folder if given.

The code is a package named by the hash of its contents, so that the same code is sent only once. It
is a wheel in everything but its name: if the file ended in `.whl`, Ray would have pip install all
its requirements on every node.
"""

import hashlib
import importlib.metadata
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pipelines
from bert_core.errors import ConfigError
from pipelines.jobs.server import JobServer
from pipelines.jobs.submission import config_files
from pipelines.runtime import cluster
from pipelines.runtime.code_version import code_version

PACKAGES = ("bert_core", "pipelines", "raybert", "serve", "tracking")
STOP_WAIT_S = 60
"""How long a job may take to stop: for a checkpoint and the end of its MLflow run."""

# NOTE: gitignore's rules: without the slash, `data` would exclude bert_core/data too.
NOT_SENT = [
    "/.checkpoints",
    "/.git",
    "/.venv",
    "/.venv-cuda",
    "/data",
    "/mlruns",
    "/runs",
    "/shared",
    "__pycache__",
    ".*_cache",
]
_EARLIEST = (1980, 1, 1, 0, 0, 0)  # a zip's earliest date: the hash must not depend on dates


def code_files() -> dict[str, bytes]:
    """Return the contents of raybert's files by their paths in a wheel."""
    root = Path(pipelines.__file__).parents[1]
    paths = [path for name in PACKAGES for path in (root / name).rglob("*") if path.is_file()]
    code = {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(paths)
        if "__pycache__" not in path.parts
    }
    version = code_version()
    metadata = f"Metadata-Version: 2.1\nName: raybert\nVersion: {version}\n"
    return code | {f"raybert-{version}.dist-info/METADATA": metadata.encode()}


def digest_of(contents: Mapping[str, bytes]) -> str:
    """Return the digest of files, by name and content."""
    digest = hashlib.sha256()
    for name, data in contents.items():
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()[:16]


def send_code(server: JobServer) -> str:
    """Send this raybert's code to the cluster unless it already has it; return the package's
    URI."""
    contents = code_files()
    uri = f"gcs://raybert-{digest_of(contents)}.zip"
    if not server.has_package(uri):
        with tempfile.NamedTemporaryFile(suffix=".zip") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                for name, data in contents.items():
                    archive.writestr(zipfile.ZipInfo(name, _EARLIEST), data)
            file.flush()
            server.send_package(uri, file.name)
    return uri


@contextmanager
def runtime_env(
    server: JobServer, command: Sequence[str], working_dir: str | None
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yield Ray's description of what a job needs, and the command line as the job runs it.

    Without a folder from the user, the job's folder holds the files that `--config` names, and the
    command line refers to them there.
    """
    described: dict[str, Any] = {
        "env_vars": {
            "PYTHONUNBUFFERED": "1",
            "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S),
            **cluster.storage_environment(),
        }
    }
    if working_dir is None or not (Path(working_dir) / "pipelines" / "cli.py").is_file():
        described["py_modules"] = [send_code(server)]
    if working_dir is not None:
        yield described | {"working_dir": working_dir, "excludes": NOT_SENT}, list(command)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = [name for name in config_files(command) if Path(name).is_file()]
        named = {name: f"configs/{i}/{Path(name).name}" for i, name in enumerate(found)}
        for name, place in named.items():
            (Path(folder) / place).parent.mkdir(parents=True)
            (Path(folder) / place).write_bytes(Path(name).read_bytes())
        (Path(folder) / "raybert.txt").write_text("A job's folder: it goes with the job.\n")
        yield described | {"working_dir": folder}, [_renamed(word, named) for word in command]


def _renamed(word: str, named: Mapping[str, str]) -> str:
    option, equals, value = word.rpartition("=")
    is_config = option in ("", "--config") and value in named
    return f"{option}{equals}{named[value]}" if is_config else word


def versions() -> dict[str, str]:
    """Return the versions on this machine that a job may depend on; a client has no torch."""
    import platform

    installed = {"python": platform.python_version(), "raybert": code_version()}
    for name in ("ray", "torch"):
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def check_versions(server: JobServer) -> None:
    """Raise ConfigError if the cluster has another version of Ray, or another minor version of
    Python."""
    here, there = versions(), server.versions()
    for name, parts in (("ray", 3), ("python", 2)):
        ours, theirs = (".".join(each[name].split(".")[:parts]) for each in (here, there))
        if ours != theirs:
            title = name.capitalize()
            raise ConfigError(
                f"{title}: wanted {ours} on the cluster at {server.address}, as on this machine, "
                f"got {theirs}: start the cluster with {title} {ours}, or run raybert from an "
                f"environment with {title} {theirs}"
            )
