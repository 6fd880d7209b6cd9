"""The manifests of `deploy/kuberay`, by KubeRay's schemas and rules, Kubernetes' own schemas, and
by what they promise. No API server takes part."""

import copy
import functools
import json
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines.configure import STAGES, parse

ROOT = Path(__file__).parents[2]
KUBERAY = ROOT / "deploy/kuberay"
SCHEMAS = json.loads((Path(__file__).parent / "data/kuberay.json").read_text())
OVERLAYS = ("cpu", "one-gpu", "many-gpus")
MANIFESTS = [*OVERLAYS, "with-kueue"]
KUBERNETES = "1.35"
LONGEST_NAME = 47
"""KubeRay's limit, since its operator appends to it."""

Document = dict[str, Any]


def built(name: str) -> str:
    """What `kubectl apply` would send."""
    tools = {"kustomize": ["kustomize", "build"], "kubectl": ["kubectl", "kustomize"]}
    command = next((tools[tool] for tool in tools if shutil.which(tool)), None)
    if command is None:
        pytest.skip("kustomize and kubectl are missing: install either one")
    done = subprocess.run([*command, name], cwd=KUBERAY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.fixture(params=MANIFESTS)
def documents(request: pytest.FixtureRequest) -> list[Document]:
    return documents_of(request.param)


def documents_of(name: str) -> list[Document]:
    return copy.deepcopy(_documents_of(name))


@functools.cache
def _documents_of(name: str) -> list[Document]:
    text = kueue() if name == "with-kueue" else built(f"overlays/{name}")
    return list(yaml.safe_load_all(text))


def kueue() -> str:
    """An overlay as a user makes it: with the component that stands there as a comment."""
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / "kuberay"
        shutil.copytree(KUBERAY, copied)
        file = copied / "overlays/one-gpu/kustomization.yaml"
        text = file.read_text()
        assert "# - ../../components/kueue" in text
        file.write_text(text.replace("# - ../../components/kueue", "- ../../components/kueue"))
        return built(str(file.parent))


def of_kind(documents: list[Document], *kinds: str) -> list[Document]:
    found = [each for each in documents if each["kind"] in kinds]
    assert found, kinds
    return found


def settings_of(documents: list[Document]) -> dict[str, str]:
    """The environment of every pod."""
    (found,) = (
        each for each in of_kind(documents, "ConfigMap") if each["metadata"]["name"] == "raybert"
    )
    settings: dict[str, str] = found["data"]
    return settings


def clusters(documents: list[Document]) -> Iterator[tuple[str, Document]]:
    """Every Ray cluster that there would be."""
    fields = {"RayCluster": None, "RayJob": "rayClusterSpec", "RayService": "rayClusterConfig"}
    for each in of_kind(documents, *fields):
        field = fields[each["kind"]]
        spec = each["spec"] if field is None else each["spec"][field]
        yield f"{each['kind']} {each['metadata']['name']}", spec


def pods(documents: list[Document]) -> Iterator[tuple[str, Document]]:
    """The template of every pod that there would be, those that submit jobs last."""
    for name, cluster in clusters(documents):
        yield f"{name}, head", cluster["headGroupSpec"]["template"]
        for group in cluster["workerGroupSpecs"]:
            yield f"{name}, {group['groupName']}", group["template"]
    for job in of_kind(documents, "RayJob"):
        yield f"{job['metadata']['name']}, submitter", job["spec"]["submitterPodTemplate"]


def strict(schema: Any) -> Any:
    """The schema with unknown fields refused, as `kubectl` does."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: strict(each) for key, each in schema.items()}
    if isinstance(schema.get("properties"), dict) and isinstance(schema.get("type"), str):
        result.setdefault("additionalProperties", False)
    return result


def check_schema(document: Document) -> None:
    import jsonschema

    schema = {**SCHEMAS["kinds"][document["kind"]], "definitions": SCHEMAS["definitions"]}
    jsonschema.Draft7Validator(strict(schema)).validate(document)


def broken_rules(schema: Any, value: Any) -> Iterator[str]:
    """Messages of the CEL rules that do not hold; rules about a change are left out."""
    celpy = pytest.importorskip("celpy", reason="cel-python is missing: pip install '.[deploy]'")
    if "$ref" in schema:
        schema = SCHEMAS["definitions"][schema["$ref"].rpartition("/")[2]]
    for rule in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" in rule["rule"]:
            continue
        environment = celpy.Environment()
        program = environment.program(environment.compile(rule["rule"]))
        if not program.evaluate({"self": celpy.json_to_cel(value)}):
            yield rule["message"]
    if isinstance(value, dict):
        for key, each in schema.get("properties", {}).items():
            if key in value:
                yield from broken_rules(each, value[key])
    elif isinstance(value, list) and "items" in schema:
        for each in value:
            yield from broken_rules(schema["items"], each)


def test_rays_resources_satisfy_kuberays_schemas_and_rules(documents: list[Document]) -> None:
    for document in of_kind(documents, "RayCluster", "RayJob", "RayService"):
        check_schema(document)
        assert list(broken_rules(SCHEMAS["kinds"][document["kind"]], document)) == []


def test_a_wrong_field_type_or_rule_is_found() -> None:
    import jsonschema

    (job, *_) = of_kind(documents_of("cpu"), "RayJob")
    for path, value in (
        (("backofLimit",), 3),
        (("backoffLimit",), "three"),
        (("rayClusterSpec", "headGroupSpec", "template", "spec", "containrs"), []),
        (("rayClusterSpec", "authOptions", "mode"), "password"),
    ):
        broken = copy.deepcopy(job)
        where = broken["spec"]
        for key in path[:-1]:
            where = where[key]
        where[path[-1]] = value
        with pytest.raises(jsonschema.ValidationError):
            check_schema(broken)
    job["spec"]["managedBy"] = "somebody"
    job["spec"]["deletionStrategy"] = {"onSuccess": {"policy": "DeleteSelf"}}
    messages = list(broken_rules(SCHEMAS["kinds"]["RayJob"], job))
    assert len(messages) == 2
    assert "managedBy" in messages[1]


@pytest.mark.drill
def test_everything_else_satisfies_kubernetes_schemas(documents: list[Document]) -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is missing: pip install '.[deploy]'"
    ).validate
    for document in documents:
        if document["apiVersion"] != "ray.io/v1":
            validate(document, KUBERNETES, strict=True)
    for name, template in pods(documents):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, **template}
        pod["metadata"] = {"name": re.sub(r"\W+", "-", name.lower()), **template["metadata"]}
        validate(pod, KUBERNETES, strict=True)


def test_every_pod_is_without_privileges_and_says_what_it_needs(documents: list[Document]) -> None:
    for name, template in pods(documents):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"], name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert spec["restartPolicy"] == "Never", name
        volumes = {each["name"]: each for each in spec["volumes"]}
        (container,) = spec["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name
        mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        assert set(mounts.values()) == volumes.keys(), name
        home = container.get("workingDir", "/tmp")
        assert all("emptyDir" in volumes[mounts[path]] for path in ("/tmp", home)), name
        requests, limits = (container["resources"][key] for key in ("requests", "limits"))
        assert requests.keys() >= {"cpu", "memory"}, name
        assert requests["memory"] == limits["memory"] or name.endswith("submitter"), name
        assert container["image"].startswith("registry.example.com/raybert:"), name


def test_a_pod_that_is_to_end_has_time_to(documents: list[Document]) -> None:
    for name, template in pods(documents):
        if name.endswith("submitter"):
            continue
        (container,) = template["spec"]["containers"]
        environment = {each["name"]: each["value"] for each in container["env"]}
        drain_s = float(environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        grace_s = template["spec"]["terminationGracePeriodSeconds"]
        assert grace_s > 120, name
        assert 60 < drain_s <= grace_s - 30, name


def test_every_cluster_asks_for_the_token_and_keeps_work_off_its_head(
    documents: list[Document],
) -> None:
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    for name, cluster in clusters(documents):
        assert cluster["authOptions"] == {"mode": "token", "secretName": "raybert-token"}, name
        assert f"ray=={cluster['rayVersion']}" in constraints, name
        assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}, name
        for group in cluster["workerGroupSpecs"]:
            replicas = [group[key] for key in ("minReplicas", "replicas", "maxReplicas")]
            assert replicas == sorted(replicas), name
    for each in documents:
        assert len(each["metadata"]["name"]) <= LONGEST_NAME


def test_replicas_are_ready_once_a_forward_pass_has_run(documents: list[Document]) -> None:
    (service,) = of_kind(documents, "RayService")
    for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        probe = container["readinessProbe"]["httpGet"]
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        config = yaml.safe_load(service["spec"]["serveConfigV2"])
        assert probe["path"] == "/readyz"  # tests/serve say what that does
        assert ports[probe["port"]] == config["http_options"]["port"]


def test_the_service_runs_what_ray_serve_and_raybert_take(documents: list[Document]) -> None:
    from ray.serve.schema import ServeDeploySchema

    from serve.config import config_of_one

    (service,) = of_kind(documents, "RayService")
    config = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    (application,) = config.applications
    arguments = config_of_one(application.args)
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    has = container["resources"]["requests"]
    assert application.import_path == "serve.app:build"
    assert arguments.threads <= int(has["cpu"])
    assert arguments.num_gpus == int(has.get("nvidia.com/gpu", 0))
    assert arguments.num_replicas == group["minReplicas"]
    assert arguments.keys is not None
    mounts = {each["mountPath"] for each in container["volumeMounts"]}
    assert str(Path(arguments.keys).parent) in mounts


def test_haproxy_is_set_up_as_raybert_serve_does(documents: list[Document]) -> None:
    from serve.cluster import haproxy

    settings = settings_of(documents)
    wanted = haproxy.settings(enabled=True)
    own = re.compile("PORT$|_LOC$|SOCKET_PATH$|SERVER_STATE")  # of a server among others
    fixed = {name: value for name, value in wanted.items() if not own.search(name)}
    launcher = "RAY_SERVE_HAPROXY_BINARY_PATH"
    assert Path(settings[launcher]).name == Path(fixed.pop(launcher)).name
    assert fixed.items() <= settings.items()
    assert {name for name in settings if name.startswith("RAY_")} == {*fixed, launcher}


def test_every_entrypoint_is_a_command_that_raybert_takes(documents: list[Document]) -> None:
    settings = settings_of(documents)
    found = set()
    for job in of_kind(documents, "RayJob"):
        text = job["spec"]["entrypoint"]
        names = re.findall(r"\$(\w+)", text)
        for name in names:
            text = text.replace(f"${name}", settings[name])
        program, word, *arguments = shlex.split(text)
        assert program == "raybert"
        # Where deploy/Dockerfile puts them.
        at = [each.replace("/opt/raybert/configs", str(ROOT / "configs")) for each in arguments]
        config = parse(word, at)
        assert config.output.startswith("s3://")
        assert job["metadata"]["name"] == f"raybert-{word}"
        assert job["metadata"]["labels"]["app.kubernetes.io/component"] == word
        found.add(word)
    assert found >= {"vocab", "prepare", "pretrain", "finetune", "evaluate", "publish"}
    assert found <= STAGES.keys()


def test_training_stages_find_a_gpu_per_worker() -> None:
    for name, gpus in (("cpu", 0), ("one-gpu", 1), ("many-gpus", 16)):
        documents = documents_of(name)
        settings = settings_of(documents)
        for job, cluster in clusters(documents):
            found = 0
            for group in cluster["workerGroupSpecs"]:
                (container,) = group["template"]["spec"]["containers"]
                limits = container["resources"]["limits"]
                found += group["minReplicas"] * int(limits.get("nvidia.com/gpu", 0))
            if job.endswith(("vocab", "prepare", "publish")):
                assert found == 0
            elif job.startswith("RayJob"):
                assert found == gpus
                assert gpus in (0, int(settings["TRAIN_WORKERS"]))


def test_policies_and_budgets_select_pods_that_exist(documents: list[Document]) -> None:
    labels = [
        template["metadata"]["labels"]
        | ({"ray.io/node-type": "head"} if name.endswith("head") else {})
        for name, template in pods(documents)
    ]

    def selects(selector: Document) -> bool:
        return any(selector["matchLabels"].items() <= each.items() for each in labels)

    for policy in of_kind(documents, "NetworkPolicy"):
        assert selects(policy["spec"]["podSelector"])
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        sources = [source for rule in policy["spec"]["ingress"] for source in rule["from"]]
        # Anyone may put a label on pods of a namespace of his own.
        spaces = [each["namespaceSelector"] for each in sources if "namespaceSelector" in each]
        assert all(each["matchLabels"] for each in spaces)
    for budget in of_kind(documents, "PodDisruptionBudget"):
        assert selects(budget["spec"]["selector"])
        assert isinstance(budget["spec"]["minAvailable"], int)
    (all_pods,) = (
        each
        for each in of_kind(documents, "NetworkPolicy")
        if each["metadata"]["name"] == "raybert"
    )
    wanted = all_pods["spec"]["podSelector"]["matchLabels"]
    assert all(wanted.items() <= each.items() for each in labels)


def test_selections_in_the_readmes_commands_exist(documents: list[Document]) -> None:
    labels = {each["metadata"]["labels"]["app.kubernetes.io/component"] for each in documents}
    text = (KUBERAY / "README.md").read_text()
    named = re.findall(r"app\.kubernetes\.io/component(?:=| in \()([\w, ]+)", text)
    assert named
    for each in named:
        assert set(each.split(", ")) <= labels
    for stage in labels & STAGES.keys():
        assert f"`{stage}`" in text


def test_kueue_is_asked_for_all_resources_at_once() -> None:
    documents = documents_of("with-kueue")
    for each in of_kind(documents, "RayJob", "RayCluster"):
        assert each["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "raybert"
    for name, cluster in clusters(documents):
        if not name.startswith("RayService"):
            assert not cluster["enableInTreeAutoscaling"]
            for group in cluster["workerGroupSpecs"]:
                assert group["replicas"] == group["maxReplicas"] > 0
