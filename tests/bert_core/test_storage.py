"""Buckets: the same bytes in the end whatever the server and the network do, or an error that says
what was tried."""

import json
import math
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.fs import copy_files

from bert_core import conditional, files, storage
from bert_core.errors import ConfigError, ResourceError
from bert_core.storage.config import StorageConfig
from bert_core.storage.location import Location
from bert_core.storage.retries import FIRST_CONTACT_S
from bert_core.storage.stores import PIECE_BYTES, bucket_address
from bert_core.storage_schemes import SCHEMES
from tests.fault_proxy import (
    Decide,
    Fault,
    FaultProxy,
    fault_proxy,
    no_fault,
    seeded,
    xml_error,
)

S3, GOOGLE, AZURE = SCHEMES["s3"], SCHEMES["gs"], SCHEMES["az"]
LARGE = np.random.default_rng(0).bytes(2 * PIECE_BYTES + 12_345)


@cache
def table() -> pa.Table:
    return pa.table(
        {"ids": np.arange(600_000), "text": [f"row {i % 1000}" for i in range(600_000)]}
    )


def as_arrow(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=50_000)
    return sink.getvalue().to_pybytes()


class Store:
    """A bucket behind a proxy that fails, and the same bucket without it."""

    def __init__(self, uri: str, proxy: FaultProxy, client: Any) -> None:
        self.uri, self.proxy, self.client = uri, proxy, client
        self.bucket = uri.removeprefix("s3://")

    def content(self, key: str) -> bytes:
        return bytes(self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read())

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=key, Body=data)

    def keys(self) -> list[str]:
        found = self.client.list_objects_v2(Bucket=self.bucket).get("Contents", [])
        return [each["Key"] for each in found]

    def uploads(self) -> list[str]:
        found = self.client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", [])
        return [each["Key"] for each in found]


@pytest.fixture
def store(
    object_store: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Store]]:
    """Puts a proxy in front of an empty bucket, with short time-outs."""
    import boto3

    client = boto3.client("s3", endpoint_url=s3_endpoint)
    monkeypatch.setenv("RAYBERT_STORAGE_TIMEOUT_S", "0.5")
    monkeypatch.setenv("RAYBERT_STORAGE_RETRY_S", "60")
    with ExitStack() as stack:

        def start(decide: Decide = no_fault, **options: float) -> Store:
            proxy = stack.enter_context(fault_proxy(s3_endpoint, decide, **options))
            monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.address)
            return Store(object_store, proxy, client)

        yield start


def once(method: str, pattern: str, fault: Fault) -> Decide:
    """The first request of this kind goes wrong."""
    waiting = [fault]

    def decide(asked: str, path: str) -> Fault | None:
        if waiting and asked == method and re.search(pattern, path):
            return waiting.pop()
        return None

    return decide


def always(method: str, pattern: str, fault: Fault) -> Decide:
    """Every request of this kind goes wrong."""
    return lambda asked, path: fault if asked == method and re.search(pattern, path) else None


# ---------------------------------------------------------------------------- in spite of faults


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=pytest.mark.guard if seed < 3 else pytest.mark.drill)
     for seed in range(6)],
)  # fmt: skip
def test_the_same_bytes_come_out_whatever_the_store_does(
    seed: int, store: Callable[..., Store]
) -> None:
    there = store(seeded(seed), silence_s=0.75)
    small = {f"small/{number}.json": f"{{{number}}}".encode() * number for number in range(4)}
    written = small | {"a/shard.arrow": as_arrow(table()), "large.bin": LARGE}
    for name, data in written.items():
        files.write_bytes(files.join(there.uri, name), data)
        assert there.content(name) == data, name
    with files.writing(f"{there.uri}/stream.bin") as sink:
        sink.write(LARGE[:1000])
        sink.write(LARGE[1000:])
    written["stream.bin"] = LARGE
    assert there.content("stream.bin") == LARGE
    assert there.uploads() == []
    assert files.find_files(there.uri) == sorted(f"{there.uri}/{name}" for name in written)
    assert files.list_names(there.uri) == ["a", "large.bin", "small", "stream.bin"]
    assert files.size_bytes(f"{there.uri}/large.bin") == len(LARGE)
    for name, data in written.items():
        assert files.read_bytes(files.join(there.uri, name)) == data, name
    rng = np.random.default_rng(seed)
    path = f"{there.uri}/a/shard.arrow"
    with files.open_input(path) as file, files.reading(path):
        reader = pa.ipc.open_file(file)
        for number in rng.permutation(reader.num_record_batches)[:5]:
            expected = table().slice(50_000 * number, 50_000).to_batches()[0]
            assert reader.get_batch(number).equals(expected), number
    tag = conditional.create(f"{there.uri}/lease", b"1")
    assert tag is not None
    assert conditional.create(f"{there.uri}/lease", b"2") is None
    new = conditional.replace_if(f"{there.uri}/lease", b"3", tag)
    assert new is not None
    assert conditional.replace_if(f"{there.uri}/lease", b"4", tag) is None
    assert conditional.read_tagged(f"{there.uri}/lease") == (b"3", new)
    files.remove(f"{there.uri}/small")
    assert there.keys() == ["a/shard.arrow", "large.bin", "lease", "stream.bin"]
    assert any(request.fault for request in there.proxy.seen)


