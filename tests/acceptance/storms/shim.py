"""The switches of `shim.c`: one map of four numbers, shared by every process that was started with its variables."""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
import tempfile
from functools import cache
from pathlib import Path

_SOURCE = Path(__file__).with_suffix(".c")
_FIELDS = ("clock_offset_seconds", "is_full", "is_read_only", "num_refused")


def has_compiler() -> bool:
    """Whether the shim can be made here; without it a storm has no such faults."""
    return shutil.which("cc") is not None


@cache
def _library() -> Path:
    target = Path(tempfile.mkdtemp(prefix="cosmos-storm-shim-")) / "shim.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-w", str(_SOURCE), "-o", str(target), "-ldl"], check=True)
    return target


def remove_library() -> None:
    """Remove what was compiled."""
    if _library.cache_info().currsize:
        shutil.rmtree(_library().parent, ignore_errors=True)
        _library.cache_clear()


class Shim:
    """Three switches over all processes that have `environment` and over what they write below `folder`."""

    def __init__(self, control: Path, folder: Path) -> None:
        size = 8 * len(_FIELDS)
        control.write_bytes(bytes(size))
        with open(control, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)
        self.environment = {
            "LD_PRELOAD": str(_library()),
            "COSMOS_STORM_CONTROL": str(control),
            "COSMOS_STORM_FOLDER": f"{folder}/",
        }

    def get(self, field: str) -> int:
        """Return a switch, or the writes that were refused, `num_refused`."""
        return struct.unpack_from("q", self._map, 8 * _FIELDS.index(field))[0]

    def set(self, field: str, value: int) -> None:
        """Set `clock_offset_seconds`, `is_full` or `is_read_only` for all of them, at once."""
        position = 8 * _FIELDS.index(field)
        self._map[position : position + 8] = struct.pack("q", value)

    def calm(self) -> None:
        """Let there be room and leave to write again; the clock stays as it was set."""
        self.set("is_full", 0)
        self.set("is_read_only", 0)
