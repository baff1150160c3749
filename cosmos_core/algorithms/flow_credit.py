"""Advantages from the rewards of sampled images and videos, and monitoring for reward hacking.

Rewards are float64 on the CPU. Groups whose rewards are all equal are counted; the algorithm decides whether such
groups are excluded. The losses that use the advantages are in `flow_objectives`.

Shapes: G completions of a group.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from cosmos_core.types import DiffusionSample, Prompt, Score, ScoredGroup

STD_EPSILON = 1e-4

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FlowRollout:
    """Image or video that a rollout sampled, with its prompt and its advantage."""

    diffusion_sample: DiffusionSample
    prompt: Prompt
    advantage: float
    seed: int
    """Seed of the random numbers, such as noise, with which the algorithm trains on this rollout."""

    @property
    def latents(self) -> Tensor:
        """Return the clean latents of the image or video; the cost of a training sample depends on their size."""
        return self.diffusion_sample.latents  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class AdvantageSettings:
    """Settings with which the rewards of images or videos are normalized to advantages."""

    std_scope: Literal["batch", "group"] = "batch"
    """Rewards whose standard deviation divides advantages: `batch`: all of a train step; `group`: those of a group."""
    divides_by_std: bool = True
    """Whether to divide advantages by a standard deviation; False: they are rewards minus the mean of their group."""
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of reward functions, by their metric name: the values of each function are normalized, and the weighted
    sum of the results is the advantage. Empty: rewards, which are weighted sums already, are normalized."""
    keeps_equal_reward_groups: bool = False
    """Whether the completions of a group whose rewards are all equal get the advantage 0; False: they get None, and are
    excluded from training."""


def diffusion_advantages(
    scores_by_group: Sequence[Sequence[Score]], advantage_settings: AdvantageSettings
) -> tuple[list[list[float | None]], dict[str, float]]:
    """Return the advantage of each completion, and metrics of the rewards. The advantage is (reward - mean of its
    group) / (std + 1e-4) or, with `reward_weights`, the weighted sum of this term for each reward function. It is None
    for an invalid reward and, without `keeps_equal_reward_groups`, in groups whose advantages are all 0."""
    rewards_by_group = [[score.value for score in scores] for scores in scores_by_group]
    if advantage_settings.reward_weights:
        rows = _sum_normalised_rewards(scores_by_group, advantage_settings)
    else:
        rows = _normalise_rewards(rewards_by_group, advantage_settings)
    advantages: list[list[float | None]] = [
        row if any(row) or advantage_settings.keeps_equal_reward_groups else [None] * len(row) for row in rows
    ]
    valid_rewards = [[value for value in values if value is not None] for values in rewards_by_group]
    constant_group_flags = [float(not any(row)) for row, values in zip(rows, valid_rewards, strict=True) if values]
    return advantages, {
        "reward/constant_groups": float(np.mean(constant_group_flags or [0.0])),
        "reward/group_std": float(np.mean([float(np.std(values)) for values in valid_rewards if values] or [0.0])),
    }


def _sum_normalised_rewards(groups: Sequence[Sequence[Score]], settings: AdvantageSettings) -> list[list[float | None]]:
    """Return for each completion of each group the sum of the values of the reward functions, each normalized by
    `_normalise_rewards` and weighted by `reward_weights`; None for a completion for which no function has a value."""
    rewards_by_function = []
    for name in settings.reward_weights:
        rewards = [[s.metrics.get(name) if s.value is not None else None for s in scores] for scores in groups]
        rewards_by_function.append(_normalise_rewards(rewards, settings))
    return [
        [_sum_weighted_rewards(values, settings.reward_weights) for values in zip(*group_columns, strict=True)]
        for group_columns in zip(*rewards_by_function, strict=True)
    ]


def _normalise_rewards(
    rewards_by_group: Sequence[Sequence[float | None]], advantage_settings: AdvantageSettings
) -> list[list[float | None]]:
    """Return for each reward (reward - mean of its group) / (std + 1e-4), exactly 0 in groups of equal rewards, and
    None for an invalid reward. `std_scope` selects the rewards of the std; `divides_by_std`: whether it divides."""
    valid_rewards = [np.array([r for r in rewards if r is not None], dtype=np.float64) for rewards in rewards_by_group]
    all_rewards = np.concatenate([*valid_rewards, np.zeros(0)])
    normalised_rewards: list[list[float | None]] = []
    for rewards, values_G in zip(rewards_by_group, valid_rewards, strict=True):
        if not values_G.size or values_G.max() == values_G.min():
            normalised_rewards.append([None if r is None else 0.0 for r in rewards])
            continue
        std = float((all_rewards if advantage_settings.std_scope == "batch" else values_G).std())
        mean, reward_divisor = float(values_G.mean()), std + STD_EPSILON if advantage_settings.divides_by_std else 1.0
        normalised_rewards.append([None if r is None else (r - mean) / reward_divisor for r in rewards])
    return normalised_rewards


