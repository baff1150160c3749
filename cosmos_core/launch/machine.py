"""How fast a training is thought to be where it was never run: on this machine, or on a GPU named by `--on`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from cosmos_core.config.schema.pipeline import PipelineConfig
from cosmos_core.errors import ConfigError

# Dense matrix products in bfloat16, in TFLOP/s, and memory in GiB, by the makers' data sheets.
_CARDS = {
    "a100": (312.0, 80.0), "b200": (2250.0, 179.0), "gh200": (989.0, 95.0), "h100": (989.0, 80.0),
    "h20": (148.0, 96.0), "h200": (989.0, 140.0), "l4": (121.0, 22.5), "l40s": (362.0, 45.0), "mi300x": (1307.0, 192.0),
    "rtx4090": (165.0, 24.0),
}  # fmt: skip
_SHARE_OF_CARD = 0.4
_SHARE_OF_MEASURED = 0.5
"""A product of large matrices is measured; a train step spends about half of its time in products."""
_TERA, _GIB = 1e12, 2**30


@dataclass(frozen=True)
class Machine:
    """What a rank computes on."""

    name: str
    """As in "counted at 0.1 TFLOP/s on NAME"; empty: only `pipeline` says what it is like."""
    tflops: float
    """What a training keeps up."""
    memory: float | None
    """GiB of a GPU, or of the host where there is none; None: unknown."""
    is_shared: bool = False
    """All ranks share it: the CPU of this machine."""
    card: str = ""
    """The GPU that `--on` named."""

    @property
    def rate(self) -> str:
        """Return the rate as it is told."""
        per = "" if self.is_shared else " per GPU"
        return f"{self.tflops:.3g} TFLOP/s{per}{f' on {self.name}' if self.name else ''}"


def machine_of(config: PipelineConfig, on: str, estimates: Iterable[Any]) -> Machine | None:
    """Return what trainings are counted for: `on`, else what an estimate measured where it was made; what the pipeline
    says of its GPUs wins. None: nothing is known.

    Raises:
        ConfigError: `on` is no GPU that is known here.
    """
    machine = None
    if on:
        card = on.lower().replace("-", "").replace(" ", "")
        if card not in _CARDS:
            known = ", ".join(sorted(_CARDS))
            raise ConfigError(
                f"--on {on}: known are {known}; for another GPU set pipeline.gpu_tflops and pipeline.gpu_memory"
            )
        peak, room = _CARDS[card]
        machine = Machine(on, peak * _SHARE_OF_CARD, room, card=card)
    elif here := next((each["machine"] for each in estimates if isinstance(each, dict)), None):
        name, rate = f"this machine ({here['device']})", here["flops"] / _TERA * _SHARE_OF_MEASURED
        machine = Machine(name, rate, here["memory"] / _GIB, is_shared=here["is_cpu"])
    if config.gpu_tflops is not None:
        memory, card = (machine.memory, machine.card) if machine else (None, "")
        machine = Machine("", config.gpu_tflops, memory, card=card)
    if machine is None or config.gpu_memory is None:
        return machine
    return replace(machine, memory=config.gpu_memory)
