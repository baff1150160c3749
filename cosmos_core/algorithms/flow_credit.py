"""How the rewards of drawn images and videos become advantages, and what is watched meanwhile.

Rewards are float64 on the CPU. Groups whose rewards are all equal are counted; the algorithm says whether they are left
out. Not here: what is learned of an advantage (`flow_objectives`).

Shapes: G completions of a group.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from cosmos_core.types import Drawn, Prompt, Score, ScoredGroup

STD_EPSILON = 1e-4

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FlowRollout:
    """A drawn image or video, and what it is worth."""

    drawn: Drawn
    prompt: Prompt
    advantage: float
    seed: int
    """Of what training draws for it."""

    @property
    def latents(self) -> Tensor:
        """Return the clean latents, by which its cost is counted."""
        found: Tensor = self.drawn.latents
        return found


@dataclass(frozen=True, slots=True)
class CreditSettings:
    """How rewards are compared."""

    over: Literal["batch", "group"] = "batch"
    """Whether the standard deviation is that of all rewards of the train step, or of each group."""
    divides: bool = True
    """False: advantages are differences to the mean of the group."""
    each: Mapping[str, float] = field(default_factory=dict)
    """Weights of the reward functions, by the names of their metrics, where each is normalised by itself before they
    are summed; empty: the weighted sum of their values is normalised."""
    keeps_equal: bool = False
    """Whether the completions of a group of equal rewards have the advantage 0; False: None."""


def flow_advantages(
    groups: Sequence[Sequence[Score]], settings: CreditSettings
) -> tuple[list[list[float | None]], dict[str, float]]:
    """Return the advantage of each completion, (reward - mean of its prompt) / (std + 1e-4), and metrics.

    None: its reward is invalid, or all of its group are equal and `keeps_equal` is not set.
    """
    totals = [[score.value for score in scores] for scores in groups]
    valid = [[value for value in values if value is not None and math.isfinite(value)] for values in totals]
    found = _normalised_each(groups, settings) if settings.each else _normalised(totals, settings)
    is_constant = [not any(row) for row in found]
    kept: list[list[float | None]] = [
        [None] * len(row) if is_constant[g] and not settings.keeps_equal else row for g, row in enumerate(found)
    ]
    num_valid = sum(bool(values) for values in valid)
    return kept, {
        "reward/constant_groups": sum(c and bool(v) for c, v in zip(is_constant, valid, strict=True))
        / max(1, num_valid),
        "reward/group_std": float(np.mean([float(np.std(values)) for values in valid if values] or [0.0])),
    }


def _normalised_each(groups: Sequence[Sequence[Score]], settings: CreditSettings) -> list[list[float | None]]:
    """Return the weighted sum of the reward functions' values, each normalised by itself."""
    columns = [
        _normalised([[s.metrics.get(name) if s.value is not None else None for s in scores] for scores in groups],
                    settings)
        for name in settings.each
    ]  # fmt: skip
    return [
        [_weighted([column[g][k] for column in columns], settings.each) for k in range(len(scores))]
        for g, scores in enumerate(groups)
    ]


def _normalised(groups: Sequence[Sequence[float | None]], settings: CreditSettings) -> list[list[float | None]]:
    """Return rewards minus the mean of their group over the standard deviation; exactly 0 where they are equal."""
    valid = [np.array([r for r in rewards if r is not None], dtype=np.float64) for rewards in groups]
    everything = np.concatenate([*valid, np.zeros(0)])
    of_batch = float(everything.std()) if everything.size else 0.0
    found: list[list[float | None]] = []
    for rewards, own_G in zip(groups, valid, strict=True):
        is_constant = not own_G.size or own_G.max() == own_G.min()
        std = of_batch if settings.over == "batch" else float(own_G.std()) if own_G.size else 0.0
        scale = std + STD_EPSILON if settings.divides else 1.0
        mean = float(own_G.mean()) if own_G.size else 0.0
        found.append([None if r is None else 0.0 if is_constant else (r - mean) / scale for r in rewards])
    return found


