"""`deploy/kubernetes`: Kubernetes knows each object, and what an object refers to is there. Never run on a cluster."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.settings import Settings
from prefect.settings.legacy import _get_settings_fields
from prefect.utilities.templating import apply_values

from cosmos_core import cli
from cosmos_core.launch.bootstrap import DEFAULT_POOLS
from cosmos_core.rewards.service.config import read_config
from tests.unit.test_deploy import DEPLOY, ROOT

FOLDER = DEPLOY / "kubernetes"
TEMPLATE = json.loads((FOLDER / "base-job-template.json").read_text())
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
HEADER = (FOLDER / "kustomization.yaml").read_text().partition("apiVersion:")[0]
OBJECTS: list[dict[str, Any]] = [
    each for file in KUSTOMIZATION["resources"] for each in yaml.safe_load_all((FOLDER / file).read_text())
]


def rendered(**given: Any) -> dict[str, Any]:
    """The job that a worker of Prefect makes of the template: its own rendering, with the defaults of the variables."""
    defaults = {k: v["default"] for k, v in TEMPLATE["variables"]["properties"].items() if "default" in v}
    found: dict[str, Any] = apply_values(TEMPLATE["job_configuration"], defaults | given)
    return found


JOB = rendered(name="sft", gpus=4, ray_address="ray:6379")["job_manifest"]


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each pod template, with the name of its object."""
    for each in [*OBJECTS, JOB]:
        name = f"{each['kind']} {each['metadata'].get('name', 'of a flow run')}"
        spec = each.get("spec", {})
        groups = [spec[key] for key in ("headGroupSpec",) if key in spec] + spec.get("workerGroupSpecs", [])
        for part in [spec, *groups]:
            if "template" in part:
                yield name, part["template"]


def named(kind: str) -> set[str]:
    found = {each["metadata"]["name"] for each in OBJECTS if each["kind"] == kind}
    return found | {each["name"] for each in KUSTOMIZATION["configMapGenerator"] if kind == "ConfigMap"}


SCHEMA = json.loads(Path(__file__).with_name("kubernetes.json").read_text())
GROUPS = {"v1": "core", "batch/v1": "batch", "apps/v1": "apps", "rbac.authorization.k8s.io/v1": "rbac",
          "networking.k8s.io/v1": "networking"}  # fmt: skip


def wrong_with(manifest: dict[str, Any], definition: str = "") -> list[str]:
    """What the API of Kubernetes would say of a manifest; it refuses keys that it does not know."""
    group = GROUPS[manifest["apiVersion"]] if not definition else ""
    name = definition or f"io.k8s.api.{group}.v1.{manifest['kind']}"
    validator = Draft202012Validator({"$defs": SCHEMA["$defs"], "$ref": f"#/$defs/{name}"})
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(manifest)]


def test_every_object_fits_the_schema_of_kubernetes() -> None:
    known = [each for each in [*OBJECTS, JOB] if each["kind"] != "RayCluster"]
    assert len(known) >= 20
    wrong = {f"{each['kind']} {each['metadata'].get('name')}": wrong_with(each) for each in known}
    assert not any(wrong.values()), wrong
    job = copy.deepcopy(JOB)
    container = job["spec"]["template"]["spec"]["containers"][0]
    container["volumeMount"] = container.pop("volumeMounts")
    assert any("'volumeMount' was unexpected" in line for line in wrong_with(job)), "the schema is strict"


# https://docs.ray.io/en/latest/cluster/kubernetes/user-guides/config.html: keys of a RayCluster that we may write
RAY = {
    "spec": {"headGroupSpec", "workerGroupSpecs", "rayVersion", "enableInTreeAutoscaling", "autoscalerOptions",
             "suspend"},
    "group": {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template", "numOfHosts",
              "idleTimeoutSeconds", "suspend", "serviceType"},
}  # fmt: skip


