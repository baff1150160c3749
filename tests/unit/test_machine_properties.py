"""Facts of the machine that executes: which GPUs CUDA would show, what another interpreter has, asked once."""

from __future__ import annotations

import importlib.util
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cosmos_core import machine_properties
from cosmos_core.cluster.properties import collect_cluster_properties, get_rank_environment, wrap_with_environment
from cosmos_core.errors import ConfigError, StageFailed
from cosmos_core.launch import worker
from cosmos_core.machine_properties import MachineProperties, measure_machine, measure_worker_machine
from cosmos_core.run.digests import DigestCache
from cosmos_core.run.fingerprint import compute_fingerprint
from tasks.kinds import all_kinds
from tests.unit.run_folder import load_recipe, make_inputs


class FakeNvml:
    """The driver's library on a machine with these GPUs; the card N has the id GPU-NNN..."""

    class NVMLError(Exception):
        """What the library raises."""

    def __init__(self, names: list[str], *, has_driver: bool = True) -> None:
        self.names, self.has_driver, self.num_open = names, has_driver, 0

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise self.NVMLError
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self.num_open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid != "MIG-77":
            raise self.NVMLError
        return 0

    def nvmlDeviceGetName(self, gpu_type: int) -> str:
        return self.names[gpu_type]

    def nvmlDeviceGetUUID(self, gpu_type: int) -> str:
        return f"GPU-{str(gpu_type) * 8}"


@contextmanager
def machine_with(
    names: Sequence[str], monkeypatch: pytest.MonkeyPatch, visible: str | None = None, *, has_driver: bool = True
) -> Iterator[FakeNvml]:
    """Inside, this process is on a machine with these GPUs, and has not asked for them before."""
    machine_properties._measure_machine.cache_clear()
    nvml: Any = FakeNvml(list(names), has_driver=has_driver)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pynvml", nvml)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            patch.setenv("CUDA_VISIBLE_DEVICES", visible)
        yield nvml
    machine_properties._measure_machine.cache_clear()


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        (None, ("A100", "H100", "H100")),
        ("", ()),
        ("-1", ()),
        ("2,0", ("H100", "A100")),
        ("1,7,2", ("H100",)),
        ("GPU-1111", ("H100",)),
        ("GPU-11111111,0", ("H100", "A100")),
        ("GPU-9", ()),
        ("MIG-77", ("A100",)),
        ("MIG-78", ()),
    ],
)
def test_the_gpus_are_those_that_cuda_shows_in_its_order(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, gpus: tuple[str, ...]
) -> None:
    with machine_with(["A100", "H100", "H100"], monkeypatch, visible) as nvml:
        assert measure_machine().gpus == gpus
    assert nvml.num_open == 0


@pytest.mark.parametrize(
    ("names", "has_driver", "device"),
    [(["H100", "A100", "H100"], True, "A100, H100"), ([], True, "cpu"), (["H100"], False, "cpu")],
)
def test_the_device_names_each_model_once_and_is_cpu_without_one(
    monkeypatch: pytest.MonkeyPatch, names: list[str], has_driver: bool, device: str
) -> None:
    with machine_with(names, monkeypatch, has_driver=has_driver):
        assert measure_machine().device == device
        monkeypatch.setitem(sys.modules, "pynvml", None)
        assert measure_machine().device == "cpu", "without the package"


def test_the_versions_are_those_of_the_interpreter_that_is_asked(tmp_path: Path) -> None:
    assert measure_machine(["pydantic", "nothing-of-the-kind"]).versions == {"pydantic": version("pydantic")}
    other = tmp_path / "python"
    lines = ("import importlib.metadata as m, runpy, sys", "m.version = lambda name: '9.9'", "sys.argv = sys.argv[2:]",
             "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)")  # fmt: skip
    (tmp_path / "program.py").write_text("\n".join(lines))
    other.write_text(f'#!/bin/sh\necho one >> {tmp_path}/asked\nexec {sys.executable} {tmp_path}/program.py "$@"\n')
    other.chmod(0o755)
    for _ in range(3):
        assert measure_worker_machine(["pydantic"], str(other)).versions == {"pydantic": "9.9"}
    assert (tmp_path / "asked").read_text() == "one\n", "an interpreter is started once, not for every stage"
    assert measure_worker_machine(["pydantic"]).versions == {"pydantic": version("pydantic")}


def test_an_interpreter_that_does_not_run_is_told_in_one_line() -> None:
    with pytest.raises(
        ConfigError, match=r"^pipeline\.python = '/no/python' does not run: .*; name a Python"
    ) as caught:
        measure_worker_machine(python_path="/no/python")
    assert "\n" not in str(caught.value)


def test_a_fingerprint_is_made_of_the_gpus_of_the_machine_that_runs_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_inputs(tmp_path)
    pipeline = load_recipe(tmp_path)

    def device(*names: str) -> Any:
        with machine_with(names, monkeypatch):
            kind, digests = all_kinds()["sft"], DigestCache(tmp_path / "digests.json")
            found = compute_fingerprint(pipeline, pipeline.stage("sft"), kind, {"prepare": "d"}, digests)
        return found.ingredients["device"]

    assert [device(), device("H100"), device("H100", "H100")] == ["cpu", "H100", "H100"]


