"""Scores completions in child processes that can be killed, so that no reward can hang, crash or fake a run.

A reward that raises, returns no finite number, ends its process or overruns the deadline makes its completion
*invalid* (`Score.value is None`, with the reason), never 0, and disturbs no other completion. Not here: what rewards
compute (one file each), what invalid scores mean for a group (algorithms/grpo.py).

The children are in the session of their parent but in process groups of their own: a kill takes what a reward has
started with it. They end with the *thread* that started them, as the kernel's parent-death signal goes by threads;
the next `score` replaces them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from cosmos_core.errors import RewardError
from cosmos_core.types import Group, Score, ScoredGroup

ScoreGroups = Callable[[Sequence[Group]], list[ScoredGroup]]
"""Scores every completion of each group."""

log = logging.getLogger(__name__)

START_SECONDS = 120.0
"""Until a child has imported the rewards; a user's module may import something heavy."""
_WINDOW = 64
"""Requests that a child may have ahead of it, so that it never waits for us."""
_BLOCK = 1 << 16


@dataclass(slots=True, eq=False)
class _Job:
    """One completion on its way to a score."""

    line: bytes
    failures: int = 0
    """Children that it cost: hung, or ended by themselves."""
    answers: list[tuple[float | None, dict[str, float], str]] = field(default_factory=list)


class _Child:
    """One process, the jobs that it has ahead of it, and the bytes underway."""

    def __init__(self, hello: bytes) -> None:
        self.jobs: deque[_Job] = deque()
        self.is_ready = False
        self.deadline = time.monotonic() + START_SECONDS
        self.unsent = bytearray(hello)
        self._unread = b""
        command = [sys.executable, "-u", "-m", "cosmos_core.rewards.child", str(os.getpid())]
        # The child has to find the modules that we find, also where our sys.path was changed.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": path},
            process_group=0,
        )
        assert self._process.stdin and self._process.stdout
        self.input, self.output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self.input, False)
        os.set_blocking(self.output, False)

    def send(self) -> None:
        """Write what the pipe takes now."""
        try:
            del self.unsent[: os.write(self.input, self.unsent[:_BLOCK])]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.unsent.clear()  # it ended: reading says so, after the answers that it still gave

    def receive(self) -> list[bytes] | None:
        """The lines that have come since; None when there will be no more."""
        try:
            data = os.read(self.output, _BLOCK)
        except BlockingIOError:
            return []
        if not data:
            return None
        *lines, self._unread = (self._unread + data).split(b"\n")
        return lines

    def has_ended(self) -> bool:
        """Whether the process is over; it is not reaped, so that its id still is ours to signal."""
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # somebody who waits for all children of this process was faster
            return True

    def how_it_ended(self) -> str:
        """What became of a process whose pipe has ended; it is gone afterwards."""
        limit = time.monotonic() + 1.0
        while not self.has_ended():  # the exit follows the end of the pipe by a moment
            if time.monotonic() > limit:
                self.kill()
                return "its process closed its pipe"
            time.sleep(0.002)
        self.kill()
        code = self._process.returncode
        return f"its process exited with code {code}" if code >= 0 else f"its process was killed by signal {-code}"

    def kill(self) -> None:
        """End the process and what it started."""
        if self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        self._process.stdout.close()