def test_the_ray_cluster_has_known_keys_a_token_and_the_version_that_is_installed() -> None:
    [ray] = [each for each in OBJECTS if each["kind"] == "RayCluster"]
    assert ray["apiVersion"] == "ray.io/v1" and ray["spec"].keys() <= RAY["spec"]
    pinned = re.search(r"^ray==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned and ray["spec"]["rayVersion"] == pinned[1]
    for group in [ray["spec"]["headGroupSpec"], *ray["spec"]["workerGroupSpecs"]]:
        assert group.keys() <= RAY["group"]
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        assert wrong_with(group["template"], "io.k8s.api.core.v1.PodTemplateSpec") == []
        [container] = group["template"]["spec"]["containers"]
        [job] = JOB["spec"]["template"]["spec"]["containers"]
        of_ray = [each for each in container["env"] if each["name"].startswith("RAY_AUTH")]
        assert of_ray == [each for each in job["env"] if each["name"].startswith("RAY_AUTH")], "a stage can join it"
    assert (
        f"{ray['metadata']['name']}-head-svc:6379" in TEMPLATE["variables"]["properties"]["ray_address"]["description"]
    )


def test_prefect_takes_the_template_and_it_has_no_variable_that_is_not_used() -> None:
    WorkPoolCreate(name="gpu", type="kubernetes", base_job_template=TEMPLATE)
    Draft202012Validator.check_schema(TEMPLATE["variables"])
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(TEMPLATE["job_configuration"])))
    assert used == set(TEMPLATE["variables"]["properties"])
    assert all(len(each["description"]) > 5 for each in TEMPLATE["variables"]["properties"].values())
    assert "{{" not in json.dumps(JOB)


def test_a_job_asks_for_its_gpus_and_is_never_started_twice_by_kubernetes() -> None:
    assert JOB["spec"]["backoffLimit"] == 0, "Prefect decides about retries"
    pod = JOB["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": 4}
    assert {"name": "RAY_ADDRESS", "value": "ray:6379"} in container["env"]
    assert pod["terminationGracePeriodSeconds"] == 120
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]


def test_secrets_volumes_and_accounts_that_pods_name_are_there() -> None:
    made = re.findall(r"create secret (?:generic|docker-registry) (\S+) (.*)", HEADER)
    secrets = {name: set(re.findall(r"--from-literal=(\w+)=", keys)) for name, keys in made}
    for name, pod in pods():
        spec = pod["spec"]
        for container in spec["containers"]:
            for each in container.get("env", []):
                if reference := each.get("valueFrom", {}).get("secretKeyRef"):
                    assert reference["key"] in secrets[reference["name"]], (name, reference)
            assert all(each["secretRef"]["name"] in secrets for each in container.get("envFrom", [])), name
            assert "value" not in [k for each in container.get("env", []) if "AUTH_STRING" in each["name"] and not
                                   each["name"].startswith("PREFECT_INTEGRATIONS") for k in each], name  # fmt: skip
            mounts, volumes = container.get("volumeMounts", []), spec.get("volumes", [])
            known = {each["name"] for each in volumes} | ({"data"} if name.startswith("StatefulSet") else set())
            assert {each["name"] for each in mounts} <= known, name
        assert all(each["name"] in secrets for each in spec.get("imagePullSecrets", [])), name
        for volume in spec.get("volumes", []):
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in named("PersistentVolumeClaim"), name
            if "configMap" in volume:
                assert volume["configMap"]["name"] in named("ConfigMap"), name
        assert spec.get("serviceAccountName", "default") in named("ServiceAccount") | {"default"}, name
    for claim in (each for each in OBJECTS if each["kind"] == "PersistentVolumeClaim"):
        assert claim["spec"]["accessModes"] == ["ReadWriteMany"], "pods on several nodes"


