"""The image's Dockerfile and the Compose file, by their linters and schemas, and by what they
promise. Nothing is built here."""

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement

from pipelines.configure import parse

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy/Dockerfile"
COMPOSE = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
SCHEMA = json.loads((Path(__file__).parent / "data/compose.json").read_text())["schema"]
PINNED = re.compile(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}")


def instructions() -> list[list[str]]:
    """The Dockerfile's instructions, each as its words."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    return [shlex.split(line) for line in "\n".join(lines).replace("\\\n", "").splitlines() if line]


def arguments_of(word: str) -> list[list[str]]:
    return [rest for first, *rest in instructions() if first == word]


def test_hadolint_finds_nothing(tool: Any) -> None:
    hadolint = tool("hadolint", "pip install '.[deploy]'")
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_base_is_pinned_and_the_container_is_unprivileged() -> None:
    (base,) = (value for [value] in arguments_of("ARG") if value.startswith("PYTHON="))
    assert PINNED.fullmatch(base.removeprefix("PYTHON="))
    assert {image for image, *_ in arguments_of("FROM")} == {"${PYTHON}"}
    assert arguments_of("USER")[-1] == ["1000:1000"]
    assert len(arguments_of("HEALTHCHECK")) == 1


def test_installed_packages_are_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    given = dict(value.split("=", 1) for [value] in arguments_of("ARG") if "=" in value)
    for line in (*extras["serve"], *extras["train"]):
        wanted = Requirement(line)
        assert wanted.name != "torch" or wanted.specifier.contains(given["TORCH"])
    assert f"uv=={given['UV']}\n" in (ROOT / "Makefile").read_text()
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    installed = [
        word
        for [*words] in arguments_of("RUN")
        for command in re.split(r" && ", " ".join(words))
        if "pip install " in command
        for word in command.partition("pip install ")[2].split()
        if not word.startswith(("-", "$", "/", "constraints"))
    ]
    assert installed == [
        "uv==${UV}",
        "torch==${TORCH}",
        "boto3",
        "psycopg2-binary==2.9.13",
        ".[onnx,otlp,serve,train]",
    ]
    assert "boto3" in pinned
    assert any("PIP_CONSTRAINT=/src/constraints.txt" in words for words in arguments_of("ENV"))


def test_copied_files_exist_and_docker_is_sent_nothing_else() -> None:
    copied = {
        source
        for words in arguments_of("COPY")
        if not words[0].startswith("--from")
        for source in words[:-1]
    }
    ignored = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    assert copied == {line[1:] for line in ignored if line.startswith("!")}
    assert "*" in ignored
    assert all((ROOT / source).exists() for source in copied)


def test_the_compose_file_satisfies_the_schema_of_compose() -> None:
    validator = jsonschema.Draft7Validator(SCHEMA)
    validator.validate(COMPOSE)
    broken = {**COMPOSE, "services": {"serve": {"imagee": "raybert"}}}
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(broken)


def test_compose_pins_images_and_listens_on_this_machine_only() -> None:
    for name, service in COMPOSE["services"].items():
        assert "build" in service or PINNED.fullmatch(service["image"]), name
        assert "no-new-privileges:true" in service["security_opt"], name
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), name


def test_every_variable_of_the_compose_file_is_in_the_example() -> None:
    text = (ROOT / "deploy/compose.yaml").read_text()
    example = (ROOT / "deploy/env.example").read_text()
    named = set(re.findall(r"\$\{(\w+)", text))
    assert named == set(re.findall(r"^(?:# )?(\w+)=", example, flags=re.MULTILINE))


def test_the_server_of_the_compose_file_is_a_command_that_raybert_takes() -> None:
    word, *arguments = COMPOSE["services"]["serve"]["command"]
    defaults = [re.sub(r"\$\{\w+:-(.*)\}", r"\1", each) for each in arguments]
    config: Any = parse(word, defaults)
    assert config.host == "0.0.0.0"
    assert config.keys == "/run/secrets/keys"
    seconds = COMPOSE["services"]["serve"]["stop_grace_period"]
    assert config.drain_s + 15 <= float(seconds.removesuffix("s"))


@pytest.mark.drill
def test_mlflow_knows_the_settings_of_its_server() -> None:
    from mlflow.cli import server

    known = {parameter.envvar for parameter in server.params}
    options = {option for parameter in server.params for option in parameter.opts}
    service = COMPOSE["services"]["mlflow"]
    for name in service["environment"]:
        if name.startswith("MLFLOW_") and name not in (
            "MLFLOW_S3_ENDPOINT_URL",
            "MLFLOW_DISABLE_TELEMETRY",
        ):
            assert name in known, name
    assert {word for word in service["command"] if word.startswith("--")} <= options
