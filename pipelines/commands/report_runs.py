"""The runs that a report is about: what their folders say, or MLflow where those are gone."""

import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bert_core import files
from bert_core.errors import ConfigError, FormatError, RaybertError
from bert_core.manifest import BUNDLE, Manifest, is_complete, read_manifest
from pipelines.runtime.description import COMMAND, run_name
from pipelines.runtime.stage import STARTED
from tracking import goodput
from tracking.curves import Curve, curves_of
from tracking.goodput import Goodput
from tracking.mirror import RECORD
from tracking.server import connect, tracking_uri
from tracking.spool import METRICS
from tracking.story import result

if TYPE_CHECKING:
    from mlflow import MlflowClient

_RUN_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run of a stage."""

    manifest: Manifest
    place: str
    """Folder or URI with its files."""
    name: str
    """`pretrain quickstart`."""
    command: str = ""
    """The command line that makes the same; empty if an older version has not kept it."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where its inputs were."""
    curves: Sequence[Curve] = ()
    spent: Goodput | None = None

    @property
    def stage(self) -> str:
        return self.manifest.stage

    @property
    def work(self) -> tuple[str, str]:
        """Stage and task: runs of the same are compared."""
        return self.stage, str(self.manifest.config.get("task", ""))

    @property
    def counts(self) -> dict[str, Any]:
        return self.manifest.counts

    @property
    def result(self) -> str:
        """What it came to, in one line."""
        return result(self.stage, self.counts)

    @cached_property
    def digests(self) -> frozenset[str]:
        """All digests by which another run may have taken it as an input."""
        known = {self.manifest.digest, *(each.sha256 for each in self.manifest.outputs.values())}
        known |= {str(self.counts.get("tokenizer_digest"))} if self.stage == "vocab" else set()
        if any(name.startswith(f"{BUNDLE}/") for name in self.manifest.outputs):
            known.add(_bundle_digest(files.join(self.place, BUNDLE)))
        return frozenset(known)

    def text(self, name: str) -> str | None:
        """The text of one of its files; None if it has no such file."""
        return _text(self.place, name)


def runs_of(references: Sequence[str], uri: str | None, downloads: str | None = None) -> list[Run]:
    """The runs, in the order given.

    Args:
        references: folders or URIs of outputs, or ids of MLflow runs.
        uri: of the MLflow store, for ids.
        downloads: folder for the files of runs that only MLflow has; by default a temporary one,
            which stays.
    Raises: ConfigError if a reference is no finished run.
    """
    return [_run(reference, uri, downloads) for reference in references]


def with_ancestors(runs: Sequence[Run]) -> list[Run]:
    """The runs and all that they were made from, as far as their folders are still what was read,
    ancestors first."""
    by_place: dict[str, Run] = {}

    def add(run: Run) -> None:
        if run.place in by_place:
            return
        for name, source in run.sources.items():
            for folder in _folders(source):
                parent = _folder_run(folder)
                if parent is not None and run.manifest.inputs.get(name) in parent.digests:
                    add(parent)
                    break
        by_place[run.place] = run

    for run in runs:
        add(run)
    return list(by_place.values())


def links(runs: Sequence[Run]) -> list[tuple[int, int]]:
    """Which run took which as an input, by their places; without those that a longer way says."""
    direct = {
        (source, target)
        for target, run in enumerate(runs)
        for source, other in enumerate(runs)
        if source != target and _is_input(other, run)
    }
    reach = set(direct)
    for middle in range(len(runs)):
        reach |= {(a, d) for a, b in reach if b == middle for c, d in reach if c == middle}
    return sorted(
        (a, b)
        for a, b in direct
        if not any((a, via) in reach and (via, b) in reach for via in range(len(runs)))
    )


def _is_input(source: Run, run: Run) -> bool:
    # The built-in corpus goes by its word.
    return bool(source.digests & {*run.manifest.inputs.values()}) or source.stage in (
        run.sources.values()
    )


