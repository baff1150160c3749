"""Direct preference optimisation (arXiv 2305.18290): the chosen response above the rejected one, measured against a
reference policy.

The reward of a response is beta times its log-probability less that under the reference, which is fixed, or without a
reference beta times its log-probability. Not here: forward passes, and those of the reference (`train/reference.py`).

Shapes: B sequences, T tokens, P pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from cosmos_core.algorithms.aggregate import Metrics, denominator, masked, means
from cosmos_core.algorithms.base import Algorithm, Loss, Update, View
from cosmos_core.config.schema.dpo import DpoConfig, DpoLossConfig
from cosmos_core.data.sample import Sample
from cosmos_core.models.base import MicroBatch


@dataclass(frozen=True, slots=True)
class Compared:
    """Sums of log-probabilities over the learned tokens of each pair's responses, P each."""

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
    """Return the loss of some of a step's pairs, and metrics to add up."""
    chosen_P = config.beta * (pairs.chosen - pairs.reference_chosen)
    rejected_P = config.beta * (pairs.rejected - pairs.reference_rejected)
    terms = {
        "sigmoid": -logsigmoid(chosen_P - rejected_P).sum() / total.pairs,
        "bco_pair": -(logsigmoid(chosen_P) + logsigmoid(-rejected_P)).sum() / total.pairs,
        "sft": -pairs.chosen.sum() / total.chosen_tokens,
    }
    weights = config.loss_weights or (1.0,) * len(config.loss_type)
    loss = sum((w * terms[name] for name, w in zip(config.loss_type, weights, strict=True)), pairs.chosen.new_zeros(()))
    values = {
        "rewards/chosen": chosen_P,
        "rewards/rejected": rejected_P,
        "rewards/margin": chosen_P - rejected_P,
        "rewards/accuracy": chosen_P > rejected_P,
        "logps/chosen": pairs.chosen,
        "logps/rejected": pairs.rejected,
    }
    count = torch.tensor(float(len(chosen_P)), dtype=torch.float64, device=chosen_P.device)
    metrics = {k: torch.stack([v.detach().sum(dtype=torch.float64), count]) for k, v in values.items()}
    return loss, metrics


def step_denominators(samples: Sequence[Sample]) -> Denominators:
    """Return the denominators of a step, whose samples are chosen and rejected in turn."""
    tokens = denominator("token-mean", [sample.num_learned for sample in samples[::2]])
    return Denominators(max(1.0, len(samples) / 2), tokens)


class Dpo(Algorithm):
    """DPO as an algorithm of the loop: one update per step, mean over all its pairs.

    Samples come in pairs, the chosen before the rejected, and both are in one micro-batch.
    """

    config: DpoConfig

    def updates(self, samples: Sequence[Sample], view: View) -> Iterator[Update]:
        """Yield one optimizer step with all pairs."""
        total = step_denominators(samples)

        def loss(micro: MicroBatch) -> Loss:
            rows = {index: b for b, index in enumerate(micro.indices)}
            chosen = [i for i in sorted(rows) if i % 2 == 0]
            assert sorted(rows) == [j for i in chosen for j in (i, i + 1)], "a pair was split"
            logps_B = masked(micro.logprobs_BS, micro.mask_BS).sum(-1, dtype=torch.float64)
            reference_B = logps_B.new_tensor([sample.reference_logprob for sample in micro.samples])
            chosen_P, rejected_P = [rows[i] for i in chosen], [rows[i + 1] for i in chosen]
            pairs = Compared(logps_B[chosen_P], logps_B[rejected_P], reference_B[chosen_P], reference_B[rejected_P])
            return Loss(*preference_loss(pairs, self.config.dpo, total))

        yield Update(samples, loss)

    def measure(self, chunks: Iterable[Sequence[Sample]], view: View, size: int) -> dict[str, float]:
        """Return loss, mean rewards, and the share of pairs whose chosen response has the higher one."""
        logps, references, chosen_tokens = [], [], 0
        for samples in chunks:
            rows = view.evaluate(samples, size=2 * size)
            logps.append(torch.stack([row["logprobs"].sum(dtype=torch.float64) for row in rows]).cpu())
            references += [sample.reference_logprob for sample in samples]
            chosen_tokens += sum(int(sample.loss_mask[1:].sum()) for sample in samples[::2])
        own, against = torch.cat(logps), torch.tensor(references, dtype=torch.float64)
        pairs = Compared(own[::2], own[1::2], against[::2], against[1::2])
        total = Denominators(len(pairs.chosen), float(chosen_tokens))
        loss, metrics = preference_loss(pairs, self.config.dpo, total)
        return {"loss": loss.item(), **means(metrics), "pairs": float(len(pairs.chosen))}


ALGORITHM = Dpo
