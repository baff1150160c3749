"""A process that becomes the Prefect server of a run: it imports libraries while the configuration is still read."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from cosmos_core.launch.child import Child

GRACE_SECONDS = 3.0


class Standby:
    """Waits to be told what to serve; `launch.prefect` is its program."""

    def __init__(self) -> None:
        reader, self._writer = os.pipe()
        command = [sys.executable, "-m", "cosmos_core.launch.prefect", "server", "start", "--told-by", str(reader)]
        try:
            self._child: Child | None = Child(
                command, log=Path(os.devnull), grace_seconds=GRACE_SECONDS, environment={}, inherit=(reader,)
            )
        finally:
            os.close(reader)

    def become(self, arguments: Sequence[str], *, log: Path, environment: Mapping[str, str]) -> Child | None:
        """Let it run Prefect's command line with these arguments; the child is the caller's from here on. None: it has
        ended, or has become something before."""
        child = self._child
        if child is None or child.poll() is not None:
            return None
        # Prefect reads its settings when it is first imported, and this process may have set some since.
        settings = {name: value for name, value in os.environ.items() if name.startswith("PREFECT_")}
        told = {"arguments": list(arguments), "log": str(log.absolute()), "environment": {**settings, **environment}}
        try:
            os.write(self._writer, json.dumps(told).encode())  # far less than what a pipe holds
        except BrokenPipeError:
            return None
        self._child = None
        self._let_go()
        return child

    def close(self) -> None:
        """End it, unless it has become something."""
        if self._child is not None:
            self._child.kill()
        self._let_go()

    def _let_go(self) -> None:
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1


@contextmanager
def standby() -> Iterator[Standby | None]:
    """Start one, and end it after the block if nobody needed it; None where a server is named already."""
    waiting = None if os.environ.get("PREFECT_API_URL") else Standby()
    try:
        yield waiting
    finally:
        if waiting is not None:
            waiting.close()
