"""Supervised fine-tuning: the negative log-likelihood of the labels, from the log-probabilities of the labels.

Shapes: B sequences, T tokens.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from cosmos_core.algorithms.aggregate import Metrics, apply_mask, compute_denominator, make_dataset_masks, token_metric
from cosmos_core.algorithms.base import Algorithm, Loss, TrainerView, Update
from cosmos_core.data.sample import Sample
from cosmos_core.models.base import MicroBatch


def sft_loss(logprobs_BT: Tensor, loss_mask_BT: Tensor, loss_denominator: float) -> tuple[Tensor, Metrics]:
    """Return the sum of -log p over the labels where the mask is 1, divided by `loss_denominator`
    (`aggregate.compute_denominator`). The metric `nll` is always the mean over tokens in nats."""
    loss = -apply_mask(logprobs_BT, loss_mask_BT).sum() / loss_denominator
    return loss, {"nll": token_metric(-logprobs_BT, loss_mask_BT)}


def dataset_losses(batch: MicroBatch) -> Metrics:
    """Return the mean negative log-likelihood of the trained tokens of each data set of a mixture, as metric
    `loss/SOURCE`; empty for a single data set."""
    return {
        f"loss/{name}": token_metric(-batch.logprobs_BS, batch.mask_BS * mask_B.unsqueeze(-1).to(batch.mask_BS))
        for name, mask_B in make_dataset_masks([sample.source for sample in batch.samples])
    }


class Sft(Algorithm):
    """Supervised fine-tuning: one optimizer step per train step, with the mean loss over all trained tokens."""

    def updates(self, samples: Sequence[Sample], view: TrainerView) -> Iterator[Update]:
        loss_denominator = compute_denominator("token-mean", [sample.num_learned for sample in samples])

        def loss(micro_batch: MicroBatch) -> Loss:
            loss_value, metrics = sft_loss(micro_batch.logprobs_BS, micro_batch.mask_BS, loss_denominator)
            return Loss(loss_value, metrics | dataset_losses(micro_batch))

        yield Update(samples, loss, has_constant_gradient=True)


ALGORITHM = Sft