@pytest.mark.guard
def test_a_parquet_file_is_read_column_by_column(store: Callable[..., Store]) -> None:
    there = store(seeded(7), silence_s=0.75)
    with files.writing(f"{there.uri}/a.parquet") as sink:
        pq.write_table(table(), sink, row_group_size=100_000)
    with files.open_input(f"{there.uri}/a.parquet") as file:
        assert pq.ParquetFile(file).read_row_group(3, ["text"]) == table().slice(
            300_000, 100_000
        ).select(["text"])


def test_a_file_is_read_in_any_order(store: Callable[..., Store]) -> None:
    there = store()
    there.put("large.bin", LARGE)
    rng = np.random.default_rng(0)
    with files.open_input(f"{there.uri}/large.bin") as file:
        for _ in range(40):
            start, count = int(rng.integers(len(LARGE))), int(2 ** rng.uniform(0, 23))
            file.seek(start)
            assert file.read(count) == LARGE[start : start + count]
        file.seek(0)
        assert b"".join(iter(lambda: file.read(100_000), b"")) == LARGE
        assert file.read(10) == b""


def test_following_parts_are_prefetched_in_few_requests(store: Callable[..., Store]) -> None:
    there = store()
    there.put("large.bin", LARGE)
    assert files.sha256_of(f"{there.uri}/large.bin")
    assert len(there.proxy.seen) <= 7  # pieces of 1, 2, 4 and then 8 MiB
    there.proxy.seen.clear()
    there.put("small.bin", b"small")
    assert files.read_bytes(f"{there.uri}/small.bin") == b"small"
    assert len(there.proxy.seen) == 1


@pytest.mark.guard
def test_a_store_that_is_silent_for_half_a_minute_costs_only_time(
    store: Callable[..., Store],
    monkeypatch: pytest.MonkeyPatch,
    recovered: Callable[[str, float, float], None],
) -> None:
    for name in ("TIMEOUT_S", "RETRY_S"):
        monkeypatch.delenv(f"RAYBERT_STORAGE_{name}")  # as they are for everybody
    there = store(silence_s=30)
    files.write_bytes(f"{there.uri}/before.bin", LARGE)
    end = time.monotonic() + 30
    rng = np.random.default_rng(0)

    def silent_for_30_s(method: str, path: str) -> Fault | None:
        later: Fault = "silence_in_body" if method == "GET" else "silence_after"
        faults: tuple[Fault, Fault] = ("silence", later)
        return faults[rng.integers(2)] if time.monotonic() < end else None

    there.proxy.decide = silent_for_30_s
    with ThreadPoolExecutor(3) as pool:
        written = pool.submit(files.write_bytes, f"{there.uri}/large.bin", LARGE)
        read = pool.submit(files.read_bytes, f"{there.uri}/before.bin")
        created = pool.submit(conditional.create, f"{there.uri}/lease", b"1")
    written.result()
    assert read.result() == LARGE
    assert created.result() is not None
    recovered("the bucket was silent for 30 s", end, 60)
    assert there.content("large.bin") == LARGE
    assert there.uploads() == []


