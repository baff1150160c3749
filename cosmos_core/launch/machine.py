"""Compute rate and memory of the machine for which costs are estimated: this machine, or that of `cosmos plan --on`."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from cosmos_core.config.schema.pipeline import PipelineConfig
from cosmos_core.errors import ConfigError

# Rate of dense matrix products in bfloat16 (TFLOP/s) and memory (GiB) by type of GPU, from the vendors' data sheets.
_GPU_SPECS = {
    "a100": (312.0, 80.0), "b200": (2250.0, 179.0), "gh200": (989.0, 95.0), "h100": (989.0, 80.0),
    "h20": (148.0, 96.0), "h200": (989.0, 140.0), "l4": (121.0, 22.5), "l40s": (362.0, 45.0), "mi300x": (1307.0, 192.0),
    "rtx4090": (165.0, 24.0),
}  # fmt: skip
_UTILIZATION_OF_PEAK_RATE = 0.4
_UTILIZATION_OF_MEASURED_RATE = 0.5  # fraction of the measured rate of large matrix products that a training reaches
FLOPS_PER_TFLOP, BYTES_PER_GIB = 1e12, 2**30


@dataclass(frozen=True)
class MachineSpec:
    """Compute rate and memory per rank of the machine for which costs are estimated."""

    name: str
    """Name of the machine, as in the text "counted at 0.1 TFLOP/s on NAME"; empty if the pipeline sets the rate."""
    tflops: float
    """Rate in TFLOP/s that a training sustains on one rank."""
    memory_gib: float | None
    """Memory of a GPU, or of the host if there is no GPU, in GiB; None: unknown."""
    is_device_shared: bool = False
    """True if all ranks share one device, the CPU of this machine."""
    gpu_type: str = ""
    """Type of GPU that `--on` names, in lower case; empty if `--on` is not used."""


def find_machine_spec(config: PipelineConfig, gpu_name: str, stage_estimates: Iterable[Any]) -> MachineSpec | None:
    """Return the machine for which costs are estimated: the GPU type `gpu_name` or, if it is empty, the machine
    measured with the estimates. Settings of the pipeline take precedence. Return None if no rate is known. Raises
    `ConfigError` if `gpu_name` is not a known type of GPU."""
    machine = None
    if gpu_name:
        gpu_type = gpu_name.lower().replace("-", "").replace(" ", "")
        if gpu_type not in _GPU_SPECS:
            remedy_text = "for another GPU set pipeline.gpu_tflops and pipeline.gpu_memory"
            raise ConfigError(f"--on {gpu_name}: known are {', '.join(sorted(_GPU_SPECS))}; {remedy_text}")
        peak_tflops, memory_gib = _GPU_SPECS[gpu_type]
        machine = MachineSpec(gpu_name, peak_tflops * _UTILIZATION_OF_PEAK_RATE, memory_gib, gpu_type=gpu_type)
    elif device_info := next((estimate["machine"] for estimate in stage_estimates if isinstance(estimate, dict)), None):
        machine_name, memory_gib = f"this machine ({device_info['device']})", device_info["memory"] / BYTES_PER_GIB
        tflops = device_info["flops"] / FLOPS_PER_TFLOP * _UTILIZATION_OF_MEASURED_RATE
        machine = MachineSpec(machine_name, tflops, memory_gib, is_device_shared=device_info["is_cpu"])
    if config.gpu_tflops is not None:
        machine_memory_gib, gpu_type = (machine.memory_gib, machine.gpu_type) if machine else (None, "")
        machine = MachineSpec("", config.gpu_tflops, machine_memory_gib, gpu_type=gpu_type)
    return replace(machine, memory_gib=config.gpu_memory) if machine and config.gpu_memory is not None else machine
