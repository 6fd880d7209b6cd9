"""Runs a stage: skips it if its output exists, otherwise does its work and completes the output.

A stage is a frozen config that extends `StageConfig` and a function `run(config)`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from bert_core import files
from bert_core.errors import ConfigError, CorpusError, FormatError, InputError, RaybertError
from bert_core.manifest import (
    NAME,
    Manifest,
    entries_of,
    is_complete,
    read_manifest,
    stage_digest,
    write_manifest,
)
from pipelines.runtime import lease
from pipelines.runtime.code_version import code_version
from pipelines.runtime.description import STARTED, card_pages, cards_behind
from pipelines.runtime.output_folder import (
    add_to_start,
    check_output,
    check_ownership,
    clear_what_others_left,
)
from pipelines.runtime.outputs import written_bundle_digest
from pipelines.runtime.progress import say
from pipelines.runtime.result import Result
from pipelines.runtime.stage_config import StageConfig, determining_fields
from pipelines.runtime.stage_run import end_run, leaves_no_run, open_run, run_description
from pipelines.runtime.unfinished import REFUSED, check_whole, difference
from tracking.runs.recorder import DatasetInput, finish_run
from tracking.runs.spool import read_run
from tracking.store.server import tracking_uri, without_password

MISTAKES = (ConfigError, CorpusError, FormatError, InputError)
"""Errors of a command or its inputs: a start that one of them ends is refused, not failed."""


def run_stage(
    stage: str,
    config: StageConfig,
    inputs: Sequence[DatasetInput],
    work: Callable[[str], Result],
) -> Manifest:
    """Do `work` unless its result already exists, and complete the folder with a manifest.

    Args:
        inputs: everything that is read, with its digest.
        work: writes the files in `config.output`; takes the stage's digest. What a killed run left
            there has the same digest and may be reused. Meanwhile the folder's MLflow run exists
            and nothing else has it open.
    Raises: ConfigError if the folder holds something else, or an input (both are left untouched),
        or if there is a file in its place; ResourceError if another process writes the output, or
        takes it over.
    """
    check_output(config)
    determining = determining_fields(config)
    digests = {item.name: item.digest for item in inputs}
    digest = stage_digest(stage, determining, digests)
    if (done := _done(stage, config, determining, digests)) is not None:
        return done
    check_ownership(config)
    with lease.held(config.output, wait=config.wait) as held:
        # The process that held it until now may have finished it.
        if (done := _done(stage, config, determining, digests)) is not None:
            return done
        files.abort_uploads(config.output)
        clear_what_others_left(config, stage, digest, determining, inputs)
        uri = without_password(tracking_uri(config.tracking_uri))
        cards = cards_behind([item.source for item in inputs], uri)
        began = time.time()
        # The run is opened, handed over and opened again: training's controller writes to it
        # between.
        description = run_description(stage, config, inputs, cards)
        begun = open_run(stage, config, determining, inputs, description)
        if begun.close("RUNNING") is not None:
            say(f"{stage}: MLflow has not answered yet, records are kept in {config.local_folder}")
        try:
            result = work(digest)
        except BaseException as error:
            if held.lost is None:
                files.abort_uploads(config.output)  # of workers that were ended
                if not (isinstance(error, MISTAKES) and leaves_no_run(config)):
                    end_run(stage, config, error)
                if isinstance(error, ConfigError | CorpusError):
                    with suppress(OSError, RaybertError):  # the user's mistake is what to report
                        add_to_start(config, {REFUSED: True})
            raise
        manifest = Manifest(
            stage=stage,
            digest=digest,
            config=determining,
            inputs=digests,
            hub={item.name: item.source for item in inputs if item.asked},
            outputs=result.outputs,
            bundle=written_bundle_digest(config.output, result.outputs),
            counts={**result.counts.entries(), "seconds": round(time.time() - began, 3)},
            line=result.counts.line,
            sentence=result.counts.sentence,
            headline=result.counts.headline,
            cards=dict(result.cards),
            code_version=code_version(),
        )
        held.check()  # raises if another process has taken over
        cards |= card_pages(read_run(config.local_folder), result.cards) | dict(result.pages)
        description = run_description(stage, config, inputs, cards, manifest.line)
        with open_run(stage, config, determining, (), description) as recorder:
            numbers = {k: v for k, v in manifest.counts.items() if isinstance(v, int | float)}
            recorder.record(recorder.last_step + 1, numbers)
            for path in result.artifacts:
                recorder.artifact(path)
            # With these, a report needs no folder.
            recorder.json_artifact(STARTED, files.read_json(files.join(config.output, STARTED)))
            recorder.json_artifact(NAME, entries_of(manifest))
            held.check()
            # From here on the output is complete: if killed now, the next start only ends the run.
            write_manifest(config.output, manifest)
    say(f"{stage}: {config.output} is complete. {manifest.sentence}")
    return manifest


def _done(
    stage: str, config: StageConfig, determining: dict[str, Any], inputs: Mapping[str, str]
) -> Manifest | None:
    """Return the manifest of a finished output, and end its run; None if there is work to do.

    Raises: ConfigError if it was made otherwise.
    """
    if config.force or not is_complete(config.output):
        return None
    done = read_manifest(config.output)
    if done.digest == stage_digest(stage, determining, dict(inputs)):
        check_whole(config.output, done)
        say(f"{stage}: {config.output} already exists, made with the same settings: skipped")
        finish_run(
            config.local_folder, uri=tracking_uri(config.tracking_uri), copy=config.record_copy
        )
        return done
    how = difference(
        stage,
        determining,
        inputs,
        then_stage=done.stage,
        then_config=done.config,
        then_inputs=done.inputs,
    )
    raise ConfigError(
        f"{config.output} holds a finished `{done.stage}` {how}: "
        "give another output, or --force to make it again"
    )
