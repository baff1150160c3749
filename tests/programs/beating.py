"""A program of a stage that reports one heartbeat, and ends when somebody writes to a pipe."""

from __future__ import annotations

from pathlib import Path

from cosmos_core.run.progress import ProgressWriter


def beat_until_released(folder: Path, scratch: Path) -> str:
    """Return what is written to `folder/pipe`; the heartbeat is in `scratch`."""
    scratch.mkdir()
    ProgressWriter(scratch / "progress.json")
    return (folder / "pipe").read_text()