# ---------------------------------------------------------------------------- conditional writes


@pytest.mark.guard
@pytest.mark.parametrize("fault", ["lost_answer", "late_error", "silence_after"])
def test_a_created_file_is_ours_even_if_the_response_was_lost(
    fault: Fault, store: Callable[..., Store]
) -> None:
    there = store(once("PUT", "lease", fault), silence_s=0.75)
    tag = conditional.create(f"{there.uri}/lease", b"mine")
    assert conditional.read_tagged(f"{there.uri}/lease") == (b"mine", tag)
    there.proxy.decide = once("PUT", "lease", fault)
    new = conditional.replace_if(f"{there.uri}/lease", b"mine again", str(tag))
    assert new not in (None, tag)
    assert conditional.read_tagged(f"{there.uri}/lease") == (b"mine again", new)


def test_a_file_created_by_another_process_in_the_meantime_is_not_ours(
    store: Callable[..., Store],
) -> None:
    there = store()

    def another_comes_first(method: str, path: str) -> Fault | None:
        if method == "PUT" and not there.keys():
            there.put("lease", b"another's")
            return "reset"
        return None

    there.proxy.decide = another_comes_first
    assert conditional.create(f"{there.uri}/lease", b"mine") is None
    assert there.content("lease") == b"another's"


def test_a_file_that_changes_while_it_is_read_is_an_error(store: Callable[..., Store]) -> None:
    there = store()
    there.put("a.bin", LARGE)
    path = f"{there.uri}/a.bin"
    with files.open_input(path) as file:
        file.read(1000)
        there.put("a.bin", LARGE[::-1])
        with (
            pytest.raises(ResourceError, match=r"a\.bin: .* 412 .* was replaced while it was read"),
            files.reading(path),
        ):
            file.read()


# ---------------------------------------------------------------------------- uploads in parts