def _sum_weighted_rewards(values: Sequence[float | None], weights: Mapping[str, float]) -> float | None:
    if all(value is None for value in values):
        return None  # the reward is invalid if all functions lack a value; a single None counts as 0
    return sum(weight * (value or 0.0) for value, weight in zip(values, weights.values(), strict=True))


def compute_diversity(scored_groups: Sequence[ScoredGroup]) -> float:
    """Return the root mean square difference between the latents of two completions of a prompt, averaged over all
    pairs and then over prompts; 0 without such pairs. A falling value shows that the policy generates ever more similar
    images or videos for different seeds."""
    latent_distances = []
    for group in scored_groups:
        samples = [completion.diffusion_sample for completion in group.group.completions]
        latents = [sample.latents.flatten() for sample in samples if sample is not None]
        if len(latents) > 1:
            latent_distances.append(torch.pdist(torch.stack(latents)).mean().item() / math.sqrt(len(latents[0])))
    return float(np.mean(latent_distances)) if latent_distances else 0.0


class RewardMonitor:
    """Monitor for reward hacking, with the metric `watch/alarm`. The metric is 1 if the diversity of the samples is
    below `min_fraction` times its baseline. It is also 1 if the reward is above its baseline while one of
    `monitored_rewards`, reward functions with weight 0, has fallen by the fraction 1 - `min_fraction` of its baseline.
    A baseline is a mean over the first `num_steps_in_baseline` train steps. A warning is logged when the metric becomes
    1."""

    def __init__(self, min_fraction: float, monitored_rewards: Sequence[str], num_steps_in_baseline: int = 5) -> None:
        self._min_fraction, self._num_steps_in_baseline = min_fraction, num_steps_in_baseline
        self._monitored_rewards = tuple(monitored_rewards)
        self._baseline_values: dict[str, list[float]] = {}
        self._is_reward_alarm_on = False

    def metrics(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """Return the metrics `watch/...` of all groups of a train step, such as their diversity. Log a warning when
        `watch/alarm` becomes 1 because diversity or a monitored reward has fallen."""
        scores = [score for group in groups for score in group.scores]
        step_means = {"reward": _mean_or_nan([s.value for s in scores]), "diversity": compute_diversity(groups)}
        step_means |= {name: _mean_or_nan([s.metrics.get(name) for s in scores]) for name in self._monitored_rewards}
        for name, value in step_means.items():
            values_of_baseline = self._baseline_values.setdefault(name, [])
            if len(values_of_baseline) < self._num_steps_in_baseline and math.isfinite(value):
                values_of_baseline.append(value)
        baselines = {name: float(np.mean(values)) for name, values in self._baseline_values.items() if values}
        relative_diversity = step_means["diversity"] / baselines["diversity"] if baselines.get("diversity") else 1.0
        is_reward_rising = step_means["reward"] > baselines.get("reward", math.inf)
        alarm_names = ["diversity"] if relative_diversity < self._min_fraction else []
        for name in self._monitored_rewards if is_reward_rising else ():
            baseline = baselines.get(name, math.nan)  # no comparison with NaN is true
            if step_means[name] < baseline - (1 - self._min_fraction) * abs(baseline):
                alarm_names.append(name)
        if alarm_names and not self._is_reward_alarm_on:
            alarm_texts = [f"{name} {baselines[name]:.4g} at first, {step_means[name]:.4g} now" for name in alarm_names]
            reward_hacking_remedy = "look at the samples, raise kl_beta or add a data term"
            logger.warning("the reward may be hacked: %s; %s", ", ".join(alarm_texts), reward_hacking_remedy)
        self._is_reward_alarm_on = bool(alarm_names)
        return {
            "watch/diversity": step_means["diversity"],
            "watch/relative_diversity": relative_diversity,
            **{f"watch/{n}": step_means[n] for n in self._monitored_rewards if math.isfinite(step_means[n])},
            "watch/alarm": float(bool(alarm_names)),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint: the values of the baselines, and whether the alarm is on."""
        baseline_values = {name: list(values) for name, values in self._baseline_values.items()}
        return {"first": baseline_values, "is_told": self._is_reward_alarm_on}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._baseline_values = {name: list(map(float, values)) for name, values in state.get("first", {}).items()}
        self._is_reward_alarm_on = bool(state.get("is_told", False))


def _mean_or_nan(metric_values: Sequence[float | None]) -> float:
    known_values = [value for value in metric_values if value is not None]
    return float(np.mean(known_values)) if known_values else math.nan


def make_noise(noise_shape: Sequence[int], seed: int) -> Tensor:
    """Return standard normal noise on the CPU that depends only on the shape and the seed."""
    return torch.randn(tuple(noise_shape), generator=torch.Generator().manual_seed(seed))
