"""The MLflow run of a stage: opened and described, and ended or discarded if the stage fails."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bert_core.errors import RaybertError
from bert_core.wording import without_secrets
from pipelines.runtime.code_version import code_version
from pipelines.runtime.description import (
    command,
    described,
    failure,
    run_name,
    source_tags,
)
from pipelines.runtime.progress import say
from pipelines.runtime.stage_config import StageConfig, determining_fields, operational_fields
from pipelines.runtime.unfinished import saved_work
from tracking.runs.recorder import PARENT_TAG, DatasetInput, RunRecorder, Status, discard_run
from tracking.store.page import RESULT
from tracking.store.server import tracking_uri, without_password


def open_run(
    stage: str,
    config: StageConfig,
    params: dict[str, Any],
    inputs: Sequence[DatasetInput] = (),
    description: dict[str, str] | None = None,
    *,
    with_copy: bool = True,
) -> RunRecorder:
    code = code_version()
    return RunRecorder.open(
        config.local_folder,
        uri=tracking_uri(config.tracking_uri),
        copy=config.record_copy if with_copy else None,
        experiment=config.experiment,
        run_name=run_name(stage, config.output),
        params=params,
        inputs=[replace(each, source=without_secrets(each.source)) for each in inputs],
        tags={
            "stage": stage,
            "output": config.output,
            "code_version": code,
            **source_tags(stage, code),
            **({PARENT_TAG: config.parent_run} if config.parent_run else {}),
            **(description or {}),
        },
    )


def run_description(
    stage: str,
    config: StageConfig,
    inputs: Sequence[DatasetInput],
    links: dict[str, str],
    result: str = "",
) -> dict[str, str]:
    """Return the description of the run.

    Args:
        links: to the cards of what it was made from, and to its own cards.
        result: the result, once it has ended.
    """
    return described(
        stage_command(stage, config),
        config.output,
        inputs,
        without_password(tracking_uri(config.tracking_uri)),
        result=result,
        links=links,
    )


def stage_command(stage: str, config: StageConfig) -> str:
    """Return the command line that makes the same output, without options for how and where it
    runs."""
    return command(stage, config, operational_fields(type(config)) - {"output"})


def end_run(
    stage: str, config: StageConfig, reason: BaseException, *, with_copy: bool = True
) -> None:
    """Record that the stage ends without a result, and why. Never raises: it follows another error.

    If the copy of the record cannot be reached, only MLflow and the local folder get the entry.
    """
    status: Status = "FAILED" if isinstance(reason, Exception) else "KILLED"
    tags = {RESULT: failure(reason)}
    try:
        open_run(
            stage, config, determining_fields(config), description=tags, with_copy=with_copy
        ).close(status)
    except (OSError, RaybertError) as error:
        if with_copy and config.record_copy is not None:
            end_run(stage, config, reason, with_copy=False)
        else:
            say(f"{stage}: how the run ended ({status}) is not recorded: {error}")


def leaves_no_run(config: StageConfig) -> bool:
    """Remove the run of a start that was refused before it made or recorded anything; return
    whether it was removed."""
    return not saved_work(config.output) and discard_run(
        config.local_folder, uri=tracking_uri(config.tracking_uri), copy=config.record_copy
    )
