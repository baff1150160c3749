"""GRPO as an algorithm of the loop: old and reference log-probabilities, denominators, optimizer steps inside a step.

The formulas are in `grpo` and `aggregate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from cosmos_core.algorithms.aggregate import Metrics, add_metrics, denominator, token_metric, weighted_sum
from cosmos_core.algorithms.base import LogProbs, Loss, MicroBatch, Sample, Update, aligned
from cosmos_core.algorithms.grpo import PolicyInputs, PolicySettings, policy_loss, positive_nll
from cosmos_core.config.schema.grpo import GrpoConfig


class Grpo:
    """Group relative policy optimisation with the settings of `[train.train_policy]`."""

    with_entropy = True

    def __init__(self, config: GrpoConfig, reference: LogProbs | None) -> None:
        """`reference` gives log-probabilities under the frozen start; needed when `kl_beta` > 0."""
        assert reference is not None or not config.kl_beta
        self.temperature = config.temperature
        self._config = config
        self._reference = reference
        self._settings = PolicySettings(
            epsilon_low=config.epsilon_low,
            epsilon_high=config.epsilon_high,
            lower_bound_ratio=config.lower_bound_ratio,
            kl_beta=config.kl_beta,
            unbiased_kl_estimate=config.unbiased_kl_estimate,
        )

    def updates(self, samples: Sequence[Sample], logprobs: LogProbs) -> Iterator[Update]:
        """`mu_iterations` passes over the samples in optimizer batches."""
        size = self._config.batch_size_per_optimize or len(samples)
        batches = [range(start, min(start + size, len(samples))) for start in range(0, len(samples), size)]
        single = len(batches) == 1 and self._config.mu_iterations == 1
        # With one update a step pi is pi_old, so the ratio is exactly 1 and the pass that measures it is saved.
        old = None if single else logprobs(samples)
        reference = self._reference(samples) if self._reference else None
        for _ in range(self._config.mu_iterations):
            for batch in batches:
                yield self._update(samples, batch, old, reference)

    def _update(
        self, samples: Sequence[Sample], batch: range, old: list[Tensor] | None, reference: list[Tensor] | None
    ) -> Update:
        chosen = [samples[i] for i in batch]
        place = {id(sample): i for i, sample in zip(batch, chosen, strict=True)}
        config = self._config
        total = denominator(config.loss_type, [s.num_learned for s in chosen], config.unbiased_loss_max_tokens)
        positive_tokens = float(max(1, sum(s.num_learned for s in chosen if s.reward > 0)))

        def loss(micro: MicroBatch) -> Loss:
            def rows(values: list[Tensor] | None) -> Tensor | None:
                return (
                    None
                    if values is None
                    else aligned([values[place[id(s)]] for s in micro.samples], micro.logprobs_BS)
                )

            policy = policy_loss(
                PolicyInputs(
                    logprobs_BT=micro.logprobs_BS,
                    advantages_B=micro.logprobs_BS.new_tensor([s.advantage for s in micro.samples]),
                    mask_BT=micro.mask_BS,
                    old_logprobs_BT=rows(old),
                    ref_logprobs_BT=rows(reference),
                    entropy_BT=micro.entropy_BS,
                ),
                self._settings,
            )
            value = weighted_sum(
                policy.loss_BT, micro.mask_BS, config.loss_type, total, config.unbiased_loss_max_tokens
            )
            metrics = policy.metrics
            if config.positive_nll_coef:
                rewards_B = micro.logprobs_BS.new_tensor([s.reward for s in micro.samples])
                value = value + config.positive_nll_coef * positive_nll(
                    micro.logprobs_BS, micro.mask_BS, rewards_B, positive_tokens
                )
            difference, mismatch = _engine_difference(micro, rows(old))
            return Loss(value, add_metrics(metrics, mismatch), difference)

        return Update(chosen, loss)


def _engine_difference(micro: MicroBatch, old_BS: Tensor | None) -> tuple[dict[str, Tensor], Metrics]:
    """|log pi_old - log mu| of every sampled token: how far trainer and engine are apart under the same weights."""
    if any(sample.rollout_logprobs is None for sample in micro.samples):
        return {}, {}
    engine_BS = torch.zeros_like(micro.logprobs_BS)
    flat = [torch.as_tensor(sample.rollout_logprobs) for sample in micro.samples]
    engine_BS[micro.mask_BS.bool()] = torch.cat(flat).to(engine_BS)
    trainer_BS = micro.logprobs_BS.detach() if old_BS is None else old_BS
    difference_BS = (trainer_BS - engine_BS).abs()
    return (
        {"rollout/logprob_difference": difference_BS[micro.mask_BS.bool()]},
        {"rollout/logprob_difference_mean": token_metric(difference_BS, micro.mask_BS)},
    )
