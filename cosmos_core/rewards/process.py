"""Worker processes of rewards and tools: spawned, each in its own process group, in an environment without secrets."""

import multiprocessing
import os
import resource
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from io import BytesIO
from multiprocessing import popen_spawn_posix, reduction, resource_tracker, spawn, util
from multiprocessing.context import SpawnContext, SpawnProcess, set_spawning_popen
from typing import Any, Self

import psutil
from pebble import ProcessExpired, ProcessPool

from cosmos_core.environment import environment_for_user_code, mask_secrets
from cosmos_core.job_signals import JOB_SIGNALS, ignore_job_signals
from cosmos_core.observe.logs import configure_logging
from cosmos_core.parent import kill_with_parent

WORKER_START_TIMEOUT = 120.0
"""Timeout in seconds for the start of a worker process, including imports; a user module may import a large package."""
_FUTURES_POLL_SECONDS = 1.0

_PAUSE_AFTER_WORKER_EXIT_SECONDS = 0.1
"""Pause in seconds after a worker process has ended, so that pebble reads the last acknowledgement of a call from it.
Without the pause, the call in that process would fail only at its deadline."""


class WorkerPool(ABC):
    """Context manager that owns a pool of worker processes and replaces a broken pool."""

    _num_workers: int
    _env_variable_names: tuple[str, ...]
    """Names of the environment variables that the worker processes see in addition to standard ones."""
    _pool: ProcessPool | None = None

    @abstractmethod
    def _start_pool(self) -> ProcessPool:
        """Start a pool of worker processes, and wait until one of them has loaded the user code or models that it
        needs."""

    def __enter__(self) -> Self:
        self._start_pool()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the worker processes and all of their child processes."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
        self._pool = None

    def _replace_pool(self, initializer: Callable[..., None], *arguments: Any) -> ProcessPool:
        """Replace the pool of worker processes by a new one, whose processes first call `initializer`, and return the
        new pool."""
        self.close()
        spawn_context = SpawnContext()
        spawn_context.Process = partial(_WorkerProcess, self._env_variable_names)  # type: ignore[assignment,misc]
        initargs = (*arguments, self._env_variable_names, os.getpid())
        self._pool = ProcessPool(self._num_workers, initializer=initializer, initargs=initargs, context=spawn_context)
        return self._pool

    def _get_working_pool(self) -> ProcessPool:
        return self._pool if self._pool is not None and self._pool.active else self._start_pool()


class _WorkerProcess(SpawnProcess):
    """Worker process with selected environment variables; when it ends, its process group is killed."""

    _is_terminated = False

    def __init__(self, env_variable_names: tuple[str, ...], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.env_variable_names = env_variable_names

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _Popen(process_obj)

    def terminate(self) -> None:
        """Kill the process group with SIGKILL, because Python does not handle SIGTERM during a loop in C code."""
        self._is_terminated = True
        if self.pid:
            kill_group(self.pid, has_process_ended=self.exitcode is not None)
        self.kill()  # kill also the process itself, because its group may not exist right after its start

    def is_alive(self) -> bool:
        """Return True if the process is running; if it has ended by itself, kill the rest of its process group."""
        is_alive = super().is_alive()
        if is_alive and self.pid:
            try:
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # raised if the child has ended, and other code has waited for it
                self._popen.returncode = -signal.SIGKILL  # type: ignore[attr-defined]
                is_alive = False
        if not is_alive and not self._is_terminated and self.pid:
            kill_group(self.pid, has_process_ended=True)
            time.sleep(_PAUSE_AFTER_WORKER_EXIT_SECONDS)
        return is_alive


class _Popen(popen_spawn_posix.Popen):
    """Start of a Python process with a specified environment, which the base class does not support. Changing the
    environment of this process during the start would affect its other threads. Clearing the environment in the new
    process is too late, because /proc shows the environment at the start."""

    def _launch(self, process_obj: _WorkerProcess) -> None:
        pickled_process = BytesIO()
        tracker_fd = resource_tracker.getfd()  # type: ignore[attr-defined]
        set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process_obj.name), pickled_process)
            reduction.dump(process_obj, pickled_process)
        finally:
            set_spawning_popen(None)
        self.sentinel, child_sentinel_fd = os.pipe()
        child_read_fd, parent_write_fd = os.pipe()
        self.finalizer = util.Finalize(self, util.close_fds, (self.sentinel, parent_write_fd))  # type: ignore[attr-defined]
        try:
            python_command = spawn.get_command_line(tracker_fd=tracker_fd, pipe_handle=child_read_fd)
            inherited_descriptors = (*self._fds, tracker_fd, child_read_fd, child_sentinel_fd)  # type: ignore[attr-defined]
            file_actions = [(os.POSIX_SPAWN_DUP2, descriptor, descriptor) for descriptor in inherited_descriptors]
            environment = environment_for_user_code(process_obj.env_variable_names)
            self.pid = os.posix_spawn(
                spawn.get_executable(), python_command, environment, file_actions=file_actions, setsigmask=JOB_SIGNALS
            )
        finally:
            os.close(child_read_fd)
            os.close(child_sentinel_fd)
        with open(parent_write_fd, "wb", closefd=False) as pipe_file:
            pipe_file.write(pickled_process.getbuffer())


def kill_group(pid: int, *, has_process_ended: bool) -> None:
    """Kill the process group of a process, and all its descendants in other sessions unless the process has ended."""
    descendant_processes: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        descendant_processes = [] if has_process_ended else psutil.Process(pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    for process in descendant_processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def init_worker(env_variable_names: Sequence[str], parent_pid: int) -> None:
    """Prepare a worker process: it leads a process group, ends with its parent, and sees no secrets."""
    os.setpgid(0, 0)
    kill_with_parent(parent_pid)
    ignore_job_signals()  # the parent ends this process with SIGKILL, so that signals to the job must not end it first
    multiprocessing.set_start_method(None, force=True)  # use fork again: spawned children cannot import user files
    os.dup2(2, 1)  # send the standard output of user code to the log, with standard error
    configure_logging()
    # Limit this process to the memory of the machine.
    total_memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
    soft_limit = total_memory_bytes if hard_limit == resource.RLIM_INFINITY else min(total_memory_bytes, hard_limit)
    resource.setrlimit(resource.RLIMIT_DATA, (soft_limit, hard_limit))
    # Let the kernel kill this process first if memory runs out, unless the machine is a sandbox without /proc.
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    mask_secrets(env_variable_names)


def wait_for_futures(futures: Iterable[Future[Any]], max_idle_seconds: float, on_wait: Callable[[], None]) -> bool:
    """Wait for futures and call `on_wait` every second; return False if none finishes within `max_idle_seconds`."""
    pending_futures, last_progress_time = set(futures), time.monotonic()
    while pending_futures:
        done_futures, pending_futures = wait(pending_futures, _FUTURES_POLL_SECONDS)
        on_wait()
        last_progress_time = time.monotonic() if done_futures else last_progress_time
        if time.monotonic() - last_progress_time > max_idle_seconds:
            return False
    return True


def describe_exit(exit_error: BrokenProcessPool | ProcessExpired) -> str:
    """Return a description, for error messages, of how a worker process has ended."""
    if isinstance(exit_error, BrokenProcessPool):
        return "its process ended"
    if exit_error.exitcode < 0:
        return f"its process was killed by signal {-exit_error.exitcode}"
    return f"its process exited with code {exit_error.exitcode}"
