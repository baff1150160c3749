"""Engines apart from the trainer, in threads of this process, and what tests ask of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from cosmos_core.errors import DataError
from cosmos_core.rollout.async_groups import AsyncGroupSource, make_prompt_reader
from cosmos_core.rollout.base import Bucket, LoadReceipt, WeightFormat
from cosmos_core.rollout.fleet import EngineFleet
from cosmos_core.rollout.groups import GroupPlan
from cosmos_core.rollout.replica import EngineReplica
from cosmos_core.run.progress import ProgressWriter
from cosmos_core.types import Completion, Group, Prompt, Sampling, Score, ScoredGroup, Segment
from tests.conftest import wait_until

PROMPTS = [Prompt(i, (1, 2), f"p{i}", "") for i in range(40)]
SAMPLING = Sampling(num_completions=2, max_tokens=4, seed=1)


class Drawing:
    """An engine whose completions are its weights: one token, the version."""

    name = "drawing"
    weight_format: WeightFormat = "checkpoint"
    ranks_per_engine = 1

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.version = 0
        self.waiting: list[tuple[Prompt, Sampling, int]] = []
        self.hangs = threading.Event()
        self.seen: list[int] = []
        self.calls: list[str] = []

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> None:
        if any(prompt.text == "refused" for prompt in prompts):
            raise DataError("too long")
        self.waiting += [(prompt, sampling, step) for prompt in prompts]

    def completed(self) -> list[Group]:
        while self.hangs.is_set():
            time.sleep(0.01)
        if not self.waiting:
            return []
        prompt, sampling, step = self.waiting.pop(0)
        self.seen.append(prompt.id)
        segment = Segment((self.version,), True, (-1.0,), self.version)
        return [Group(prompt, (Completion((segment,), "stop", ""),) * sampling.num_completions, step)]

    def load_weights(self, version: int, buckets: Iterable[Bucket]) -> LoadReceipt:
        self.weights = {name: tensor.clone() for bucket in buckets for name, tensor in bucket}
        self.version = version
        return LoadReceipt(version, len(self.weights))

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        return [float(self.weights["a"].flatten()[0])] * (len(token_ids) - 1)

    def sleep(self, level: int = 1) -> None:
        self.calls.append("sleep")

    def wake(self) -> None:
        self.calls.append("wake")

    def close(self) -> None: ...


class Stuck(Drawing):
    """An engine whose loads hang too."""

    def load_weights(self, version: int, buckets: Iterable[Bucket]) -> LoadReceipt:
        while self.hangs.is_set():
            time.sleep(0.01)
        return super().load_weights(version, buckets)


class Threaded:
    """A replica in this process that can die, and is there again at once, as a new one."""

    def __init__(self, make: Callable[[], Any] = Drawing) -> None:
        self._make, self._pool = make, ThreadPoolExecutor(32)
        self.deaths = 0
        self.refusals = 0
        """Questions that are refused because it is on its way."""
        self._start()

    def _start(self) -> None:
        self.engine: Any = None
        self._dead = threading.Event()

        def open_engine(beat: Callable[[], None]) -> Any:
            self.engine = self._make()
            self.engine.beat = beat
            return self.engine

        self._replica = EngineReplica(open_engine)

    def call(self, method: str, *arguments: Any, shared_value: Any = None, **keywords: Any) -> Future[Any]:
        if self.refusals:
            self.refusals -= 1
            refused: Future[Any] = Future()
            refused.set_exception(ConnectionRefusedError("it is restarting"))
            return refused
        replica, dead = self._replica, self._dead
        last = [] if shared_value is None else [shared_value]
        inside = self._pool.submit(lambda: getattr(replica, method)(*arguments, *last, **keywords))
        answer: Future[Any] = Future()

        def follow() -> None:
            while not inside.done() and not dead.is_set():
                time.sleep(0.005)
            if dead.is_set():
                answer.set_exception(ConnectionError("killed"))
            elif (error := inside.exception()) is not None:
                answer.set_exception(error)
            else:
                answer.set_result(inside.result())

        threading.Thread(target=follow, daemon=True).start()
        return answer

    def put(self, value: Any) -> Any:
        return value

    def kill(self) -> None:
        self.deaths += 1
        dead, engine = self._dead, self.engine
        self._start()
        dead.set()
        if engine is not None:
            engine.hangs.clear()


@contextmanager
def fleet_of(
    *handles: Any, patience: float = 30.0, most_groups: int = 3, version: int | None = None, **keywords: Any
) -> Iterator[EngineFleet]:
    """A fleet of these engines; with a `version`, of which all are open and have these weights."""
    with closing(EngineFleet(lambda: handles, max_groups=most_groups, timeout_seconds=patience, **keywords)) as fleet:
        if version is not None:
            all_open(fleet, len(handles))
            fleet.load_weights(version, weights(version))
        yield fleet


def all_open(fleet: EngineFleet, number: int) -> None:
    wait_until(lambda: len(fleet._pool.open_engines()) == number, 60, "all engines are open")


def is_back(fleet: EngineFleet) -> None:
    wait_until(lambda: fleet.needs_weights, 60, "it is back")


def load_new(fleet: EngineFleet, version: int) -> None:
    """Give the weights to an engine that has none once it is back."""
    is_back(fleet)
    with fleet.loading_new_engines():
        fleet.load_weights(version, weights(version))


def weights(version: int) -> list[Bucket]:
    return [[("a", torch.full((3,), float(version)))], [("b", torch.tensor(2, dtype=torch.int8))]]


def score(groups: Sequence[Group]) -> list[ScoredGroup]:
    """Completions of odd prompts differ, those of even ones do not."""
    return [ScoredGroup(group, (Score(1.0), Score(float(1 - group.prompt.id % 2)))) for group in groups]


def score_slowly(groups: Sequence[Group]) -> list[ScoredGroup]:
    time.sleep(0.03)
    return score(groups)


def source_of(fleet: EngineFleet, folder: Path, **keywords: Any) -> AsyncGroupSource:
    order = make_prompt_reader(lambda step: PROMPTS[step * 4 : step * 4 + 4], 4, 10)
    settings: dict[str, Any] = {"take_prompts": order, "group_plan": GroupPlan(4), "max_lag": 2, **keywords}
    settings.setdefault("score", score)
    settings.setdefault("send_missing_weights", lambda step: None)
    return AsyncGroupSource(fleet, sampling=SAMPLING, progress=ProgressWriter(folder / "p.json"), **settings)


def ids(groups: Sequence[ScoredGroup]) -> list[int]:
    return [scored.group.prompt.id for scored in groups]
