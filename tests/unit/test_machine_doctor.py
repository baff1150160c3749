"""`cosmos doctor` on machines that lack something: one line names it, with a remedy."""

from __future__ import annotations

import errno
import fcntl
import resource
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cosmos_core.cli import app
from cosmos_core.launch import machine_doctor
from cosmos_core.launch.doctor import Diagnosis
from cosmos_core.launch.machine_doctor import (
    check_file_locks,
    check_gpus,
    check_machine,
    check_packages,
    check_shared_memory,
    check_vllm,
)
from cosmos_core.machine_properties import MachineProperties

H100 = MachineProperties("host", ("NVIDIA H100", "NVIDIA H100"), 8, {})


@pytest.mark.usefixtures("executed")
def test_it_reports_every_property_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported/vllm/engine").mkdir(parents=True)  # in place of the real one, which takes fifteen seconds
    for name in ("__init__", "engine/__init__", "engine/arg_utils"):
        (tmp_path / f"imported/vllm/{name}.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "imported"))
    result = CliRunner().invoke(app, ["doctor", "--output-dir", str(tmp_path / "outputs")])
    names = [line[6:].partition(":")[0] for line in result.output.splitlines()]
    assert {"python", "packages", "GPU", "vLLM", "compiler", "memory", "open files", "ports", "file locks", "disk"} <= {
        *names
    }
    assert names.count("file locks") == 2, "of runs, and of temporary files"
    assert ("WRONG" in result.output) == (result.exit_code == 1)
    assert [path.name for path in tmp_path.iterdir()] == ["imported"]


@pytest.mark.parametrize(
    ("requirement", "message"),
    [
        ("torch>=99", f"torch {torch.__version__} is outside of >=99: pip install 'torch>=99'"),
        ("no-such-package>=1", "no-such-package is missing: pip install 'no-such-package>=1'"),
        ("no-such-package>=1; extra == 'other'", ""),
        ("torch>=99; extra == 'other'", f"torch {torch.__version__} is outside of >=99: pip install 'torch>=99'"),
    ],
)
def test_packages_that_do_not_fit_are_named_with_their_requirement(requirement: str, message: str) -> None:
    [finding] = check_packages(["pytest>=7", requirement])
    assert (finding.message, finding.is_healthy) == (message or "1 fit their requirements", not message)


@pytest.mark.parametrize(
    ("printed", "message"),
    [
        ("13.0 True 2.13.0", "2.13.0 for CUDA 13.0 sees the GPUs"),
        ("13.0 False 2.13.0", "2.13.0 is built for CUDA 13.0, which the driver is too old for; update the driver, or"),
        ("", "it cannot be imported"),
        (" False 2.13.0+cpu", "2.13.0+cpu is a CPU build; update the driver, or install the build of torch for its"),
    ],
)
def test_a_torch_that_cannot_use_the_gpus_is_wrong(printed: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = pytest.importorskip("pynvml")
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "580.1")
    gpus, torch_finding = check_gpus(H100, printed)
    assert gpus.message == "2 visible: NVIDIA H100; driver 580.1" and torch_finding.message.startswith(message)
    assert torch_finding.is_healthy == ("True" in printed)


def test_a_missing_vllm_is_wrong_where_there_are_gpus_alone() -> None:
    assert [check_vllm(facts).is_healthy for facts in (H100, MachineProperties("host", (), 8, {}))] == [False, True]


@pytest.mark.parametrize(("free", "is_ok"), [(64 * 2**20, False), (16 * 2**30, True)])
def test_the_shared_memory_of_a_plain_container_is_too_small(free: int, is_ok: bool) -> None:
    finding = check_shared_memory(free)
    assert finding.is_healthy == is_ok == ("--shm-size" not in finding.message)


@pytest.mark.parametrize("fault", ["two processes get one lock", "has none: No locks available"])
def test_a_folder_without_locks_is_wrong(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lock(*_: Any) -> None:
        if "none" in fault:
            raise OSError(errno.ENOLCK, "No locks available")

    assert check_file_locks(tmp_path).is_healthy
    monkeypatch.setattr(fcntl, "flock", lock)
    finding = check_file_locks(tmp_path)
    assert fault in finding.message and "pipeline.output_dir" in finding.message and not finding.is_healthy
    assert "set TMPDIR to a folder with locks" in check_file_locks(tmp_path, "TMPDIR").message


def test_few_open_files_and_a_closed_loopback_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> dict[str, bool]:
        return {each.name: each.is_healthy for each in check_machine(tmp_path) if each.name in ("ports", "open files")}

    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(machine_doctor, "check_vllm", lambda _: Diagnosis("vLLM", "not imported in this test"))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert found() == {"open files": True, "ports": True}
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1023, 4096))
    monkeypatch.setattr(socket, "create_server", refuse)
    assert found() == {"open files": False, "ports": False}
