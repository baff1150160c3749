"""Source of groups of completions whose engines generate ahead of the training, with a bounded lag.

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

from cosmos_core.parallel.mesh import broadcast_object, is_first_rank
from cosmos_core.rewards.runner import ScoreGroupsFn
from cosmos_core.rollout.base import reseed
from cosmos_core.rollout.fleet import EngineFleet
from cosmos_core.rollout.groups import (
    GroupFilter,
    GroupPlan,
    check_scores,
    compute_filter_metrics,
    compute_group_metrics,
    compute_lag_metrics,
)
from cosmos_core.run.progress import ProgressWriter
from cosmos_core.types import Group, JsonValue, Prompt, Sampling, ScoredGroup

_POLL_SECONDS = 0.5

StepStatus = Literal["waiting", "stale", "complete"]
"""Status of the groups of a train step: `complete` if all are generated and scored. Otherwise `stale` if an engine has
no weights, else `waiting`."""


@dataclass
class AsyncGroupSource:
    """Group source whose engines generate groups while the ranks train; all ranks call its methods together."""

    engine_fleet: EngineFleet
    take_prompts: Callable[[int, int], Sequence[Prompt]]
    """Function `(position, count)` that returns `count` prompts from `position` on, in the order of the data over all
    epochs; fewer prompts at the end of the last epoch."""
    score: ScoreGroupsFn
    """Function that scores groups of completions; called in a thread of the first rank only."""
    sampling: Sampling
    progress: ProgressWriter
    group_plan: GroupPlan
    """Mapping from train steps to the groups that each step needs."""
    max_lag: int
    """Maximum age, in train steps, of the weights that generated a group, at the step that trains on the group."""
    send_missing_weights: Callable[[int], object]
    """Function `(step)` that sends the weights of train step `step` to engines without weights."""
    on_wait: Callable[[], None] = lambda: None
    """Function called while the source waits for groups; an error that it raises ends the training."""
    num_extra_prompts: int = 0
    """Number of prompts that engines get in addition to those that `max_lag` allows, to stay busy; groups that become
    too old are generated again. With `group_filter`, additional prompts only replace groups that the filter has dropped
    or, up to this number, is expected to drop."""
    max_steps_ahead: int | None = None
    """Maximum number of train steps whose groups are being generated or wait to be trained on; None: unbounded."""
    group_filter: GroupFilter | None = None
    """Filter that drops groups without a learning signal, such as equal rewards; new groups replace them. None: all
    groups are kept."""
    sleeps_in_training: bool = False
    """Whether engines sleep during training, so that they get prompts only while the training waits for groups."""
    sampled_groups: Sequence[ScoredGroup] = ()
    _first_unused_position: int = 0
    """Position, in the order of the data, of the first prompt that no train step has used."""
    _next_step: int = 0
    """Number of the train step that will use the first unused prompt."""
    _num_groups_needed: int | None = None
    """Number of groups that the current train step needs; None: the number in `group_plan`."""
    _next_request_position: int = 0
    """Position, in the order of the data, of the next prompt to send to an engine."""
    _group_futures: dict[int, Future[Group]] = field(default_factory=dict)
    _scored_groups: dict[int, ScoredGroup] = field(default_factory=dict)
    _state_condition: threading.Condition = field(default_factory=threading.Condition)
    _rollout_error: BaseException | None = None
    _rollout_thread: threading.Thread | None = None
    _is_closed: bool = False
    _is_training_waiting: bool = False
    _num_outdated_groups: int = 0
    _event_counts_at_last_step: tuple[int, int] = (0, 0)
    """Total numbers of outdated groups and of engine restarts, up to the end of the last train step."""
    _groups_per_kept_group: float = 1.0
    """Number of sampled groups for each group that the filter kept, as a moving average over recent train steps."""

    @property
    def is_exhausted(self) -> bool:
        return self.group_filter is not None and not self.take_prompts(self._first_unused_position, 1)

    def next_groups(self, step: int, num_groups: int | None = None) -> tuple[list[ScoredGroup], dict[str, float]]:
        """Wait until the groups of train step `step` are generated and scored; return the groups and their metrics."""
        start_time = time.perf_counter()
        with self._state_condition:
            self._next_step = step
            self._num_groups_needed = num_groups
            if self.group_filter is None:
                self._first_unused_position = self.group_plan.get_first_position(step)
        if self._rollout_thread is None and is_first_rank():
            self._next_request_position = self._first_unused_position
            self._rollout_thread = threading.Thread(target=self._run_rollouts, daemon=True, name="rollouts")
            self._rollout_thread.start()
        self.progress.phase("generate")
        self.engine_fleet.wake()
        self._is_training_waiting = True
        while True:
            status, kept_groups, sampled_groups = broadcast_object(self._poll_groups(step) if is_first_rank() else None)  # type: ignore[misc]
            self.on_wait()
            if status == "complete":
                break
            if status == "stale":
                self.send_missing_weights(step)
            self.progress.beat()
        with self._state_condition:
            self._is_training_waiting = False
        self.engine_fleet.sleep()
        with self._state_condition:
            for group_position in range(self._first_unused_position, self._first_unused_position + len(sampled_groups)):
                self._scored_groups.pop(group_position, None)
            self._first_unused_position, self._next_step = self._first_unused_position + len(sampled_groups), step + 1
            self._num_groups_needed = None
        self.sampled_groups = sampled_groups
        if not sampled_groups:
            return [], {}
        self._groups_per_kept_group = (self._groups_per_kept_group + len(sampled_groups) / max(1, len(kept_groups))) / 2
        previous_event_counts = self._event_counts_at_last_step
        self._event_counts_at_last_step = (self._num_outdated_groups, self.engine_fleet.num_restarts)
        return kept_groups, {
            **compute_group_metrics(sampled_groups),
            **(compute_filter_metrics(self.group_filter, sampled_groups) if self.group_filter else {}),
            "time/wait": time.perf_counter() - start_time,
            **compute_lag_metrics(kept_groups or sampled_groups, step),
            "rollout/outdated": float(self._event_counts_at_last_step[0] - previous_event_counts[0]),
            "rollout/restarts": float(self._event_counts_at_last_step[1] - previous_event_counts[1]),
        }

    def state_dict(self) -> dict[str, JsonValue]:
        return {"drawn": self._first_unused_position}

    def load_state_dict(self, state: dict[str, JsonValue]) -> None:
        self._first_unused_position = self._next_request_position = int(str(state.get("drawn", 0)))

    def close(self) -> None:
        """End the thread of the first rank that requests and scores groups."""
        self._is_closed = True
        if self._rollout_thread is not None:
            self._rollout_thread.join()

    # The methods below run on the first rank, the only rank that communicates with the engines.

    def _poll_groups(self, step: int) -> tuple[StepStatus, list[ScoredGroup], list[ScoredGroup]]:
        """Return the status of train step `step` and, if `complete`, its kept groups and all its sampled groups."""
        with self._state_condition:
            self._state_condition.wait_for(
                lambda: self._find_step_groups(step) or self._rollout_error or self.engine_fleet.needs_weights,
                _POLL_SECONDS,
            )
            if self._rollout_error is not None:
                raise self._rollout_error
            step_groups = self._find_step_groups(step)
        self.engine_fleet.raise_thread_error()
        if step_groups is None:
            return "stale" if self.engine_fleet.needs_weights else "waiting", [], []
        return "complete", *step_groups

    def _find_step_groups(self, step: int) -> tuple[list[ScoredGroup], list[ScoredGroup]] | None:
        """Return the groups of train step `step` that the filter kept, and all groups sampled for it; None if groups
        are missing."""
        kept_groups: list[ScoredGroup] = []
        sampled_groups: list[ScoredGroup] = []
        num_groups = self.group_plan.num_groups(step) if self._num_groups_needed is None else self._num_groups_needed
        max_groups = self.group_filter.get_max_sampled_groups(num_groups) if self.group_filter else num_groups
        while len(kept_groups) < num_groups and len(sampled_groups) < max_groups:
            group_position = self._first_unused_position + len(sampled_groups)
            scored_group = self._scored_groups.get(group_position)
            if scored_group is None:
                is_group_pending = group_position in self._group_futures or self.take_prompts(group_position, 1)
                return None if is_group_pending else (kept_groups, sampled_groups)
            if step - scored_group.group.version > self.max_lag:
                self._request_outdated_groups(
                    step, range(group_position, group_position + num_groups - len(kept_groups))
                )
                return None
            sampled_groups.append(scored_group)
            if self.group_filter is None or self.group_filter.has_learning_signal(scored_group):
                kept_groups.append(scored_group)
            if self.group_filter is not None and len(sampled_groups) == num_groups:
                check_scores(step, sampled_groups, self.group_filter.metrics)
        return kept_groups, sampled_groups

    def _request_outdated_groups(self, step: int, group_positions: Sequence[int]) -> None:
        """Request the groups at `group_positions` again if their weights are too old for train step `step`, but not
        before the engines have weights that are new enough."""
        if self.engine_fleet.version + self.max_lag < step:
            return
        # Each urgent request goes to the front of the queue, so the group that is needed first is requested last.
        for group_position in reversed(group_positions):
            scored_group = self._scored_groups.get(group_position)
            if scored_group is not None and step - scored_group.group.version > self.max_lag:
                del self._scored_groups[group_position]
                self._num_outdated_groups += 1
                self._group_futures[group_position] = self._request_group(
                    group_position, scored_group.group.prompt, is_urgent=True
                )

    def _request_group(self, group_position: int, prompt: Prompt, *, is_urgent: bool = False) -> Future[Group]:
        """Request the completions of the prompt at `group_position`. The seeds depend on the train step that would use
        the group if no group were dropped; a prompt that this step samples twice, in two epochs, gets different
        seeds."""
        step = self.group_plan.get_step_of_group(group_position)
        first_position = self.group_plan.get_first_position(step)
        num_repeats = sum(p.id == prompt.id for p in self.take_prompts(first_position, group_position - first_position))
        return self.engine_fleet.request(prompt, reseed(self.sampling, num_repeats), step, is_urgent=is_urgent)

    def _run_rollouts(self) -> None:
        try:
            while not self._is_closed:
                self._send_prompts()
                self._score_finished_groups()
        except BaseException as error:  # noqa: BLE001 - raised again in the training, which waits for this thread
            with self._state_condition:
                self._rollout_error = error
                self._state_condition.notify_all()

    def _send_prompts(self) -> None:
        """Send to the engines the prompts of all train steps for which the engines' weights are new enough."""
        with self._state_condition:
            if self.sleeps_in_training and not self._is_training_waiting:
                return
            end_position = self._first_unused_position + self._get_max_prefetched_prompts()
            for prompt in self.take_prompts(
                self._next_request_position, max(0, end_position - self._next_request_position)
            ):
                self._group_futures[self._next_request_position] = self._request_group(
                    self._next_request_position, prompt
                )
                self._next_request_position += 1

    def _get_max_prefetched_prompts(self) -> int:
        """Return the maximum number of prompts, counted from `_first_unused_position`, that are sent to the engines in
        advance, before the training needs the groups of these prompts."""
        # Count groups up to `last_allowed_step`, because `max_lag` forbids later steps to use the current weights.
        last_allowed_step = self.engine_fleet.version + self.max_lag
        num_prompts = self._count_groups_in_steps(last_allowed_step - self._next_step + 1)
        max_prompts = math.inf if self.max_steps_ahead is None else self._count_groups_in_steps(self.max_steps_ahead)
        if self.group_filter is None:
            return int(min(num_prompts + self.num_extra_prompts, max_prompts))
        if num_prompts <= 0:
            return 0
        # Engines may sample another prompt for each dropped group: without it, the step would never be complete.
        num_dropped_groups = sum(not self.group_filter.has_learning_signal(g) for g in self._scored_groups.values())
        num_drops_expected = min(self.num_extra_prompts, num_prompts * (self._groups_per_kept_group - 1))
        max_groups = (
            max_prompts if math.isinf(max_prompts) else self.group_filter.get_max_sampled_groups(int(max_prompts))
        )
        return int(min(min(num_prompts, max_prompts) + max(num_dropped_groups, num_drops_expected), max_groups))

    def _count_groups_in_steps(self, num_steps: int) -> int:
        """Return how many groups the next `num_steps` train steps need; 0 or less if `num_steps` is 0 or less."""
        step, group_plan = self._next_step, self.group_plan
        num_groups = group_plan.get_first_position(step + num_steps) - group_plan.get_first_position(step)
        if num_steps <= 0 or self._num_groups_needed is None:
            return num_groups
        return num_groups + self._num_groups_needed - group_plan.num_groups(step)

    def _score_finished_groups(self) -> None:
        """Wait up to 50 ms for a generated group, and score all groups that are generated but not scored."""
        with self._state_condition:
            group_futures = dict(self._group_futures)
        if not group_futures:
            time.sleep(0.02)
            return
        wait(group_futures.values(), timeout=0.05, return_when=FIRST_COMPLETED)
        finished_groups = {
            group_position: future.result() for group_position, future in group_futures.items() if future.done()
        }
        if not finished_groups:
            return
        scored_groups = self.score(list(finished_groups.values()))
        with self._state_condition:
            for group_position, scored_group in zip(finished_groups, scored_groups, strict=True):
                del self._group_futures[group_position]
                self._scored_groups[group_position] = scored_group
            self._state_condition.notify_all()


def make_prompt_reader(
    get_step_prompts: Callable[[int], Sequence[Any]], num_groups: int, num_steps: int
) -> Callable[[int, int], list[Any]]:
    """Return a function `(position, count)` that returns prompts in the order of the data. `get_step_prompts` returns
    the `num_groups` prompts of a train step."""

    def take_prompts(start_position: int, num_prompts: int) -> list[Any]:
        end_position = min(start_position + num_prompts, num_steps * num_groups)
        if end_position <= start_position:
            return []
        steps = range(start_position // num_groups, -(-end_position // num_groups))
        prompts = [prompt for step in steps for prompt in get_step_prompts(step)]
        return prompts[start_position - steps[0] * num_groups : end_position - steps[0] * num_groups]

    return take_prompts
