"""Storage that refuses."""

import json
from collections.abc import Iterator
from uuid import uuid4

import httpx
import pytest

READ = {"Effect": "Allow", "Action": ["s3:Get*", "s3:List*"], "Resource": "*"}


@pytest.fixture
def guarded(object_store: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket of a server that checks credentials; ours may only read."""
    import boto3

    iam = boto3.client("iam")
    name = f"reader-{uuid4().hex[:8]}"
    iam.create_user(UserName=name)
    policy = json.dumps({"Version": "2012-10-17", "Statement": [READ]})
    iam.put_user_policy(UserName=name, PolicyName="read", PolicyDocument=policy)
    key = iam.create_access_key(UserName=name)["AccessKey"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
    httpx.post(f"{s3_endpoint}/moto-api/reset-auth", content="0").raise_for_status()
    yield object_store
    httpx.post(f"{s3_endpoint}/moto-api/reset-auth", content="inf").raise_for_status()
