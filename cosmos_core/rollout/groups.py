"""Sources of the scored groups of a train step; a group consists of the completions of one prompt.

`SyncGroupSource` generates groups with the newest weights at each step; `FilteredGroupSource` drops groups without a
learning signal and generates replacements. `async_groups.AsyncGroupSource` generates groups during training.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from cosmos_core.errors import RewardError
from cosmos_core.parallel.mesh import num_ranks
from cosmos_core.rewards.base import invalid_scores_error
from cosmos_core.rewards.runner import ScoreGroupsFn
from cosmos_core.rollout.base import Engine, generate, reseed
from cosmos_core.run.progress import ProgressWriter
from cosmos_core.types import Completion, Group, JsonValue, Prompt, Sampling, ScoredGroup

logger = logging.getLogger(__name__)


class GroupSource(Protocol):
    """Source of the groups of scored completions of each train step."""

    sampled_groups: Sequence[ScoredGroup]
    """Groups that were sampled for the last train step, including groups that a filter dropped."""

    @property
    def is_exhausted(self) -> bool:
        """Return whether the source has no more groups."""

    def next_groups(self, step: int, num_groups: int | None = None) -> tuple[list[ScoredGroup], dict[str, float]]:
        """Return the groups of train step `step`, counted from 0, and their metrics. `num_groups`: number of groups to
        return; None: the number that the step needs."""

    def state_dict(self) -> dict[str, JsonValue]:
        """Return the source's state for a checkpoint, so that no prompt is lost or trained on twice."""

    def load_state_dict(self, state: dict[str, JsonValue]) -> None:
        """Restore the state that `state_dict` returned."""


