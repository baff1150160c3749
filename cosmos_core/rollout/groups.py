"""Sources of the scored groups of a train step.

`SyncGroupSource` generates them with the newest weights at each step; `FilteredGroupSource` drops groups without a
learning signal and generates others. `async_groups.AsyncGroupSource` generates them while other groups are trained on.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from cosmos_core.errors import RewardError
from cosmos_core.parallel.mesh import num_ranks
from cosmos_core.rewards.base import all_invalid
from cosmos_core.rewards.runner import ScoreGroups
from cosmos_core.rollout.base import Engine, drawn_again, generate
from cosmos_core.run.progress import Progress
from cosmos_core.types import Completion, Group, JsonValue, Prompt, Sampling, ScoredGroup

logger = logging.getLogger(__name__)


class GroupSource(Protocol):
    """Gives the scored groups of each train step."""

    @property
    def is_over(self) -> bool:
        """Return whether there will be no more groups."""
        ...

    def next(self, step: int, num_groups: int | None = None) -> tuple[list[ScoredGroup], dict[str, float]]:
        """Return the groups of train step `step`, counted from 0, and metrics about them; `num_groups`: how many, None:
        as many as a step has."""
        ...

    def state_dict(self) -> dict[str, JsonValue]:
        """Return what a checkpoint has to keep, so that no prompt is lost or trained twice."""
        ...

    def load_state_dict(self, state: dict[str, JsonValue]) -> None:
        """Go on from what `state_dict` returned."""
        ...


@dataclass(frozen=True)
class StepGroups:
    """Which groups a train step is the first to need, by their positions in the order of the prompts; a group may be
    spread over several steps."""

    batch: int
    """Completions of a train step."""
    size: int = 1
    """Completions of a group."""

    def first(self, step: int) -> int:
        """Return the position of the first group that no step before `step` needs."""
        return -(-step * self.batch // self.size)

    def count(self, step: int) -> int:
        """Return how many groups `step` is the first to need."""
        return self.first(step + 1) - self.first(step)

    def step_of(self, position: int) -> int:
        """Return the step that is the first to need the group at a position."""
        return position * self.size // self.batch


@dataclass
class SyncGroupSource:
    """Alternates generation and training, so that the newest weights generate every group."""

    prompts: Callable[[int], Sequence[Prompt]]
    """Gives the prompts of a train step, in order."""
    engine: Engine
    score: ScoreGroups
    sampling: Sampling
    progress: Progress
    batch_size: int
    """Prompts that an engine has at a time."""
    between: Callable[[int], None] = lambda step: None
    """Called with the step after each batch; may raise to stop, because nothing of the step was trained yet."""
    publish_every: int = 1
    """Train steps between two loads of weights."""
    is_over: ClassVar[bool] = False
    """The steps are numbered: whoever asks knows the last."""

    def next(self, step: int, num_groups: int | None = None) -> tuple[list[ScoredGroup], dict[str, float]]:
        """Return the groups of train step `step`, or the first so many of them, generated and scored now."""
        began = time.perf_counter()
        self.engine.wake()
        groups = self.generated(self.prompts(step)[:num_groups], step, self.sampling)
        self.rest(step)
        seconds = time.perf_counter() - began
        scored = self.scored(groups)
        times = _times(scored, seconds, time.perf_counter() - began)
        return scored, group_metrics(scored) | times | lag_metrics(scored, step)

    def generated(self, prompts: Sequence[Prompt], step: int, sampling: Sampling) -> list[Group]:
        """Return the groups of these prompts, in their order."""
        num_prompts = self.batch_size * num_ranks()
        self.progress.phase("generate")
        groups: list[Group] = []
        for start in range(0, len(prompts), num_prompts):
            groups += generate(self.engine, prompts[start : start + num_prompts], sampling, step)
            self.progress.beat()
            self.between(step)
        return groups

    def rest(self, step: int) -> None:
        """Let the engine sleep while step `step` is trained; its weights are given up where those of the update are the
        next thing that it sees."""
        self.engine.sleep(level=1 if (step + 1) % self.publish_every else 2)

    def scored(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        """Return the groups with their scores."""
        self.progress.phase("score")
        return self.score(groups)

    def state_dict(self) -> dict[str, JsonValue]:
        """Return nothing: prompts and seeds are functions of the step."""
        return {}

    def load_state_dict(self, state: dict[str, JsonValue]) -> None:
        """Take nothing; see `state_dict`."""


@dataclass(frozen=True)
class Filter:
    """Dynamic sampling (DAPO, arXiv 2503.14476): of no use are whole groups in which no completion differs."""

    metrics: Sequence[str] = ()
    """Reward metrics that must differ; empty: the total reward."""
    max_retries: int = 0
    """Most rounds after the first in one train step; 0: until the prompts end."""

    def keeps(self, group: ScoredGroup) -> bool:
        """Say whether the valid completions of a group differ in what they are filtered by."""
        valid = [score for score in group.scores if score.value is not None]
        known = [score for score in valid if all(name in score.metrics for name in self.metrics)]
        found = {tuple(score.metrics[name] for name in self.metrics) or score.value for score in known}
        return len(found) > 1

    def most_sampled(self, num_groups: int) -> float:
        """Return how many groups a step of `num_groups` may look at."""
        return num_groups * (1 + self.max_retries) if self.max_retries else float("inf")


@dataclass
class FilteredGroupSource:
    """Takes prompts in one order over all epochs. Groups of no use are dropped after all their members have ended, and
    other prompts are drawn until the train step is full.

    Prompts are drawn in their order and none twice in an epoch; how many were is the state.
    """

    sync: SyncGroupSource
    take: Callable[[int, int], Sequence[Prompt]]
    """Gives so many prompts from a position on, over all epochs; fewer where they end."""
    num_groups: int
    """Of a train step, where its caller does not say it."""
    filter: Filter | None = Filter()
    """None: every group is of use."""
    _drawn: int = 0

    @property
    def is_over(self) -> bool:
        """Return whether no prompt is left."""
        return not self.take(self._drawn, 1)

    def next(self, step: int, num_groups: int | None = None) -> tuple[list[ScoredGroup], dict[str, float]]:
        """Return the groups of train step `step`: fewer than asked for where prompts or rounds have ended, and none
        where no group was of use."""
        wanted = self.num_groups if num_groups is None else num_groups
        most_rounds = self.filter.max_retries if self.filter else 0
        kept: list[ScoredGroup] = []
        sampled: list[ScoredGroup] = []
        num_rounds, seconds, began = 0, 0.0, time.perf_counter()
        times = Counter[int]()
        drawn = self._drawn  # noted when the step is whole: who stops inside it draws the same prompts again
        self.sync.engine.wake()
        while len(kept) < wanted and not 0 < most_rounds < num_rounds:
            prompts = self.take(drawn, wanted - len(kept))
            if not prompts:
                break
            drawn += len(prompts)
            round_began = time.perf_counter()
            groups = self._generated(prompts, step, times)
            seconds += time.perf_counter() - round_began
            scored = self.sync.scored(groups)
            sampled += scored
            check_scores(step, sampled, self.filter.metrics if self.filter else ())
            kept += [group for group in scored if self.filter is None or self.filter.keeps(group)]
            num_rounds += 1
        if self.filter and len(kept) < wanted and not self.take(drawn, 1):
            logger.warning(
                "step %d: the prompts of all epochs have ended with %d of %d groups of use", step + 1, len(kept), wanted
            )
        self._drawn = drawn
        self.sync.rest(step)
        if not sampled:
            return [], {}
        return kept, {
            **group_metrics(sampled),
            **_times(sampled, seconds, time.perf_counter() - began),
            **lag_metrics(kept or sampled, step),
            **(filtered_metrics(self.filter, sampled) | {"rollout/rounds": float(num_rounds)} if self.filter else {}),
        }

    def _generated(self, prompts: Sequence[Prompt], step: int, times: Counter[int]) -> list[Group]:
        """Return the groups of prompts in their order; one that the step has drawn before, which `times` counts by
        prompt, as in an earlier epoch, has other completions."""
        batches: dict[int, list[int]] = {}
        for i, prompt in enumerate(prompts):
            batches.setdefault(times[prompt.id], []).append(i)
            times[prompt.id] += 1
        found: dict[int, Group] = {}
        for number, indices in batches.items():
            sampling = drawn_again(self.sync.sampling, number)
            found |= zip(indices, self.sync.generated([prompts[i] for i in indices], step, sampling), strict=True)
        return [found[i] for i in range(len(prompts))]

    def state_dict(self) -> dict[str, JsonValue]:
        """Return how many prompts were drawn."""
        return {"drawn": self._drawn}

    def load_state_dict(self, state: dict[str, JsonValue]) -> None:
        """Go on behind the prompts that were drawn."""
        self._drawn = int(str(state["drawn"]))


def check_scores(step: int, groups: Sequence[ScoredGroup], metrics: Sequence[str] = ()) -> None:
    """Refuse groups of train step `step` that say nothing: other prompts would be scored no better. `metrics`: what
    they are filtered by.

    Raises:
        RewardError: no completion has a valid reward, because a function raises; or none has one of the metrics.
        StageFailed: no completion has a valid reward for another reason.
    """
    scores = [score for group in groups for score in group.scores]
    if all(score.value is None for score in scores):
        raise all_invalid(f"step {step + 1}: all {len(scores)} rewards are invalid", scores)
    known = sorted({name for score in scores for name in score.metrics})
    if unknown := [name for name in metrics if name not in known]:
        raise RewardError(
            f"train.train_policy.filter_reward_metric: no reward reports {', '.join(map(repr, unknown))}; take of "
            f"{', '.join(map(repr, known)) or 'none'}"
        )


def turn_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Return means of assistant turns and tool calls per completion, and the share of calls that failed; nothing where
    completions are no conversations."""
    turns = [turn for completion in completions for turn in completion.turns]
    if not turns:
        return {}
    calls = [turn for turn in turns if turn.role == "tool"]
    return {
        "completion/turns": (len(turns) - len(calls)) / len(completions),
        "completion/tool_calls": len(calls) / len(completions),
        "completion/tool_errors": sum(turn.is_error for turn in calls) / max(1, len(calls)),
    }


