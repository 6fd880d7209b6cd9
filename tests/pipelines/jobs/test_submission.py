"""The same work has the same id, and how a job ended is told by what Ray says of it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bert_core.errors import ConfigError
from pipelines.jobs.packaging import code_files, digest_of
from pipelines.jobs.secret_values import refuse_secrets
from pipelines.jobs.server import seconds_of
from pipelines.jobs.submission import (
    attempt_id,
    attempts_of,
    ending_of,
    split_attempt,
    submission_of,
)

if TYPE_CHECKING:
    from ray.job_submission import JobDetails

VOCAB = ["vocab", "--output", "/shared/vocab", "--vocab_size", "200"]


def id_of(*command: str, folder: str = ".") -> str:
    return submission_of(command, folder).id


def test_an_id_is_that_of_the_work_however_it_is_written_and_run(tmp_path: Path) -> None:
    wanted = id_of(*VOCAB)
    assert wanted.startswith("raybert-vocab-")
    (tmp_path / "vocab.toml").write_text('output = "/shared/vocab/"\nvocab_size = 200\n')
    assert id_of("vocab", "--config", "vocab.toml", folder=str(tmp_path)) == wanted
    assert id_of(*VOCAB, "--num_workers", "7", "--force", "--tracking_uri", "http://m:1") == wanted


@pytest.mark.parametrize(
    "change",
    [
        ["--vocab_size", "300"],
        ["--output", "/shared/other"],
        ["--corpus.source", "/shared/text.txt"],
    ],
)
def test_other_work_has_another_id(change: list[str]) -> None:
    assert id_of(*VOCAB, *change) != id_of(*VOCAB)


def test_a_command_whose_config_is_on_the_cluster_is_known_by_its_words() -> None:
    command = ["vocab", "--config", "/only/there.toml"]
    assert id_of(*command) == id_of(*command) != id_of(*command, "--force")
    assert submission_of(command, ".").config is None
    assert id_of("serve", "keys", "list").startswith("raybert-serve-")


def test_a_job_whose_stage_would_refuse_it_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(ConfigError, match="vocab_size: wanted at least 100, got 3"):
        id_of("vocab", "--output", "/shared/vocab", "--vocab_size", "3")
    with pytest.raises(
        ConfigError, match=r"output: wanted a URI or an absolute path .* got runs/x"
    ):
        id_of("vocab", "--output", "runs/x")


def job(submission_id: str = "x", status: str = "FAILED", **changes: Any) -> "JobDetails":
    from ray.job_submission import JobDetails

    return JobDetails(
        type="SUBMISSION", submission_id=submission_id, status=status, entrypoint="e", **changes
    )


def test_attempts_are_found_by_their_number() -> None:
    name = id_of(*VOCAB)
    ids = [attempt_id(name, number) for number in (10, 2, 1)]
    assert ids[-1] == name
    assert [split_attempt(each) for each in ids] == [(name, 10), (name, 2), (name, 1)]
    others = [job("raysubmit_1"), job(id_of(*VOCAB, "--vocab_size", "300"))]
    assert list(attempts_of(name, [*map(job, ids), *others])) == [1, 2, 10]


@pytest.mark.parametrize(
    ("known", "ending"),
    [
        (None, "lost"),
        ({"status": "SUCCEEDED", "driver_exit_code": 0}, "succeeded"),
        ({"status": "STOPPED"}, "stopped"),
        ({"driver_exit_code": 1}, "failed"),
        ({"driver_exit_code": 137}, "lost"),
        ({"driver_exit_code": -9}, "lost"),
        ({"driver_exit_code": 143}, "preempted"),
        ({"error_type": "JOB_SUPERVISOR_ACTOR_DIED", "message": "its node has died"}, "lost"),
        ({"error_type": "JOB_SUPERVISOR_ACTOR_DIED", "message": "Node was preempted"}, "preempted"),
        ({"error_type": "RUNTIME_ENV_SETUP_FAILURE", "message": "no such package"}, "failed"),
    ],
)
def test_the_outcomes_of_a_job_are_distinguished(known: dict[str, Any] | None, ending: str) -> None:
    assert ending_of(None if known is None else job(**known)) == ending


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--tracking_uri", "http://me:hunter2@mlflow:5000"], "tracking_uri"),
        (["--task.options.api_key=hunter2"], "task.options.api_key"),
        (["--hub_token", "hunter2"], "hub_token"),
        (["AWS_SECRET=hunter2"], "AWS_SECRET"),
        (["--tracking_uri", "postgresql://db/ml?user=u&password=hunter2"], "tracking_uri"),
        (["--corpus.source", "https://host/a.txt?X-Amz-Signature=hunter2"], "corpus.source"),
        (["--output", "s3://AKIA:ab/hunter2+ef@bucket/x"], "output"),
        (["--tracking_uri", "https://hunter2@host"], "tracking_uri"),
        (["--tracking_uri", "postgresql://db:hunter2@host/ml"], "tracking_uri"),
        (["--output", "az://container:hunter2@account/a"], "output"),
        (["--apikey", "hunter2"], "apikey"),
        (["--accessToken", "hunter2"], "accessToken"),
        (["--dbpassword=hunter2"], "dbpassword"),
    ],
)
def test_a_secret_is_refused_without_being_repeated(arguments: list[str], name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        refuse_secrets(["vocab", *arguments], None)
    assert str(refused.value).startswith(f"{name}: wanted no secret in a job")
    assert "hunter2" not in str(refused.value)


def test_a_number_may_be_a_password() -> None:
    with pytest.raises(ConfigError, match="db_password: wanted no secret in a job"):
        refuse_secrets(["vocab", "--db_password", "123456"], None)


def test_a_secret_in_a_config_file_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / "vocab.toml").write_text('tracking_uri = "http://me:hunter2@mlflow:5000"\n')
    command = [*VOCAB, "--config", str(tmp_path / "vocab.toml")]
    with pytest.raises(ConfigError, match="tracking_uri: wanted no secret in a job"):
        refuse_secrets(command, submission_of(command, ".").config)


@pytest.mark.parametrize(
    "value",
    [
        "http://mlflow:5000/a@b",
        "http://[::1]:5000/a@b",
        "models:/m@champion",
        "postgresql://mlflow@db/mlflow",
        "hf://datasets/owner/name@revision",
        "s3://bucket/a@b/c:d@e",
        "abfss://container@account.dfs.core.windows.net/a",
        "az://container@account/a",
        "sqlite:////runs/mlflow.db?mode=rw",
        "texts/part-?.txt",
        '["http://mlflow:5000","a@b"]',
    ],
)
def test_values_that_only_resemble_secrets_are_accepted(value: str) -> None:
    command = [*VOCAB, "--per_token", "true", "--tokenizer", "a/key", "--tokens=3"]
    refuse_secrets([*command, "--tracking_uri", value], None)


def test_the_code_has_one_digest_whoever_reads_it() -> None:
    once, again = code_files(), code_files()
    assert digest_of(once) == digest_of(again)
    assert {name.partition("/")[0] for name in once} >= {"bert_core", "pipelines", "tracking"}
    assert not [name for name in once if "__pycache__" in name]
    assert digest_of(once | {"pipelines/cli.py": b"pass"}) != digest_of(once)


def test_durations_have_a_unit() -> None:
    assert [seconds_of("patience", text) for text in ("90s", "10m", "2h")] == [90, 600, 7200]
    with pytest.raises(ConfigError, match=r"patience: wanted a duration such as 90s, .* got 10"):
        seconds_of("patience", "10")
