"""The runs that a report is about, from their folders, or from MLflow if those are away."""

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bert_core import files
from bert_core.errors import ConfigError, RaybertError
from bert_core.manifest import BUNDLE, NAME, Manifest, is_complete, read_manifest
from pipelines.runtime.description import COMMAND, STARTED, digests_of, recorded_run, run_name
from tracking.models import hub
from tracking.models.references import Registered
from tracking.runs import goodput
from tracking.runs.curves import Curve, curves_of
from tracking.runs.goodput import Goodput
from tracking.runs.mirror import RECORD
from tracking.runs.spool import METRICS
from tracking.runs.spool import Run as Recorded
from tracking.runs.story import first_counts
from tracking.store.page import RESULT
from tracking.store.server import connect, tracking_uri, without_password

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run as StoredRun

_RUN_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of a stage: a finished one from its folder, or one that MLflow has recorded."""

    manifest: Manifest
    """Built from MLflow's record for a run that has no manifest."""
    has_finished: bool = True
    place: str
    """Folder or URI with its files; a copy of its artifacts if only MLflow has it."""
    output: str
    """Folder or URI that the stage wrote."""
    name: str
    """`pretrain quickstart`."""
    command: str = ""
    """The command line that makes the same; empty if an older version has not kept it."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where its inputs were."""
    curves: Sequence[Curve] = ()
    spent: Goodput | None = None
    recorded: Recorded | None = None
    """Its run in MLflow, if it is known."""
    store: "Store | None" = None
    """Where to look for runs that it was made from, if their folders are away."""

    @property
    def stage(self) -> str:
        return self.manifest.stage

    @property
    def work(self) -> tuple[str, str]:
        """Return stage and task: runs that agree in both are compared."""
        return self.stage, str(self.manifest.config.get("task", ""))

    @property
    def counts(self) -> dict[str, Any]:
        return self.manifest.counts

    @property
    def result(self) -> str:
        """Return the stage's result in one line."""
        ended = "finished" if self.has_finished else "not finished"
        return self.manifest.line or first_counts(self.counts) or ended

    @property
    def sentence(self) -> str:
        """Return the result for a reader who knows neither the stage nor its figures."""
        if self.manifest.sentence:
            return self.manifest.sentence
        ended = "has finished" if self.has_finished else "has not finished"
        figures = self.manifest.line or first_counts(self.counts)
        return f"`{self.stage}` {ended}{f': {figures}' if figures else ''}."

    @cached_property
    def digests(self) -> frozenset[str]:
        """Return all digests by which another run may have recorded this one as an input."""
        return digests_of(self.manifest)

    def text(self, name: str) -> str | None:
        """Return the text of one of the run's files; None if it has no such file."""
        return _text(self.place, name)


def runs_of(references: Sequence[str], uri: str | None, downloads: str | None = None) -> list[Run]:
    """Load runs, in the order given.

    Args:
        references: folders or URIs of outputs, or ids of MLflow runs.
        uri: the MLflow store, for ids.
        downloads: folder for the files of runs that only MLflow has; by default a temporary one,
            which stays.
    Raises: ConfigError if a reference is neither the output of a finished run nor an id.
    """
    store = cache(lambda: Store(tracking_uri(uri), downloads))
    return [_run(reference, store) for reference in references]


def with_ancestors(runs: Sequence[Run]) -> list[Run]:
    """Return the runs and those they were made from, ancestors first. An ancestor is left out if
    its folder has changed since it was read and MLflow does not have it either."""
    by_place: dict[str, Run] = {}

    def add(run: Run) -> None:
        if run.place in by_place:
            return
        for name, source in run.sources.items():
            parents = _runs_that_wrote(source, run.manifest.inputs.get(name, ""), run.store)
            if (parent := next(parents, None)) is not None:
                add(parent)
        by_place[run.place] = run

    for run in runs:
        add(run)
    return list(by_place.values())


def links(runs: Sequence[Run]) -> list[tuple[int, int]]:
    """Return (source, target) positions of runs where the target used the source's output; links
    implied by a longer path are left out."""
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
    # The built-in corpus is referred to by its name, not by a path.
    return bool(source.digests & {*run.manifest.inputs.values()}) or source.stage in (
        run.sources.values()
    )


