"""Group source whose engines generate ahead of the training, with a bounded lag.

Each train step has its own prompts, in the order of the data, and waits for their groups. So the step that trains on a
prompt does not depend on timing, no prompt is lost or used twice if a process dies, and long completions are not
underrepresented. Prompts of step N are sent to engines once the engines' weights are at most `max_lag` steps older than
N, so no step trains on an older group. Groups that were generated but not used before a training ended are generated
again, with the same seeds, when the training resumes.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, Literal

from cosmos_core.parallel.mesh import broadcast_object, is_first
from cosmos_core.rewards.runner import ScoreGroups
from cosmos_core.rollout.base import reseed
from cosmos_core.rollout.fleet import Fleet
from cosmos_core.rollout.groups import Filter, StepGroups, check_scores, filtered_metrics, group_metrics, lag_metrics
from cosmos_core.run.progress import Progress
from cosmos_core.types import Group, JsonValue, Prompt, Sampling, ScoredGroup

_POLL_SECONDS = 0.5

Status = Literal["waiting", "stale", "whole"]
"""State of a step's groups: some are missing, engines need newer weights to generate them, or all are scored."""


@dataclass
class AsyncGroupSource:
    """Group source whose engines generate groups while the ranks train; all ranks call its methods together."""

    fleet: Fleet
    take: Callable[[int, int], Sequence[Prompt]]
    """Function `(position, count)` that returns `count` prompts of the data over all epochs; fewer at the end."""
    score: ScoreGroups
    """Function that scores groups of completions; called in a thread of the first rank only."""
    sampling: Sampling
    progress: Progress
    steps: StepGroups
    """Mapping from train steps to the groups that each step needs."""
    max_lag: int
    """Maximum number of steps by which the weights that generate a group may be older than its train step."""
    resync: Callable[[int], object]
    """Function that sends the current weights, as the version of a train step, to engines without weights."""
    on_wait: Callable[[], None] = lambda: None
    """Function called while the source waits for groups; it may raise an error to stop."""
    num_extra_prompts: int = 0
    """Number of prompts that engines get beyond those that `max_lag` allows, to stay busy; groups that turn out too old
    are generated again. With a filter, at most the groups that it is expected to drop, estimated from recent steps."""
    max_steps_ahead: int | None = None
    """Maximum number of train steps whose prompts are in flight or waiting; None: unbounded."""
    filter: Filter | None = None
    """Filter of groups without a learning signal, which are replaced by new groups; None: all groups are kept."""
    sleeps_in_training: bool = False
    """Whether engines sleep during training, so that they get prompts only while the training waits for groups."""
    sampled: Sequence[ScoredGroup] = ()
    _position: int = 0
    """Position, in the order of the data, of the first prompt that no train step has used."""
    _step: int = 0
    """Number of the train step that will use the first unused prompt."""
    _num_groups_needed: int | None = None
    """Number of groups that the current train step needs; None: the number in `steps`."""
    _next: int = 0
    """Position, in the order of the data, of the next prompt to send to an engine."""
    _pending: dict[int, Future[Group]] = field(default_factory=dict)
    _scored: dict[int, ScoredGroup] = field(default_factory=dict)
    _ready: threading.Condition = field(default_factory=threading.Condition)
    _problem: BaseException | None = None
    _thread: threading.Thread | None = None
    _is_closed: bool = False
    _is_training_waiting: bool = False
    """Whether the training currently waits for groups."""
    _num_outdated: int = 0
    _reported_counts: tuple[int, int] = (0, 0)
    """Numbers of outdated groups and of engine restarts that metrics have already reported."""
    _sampled_per_kept: float = 1.0
    """Moving average over recent steps of sampled groups per kept group."""

    @property
    def is_exhausted(self) -> bool:
        return self.filter is not None and not self.take(self._position, 1)

    def next_groups(self, step: int, num_groups: int | None = None) -> tuple[list[ScoredGroup], dict[str, float]]:
        """Wait until the groups of train step `step` are generated and scored; return the groups and their metrics."""
        start_time = time.perf_counter()
        with self._ready:
            self._step = step
            self._num_groups_needed = num_groups
            if self.filter is None:
                self._position = self.steps.first(step)
        if self._thread is None and is_first():
            self._next = self._position
            self._thread = threading.Thread(target=self._run_rollouts, daemon=True, name="rollouts")
            self._thread.start()
        self.progress.phase("generate")
        self.fleet.wake()
        self._is_training_waiting = True
        while True:
            status, kept, sampled = broadcast_object(self._poll_step(step) if is_first() else None)  # type: ignore[misc]
            if status == "whole":
                break
            if status == "stale":
                self.resync(step)
            self.progress.beat()
            self.on_wait()
        with self._ready:
            self._is_training_waiting = False
        self.fleet.sleep()
        with self._ready:
            for position in range(self._position, self._position + len(sampled)):
                self._scored.pop(position, None)
            self._position, self._step = self._position + len(sampled), step + 1
            self._num_groups_needed = None
        self.sampled = sampled
        if not sampled:
            return [], {}
        self._sampled_per_kept = (self._sampled_per_kept + len(sampled) / max(1, len(kept))) / 2
        previous_counts, self._reported_counts = self._reported_counts, (self._num_outdated, self.fleet.num_restarts)
        return kept, {
            **group_metrics(sampled),
            **(filtered_metrics(self.filter, sampled) if self.filter else {}),
            "time/wait": time.perf_counter() - start_time,
            **lag_metrics(kept or sampled, step),
            "rollout/outdated": float(self._reported_counts[0] - previous_counts[0]),
            "rollout/restarts": float(self._reported_counts[1] - previous_counts[1]),
        }

    def state_dict(self) -> dict[str, JsonValue]:
        return {"drawn": self._position}

    def load_state_dict(self, state: dict[str, JsonValue]) -> None:
        self._position = self._next = int(str(state.get("drawn", 0)))

    def close(self) -> None:
        """End the thread that scores groups."""
        self._is_closed = True
        if self._thread is not None:
            self._thread.join()

    # Only the first rank runs the methods below, because it alone communicates with the engines.

    def _poll_step(self, step: int) -> tuple[Status, list[ScoredGroup], list[ScoredGroup]]:
        """Return the status of `step`, its groups to train on if it is `whole`, and all groups that were sampled."""
        with self._ready:
            self._ready.wait_for(
                lambda: self._groups_of(step) or self._problem or self.fleet.needs_weights, _POLL_SECONDS
            )
            if self._problem is not None:
                raise self._problem
            groups = self._groups_of(step)
        self.fleet.check()
        if groups is None:
            return "stale" if self.fleet.needs_weights else "waiting", [], []
        return "whole", *groups

    def _groups_of(self, step: int) -> tuple[list[ScoredGroup], list[ScoredGroup]] | None:
        """Return the kept and the sampled groups of train step `step`; None if groups are missing."""
        kept: list[ScoredGroup] = []
        sampled: list[ScoredGroup] = []
        num_required = self.steps.count(step) if self._num_groups_needed is None else self._num_groups_needed
        max_groups = self.filter.max_sampled_groups(num_required) if self.filter else num_required
        while len(kept) < num_required and len(sampled) < max_groups:
            position = self._position + len(sampled)
            scored_group = self._scored.get(position)
            if scored_group is None:
                return None if position in self._pending or self.take(position, 1) else (kept, sampled)
            if step - scored_group.group.version > self.max_lag:
                self._request_outdated_groups(step, range(position, position + num_required - len(kept)))
                return None
            sampled.append(scored_group)
            if self.filter is None or self.filter.has_learning_signal(scored_group):
                kept.append(scored_group)
            if self.filter is not None and len(sampled) == num_required:
                check_scores(step, sampled, self.filter.metrics)
        return kept, sampled

    def _request_outdated_groups(self, step: int, positions: Sequence[int]) -> None:
        """Request the groups at `positions` again if their weights are too old for train step `step`, but not before
        the engines have weights that are new enough."""
        if self.fleet.version + self.max_lag < step:
            return
        # Each urgent request goes to the front of the queue, so the group that is needed first is requested last.
        for position in reversed(positions):
            scored_group = self._scored.get(position)
            if scored_group is not None and step - scored_group.group.version > self.max_lag:
                del self._scored[position]
                self._num_outdated += 1
                self._pending[position] = self._request_group(position, scored_group.group.prompt, is_urgent=True)

    def _request_group(self, position: int, prompt: Prompt, *, is_urgent: bool = False) -> Future[Group]:
        """Request the completions of the prompt at `position` with the seed of the step that would use the group if no
        group were dropped. A step that spans two epochs may sample a prompt twice, with different seeds."""
        step = self.steps.step_of(position)
        first_position = self.steps.first(step)
        num_repeats = sum(each.id == prompt.id for each in self.take(first_position, position - first_position))
        return self.fleet.request(prompt, reseed(self.sampling, num_repeats), step, is_urgent=is_urgent)

    def _run_rollouts(self) -> None:
        try:
            while not self._is_closed:
                self._send_prompts()
                self._score_finished()
        except BaseException as error:  # noqa: BLE001 - raised again in the training, which waits for this thread
            with self._ready:
                self._problem = error
                self._ready.notify_all()

    def _send_prompts(self) -> None:
        """Send the engines the prompts of all train steps for which the engines' weights are new enough."""
        with self._ready:
            if self.sleeps_in_training and not self._is_training_waiting:
                return
            end_position = self._position + self._max_prompts_ahead()
            for prompt in self.take(self._next, max(0, end_position - self._next)):
                self._pending[self._next] = self._request_group(self._next, prompt)
                self._next += 1

    def _max_prompts_ahead(self) -> int:
        """Return how many prompts, counted from `_position`, may have been sent to the engines."""
        newest_step = self.fleet.version + self.max_lag  # the last step that may train on groups of the current weights
        num_allowed = self._num_groups(newest_step - self._step + 1)
        max_ahead = math.inf if self.max_steps_ahead is None else self._num_groups(self.max_steps_ahead)
        if self.filter is None:
            return int(min(num_allowed + self.num_extra_prompts, max_ahead))
        if num_allowed <= 0:
            return 0
        # Engines may sample another prompt for each dropped group; otherwise the train step would never be complete.
        num_dropped = sum(not self.filter.has_learning_signal(scored_group) for scored_group in self._scored.values())
        num_expected_drops = min(self.num_extra_prompts, num_allowed * (self._sampled_per_kept - 1))
        max_sampled = max_ahead if math.isinf(max_ahead) else self.filter.max_sampled_groups(int(max_ahead))
        return int(min(min(num_allowed, max_ahead) + max(num_dropped, num_expected_drops), max_sampled))

    def _num_groups(self, num_steps: int) -> int:
        """Return the number of groups that the next `num_steps` steps need; 0 or less if there are no such steps."""
        num_groups = self.steps.first(self._step + num_steps) - self.steps.first(self._step)
        if num_steps <= 0 or self._num_groups_needed is None:
            return num_groups
        return num_groups + self._num_groups_needed - self.steps.count(self._step)

    def _score_finished(self) -> None:
        """Wait briefly for engines to finish groups, and score finished groups."""
        with self._ready:
            pending = dict(self._pending)
        if not pending:
            time.sleep(0.02)
            return
        wait(pending.values(), timeout=0.05, return_when=FIRST_COMPLETED)
        generated = {position: future.result() for position, future in pending.items() if future.done()}
        if not generated:
            return
        scored_groups = self.score(list(generated.values()))
        with self._ready:
            for position, scored_group in zip(generated, scored_groups, strict=True):
                del self._pending[position]
                self._scored[position] = scored_group
            self._ready.notify_all()


def steps_of(
    get_step_prompts: Callable[[int], Sequence[Any]], num_groups: int, num_steps: int
) -> Callable[[int, int], list[Any]]:
    """Return a function `(position, count)` that returns prompts in the order of the data, from `get_step_prompts`,
    which returns the prompts of a train step."""

    def take_prompts(start_position: int, count: int) -> list[Any]:
        end_position = min(start_position + count, num_steps * num_groups)
        if end_position <= start_position:
            return []
        steps = range(start_position // num_groups, -(-end_position // num_groups))
        prompts = [prompt for step in steps for prompt in get_step_prompts(step)]
        return prompts[start_position - steps[0] * num_groups : end_position - steps[0] * num_groups]

    return take_prompts
