"""Starts a stage, for the command line and for Python."""

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from bert_core.errors import ResourceError
from pipelines.configure import STAGES

if TYPE_CHECKING:
    from bert_core.manifest import Manifest

PARTS = ("inspect", "list", "promote", "report", "rollback", "ui")
"""Commands of which a part works without the extra."""
EXTRAS = {
    **dict.fromkeys([*STAGES, *PARTS, "compare", "continue"], "train"),
    "serve": "serve",
    "quickstart": "quickstart",
}
"""The extra of pyproject.toml that a command needs; the others need none."""
_OF_TRAIN = ("torch", "sqlalchemy", "datasketch", "tensorboardX")
_OF_SERVE = ("torch", "sqlalchemy", "fastapi_offline")
TELLING = {
    "train": _OF_TRAIN,
    "serve": _OF_SERVE,
    "quickstart": (*_OF_TRAIN, *_OF_SERVE, "sklearn"),
}
"""Modules that an extra brings and the client does not."""


def launch(stage: str, config: Any) -> "Manifest":
    """Run a stage, after the checks that fail in seconds; within a Ray job, as that job.

    Raises: RaybertError with the way out.
    """
    from pipelines.jobs.driver import as_job
    from pipelines.runtime.preflight import preflight

    require_extra(stage)
    with as_job(config.output):
        preflight(stage, config)
        manifest: Manifest = importlib.import_module(STAGES[stage].module).run(config)
    return manifest


def require_extra(word: str) -> None:
    """Raise ResourceError if a package that the command needs is not installed."""
    if (module := lacking(word)) is not None:
        raise ResourceError(way_out(word, module))


def lacking(word: str) -> str | None:
    """Return the first module of the command's extra that is not installed; None if all are."""
    modules = TELLING[EXTRAS[word]] if word in EXTRAS else ()
    return next((module for module in modules if find_spec(module) is None), None)


def way_out(word: str, module: str | None) -> str:
    """Return the message for a command that lacks a module."""
    elsewhere = ", or have a cluster do it: `raybert submit`" if word in STAGES else ""
    return (
        f"wanted {module}, which is not installed: run `pip install --constraint constraints.txt "
        f"'.[{EXTRAS[word]}]'` in raybert's checkout{elsewhere}"
    )
