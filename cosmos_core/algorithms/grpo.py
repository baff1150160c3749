"""Group relative policy optimisation (arXiv 2402.03300): advantages inside groups, the clipped policy loss.

Here are credit, old and reference log-probabilities, denominators, and optimizer steps inside a train step; the
formulas are in `policy_loss`, `aggregate` and `correction`.

Shapes: B samples, S predicted tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cosmos_core.algorithms.aggregate import Metrics, add_metrics, denominator, token_metric, weighted_sum
from cosmos_core.algorithms.base import Algorithm, Loss, Update, View, aligned
from cosmos_core.algorithms.correction import importance_weights
from cosmos_core.algorithms.policy_loss import PolicyInputs, advantages, policy_loss, positive_nll
from cosmos_core.config.schema.grpo import GrpoConfig
from cosmos_core.data.sample import Sample
from cosmos_core.models.base import MicroBatch
from cosmos_core.models.scorer import Wants
from cosmos_core.types import Completion, Prompt, Sampling, ScoredGroup


@dataclass(frozen=True, slots=True)
class _Fixed:
    """What does not change during an update, a row for each of its samples."""

    samples: Sequence[Sample]
    old: Sequence[Tensor] | None
    """Log-probabilities before the first update of the train step; None: this is it."""
    reference: Sequence[Tensor] | None


class Grpo(Algorithm):
    """GRPO with the settings of `[train.train_policy]`."""

    config: GrpoConfig

    def __init__(self, config: GrpoConfig, custom: Mapping[str, Any] = {}, sampling: Sampling | None = None) -> None:
        """`sampling` says how completions are drawn; None: from softmax(logits / temperature)."""
        super().__init__(config, custom, sampling)
        self._wants = Wants(config.temperature)
        self._is_corrected = sampling is not None and sampling.changes_distribution

    def credit(self, groups: Sequence[ScoredGroup]) -> tuple[list[Sample], dict[str, float]]:
        """Return completions with a valid score as samples; an invalid one is left out, its group compared without."""
        values, counts = advantages(
            [[score.value for score in group.scores] for group in groups],
            normalise_std=not self.config.unbiased_advantage,
        )
        found = [
            sample_of(group.group.prompt, completion, value, score.value)
            for group, group_values in zip(groups, values, strict=True)
            for completion, score, value in zip(group.group.completions, group.scores, group_values, strict=True)
            if value is not None and score.value is not None
        ]
        return found, {"reward/constant_groups": counts["constant_groups"] / max(1, counts["groups"])}

    def updates(self, samples: Sequence[Sample], view: View) -> Iterator[Update]:
        """Yield `mu_iterations` passes over the samples in optimizer batches."""
        size = self.config.batch_size_per_optimize or len(samples)
        batches = [slice(start, start + size) for start in range(0, len(samples), size)]
        # With one update per step pi is pi_old, so the ratio is exactly 1 and the pass that measures it is saved.
        is_single = len(batches) == 1 and self.config.mu_iterations == 1
        old = None if is_single else _logprobs(view, samples, self._wants, "policy")
        has_reference = "reference" in self.config.named_weights
        reference = _logprobs(view, samples, self._wants, "reference") if has_reference else None
        for _ in range(self.config.mu_iterations):
            for batch in batches:
                yield self._update(_Fixed(samples[batch], old and old[batch], reference and reference[batch]))

    def _update(self, fixed: _Fixed) -> Update:
        config, chosen = self.config, fixed.samples
        total = denominator(config.loss_type, [s.num_learned for s in chosen], config.unbiased_loss_max_tokens)
        positive_tokens = float(max(1, sum(s.num_learned for s in chosen if s.reward > 0)))

        def loss(micro: MicroBatch) -> Loss:
            policy, correction = self._policy_loss(micro, fixed)
            value = weighted_sum(
                policy.loss_BT, micro.mask_BS, config.loss_type, total, config.unbiased_loss_max_tokens
            )
            if config.positive_nll_coef:
                rewards_B = micro.logprobs_BS.new_tensor([s.reward for s in micro.samples])
                value = value + config.positive_nll_coef * positive_nll(
                    micro.logprobs_BS, micro.mask_BS, rewards_B, positive_tokens
                )
            difference, mismatch = _engine_difference(micro, _rows(fixed.old, micro))
            return Loss(value, add_metrics(add_metrics(policy.metrics, mismatch), correction), difference)

        return Update(
            chosen,
            loss,
            Wants(config.temperature, entropy="value" if config.log_entropy else ""),
            has_constant_gradient=fixed.old is None and fixed.reference is None and not self._is_corrected,
        )

    def _policy_loss(self, micro: MicroBatch, fixed: _Fixed) -> tuple[Any, Metrics]:
        """Return the loss of each token, weighted where tokens were drawn from another distribution."""
        old_BS, weights_BS = _rows(fixed.old, micro), None
        metrics: Metrics = {}
        if self._is_corrected:
            before_BS = micro.logprobs_BS.detach() if old_BS is None else old_BS
            weights_BS, metrics = importance_weights(before_BS, _rollout_logprobs(micro), micro.mask_BS)
        policy = policy_loss(
            PolicyInputs(
                logprobs_BT=micro.logprobs_BS,
                advantages_B=micro.logprobs_BS.new_tensor([s.advantage for s in micro.samples]),
                mask_BT=micro.mask_BS,
                old_logprobs_BT=old_BS,
                ref_logprobs_BT=_rows(fixed.reference, micro),
                entropy_BT=micro.outputs.get("entropy"),
                weights_BT=weights_BS,
            ),
            self.config,
        )
        return policy, metrics


ALGORITHM = Grpo


def sample_of(prompt: Prompt, completion: Completion, advantage: float, reward: float) -> Sample:
    """Return a completion as a sample, of which the tokens that the policy drew are learned."""
    ids = np.array([*prompt.token_ids, *completion.token_ids], dtype=np.int64)
    mask = np.array([0] * len(prompt.token_ids) + list(completion.loss_mask), dtype=np.uint8)
    return Sample(ids, mask, advantage, reward, np.array(completion.logprobs, dtype=np.float32))


def _logprobs(view: View, samples: Sequence[Sample], wants: Wants, weights: str) -> list[Tensor]:
    return [row["logprobs"] for row in view.evaluate(samples, wants, weights=weights)]


def _rows(values: Sequence[Tensor] | None, micro: MicroBatch) -> Tensor | None:
    """Return the values of the samples of a micro-batch as a rectangle."""
    return None if values is None else aligned([values[i] for i in micro.indices], micro.logprobs_BS)


def _rollout_logprobs(micro: MicroBatch) -> Tensor:
    """Return the log-probability of each sampled token under the distribution that it was drawn from."""
    found_BS = torch.zeros_like(micro.logprobs_BS)
    flat = [torch.as_tensor(sample.rollout_logprobs) for sample in micro.samples]
    found_BS[micro.mask_BS.bool()] = torch.cat(flat).to(found_BS)
    return found_BS


def _engine_difference(micro: MicroBatch, old_BS: Tensor | None) -> tuple[dict[str, Tensor], Metrics]:
    """Return |log pi_old - log mu| of every sampled token: how far trainer and engine are apart."""
    if any(sample.rollout_logprobs is None for sample in micro.samples):
        return {}, {}
    trainer_BS = micro.logprobs_BS.detach() if old_BS is None else old_BS
    difference_BS = (trainer_BS - _rollout_logprobs(micro)).abs()
    return (
        {"rollout/logprob_difference": difference_BS[micro.mask_BS.bool()]},
        {"rollout/logprob_difference_mean": token_metric(difference_BS, micro.mask_BS)},
    )
