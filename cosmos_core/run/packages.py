"""Which packages the workers' interpreter has, asked without importing them."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

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


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
