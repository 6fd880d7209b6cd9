"""A server on this machine that speaks S3's protocol, and buckets on it."""

from collections.abc import Iterator
from uuid import uuid4

import pytest

S3_REGION = "us-east-1"


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """Address of a server on this machine that speaks S3's protocol."""
    from moto.server import ThreadedMotoServer  # here: it takes a second

    server = ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def object_store(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """URI of an empty bucket; `s3://` leads to it while the test runs."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "anyone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "anything")
    monkeypatch.setenv("AWS_DEFAULT_REGION", S3_REGION)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    import boto3

    bucket = f"bucket-{uuid4().hex[:8]}"
    boto3.client("s3", region_name=S3_REGION).create_bucket(Bucket=bucket)
    return f"s3://{bucket}"
