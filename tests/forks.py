"""A process that imports what is slow to import once, and runs each call in a child of its own, forked from it.

It runs nothing itself: torch cannot compute gradients in a child of a process that has computed some. Many short
trainings that must each be a process, because they are killed, start in a tenth of a second so.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

_REPOSITORY = Path(__file__).parents[1]


class Forks:
    """A context manager; `call` runs `module.function(*arguments)` in a child and waits for it."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __enter__(self) -> Forks:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.forks", self._module], cwd=_REPOSITORY, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()  # at which it ends
        self._server.wait(60)
        assert self._server.stdout is not None
        self._server.stdout.close()

    def call(self, function: str, *arguments: Any, log: Path) -> int:
        """Return the exit code of the child, negative where a signal ended it; what it says goes to `log`."""
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps([function, arguments, str(log)]) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        assert answer, "the process that forks is gone"
        return int(answer)


def main() -> None:
    """Answer calls until the other side closes the pipe."""
    module = importlib.import_module(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no answer
    for line in sys.stdin:
        function, arguments, log = json.loads(line)
        if (child := os.fork()) == 0:
            _run(getattr(module, function), arguments, log)
        _, status = os.waitpid(child, 0)
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n")
        answers.flush()


def _run(function: Any, arguments: list[Any], log: str) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 1
    try:
        code = int(function(*arguments) or 0)
    except BaseException:  # noqa: BLE001 - the edge of the process
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
