"""A stage whose storage is away for a while, or fails for good: expired keys, a full disk."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, load_file

from bert_core import files
from bert_core.errors import ResourceError
from bert_core.manifest import read_manifest
from pipelines import cli, prepare, pretrain
from pipelines.pretrain import PretrainConfig
from tests.fault_proxy import Fault, fault_proxy, xml_error

EXPIRED = 400, xml_error("ExpiredToken", "The provided token has expired.")
# obstore renews credentials that end within five minutes, no more than once in 100 ms.
RENEWED_BEFORE_S, FRESH_S, ACCEPTED_S = 300.0, 0.5, 2.0


@pytest.fixture
def on_bucket(prepared: Any, object_store: str, tmp_path: Path) -> PretrainConfig:
    """Pretraining with inputs and output in a bucket, in this process."""
    alone = prepared.pretrain(tmp_path / "out")
    config: PretrainConfig = prepared.on_bucket(alone, object_store)
    return replace(config, tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")


def assert_as_on_disk(config: PretrainConfig, pretrained: Any) -> None:
    """The weights in the bucket are those of a run with all on this disk, bit for bit."""
    expected = load_file(pretrained.folder / "pretrain" / "bundle" / "model.safetensors")
    trained = load(files.read_bytes(f"{config.output}/bundle/model.safetensors"))
    assert trained.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(trained[name], tensor, err_msg=name)


class Outage:
    """Nothing is reached for a while from the first write of each kind on."""

    def __init__(self, seconds: float, *parts: str) -> None:
        """`parts` of the paths of the files that are written."""
        self._seconds, self.left = seconds, list(parts)
        self._until_s = 0.0

    def __call__(self, method: str, path: str) -> Fault | None:
        began = [part for part in self.left if method in ("PUT", "POST") and part in path]
        if began:
            self.left.remove(began[0])
            self._until_s = time.monotonic() + self._seconds
        return "away" if time.monotonic() < self._until_s else None


@pytest.mark.guard
def test_an_outage_of_the_bucket_while_shards_a_checkpoint_and_a_bundle_are_written_costs_only_time(
    on_bucket: PretrainConfig,
    pretrained: Any,
    s3_endpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: bool,
) -> None:
    """Half a minute each, at full length."""
    from tests.pipelines.jobs.test_survival import run_of

    shards = f"{on_bucket.output}-shards"
    outage = Outage(
        30 if whole else 1,
        ".arrow",
        "/checkpoints/step-00000008/optimizer.safetensors",
        "/bundle/model.safetensors",
    )
    with fault_proxy(s3_endpoint, outage) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        prepare.run(replace(pretrained.prepare(tmp_path), output=shards))
        pretrain.run(replace(on_bucket, shards=shards))
    assert outage.left == []
    assert read_manifest(shards).outputs == read_manifest(f"{pretrained.folder}/shards").outputs
    assert_as_on_disk(on_bucket, pretrained)
    assert run_of(on_bucket)[0].info.status == "FINISHED"


class Issuer:
    """Gives out keys as an agent on the host of a container does, for a short time each."""

    def __init__(self) -> None:
        self.issued: dict[str, float] = {}
        """Key → when, by the monotonic clock."""

    def refuse(self, signed_by: str | None) -> tuple[int, bytes] | None:
        """As the store does, for a key that has expired."""
        issued_s = self.issued.get(signed_by or "", -ACCEPTED_S)
        return EXPIRED if time.monotonic() - issued_s > ACCEPTED_S else None


@contextmanager
def issuing(token: str) -> Iterator[tuple[Issuer, str]]:
    """An issuer, and its address; it wants `token`."""
    issuer = Issuer()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

        def do_GET(self) -> None:
            if self.headers["Authorization"] != token:
                self.send_error(401)
                return
            key = f"ASIA{len(issuer.issued):016d}"
            issuer.issued[key] = time.monotonic()
            ends = datetime.now(UTC) + timedelta(seconds=RENEWED_BEFORE_S + FRESH_S)
            answer = {
                "AccessKeyId": key,
                "SecretAccessKey": "hush",
                "Token": f"token-of-{key}",
                "Expiration": f"{ends:%Y-%m-%dT%H:%M:%SZ}",
            }
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield issuer, f"http://127.0.0.1:{server.server_address[1]}/credentials"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=30)


@pytest.mark.guard
def test_a_stage_outlives_its_credentials_where_they_are_renewed(
    on_bucket: PretrainConfig,
    pretrained: Any,
    s3_endpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "token").write_text("the pod's")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with issuing("the pod's") as (issuer, address), fault_proxy(s3_endpoint) as proxy:
        proxy.refuse = issuer.refuse
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", address)
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", f"{tmp_path}/token")
        pretrain.run(on_bucket)
        assert_as_on_disk(on_bucket, pretrained)
        used = {request.signed_by or "nobody" for request in proxy.seen}
        assert used <= issuer.issued.keys()
        times = [issuer.issued[key] for key in used]
        assert max(times) - min(times) > ACCEPTED_S, "the first had expired when the last was used"


@pytest.mark.guard
def test_credentials_that_expire_for_good_end_a_stage_with_nothing_half_written(
    on_bucket: PretrainConfig,
    pretrained: Any,
    s3_endpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import boto3

    from bert_core.train.checkpoint import LAST_FILE
    from tests.pipelines.jobs.test_survival import run_of

    # Its lease cannot be released without credentials.
    monkeypatch.setattr("pipelines.runtime.lease.EXPIRES_AFTER_S", 2.0)
    monkeypatch.setattr("pipelines.runtime.lease.RENEW_EVERY_S", 0.5)
    client = boto3.client("s3")
    bucket = on_bucket.output.removeprefix("s3://").partition("/")[0]
    with fault_proxy(s3_endpoint) as proxy:

        def refuse(signed_by: str | None) -> tuple[int, bytes] | None:
            """From the second checkpoint's last file on."""
            told = any("step-00000008/optimizer" in request.path for request in proxy.seen)
            return EXPIRED if told and signed_by == "anyone" else None

        proxy.refuse = refuse
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
        began_s = time.monotonic()
        with pytest.raises(
            ResourceError,
            match=r"s3://bucket-.*: could not be .*: 400 ExpiredToken .*, 1 attempt in .* s, "
            r"bucket 'bucket-.*', key 'out/.*': the credentials are wrong or have expired: correct",
        ):
            pretrain.run(on_bucket)
        assert time.monotonic() - began_s < 60
        assert run_of(on_bucket)[0].info.status == "FAILED"
        assert client.list_multipart_uploads(Bucket=bucket).get("Uploads", []) == []
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
        names = files.list_names(f"{on_bucket.output}/checkpoints/step-00000004")
        assert LAST_FILE in names
        assert not files.exists(f"{on_bucket.output}/checkpoints/step-00000008/{LAST_FILE}")
        assert not files.exists(f"{on_bucket.output}/manifest.json")
        pretrain.run(on_bucket)
    assert_as_on_disk(on_bucket, pretrained)
    assert run_of(on_bucket)[0].info.status == "FINISHED"