def _run(reference: str, uri: str | None, downloads: str | None) -> Run:
    if (run := _folder_run(reference)) is not None:
        return run
    if _RUN_ID.fullmatch(reference):
        return _mlflow_run(reference, tracking_uri(uri), downloads)
    raise ConfigError(
        f"runs: wanted the output of a finished stage or the id of an MLflow run, got {reference}, "
        "which has no manifest.json: `raybert list runs` shows those under runs/"
    )


def _folders(source: str) -> Iterator[str]:
    if source.startswith(("models:", "hf://")):
        return
    yield source
    if source.rstrip("/").endswith(f"/{BUNDLE}"):
        yield source.rstrip("/").removesuffix(f"/{BUNDLE}")


def _folder_run(folder: str) -> Run | None:
    if not is_complete(folder):
        return None
    manifest = read_manifest(folder)
    marker = files.join(folder, STARTED)
    started = files.read_json(marker) if files.is_file(marker) else {}
    records = ((line["step"], line["metrics"]) for line in _lines(folder, METRICS))
    return Run(
        manifest=manifest,
        place=folder,
        name=run_name(manifest.stage, folder),
        command=started.get("command", ""),
        sources=started.get("sources", {}),
        curves=curves_of(records, _steps_per_seed(manifest.counts)),
        spent=_spent(folder),
    )


def _text(place: str, name: str) -> str | None:
    for folder in ((place,), (place, RECORD)):
        path = files.join(*folder, name)
        if files.is_file(path):
            return files.read_bytes(path).decode()
    return None


def _lines(place: str, name: str) -> list[Any]:
    return [json.loads(line) for line in (_text(place, name) or "").splitlines()]


def _spent(folder: str) -> Goodput | None:
    try:
        return goodput.read(folder) or goodput.read(files.join(folder, RECORD))
    except RaybertError:
        return None


def _steps_per_seed(counts: Mapping[str, Any]) -> int | None:
    return int(counts["steps"]) if len(counts.get("seeds", ())) > 1 else None


def _bundle_digest(folder: str) -> str:
    from bert_core.bundle.format import bundle_digest

    local = files.local_path(folder)
    try:
        return "" if local is None else bundle_digest(local)
    except (OSError, FormatError):
        return ""


def _mlflow_run(run_id: str, uri: str, downloads: str | None) -> Run:
    """A run as MLflow has it; its folder, if that is here.

    Raises: ConfigError if there is no such run, or no stage made it.
    """
    from mlflow.exceptions import MlflowException

    client = connect(uri)
    try:
        stored = client.get_run(run_id)
    except MlflowException as error:
        raise ConfigError(f"runs: wanted an MLflow run, got {run_id}: {error}") from error
    tags = stored.data.tags
    if "stage" not in tags:
        raise ConfigError(f"runs: wanted a run of a raybert stage, got another's, {run_id}")
    run = _folder_run(tags.get("output", ""))
    if run is not None and _is_of(run, stored.data.params):
        return run
    taken = [] if stored.inputs is None else stored.inputs.dataset_inputs
    inputs = {each.dataset.name: each.dataset.digest for each in taken}
    return Run(
        manifest=Manifest(
            stage=tags["stage"],
            digest="",
            config=dict(stored.data.params),
            inputs=inputs,
            counts=dict(stored.data.metrics),
            code_version=tags.get("code_version", ""),
        ),
        place=client.download_artifacts(
            run_id, "", tempfile.mkdtemp(prefix="raybert-report-", dir=downloads)
        ),
        name=stored.info.run_name,
        command=tags.get(COMMAND, ""),
        curves=curves_of(_records(client, run_id, stored.data.metrics)),
    )


def _is_of(run: Run, params: Mapping[str, str]) -> bool:
    """Whether a folder still has what the MLflow run made: both are the same settings."""
    from tracking.runs import flatten

    return {k: v for k, v in flatten(run.manifest.config).items() if k in params}.items() <= (
        params.items()
    )


def _records(
    client: "MlflowClient", run_id: str, metrics: Mapping[str, float]
) -> list[tuple[int, dict[str, float]]]:
    records: dict[int, dict[str, float]] = {}
    for name in metrics:
        for point in client.get_metric_history(run_id, name):
            records.setdefault(point.step, {})[name] = point.value
    return sorted(records.items())