@pytest.mark.guard
def test_an_upload_that_fails_is_aborted(
    store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYBERT_STORAGE_RETRY_S", "1")
    there = store(always("PUT", "partNumber=2", "slow_down"))
    with pytest.raises(ResourceError, match=r"large\.bin: could not be written: 503 SlowDown .*"):
        files.write_bytes(f"{there.uri}/large.bin", LARGE)
    assert any("partNumber=1" in request.path for request in there.proxy.seen)
    assert there.uploads() == []
    assert there.keys() == []


@pytest.mark.parametrize(
    ("method", "pattern"), [("POST", "uploads"), ("PUT", "partNumber=1"), ("POST", "uploadId")]
)
@pytest.mark.parametrize("fault", ["lost_answer", "truncate", "late_error"])
def test_an_upload_whose_answer_was_lost_leaves_nothing_behind(
    method: str, pattern: str, fault: Fault, store: Callable[..., Store]
) -> None:
    there = store(once(method, pattern, fault))
    files.write_bytes(f"{there.uri}/large.bin", LARGE)
    assert there.content("large.bin") == LARGE
    assert there.uploads() == []


def test_leftovers_of_a_killed_process_are_cleared_by_the_next(store: Callable[..., Store]) -> None:
    there = store()
    for key in ("a b/é&c.bin", "a b/é&c.bin2"):
        there.client.create_multipart_upload(Bucket=there.bucket, Key=key)
    files.write_bytes(f"{there.uri}/a%20b/%C3%A9&c.bin", LARGE)
    assert there.uploads() == ["a b/é&c.bin2"]
    assert there.content("a b/é&c.bin") == LARGE


# ---------------------------------------------------------------------------- errors

REFUSALS = {
    "InvalidAccessKeyId": (403, "", "the credentials are wrong or have expired"),
    "SignatureDoesNotMatch": (403, "", "the credentials are wrong or have expired"),
    "ExpiredToken": (400, "", "the credentials are wrong or have expired"),
    "RequestTimeTooSkewed": (403, "", "this machine's clock differs from the server's by minutes"),
    "AccessDenied": (403, "", r"these credentials may not (read|write to|list|delete from) it"),
    "PermanentRedirect": (301, "", "in another region than us-east-1: set AWS_REGION or"),
    "AuthorizationHeaderMalformed": (
        400,
        "<Region>eu-west-1</Region>",
        "AWS_REGION or RAYBERT_STORAGE_REGION to eu-west-1",
    ),
    "NoSuchBucket": (404, "", "there is no bucket 'bucket-.*' at http://127.0.0.1"),
    "NotImplemented": (501, "", "lacks this operation"),
}


@pytest.mark.parametrize("code", REFUSALS)
def test_permanent_failures_are_reported_at_once(code: str, store: Callable[..., Store]) -> None:
    there = store()
    status, more, way_out = REFUSALS[code]
    there.proxy.refuse = lambda signed_by: (status, xml_error(code, "In other words.", more))
    path = f"{there.uri}/a/b.bin"
    tries: list[tuple[str, Callable[[], object]]] = [
        ("read", lambda: files.read_bytes(path)),
        ("(read|listed)", lambda: files.exists(path)),  # that it is missing is no reason yet
        ("listed", lambda: files.list_names(f"{there.uri}/a")),
        ("written", lambda: files.write_bytes(path, b"a")),
        ("written", lambda: conditional.create(path, b"a")),
    ]
    if status < 500:
        tries.append(("written", lambda: files.write_bytes(path, LARGE)))
    for verb, attempt in tries:
        there.proxy.seen.clear()
        with pytest.raises(ResourceError) as raised:
            attempt()
        key = "a" if verb == "listed" else "a/b.bin"
        said = (
            rf"^{there.uri}/{key}: could not be {verb}: {status} {code}( \(In other words\.\))?, "
            rf"1 attempt in \d\.\d s, bucket '{there.bucket}', key '{key}': .*{way_out}"
        )
        assert re.search(said, str(raised.value)), str(raised.value)
        # One request, or another that looks for uploads to abort.
        assert len(there.proxy.seen) <= 2


@pytest.mark.guard
def test_persistent_failures_are_reported_with_the_attempts(
    store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYBERT_STORAGE_RETRY_S", "1")
    there = store(lambda method, path: "slow_down")
    with pytest.raises(
        ResourceError,
        match=rf"a\.bin: could not be read: 503 SlowDown \(Please reduce your request rate\.\), "
        rf"[2-9] attempts in \d\.\d s, bucket '{there.bucket}', key 'a\.bin': the server is "
        r"overloaded or away: .* RAYBERT_STORAGE_RETRY_S \(1\)",
    ):
        files.read_bytes(f"{there.uri}/a.bin")
    faults: dict[Fault, str] = {
        "silence": "no answer in time",
        "reset": "the connection broke",
        "away": "the connection broke",
    }
    for fault, reason in faults.items():
        there.proxy.decide = always("PUT", "", fault)
        with pytest.raises(ResourceError, match=rf"be written: {reason}.*, [1-9] attempts? in"):
            files.write_bytes(f"{there.uri}/a.bin", b"a")


@pytest.mark.guard
def test_a_server_that_nobody_has_reached_is_not_waited_for_as_long(
    store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = store()
    monkeypatch.setenv("RAYBERT_STORAGE_RETRY_S", "3600")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setattr("bert_core.storage.retries.FIRST_CONTACT_S", FIRST_CONTACT_S / 10)
    for read in (files.read_bytes, files.exists, files.find_files):
        with pytest.raises(
            ResourceError, match=r"no connection \(Connection refused\), .* check the network, and"
        ):
            read(f"{there.uri}/a.bin")
    with pytest.raises(ResourceError, match=r"no connection \(Connection refused\)"):
        files.write_bytes(f"{there.uri}/a.bin", LARGE)


def test_a_stopping_process_does_not_retry_a_failing_store(
    store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = store()
    files.write_bytes(f"{there.uri}/a", b"a")
    monkeypatch.setattr("bert_core.storage.retries._patience_s", math.inf)  # as it is put back
    storage.give_up_after(1.0)
    assert files.read_bytes(f"{there.uri}/a") == b"a"
    there.proxy.decide = lambda method, path: "away"
    began_s = time.monotonic()
    with pytest.raises(ResourceError, match=r"/b: could not be written: the connection broke"):
        files.write_bytes(f"{there.uri}/b", b"b")
    assert time.monotonic() - began_s < 20, "the setting has 60"
    requests = len(there.proxy.seen)
    with pytest.raises(ResourceError, match=r"/a: could not be read: the store does not answer"):
        files.read_bytes(f"{there.uri}/a")
    assert len(there.proxy.seen) == requests


def test_a_signal_ends_the_wait_for_an_answer(
    store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = store(silence_s=60)
    monkeypatch.setenv("RAYBERT_STORAGE_TIMEOUT_S", "60")
    asked = threading.Event()

    def decide(method: str, path: str) -> Fault:
        asked.set()
        return "silence"

    there.proxy.decide = decide
    code = f"from bert_core import files; files.write_bytes('{there.uri}/a', b'a')"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) as process:
        try:
            assert asked.wait(60)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGINT
    assert errors.endswith(b"KeyboardInterrupt\n")


def test_a_read_only_bucket_is_reported(store: Callable[..., Store]) -> None:
    there = store()
    there.put("a.bin", b"a")
    denied = {"Effect": "Deny", "Principal": "*", "Action": ["s3:PutObject"]}
    policy = {"Statement": [denied | {"Resource": f"arn:aws:s3:::{there.bucket}/*"}]}
    there.client.put_bucket_policy(Bucket=there.bucket, Policy=json.dumps(policy))
    path = f"{there.uri}/a.bin"
    assert files.read_bytes(path) == b"a"
    for write in (files.write_bytes, conditional.create):
        with pytest.raises(
            ResourceError, match=r"403 .*these credentials may not write to it: grant"
        ):
            write(path, b"b")


# ---------------------------------------------------------------------------- how it is reached


def test_settings_come_from_the_usual_variables_and_ours_come_first() -> None:
    assert StorageConfig.of({}) == StorageConfig()
    usual = {
        "AWS_ENDPOINT_URL": "http://a", "AWS_DEFAULT_REGION": "b", "AWS_SKIP_SIGNATURE": "true",
    }  # fmt: skip
    assert StorageConfig.of(usual) == StorageConfig(endpoint="http://a", region="b", anonymous=True)
    assert StorageConfig.of(usual, AZURE) == StorageConfig.of(usual, GOOGLE) == StorageConfig()
    ours = {
        "RAYBERT_STORAGE_ENDPOINT": "http://c", "RAYBERT_STORAGE_REGION": "d",
        "RAYBERT_STORAGE_ANONYMOUS": "no", "RAYBERT_STORAGE_STYLE": "virtual",
        "RAYBERT_STORAGE_CONNECT_TIMEOUT_S": "1", "RAYBERT_STORAGE_TIMEOUT_S": "2.5",
        "RAYBERT_STORAGE_RETRY_S": "3",
    }  # fmt: skip
    assert StorageConfig.of(usual | ours) == StorageConfig(
        endpoint="http://c", region="d", path_style=False,
        connect_timeout_s=1.0, timeout_s=2.5, retry_s=3.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [("STYLE", "host"), ("ANONYMOUS", "perhaps"), ("RETRY_S", "0"), ("TIMEOUT_S", "a minute")],
)
def test_a_setting_out_of_range_is_named(
    name: str, value: str, object_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"RAYBERT_STORAGE_{name}", value)
    with pytest.raises(ConfigError, match=rf"^RAYBERT_STORAGE_{name} is {value}: wanted "):
        files.exists(f"{object_store}/a")


def test_the_bucket_is_in_the_host_or_the_path_of_an_address() -> None:
    bucket = Location.of("s3://books/a")
    for config, address in (
        (StorageConfig(), "https://books.s3.eu-west-1.amazonaws.com"),
        (StorageConfig(path_style=True), "https://s3.eu-west-1.amazonaws.com/books"),
        (StorageConfig(endpoint="http://a:9000/"), "http://a:9000/books"),
        (StorageConfig(endpoint="https://a", path_style=False), "https://books.a"),
    ):
        assert bucket_address(bucket, config, "eu-west-1") == address


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("endpoint", [None, "http://127.0.0.1:1/server"])
def test_every_scheme_opens_a_client_and_is_named_in_errors(
    name: str, endpoint: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "library")
    monkeypatch.setenv("RAYBERT_STORAGE_REGION", "us-east-1")  # asks nobody
    if endpoint:
        monkeypatch.setenv("RAYBERT_STORAGE_ENDPOINT", endpoint)
    bucket, key = storage.open_bucket(f"{name}://books/a%20b")
    assert (bucket.path(key), key) == (f"{SCHEMES[name].name}://books/a%20b", "a b")
    with pytest.raises(ConfigError, match=rf"obstore opens \(.*\b{name}\b.*\), pyarrow"):
        files.filesystem_of("nothing://books/a")


def test_a_uri_names_a_bucket_and_a_key() -> None:
    assert Location.of("S3://a/b%20c/d/") == Location(S3, "a", "b c/d")
    assert Location.of("gcs://a") == Location(GOOGLE, "a", "")
    assert Location.of("az://a/b") == Location(AZURE, "a", "b")
    assert Location.of("abfss://a@b.dfs.core.windows.net/c") == Location(AZURE, "a", "c", "b")
    for path in ("s3://", "s3:///a", "s3://a b", "s3://k@a/b", "s3://a/b?region=c"):
        with pytest.raises(ValueError, match=r"wanted scheme|environment variables"):
            Location.of(path)


def test_a_secret_in_a_uri_is_refused_without_repeating_it() -> None:
    with pytest.raises(ConfigError, match="credentials stand in environment variables") as raised:
        files.read_bytes("s3://key:hushhush@bucket/a")
    assert "hushhush" not in str(raised.value)


def test_a_profile_gives_the_keys_if_no_variable_does(
    store: Callable[..., Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = store()
    files.write_bytes(f"{there.uri}/a", b"1")
    assert there.proxy.seen.pop().signed_by == "anyone"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    credentials = tmp_path / "credentials"
    credentials.write_text(
        "[default]\naws_access_key_id = first\naws_secret_access_key = hush\n"
        "[other]\naws_access_key_id = second\naws_secret_access_key = hush\n"
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    monkeypatch.setenv("AWS_CONFIG_FILE", f"{tmp_path}/config")
    for profile, key in ((None, "first"), ("other", "second")):
        if profile:
            monkeypatch.setenv("AWS_PROFILE", profile)
        assert files.read_bytes(f"{there.uri}/a") == b"1"
        assert there.proxy.seen.pop().signed_by == key
    monkeypatch.setattr("bert_core.storage.stores._CREDENTIALS_LAST", timedelta(0))
    monkeypatch.setenv("RAYBERT_STORAGE_RETRY_S", "59")  # another setting: opened anew
    for key in ("third", "fourth"):  # a program renews them
        credentials.write_text(credentials.read_text().replace("second", key).replace("third", key))
        assert files.read_bytes(f"{there.uri}/a") == b"1"
        assert there.proxy.seen.pop().signed_by == key
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(ConfigError, match="AWS_PROFILE is nobody: wanted a profile of"):
        files.read_bytes(f"{there.uri}/a")
    there.client.put_object_acl(Bucket=there.bucket, Key="a", ACL="public-read")
    monkeypatch.setenv("RAYBERT_STORAGE_ANONYMOUS", "true")
    assert files.read_bytes(f"{there.uri}/a") == b"1"
    assert there.proxy.seen.pop().signed_by is None


def test_a_profile_that_names_a_program_is_asked_again_in_time(
    store: Callable[..., Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = store()
    there.put("a", b"1")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    (tmp_path / "config").write_text(f"[default]\ncredential_process = cat {tmp_path}/answer\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", f"{tmp_path}/credentials")
    monkeypatch.setenv("AWS_CONFIG_FILE", f"{tmp_path}/config")
    monkeypatch.setattr("bert_core.storage.stores._CREDENTIALS_LAST", timedelta(0))
    for key in ("first", "second"):
        soon = datetime.now(UTC) + timedelta(minutes=1)
        answer = {"Version": 1, "AccessKeyId": key, "SecretAccessKey": "hush", "SessionToken": "t"}
        (tmp_path / "answer").write_text(json.dumps(answer | {"Expiration": soon.isoformat()}))
        assert files.read_bytes(f"{there.uri}/a") == b"1"
        assert there.proxy.seen.pop().signed_by == key


def test_missing_credentials_are_reported(
    store: Callable[..., Store], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = store()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, f"{tmp_path}/nothing")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("RAYBERT_STORAGE_RETRY_S", "0.5")
    with pytest.raises(
        ResourceError, match=r"no credentials \(.*\), .*: set AWS_ACCESS_KEY_ID and"
    ):
        files.read_bytes(f"{there.uri}/a")
    assert there.proxy.seen == []


@pytest.mark.guard
def test_folders_that_other_programs_made_are_no_files(store: Callable[..., Store]) -> None:
    there = store()
    for key in ("a/", "a/b/", "a/b/c", "empty/", "a/e"):
        there.put(key, b"1" if key == "a/b/c" else b"")
    assert files.find_files(f"{there.uri}") == [f"{there.uri}/a/b/c", f"{there.uri}/a/e"]
    assert files.list_names(f"{there.uri}/a") == ["b", "e"]
    assert not files.exists(f"{there.uri}/empty")
    assert files.read_bytes(f"{there.uri}/a/e") == b""
    files.remove(f"{there.uri}/a")
    assert not files.exists(f"{there.uri}/a")


def test_rays_filesystem_operations_work_on_a_bucket(
    store: Callable[..., Store], tmp_path: Path
) -> None:
    """It is sent to other processes, and folders are copied there and back."""
    there = store()
    here, path = files.filesystem_of(f"{there.uri}/a")
    elsewhere = pickle.loads(pickle.dumps(here))  # noqa: S301
    assert elsewhere == here
    (tmp_path / "from" / "b").mkdir(parents=True)
    (tmp_path / "from" / "b" / "c.txt").write_text("c")
    copy_files(f"{tmp_path}/from", path, destination_filesystem=elsewhere)
    with elsewhere.open_output_stream(f"{path}/d.txt") as sink:
        sink.write(b"d")
        sink.write(b"d")
    assert there.keys() == ["a/b/c.txt", "a/d.txt"]
    copy_files(path, f"{tmp_path}/to", source_filesystem=elsewhere)
    assert (tmp_path / "to" / "b" / "c.txt").read_text() == "c"
    assert (tmp_path / "to" / "d.txt").read_text() == "dd"


@pytest.mark.guard
def test_a_bucket_of_google_is_read_and_written_by_the_same_code(
    store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Google's XML interface is S3's, but for its conditions and the escapes of its client, which
    moto does not know."""
    there = store(seeded(1), silence_s=0.75)
    there.bucket = there.bucket.replace("-", "")
    there.client.create_bucket(Bucket=there.bucket)
    monkeypatch.setenv("RAYBERT_STORAGE_ENDPOINT", there.proxy.address)
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "anything")
    uri = f"gs://{there.bucket}"
    files.write_bytes(f"{uri}/b.bin", b"b")
    files.write_bytes(f"{uri}/large.bin", LARGE)
    assert files.find_files(uri) == [f"{uri}/b.bin", f"{uri}/large.bin"]
    assert files.read_bytes(f"{uri}/large.bin") == LARGE
    files.remove(f"{uri}/large.bin")
    assert there.keys() == ["b.bin"]


def test_a_container_of_azure_needs_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ConfigError, match=r"^az://books/: .*[Aa]ccount.*docs/storage\.md"):
        files.exists("az://books/a")
    assert storage.open_bucket("abfss://books@library.dfs.core.windows.net/a")[1] == "a"
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "library")
    assert storage.open_bucket("az://books/a")[1] == "a"


WITHOUT = """
import sys
sys.modules["obstore"] = sys.modules["obstore.store"] = None  # importing them fails
from bert_core import files
from bert_core.errors import ConfigError

files.write_bytes(sys.argv[1], b"a")
assert files.read_bytes(sys.argv[1]) == b"a"
try:
    files.exists("s3://bucket/a")
except ConfigError as error:
    print(error)
"""


def test_local_files_need_no_obstore(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, f"{tmp_path}/a"], capture_output=True, text=True
    )
    assert done.stdout.startswith("s3://bucket: wanted the package obstore: install it"), done