class RewardRunner:
    """Scores completions by a weighted sum of rewards; a context manager that owns its child processes.

    `timeout_seconds` is the deadline of each reward function on each completion; a completion that kills its child is
    tried `retries` times more. `custom` is handed to rewards that ask for it; `beat` is called while it waits for them.
    Use it from one thread at a time.

    Raises:
        RewardError: a reward does not exist or cannot be loaded (on entering, or when a child is replaced).
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        *,
        timeout_seconds: float,
        num_workers: int = 1,
        retries: int = 1,
        custom: Mapping[str, Any] | None = None,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        self._weights = dict(weights)
        self._beat = beat
        self._timeout = timeout_seconds
        self._num_workers = num_workers
        self._retries = retries
        hello = {"rewards": list(weights), "custom": custom or {}}
        self._hello = json.dumps(hello, default=str).encode() + b"\n"
        self._children: list[_Child] = []
        self._pending: deque[_Job] = deque()

    def __enter__(self) -> RewardRunner:
        try:
            for _ in range(self._num_workers):
                self._children.append(_Child(self._hello))
            while not all(child.is_ready for child in self._children):
                self._turn()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill the children and all that they started."""
        for child in self._children:
            child.kill()
        self._children.clear()

    def score_groups(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        """The groups, in order, each with one score a completion."""
        scores = iter(self.score([_request(group, k) for group in groups for k in range(len(group.completions))]))
        return [ScoredGroup(group, tuple(next(scores) for _ in group.completions)) for group in groups]

    def score(self, requests: Sequence[Mapping[str, Any]]) -> list[Score]:
        """One score a request, in order; a request has `to_be_evaluated`, `reference`, and may have `base.KEYWORDS`."""
        jobs = [_Job(json.dumps(request).encode() + b"\n") for request in requests]
        self._pending.extend(jobs)
        try:
            assert self._children, "use the runner as a context manager"
            for child in [child for child in self._children if child.has_ended()]:
                self._replace(child)
            while self._pending or any(child.jobs for child in self._children):
                self._turn()
        except BaseException:
            self.close()  # children that are halfway through our requests must not answer the next ones
            self._pending.clear()
            raise
        return [self._total(job) for job in jobs]

    def _turn(self) -> None:
        """Hand out work, wait until a pipe is ready or a deadline passes, and deal with what happened."""
        self._beat()
        self._hand_out()
        with selectors.DefaultSelector() as selector:
            for child in self._children:
                selector.register(child.output, selectors.EVENT_READ, child)
                if child.unsent:
                    selector.register(child.input, selectors.EVENT_WRITE, child)
            nearest = min((c.deadline for c in self._children if c.jobs or not c.is_ready), default=math.inf)
            wait = max(0.0, nearest - time.monotonic())
            events = selector.select(None if math.isinf(wait) else wait)
        lost: dict[_Child, str] = {}
        for key, event in events:
            if key.data in lost:  # both its pipes were ready, and the first told that it has ended
                continue
            if event == selectors.EVENT_WRITE:
                key.data.send()
            else:
                self._read(key.data, lost)
        now = time.monotonic()
        for child in self._children:
            if (child.jobs or not child.is_ready) and now >= child.deadline:
                lost.setdefault(child, "")
        for child, reason in lost.items():
            self._lose(child, reason)

    def _hand_out(self) -> None:
        """Top up each child, with fewer requests towards the end so that all finish together."""
        window = max(1, min(_WINDOW, len(self._pending) // (2 * len(self._children))))
        for child in self._children:
            if not child.is_ready or len(child.jobs) > window // 2:
                continue
            if self._pending and not child.jobs:
                child.deadline = time.monotonic() + self._timeout
            while self._pending and len(child.jobs) < window:
                job = self._pending.popleft()
                child.jobs.append(job)
                child.unsent += job.line

    def _read(self, child: _Child, lost: dict[_Child, str]) -> None:
        lines = child.receive()
        if lines is None:
            lost[child] = child.how_it_ended()
            return
        for line in lines:
            message = json.loads(line)
            if child.is_ready:
                child.jobs[0].answers.append(message)
                if len(child.jobs[0].answers) == len(self._weights):
                    child.jobs.popleft()
            elif "error" in message:
                raise RewardError(message["error"])
            else:
                child.is_ready = True
        if lines:
            child.deadline = time.monotonic() + self._timeout

    def _lose(self, child: _Child, reason: str) -> None:
        """Start another child; the job that killed this one is tried again or given up, the others just wait."""
        if not child.is_ready:
            names = ", ".join(self._weights)
            raise RewardError(f"loading the rewards {names} failed: {reason or f'not done in {START_SECONDS:g} s'}")
        if child.jobs:
            guilty = child.jobs.popleft()
            name = list(self._weights)[len(guilty.answers)]
            error = reason or f"not done in {self._timeout:g} s"
            guilty.failures += 1
            log.warning("reward %s: %s (attempt %d of %d)", name, error, guilty.failures, self._retries + 1)
            if guilty.failures <= self._retries:
                guilty.answers.clear()
                self._pending.appendleft(guilty)
            else:
                guilty.answers.append((None, {}, error))
            self._pending.extendleft(reversed(child.jobs))
        self._replace(child)

    def _replace(self, child: _Child) -> None:
        child.kill()
        self._children[self._children.index(child)] = _Child(self._hello)

    def _total(self, job: _Job) -> Score:
        total, metrics, errors = 0.0, {}, []
        for (name, weight), (value, extra, error) in zip(self._weights.items(), job.answers, strict=False):
            if value is None:
                errors.append(f"{name}: {error}")
                continue
            total += weight * value
            metrics[name] = value
            metrics |= {f"{name}/{key}": metric for key, metric in extra.items()}
        if not errors and not math.isfinite(total):
            errors.append(f"the weighted sum is {total}")
        return Score(None if errors else total, metrics, "; ".join(errors))


def _request(group: Group, k: int) -> dict[str, Any]:
    completion = group.completions[k]
    return {
        "to_be_evaluated": completion.text,
        "reference": group.prompt.reference,
        "prompt": group.prompt.text,
        "num_tokens": completion.num_sampled,
        "finish_reason": completion.finish_reason,
    }
