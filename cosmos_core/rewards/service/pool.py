"""Processes of one reward: batches across requests, timeouts, and replacement of dead processes.

A request whose process ends or hangs returns to the front of the queue and is retried alone, so that it cannot affect
other requests; after `max_attempts` attempts its result is an error. Each result is delivered once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_core.environment import environment_for_user_code
from cosmos_core.rewards.process import kill_group
from cosmos_core.rewards.service.config import RewardArgs
from cosmos_core.rewards.service.request import ScoreRequest
from cosmos_core.rewards.service.worker import encode_header

_START_SCRIPT = """
import importlib.util, runpy, sys
package = sys.argv.pop()
file = package + "/__init__.py"
spec = importlib.util.spec_from_file_location("cosmos_core", file, submodule_search_locations=[package])
sys.modules["cosmos_core"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
runpy.run_module("cosmos_core.rewards.service.worker", run_name="__main__", alter_sys=True)
"""
"""Program that imports cosmos_core without its parent folder in `sys.path`, because other packages there belong
to the service's interpreter and must not be imported by the reward's interpreter."""
_PACKAGE_FOLDER = str(Path(__file__).parents[2])
_MIN_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.2, 30.0
_MAX_HEADER_BYTES = 64 * 2**20
log = logging.getLogger(__name__)


@dataclass
class RewardJob:
    """Request that waits to be scored by one reward, or to have its latents decoded."""

    request: ScoreRequest
    name: str = ""
    """Name of the reward; empty: decode the latents of the request."""
    num_attempts: int = 0


@dataclass(frozen=True)
class ProcessSettings:
    """Settings with which the worker processes of one reward are started."""

    start_message: Mapping[str, Any]
    """First message to a worker process: name of the reward (empty: the decoder of latents), user code (`entry`) and
    settings other than the device."""
    reward: RewardArgs
    batch_seconds: float
    max_attempts: int


@dataclass
class PoolCounters:
    """Counters, for one reward, of scored items, errors, batches, restarted processes and retried requests, and of
    seconds of scoring."""

    items: int = 0
    errors: int = 0
    batches: int = 0
    restarts: int = 0
    retried: int = 0
    seconds: float = 0.0


ResultCallback = Callable[[RewardJob, dict[str, Any], float], Awaitable[None]]
"""Callback that receives a request, its scores and errors, and the duration of its batch in seconds."""


class ProcessError(Exception):
    """Error of a reward's worker process that ended, hung or could not load the reward. `is_transient`: whether a retry
    can help, as it can if a signal killed the process (`is_killed`)."""

    def __init__(self, error_message: str, *, is_transient: bool = False, is_killed: bool = False) -> None:
        super().__init__(error_message)
        self.is_transient, self.is_killed = is_transient or is_killed, is_killed


class RewardPool:
    """Pool that runs one reward in one process per device."""

    def __init__(self, settings: ProcessSettings, on_result: ResultCallback) -> None:
        self.settings, self._on_result = settings, on_result
        self.queue: deque[RewardJob] = deque()
        self.counters = PoolCounters()
        self.errors: deque[str] = deque(maxlen=20)
        self.num_ready_processes = 0
        self.num_jobs_in_flight = 0
        self.loaded_future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.model_properties: Mapping[str, Any] = {}
        """Properties of the loaded model, as reported by a worker process, such as `latent_channels` of a VAE."""
        process_devices = settings.reward.process_devices
        self._num_load_attempts_left = settings.max_attempts * len(process_devices)
        self._has_queued_jobs = asyncio.Event()
        self._process_tasks = [asyncio.create_task(self._keep_process_running(device)) for device in process_devices]

    def submit(self, job: RewardJob) -> None:
        """Queue a request, which a worker process of this reward takes with its next batch."""
        self.queue.append(job)
        self._has_queued_jobs.set()

    async def close(self) -> None:
        """Kill all worker processes of this reward."""
        for process_task in self._process_tasks:
            process_task.cancel()
        await asyncio.gather(*self._process_tasks, return_exceptions=True)

    async def _keep_process_running(self, device: str) -> None:
        pause_seconds = _MIN_PAUSE_SECONDS
        while True:
            process = RewardProcess(self.settings, device)
            try:
                await process.start()
                pause_seconds, self.model_properties = _MIN_PAUSE_SECONDS, process.model_properties
                if not self.loaded_future.done():
                    self.loaded_future.set_result(None)
                self.num_ready_processes += 1
                try:
                    await self._score_batches(process)
                finally:
                    self.num_ready_processes -= 1
            except Exception as error:
                process_error = (
                    error if isinstance(error, ProcessError) else ProcessError(f"{type(error).__name__}: {error}")
                )
                if process_error is not error:
                    log.exception("reward %s", self.settings.start_message["name"])
                if not self.loaded_future.done() and not process.is_ready:
                    self._num_load_attempts_left -= 1
                    if not process_error.is_killed or not self._num_load_attempts_left:
                        self.loaded_future.set_exception(process_error)
                self._record_error(str(process_error))
            finally:
                await process.kill()
            self.counters.restarts += 1
            await asyncio.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _MAX_PAUSE_SECONDS) if not process.is_ready else _MIN_PAUSE_SECONDS

    async def _score_batches(self, process: RewardProcess) -> None:
        while True:
            jobs = await self._next_batch(process)
            batch_start_time = time.monotonic()
            self.num_jobs_in_flight += len(jobs)
            try:
                reply_header, result_arrays = await process.score(jobs)
            except BaseException as error:
                for job in jobs:
                    job.num_attempts += 1
                self.queue.extendleft(reversed(jobs))
                self.counters.retried += len(jobs)
                self._has_queued_jobs.set()
                if isinstance(error, Exception):
                    await self._fail_exhausted_jobs(str(error))
                raise
            finally:
                self.num_jobs_in_flight -= len(jobs)
            self.counters.batches += 1
            self.counters.seconds += time.monotonic() - batch_start_time
            if "error" in reply_header and len(jobs) > 1:  # retry requests one by one to isolate the failing one
                for job in jobs:
                    job.num_attempts = max(1, job.num_attempts)
                self.queue.extendleft(reversed(jobs))
                self._has_queued_jobs.set()
                continue
            await self._deliver_results(jobs, reply_header, result_arrays)

    async def _deliver_results(
        self, jobs: Sequence[RewardJob], reply_header: Mapping[str, Any], result_arrays: Sequence[np.ndarray]
    ) -> None:
        job_results = reply_header.get("results") or [{"error": reply_header.get("error", "")}] * len(jobs)
        for i, job in enumerate(jobs):
            result = {**job_results[i], "array": result_arrays[i]} if result_arrays else job_results[i]
            num_errors = job.request.num_items if result.get("error") else sum(map(bool, result.get("errors", [])))
            self.counters.items += job.request.num_items
            self.counters.errors += num_errors
            if num_errors:
                self._record_error(result.get("error") or next(filter(None, result["errors"])))
            await self._on_result(job, result, float(reply_header.get("seconds", 0.0)))

    async def _fail_exhausted_jobs(self, last_error_text: str) -> None:
        for job in [job for job in self.queue if job.num_attempts >= self.settings.max_attempts]:
            self.queue.remove(job)
            self.counters.errors += job.request.num_items
            error_text = f"tried {job.num_attempts} times, each of which ended its process; the last: {last_error_text}"
            await self._on_result(job, {"error": error_text, "is_lost": True}, 0.0)

    async def _next_batch(self, process: RewardProcess) -> list[RewardJob]:
        """Wait until requests are queued, and return the next batch for `process`: several requests, or a single
        request that is retried. Raise `ProcessError` if the process ends meanwhile."""
        jobs: list[RewardJob] = []
        while not jobs:
            while not self.queue:
                self._has_queued_jobs.clear()
                await process.wait_while_running(self._has_queued_jobs.wait())
            num_items = sum(job.request.num_items for job in self.queue)
            if self.settings.batch_seconds and num_items < self.settings.reward.batch_size:
                await asyncio.sleep(self.settings.batch_seconds)  # wait for more jobs to fill the batch
            num_items_left_in_batch = self.settings.reward.batch_size
            while self.queue and (not jobs or self.queue[0].request.num_items <= num_items_left_in_batch):
                if jobs and (jobs[0].num_attempts or self.queue[0].num_attempts):
                    break
                jobs.append(self.queue.popleft())
                num_items_left_in_batch -= jobs[-1].request.num_items
        return jobs

    def _record_error(self, error_text: str) -> None:
        log.warning("reward %s: %s", self.settings.start_message["name"] or "decoder", error_text)
        self.errors.append(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {error_text[:500]}")


class RewardProcess:
    """Worker process of a reward, which exchanges the messages of `worker.py` with the service."""

    def __init__(self, settings: ProcessSettings, device: str) -> None:
        self._settings, self._device = settings, device
        self._process: asyncio.subprocess.Process | None = None
        self._batch_number = 0
        self.is_ready = False
        self.model_properties: Mapping[str, Any] = {}

    async def start(self) -> None:
        """Start the worker process and wait until it has loaded its reward; raise `ProcessError` if it cannot start or
        load."""
        start_message, reward_args = self._settings.start_message, self._settings.reward
        process_environment = environment_for_user_code(reward_args.env) | {"PYTHONUNBUFFERED": "1"}
        if reward_args.tmp_dir:
            process_environment["TMPDIR"] = reward_args.tmp_dir
        try:
            self._process = await asyncio.create_subprocess_exec(
                reward_args.python_interpreter, "-c", _START_SCRIPT, _PACKAGE_FOLDER,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=process_environment,
                cwd=reward_args.work_dir or None, start_new_session=True, limit=_MAX_HEADER_BYTES,
            )  # fmt: skip
        except OSError as error:
            raise ProcessError(f"{reward_args.python_interpreter} cannot be started: {error}") from error
        message_header = {**start_message, "settings": {**start_message["settings"], "device": self._device}}
        reply_header, _ = await self._send_and_receive(message_header, [], reward_args.load_seconds, "loaded")
        if "ready" not in reply_header:
            raise ProcessError(str(reply_header.get("error", "it said something else than that it is ready")))
        self.is_ready, self.model_properties = True, reply_header

    async def score(self, jobs: Sequence[RewardJob]) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Let the worker process score or decode a batch of requests. Return its reply with the scores, and the arrays
        of decoded videos. Raise `ProcessError` if the process ended or timed out."""
        self._batch_number += 1
        job_fields = [job.request.fields | {"media": job.request.media_type} for job in jobs]
        message_header = {"id": self._batch_number, "jobs": job_fields}
        request_arrays = [job.request.array for job in jobs]
        timeout_seconds = self._settings.reward.timeout_seconds
        reply, result_arrays = await self._send_and_receive(message_header, request_arrays, timeout_seconds, "done")
        num_results = len(jobs) if reply.get("error") else len(reply.get("results", result_arrays))
        if reply.get("id") != self._batch_number or num_results != len(jobs):
            raise ProcessError("its process said something about another batch")
        return reply, result_arrays

    async def wait_while_running(self, awaitable: Any) -> None:
        """Wait for an awaitable while the worker process runs; raise `ProcessError` if the process ends first."""
        assert self._process is not None
        wait_tasks = [asyncio.ensure_future(awaitable), asyncio.ensure_future(self._process.wait())]
        try:
            done_tasks, _ = await asyncio.wait(wait_tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in wait_tasks:
                task.cancel()
        if wait_tasks[1] in done_tasks:
            raise self._describe_exit()

    async def kill(self) -> None:
        """Kill the worker process and all its child processes."""
        if self._process is None:
            return
        kill_group(self._process.pid, has_process_ended=self._process.returncode is not None)
        await self._process.communicate()  # unlike `wait`, `communicate` reads the output, so a full pipe cannot block

    async def _send_and_receive(
        self, message: Mapping[str, Any], sent_arrays: Sequence[np.ndarray], timeout_seconds: float, expected_state: str
    ) -> tuple[dict[str, Any], list[np.ndarray]]:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_seconds):
                self._process.stdin.write(encode_header(message, sent_arrays))
                for array in sent_arrays:
                    self._process.stdin.write(np.ascontiguousarray(array).tobytes())
                    await self._process.stdin.drain()
                await self._process.stdin.drain()
                reply_header = json.loads(await self._process.stdout.readuntil(b"\n"))
                received_arrays = []
                for shape, dtype in reply_header.pop("arrays"):
                    num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
                    array_bytes = await self._process.stdout.readexactly(num_bytes)
                    received_arrays.append(np.frombuffer(array_bytes, dtype).reshape(shape))
                return reply_header, received_arrays
        except TimeoutError as error:
            raise ProcessError(f"not {expected_state} in {timeout_seconds:g} s", is_transient=True) from error
        except asyncio.LimitOverrunError as error:
            raise ProcessError(f"its reply is a line of more than {_MAX_HEADER_BYTES} bytes; return numbers") from error
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            await asyncio.wait([asyncio.ensure_future(self._process.wait())], timeout=2)
            raise self._describe_exit() from error

    def _describe_exit(self) -> ProcessError:
        exit_code = self._process.returncode if self._process else None
        if exit_code is None:
            return ProcessError("its process closed its output")
        if exit_code < 0 or exit_code > 128:  # a shell exits with 128 + N if signal N ended its child
            signal_number = -exit_code if exit_code < 0 else exit_code - 128
            return ProcessError(f"its process was killed by signal {signal_number}", is_killed=True)
        return ProcessError(f"its process exited with code {exit_code}")
