"""What the server can be told, and what it says when told something else."""

from pathlib import Path
from typing import Any

import pytest

from bert_core.errors import ConfigError
from pipelines.configure import parse
from serve.config import CandidateConfig, ModelConfig, ServeConfig, config_of_one, parse_models
from serve.request.limits import Limits


def test_models_are_given_as_a_list_or_separated_by_commas() -> None:
    wanted = {"docs": "models:/docs@champion", "mine": "runs/mine/bundle"}
    assert parse_models(["docs=models:/docs@champion", "mine=runs/mine/bundle"]) == wanted
    assert parse_models("docs=models:/docs@champion, mine=runs/mine/bundle") == wanted
    assert parse_models("docs=models:/docs@champion mine=runs/mine/bundle") == wanted
    assert parse_models("a=my models/x b=y") == {"a": "my models/x", "b": "y"}
    # Only the first = parts name from reference: a URI may hold more.
    assert parse_models("a=s3://bucket/x?version=3") == {"a": "s3://bucket/x?version=3"}


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ([], "models: wanted a value, got none: give --models name=reference"),
        ("", "models: wanted a value, got none: give --models name=reference"),
        (",", "models: wanted name=reference, as in docs=models:/docs@champion"),
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
        ("cache_mib", -1, "cache_mib: wanted at least 0, got -1"),
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


def test_any_host_is_accepted_without_haproxy() -> None:
    assert (
        ServeConfig(models="a=x", host="192.0.2.7", haproxy=False, no_auth=True).host == "192.0.2.7"
    )


