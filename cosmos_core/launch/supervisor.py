"""Process between the launcher and its command, so that no process outlives the launcher.

    python -m cosmos_core.launch.supervisor --pipe FD --grace SECONDS -- command ...

The supervisor leads its own session. End-of-file on the pipe means that the launcher has ended: the command gets
SIGTERM (to save a checkpoint), and SIGKILL after the grace period, at most ten seconds. If the supervisor itself is
killed, the kernel kills the command. The supervisor is a subreaper, so it adopts processes that lose their parent. When
the command has ended, all of its descendants are killed, also those in another session or environment, and the exit
code is passed on (128 + signal number if a signal ended the command). A number that the launcher writes to the pipe
replaces the grace period. Before the command runs, this module imports the standard library only, to start quickly.

No portable tool does this: the kernel's parent-death signal does not reach grandchildren, and containers lack systemd.
"""

import argparse
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

from cosmos_core.parent import adopt_orphans, kill_with_parent

_POLL_SECONDS = 0.05
_ORPHAN_GRACE_SECONDS = 10.0  # seconds in which the command must end after its launcher, because a retry needs the GPUs


class Supervisor:
    """Parent of one command that ends all processes of the command when the command or the launcher ends."""

    def __init__(self, pipe_descriptor: int, grace_seconds: float) -> None:
        self.pipe_descriptor = pipe_descriptor
        self.grace_seconds = grace_seconds
        self.kill_deadline: float | None = None
        self.is_orphaned = False
        self.child: subprocess.Popen[bytes] | None = None

    def run(self, command: list[str], inherited_descriptors: list[int]) -> int:
        """Run the command to its end, kill its descendants, remove its temporary files and return its exit code."""
        for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signal_number, lambda *_: self.stop())

        def forward_signal(signal_number: int, _: object) -> None:
            if self.child is not None:
                self.child.send_signal(signal_number)

        # Forward SIGUSR1 and SIGUSR2, which schedulers send before they end a job, because the worker handles them.
        for signal_number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signal_number, forward_signal)
        supervisor_pid = os.getpid()
        adopt_orphans()
        self.child = subprocess.Popen(
            command, pass_fds=inherited_descriptors, preexec_fn=lambda: kill_with_parent(supervisor_pid)
        )
        from cosmos_core.launch.processes import ATTEMPT_VARIABLE, kill_attempt, kill_descendants, remove_scratch_folder

        if self.kill_deadline is not None:
            # Terminate the command now, because a stop was requested before it had started.
            self.child.terminate()
        waitid_options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while self.child.poll() is None:
            self._watch_pipe()
            # Reap ended processes that the supervisor has adopted; `poll` reaps the command itself. No child is left if
            # a signal handler has just reaped the command: `terminate` and `send_signal` also poll it.
            with suppress(ChildProcessError):
                while (exit_info := os.waitid(os.P_ALL, 0, waitid_options)) and exit_info.si_pid != self.child.pid:
                    os.waitpid(exit_info.si_pid, 0)
            if self.kill_deadline is not None and time.monotonic() > self.kill_deadline:
                self.child.kill()
        attempt_id, exit_code = os.environ.get(ATTEMPT_VARIABLE, ""), self.child.returncode
        if attempt_id:
            kill_attempt(attempt_id)
        kill_descendants()
        remove_scratch_folder(attempt_id)
        return exit_code if exit_code >= 0 else 128 - exit_code

    def stop(self) -> None:
        """Send SIGTERM to the command and start the grace period; a later call can only shorten the grace period."""
        grace_seconds = min(self.grace_seconds, _ORPHAN_GRACE_SECONDS) if self.is_orphaned else self.grace_seconds
        if self.kill_deadline is None and self.child is not None:
            self.child.terminate()
        self.kill_deadline = min(self.kill_deadline or float("inf"), time.monotonic() + grace_seconds)

    def _watch_pipe(self) -> None:
        if self.is_orphaned:
            time.sleep(_POLL_SECONDS)
            return
        readable_descriptors, _, _ = select.select([self.pipe_descriptor], [], [], _POLL_SECONDS)
        if not readable_descriptors:
            return
        if pipe_content := os.read(self.pipe_descriptor, 4096):
            self.grace_seconds = float(pipe_content.split()[-1])
            if self.kill_deadline is not None:  # also apply a grace period that the launcher sends after SIGTERM
                self.kill_deadline = time.monotonic() + self.grace_seconds
        else:
            self.is_orphaned = True
            self.stop()


def main() -> int:
    """Parse the command line of the supervisor, run its command, and return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pipe", type=int, required=True)
    parser.add_argument("--grace", type=float, required=True)
    parser.add_argument("--inherit", type=int, action="append", default=[])
    parser.add_argument("command", nargs=argparse.REMAINDER)
    parsed_arguments = parser.parse_args()
    command = parsed_arguments.command[1:] if parsed_arguments.command[:1] == ["--"] else parsed_arguments.command
    return Supervisor(parsed_arguments.pipe, parsed_arguments.grace).run(command, parsed_arguments.inherit)


if __name__ == "__main__":
    sys.exit(main())
