"""What a process finds where it runs: GPUs, CPU threads, versions of libraries; asked without importing any of them.

`measure` speaks of its own process, so a fact is taken where it holds: `python -m cosmos_core.facts` in the interpreter
of the workers, `cosmos_core.cluster.facts` on the machine of a Ray cluster, the worker in each of its ranks.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path
from typing import Any

from cosmos_core.errors import ConfigError, StageFailed

_ASK_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Facts:
    """One machine as one interpreter on it sees it."""

    host: str
    gpus: tuple[str, ...]
    """Model of each GPU that is visible; of a cluster, of each that it has."""
    threads: int
    """CPU threads that the process may use."""
    versions: dict[str, str]
    """Installed version of each library that was asked for and is there."""
    lacks: str = ""
    """What torch.compile needs and does not find there; empty: nothing."""

    @property
    def device(self) -> str:
        """Return the models of the GPUs, each once, or `cpu`."""
        return ", ".join(sorted(set(self.gpus))) or "cpu"


def measure(libraries: Sequence[str] = ()) -> Facts:
    """Return the facts of this process."""
    versions = {name: found for name in libraries if (found := _version(name))}
    gpus = tuple(name for name, _ in _visible_gpus())
    return Facts(platform.node(), gpus, len(os.sched_getaffinity(0)), versions, _compiler_lacks(has_gpus=bool(gpus)))


def _compiler_lacks(*, has_gpus: bool) -> str:
    """Return what is missing where kernels are compiled: by Triton, in C, on a GPU, by C++ on a CPU, with Python.h."""
    variable, names, language = ("CC", ("gcc", "clang"), "C") if has_gpus else ("CXX", ("g++", "clang++"), "C++")
    own = os.environ.get(variable, "").split()
    if not any(shutil.which(name) for name in own[:1] or names):
        return f"a {language} compiler ({' '.join(own) or names[0]} was not found)"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return "" if header.is_file() else f"Python's headers ({header} was not found)"


def facts_of_workers(libraries: Sequence[str] = (), python: str = "", *, is_group: bool = False) -> Facts:
    """Return the facts of the machine and interpreter that run the stages; asked once in the life of this process.

    `python` is their interpreter, empty: this one. A group of ranks runs on the Ray cluster of `RAY_ADDRESS` if set.

    Raises:
        ConfigError: the interpreter does not run.
        StageFailed: the cluster or the interpreter does not respond.
    """
    cluster = os.environ.get("RAY_ADDRESS", "") if is_group else ""
    return _facts(tuple(libraries), python, cluster, os.environ.get("CUDA_VISIBLE_DEVICES"))


@cache
def _facts(libraries: tuple[str, ...], python: str, cluster: str, visible: str | None) -> Facts:
    if not python and not cluster:
        return measure(libraries)
    program = "cosmos_core.cluster.facts" if cluster else "cosmos_core.facts"
    command = [python or sys.executable, "-m", program, *libraries]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_ASK_SECONDS)
        found = Facts(**json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError, TypeError) as error:
        if cluster:
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
            raise StageFailed(f"RAY_ADDRESS = {cluster!r}: the cluster does not say what it has: {said}") from error
        if isinstance(error, subprocess.TimeoutExpired):
            raise StageFailed(f"pipeline.python = {python!r}: no reply in {_ASK_SECONDS} s") from error
        raise ConfigError(f"pipeline.python = {python!r} does not run: {error}; name a Python interpreter") from error
    # A GPU is this machine's whichever interpreter asks, and another one may lack the library that asks.
    gpus = tuple(found.gpus) if cluster else tuple(name for name, _ in _visible_gpus())
    return replace(found, gpus=gpus)


def gpu_entries() -> dict[str, str]:
    """Return the entries of `CUDA_VISIBLE_DEVICES` that name the GPUs which this process sees, in their order, with the
    id of each, which no other GPU has."""
    found, hidden = _visible_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")
    entries = [str(i) for i in range(len(found))] if hidden is None else hidden.split(",")
    return {entry.strip(): uuid for entry, (_, uuid) in zip(entries, found, strict=False)}


def _visible_gpus() -> tuple[tuple[str, str], ...]:
    """Return model and id of each GPU that CUDA shows this process: those of the driver that are not hidden."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in {"", "-1"}:
        return ()
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver
        return ()
    try:
        cards = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        if hidden is not None:
            chosen = [_chosen(pynvml, cards, entry.strip()) for entry in hidden.split(",")]
            # CUDA shows nothing from the first on that is not there.
            cards = list(takewhile(lambda card: card is not None, chosen))
        return tuple((str(pynvml.nvmlDeviceGetName(card)), str(pynvml.nvmlDeviceGetUUID(card))) for card in cards)
    finally:
        pynvml.nvmlShutdown()


def _chosen(pynvml: Any, cards: Sequence[Any], entry: str) -> Any | None:
    """Return the GPU that an entry of CUDA_VISIBLE_DEVICES means: an index, the start of an id, or a part of a GPU."""
    if entry.isdigit():
        return cards[int(entry)] if int(entry) < len(cards) else None
    if entry.startswith("MIG-"):
        try:
            return pynvml.nvmlDeviceGetHandleByUUID(entry)
        except pynvml.NVMLError:
            return None
    found = [card for card in cards if entry and str(pynvml.nvmlDeviceGetUUID(card)).startswith(entry)]
    return found[0] if len(found) == 1 else None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(measure(sys.argv[1:]))) + "\n")