def _weighted(values: Sequence[float | None], weights: Mapping[str, float]) -> float | None:
    if any(value is None for value in values):
        return None
    return sum(weight * (value or 0.0) for value, weight in zip(values, weights.values(), strict=True))


def diversity(groups: Sequence[ScoredGroup]) -> float:
    """Return how far apart the latents of a prompt are: the root mean square of their pairwise differences, a mean over
    prompts. It falls when a policy draws the same for every seed."""
    found = []
    for group in groups:
        latents = [c.drawn.latents for c in group.group.completions if c.drawn is not None]
        pairs = [(a - b).square().mean().sqrt().item() for a, b in combinations(latents, 2)]
        if pairs:
            found.append(float(np.mean(pairs)))
    return float(np.mean(found)) if found else 0.0


class Watch:
    """Notices when a reward rises at the expense of something else: of the diversity of the samples, or of a reward of
    weight 0, which is called for that alone.

    It compares with the mean of the first `num_first` train steps; the alarm is a metric and, once, a warning.
    """

    def __init__(self, least_fraction: float, watched: Sequence[str], num_first: int = 5) -> None:
        self._least, self._watched, self._num_first = least_fraction, tuple(watched), num_first
        self._first: dict[str, list[float]] = {}
        self._is_told = False

    def metrics(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """Return what is seen in the groups of a train step."""
        now = {"reward": _mean([s.value for g in groups for s in g.scores]), "diversity": diversity(groups)}
        for name in self._watched:
            now[name] = _mean([s.metrics.get(name) for g in groups for s in g.scores])
        for name, value in now.items():
            seen = self._first.setdefault(name, [])
            if len(seen) < self._num_first and math.isfinite(value):
                seen.append(value)
        first = {name: float(np.mean(values)) for name, values in self._first.items() if values}
        relative = now["diversity"] / first["diversity"] if first.get("diversity") else 1.0
        rises = now["reward"] > first.get("reward", math.inf)
        suspects = ["diversity"] if relative < self._least else []
        for name in self._watched if rises else ():
            if name in first and now[name] < first[name] - (1 - self._least) * abs(first[name]):
                suspects.append(name)
        self._tell(suspects, now, first)
        return {
            "watch/diversity": now["diversity"],
            "watch/relative_diversity": relative,
            **{f"watch/{name}": now[name] for name in self._watched if math.isfinite(now[name])},
            "watch/alarm": float(bool(suspects)),
        }

    def _tell(self, suspects: Sequence[str], now: Mapping[str, float], first: Mapping[str, float]) -> None:
        if suspects and not self._is_told:
            said = ", ".join(f"{name} {first[name]:.4g} at first, {now[name]:.4g} now" for name in suspects)
            logger.warning("the reward may be hacked: %s; look at the samples, raise kl_beta or add a data term", said)
        self._is_told = bool(suspects)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint has to keep."""
        return {"first": {name: list(values) for name, values in self._first.items()}, "is_told": self._is_told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._first = {str(name): [float(v) for v in values] for name, values in state.get("first", {}).items()}
        self._is_told = bool(state.get("is_told", False))


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else math.nan


def rollouts_of(
    groups: Sequence[ScoredGroup], values: Sequence[Sequence[float | None]], seeds: Any
) -> list[FlowRollout]:
    """Return the completions that have an advantage; `seeds` gives the seed of a completion of a group."""
    return [
        FlowRollout(completion.drawn, scored.group.prompt, value, seeds(scored.group, k))
        for scored, row in zip(groups, values, strict=True)
        for k, (completion, value) in enumerate(zip(scored.group.completions, row, strict=True))
        if value is not None and completion.drawn is not None
    ]


def noise_of(shape: Sequence[int], seed: int) -> Tensor:
    """Return noise that a seed decides, whatever the device and the split of the work."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))