def test_services_and_policies_select_pods_that_are_there_and_have_the_port() -> None:
    labels = [pod["metadata"].get("labels", {}) for _, pod in pods()]

    def matches(selector: dict[str, Any]) -> bool:
        wanted = selector.get("matchLabels", {}).items()
        exists = [each["key"] for each in selector.get("matchExpressions", [])]
        return any(wanted <= found.items() and all(key in found for key in exists) for found in labels)

    for each in OBJECTS:
        if each["kind"] == "Service":
            selector, [port] = {"matchLabels": each["spec"]["selector"]}, each["spec"]["ports"]
            assert matches(selector), each["metadata"]
            ports = [p for _, pod in pods() if selector["matchLabels"].items() <= pod["metadata"]["labels"].items()
                     for c in pod["spec"]["containers"] for p in c["ports"]]  # fmt: skip
            assert any(port.get("targetPort", port["port"]) in (p.get("name"), p["containerPort"]) for p in ports)
        if each["kind"] == "NetworkPolicy":
            peers = [
                peer["podSelector"]
                for rule in each["spec"]["ingress"]
                for peer in rule["from"]
                if "podSelector" in peer
            ]
            assert all(matches(selector) for selector in [each["spec"]["podSelector"], *peers]), each["metadata"]
        if each["kind"] in {"StatefulSet", "Deployment"}:
            assert (
                each["spec"]["selector"]["matchLabels"].items()
                <= each["spec"]["template"]["metadata"]["labels"].items()
            )
        if each["kind"] == "StatefulSet":
            assert each["spec"]["serviceName"] in named("Service")
    urls = re.findall(r"(?:http://|@)([a-z-]+):(\d+)", yaml.safe_dump_all(OBJECTS))
    services = {
        (each["metadata"]["name"], str(each["spec"]["ports"][0]["port"]))
        for each in OBJECTS
        if each["kind"] == "Service"
    }
    assert urls and set(urls) <= services


def test_every_pod_runs_as_the_user_of_the_image_and_from_one_image() -> None:
    image = KUSTOMIZATION["images"][0]
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version and image["newTag"] == version[1]
    wanted = f"{image['newName']}:{image['newTag']}"
    assert TEMPLATE["variables"]["properties"]["image"]["default"] == wanted
    for name, pod in pods():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"], name
        for container in spec["containers"]:
            is_ours = container["image"] in {image["name"], wanted}
            assert is_ours or container["image"] in {"postgres:17", "redis:7"}, container["image"]
            assert not is_ours or (spec["imagePullSecrets"] and container["imagePullPolicy"] == "IfNotPresent"), name
            asks = container["resources"]
            assert asks["requests"].keys() >= {"cpu", "memory"} and asks["limits"].keys() >= {"memory"}, name
            if "nvidia.com/gpu" in asks["limits"]:
                assert spec["tolerations"], name
    [quota] = [each for each in OBJECTS if each["kind"] == "ResourceQuota"]
    assert quota["spec"]["hard"].keys() >= {"requests.nvidia.com/gpu", "pods"}


# prefect-kubernetes 0.7.11: settings of its observer, which watches the whole cluster unless told, and of the worker
_OF_WORKER = "WORKER_API_AUTH_STRING_SECRET"
INTEGRATION = {
    f"PREFECT_INTEGRATIONS_KUBERNETES_{name}"
    for name in ("OBSERVER_NAMESPACES", f"{_OF_WORKER}_NAME", f"{_OF_WORKER}_KEY", "CLUSTER_UID")
}


