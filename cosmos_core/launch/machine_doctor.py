"""Diagnose this machine, with remedies: Python, packages, GPUs, vLLM, compiler, memory, file locks, ports, disk."""

import fcntl
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from cosmos_core.launch.doctor import Diagnosis
from cosmos_core.machine_properties import MachineProperties, measure_machine
from cosmos_core.run.libraries import INFERENCE_ENGINE_LIBRARIES

_MIN_SHM_BYTES, _MIN_DISK_BYTES, _MIN_OPEN_FILES = 2**30, 20 * 2**30, 1024
_IMPORT_TIMEOUT_SECONDS = 120
_SHARED_MEMORY_FOLDER = Path("/dev/shm")
_TORCH_CUDA_SCRIPT = "import torch; print(torch.version.cuda or '', torch.cuda.is_available(), torch.__version__)"


def check_machine(output_dir: Path) -> Iterator[Diagnosis]:
    """Run all checks of this machine and yield their results; runs are written below `output_dir`."""
    machine = measure_machine(INFERENCE_ENGINE_LIBRARIES)
    yield Diagnosis("python", f"{sys.version.split()[0]} in {sys.prefix}")
    yield from check_packages(distribution("cosmos-posttrain").requires or ())
    yield from check_gpus(machine, _run_python_code(_TORCH_CUDA_SCRIPT) if machine.gpus else "")
    yield check_vllm(machine)
    compiler_problem = f"missing: {machine.lacks}; install it, or set train.compile = false" if machine.lacks else ""
    yield Diagnosis("compiler", compiler_problem or "torch.compile works", not compiler_problem)
    yield Diagnosis("memory", f"{psutil.virtual_memory().total / 2**30:.0f} GiB, {machine.threads} CPU threads")
    if _SHARED_MEMORY_FOLDER.is_dir():
        yield check_shared_memory(shutil.disk_usage(_SHARED_MEMORY_FOLDER).free)
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = "" if soft_limit >= _MIN_OPEN_FILES else f"; raise it with ulimit -n {hard_limit}"
    yield Diagnosis("open files", f"{soft_limit} per process{remedy}", soft_limit >= _MIN_OPEN_FILES)
    yield _check_loopback()
    existing_ancestor = next(folder for folder in (output_dir, *output_dir.parents) if folder.exists())
    yield check_file_locks(existing_ancestor)
    yield check_file_locks(Path(tempfile.gettempdir()), "TMPDIR")
    free_bytes = shutil.disk_usage(existing_ancestor).free
    has_enough_space = free_bytes >= _MIN_DISK_BYTES
    remedy = "" if has_enough_space else "; remove old runs with cosmos clean, or set pipeline.output_dir"
    yield Diagnosis("disk", f"{free_bytes / 2**30:.0f} GiB are free in {existing_ancestor}{remedy}", has_enough_space)


def check_packages(requirements: Iterable[str]) -> Iterator[Diagnosis]:
    """Compare installed packages with requirements (PEP 508); a missing package of an extra is no error."""
    package_problems, num_compatible_packages = [], 0
    for requirement in map(Requirement, requirements):
        is_optional_package = requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        name, version_specifier = requirement.name, requirement.specifier
        install_command = f"pip install '{name}{version_specifier}'"
        try:
            installed_version = version(name)
        except PackageNotFoundError:
            if not is_optional_package:
                package_problems.append(f"{name} is missing: {install_command}")
            continue
        num_compatible_packages += 1
        if not version_specifier.contains(installed_version, prereleases=True):
            package_problems.append(f"{name} {installed_version} is outside of {version_specifier}: {install_command}")
    message = "; ".join(dict.fromkeys(package_problems)) or f"{num_compatible_packages} fit their requirements"
    yield Diagnosis("packages", message, not package_problems)