def test_ranks_of_a_cluster_see_what_a_worker_sets_for_its_stage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    set_for_stage = worker._build_environment(worker.AttemptSettings(tmp_path / "run" / "stages" / "sft"))
    users = {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth0", "VLLM_BATCH_INVARIANT": "1", "WANDB_API_KEY": "secret"}
    users["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.1")  # of this machine
    assert set_for_stage["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID", "the order in which NVML lists the GPUs"
    for name, value in {**set_for_stage, **users}.items():
        monkeypatch.setenv(name, value)
    found = get_rank_environment()
    not_theirs = {"PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING", worker.LOCK_DESCRIPTORS_VARIABLE}
    assert found.keys() >= (set_for_stage.keys() | users.keys()) - not_theirs - {"WANDB_API_KEY"}
    assert not found.keys() & (not_theirs | {"WANDB_API_KEY", "VLLM_HOST_IP"})
    assert found["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_a_rank_of_a_cluster_has_its_variables_before_it_imports_what_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As huggingface_hub reads HF_ENDPOINT and HF_HUB_CACHE once, when it is imported."""
    (tmp_path / "reads_at_import.py").write_text(
        "import os\nENDPOINT = os.environ.get('HF_ENDPOINT')\ndef tell(word):\n    return f'{word} {ENDPOINT}'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    function = wrap_with_environment({"HF_ENDPOINT": "http://mirror"}, importlib.import_module("reads_at_import").tell)
    program = "import pickle, sys\nprint(pickle.load(sys.stdin.buffer)('at'))"
    environment = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    command = [sys.executable, "-c", program]
    assert subprocess.check_output(command, input=pickle.dumps(function), env=environment) == b"at http://mirror\n"


def test_a_cluster_that_is_not_reached_is_told_from_one_that_does_not_respond(monkeypatch: pytest.MonkeyPatch) -> None:
    def expire(command: list[str], **settings: Any) -> str:
        raise subprocess.TimeoutExpired(command, 120)

    monkeypatch.setattr(machine_properties.subprocess, "check_output", expire)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(StageFailed, match=f"^RAY_ADDRESS = '{address}': no properties: .*timed out after 120"):
            measure_worker_machine(may_use_ray=True)
    with pytest.raises(StageFailed, match=f"^RAY_ADDRESS = '{address}': it is not reached: .*Connection refused"):
        measure_worker_machine(may_use_ray=True)


def test_a_cluster_whose_gpus_are_all_taken_says_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray makes a call wait for the CPUs and GPUs that it takes."""
    taken: list[dict[str, Any]] = []

    def remote(**resources: Any) -> Any:
        taken.append(resources)
        return lambda function: SimpleNamespace(remote=lambda names: MachineProperties("n", ("H100",) * 8, 96, {}))

    gpus = {"GPU": 8.0}
    nodes = [
        {"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 96.0}},
        {"Alive": False, "NodeManagerAddress": "10.0.0.2", "Resources": {"CPU": 96.0, **gpus}},
        {"Alive": True, "NodeManagerAddress": "10.0.0.3", "Resources": {"CPU": 96.0, **gpus}},
    ]
    ray = SimpleNamespace(
        init=lambda **_: None, shutdown=lambda: None, cluster_resources=lambda: {"CPU": 192.0, **gpus},
        nodes=lambda: nodes, remote=remote, get=lambda reply: reply,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert collect_cluster_properties(["torch"]).gpus == ("H100",) * 8
    assert taken == [{"num_cpus": 0, "resources": {"node:10.0.0.3": 0.001}}], "of the live machine that has GPUs"


@pytest.mark.parametrize(
    ("quota", "num_cores"),
    [("150000 100000", 2), ("50000 100000", 1), ("900000 100000", 4), ("max 100000", 4), ("", 4)],
)
def test_a_container_uses_no_more_cores_than_its_quota_of_cpu_time(
    monkeypatch: pytest.MonkeyPatch, quota: str, num_cores: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(Path, "read_text", lambda path: {"/sys/fs/cgroup/cpu.max": quota}[str(path)])
    assert measure_machine().threads == num_cores


def test_code_in_the_repository_of_somebody_else_has_no_commit(tmp_path: Path) -> None:
    """As a wheel has that is installed into the `.venv` of a project."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    copy = tmp_path / ".venv" / "properties.py"
    copy.parent.mkdir()
    copy.write_bytes(Path(str(machine_properties.__file__)).read_bytes())
    (tmp_path / ".gitignore").write_text(".venv\n")
    for arguments in (["init", "-q"], ["add", ".gitignore"], ["commit", "-qm", "theirs"]):
        subprocess.run([*git, *arguments], check=True)
    specification = importlib.util.spec_from_file_location("copied_properties", copy)
    assert specification is not None and specification.loader is not None
    module = sys.modules["copied_properties"] = importlib.util.module_from_spec(specification)
    try:
        specification.loader.exec_module(module)
        assert module.git_commit() == ""
        subprocess.run([*git, "add", "-f", str(copy)], check=True)
        subprocess.run([*git, "commit", "-qm", "a copy of the code"], check=True)
        module.git_commit.cache_clear()
        head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
        assert module.git_commit() == head.strip()
    finally:
        del sys.modules["copied_properties"]