def test_workers_serve_the_pools_with_the_credentials_of_the_server_in_their_namespace() -> None:
    settings = set(_get_settings_fields(Settings)) | INTEGRATION | {"PREFECT_HOME"}
    names = {each["name"] for _, pod in pods() for c in pod["spec"]["containers"] for each in c.get("env", [])}
    assert {name for name in names if name.startswith("PREFECT_")} <= settings
    [worker] = [
        each for each in OBJECTS if each["kind"] == "Deployment" and each["metadata"]["name"] == "cosmos-worker"
    ]
    containers = worker["spec"]["template"]["spec"]["containers"]
    assert sorted(c["command"][c["command"].index("--pool") + 1] for c in containers) == sorted(DEFAULT_POOLS)
    assert {" ".join(c["command"][:2]) for c in containers} == {"cosmos worker"}, "whose polling outlasts the server"
    for container in containers:
        env = {each["name"]: each for each in container["env"]}
        secret = env["PREFECT_API_AUTH_STRING"]["valueFrom"]["secretKeyRef"]
        named_so = [env[f"PREFECT_INTEGRATIONS_KUBERNETES_{_OF_WORKER}_{each}"]["value"] for each in ("NAME", "KEY")]
        assert [secret["name"], secret["key"]] == named_so
        assert env["PREFECT_INTEGRATIONS_KUBERNETES_OBSERVER_NAMESPACES"]["value"] == KUSTOMIZATION["namespace"]
    assert TEMPLATE["variables"]["properties"]["namespace"]["default"] == KUSTOMIZATION["namespace"]
    [role] = [each for each in OBJECTS if each["kind"] == "Role"]
    [binding] = [each for each in OBJECTS if each["kind"] == "RoleBinding"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert {subject["name"] for subject in binding["subjects"]} <= named("ServiceAccount")
    verbs = {resource: set(rule["verbs"]) for rule in role["rules"] for resource in rule["resources"]}
    assert verbs["jobs"] >= {"create", "delete", "watch"} and verbs["pods"] >= {"list", "watch"} and "pods/log" in verbs


def test_the_commands_of_the_bootstrap_job_are_those_of_the_image() -> None:
    [job] = [each for each in OBJECTS if each["metadata"]["name"] == "cosmos-bootstrap"]
    [container] = job["spec"]["template"]["spec"]["containers"]
    script, image = container["command"][-1], (DEPLOY / "Containerfile").read_text()
    template = re.search(r"template=(\S+)", script)
    assert template and (ROOT / template[1]).is_file() and "COPY deploy/kubernetes/base-job-template.json" in image
    assert " jq " in image and "WORKDIR /opt/cosmos-posttrain" in image
    assert "ln -s /runs /opt/cosmos-posttrain/outputs" in image, "what a recipe calls ./outputs is the volume"
    mounted = {
        mount["mountPath"]
        for _, pod in pods()
        for c in pod["spec"]["containers"]
        for mount in c.get("volumeMounts", [])
    }
    assert "/runs" in mounted
    for line in re.findall(r"cosmos bootstrap (.*)", script):
        pools = re.findall(r"--pool (\S+)", line)
        assert set(pools) <= set(DEFAULT_POOLS) and "--type kubernetes" in line
    assert set(re.findall(r"--pool (\S+)", script)) == set(DEFAULT_POOLS)
    assert any(command.callback and command.callback.__name__ == "bootstrap" for command in cli.app.registered_commands)


def test_the_reward_service_that_is_deployed_is_what_it_reads_and_each_pod_has_a_name() -> None:
    config = read_config(FOLDER / "rewards.toml")
    parts = list(yaml.safe_load_all((FOLDER / "reward-service.yaml").read_text()))
    ports = {part["metadata"]["name"]: part["spec"]["ports"][0]["port"] for part in parts if part["kind"] == "Service"}
    one, each = "reward-service", "reward-service-pods"
    assert ports == {one: config.port, each: config.port, config.redis_host: config.redis_port}
    stateful = next(part for part in parts if part["kind"] == "StatefulSet")["spec"]
    headless = [part["metadata"]["name"] for part in parts if part.get("spec", {}).get("clusterIP") == "None"]
    assert headless == [stateful["serviceName"]], "it names each pod"
    assert "annotations" not in stateful["template"]["metadata"], "/metrics cannot be scraped without the token"
    pod = stateful["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > config.drain_seconds
    assert config.token_env in {each["name"] for each in pod["containers"][0]["env"]}
    assert config.queue != "redis" or re.search(r"EXTRAS=.*redis", (DEPLOY / "Containerfile").read_text())


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl, which has kustomize, is not installed")
def test_kustomize_renders_it_with_the_namespace_and_the_images() -> None:
    done = subprocess.run(["kubectl", "kustomize", str(FOLDER)], capture_output=True, text=True, check=True)
    found = list(yaml.safe_load_all(done.stdout))
    assert len(found) == len(OBJECTS) + len(KUSTOMIZATION["configMapGenerator"])
    assert {each["metadata"].get("namespace", "cosmos") for each in found} == {KUSTOMIZATION["namespace"]}
    assert not any(wrong_with(each) for each in found if each["kind"] != "RayCluster")
    images = set(re.findall(r"image: (\S+)", done.stdout))
    assert images == {"cosmos-posttrain:0.1.0", "postgres:17", "redis:7"}
    [config] = [each["metadata"]["name"] for each in found if each["kind"] == "ConfigMap"]
    assert f"name: {config}\n" in done.stdout.partition("kind: StatefulSet")[2], "a new rewards.toml restarts the pod"
