"""Start a supervised process and keep hold of it: the launcher's side of `launch.supervisor`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from cosmos_core.launch.processes import ATTEMPT, kill_marked, make_scratch, remove_scratch, scratch_of
from cosmos_core.observe.logs import quiet_environment
from cosmos_core.run.process import start_time


class Child:
    """A command under a supervisor, in a session of its own, its output in a file, its temporary files in a folder.

    It ends when it wants to, when `stop` or `kill` is called, or when this process ends in any way.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        grace_seconds: float,
        environment: Mapping[str, str],
        inherited: Mapping[str, str] = os.environ,
        inherit: Sequence[int] = (),
    ) -> None:
        """`environment` is added to `inherited`, what the command sees of this process's own."""
        self.attempt = uuid.uuid4().hex
        log.parent.mkdir(parents=True, exist_ok=True)
        self._scratch_lock = make_scratch(self.attempt)
        reader, self._writer = os.pipe()
        inherit = (reader, self._scratch_lock, *inherit)
        supervisor = [sys.executable, "-m", "cosmos_core.launch.supervisor"]
        supervisor += ["--pipe", str(reader), "--grace", str(grace_seconds)]
        for descriptor in inherit[2:]:
            supervisor += ["--inherit", str(descriptor)]
        added = {**environment, ATTEMPT: self.attempt, "TMPDIR": str(scratch_of(self.attempt))}
        try:
            with open(log, "ab") as output:
                self._process = subprocess.Popen(
                    [*supervisor, "--", *command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=quiet_environment({**inherited, **added}),
                    pass_fds=inherit,
                    start_new_session=True,
                )
        except BaseException:
            self._let_go()
            raise
        finally:
            os.close(reader)
        self.pid = self._process.pid
        self.started = start_time(self.pid)

    def poll(self) -> int | None:
        """Return the exit code of the command, or None while it runs; clean up after a killed supervisor."""
        code = self._process.poll()
        if code is not None and self._writer >= 0:
            kill_marked(self.attempt)
            self._let_go()
        return code if code is None or code >= 0 else 128 - code

    def stop(self, grace_seconds: float | None = None) -> None:
        """Send SIGTERM to the command; the supervisor adds SIGKILL after the grace, None: that of the beginning."""
        if self._process.poll() is None:
            if grace_seconds is not None and self._writer >= 0:
                with suppress(OSError):  # the supervisor is gone, and with it the command
                    os.write(self._writer, f"{grace_seconds}\n".encode())
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to all of its processes."""
        kill_marked(self.attempt)
        self._process.wait()
        self.poll()

    def _let_go(self) -> None:
        """Close what this process holds of it, and remove its temporary files."""
        os.close(self._writer)
        os.close(self._scratch_lock)
        self._writer = self._scratch_lock = -1
        remove_scratch(self.attempt)
