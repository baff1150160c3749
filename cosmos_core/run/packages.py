"""What the workers will find: packages of their interpreter, asked without importing them, and accelerators."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cosmos_core.errors import ConfigError

_PROGRAM = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def installed(names: Sequence[str], python: str = "") -> dict[str, str]:
    """The version of each that is there; `python` is an interpreter, empty: this one.

    Raises:
        ConfigError: that interpreter does not run.
    """
    if not python:
        return {name: found for name in names if (found := _version(name))}
    try:
        done = subprocess.run([python, "-c", _PROGRAM, *names], capture_output=True, text=True, check=True, timeout=60)
        versions: dict[str, str] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(f"pipeline.python = {python!r} does not run: {error}; name a Python interpreter") from error
    return versions


@cache
def device() -> str:
    """Type of the accelerators that are visible, without importing torch: the driver's own list."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in {"", "-1"}:
        return "cpu"
    cards = Path("/proc/driver/nvidia/gpus")
    models = set()
    if cards.is_dir():
        for card in cards.iterdir():
            lines = (card / "information").read_text(errors="replace").splitlines()
            models |= {line.split(":", 1)[1].strip() for line in lines if line.startswith("Model:")}
    return ", ".join(sorted(models)) or "cpu"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
