"""Checks that MLflow accepts a run, by writing one and deleting it."""

import tempfile
from pathlib import Path

from bert_core.errors import RaybertError, ResourceError
from bert_core.wording import error_in_one_line
from tracking.store.server import connect, experiment_id, give_up_soon, without_password

EXPERIMENT = "raybert-doctor"
TEXT = "raybert doctor wrote this"


def write_and_delete_run(uri: str) -> str:
    """Write a run with a metric and an artifact, read both back, delete them, and return where they
    were.

    The experiment stays, with the run among its deleted runs.

    Raises: RefusedError or ResourceError, with advice on what to do.
    """
    give_up_soon()
    place = without_password(uri)
    try:
        client = connect(uri)
        run = client.create_run(experiment_id(client, uri, EXPERIMENT), run_name="doctor")
        run_id = run.info.run_id
        try:
            client.log_metric(run_id, "probe", 1.0)
            if client.get_run(run_id).data.metrics != {"probe": 1.0}:
                raise ResourceError(f"MLflow at {place}: wanted the metric that was written")
            _write_and_delete_artifact(uri, str(run.info.artifact_uri))
        finally:
            client.set_terminated(run_id)
            client.delete_run(run_id)
    except RaybertError:
        raise
    except Exception as error:  # of MLflow, its database or a driver of it
        raise ResourceError(
            f"wanted a run in MLflow at {place}, got {error_in_one_line(error)}: see that its "
            "server and database run, that `mlflow db upgrade` was run after an update, and that "
            "the driver of the database is installed (`pip install 'psycopg[binary]'` for "
            "PostgreSQL)"
        ) from error
    return f"a run was written to {place} and deleted, its artifacts are in {run.info.artifact_uri}"


def _write_and_delete_artifact(uri: str, artifacts: str) -> None:
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    try:
        repository = get_artifact_repository(artifacts, tracking_uri=uri)
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder, "probe.txt")
            written.write_text(TEXT)
            repository.log_artifact(str(written))
            read = Path(repository.download_artifacts("probe.txt", folder))
            if read.read_text() != TEXT:
                raise ResourceError("the text that was read back is not the one that was written")
        repository.delete_artifacts("probe.txt")
    except Exception as error:
        raise ResourceError(
            f"wanted an artifact in {artifacts}, got {error_in_one_line(error)}: install what "
            "opens it and give credentials, here and on every node (`pip install boto3` for "
            "s3://), or start MLflow with --serve-artifacts, so that only its server needs them"
        ) from error
