"""Advantages from the rewards of a group: one function for each `algo` of `[train.train_policy]`.

Rewards are float64 on the CPU. A completion with an invalid reward (None, NaN, infinite) has the advantage None and is
dropped; the remaining completions of its group are compared with each other. A group with one valid reward, or whose
valid rewards are all equal, has advantages of exactly 0. Equality is tested on the rewards, because rounding makes the
standard deviation of equal rewards non-zero.

Shapes: G completions of a group, S predicted tokens of a sample.
"""

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from cosmos_core.algorithms.aggregate import apply_mask
from cosmos_core.data.sample import Sample
from cosmos_core.errors import RewardError

STD_EPSILON = 1e-6
_VARIANCE_EPSILON = 1e-8
"""Value that `whiten` adds to the variance before it takes the square root, as in verl and OpenRLHF."""
_GDPO_EPSILON = 1e-4

RewardsByGroup = Sequence[Sequence[float | None]]


def advantages(
    reward_groups: RewardsByGroup,
    *,
    algo: str = "grpo",
    normalise_std: bool = True,
    num_tokens: Sequence[Sequence[int]] | None = None,
) -> tuple[list[list[float | None]], float]:
    """Return the advantage of each reward, and the fraction of groups that have two or more valid rewards, all equal.
    Raise RewardError for a negative reward if the rule that `algo` selects from `ADVANTAGE_RULES` does not support it.

    `normalise_std`: whether the rule `grpo` divides by the standard deviation. `num_tokens`: number of trained tokens
    of each completion, its weight in REINFORCE++; None: 1 per completion."""
    valid_rewards = [list(filter(_is_finite, rewards)) for rewards in reward_groups]
    advantage_rule = _mean_centred_advantages if algo == "grpo" and not normalise_std else ADVANTAGE_RULES[algo]
    group_advantages = advantage_rule([np.asarray(rewards, dtype=np.float64) for rewards in valid_rewards])
    advantages_N = np.concatenate([*group_advantages, np.zeros(0)])
    if algo.startswith("reinforce++"):
        token_counts = num_tokens or [[1] * len(rewards) for rewards in reward_groups]
        rewards_and_token_counts = zip(chain(*reward_groups), chain(*token_counts), strict=True)
        valid_token_counts = [count for reward, count in rewards_and_token_counts if _is_finite(reward)]
        advantages_N = whiten(advantages_N, np.array(valid_token_counts, dtype=np.float64))
    advantage_iter = iter(advantages_N.tolist())
    advantage_rows = [[next(advantage_iter) if _is_finite(r) else None for r in rewards] for rewards in reward_groups]
    num_constant_groups = sum(len(rewards) > 1 and max(rewards) == min(rewards) for rewards in valid_rewards)
    return advantage_rows, num_constant_groups / max(1, len(valid_rewards))


def _is_finite(reward: float | None) -> TypeGuard[float]:
    return reward is not None and math.isfinite(reward)


def whiten(values_N: np.ndarray, token_counts_N: np.ndarray) -> np.ndarray:
    """Return (value - mean) / sqrt(sample variance + 1e-8), with mean and variance weighted by `token_counts_N`, as in
    REINFORCE++ (arXiv 2501.03262, equation 10, with verl's variance); 0 if all values with a positive count are equal.
    """
    if _all_equal(values_N[token_counts_N > 0]):
        return np.zeros_like(values_N)
    weighted_mean = np.average(values_N, weights=token_counts_N)
    weighted_variance = (token_counts_N * (values_N - weighted_mean) ** 2).sum() / (token_counts_N.sum() - 1)
    centred_values_N: np.ndarray = values_N - weighted_mean
    return centred_values_N / np.sqrt(weighted_variance + _VARIANCE_EPSILON)


def whitened_returns(
    samples: Sequence[Sample], old_logprobs: Sequence[Tensor], ref_logprobs: Sequence[Tensor], kl_beta: float
) -> list[Tensor]:
    """Return the advantage of each token, S per sample, in float64; 0 for tokens that are not trained.

    The reward of a trained token is -`kl_beta` * (log pi_old - log pi_reference), plus the completion's reward for the
    last token. The return of a token is the sum of rewards from this token to the end. The advantages are the returns,
    normalized by `whiten` over the trained tokens of all `samples` (REINFORCE++, arXiv 2501.03262).
    """
    loss_masks = [torch.as_tensor(sample.loss_mask[1:]).bool() for sample in samples]
    token_returns = []
    samples_and_logprobs = zip(samples, loss_masks, old_logprobs, ref_logprobs, strict=True)
    for sample, mask_S, old_logprobs_S, ref_logprobs_S in samples_and_logprobs:
        # Log-probabilities are moved to the CPU, where those of rollouts are; those of the trainer may be on a GPU.
        log_ratios_S = apply_mask((old_logprobs_S.cpu() - ref_logprobs_S.cpu()).double(), mask_S)
        token_returns.append(sample.reward - kl_beta * log_ratios_S.flip(0).cumsum(0).flip(0))
    if not token_returns:
        return []
    flat_returns, flat_loss_mask = torch.cat(token_returns), torch.cat(loss_masks)
    whitened_values = torch.from_numpy(whiten(flat_returns.numpy(), flat_loss_mask.numpy().astype(float)))
    return list(apply_mask(whitened_values, flat_loss_mask).split([len(row_S) for row_S in token_returns]))


