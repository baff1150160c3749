"""How the rewards of a group become the advantages of its completions: one function for each `algo` of
`[train.train_policy]`.

Rewards are float64 on the CPU. An invalid reward (None, NaN, infinite) has the advantage None: its completion is
dropped and the others of its group are compared among themselves. A group whose valid rewards are all equal, or that
has only one, has exactly 0 for each: found by equality, because rounding makes the std of equal rewards non-zero.

Shapes: G completions of a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from cosmos_core.errors import RewardError

STD_EPSILON = 1e-6

Groups = Sequence[Sequence[float | None]]


def advantages(
    groups: Groups, *, algo: str = "grpo", normalise_std: bool = True
) -> tuple[list[list[float | None]], dict[str, int]]:
    """Return the advantage of each reward by the rule `algo`, a key of `RULES`, and counts.

    Without `normalise_std` the rule `grpo` only subtracts the mean. Counts: `groups`, `constant_groups` (two or more
    equal rewards), `single_groups` (one valid reward), `empty_groups` (none), and `invalid` completions.

    Raises:
        RewardError: the rule cannot take rewards like these.
    """
    valid = [[r for r in rewards if r is not None and math.isfinite(r)] for rewards in groups]
    rule = _centred if algo == "grpo" and not normalise_std else RULES[algo]
    found = [iter(values_G) for values_G in rule([np.asarray(each, dtype=np.float64) for each in valid])]
    values = [
        [float(next(own)) if r is not None and math.isfinite(r) else None for r in rewards]
        for rewards, own in zip(groups, found, strict=True)
    ]
    return values, {
        "groups": len(valid),
        "constant_groups": sum(len(each) > 1 and max(each) == min(each) for each in valid),
        "single_groups": sum(len(each) == 1 for each in valid),
        "empty_groups": sum(not each for each in valid),
        "invalid": sum(map(len, groups)) - sum(map(len, valid)),
    }


def _is_constant(rewards_G: np.ndarray) -> bool:
    return not rewards_G.size or bool(rewards_G.max() == rewards_G.min())


def _centred(groups: list[np.ndarray]) -> list[np.ndarray]:
    """r - mean (Dr. GRPO, arXiv 2503.20783)."""
    return [np.zeros_like(r_G) if _is_constant(r_G) else r_G - r_G.mean() for r_G in groups]


def _grpo(groups: list[np.ndarray]) -> list[np.ndarray]:
    """(r - mean) / (population std + 1e-6) (GRPO, arXiv 2402.03300)."""
    return [
        c_G / (r_G.std() + STD_EPSILON) if c_G.any() else c_G for c_G, r_G in zip(_centred(groups), groups, strict=True)
    ]


def _rloo(groups: list[np.ndarray]) -> list[np.ndarray]:
    """r - mean of the others (RLOO, arXiv 2402.14740)."""
    return [c_G * len(c_G) / max(1, len(c_G) - 1) for c_G in _centred(groups)]


def _batch_std(groups: list[np.ndarray]) -> list[np.ndarray]:
    """(r - mean of the group) / (population std of all rewards of the step + 1e-6) (arXiv 2508.08221)."""
    everything = np.concatenate([*groups, np.zeros(0)])
    std = everything.std() if everything.size else 0.0
    return [c_G / (std + STD_EPSILON) for c_G in _centred(groups)]


def _reinforce_plus_plus(groups: list[np.ndarray]) -> list[np.ndarray]:
    """(r - mean) / (population std + 1e-6) over all rewards of the step (REINFORCE++, arXiv 2501.03262)."""
    everything = np.concatenate([*groups, np.zeros(0)])
    whitened = iter(_grpo([everything])[0])
    return [np.array([next(whitened) for _ in r_G]) for r_G in groups]


def _reinforce_plus_plus_baseline(groups: list[np.ndarray]) -> list[np.ndarray]:
    """r - mean of the group, then whitened over the step (REINFORCE++-baseline, arXiv 2501.03262)."""
    return _reinforce_plus_plus(_centred(groups))


def _max_rl(groups: list[np.ndarray]) -> list[np.ndarray]:
    """(r - mean) / mean, for rewards of 0 and 1 (MaxRL, arXiv 2602.02710)."""
    least = min((r_G.min() for r_G in groups if r_G.size), default=0.0)
    if least < 0:
        raise RewardError(
            f"train.train_policy.algo = 'maxrl' divides by the mean reward of a group, and a reward is {least:g}; take "
            f"rewards that are never negative, or another algo"
        )
    return [c_G / r_G.mean() if c_G.any() else c_G for c_G, r_G in zip(_centred(groups), groups, strict=True)]


RULES: dict[str, Callable[[list[np.ndarray]], list[np.ndarray]]] = {
    "grpo": _grpo,
    "rloo": _rloo,
    "batch-std": _batch_std,
    "reinforce++": _reinforce_plus_plus,
    "reinforce++-baseline": _reinforce_plus_plus_baseline,
    "maxrl": _max_rl,
}