class Store:
    """The runs of an MLflow store; the artifacts of each are downloaded once."""

    def __init__(self, uri: str, downloads: str | None) -> None:
        self._client, self._uri, self._downloads = connect(uri), uri, downloads
        self._runs: dict[str, Run] = {}

    def run(self, run_id: str) -> Run:
        """Load a run from its folder if that still holds the run, else from MLflow.

        Raises: ConfigError if there is no such run, or no stage made it.
        """
        from mlflow.exceptions import MlflowException

        try:
            stored = self._client.get_run(run_id)
        except MlflowException as error:
            raise ConfigError(f"runs: wanted an MLflow run, got {run_id}: {error}") from error
        tags = stored.data.tags
        if "stage" not in tags:
            raise ConfigError(f"runs: wanted a run of a raybert stage, got another's, {run_id}")
        run = _reachable_run(tags.get("output", ""))
        if run is not None and run.recorded is not None and run.recorded.run_id == run_id:
            return replace(run, store=self)
        return self._downloaded(stored)

    def that_wrote(self, output: str, digest: str) -> Iterator[Run]:
        """Yield the finished runs that wrote an output with this digest, newest first."""
        everywhere = [each.experiment_id for each in self._client.search_experiments()]
        here = output.removeprefix(f"{Path.cwd()}/")
        for spelling in dict.fromkeys((output, files.absolute(output), here)):
            if '"' in spelling:  # MLflow's filters cannot quote it
                continue
            wanted = f'attributes.status = "FINISHED" and tags.output = "{spelling}"'
            for stored in self._client.search_runs(everywhere, wanted):
                if digest in self._digests(stored.info.run_id):
                    yield self._downloaded(stored)

    def _digests(self, run_id: str) -> frozenset[str]:
        """Return the digests of the run's output, reading only its manifest; empty if it has no
        manifest."""
        if all(file.path != NAME for file in self._client.list_artifacts(run_id)):
            return frozenset()
        with tempfile.TemporaryDirectory(prefix="raybert-report-") as folder:
            self._client.download_artifacts(run_id, NAME, folder)
            return digests_of(read_manifest(folder))

    def _downloaded(self, stored: "StoredRun") -> Run:
        run_id = stored.info.run_id
        if run_id not in self._runs:
            self._runs[run_id] = self._download(stored)
        return self._runs[run_id]

    def _download(self, stored: "StoredRun") -> Run:
        run_id, tags = stored.info.run_id, stored.data.tags
        folder = tempfile.mkdtemp(prefix="raybert-report-", dir=self._downloads)
        place = self._client.download_artifacts(run_id, "", folder)
        run = _folder_run(place) or _without_manifest(stored, place)
        records = _records(self._client, run_id, stored.data.metrics)
        return replace(
            run,
            output=tags.get("output", ""),
            name=stored.info.run_name,
            command=tags.get(COMMAND, ""),
            curves=curves_of(records, _steps_per_seed(run.counts)),
            recorded=Recorded(
                tracking_uri=without_password(self._uri),
                experiment="",
                run_name=stored.info.run_name,
                experiment_id=stored.info.experiment_id,
                run_id=run_id,
            ),
            store=self,
        )


def _run(reference: str, store: Callable[[], Store]) -> Run:
    if (run := _folder_run(reference)) is not None:
        return run
    if _RUN_ID.fullmatch(reference):
        return store().run(reference)
    raise ConfigError(
        f"runs: wanted the output of a finished stage or the id of an MLflow run, got {reference}, "
        "which has no manifest.json: `raybert list runs` shows those under runs/"
    )


def _runs_that_wrote(source: str, digest: str, store: Store | None) -> Iterator[Run]:
    """Yield the runs that wrote an input: first the run in the folder, then those in MLflow."""
    if Registered.match(source) or source.startswith(hub.PREFIX):
        return
    folders = dict.fromkeys((source, source.rstrip("/").removesuffix(f"/{BUNDLE}")))
    for folder in folders:
        run = _folder_run(folder) if store is None else _reachable_run(folder)
        if run is not None and digest in run.digests:
            yield replace(run, store=store)
    if store is not None:
        for folder in folders:
            yield from store.that_wrote(folder, digest)


def _reachable_run(folder: str) -> Run | None:
    """Return the run in a folder; None if there is none, or if this machine cannot reach or read
    it."""
    try:
        return _folder_run(folder)
    except (OSError, RaybertError):
        return None


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
        output=folder,
        name=run_name(manifest.stage, folder),
        command=started.get("command", ""),
        sources=started.get("sources", {}),
        curves=curves_of(records, _steps_per_seed(manifest.counts)),
        spent=_spent(folder),
        recorded=recorded_run(folder),
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


def _without_manifest(stored: "StoredRun", place: str) -> Run:
    """Build a run from MLflow's record alone, for a run without a result or of an older version."""
    tags = stored.data.tags
    taken = [] if stored.inputs is None else stored.inputs.dataset_inputs
    inputs = {each.dataset.name: each.dataset.digest for each in taken}
    return Run(
        manifest=Manifest(
            stage=tags["stage"],
            digest="",
            config=dict(stored.data.params),
            inputs=inputs,
            counts=dict(stored.data.metrics),
            line=tags.get(RESULT, ""),
            code_version=tags.get("code_version", ""),
        ),
        has_finished=stored.info.status == "FINISHED",
        place=place,
        output="",
        name="",
    )


def _records(
    client: "MlflowClient", run_id: str, metrics: Mapping[str, float]
) -> list[tuple[int, dict[str, float]]]:
    records: dict[int, dict[str, float]] = {}
    for name in metrics:
        for point in client.get_metric_history(run_id, name):
            records.setdefault(point.step, {})[name] = point.value
    return sorted(records.items())
