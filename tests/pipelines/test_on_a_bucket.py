"""The path from text to answers with everything on a bucket, on a cluster that the driver joins."""

import json
from pathlib import Path
from typing import Any

import pytest

from bert_core import files
from bert_core.data.tokenizer import Tokenizer
from bert_core.manifest import read_manifest
from bert_core.tasks.base import Task
from bert_core.tasks.text_classification import TextClassification
from bert_core.tasks.token_classification import TokenClassification
from tests.fault_proxy import fault_proxy, seeded
from tests.with_ray import run_with_ray

PUBLIC = {"Effect": "Allow", "Principal": "*", "Action": "s3:*"}


@pytest.mark.cluster
def test_a_joined_cluster_works_on_a_bucket_that_fails_occasionally(
    prepared: Any,
    head: Any,
    object_store: str,
    s3_endpoint: str,
    tmp_path: Path,
) -> None:
    """The cluster knows nothing of the bucket: the driver's settings go with the run.

    It is public, since credentials are a matter of each machine.
    """
    import boto3

    open_to_all(object_store)
    rows = Path(prepared.rows.source).read_text().splitlines(keepends=True)
    files.write_bytes(f"{object_store}/text.txt", prepared.text.read_bytes())
    files.write_bytes(f"{object_store}/train.jsonl", "".join(rows[::2]).encode())
    files.write_bytes(f"{object_store}/test.jsonl", "".join(rows[1::2]).encode())

    def command(stage: str, *options: str) -> list[str]:
        shared = ["--num_workers=1", f"--tracking_uri=sqlite:///{tmp_path}/mlflow.db"]
        return [stage, f"--output={object_store}/{stage}", *shared, *options]

    corpus = [f"--corpus.source={object_store}/text.txt", "--corpus.held_out_share=0.1"]
    with fault_proxy(s3_endpoint, seeded(0, share=0.03), silence_s=2) as proxy:
        run_with_ray(
            [
                command("vocab", *corpus, "--vocab_size=1000"),
                command(
                    "prepare", *corpus, f"--tokenizer={object_store}/vocab", "--shard_bytes=60000",
                    "--block_bytes=40000", "--pairs.max_length=48", "--pairs.dupe_factor=2",
                    "--masking.max_predictions_per_seq=8",
                ),
                command(
                    "pretrain", f"--shards={object_store}/prepare",
                    f"--tokenizer={object_store}/vocab", "--variant=bert-tiny",
                    "--global_batch_size=16", "--micro_batch_tokens=256", "--held_out_rows=64",
                    "--checkpoint_every_steps=4", "--loop.max_steps=8", "--loop.precision=fp32",
                    "--schedule.warmup_steps=2", "--threads_per_worker=1",
                ),
                command(
                    "tune", f"--model={object_store}/pretrain",
                    f"--train.source={object_store}/train.jsonl",
                    f"--held_out.source={object_store}/test.jsonl", "--selection.share=0.3",
                    '--search.space={"lr": [1e-3]}', "--name=tuned-on-a-bucket",
                    "--max_length=32", "--epochs=1", "--batch_size=8", "--precision=fp32",
                    "--threads_per_worker=1",
                ),
                command(
                    "evaluate", f"--model={object_store}/tune",
                    f"--held_out.source={object_store}/test.jsonl",
                ),
                command(
                    "publish", f"--model={object_store}/tune",
                    f"--evaluation={object_store}/evaluate", "--name=on-a-bucket",
                ),
                command(
                    "predict", f"--model={object_store}/tune",
                    f"--source={object_store}/test.jsonl",
                ),
            ],
            tmp_path,
            **head.environment,
            RAY_ADDRESS=head.addresses["host:port"],
            RAYBERT_STORAGE_ENDPOINT=proxy.address,
            RAYBERT_STORAGE_ANONYMOUS="true",
            RAYBERT_STORAGE_TIMEOUT_S="1",
            AWS_ENDPOINT_URL="",
        )  # fmt: skip
        assert any(request.fault for request in proxy.seen)
    assert read_manifest(f"{object_store}/predict").counts["rows"] == len(rows[1::2])
    assert read_manifest(f"{object_store}/evaluate").counts["rows"] == len(rows[1::2])
    for stage, made in (("vocab", "vocab"), ("prepare", "shards")):  # with no bucket and no Ray
        outputs = read_manifest(f"{object_store}/{stage}").outputs
        assert outputs == read_manifest(str(prepared.folder / made)).outputs
    bucket = object_store.removeprefix("s3://")
    assert boto3.client("s3").list_multipart_uploads(Bucket=bucket).get("Uploads", []) == []


