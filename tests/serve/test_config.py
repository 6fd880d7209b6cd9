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
        ([], "models is empty: wanted at least one name=reference"),
        ("", 'models holds "": wanted name=reference, as in docs=models:/docs@champion'),
        ("runs/docs/bundle", 'models holds "runs/docs/bundle": wanted name=reference'),
        ("docs=", 'models holds "docs=": wanted name=reference'),
        ("a/b=runs/x", "the name of letters, digits, dots, dashes and underscores"),
        (["a=x", "a=y"], 'models names "a" twice, for x and y: give one of them another name'),
    ],
)
def test_models_of_another_form_are_refused(models: list[str] | str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServeConfig(models=models)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("port", 0, "port is 0: wanted 1 to 65535"),
        ("port", 70_000, "port is 70000: wanted 1 to 65535"),
        (
            "host",
            "192.0.2.7",
            'host is "192.0.2.7": behind HAProxy it must be 127.0.0.1 or 0.0.0.0',
        ),
        ("num_replicas", 0, "num_replicas is 0: wanted at least 1"),
        ("threads", 0, "threads is 0: wanted at least 1"),
        ("max_batch_tokens", 0, "max_batch_tokens is 0: wanted at least 1"),
        ("max_ongoing_requests", 0, "max_ongoing_requests is 0: wanted at least 1"),
        ("num_gpus", -1.0, "num_gpus is -1.0: wanted 0 or more"),
        ("num_gpus", 1.5, "num_gpus is 1.5: wanted a fraction below 1 or a whole number"),
        ("max_wait_ms", -0.5, "max_wait_ms is -0.5: wanted 0 or more"),
    ],
)
def test_a_value_out_of_range_is_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServeConfig(models="a=x", **{field: value})
    assert message in str(caught.value)


def test_any_host_goes_without_haproxy() -> None:
    assert ServeConfig(models="a=x", host="192.0.2.7", haproxy=False).host == "192.0.2.7"
