"""Hardware and software of a machine: GPUs, CPU threads and versions of libraries, read without importing the
libraries.

`measure_machine` describes its own process, so it runs where the description is needed: `python -m
cosmos_core.machine_properties` in the interpreter of the workers, `cosmos_core.cluster.properties` on the machine of a
Ray cluster, the worker in each of its ranks.
"""

import json
import math
import os
import platform
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path
from typing import Any

from cosmos_core.errors import ConfigError, StageFailed

_MEASURE_TIMEOUT_SECONDS, _CONNECT_TIMEOUT_SECONDS = 120, 5.0


@dataclass(frozen=True, slots=True)
class MachineProperties:
    """Hardware and installed libraries of one machine, as one Python interpreter on it sees them."""

    host: str
    gpus: tuple[str, ...]
    """Model name of each visible GPU of the machine, or of each GPU in a cluster."""
    threads: int
    """Number of CPU threads that the process may use."""
    versions: dict[str, str]
    """Version of each library that was passed to `measure_machine` and is installed."""
    lacks: str = ""
    """Description of the missing requirement of torch.compile, such as a compiler; empty if nothing is missing."""

    @property
    def device(self) -> str:
        """Return the distinct model names of the GPUs, or `cpu` if there is no GPU."""
        return ", ".join(sorted(set(self.gpus))) or "cpu"


def count_usable_cores() -> int:
    """Return the number of CPU cores that this process may use: those to which it is bound, but not more than the CPU
    time that its container has, as with `docker run --cpus=2`, rounded up."""
    num_cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # ignore the quota `max`, which means that there is no limit
        cpu_quota_us, cpu_period_us = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        num_cores = min(num_cores, math.ceil(cpu_quota_us / cpu_period_us))
    return num_cores


def measure_machine(libraries: Sequence[str] = ()) -> MachineProperties:
    """Return the hardware of this machine and the versions of `libraries`, as this process sees them."""
    versions = {}
    for library in libraries:
        with suppress(PackageNotFoundError):
            if installed_version := version(library):  # the version is None if the metadata of a package are damaged
                versions[library] = installed_version
    gpus = tuple(gpu_name for gpu_name, _ in _list_visible_gpus())
    num_threads, missing_requirement = count_usable_cores(), _find_missing_compiler(has_gpus=bool(gpus))
    return MachineProperties(platform.node(), gpus, num_threads, versions, missing_requirement)


def _find_missing_compiler(*, has_gpus: bool) -> str:
    """Return a description of what is missing for compiling kernels: a C compiler for Triton on a GPU, a C++ compiler
    on a CPU, or Python.h; empty if nothing is missing."""
    compiler_variable, compilers, compiler_language = (
        ("CC", ("gcc", "clang"), "C") if has_gpus else ("CXX", ("g++", "clang++"), "C++")
    )
    compiler_command = os.environ.get(compiler_variable, "").split()
    if not any(shutil.which(name) for name in compiler_command[:1] or compilers):
        return f"a {compiler_language} compiler ({' '.join(compiler_command) or compilers[0]} was not found)"
    header_file = Path(sysconfig.get_path("include")) / "Python.h"
    return "" if header_file.is_file() else f"Python's headers ({header_file} was not found)"


def measure_worker_machine(
    libraries: Sequence[str] = (), python_path: str = "", *, may_use_ray: bool = False
) -> MachineProperties:
    """Return the hardware and libraries of the interpreter that runs the stages, measured once in the life of this
    process.

    `python_path` is the path of that interpreter; empty: the interpreter of this process. With `may_use_ray`, a task on
    the Ray cluster of `RAY_ADDRESS` measures the machine, if this variable is set, because the ranks of a training run
    there. Raises `ConfigError` if the interpreter does not run, `StageFailed` if it or the cluster does not respond.
    """
    ray_address = os.environ.get("RAY_ADDRESS", "") if may_use_ray else ""
    return _measure_machine(tuple(libraries), python_path, ray_address, os.environ.get("CUDA_VISIBLE_DEVICES"))