@pytest.fixture
def disk(small_disk: Callable[[str], Path]) -> Path:
    return small_disk("size=16m")


@pytest.mark.guard
def test_a_full_disk_below_the_cache_ends_a_stage_with_the_way_out(
    on_bucket: PretrainConfig,
    pretrained: Any,
    disk: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tests.pipelines.jobs.test_survival import words_of

    command = [*words_of(on_bucket), "--num_workers", "0", "--checkpoint_every_steps", "4"]
    command += ["--tracking_uri", str(on_bucket.tracking_uri)]
    monkeypatch.setenv("RAYBERT_CACHE", f"{disk}/cache")
    others = disk / "others"

    def refused(left_bytes: int) -> str:
        """What is told where others leave so much."""
        others.unlink(missing_ok=True)
        others.write_bytes(bytes(shutil.disk_usage(disk).free - left_bytes))
        with pytest.raises(SystemExit) as ended:
            cli.main(command)
        assert ended.value.code == 1
        return capsys.readouterr().err.splitlines()[-1]

    told = refused(0)
    assert f"{disk}/cache: wanted a cache that takes 1,048,576 bytes" in told
    assert "or set RAYBERT_CACHE to a folder on another disk of this machine" in told
    assert files.list_names(on_bucket.output) == []

    told = refused(1_100_000)  # there is room for the record, but not for shards
    assert f"{disk}/cache/shards/" in told
    assert "of free space for a download" in told
    assert "or set RAYBERT_CACHE to a folder with more" in told
    assert not files.exists(f"{on_bucket.output}/checkpoints")
    assert list(disk.glob("cache/shards/*.part")) == []

    monkeypatch.setenv("RAYBERT_CACHE", f"{tmp_path}/cache")
    with pytest.raises(SystemExit) as ended:
        cli.main(command)
    assert ended.value.code == 0
    assert_as_on_disk(on_bucket, pretrained)
