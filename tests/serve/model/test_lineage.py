"""What a card says of a model's origin, and what it keeps to itself."""

import json
from pathlib import Path
from typing import Any

import httpx

from bert_core.bundle.format import load_bundle
from serve.model.lineage import ancestors
from tests import tiny
from tests.serve import live

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PRETRAINED = {
    "stage": "pretrain",
    "data": [
        {"name": "vocabulary", "digest": "v1", "tokens": 400},
        {"name": "corpus", "digest": "c1", "source": "/home/ada/secret/text.txt", "documents": 9},
    ],
    "config": {"output": "/home/ada/runs/pretrain", "corpus": {"sources": ["/home/ada/secret"]}},
    "stage_digest": "s1",
    "code_version": "raybert 0.1.0",
}
FINE_TUNED: dict[str, Any] = {
    "stage": "finetune",
    "data": [
        {"name": "train", "digest": "t1", "rows": 70,
         "source": "hf://datasets/nyu-mll/glue/sst2/train.parquet"},
        {"name": "selection", "digest": "t3", "source": "s3://bucket/ada/x.csv?secret_key=k"},
        {"name": "held_out", "digest": "t2", "rows": 7, "source": "s3://bucket/ada/rows.jsonl"},
    ],
    "parent": "d1",
    "parent_lineage": PRETRAINED | {"hub": f"owner/name@{COMMIT}"},
    "teacher": "d9",
    "teacher_lineage": {"config": {"model": "/home/ada/teacher"}},
    "config": {"model": "/home/ada/runs/pretrain/bundle"},
    "stage_digest": "s2",
}  # fmt: skip


def test_the_lineage_goes_from_the_first_ancestor_to_the_model() -> None:
    first, itself = ancestors("d2", FINE_TUNED)
    assert (first.digest, first.stage, first.stage_digest) == ("d1", "pretrain", "s1")
    assert (first.hub, first.code_version) == (f"owner/name@{COMMIT}", "raybert 0.1.0")
    assert (itself.digest, itself.stage, itself.teacher) == ("d2", "finetune", "d9")
    assert [(data.name, data.source, data.counts) for data in (*first.data, *itself.data)] == [
        ("vocabulary", None, {"tokens": 400}),
        ("corpus", "text.txt", {"documents": 9}),
        ("train", "nyu-mll/glue", {"rows": 70}),
        ("selection", "x.csv", {}),
        ("held_out", "rows.jsonl", {"rows": 7}),
    ]


def test_a_model_without_a_record_has_only_itself_in_its_lineage() -> None:
    [itself] = ancestors("d1", {})
    assert (itself.digest, itself.stage, itself.data) == ("d1", None, [])


def test_a_live_server_shows_it_without_the_folders_of_other_machines(
    bundle: Path, tmp_path: Path
) -> None:
    loaded = load_bundle(bundle)
    folder = tiny.bundle(
        tmp_path / "models--owner--tuned" / "snapshots" / COMMIT,
        loaded.tokenizer,
        loaded.encoder_config,
        task=loaded.task,
        lineage=FINE_TUNED,
    )
    with live.fronted({"own": folder}) as url:
        [listed] = httpx.get(f"{url}/v1/models", timeout=30).json()["data"]
        card = httpx.get(f"{url}/v1/models/own", timeout=30, follow_redirects=True).json()
        openai = httpx.get(f"{url}/v1/models/own/v1/models", timeout=30).json()["data"]
    assert listed["card"] == card
    assert openai == [card]
    assert [each["digest"] for each in card["lineage"]] == ["d1", card["digest"]]
    assert card["lineage"][-1]["hub"] == f"owner/tuned@{COMMIT}"
    said = json.dumps(listed)
    for secret in ("ada", "secret", "bucket", "teacher/", str(tmp_path)):
        assert secret not in said