@cache
def _measure_machine(
    libraries: tuple[str, ...], python_path: str, ray_address: str, visible_devices: str | None
) -> MachineProperties:
    if not python_path and not ray_address:
        return measure_machine(libraries)
    measuring_module = "cosmos_core.cluster.properties" if ray_address else "cosmos_core.machine_properties"
    command = [python_path or sys.executable, "-m", measuring_module, *libraries]
    try:
        stdout = subprocess.check_output(command, stderr=subprocess.PIPE, text=True, timeout=_MEASURE_TIMEOUT_SECONDS)
        machine_properties = MachineProperties(**json.loads(stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError, TypeError) as error:
        if ray_address:
            error_lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
            connection_error = find_connection_error(ray_address)
            failure_text = (
                f"it is not reached: {connection_error}" if connection_error else f"no properties: {error_lines}"
            )
            raise StageFailed(f"RAY_ADDRESS = {ray_address!r}: {failure_text}") from error
        if isinstance(error, subprocess.TimeoutExpired):
            raise StageFailed(f"pipeline.python = {python_path!r}: no reply in {_MEASURE_TIMEOUT_SECONDS} s") from error
        failure_text = f"pipeline.python = {python_path!r} does not run: {error}"
        raise ConfigError(f"{failure_text}; name a Python interpreter") from error
    # Read the GPUs in this process: all interpreters see the same, and another interpreter may lack pynvml.
    gpus = tuple(machine_properties.gpus) if ray_address else tuple(name for name, _ in _list_visible_gpus())
    return replace(machine_properties, gpus=gpus)


def find_connection_error(host_and_port: str) -> str:
    """Return why an address `host:port` cannot be connected to; empty if it can, or the address has another form."""
    host, _, port = host_and_port.rpartition(":")
    if not host or "://" in host_and_port:
        return ""
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_SECONDS).close()
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def map_device_entries_to_uuids() -> dict[str, str]:
    """Return the UUID of each GPU that this process sees, by the entry of `CUDA_VISIBLE_DEVICES` that names the GPU, in
    the order of the entries."""
    gpus, visible_devices = _list_visible_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")
    device_entries = [str(i) for i in range(len(gpus))] if visible_devices is None else visible_devices.split(",")
    return {entry.strip(): uuid for entry, (_, uuid) in zip(device_entries, gpus, strict=False)}


def _list_visible_gpus() -> tuple[tuple[str, str], ...]:
    """Return the model name and UUID of each GPU that CUDA makes visible to this process; empty without an NVIDIA
    driver."""
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible_devices is not None and visible_devices.strip() in {"", "-1"}:
        return ()
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # raised if there is no NVIDIA driver
        return ()
    try:
        gpu_handles = [pynvml.nvmlDeviceGetHandleByIndex(gpu_index) for gpu_index in range(pynvml.nvmlDeviceGetCount())]
        if visible_devices is not None:
            visible_gpu_handles = [
                _find_gpu(pynvml, gpu_handles, entry.strip()) for entry in visible_devices.split(",")
            ]
            # CUDA ignores the first entry that does not exist and all entries after it.
            gpu_handles = list(takewhile(lambda gpu_handle: gpu_handle is not None, visible_gpu_handles))
        return tuple((str(pynvml.nvmlDeviceGetName(gpu)), str(pynvml.nvmlDeviceGetUUID(gpu))) for gpu in gpu_handles)
    finally:
        pynvml.nvmlShutdown()


def _find_gpu(pynvml: Any, gpu_handles: Sequence[Any], device_entry: str) -> Any | None:
    """Return the GPU that an entry of CUDA_VISIBLE_DEVICES names: by index, by the beginning of its UUID, or as a MIG
    device; None if there is no such GPU."""
    if device_entry.isdigit():
        return gpu_handles[int(device_entry)] if int(device_entry) < len(gpu_handles) else None
    if device_entry.startswith("MIG-"):
        try:
            return pynvml.nvmlDeviceGetHandleByUUID(device_entry)
        except pynvml.NVMLError:
            return None
    matching_gpu_handles = [
        each for each in gpu_handles if str(pynvml.nvmlDeviceGetUUID(each)).startswith(device_entry)
    ]
    return matching_gpu_handles[0] if device_entry and len(matching_gpu_handles) == 1 else None


@cache
def git_commit() -> str:
    """Return the commit hash of the git clone whose code this process runs; empty if the code is not in a clone."""
    if shutil.which("git") is None:
        return ""
    # With `HEAD:./FILE`, git fails unless the clone contains this file: a wheel may lie in another project's clone.
    git_command, module_file = ["git", "rev-parse", "HEAD", f"HEAD:./{Path(__file__).name}"], Path(__file__)
    git_process = subprocess.run(git_command, cwd=module_file.parent, capture_output=True, text=True, check=False)
    return git_process.stdout.split()[0] if git_process.returncode == 0 else ""


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(measure_machine(sys.argv[1:]))) + "\n")
