"""What lies in `deploy/`: it renders to manifests that Kubernetes knows, and what it runs exists."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.utilities.templating import apply_values

from cosmos_core.launch.bootstrap import POOLS
from cosmos_core.rewards.service.config import read_config

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
TEMPLATE = DEPLOY / "kubernetes" / "base-job-template.json"


def rendered(**given: Any) -> dict[str, Any]:
    """The job that a worker of Prefect makes of the template: its own rendering, with the defaults of the variables."""
    template = json.loads(TEMPLATE.read_text())
    defaults = {k: v["default"] for k, v in template["variables"]["properties"].items() if "default" in v}
    found: dict[str, Any] = apply_values(template["job_configuration"], defaults | given)
    return found


def test_prefect_takes_the_template_and_it_has_no_variable_that_is_not_used() -> None:
    template = json.loads(TEMPLATE.read_text())
    WorkPoolCreate(name="gpu", type="kubernetes", base_job_template=template)
    Draft202012Validator.check_schema(template["variables"])
    used = set(re.findall(r"\{\{ (\w+) \}\}", json.dumps(template["job_configuration"])))
    assert used == set(template["variables"]["properties"])
    assert all(len(each["description"]) > 5 for each in template["variables"]["properties"].values())


def test_a_job_asks_for_its_gpus_and_is_never_started_twice_by_kubernetes() -> None:
    job = rendered(name="sft", gpus=4, labels={"team": "x"}, ray_address="ray:6379")["job_manifest"]
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert job["spec"]["backoffLimit"] == 0, "Prefect decides about retries"
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": 4}
    assert container["env"] == [{"name": "RAY_ADDRESS", "value": "ray:6379"}]
    assert pod["terminationGracePeriodSeconds"] == 120
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "cosmos-runs"
    names = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == names
    assert "{{" not in json.dumps(job)


@pytest.mark.parametrize("file", ["worker.yaml", "raycluster.yaml"])
def test_every_manifest_has_a_kind_a_version_and_a_name(file: str) -> None:
    for manifest in yaml.safe_load_all((DEPLOY / "kubernetes" / file).read_text()):
        assert manifest["apiVersion"] and manifest["kind"] and manifest["metadata"]["name"]


def test_the_worker_serves_a_pool_of_ours_with_the_volume_of_its_jobs() -> None:
    manifests = {m["kind"]: m for m in yaml.safe_load_all((DEPLOY / "kubernetes" / "worker.yaml").read_text())}
    command = manifests["Deployment"]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[command.index("--pool") + 1] in POOLS
    claim = manifests["PersistentVolumeClaim"]
    assert claim["metadata"]["name"] == "cosmos-runs" and claim["spec"]["accessModes"] == ["ReadWriteMany"]
    ray = yaml.safe_load((DEPLOY / "kubernetes" / "raycluster.yaml").read_text())
    pods = [ray["spec"]["headGroupSpec"], *ray["spec"]["workerGroupSpecs"]]
    images = {pod["template"]["spec"]["containers"][0]["image"] for pod in pods}
    assert images == {json.loads(TEMPLATE.read_text())["variables"]["properties"]["image"]["default"]}


SCHEMA = json.loads(Path(__file__).with_name("kubernetes.json").read_text())
GROUPS = {"v1": "core", "batch/v1": "batch", "apps/v1": "apps", "rbac.authorization.k8s.io/v1": "rbac",
          "networking.k8s.io/v1": "networking"}  # fmt: skip


def wrong_with(manifest: dict[str, Any], definition: str = "") -> list[str]:
    """What the API of Kubernetes would say of a manifest; it refuses keys that it does not know."""
    group = GROUPS[manifest["apiVersion"]] if not definition else ""
    name = definition or f"io.k8s.api.{group}.v1.{manifest['kind']}"
    validator = Draft202012Validator({"$defs": SCHEMA["$defs"], "$ref": f"#/$defs/{name}"})
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(manifest)]


def test_every_manifest_fits_the_schema_of_kubernetes() -> None:
    job = rendered(name="sft", gpus=4, labels={"team": "x"}, ray_address="ray:6379")["job_manifest"]
    manifests = [job]
    for file in ("kubernetes/worker.yaml", "reward-service.yaml"):
        manifests += list(yaml.safe_load_all((DEPLOY / file).read_text()))
    assert len(manifests) >= 8
    assert {f"{each['kind']} {each['metadata'].get('name')}": wrong_with(each) for each in manifests} == {
        f"{each['kind']} {each['metadata'].get('name')}": [] for each in manifests
    }
    pod = job["spec"]["template"]["spec"]
    pod["containers"][0]["volumeMount"] = pod["containers"][0].pop("volumeMounts")
    assert any("'volumeMount' was unexpected" in line for line in wrong_with(job)), "the schema is strict"


# https://docs.ray.io/en/latest/cluster/kubernetes/user-guides/config.html: keys of a RayCluster that we may write
RAY = {
    "spec": {"headGroupSpec", "workerGroupSpecs", "rayVersion", "enableInTreeAutoscaling", "autoscalerOptions",
             "suspend"},
    "group": {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template", "numOfHosts",
              "idleTimeoutSeconds", "suspend", "serviceType"},
}  # fmt: skip


def test_the_ray_cluster_has_known_keys_and_pods_that_kubernetes_takes() -> None:
    ray = yaml.safe_load((DEPLOY / "kubernetes" / "raycluster.yaml").read_text())
    assert (ray["apiVersion"], ray["kind"]) == ("ray.io/v1", "RayCluster")
    assert ray["spec"].keys() <= RAY["spec"]
    for group in [ray["spec"]["headGroupSpec"], *ray["spec"]["workerGroupSpecs"]]:
        assert group.keys() <= RAY["group"]
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        assert wrong_with(group["template"], "io.k8s.api.core.v1.PodTemplateSpec") == []


SBATCH = {  # options that the script may set, with the values that sbatch takes
    "job-name": r"[\w.-]+", "ntasks-per-node": r"[1-9]\d*", "exclusive": None, "requeue": None,
    "signal": r"([RB]{1,2}:)?(TERM|USR1|USR2|INT|\d+)(@\d+)?", "output": r"[\w./-]*(%[jxAaNn][\w./-]*)*",
    "nodes": r"\d+(-\d+)?", "gpus-per-node": r"([a-z]\w*:)?\d+", "time": r"(\d+-)?\d+(:\d\d){0,2}",
}  # fmt: skip


def test_the_options_of_the_slurm_script_are_those_of_sbatch_and_stand_before_its_first_command() -> None:
    lines = (DEPLOY / "slurm" / "worker.sbatch").read_text().splitlines()
    assert lines[0].startswith("#!")
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    options = [line for line in lines if line.startswith("#SBATCH")]
    assert options and options == [line for line in lines[:first] if line.startswith("#SBATCH")]
    given = [re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", line) for line in options]
    assert all(given), options
    for name, value in (match.groups() for match in given if match):
        form = SBATCH[name]
        assert value is None if form is None else re.fullmatch(form, value or ""), (name, value)
    example = next(line for line in lines if line.startswith("#   sbatch "))
    for name, value in re.findall(r"--([a-z-]+)=(\S+)", example):
        assert name == "export" or re.fullmatch(SBATCH[name] or "", value), (name, value)


SRUN = '#!/usr/bin/env bash\necho "srun $*" >> "$CALLS"; sleep 30 & trap "kill $!" TERM; wait\n'
# The worker stays until every node has been asked for, however slowly the machine starts what is in the background.
PREFECT = """#!/usr/bin/env bash
echo "prefect $* ray=${RAY_ADDRESS:-}" >> "$CALLS"
(( 16#$(awk '/SigIgn/ {print $2}' /proc/self/status) & 2 )) && echo "SIGINT is ignored" >> "$CALLS"
[ "$SLURM_JOB_NUM_NODES" = 1 ] || until [ "$(grep -c ^srun "$CALLS")" = 2 ]; do /bin/sleep 0.1; done
"""


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_slurm_script_starts_a_worker_and_over_several_nodes_a_ray_cluster(nodes: int, tmp_path: Path) -> None:
    script = DEPLOY / "slurm" / "worker.sbatch"
    programs = {"srun": SRUN, "prefect": PREFECT, "scontrol": "#!/usr/bin/env bash\nprintf 'n1\\nn2\\n'\n",
                "sleep": '#!/usr/bin/env bash\n[ "$1" = 10 ] || exec /bin/sleep "$1"\n'}  # fmt: skip
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CALLS": str(calls), "PREFECT_API_URL": "http://x/api",
                   "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_NODELIST": "n[1-2]"}  # fmt: skip
    subprocess.run(["bash", str(script)], env=environment, check=True, timeout=120)
    lines = sorted(calls.read_text().splitlines())
    address = "n1:6379" if nodes > 1 else ""
    assert lines[0] == f"prefect worker start --pool gpu --type process --limit 1 ray={address}"
    assert len(lines) == (3 if nodes > 1 else 1)
    if nodes > 1:
        assert any("--nodelist=n1 ray start --head --port=6379" in line for line in lines)
        assert any("--exclude=n1 ray start --address=n1:6379" in line for line in lines)
    del environment["PREFECT_API_URL"]
    refused = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, timeout=120)
    assert refused.returncode != 0 and "set PREFECT_API_URL" in refused.stderr


def test_the_image_copies_what_is_there_and_has_no_secret() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    for line in re.findall(r"^COPY (.+) \S+$", text, re.M):
        assert all((ROOT / name).exists() for name in line.split()), line
    assert not re.search(r"(TOKEN|SECRET|PASSWORD|ACCESS_KEY)\s*=", text)
    assert "USER cosmos" in text


def test_the_reward_service_that_is_deployed_is_what_it_reads_and_each_pod_has_a_name() -> None:
    config = read_config(DEPLOY / "rewards.toml")
    parts = list(yaml.safe_load_all((DEPLOY / "reward-service.yaml").read_text()))
    ports = {part["metadata"]["name"]: part["spec"]["ports"][0]["port"] for part in parts if part["kind"] == "Service"}
    one, each = "reward-service", "reward-service-pods"
    assert ports == {one: config.port, each: config.port, config.redis_host: config.redis_port}
    stateful = next(part for part in parts if part["kind"] == "StatefulSet")["spec"]
    headless = [part["metadata"]["name"] for part in parts if part["spec"].get("clusterIP") == "None"]
    assert headless == [stateful["serviceName"]], "it names each pod"
    assert "annotations" not in stateful["template"]["metadata"], "/metrics cannot be scraped without the token"
    pod = stateful["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > config.drain_seconds
    assert config.token_env in {each["name"] for each in pod["containers"][0]["env"]}