def _all_equal(rewards_G: np.ndarray) -> bool:
    return not rewards_G.size or bool(rewards_G.max() == rewards_G.min())


def _mean_centred_advantages(groups: list[np.ndarray]) -> list[np.ndarray]:
    """Return for each group the rewards minus their mean (Dr. GRPO, arXiv 2503.20783)."""
    return [np.zeros_like(rewards_G) if _all_equal(rewards_G) else rewards_G - rewards_G.mean() for rewards_G in groups]


def _grpo_advantages(rewards_by_group: list[np.ndarray]) -> list[np.ndarray]:
    """Return for each reward (reward - mean) / (population std + 1e-6), both of its group (GRPO, arXiv 2402.03300)."""
    return [
        centred_G / (rewards_G.std() + STD_EPSILON) if centred_G.any() else centred_G
        for centred_G, rewards_G in zip(_mean_centred_advantages(rewards_by_group), rewards_by_group, strict=True)
    ]


def _rloo_advantages(rewards: list[np.ndarray]) -> list[np.ndarray]:
    """Return each reward minus the mean of the other rewards of its group (RLOO, arXiv 2402.14740)."""
    return [centred_G * len(centred_G) / max(1, len(centred_G) - 1) for centred_G in _mean_centred_advantages(rewards)]


def _batch_std_advantages(rewards_by_group: list[np.ndarray]) -> list[np.ndarray]:
    """Return for each reward (reward - mean of its group) / (population std of all rewards of the train step + 1e-6)
    (arXiv 2508.08221)."""
    all_rewards = np.concatenate([*rewards_by_group, np.zeros(0)])
    std = all_rewards.std() if all_rewards.size else 0.0
    return [centred_G / (std + STD_EPSILON) for centred_G in _mean_centred_advantages(rewards_by_group)]


def _max_rl_advantages(rewards_by_group: list[np.ndarray]) -> list[np.ndarray]:
    """Return for each reward (reward - mean) / mean, with the mean of its group (MaxRL, arXiv 2602.02710). Raise
    RewardError for negative rewards."""
    min_reward = min((rewards_G.min() for rewards_G in rewards_by_group if rewards_G.size), default=0.0)
    if min_reward < 0:
        raise RewardError(
            f"train.train_policy.algo = 'maxrl' divides by the mean reward of a group, and a reward is "
            f"{min_reward:g}; take rewards that are never negative, or another algo"
        )
    return [
        centred_G / rewards_G.mean() if centred_G.any() else centred_G
        for centred_G, rewards_G in zip(_mean_centred_advantages(rewards_by_group), rewards_by_group, strict=True)
    ]


def gdpo_advantages(rewards: Sequence[RewardsByGroup], weights: Sequence[float]) -> list[list[float | None]]:
    """Return the advantages of GDPO (arXiv 2601.05242), with the standard deviations and the constant of TRL.

    `rewards` has an element per reward function: its values for the completions of each group. Each value r becomes (r
    - mean) / (sample std + 1e-4) within its group. The sums over functions, weighted by `weights`, are normalized by
    the same formula over all completions of the train step. A value that a completion lacks, because the function does
    not apply to it, adds nothing to the sum; a completion without any value has the advantage None."""
    rewards_by_group = zip(*rewards, strict=True)
    has_reward_by_group = [[any(map(_is_finite, each)) for each in zip(*row, strict=True)] for row in rewards_by_group]
    weighted_sums = [np.zeros(len(row)) for row in has_reward_by_group]
    for rewards_of_function, weight in zip(rewards, weights, strict=True):
        for weighted_sum_G, group_values in zip(weighted_sums, rewards_of_function, strict=True):
            is_finite_G = np.array(list(map(_is_finite, group_values)), dtype=bool)
            weighted_sum_G[is_finite_G] += weight * _standardise(np.array(list(filter(_is_finite, group_values))))
    finite_sums = [weighted_sum_G[row] for weighted_sum_G, row in zip(weighted_sums, has_reward_by_group, strict=True)]
    next_advantages = iter(_standardise(np.concatenate([*finite_sums, np.zeros(0)])))
    return [[float(next(next_advantages)) if has_reward else None for has_reward in row] for row in has_reward_by_group]


def _standardise(values_N: np.ndarray) -> np.ndarray:
    if _all_equal(values_N):
        return np.zeros_like(values_N)
    centred_values_N: np.ndarray = values_N - values_N.mean()
    return centred_values_N / (values_N.std(ddof=1) + _GDPO_EPSILON)


ADVANTAGE_RULES: dict[str, Callable[[list[np.ndarray]], list[np.ndarray]]] = {
    "grpo": _grpo_advantages,
    "rloo": _rloo_advantages,
    "batch-std": _batch_std_advantages,
    "reinforce++": lambda groups: groups,
    "reinforce++-baseline": _mean_centred_advantages,
    "maxrl": _max_rl_advantages,
}
"""Functions that turn the rewards of all groups into advantages, by the name of the rule, the value of the recipe key
`algo`. For both REINFORCE++ rules, `advantages` then applies `whiten` to the results."""
