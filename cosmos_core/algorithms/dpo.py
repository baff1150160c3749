"""Direct preference optimisation (arXiv 2305.18290): the chosen answer above the rejected one, measured against a
reference.

The reward of an answer is beta times its log-probability less that under the reference, which is fixed, or without a
reference beta times its log-probability. Not here: forward passes, and the reference's figures (`train/reference.py`).

Shapes: B sequences, T tokens, P pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from cosmos_core.algorithms.aggregate import Metrics, denominator, masked
from cosmos_core.algorithms.base import LogProbs, Loss, MicroBatch, Sample, Update
from cosmos_core.config.schema.dpo import DpoLossConfig


@dataclass(frozen=True, slots=True)
class Compared:
    """Sums of log-probabilities over the learned tokens of each pair's answers, P each."""

    chosen: Tensor
    rejected: Tensor
    reference_chosen: Tensor
    """Of the reference; zeros: there is none."""
    reference_rejected: Tensor


@dataclass(frozen=True, slots=True)
class Denominators:
    """What the sums of an optimizer step are divided by."""

    pairs: float
    chosen_tokens: float


def preference_loss(pairs: Compared, config: DpoLossConfig, total: Denominators) -> tuple[Tensor, Metrics]:
    """The loss of some of a step's pairs, and metrics to add up."""
    chosen_P = config.beta * (pairs.chosen - pairs.reference_chosen)
    rejected_P = config.beta * (pairs.rejected - pairs.reference_rejected)
    terms = {
        "sigmoid": -logsigmoid(chosen_P - rejected_P).sum() / total.pairs,
        "bco_pair": -(logsigmoid(chosen_P) + logsigmoid(-rejected_P)).sum() / total.pairs,
        "sft": -pairs.chosen.sum() / total.chosen_tokens,
    }
    weights = config.loss_weights or (1.0,) * len(config.loss_type)
    loss = sum((w * terms[name] for name, w in zip(config.loss_type, weights, strict=True)), pairs.chosen.new_zeros(()))
    figures = {
        "rewards/chosen": chosen_P,
        "rewards/rejected": rejected_P,
        "rewards/margin": chosen_P - rejected_P,
        "rewards/accuracy": chosen_P > rejected_P,
        "logps/chosen": pairs.chosen,
        "logps/rejected": pairs.rejected,
    }
    count = torch.tensor(float(len(chosen_P)), dtype=torch.float64, device=chosen_P.device)
    metrics = {k: torch.stack([v.detach().sum(dtype=torch.float64), count]) for k, v in figures.items()}
    return loss, metrics


def step_denominators(samples: Sequence[Sample]) -> Denominators:
    """Of the chosen and rejected samples of a step, in turn."""
    tokens = denominator("token-mean", [sample.num_learned for sample in samples[::2]])
    return Denominators(max(1.0, len(samples) / 2), tokens)


class Dpo:
    """DPO as an algorithm of the loop: one update a step, mean over all its pairs.

    Samples come in pairs, the chosen before the rejected, and both go through the model together.
    """

    temperature = 1.0
    with_entropy = False

    def __init__(self, config: DpoLossConfig) -> None:
        self._config = config

    def updates(self, samples: Sequence[Sample], logprobs: LogProbs) -> Iterator[Update]:
        """All pairs in one optimizer step."""
        total = step_denominators(samples)
        place = {id(sample): i for i, sample in enumerate(samples)}

        def loss(micro: MicroBatch) -> Loss:
            rows = {place[id(sample)]: b for b, sample in enumerate(micro.samples)}
            chosen = [i for i in sorted(rows) if i % 2 == 0]
            assert sorted(rows) == [j for i in chosen for j in (i, i + 1)], "a pair was split"
            logps_B = masked(micro.logprobs_BS, micro.mask_BS).sum(-1, dtype=torch.float64)
            reference_B = logps_B.new_tensor([sample.reference_logprob for sample in micro.samples])
            chosen_P, rejected_P = [rows[i] for i in chosen], [rows[i + 1] for i in chosen]
            pairs = Compared(logps_B[chosen_P], logps_B[rejected_P], reference_B[chosen_P], reference_B[rejected_P])
            return Loss(*preference_loss(pairs, self._config, total))

        yield Update(samples, loss)
