"""REINFORCE++ (arXiv 2501.03262) against a transcription of its equation 10, whitening over the learned tokens of a
train step, with the estimator of verl: (A - mean) / sqrt(sample variance + 1e-8). In float64.

T tokens of a completion.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from cosmos_core.algorithms.grpo import Grpo
from cosmos_core.config.schema.grpo import GrpoConfig
from cosmos_core.types import Completion, Group, Prompt, Score, ScoredGroup, Segment
from tests.unit.trainers import Given, micro_batch

REWARDS = (0.0, 1.0, 0.25, 1.0, -2.0)


def segment(generator: np.random.Generator, length: int, is_sampled: bool) -> Segment:
    logprobs = [math.nan if generator.random() < 0.1 else -1.0 for _ in range(length)]
    ids = tuple(generator.integers(3, 9, length).tolist())
    return Segment(ids, is_sampled, tuple(logprobs) if is_sampled else (), 0)


def random_groups(seed: int) -> list[ScoredGroup]:
    """Groups of unequal sizes and lengths: several turns with results of tools between them, tokens without a
    log-probability, prefixes that are shared, invalid rewards, a group of one, one of equal rewards."""
    generator = np.random.default_rng(seed)
    groups = []
    for number, size in enumerate((4, 3, 1, 3)):
        first = segment(generator, 3, True)
        completions, scores = [], []
        for k in range(size):
            turns = [first] if generator.random() < 0.4 else []
            for _ in range(generator.integers(1, 3)):
                turns += [segment(generator, int(generator.integers(1, 9)), True), segment(generator, 2, False)]
            completions.append(Completion(tuple(turns[:-1]), "stop", "x"))
            value = 0.5 if number == 3 else float(generator.choice(REWARDS))
            scores.append(Score(None, error="timed out") if (number, k) == (0, 1) else Score(value))
        groups.append(ScoredGroup(Group(Prompt(number, (1, 2), "", ""), tuple(completions), 0), tuple(scores)))
    return groups


def whitened(values: list[list[float]], masks: list[list[int]]) -> list[list[float]]:
    """Equation 10 over all tokens whose mask is 1; 0 elsewhere."""
    flat = [v for row, mask in zip(values, masks, strict=True) for v, m in zip(row, mask, strict=True) if m]
    mean = sum(flat) / len(flat)
    variance = sum((v - mean) ** 2 for v in flat) / (len(flat) - 1)
    scale = 1 / math.sqrt(variance + 1e-8)
    return [
        [(v - mean) * scale if m else 0.0 for v, m in zip(row, mask, strict=True)]
        for row, mask in zip(values, masks, strict=True)
    ]


@pytest.mark.parametrize("algo", ["reinforce++", "reinforce++-baseline"])
@pytest.mark.parametrize("seed", range(5))
def test_advantages_are_whitened_over_the_learned_tokens_of_the_step(algo: str, seed: int) -> None:
    groups = random_groups(seed)
    found, _ = Grpo(GrpoConfig(algo=algo, min_filter_prefix_tokens=3)).credit(groups)
    rewards = []
    for group in groups:
        valid = [score.value for score in group.scores if score.value is not None]
        mean = sum(valid) / len(valid) if algo.endswith("baseline") else 0.0
        rewards += [value - mean for value in valid]
    masks = [sample.loss_mask.tolist() for sample in found]
    assert len(found) == len(rewards) and {len(mask) for mask in masks} != {len(masks[0])}
    for row, mask, sample in zip(
        whitened([[r] * len(m) for r, m in zip(rewards, masks, strict=True)], masks), masks, found, strict=True
    ):
        assert [sample.advantage * m for m in mask] == pytest.approx(row, abs=1e-9)


@pytest.mark.parametrize("beta", [1e-9, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_both_forms_learn_the_same_where_the_kl_counts_for_nothing(beta: float, seed: int) -> None:
    """The loss of the first update is -advantage of each token, so its gradient shows them."""
    groups, gradients = random_groups(seed), []
    for config in (GrpoConfig(algo="reinforce++"), GrpoConfig(algo="reinforce++", kl_beta=beta, kl_in_reward=True)):
        algorithm = Grpo(config)
        samples, _ = algorithm.credit(groups)
        generator = torch.Generator().manual_seed(seed)
        old = [torch.randn(len(sample.input_ids) - 1, generator=generator).double() for sample in samples]
        reference = [row + torch.randn(len(row), generator=generator).double() for row in old]
        view = Given(policy=old, reference=reference)
        (update,) = algorithm.updates(samples, view)
        width = max(len(row) for row in old)
        mask_BS = torch.zeros(len(old), width, dtype=torch.bool)
        logprobs_BS = torch.zeros(len(old), width, dtype=torch.float64)
        for b, (row, sample) in enumerate(zip(old, samples, strict=True)):
            logprobs_BS[b, : len(row)], mask_BS[b, : len(row)] = row, torch.as_tensor(sample.loss_mask[1:]).bool()
        logprobs_BS.requires_grad_()
        update.loss(micro_batch(update.samples, logprobs_BS, mask_BS)).value.backward()
        gradients.append(-logprobs_BS.grad * mask_BS.sum())
        rewards = [[sample.reward] * len(row) for sample, row in zip(samples, old, strict=True)]
        masks = [sample.loss_mask[1:].tolist() for sample in samples]
    returns = []
    for reward_T, mask_T, old_T, ref_T in zip(rewards, masks, old, reference, strict=True):
        kl_T = [beta * (o - r).item() * m for o, r, m in zip(old_T, ref_T, mask_T, strict=True)]
        returns.append([reward - sum(kl_T[t:]) for t, reward in enumerate(reward_T)])
    for expected, gradient in zip((rewards, returns), gradients, strict=True):
        for row, found in zip(whitened(expected, masks), gradient.tolist(), strict=True):
            assert found[: len(row)] == pytest.approx(row, abs=1e-6)


def test_equal_returns_teach_nothing() -> None:
    groups = [replace(group, scores=tuple(Score(0.1) for _ in group.scores)) for group in random_groups(0)]
    for algo in ("reinforce++", "reinforce++-baseline"):
        found, _ = Grpo(GrpoConfig(algo=algo)).credit(groups)
        assert {sample.advantage for sample in found} == {0.0}
