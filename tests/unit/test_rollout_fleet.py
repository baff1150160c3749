"""Engines apart from the trainer, in threads of this process: what is lost or too old when they die or hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_core.errors import ConfigError, DataError, StageFailed
from cosmos_core.rollout.ahead import Ahead, steps_of
from cosmos_core.rollout.base import Bucket, Loaded, WeightFormat, generate
from cosmos_core.rollout.fleet import Fleet
from cosmos_core.rollout.groups import Filter
from cosmos_core.rollout.replica import Replica, packed, unpacked
from cosmos_core.run.progress import Progress
from cosmos_core.types import Completion, Group, Prompt, Sampling, Score, ScoredGroup, Segment

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

    def load_weights(self, version: int, buckets: Iterable[Bucket]) -> Loaded:
        self.weights = {name: tensor.clone() for bucket in buckets for name, tensor in bucket}
        self.version = version
        return Loaded(version, len(self.weights))

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        return [float(self.weights["a"].flatten()[0])] * (len(token_ids) - 1)

    def sleep(self, level: int = 1) -> None:
        self.calls.append("sleep")

    def wake(self) -> None:
        self.calls.append("wake")

    def close(self) -> None: ...


class Threaded:
    """A replica in this process that can die, and is there again at once, as a new one."""

    def __init__(self, make: Callable[[], Any] = Drawing) -> None:
        self._make, self._pool = make, ThreadPoolExecutor(32)
        self.deaths = 0
        self._start()

    def _start(self) -> None:
        self.engine: Any = None
        self._dead = threading.Event()

        def open_engine() -> Any:
            self.engine = self._make()
            return self.engine

        self._replica = Replica(open_engine)

    def ask(self, method: str, *arguments: Any, shared: Any = None, **keywords: Any) -> Future[Any]:
        replica, dead = self._replica, self._dead
        last = [] if shared is None else [shared]
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
def fleet_of(*handles: Any, patience: float = 30.0, most_groups: int = 3, **keywords: Any) -> Iterator[Fleet]:
    fleet = Fleet(lambda: handles, most_groups=most_groups, patience=patience, **keywords)
    try:
        yield fleet
    finally:
        fleet.close()


def weights(version: int) -> list[Bucket]:
    return [[("a", torch.full((3,), float(version)))], [("b", torch.tensor(2, dtype=torch.int8))]]


def score(groups: Sequence[Group]) -> list[ScoredGroup]:
    """Completions of odd prompts differ, those of even ones do not."""
    return [ScoredGroup(group, (Score(1.0), Score(float(1 - group.prompt.id % 2)))) for group in groups]


def score_slowly(groups: Sequence[Group]) -> list[ScoredGroup]:
    time.sleep(0.03)
    return score(groups)


def source_of(fleet: Fleet, folder: Path, **keywords: Any) -> Ahead:
    order = steps_of(lambda step: PROMPTS[step * 4 : step * 4 + 4], 4, 10)
    settings: dict[str, Any] = {"take": order, "num_groups": 4, "allowed": 2, "score": score, **keywords}
    settings.setdefault("resync", lambda step: None)
    return Ahead(fleet, sampling=SAMPLING, progress=Progress(folder / "p.json"), **settings)


def ids(groups: Sequence[ScoredGroup]) -> list[int]:
    return [scored.group.prompt.id for scored in groups]


def test_a_bucket_travels_as_one_array_with_every_dtype_and_shape() -> None:
    tensors = {
        "a": torch.randn(3, 5, dtype=torch.bfloat16), "b": torch.arange(7, dtype=torch.int8), "c": torch.tensor(1.5),
        "d": torch.randn(2, 2, dtype=torch.float64).T, "e": torch.empty(0, 4),
    }  # fmt: skip
    found = dict(unpacked(packed(list(tensors.items()))))
    assert {name: (t.dtype, t.shape) for name, t in found.items()} == {
        n: (t.dtype, t.shape) for n, t in tensors.items()
    }
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_several_engines_are_one_and_each_gets_the_weights() -> None:
    handles = [Threaded(), Threaded()]
    with fleet_of(*handles) as fleet:
        while not all(handle.engine for handle in handles) or not fleet.is_stale:
            time.sleep(0.01)
        time.sleep(0.1)
        assert fleet.load_weights(4, weights(4)) == Loaded(4, 2) and fleet.has_new
        groups = generate(fleet, PROMPTS[:9], SAMPLING, 5)
        assert [(group.prompt.id, group.step, group.version) for group in groups] == [(i, 5, 4) for i in range(9)]
        assert all(handle.engine.seen for handle in handles), "one engine has done it all"
        assert fleet.all_logprobs([1, 2, 3]) == [[4.0, 4.0], [4.0, 4.0]]
        assert fleet.load_weights(5, weights(5)) == Loaded(5, 2) and not fleet.has_new and not fleet.is_stale


def test_an_engine_that_dies_is_replaced_and_its_prompts_go_to_others() -> None:
    handles = [Threaded(), Threaded()]
    with fleet_of(*handles, most_groups=20) as fleet:
        while not all(handle.engine for handle in handles):
            time.sleep(0.01)
        time.sleep(0.1)
        fleet.load_weights(1, weights(1))
        handles[0].engine.hangs.set()
        fleet.submit(PROMPTS[:12], SAMPLING, 1)
        time.sleep(0.2)
        handles[0].kill()
        assert sorted(group.prompt.id for group in fleet.completed()) == list(range(12))
        assert fleet.num_restarts == 1
        while not fleet.is_stale:
            time.sleep(0.01)
        with fleet.only_new():
            fleet.load_weights(1, weights(1))
        assert fleet.has_new and not fleet.is_stale and handles[0].engine.version == 1


def test_an_engine_that_hangs_is_ended(tmp_path: Path) -> None:
    handle = Threaded()
    with fleet_of(handle, patience=0.5) as fleet:
        fleet.load_weights(0, weights(0))
        source = source_of(fleet, tmp_path, resync=lambda step: fleet.load_weights(step, weights(step)))
        assert ids(source.next(0)[0]) == [0, 1, 2, 3]
        fleet.load_weights(1, weights(1))
        handle.engine.hangs.set()
        seen = [ids(source.next(step)[0]) for step in range(1, 4)]
        assert seen == [list(range(4 * step, 4 * step + 4)) for step in range(1, 4)] and handle.deaths == 1
        source.close()


def test_an_engine_that_cannot_be_opened_or_refuses_a_prompt_says_why() -> None:
    def refuse() -> Any:
        raise ConfigError("head_dim = 7")

    with pytest.raises(ConfigError, match="head_dim = 7"):
        Fleet(lambda: [Threaded(refuse)], most_groups=1, patience=9)
    with fleet_of(Threaded()) as fleet:
        fleet.load_weights(0, weights(0))
        with pytest.raises(DataError, match="too long"):
            fleet.request(Prompt(1, (1,), "refused", ""), SAMPLING, 0).result(timeout=20)


def test_an_engine_that_dies_again_and_again_ends_the_stage() -> None:
    handle = Threaded()
    with fleet_of(handle) as fleet:
        for _ in range(5):
            time.sleep(0.1)
            handle.kill()
        with pytest.raises(StageFailed, match="died 4 times"):
            fleet.submit(PROMPTS[:1], SAMPLING, 0)
            fleet.completed()


@pytest.mark.parametrize("scores", [score, score_slowly])
@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_no_group_is_older_than_allowed_and_every_prompt_is_trained_once(
    allowed: int, scores: Any, tmp_path: Path
) -> None:
    with fleet_of(Threaded(), Threaded()) as fleet:
        fleet.load_weights(0, weights(0))
        source = source_of(fleet, tmp_path, allowed=allowed, score=scores)
        lags, trained, outdated = [], [], 0.0
        for step in range(10):
            groups, metrics = source.next(step)
            trained += ids(groups)
            lags.append(metrics["rollout/version_lag"])
            outdated += metrics["rollout/outdated"]
            time.sleep(0.05 if step % 2 else 0.0)  # a train step, in which engines go on
            fleet.load_weights(step + 1, weights(step + 1))
        assert trained == list(range(40))
        assert max(lags) == allowed and outdated == 0
        source.close()


def test_what_was_fetched_too_far_ahead_is_generated_again(tmp_path: Path) -> None:
    with fleet_of(Threaded(), most_groups=40) as fleet:
        fleet.load_weights(0, weights(0))
        source = source_of(fleet, tmp_path, allowed=1, beyond=8)
        trained, outdated = [], 0.0
        for step in range(10):
            groups, metrics = source.next(step)
            assert metrics["rollout/version_lag"] <= 1
            trained += ids(groups)
            outdated += metrics["rollout/outdated"]
            time.sleep(0.1)
            fleet.load_weights(step + 1, weights(step + 1))
        assert trained == list(range(40)) and outdated > 0
        source.close()


def test_a_ceiling_bounds_what_is_fetched_ahead(tmp_path: Path) -> None:
    handle = Threaded()
    with fleet_of(handle, most_groups=40) as fleet:
        fleet.load_weights(0, weights(0))
        source = source_of(fleet, tmp_path, allowed=1, beyond=30, most_steps=3)
        source.next(0)
        time.sleep(0.3)
        assert sorted(handle.engine.seen) == list(range(4 + 12)), "step 0 is trained, and three more are ahead"
        source.close()


def test_dropped_groups_are_replaced_by_the_next_prompts_and_a_resumed_source_goes_on(
    tmp_path: Path,
) -> None:
    def take(start: int, count: int) -> list[Prompt]:
        return PROMPTS[start : start + count]

    def run(start: int, state: dict[str, Any] | None, steps: int) -> tuple[list[int], dict[str, Any]]:
        trained: list[int] = []
        with fleet_of(Threaded(), Threaded()) as fleet:
            fleet.load_weights(start, weights(start))
            source = source_of(fleet, tmp_path, take=take, filter=Filter())
            if state:
                source.load_state_dict(state)
            for step in range(start, start + steps):
                groups, metrics = source.next(step)
                trained += ids(groups)
                assert metrics["rollout/sampled_groups"] == 2 * len(groups)
                fleet.load_weights(step + 1, weights(step + 1))
            assert source.is_over == (trained[-1] == 39)
            source.close()
            return trained, source.state_dict()

    whole, end = run(0, None, 5)
    assert whole == list(range(1, 40, 2)) and end == {"drawn": 40}
    first, state = run(0, None, 2)
    assert first + run(2, state, 3)[0] == whole


@pytest.mark.parametrize("takes_turns", [True, False])
def test_engines_on_the_gpus_of_the_trainer_sleep_while_it_trains(takes_turns: bool, tmp_path: Path) -> None:
    handle = Threaded()
    with fleet_of(handle, takes_turns=takes_turns) as fleet:
        fleet.load_weights(0, weights(0))
        source = source_of(fleet, tmp_path, allowed=0)
        for step in range(2):
            source.next(step)
            fleet.load_weights(step + 1, weights(step + 1))
        assert handle.engine.calls == ["wake", "sleep"] * 2 * takes_turns
        source.close()


def test_weights_reach_completions_in_flight_only_as_the_recipe_says() -> None:
    class Slow(Drawing):
        def step(self) -> list[Group]:
            time.sleep(0.02)
            return self.completed() if len(self.waiting) % 2 == 0 or self.steps() else []

        def steps(self) -> bool:
            self.passes = getattr(self, "passes", 0) + 1
            return self.passes % 5 == 0

    for swap, versions in (("disabled", {1, 2}), ("inference", {1, 2}), ("generation", {1})):
        handle = Threaded(Slow)
        with fleet_of(handle, most_groups=20, swap=swap) as fleet:
            fleet.load_weights(1, weights(1))
            fleet.submit(PROMPTS[:8], SAMPLING, 1)
            time.sleep(0.15)
            fleet.load_weights(2, weights(2))
            assert {group.version for group in fleet.completed()} == versions, swap
            assert handle.engine.version == 2