@dataclass(frozen=True)
class GroupPlan:
    """Mapping from train steps to groups, by the groups' positions in the order of the prompts. A group belongs to the
    first step that needs it; its completions can extend over several steps."""

    completions_per_step: int
    group_size: int = 1

    def get_first_position(self, step: int) -> int:
        """Return the position of the first group that no train step before `step` needs."""
        return -(-step * self.completions_per_step // self.group_size)

    def num_groups(self, step: int) -> int:
        """Return the number of groups whose completions train step `step` uses."""
        return self.get_first_position(step + 1) - self.get_first_position(step)

    def get_step_of_group(self, group_position: int) -> int:
        """Return the step that the group at `group_position` belongs to."""
        return group_position * self.group_size // self.completions_per_step


@dataclass
class SyncGroupSource:
    """Group source that alternates generation and training, so that the newest weights generate every group."""

    get_step_prompts: Callable[[int], Sequence[Prompt]]
    """Function that returns the prompts of a train step, in order."""
    engine: Engine
    score: ScoreGroupsFn
    sampling: Sampling
    progress: ProgressWriter
    batch_size: int
    """Number of prompts for which an engine generates completions at a time."""
    on_wait: Callable[[], None] = lambda: None
    """Function called after each generated batch and after scoring. An error that it raises stops the training: a stop
    signal to all processes of a job can also have ended processes of tools or rewards, so that results are invalid."""
    publish_interval: int = 1
    """Number of train steps between two weight loads into the engine."""
    is_exhausted: ClassVar[bool] = False
    """Whether the source has no more groups: always False, because the caller plans a fixed number of steps."""
    sampled_groups: Sequence[ScoredGroup] = ()

    def next_groups(self, step: int, num_groups: int | None = None) -> tuple[list[ScoredGroup], dict[str, float]]:
        """Generate and score the groups of completions of train step `step`, or only the first `num_groups` groups."""
        start_time = time.perf_counter()
        self.engine.wake()
        groups = self.generate_groups(self.get_step_prompts(step)[:num_groups], step, Counter())
        self.sleep_until_next_step(step)
        generation_seconds = time.perf_counter() - start_time
        self.sampled_groups = scored_groups = self.score_groups(groups)
        throughput_metrics = _compute_throughput_metrics(
            scored_groups, generation_seconds, time.perf_counter() - start_time
        )
        metrics = compute_group_metrics(scored_groups) | throughput_metrics
        return scored_groups, metrics | compute_lag_metrics(scored_groups, step)

    def generate_groups(self, prompts: Sequence[Prompt], step: int, count_by_prompt_id: Counter[int]) -> list[Group]:
        """Generate the groups of `prompts`, in order. `count_by_prompt_id`, which is updated, says how often the step
        sampled each prompt. A repeated prompt, at an epoch boundary or in a mixture of data sets, gets other seeds."""
        indices_by_num_repeats: dict[int, list[int]] = {}
        for i, prompt in enumerate(prompts):
            indices_by_num_repeats.setdefault(count_by_prompt_id[prompt.id], []).append(i)
            count_by_prompt_id[prompt.id] += 1
        groups_by_index: dict[int, Group] = {}
        prompts_per_batch = self.batch_size * num_ranks()
        self.progress.phase("generate")
        for num_repeats, prompt_indices in indices_by_num_repeats.items():
            sampling = reseed(self.sampling, num_repeats)
            for start in range(0, len(prompt_indices), prompts_per_batch):
                batch_indices = prompt_indices[start : start + prompts_per_batch]
                groups = generate(self.engine, [prompts[i] for i in batch_indices], sampling, step)
                groups_by_index |= zip(batch_indices, groups, strict=True)
                self.progress.beat()
                self.on_wait()
        return [groups_by_index[i] for i in range(len(prompts))]

    def sleep_until_next_step(self, step: int) -> None:
        """Let the engine sleep during train step `step`. If new weights are loaded after the step, the engine also
        releases its weights."""
        self.engine.sleep(level=1 if (step + 1) % self.publish_interval else 2)

    def score_groups(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        """Return the groups with the scores of their completions, and report the phase `score` as the run's
        progress."""
        self.progress.phase("score")
        scored_groups = self.score(groups)
        self.on_wait()
        return scored_groups

    def state_dict(self) -> dict[str, JsonValue]:
        return {}  # no state: prompts and seeds are functions of the step

    def load_state_dict(self, state: dict[str, JsonValue]) -> None: ...


@dataclass(frozen=True)
class GroupFilter:
    """Filter of dynamic sampling (DAPO, arXiv 2503.14476), which drops groups whose completions have equal rewards."""

    metrics: Sequence[str] = ()
    """Names of reward metrics: a group is kept if one of them differs between its completions. If the group has none of
    these metrics, it is kept if its rewards differ."""
    max_retries: int = 0
    """Maximum number of further rounds of generation in a train step, each of which replaces groups that the filter
    dropped; 0: no limit but the number of prompts."""

    def has_learning_signal(self, group: ScoredGroup) -> bool:
        """Return whether the valid completions of a group differ in a metric of `metrics`. If the group's rewards
        report none of these metrics, for example in a mixture of data sets with different reward functions, return
        whether the rewards differ."""
        reported_metrics = {name for score in group.scores for name in score.metrics}.intersection(self.metrics)
        valid_scores = [s for s in group.scores if s.value is not None and s.metrics.keys() >= reported_metrics]
        signals = {tuple(score.metrics[name] for name in reported_metrics) or score.value for score in valid_scores}
        return len(signals) > 1

    def get_max_sampled_groups(self, num_groups: int) -> float:
        """Return the maximum number of groups that a train step samples to keep `num_groups` groups; infinity if the
        number of rounds is not limited."""
        return num_groups * (1 + self.max_retries) if self.max_retries else float("inf")


@dataclass
class FilteredGroupSource:
    """Group source that drops groups without a learning signal, such as equal rewards, and samples other prompts until
    the train step is full. Its state is the number of prompts taken so far, in order over all epochs."""

    sync_source: SyncGroupSource
    take_prompts: Callable[[int, int], Sequence[Prompt]]
    """Function `(position, count)` that returns `count` prompts from `position` on, in the order of the data over all
    epochs; fewer prompts at the end of the last epoch."""
    groups_per_step: int
    group_filter: GroupFilter | None = GroupFilter()
    """Filter that selects the groups to train on; None: all groups."""
    sampled_groups: Sequence[ScoredGroup] = ()
    _num_taken_prompts: int = 0

    @property
    def is_exhausted(self) -> bool:
        return not self.take_prompts(self._num_taken_prompts, 1)

    def next_groups(self, step: int, num_groups: int | None = None) -> tuple[list[ScoredGroup], dict[str, float]]:
        """Return the groups of train step `step` and their metrics; fewer groups if prompts or rounds are exhausted."""
        num_requested_groups = self.groups_per_step if num_groups is None else num_groups
        max_retries = self.group_filter.max_retries if self.group_filter else 0
        kept_groups: list[ScoredGroup] = []
        sampled_groups: list[ScoredGroup] = []
        count_by_prompt_id = Counter[int]()
        num_generation_rounds, generation_seconds, start_time = 0, 0.0, time.perf_counter()
        # Keep the position in a local variable until the step ends: a run that stops earlier repeats its prompts.
        next_position = self._num_taken_prompts
        self.sync_source.engine.wake()
        while len(kept_groups) < num_requested_groups and not 0 < max_retries < num_generation_rounds:
            prompts = self.take_prompts(next_position, num_requested_groups - len(kept_groups))
            if not prompts:
                break
            next_position += len(prompts)
            round_start_time = time.perf_counter()
            groups = self.sync_source.generate_groups(prompts, step, count_by_prompt_id)
            generation_seconds += time.perf_counter() - round_start_time
            scored_groups = self.sync_source.score_groups(groups)
            sampled_groups += scored_groups
            check_scores(step, sampled_groups, self.group_filter.metrics if self.group_filter else ())
            has_learning_signal = self.group_filter.has_learning_signal if self.group_filter else None
            kept_groups += filter(has_learning_signal, scored_groups) if has_learning_signal else scored_groups
            num_generation_rounds += 1
        if self.group_filter and len(kept_groups) < num_requested_groups and not self.take_prompts(next_position, 1):
            log_message = "step %d: the prompts of all epochs have ended with %d of %d groups of use"
            logger.warning(log_message, step + 1, len(kept_groups), num_requested_groups)
        self._num_taken_prompts, self.sampled_groups = next_position, sampled_groups
        self.sync_source.sleep_until_next_step(step)
        if not sampled_groups:
            return [], {}
        return kept_groups, {
            **compute_group_metrics(sampled_groups),
            **_compute_throughput_metrics(sampled_groups, generation_seconds, time.perf_counter() - start_time),
            **compute_lag_metrics(kept_groups or sampled_groups, step),
            **(compute_filter_metrics(self.group_filter, sampled_groups) if self.group_filter else {}),
            **({"rollout/rounds": float(num_generation_rounds)} if self.group_filter else {}),
        }

    def state_dict(self) -> dict[str, JsonValue]:
        return {"drawn": self._num_taken_prompts}

    def load_state_dict(self, state: dict[str, JsonValue]) -> None:
        self._num_taken_prompts = int(str(state["drawn"]))


def check_scores(step: int, groups: Sequence[ScoredGroup], metrics: Sequence[str] = ()) -> None:
    """Raise `RewardError` or `StageFailed` if no completion of train step `step` has a valid reward, and `RewardError`
    if a reward that reports metrics lacks one of the `metrics` by which groups are filtered."""
    scores = [score for group in groups for score in group.scores]
    if all(score.value is None for score in scores):
        raise invalid_scores_error(f"step {step + 1}: all {len(scores)} rewards are invalid", scores)
    metric_names = sorted({name for score in scores for name in score.metrics})
    # A step may lack the rows to which a reward function applies; then none of its metrics is expected.
    expected_metrics = [name for name in metrics if name.partition("/")[0] in metric_names]
    if unknown_metrics := [name for name in expected_metrics if name not in metric_names]:
        raise RewardError(
            f"train.train_policy.filter_reward_metric: no reward reports {', '.join(map(repr, unknown_metrics))}; "
            f"take of {', '.join(map(repr, metric_names)) or 'none'}"
        )


def compute_turn_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Return the mean numbers of turns and tool calls per completion, and the fraction of failed tool calls; empty if
    no completion has turns."""
    turns = [turn for completion in completions for turn in completion.turns]
    if not turns:
        return {}
    tool_results = [turn for turn in turns if turn.role == "tool"]
    return {
        "completion/turns": (len(turns) - len(tool_results)) / len(completions),
        "completion/tool_calls": len(tool_results) / len(completions),
        "completion/tool_errors": sum(turn.is_error for turn in tool_results) / max(1, len(tool_results)),
    }


def compute_filter_metrics(group_filter: GroupFilter, sampled_groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return metrics of a filter: the number of sampled groups, and two fractions of them: dropped groups whose largest
    reward is above 0, and dropped groups whose largest reward is at most 0."""
    dropped_groups = [group for group in sampled_groups if not group_filter.has_learning_signal(group)]
    valid_rewards = ([score.value for score in group.scores if score.value is not None] for group in dropped_groups)
    max_group_rewards = [max(rewards_of_group) for rewards_of_group in valid_rewards if rewards_of_group]
    return {
        "rollout/sampled_groups": float(len(sampled_groups)),
        "rollout/filtered_positive": sum(reward > 0 for reward in max_group_rewards) / len(sampled_groups),
        "rollout/filtered_negative": sum(reward <= 0 for reward in max_group_rewards) / len(sampled_groups),
    }


def compute_lag_metrics(groups: Sequence[ScoredGroup], step: int) -> dict[str, float]:
    """Return the maximum and mean age, in train steps, of the weights that generated the groups, and the number of
    groups of each age."""
    version_lags = [step - scored_group.group.version for scored_group in groups]
    return {
        "rollout/version_lag": float(max(version_lags)),
        "rollout/version_lag_mean": float(np.mean(version_lags)),
        **{f"rollout/groups_of_lag_{lag}": float(version_lags.count(lag)) for lag in range(max(version_lags) + 1)},
    }


def _compute_throughput_metrics(
    groups: Sequence[ScoredGroup], generation_seconds: float, total_seconds: float
) -> dict[str, float]:
    completions = [completion for scored_group in groups for completion in scored_group.group.completions]
    output_unit, num_outputs = "tokens", sum(completion.num_sampled for completion in completions)
    if completions[0].diffusion_sample is not None:
        output_unit, num_outputs = "samples", len(completions)
    return {
        "time/generate": generation_seconds,
        "time/score": total_seconds - generation_seconds,
        f"throughput/generated_{output_unit}_per_second": num_outputs / max(1e-9, generation_seconds),
    }


def compute_group_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return metrics of groups: mean reward and its standard deviation, the number of invalid rewards, and the lengths
    of completions in sampled tokens."""
    scores = [score for group in groups for score in group.scores]
    reward_values = np.array([score.value for score in scores if score.value is not None], dtype=np.float64)
    completions = [completion for group in groups for completion in group.group.completions]
    completion_lengths = [completion.num_sampled for completion in completions if completion.diffusion_sample is None]
    metrics = {"reward/invalid": float(len(scores) - len(reward_values))}
    if completion_lengths:
        metrics |= {
            "completion/length_mean": float(np.mean(completion_lengths)),
            "completion/length_max": float(np.max(completion_lengths)),
            "completion/truncated": float(np.mean([c.finish_reason == "length" for c in completions])),
        }
    if len(reward_values):
        metrics |= {"reward/mean": float(reward_values.mean()), "reward/std": float(reward_values.std())}
    dataset_metrics = {f"reward/{name}/mean": mean for name, mean in compute_dataset_means(groups).items()}
    reward_metrics = {f"reward/{name}": mean for name, mean in compute_reward_means(groups).items()}
    # `reward_metrics` come first, so that a reward function named `mean` cannot overwrite the mean of all rewards.
    return reward_metrics | metrics | compute_turn_metrics(completions) | dataset_metrics


def compute_dataset_means(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return the mean reward of the groups by data set of a mixture; empty if the prompts are of one data set."""
    rewards_by_dataset: dict[str, list[float]] = {}
    for group in groups:
        if dataset := group.group.prompt.source:
            valid_rewards = [score.value for score in group.scores if score.value is not None]
            rewards_by_dataset.setdefault(dataset, []).extend(valid_rewards)
    return {dataset: float(np.mean(values)) for dataset, values in sorted(rewards_by_dataset.items()) if values}


def compute_reward_means(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Return the mean, over the completions of all groups, of each reward function and of each further metric that a
    reward function reports."""
    scores = [score for group in groups for score in group.scores]
    metric_names = sorted({name for score in scores for name in score.metrics})
    return {n: float(np.mean([score.metrics[n] for score in scores if n in score.metrics])) for n in metric_names}