def test_a_models_own_settings_override_the_common_ones() -> None:
    config = ServeConfig(
        models={
            "docs": {"model": "a", "threads": 2, "limits": {"max_inputs": 7}, "max_replicas": 4},
            "mine": {"model": "b", "candidate": {"model": "c", "share": 1, "mode": "split"}},
            "bare": "d",
        },
        threads=3,
        limits=Limits(max_top_k=5),
        default="mine",
    )
    docs, mine, bare = config.served.values()
    assert (docs.model, docs.threads, docs.num_replicas, docs.max_replicas) == ("a", 2, 1, 4)
    assert docs.limits == Limits(max_inputs=7, max_top_k=5)
    assert (mine.threads, mine.limits) == (3, Limits(max_top_k=5))
    assert mine.candidate == CandidateConfig(model="c", share=1.0, mode="split")
    assert bare == ModelConfig(model="d", threads=3, limits=Limits(max_top_k=5))


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ({"a/b": {"model": "x"}}, "models.a/b: wanted a name of letters, digits, dots"),
        ({"a": 7}, "models.a: wanted a table, got a number (7)"),
        ({"a": {}}, "models.a.model: wanted a value, got none"),
        (
            {"a": {"model": "x", "thread": 2}},
            "models.a.thread: there is no such setting, there are",
        ),
        ({"a": {"model": "x", "thread": 2}}, "(did you mean threads?)"),
        ({"a": {"model": "x", "threads": 0}}, "models.a.threads: wanted at least 1, got 0"),
        (
            {"a": {"model": "x", "threads": "many"}},
            'models.a.threads: wanted a whole number, got text ("many")',
        ),
        (
            {"a": {"model": "x", "precision": "int4"}},
            "models.a.precision: wanted one of 'fp32', 'bf16', 'int8' or 'int8_bf16', got text",
        ),
        (
            {"a": {"model": "x", "limits": {"max_inputs": 0}}},
            "models.a.limits.max_inputs: wanted at least 1, got 0",
        ),
        (
            {"a": {"model": "x", "num_replicas": 3, "max_replicas": 2}},
            "models.a.max_replicas: wanted at least num_replicas, 3, got 2",
        ),
        (
            {"a": {"model": "x", "candidate": {"model": "y", "share": 0}}},
            "models.a.candidate.share: wanted above 0 and at most 1, got 0",
        ),
        ({"a": {"model": "x", "threads": "2"}}, "models.a.threads: wanted a whole number"),
        ({"a": {"model": "x", "threads": True}}, "models.a.threads: wanted a whole number"),
        ({"a": {"model": "x", "limits": {"max_input": 7}}}, "(did you mean max_inputs?)"),
        (
            {"a": {"model": "x", "candidate": {"model": "y", "shar": 0.5}}},
            "models.a.candidate.shar: there is no such setting",
        ),
        ({"a": {"model": ""}}, "models.a.model: wanted a reference, got an empty text"),
        ({"a": {"model": "x", "candidate": 3}}, "models.a.candidate: wanted a table, got a number"),
        ({"a": {"model": "x", "limits": 3}}, "models.a.limits: wanted a table, got a number (3)"),
        ({"a": {"model": "x", "limits": [["max_inputs", 3]]}}, "models.a.limits: wanted a table"),
        ({"a": {"model": "x", "threads": 1 << 64}}, "got something else (Integer exceeds 64-bit"),
        ({"a": {"model": "x", "limits": None}}, "models.a.limits: wanted a table, got nothing"),
        ({}, "models: wanted at least one table [models.<name>], got none"),
    ],
)
def test_an_invalid_table_is_refused(models: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServeConfig(models=models)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"default": "docs"}, "default: wanted one of the models, a, got 'docs'"),
        ({"together": True, "num_replicas": 2}, "num_replicas: wanted 1 with together"),
        ({"together": True, "max_replicas": 2}, "max_replicas: wanted 1 with together"),
        ({"follow_s": float("inf")}, "follow_s: wanted a finite number, got inf"),
        ({"apply": "x.toml", "stop": True}, "stop: wanted one of apply, status and stop"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        ServeConfig(models="a=x", **settings)
    assert message in str(caught.value)


def test_serve_run_takes_every_setting_of_a_model_and_no_other() -> None:
    config = config_of_one(
        {
            "name": "docs",
            "model": "models:/docs@champion",
            "backend": "onnxruntime",
            "max_replicas": "3",  # as a command line gives it
            "target_queue_tokens": "99",
            "truncate": "true",
            "limits": {"max_inputs": 9},  # as a file of Kubernetes does
            "keys": "keys.json",
            "drain_s": "5",
        }
    )
    limits = Limits(max_inputs=9)
    assert config.served == {
        "docs": ModelConfig(
            model="models:/docs@champion",
            backend="onnxruntime",
            max_replicas=3,
            target_queue_tokens=99,
            truncate=True,
            limits=limits,
        )
    }
    assert (config.keys, config.drain_s) == ("keys.json", 5.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "models.model.model: wanted a value, got none"),
        ({"model": "x", "bakend": "torch"}, "bakend: there is no .*did you mean backend"),
        ({"model": "x", "candidate": "y"}, "candidate: there is no such argument"),
        ({"model": "x", "host": "0.0.0.0"}, "host: there is no such argument, there are name, "),
        ({"model": "x", "threads": "two"}, "threads: wanted a whole number, got text"),
        ({"model": "x", "threads": "0"}, "threads: wanted at least 1, got 0"),
        ({"model": "x", "backend": "tpu"}, "backend: wanted one of 'auto', .*, got text"),
        (
            {"model": "x", "limits": {"max_imputs": 1}},
            "models.model.limits.max_imputs: there is no",
        ),
        ({"model": "x", "name": "a/b"}, "models.a/b: wanted a name of letters, digits"),
        ({"model": "x", "name": -1}, "models.-1: wanted a name of letters, digits"),
        ({"model": "x", "limits": "many"}, r"models.model.limits: wanted a table, got text"),
        ({"model": 7}, "models.model.model: wanted text, got a number"),
        ({"model": "x", "keys": {1: 2}}, r"the arguments: wanted texts, .* \(Dict key must be str"),
    ],
)
def test_arguments_of_serve_run_that_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of_one(arguments)


def test_serve_run_takes_a_number_as_a_name() -> None:
    """YAML reads `name: 7` as a number, and `name:` as nothing."""
    for given, name in ((7, "7"), (None, "model")):
        config = config_of_one({"name": given, "model": "x"})
        assert config.served == {name: ModelConfig(model="x")}


def test_a_file_has_a_table_per_model(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        'threads = 2\n[limits]\nmax_inputs = 9\n[models.docs]\nmodel = "models:/docs@champion"\n'
        '[models.mine]\nmodel = "0"\nthreads = 1\nlimits.max_top_k = 3\n'
    )
    docs, mine = parse("serve", ["--config", str(file)]).served.values()
    assert docs == ModelConfig(
        model="models:/docs@champion", threads=2, limits=Limits(max_inputs=9)
    )
    assert mine == ModelConfig(model="0", limits=Limits(max_inputs=9, max_top_k=3))


def test_traces_require_haproxy_since_rays_own_proxy_reveals_paths() -> None:
    with pytest.raises(ConfigError, match="otlp_endpoint: wanted none without HAProxy"):
        ServeConfig(models="a=x", otlp_endpoint="http://localhost:4318", haproxy=False)
