"""Execute one stage in a worker process, from its start to its end.

The process of the flow never trains. It starts `python -m cosmos_core.worker <stage_dir>` under a supervisor, reads the
heartbeat of the worker, forwards its log at a bounded rate, and turns its exit code into a result or an error.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from cosmos_core.environment import mask_file, mask_text
from cosmos_core.error_handling import log_errors
from cosmos_core.errors import ERRORS_BY_NAME, EXIT_OK, EXIT_PREEMPTED, EXIT_USAGE, ConfigError, Preempted, StageFailed
from cosmos_core.imports import make_python_command
from cosmos_core.launch.child import SupervisedProcess
from cosmos_core.launch.processes import kill_attempt, remove_scratch_folder
from cosmos_core.run.files import SHARED_FOLDER, JsonDocument, read_document, warn_if_disk_full
from cosmos_core.run.manifest import Result, read_result
from cosmos_core.run.process import identify_process, is_alive
from cosmos_core.run.progress import ProgressRecord, read_progress
from cosmos_core.run.state import read_state, record_event, update_state
from cosmos_core.run.tail import FileTail

logger = logging.getLogger(__name__)

LOCK_DESCRIPTORS_VARIABLE = "COSMOS_LOCK_DESCRIPTORS"
_POLL_SECONDS = 0.1
_STATE_UPDATE_INTERVAL_SECONDS = 2.0
_MAX_LINES_PER_SECOND = 10


class _ChildRegistry:
    """Registry of the running worker processes of all threads of this process, through which they can be stopped."""

    def __init__(self) -> None:
        self._registry_lock = threading.RLock()  # reentrant, because a signal handler calls `stop_all`
        self._grace_getter_by_child: dict[SupervisedProcess, Callable[[], float]] = {}
        self._num_active_runs = 0
        self.stop_event = threading.Event()

    @contextmanager
    def register_active_run(self) -> Iterator[None]:
        """Count a run of this process as active during the `with` block. A stop request of `stop_all` stays in effect
        until a run begins while no other run is active."""
        with self._registry_lock:
            # A stop request is cleared only while no run is active: threads of a cancelled run must still see it.
            if self._num_active_runs == 0:
                self.stop_event.clear()
            self._num_active_runs += 1
        try:
            yield
        finally:
            with self._registry_lock:
                self._num_active_runs -= 1

    @contextmanager
    def register_child(self, child: SupervisedProcess, get_grace_seconds: Callable[[], float]) -> Iterator[None]:
        """Register a child process for `stop_all`; `get_grace_seconds` returns the time from a stop to SIGKILL."""
        with self._registry_lock:
            self._grace_getter_by_child[child] = get_grace_seconds
            if self.stop_event.is_set():
                child.stop(get_grace_seconds())
        try:
            yield
        finally:
            with self._registry_lock:
                del self._grace_getter_by_child[child]

    def stop_all(self) -> None:
        """Ask every worker of this process to save a checkpoint and end; the current run starts no new workers."""
        with self._registry_lock:
            self.stop_event.set()
            for child, get_grace_seconds in self._grace_getter_by_child.items():
                child.stop(get_grace_seconds())

    def longest_grace_seconds(self) -> float:
        """Return the longest grace period of the running workers in seconds; 0 if there is no worker."""
        with self._registry_lock:
            return max((get_grace_seconds() for get_grace_seconds in self._grace_getter_by_child.values()), default=0.0)


_child_registry = _ChildRegistry()
register_active_run, stop_all = _child_registry.register_active_run, _child_registry.stop_all
longest_grace_seconds, is_stopping = _child_registry.longest_grace_seconds, _child_registry.stop_event.is_set


def sleep_unless_stopping(seconds: float) -> None:
    """Sleep for `seconds`; raise `Preempted` if a stop is requested before or during the sleep."""
    if _child_registry.stop_event.wait(seconds):
        raise Preempted("asked to stop")


@dataclass
class AttemptSettings:
    """Settings of one attempt to run a stage in a worker."""

    stage_path: Path
    python_path: str = ""
    num_threads: int = 1
    grace_seconds: float = 10.0
    timeout_seconds: float | None = None
    lock_descriptors: Sequence[int] = ()
    """Descriptors of file locks that the worker inherits, so that the locks last as long as the worker."""
    on_progress: Callable[[ProgressRecord], None] = lambda progress: None
    report_line: Callable[[str], None] = lambda line: None
    get_kill_reason: Callable[[], str] = lambda: ""
    """Function that is polled and returns a reason to kill the worker, or an empty string."""
    get_stop_error: Callable[[], Preempted | None] = lambda: None
    """Function that is polled and returns None, or the error to raise once the worker has saved a checkpoint."""
    environment: Mapping[str, str] = field(default_factory=dict)
    inherited_environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    """Environment variables that the worker inherits, by default those of this process."""
    secret_vars: Sequence[str] = ()
    """Names of environment variables whose values are masked in the log, besides those with a secret-like name."""


def run_attempt(settings: AttemptSettings) -> Result:
    """Run one attempt of a stage to its end; return the manifest of its outputs, which the worker wrote last.

    Raises:
        ConfigError, DataError, ModelError, RewardError: the worker refused its input (exit 64).
        Preempted: the worker was stopped and saved a checkpoint (exit 75). The error that `settings.get_stop_error`
            returned is raised instead if it requested the stop.
        StageFailed: the worker crashed, hung, or exceeded its timeout.
    """
    sleep_unless_stopping(0)
    stage_path = settings.stage_path
    for stale_file in ("error.json", "progress.json"):
        (stage_path / stale_file).unlink(missing_ok=True)
    mask_log_of_killed_launcher(stage_path, settings.secret_vars)
    previous_stage_state = read_state(stage_path)
    attempt_number = previous_stage_state.attempt + 1
    log_path = _locate_log(stage_path, attempt_number)
    get_grace_seconds = partial(compute_grace_seconds, stage_path, settings.grace_seconds)
    python_command = [settings.python_path] if settings.python_path else make_python_command()
    command = [*python_command, "-m", "cosmos_core.worker", str(stage_path)]
    child = SupervisedProcess(
        command, log_path=log_path, grace_seconds=settings.grace_seconds, environment=_build_environment(settings),
        inherited_environment=settings.inherited_environment, inherited_descriptors=settings.lock_descriptors,
    )  # fmt: skip
    start_time = time.time()
    earlier_attempts = previous_stage_state.list_attempt_times(start_time)
    try:
        update_state(
            stage_path, state="running", attempt=attempt_number, pid=child.pid, pid_started=child.start_time,
            mark=child.attempt_id, **identify_process(), spans=[*earlier_attempts, (start_time, None)],
            renewed=start_time, ended=None, error="", error_type="",
        )  # fmt: skip
        record_event(stage_path, "started", f"attempt {attempt_number}")
        with _child_registry.register_child(child, get_grace_seconds):
            exit_code, kill_reason, stop_error = _wait_for_worker(settings, child, log_path, get_grace_seconds)
    finally:
        child.kill()
        mask_file(log_path, settings.secret_vars)  # child processes of the worker may write unmasked secrets to the log
        end_time = time.time()
        attempt_times, progress_fields = [*earlier_attempts, (start_time, end_time)], _read_progress_fields(stage_path)
        with warn_if_disk_full(f"the end of attempt {attempt_number} of {stage_path.name}"):
            update_state(stage_path, spans=attempt_times, ended=end_time, **progress_fields)
    if stop_error is not None and not kill_reason and exit_code != EXIT_OK:
        raise stop_error
    return _read_attempt_result(stage_path, exit_code, kill_reason, log_path)


def compute_grace_seconds(stage_path: Path, grace_seconds: float) -> float:
    """Return the seconds between SIGTERM and SIGKILL of a worker: the longest step so far, to
    finish the current step, plus `grace_seconds` for a checkpoint."""
    progress = read_progress(stage_path) or ProgressRecord()
    return grace_seconds + max(progress.longest_step_seconds, read_state(stage_path).longest_step_seconds)


def reap_attempt(stage_path: Path) -> None:
    """Kill the remaining processes of the last attempt, unless the launcher of that attempt is another live process."""
    stage_state = read_state(stage_path)
    if is_alive(stage_state.launcher_pid, stage_state.launcher_started) and stage_state.launcher_pid != os.getpid():
        return
    if stage_state.mark and (killed_pids := kill_attempt(stage_state.mark)):
        record_event(stage_path, "reaped", f"processes of attempt {stage_state.attempt}: {killed_pids}")
    remove_scratch_folder(stage_state.mark)


def mask_log_of_killed_launcher(stage_path: Path, secret_names: Sequence[str] = ()) -> None:
    """Mask secrets in the log of the last attempt if its launcher was killed before it could mask them."""
    stage_state = read_state(stage_path)
    log_path = _locate_log(stage_path, stage_state.attempt)
    if stage_state.spans and stage_state.spans[-1][1] is None and log_path.is_file():
        mask_file(log_path, secret_names)


def _locate_log(stage_path: Path, attempt_number: int) -> Path:
    return stage_path / "logs" / f"attempt_{attempt_number}.log"


def _build_environment(attempt_settings: AttemptSettings) -> dict[str, str]:
    compile_cache_folder = attempt_settings.stage_path.absolute().parents[2] / SHARED_FOLDER / "compiled"
    return {
        **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(attempt_settings.num_threads)),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONHASHSEED": "0",
        # Compiled kernels are cached outside of TMPDIR, so that other attempts and runs can use them.
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(compile_cache_folder)),
        # Passwords of the Prefect server are set to an empty value, so that user code cannot read them.
        **dict.fromkeys(("PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING"), ""),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # required by torch for deterministic matrix products on a GPU
        # Make CUDA number the GPUs like NVML, by which GPUs are selected; by default CUDA numbers them by speed.
        "CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        LOCK_DESCRIPTORS_VARIABLE: ",".join(map(str, attempt_settings.lock_descriptors)),
        **attempt_settings.environment,
    }


def _wait_for_worker(
    settings: AttemptSettings, worker_process: SupervisedProcess, log_path: Path, get_grace_seconds: Callable[[], float]
) -> tuple[int, str, Preempted | None]:
    """Wait for the end of the worker. Return its exit code, the reason for which this process ended it (empty if the
    worker ended by itself), and the error of `get_stop_error` (None if it requested no stop)."""
    kill_reason, stop_error = "", None
    start_time, last_state_update_time = time.monotonic(), 0.0
    # Detect a hang by the clock of this process, because the clock of the worker's machine may differ or jump.
    last_progress, last_progress_time = ProgressRecord(), time.monotonic()
    log_forwarder = _LogForwarder(log_path, lambda line: settings.report_line(mask_text(line, settings.secret_vars)))
    while (exit_code := worker_process.poll()) is None:
        time.sleep(_POLL_SECONDS)
        log_forwarder.forward_lines()
        if progress := read_progress(settings.stage_path):
            _invoke_callback(settings.on_progress, progress)
            if progress != last_progress:
                last_progress, last_progress_time = progress, time.monotonic()
        if not kill_reason and (kill_reason := settings.get_kill_reason()):
            worker_process.kill()
        if stop_error is None and (stop_error := settings.get_stop_error()) is not None:
            worker_process.stop(get_grace_seconds())
        stalled_seconds = time.monotonic() - last_progress_time
        if not kill_reason and stalled_seconds > last_progress.deadline_seconds:
            kill_reason = f"no sign of life for {stalled_seconds:.0f} s in phase {last_progress.phase!r}: it hangs"
            worker_process.kill()
        if settings.timeout_seconds and time.monotonic() - start_time > settings.timeout_seconds and not kill_reason:
            kill_reason = f"longer than timeout = {settings.timeout_seconds:.0f} s"
            worker_process.stop(get_grace_seconds())
        if time.monotonic() - last_state_update_time > _STATE_UPDATE_INTERVAL_SECONDS:
            last_state_update_time, state_fields = time.monotonic(), _read_progress_fields(settings.stage_path)
            _invoke_callback(lambda state_fields: update_state(settings.stage_path, **state_fields), state_fields)
    log_forwarder.forward_lines(is_last_call=True)
    return exit_code, kill_reason, stop_error


class WorkerError(JsonDocument):
    """Content of `error.json`: the error with which a worker of a stage ended."""

    type: str
    """Name of the error class in `cosmos_core.errors`."""
    message: str


def _invoke_callback(callback: Callable[[Any], object], callback_argument: Any) -> None:
    """Pass a value to a callback; log an error of the callback, which must not fail the training."""
    with log_errors(partial(logger.warning, "progress could not be shown: %s")):
        callback(callback_argument)


def _read_progress_fields(stage_path: Path) -> dict[str, Any]:
    """Return the progress of a stage, such as `step`, as new values for fields of `state.json`; the worker of the stage
    reported it last in `progress.json`."""
    progress = read_progress(stage_path)
    if progress is None:
        return {"renewed": time.time()}
    state_fields = progress.model_dump(include={"heartbeat", "phase", "step", "total"})
    if progress.checkpoint_step is not None:
        state_fields["checkpoint_step"] = progress.checkpoint_step
    if progress.longest_step_seconds > read_state(stage_path).longest_step_seconds:
        state_fields["longest_step_seconds"] = progress.longest_step_seconds
    return {"renewed": time.time(), **state_fields}


def _read_attempt_result(stage_path: Path, exit_code: int, kill_reason: str, log_path: Path) -> Result:
    worker_error = read_document(stage_path / "error.json", WorkerError) or WorkerError(type="", message="")
    stage_label, error_message = f"stage {stage_path.name!r}", worker_error.message
    if kill_reason:
        raise StageFailed(f"{stage_label} was ended: {kill_reason}; log: {log_path}")
    if exit_code == EXIT_OK:
        if (result := read_result(stage_path)) is None:
            raise StageFailed(f"{stage_label} exited with 0 but wrote no result.json; log: {log_path}")
        return result
    if exit_code == EXIT_PREEMPTED or is_stopping():
        raise Preempted(error_message or f"{stage_label} was stopped (exit {exit_code})")
    if worker_error.type in ERRORS_BY_NAME:
        raise ERRORS_BY_NAME[worker_error.type](error_message)
    if exit_code == EXIT_USAGE:
        raise ConfigError(error_message or f"{stage_label} refused its configuration; log: {log_path}")
    exit_description = f"signal {exit_code - 128}" if exit_code > 128 else f"exit code {exit_code}"
    raise StageFailed(error_message or f"{stage_label} crashed ({exit_description}); log: {log_path}")


class _LogForwarder:
    """Reader that forwards new lines of a log at a bounded rate; lines beyond the rate remain only in the file."""

    def __init__(self, log_path: Path, report_line: Callable[[str], None]) -> None:
        self._log_tail, self._report_line = FileTail(log_path), report_line
        self._line_allowance, self._last_forward_time = float(_MAX_LINES_PER_SECOND), time.monotonic()

    def forward_lines(self, *, is_last_call: bool = False) -> None:
        """Pass new lines of the log to `report_line`, and drop those beyond the allowed rate. With `is_last_call`, an
        incomplete last line counts as a line."""
        current_time = time.monotonic()
        filled_line_allowance = self._line_allowance + (current_time - self._last_forward_time) * _MAX_LINES_PER_SECOND
        self._line_allowance, self._last_forward_time = min(_MAX_LINES_PER_SECOND, filled_line_allowance), current_time
        for line in filter(None, self._log_tail.read_lines(is_last_read=is_last_call)):
            if self._line_allowance >= 1:
                self._line_allowance -= 1
                _invoke_callback(self._report_line, line)