def check_gpus(machine_properties: MachineProperties, torch_cuda_info: str) -> Iterator[Diagnosis]:
    """Report the GPUs, and whether torch can use them. `torch_cuda_info` holds the CUDA version of the torch build
    (missing in a CPU build), `True` or `False` for a usable GPU, and the version of torch, separated by spaces."""
    if not machine_properties.gpus:
        yield Diagnosis("GPU", "no NVIDIA GPU is visible: stages run on the CPU")
        return
    visible_gpus_text = f"{len(machine_properties.gpus)} visible: {machine_properties.device}"
    yield Diagnosis("GPU", f"{visible_gpus_text}; driver {_read_driver_version()}")
    if not torch_cuda_info:
        yield Diagnosis("torch", "it cannot be imported; install it again", is_healthy=False)
        return
    *cuda_versions, cuda_availability, torch_version = torch_cuda_info.split()
    if cuda_availability == "True":
        yield Diagnosis("torch", f"{torch_version} for CUDA {cuda_versions[0]} sees the GPUs")
        return
    driver_problem = f"is built for CUDA {cuda_versions[0]}, which the driver is too old for" if cuda_versions else ""
    torch_problem = driver_problem or "is a CPU build"
    torch_remedy = "update the driver, or install the build of torch for its CUDA version"
    yield Diagnosis("torch", f"{torch_version} {torch_problem}; {torch_remedy}", is_healthy=False)


def check_vllm(machine_properties: MachineProperties) -> Diagnosis:
    """Report whether vLLM can be imported; a machine with GPUs needs vLLM."""
    installed_version = next(iter(machine_properties.versions.values()), "")
    if not installed_version:
        message = "not installed: completions come from transformers; pip install 'cosmos-posttrain[vllm]'"
        return Diagnosis("vLLM", message, not machine_properties.gpus)
    import_error = _run_python_code("import vllm.engine.arg_utils", reads_stderr=True)
    import_status = f"cannot be imported: {import_error}" if import_error else "is imported"
    return Diagnosis("vLLM", f"{installed_version} {import_status}", not import_error)


def check_shared_memory(free_bytes: int) -> Diagnosis:
    """Report whether `free_bytes` bytes of shared memory are enough to pass weights to a rollout engine."""
    remedy = "" if free_bytes >= _MIN_SHM_BYTES else "; start the container with --shm-size=16g or --ipc=host"
    return Diagnosis("shared memory", f"{free_bytes / 2**30:.1f} GiB are free{remedy}", free_bytes >= _MIN_SHM_BYTES)


def check_file_locks(folder: Path, setting_name: str = "pipeline.output_dir") -> Diagnosis:
    """Report whether file locks work in `folder`, the value of the setting `setting_name`: a file that is open twice
    can be locked only once."""
    folder_remedy = f"set {setting_name} to a folder with locks, such as one on a local disk or NFS 4"
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".cosmos-lock-") as file, open(file.name) as reopened_file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                fcntl.flock(reopened_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return Diagnosis("file locks", f"they hold in {folder}")
            return Diagnosis("file locks", f"two processes get one lock in {folder}; {folder_remedy}", is_healthy=False)
    except OSError as error:
        return Diagnosis("file locks", f"{folder} has none: {error.strerror}; {folder_remedy}", is_healthy=False)


def _check_loopback() -> Diagnosis:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 5):
            return Diagnosis("ports", "a free port of 127.0.0.1 can be opened and reached")
    except OSError as error:
        loopback_remedy = "ranks and the Prefect server of a run need one; allow connections to 127.0.0.1"
        return Diagnosis("ports", f"no port of 127.0.0.1 can be used: {error}; {loopback_remedy}", is_healthy=False)


def _read_driver_version() -> str:
    import pynvml

    pynvml.nvmlInit()
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def _run_python_code(python_code: str, *, reads_stderr: bool = False) -> str:
    """Run Python code; return its output or, with `reads_stderr`, the last line of its error (empty: no error)."""
    command = [sys.executable, "-c", python_code]
    try:
        child_process = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no reply in {_IMPORT_TIMEOUT_SECONDS} s" if reads_stderr else ""
    if reads_stderr:
        return (child_process.stderr.strip().splitlines() or ["no message"])[-1] if child_process.returncode else ""
    return child_process.stdout.strip()