@pytest.mark.drill
def test_stages_that_begin_with_bundles_work_on_a_bucket(
    prepared: Any, head: Any, object_store: str, s3_endpoint: str, tmp_path: Path
) -> None:
    """Fine-tuning, distilling, exporting, vectors, search and extraction, on a cluster that has no
    credentials of its own."""
    from tests import tiny

    open_to_all(object_store)
    tokenizer = Tokenizer.load(prepared.folder / "vocab")
    encoder = tiny.encoder_config(tokenizer.vocab_size, max_position_embeddings=64)
    tasks: dict[str, Task] = {
        "classifier": TextClassification(["early", "late"]),
        "tagger": TokenClassification(["B-name", "I-name", "O"]),
    }
    for name, task in tasks.items():
        tiny.bundle(tmp_path / name, tokenizer, encoder, task=task)
        for path in (tmp_path / name).iterdir():
            files.write_bytes(f"{object_store}/{name}/{path.name}", path.read_bytes())
    rows = Path(prepared.rows.source).read_bytes().splitlines(keepends=True)[::4]
    files.write_bytes(f"{object_store}/rows.jsonl", b"".join(rows))

    def command(stage: str, *options: str, output: str = "") -> list[str]:
        place = f"--output={object_store}/{output or stage}"
        return [stage, place, f"--tracking_uri=sqlite:///{tmp_path}/mlflow.db", *options]

    source, on_ray = f"--source={object_store}/rows.jsonl", "--num_workers=1"
    commands = [
        command(
            "distill", f"--teacher={object_store}/classifier", "--layers=[0]", on_ray,
            f"--train.source={object_store}/rows.jsonl", "--max_length=32", "--epochs=1",
            "--batch_size=8", "--precision=fp32", "--threads_per_worker=1",
        ),
        command(
            "finetune", f"--model={object_store}/classifier", on_ray,
            f"--train.source={object_store}/rows.jsonl", "--max_length=32", "--epochs=1",
            "--batch_size=8", "--precision=fp32", "--threads_per_worker=1",
        ),
        command("export", f"--model={object_store}/distill"),
        command(
            "predict", f"--model={object_store}/classifier", "--task=feature-extraction", source,
            "--answer_column=", on_ray, output="vectors",
        ),
        command(
            "search", f"--corpus={object_store}/vectors", f"--queries={object_store}/vectors",
            "--top_k=1", on_ray,
        ),
        command(
            "extract", f"--tagger.model={object_store}/tagger",
            '--tagger.fields={"names": "name"}', source, on_ray,
        ),
        command("predict", f"--model={object_store}/export", source, on_ray),
    ]  # fmt: skip
    run_with_ray(
        commands,
        tmp_path,
        **head.environment,
        RAY_ADDRESS=head.addresses["host:port"],
        RAYBERT_STORAGE_ENDPOINT=s3_endpoint,
        RAYBERT_STORAGE_ANONYMOUS="true",
        AWS_ENDPOINT_URL="",
    )
    for stage in ("vectors", "search", "extract", "predict"):
        assert read_manifest(f"{object_store}/{stage}").counts["rows"] == len(rows), stage
    for name in read_manifest(f"{object_store}/search").outputs:
        for line in files.read_bytes(f"{object_store}/search/{name}").splitlines():
            [nearest] = json.loads(line)["results"]
            assert nearest["score"] > 0.99, "each row is its own nearest"


def open_to_all(object_store: str) -> None:
    """Let anyone read and write a bucket, since credentials are a matter of each machine."""
    import boto3

    bucket = object_store.removeprefix("s3://")
    resource = [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/*"]
    policy = json.dumps({"Statement": [PUBLIC | {"Resource": resource}]})
    boto3.client("s3").put_bucket_policy(Bucket=bucket, Policy=policy)
