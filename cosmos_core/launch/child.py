"""Supervised child process, from the launcher's side; the program of the supervisor is `launch.supervisor`."""

import os
import signal
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from cosmos_core.error_handling import cleanup_on_error
from cosmos_core.imports import make_python_command
from cosmos_core.launch import processes
from cosmos_core.observe.logs import add_log_silencing_variables
from cosmos_core.run.process import read_start_time


class SupervisedProcess:
    """Command that runs under a supervisor in a separate session, with a log file and a folder for temporary files. The
    supervisor ends the command after `stop` or `kill`, or when this process ends for any reason."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        log_path: Path,
        grace_seconds: float,
        environment: Mapping[str, str],
        inherited_environment: Mapping[str, str] = os.environ,
        inherited_descriptors: Sequence[int] = (),
    ) -> None:
        """Start the command with the variables in `inherited_environment` and `environment`; its output is appended to
        `log_path`."""
        self.attempt_id = uuid.uuid4().hex
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._scratch_lock_descriptor = processes.create_scratch_folder(self.attempt_id)
        pipe_read_end, self._pipe_write_end = os.pipe()
        supervisor_command = [*make_python_command(), "-m", "cosmos_core.launch.supervisor"]
        supervisor_command += ["--pipe", str(pipe_read_end), "--grace", str(grace_seconds)]
        supervisor_command += [f"--inherit={descriptor}" for descriptor in inherited_descriptors]
        added_environment = {
            **environment, processes.ATTEMPT_VARIABLE: self.attempt_id,
            "TMPDIR": str(processes.scratch_folder(self.attempt_id)),
        }  # fmt: skip
        try:
            with cleanup_on_error(self._release_resources), open(log_path, "ab") as log_file:
                self._supervisor_process = subprocess.Popen(
                    [*supervisor_command, "--", *command], start_new_session=True, stdin=subprocess.DEVNULL,
                    stdout=log_file, stderr=subprocess.STDOUT,
                    pass_fds=(pipe_read_end, self._scratch_lock_descriptor, *inherited_descriptors),
                    env=add_log_silencing_variables({**inherited_environment, **added_environment}),
                )  # fmt: skip
        finally:
            os.close(pipe_read_end)
        self.pid = self._supervisor_process.pid
        self.start_time = read_start_time(self.pid)

    def poll(self) -> int | None:
        """Return the exit code of the command, or None while the command runs. Once the supervisor has ended, also kill
        processes of the command that survived a kill of the supervisor, and remove the temporary files."""
        exit_code = self._supervisor_process.poll()
        if exit_code is not None and self._pipe_write_end >= 0:
            processes.kill_attempt(self.attempt_id)
            self._release_resources()
        return exit_code if exit_code is None or exit_code >= 0 else 128 - exit_code

    def stop(self, grace_seconds: float | None = None) -> None:
        """Send SIGTERM to the command, and SIGKILL after `grace_seconds`; None: the grace period of the constructor."""
        if self._supervisor_process.poll() is None:
            if grace_seconds is not None and self._pipe_write_end >= 0:
                with suppress(OSError):  # the supervisor may have ended and closed the pipe
                    os.write(self._pipe_write_end, f"{grace_seconds}\n".encode())
            self._supervisor_process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to all processes of the command."""
        processes.kill_attempt(self.attempt_id)
        self._supervisor_process.wait()
        self.poll()

    def _release_resources(self) -> None:
        os.close(self._pipe_write_end)
        os.close(self._scratch_lock_descriptor)
        self._pipe_write_end = self._scratch_lock_descriptor = -1
        processes.remove_scratch_folder(self.attempt_id)
