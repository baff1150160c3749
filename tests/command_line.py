"""The command in this process, for tests of what it says: a process that is started takes half a second."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cosmos_core.cli import main
from tests.conftest import Workspace


class InProcess(Workspace):
    """A workspace for commands that start nothing."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        super().__init__(path)
        self._patch, self._capsys = monkeypatch, capsys
        monkeypatch.chdir(path)
        monkeypatch.delenv("PREFECT_API_URL", raising=False)

    def cosmos(self, *arguments: str | bytes, code: int | None = 0, **_: Any) -> subprocess.CompletedProcess[str]:
        """Run the command to its end in the folder, and check its exit code."""
        words = [os.fsdecode(each) for each in arguments]
        self._patch.setattr(sys, "argv", ["cosmos", *words])
        with pytest.raises(SystemExit) as end:
            main()
        done = subprocess.CompletedProcess(words, int(end.value.code or 0), *self._capsys.readouterr())
        assert code is None or done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done
