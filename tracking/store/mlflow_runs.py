"""Records runs through MLflow's client, in a store of any kind."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tracking.store import server
from tracking.store.runs import KEY_TAG, Dataset, Metric, RefusedByMlflowError, StoredRun

if TYPE_CHECKING:
    from mlflow.entities import Run


class MlflowRuns:
    """The runs of any store (`tracking.store.runs.Runs`)."""

    def __init__(self, uri: str) -> None:
        """Connect. Raises: as `tracking.store.server.connect`."""
        self._uri = uri
        self._client = server.connect(uri)

    def require_answer(self) -> None:
        server.require_answer(self._uri)

    def experiment(self, name: str) -> str:
        return server.experiment_id(self._client, self._uri, name)

    def find(self, experiment_id: str, run_id: str | None, key: str) -> StoredRun | None:
        from mlflow.exceptions import MlflowException

        if run_id is None:
            wanted = f"tags.`{KEY_TAG}` = '{key}'"
            runs = self._client.search_runs([experiment_id], wanted, max_results=1)
            return _stored(runs[0]) if runs else None
        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return _stored(run) if run.info.lifecycle_stage == "active" else None

    def create(self, experiment_id: str, name: str, key: str) -> StoredRun:
        tags = {KEY_TAG: key}
        return _stored(self._client.create_run(experiment_id, run_name=name, tags=tags))

    def params(self, run_id: str) -> dict[str, str]:
        return self._client.get_run(run_id).data.params

    def log(
        self,
        run_id: str,
        metrics: Iterable[Metric] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        from mlflow import entities

        with _refusals():
            self._client.log_batch(
                run_id,
                metrics=[entities.Metric(*metric) for metric in metrics],
                params=[entities.Param(key, value) for key, value in (params or {}).items()],
                tags=[entities.RunTag(key, value) for key, value in (tags or {}).items()],
            )

    def log_inputs(self, run_id: str, datasets: Iterable[Dataset]) -> None:
        from mlflow import entities

        inputs = []
        for each in datasets:
            data = entities.Dataset(each.name, each.digest, each.source_type, each.source)
            context = entities.InputTag("mlflow.data.context", each.context)
            inputs.append(entities.DatasetInput(data, [context]))
        with _refusals():
            self._client.log_inputs(run_id, inputs)

    def set_status(self, run_id: str, status: str) -> None:
        with _refusals():
            if status == "RUNNING":
                self._client.update_run(run_id, status=status)
            else:
                self._client.set_terminated(run_id, status)

    def log_file(self, run_id: str, path: Path, folder: str | None) -> None:
        log = self._client.log_artifacts if path.is_dir() else self._client.log_artifact
        with _refusals():
            log(run_id, str(path), folder)

    def log_text(self, run_id: str, name: str, text: str) -> None:
        with _refusals():
            self._client.log_text(run_id, text, name)


def _stored(run: "Run") -> StoredRun:
    # NOTE: `run.data.metrics` has values alone.
    steps = {each.key: each.step for each in run.to_proto().data.metrics}
    return StoredRun(run.info.experiment_id, run.info.run_id, steps)


@contextmanager
def _refusals() -> Iterator[None]:
    """Tell what MLflow will never accept from what it may accept later."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.get_http_status_code() != 400:
            raise
        raise RefusedByMlflowError(str(error)) from error
