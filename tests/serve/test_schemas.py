"""What the server's OpenAPI says is what it does: schemathesis over every path of every surface."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from tests.serve.live import Server

SEED = 20261126
EXAMPLES, WHOLE_EXAMPLES = 5, 200
"""Random requests per path, besides those that walk through every keyword of its schema."""
PATHS = {
    "root": r"^(?!/v1/models/[^{])|^/v1/models/[^/]+$|/embed_sparse$",
    "below models": r"^/v1/models/(feature-extraction|text-classification|text-ranking)/",
}
"""Paths at the root, every model's own URL, and those of a model for every surface: below other
models are the same ones, which are left out unless all is to be as long as it takes."""
REJECTED = "positive_data_acceptance"


@dataclass(frozen=True, kw_only=True)
class Exemption:
    """A check that cannot hold for some paths."""

    check: str
    paths: str
    """A regular expression."""
    method: str = "POST"
    reason: str


EXEMPTIONS = (
    Exemption(
        check="allow_header_conformance",
        paths=r"^/v1/models/[^{/]+$",
        reason="that a model's URL has GET too stands at /v1/models/{name}",
    ),
    *(
        Exemption(
            check=check,
            paths=r"^/v1/models/\{name\}$",
            method="GET",
            reason="that a model takes POST too stands at its own URL, whose name is known",
        )
        for check in ("allow_header_conformance", "unsupported_method")
    ),
    Exemption(
        check=REJECTED,
        paths=r"^(?!/v1/models/[^{])",
        reason="the front does not know what the model takes that will answer",
    ),
    Exemption(
        check=REJECTED,
        paths=r"/v2/models/{model}/infer$",
        reason="there must be as many texts as the product of the shape's numbers",
    ),
    Exemption(
        check=REJECTED,
        paths=r"/invocations$",
        reason="columns must be as long as each other, and rows as there are columns",
    ),
    Exemption(
        check=REJECTED,
        paths=r"^/v1/models/fill-mask$",
        reason="targets must be tokens of the vocabulary",
    ),
    Exemption(
        check=REJECTED,
        paths=r"^/v1/models/relation-classification$",
        reason="two spans must be marked in a text, once each",
    ),
    Exemption(
        check=REJECTED,
        paths=r"^/v1/models/feature-extraction$",
        reason="a parameter, per_token, excludes a part of the inputs, text_pair",
    ),
)


def settings(examples: int) -> dict[str, Any]:
    """Contents of schemathesis.toml."""
    return {
        "seed": SEED,
        "generation": {"max-examples": examples, "database": "none", "no-shrink": True},
        "continue-on-failure": True,
        # 413 is how a limit is told.
        "checks": {
            "negative_data_rejection": {
                "expected-statuses": ["400", "404", "405", "406", "413", "415", "422"]
            }
        },
        "phases": {"stateful": {"enabled": False}},
        "operations": [
            {
                "include-path-regex": each.paths,
                "include-method": each.method,
                "checks": {each.check: {"enabled": False}},
            }
            for each in EXEMPTIONS
        ],
    }


@pytest.mark.parametrize(
    "paths",
    [
        pytest.param("root", marks=pytest.mark.guard),
        pytest.param("below models", marks=pytest.mark.drill),
    ],
)
def test_every_path_does_what_its_description_says(
    together: Server, tmp_path: Path, paths: str, whole: bool
) -> None:
    option = "--exclude-path-regex" if whole and paths != "root" else "--include-path-regex"
    chosen = PATHS["root" if whole else paths]
    config = tmp_path / "schemathesis.toml"
    config.write_text(tomlkit.dumps(settings(WHOLE_EXAMPLES if whole else EXAMPLES)))
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(config)]
    command += ["run", f"{together.url}/openapi.json", "--no-color", option, chosen]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
