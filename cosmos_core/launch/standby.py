"""Standby process for the Prefect server of a run: it imports libraries while the configuration is still being read."""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from cosmos_core.launch.child import Child

GRACE_SECONDS = 3.0


class Standby:
    """Standby process that waits for the command line of a Prefect server; its program is `launch.prefect`."""

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
        """Let the standby process run Prefect's command line with these arguments; return it to the caller, who then
        owns it.

        Return None if the process has ended or was already used.
        """
        child = self._child
        if child is None or child.poll() is not None:
            return None
        # Prefect reads its settings at import, and this process may have changed them since the standby started.
        settings = {name: value for name, value in os.environ.items() if name.startswith("PREFECT_")}
        orders = {"arguments": list(arguments), "log": str(log.absolute()), "environment": {**settings, **environment}}
        try:
            # Never blocks: the text is shorter than the capacity of a pipe.
            os.write(self._writer, json.dumps(orders).encode())
        except BrokenPipeError:
            return None
        self._child = None
        self._let_go()
        return child

    def close(self) -> None:
        """Kill the standby process unless it became a server."""
        if self._child is not None:
            self._child.kill()
        self._let_go()

    def _let_go(self) -> None:
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1


@contextmanager
def standby() -> Iterator[Standby | None]:
    """Start a standby process and kill it after the block if it was not used; yield None if `PREFECT_API_URL` names a
    server."""
    process = None if os.environ.get("PREFECT_API_URL") else Standby()
    try:
        yield process
    finally:
        if process is not None:
            process.close()
