"""Makes the schemas in `data/` that manifests are checked with, from checkouts of their projects:

    python tests/deploy/vendored_schemas.py kuberay ../kuberay v1.7.0
    python tests/deploy/vendored_schemas.py compose ../compose-spec 170098ba

Descriptions are left out, and of KubeRay's CRDs `status` as well; what occurs in these more than
once, such as the pod, stands once. Both projects are under the Apache License 2.0.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

DATA = Path(__file__).with_name("data")
KINDS = ("RayCluster", "RayJob", "RayService")
LEAST_SHARED_BYTES = 400


def main(project: str, checkout: str, revision: str) -> None:
    content = {"kuberay": kuberay, "compose": compose}[project](checkout, revision)
    text = json.dumps({"license": "Apache-2.0", **content}, separators=(",", ":"))
    (DATA / f"{project}.json").write_text(f"{text}\n")


def kuberay(checkout: str, revision: str) -> dict[str, Any]:
    schemas = {kind: schema_of(kind, checkout, revision) for kind in KINDS}
    definitions: dict[str, Any] = {}
    repeated = Counter(text for schema in schemas.values() for text in texts_of(schema))
    shared = {
        kind: without_repetition(schema, repeated, definitions) for kind, schema in schemas.items()
    }
    folder = "ray-operator/config/crd/bases"
    source = f"https://github.com/ray-project/kuberay/tree/{revision}/{folder}"
    return {"source": source, "kinds": shared, "definitions": definitions}


def compose(checkout: str, revision: str) -> dict[str, Any]:
    path = "schema/compose-spec.json"
    source = f"https://github.com/compose-spec/compose-spec/blob/{revision}/{path}"
    schema = json.loads(shown(checkout, revision, path))
    return {"source": source, "schema": without_descriptions(schema)}


def shown(checkout: str, revision: str, path: str) -> str:
    """A file at a revision."""
    command = ["git", "-C", checkout, "show", f"{revision}:{path}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def without_descriptions(schema: Any) -> Any:
    if isinstance(schema, list):
        return [without_descriptions(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: without_descriptions(each)
        for key, each in schema.items()
        if not (key == "description" and isinstance(each, str))
    }


def schema_of(kind: str, checkout: str, revision: str) -> Any:
    path = f"ray-operator/config/crd/bases/ray.io_{kind.lower()}s.yaml"
    versions = yaml.safe_load(shown(checkout, revision, path))["spec"]["versions"]
    (version,) = (each for each in versions if each["name"] == "v1")
    schema = version["schema"]["openAPIV3Schema"]
    del schema["properties"]["status"]
    return without_descriptions(schema)


def texts_of(schema: Any) -> list[str]:
    """Every subtree as JSON."""
    if isinstance(schema, list):
        return [text for each in schema for text in texts_of(each)]
    if not isinstance(schema, dict):
        return []
    below = [text for each in schema.values() for text in texts_of(each)]
    return [*below, text_of(schema)]


def text_of(schema: Any) -> str:
    return json.dumps(schema, sort_keys=True)


def without_repetition(schema: Any, repeated: Counter[str], definitions: dict[str, Any]) -> Any:
    """The schema with references in place of large subtrees that occur more than once."""
    if isinstance(schema, list):
        return [without_repetition(each, repeated, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: without_repetition(each, repeated, definitions) for key, each in schema.items()}
    text = text_of(schema)
    is_schema = isinstance(schema.get("type"), str)  # and no map of properties
    if not is_schema or repeated[text] < 2 or len(text) < LEAST_SHARED_BYTES:
        return result
    name = next((name for name, known in definitions.items() if known == result), None)
    if name is None:
        name = str(len(definitions))
        definitions[name] = result
    return {"$ref": f"#/definitions/{name}"}


if __name__ == "__main__":
    main(*sys.argv[1:])