def filtered_metrics(filter: Filter, sampled: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return how many groups were sampled, and the shares that were dropped with equal rewards above and up to 0."""
    equal = [max(valid) for group in sampled if (valid := _valid(group)) and not filter.keeps(group)]
    return {
        "rollout/sampled_groups": float(len(sampled)),
        "rollout/filtered_positive": sum(reward > 0 for reward in equal) / len(sampled),
        "rollout/filtered_negative": sum(reward <= 0 for reward in equal) / len(sampled),
    }


def _valid(group: ScoredGroup) -> list[float]:
    return [score.value for score in group.scores if score.value is not None]


def lag_metrics(groups: Sequence[ScoredGroup], step: int) -> dict[str, float]:
    """Return by how many train steps the weights that drew the groups of a step are older: the most, the mean, and how
    many groups are of which age."""
    lags = [step - scored.group.version for scored in groups]
    return {
        "rollout/version_lag": float(max(lags)),
        "rollout/version_lag_mean": float(np.mean(lags)),
        **{f"rollout/groups_of_lag_{lag}": float(lags.count(lag)) for lag in range(max(lags) + 1)},
    }


def _times(groups: Sequence[ScoredGroup], generating: float, all_seconds: float) -> dict[str, float]:
    completions = [completion for scored in groups for completion in scored.group.completions]
    is_drawn = completions[0].drawn is not None
    name, count = ("samples", len(completions)) if is_drawn else ("tokens", sum(c.num_sampled for c in completions))
    return {
        "time/generate": generating,
        "time/score": all_seconds - generating,
        f"throughput/generated_{name}_per_second": count / max(1e-9, generating),
    }


def group_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return means over valid completions, the number of invalid ones, and of text lengths in sampled tokens."""
    scores = [score for group in groups for score in group.scores]
    values = np.array([score.value for score in scores if score.value is not None], dtype=np.float64)
    completions = [completion for group in groups for completion in group.group.completions]
    lengths = [completion.num_sampled for completion in completions if completion.drawn is None]
    metrics = {"reward/invalid": float(len(scores) - len(values))}
    if lengths:
        metrics |= {
            "completion/length_mean": float(np.mean(lengths)),
            "completion/length_max": float(np.max(lengths)),
            "completion/truncated": float(np.mean([each.finish_reason == "length" for each in completions])),
        }
    if len(values):
        metrics |= {"reward/mean": float(values.mean()), "reward/std": float(values.std())}
    metrics |= turn_metrics(completions)
    # A reward that is called `mean` does not take the place of the mean of all.
    return {f"reward/{name}": mean for name, mean in reward_means(groups).items()} | metrics


def reward_means(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return the mean of each reward function, and of what it reports beside its value, where they have one."""
    scores = [score for group in groups for score in group.scores]
    names = sorted({name for score in scores for name in score.metrics})
    return {n: float(np.mean([score.metrics[n] for score in scores if n in score.metrics])) for n in names}
