"""What the server can be told, and what it says when told something else."""

from typing import Any

import pytest

from bert_core.errors import ConfigError
from serve.config import ServeConfig, parse_models


def test_models_are_given_as_a_list_or_with_commas_between() -> None:
    wanted = {"docs": "models:/docs@champion", "mine": "runs/mine/bundle"}
    assert parse_models(["docs=models:/docs@champion", "mine=runs/mine/bundle"]) == wanted
    assert parse_models("docs=models:/docs@champion, mine=runs/mine/bundle") == wanted
    # Only the first = parts name from reference: a URI may hold more.
    assert parse_models("a=s3://bucket/x?version=3") == {"a": "s3://bucket/x?version=3"}


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ([], "models: wanted at least one name=reference, got none"),
        ("", "models: wanted name=reference, as in docs=models:/docs@champion"),
        ("runs/docs/bundle", "underscores, got 'runs/docs/bundle'"),
        ("docs=", "underscores, got 'docs='"),
        ("a/b=runs/x", "with a name of letters, digits, dots, dashes and underscores"),
        (["a=x", "a=y"], "models: wanted different names, got 'a' for x and y: rename one of them"),
    ],
)
def test_models_of_another_form_are_refused(models: list[str] | str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServeConfig(models=models)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("port", 0, "port: wanted 1 to 65535, got 0"),
        ("port", 70_000, "port: wanted 1 to 65535, got 70000"),
        (
            "host",
            "192.0.2.7",
            "host: wanted 127.0.0.1 or 0.0.0.0 behind HAProxy, got '192.0.2.7'",
        ),
        ("num_replicas", 0, "num_replicas: wanted at least 1, got 0"),
        ("threads", 0, "threads: wanted at least 1, got 0"),
        ("max_batch_tokens", 0, "max_batch_tokens: wanted at least 1, got 0"),
        ("max_ongoing_requests", 0, "max_ongoing_requests: wanted at least 1, got 0"),
        ("num_gpus", -1.0, "num_gpus: wanted at least 0, got -1.0"),
        ("num_gpus", 1.5, "num_gpus: wanted a fraction below 1 or a whole number, got 1.5"),
        ("max_wait_ms", -0.5, "max_wait_ms: wanted at least 0, got -0.5"),
        ("trace_share", 1.5, "trace_share: wanted above 0 and at most 1, got 1.5"),
    ],
)
def test_a_value_out_of_range_is_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServeConfig(models="a=x", **{field: value})
    assert message in str(caught.value)


def test_any_host_goes_without_haproxy() -> None:
    assert (
        ServeConfig(models="a=x", host="192.0.2.7", haproxy=False, no_auth=True).host == "192.0.2.7"
    )


def test_traces_want_haproxy_since_rays_own_proxy_tells_paths() -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint: wanted none without HAProxy"):
        ServeConfig(models="a=x", otlp_endpoint="http://localhost:4318", haproxy=False)
