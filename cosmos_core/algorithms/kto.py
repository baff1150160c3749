"""Kahneman-Tversky optimization (KTO, arXiv 2402.01306) and unpaired APO: a response is desirable or undesirable.

The formulas are those of TRL's `KTOTrainer`. KL is estimated over all rows of a train step, independently of
micro-batches. The label of a row is the reward of its sample, 1 or 0 (`data/preferences.py`).

Shapes: B sequences, T tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cosmos_core.algorithms.aggregate import Metrics, apply_mask, compute_means, make_dataset_masks
from cosmos_core.algorithms.base import Algorithm, Loss, TrainerView, Update
from cosmos_core.config.schema.kto import KtoConfig, KtoLossConfig
from cosmos_core.data.sample import Sample, swap_responses
from cosmos_core.models.base import MicroBatch


class LabelledLogprobs(NamedTuple):
    """Summed log-probabilities of the trained tokens of each response, and whether the response is desirable."""

    logps_B: Tensor
    reference_logps_B: Tensor
    """Log-probability of each response under the reference policy, summed over its trained tokens."""
    is_desirable_B: Tensor


def unpaired_loss(
    responses: LabelledLogprobs, kl: Tensor, config: KtoLossConfig, num_responses: int
) -> tuple[Tensor, Metrics]:
    """Return the loss of the responses of a micro-batch, and metrics that are summed over micro-batches. `kl` is the
    estimate of the KL divergence of the policy from the reference policy, a scalar; `num_responses` is the number of
    responses of the whole optimizer step, the denominator."""
    rewards_B = config.beta * (responses.logps_B - responses.reference_logps_B)
    is_desirable_B = responses.is_desirable_B
    sigmoid_sign_B = torch.where(is_desirable_B, -1.0, 1.0).to(rewards_B)
    weights_B = rewards_B.new_tensor([config.undesirable_weight, config.desirable_weight])[is_desirable_B.long()]
    loss = (weights_B * torch.sigmoid(sigmoid_sign_B * (rewards_B - config.beta * kl))).sum() / num_responses
    metrics = {
        f"{name}/{label}": torch.stack([values_B.detach()[mask_B].sum(dtype=torch.float64), mask_B.sum().double()])
        for name, values_B in (("rewards", rewards_B), ("logps", responses.logps_B))
        for label, mask_B in (("chosen", is_desirable_B), ("rejected", ~is_desirable_B))
    }
    return loss, metrics | {"kl": torch.stack([kl.double(), torch.ones_like(kl).double()])}


def dataset_losses(responses: LabelledLogprobs, sources: Sequence[str], kl: Tensor, config: KtoLossConfig) -> Metrics:
    """Return the mean loss of the responses of each data set of a mixture, as metric `loss/SOURCE`; empty for a single
    data set. `kl` is the estimate of the KL divergence from the reference policy."""
    metrics = {}
    for name, mask_B in make_dataset_masks(sources):
        dataset_responses = LabelledLogprobs(*(values_B.detach()[mask_B] for values_B in responses))
        loss, _ = unpaired_loss(dataset_responses, kl, config, num_responses=1)
        metrics[f"loss/{name}"] = torch.stack([loss.double(), mask_B.sum().to(loss.device, torch.float64)])
    return metrics


class Kto(Algorithm):
    """KTO: one optimizer step per train step, with the mean loss over all responses of the train step."""

    config: KtoConfig

    def updates(self, samples: Sequence[Sample], view: TrainerView) -> Iterator[Update]:
        # The KL estimate pairs prompts with responses of other rows, so it needs at least two rows.
        estimates_kl = self.config.kto.loss_type == "kto" and len(samples) > 1
        mismatched_samples = swap_responses(samples, self.max_tokens) if estimates_kl else []
        reference_logprobs_B = _sum_logprobs(view, [*samples, *mismatched_samples], "reference")
        kl = reference_logprobs_B.new_zeros(())
        if estimates_kl:
            log_ratio_B = _sum_logprobs(view, mismatched_samples, "policy") - reference_logprobs_B[len(samples) :]
            kl = log_ratio_B.mean().clamp(min=0)
        is_desirable_B = torch.tensor([sample.reward > 0 for sample in samples], device=kl.device)

        def loss(micro_batch: MicroBatch) -> Loss:
            logps_B = apply_mask(micro_batch.logprobs_BS, micro_batch.mask_BS).sum(-1, dtype=torch.float64)
            sample_indices = list(micro_batch.indices)
            responses = LabelledLogprobs(logps_B, reference_logprobs_B[sample_indices], is_desirable_B[sample_indices])
            loss_value, metrics = unpaired_loss(responses, kl, self.config.kto, len(samples))
            sources = [sample.source for sample in micro_batch.samples]
            return Loss(loss_value, metrics | dataset_losses(responses, sources, kl, self.config.kto))

        yield Update(samples, loss)

    def measure(self, chunks: Iterable[Sequence[Sample]], view: TrainerView, size: int) -> dict[str, float]:
        """Return the KTO metrics of held-out rows: the loss, in total and of each data set, and the mean implicit
        rewards. In each chunk a row's labelled sample is followed by its prompt with the response of another row, from
        which the KL divergence is estimated once for all rows; all samples have reference log-probabilities. `view`
        computes log-probabilities under the policy. `size`: number of samples in a forward pass."""
        labels: list[bool] = []
        sources: list[str] = []
        logps, reference_logps, log_ratios = [], [], []
        for samples in chunks:
            labelled_samples, mismatched_samples = samples[::2], samples[1::2]
            labels += [sample.reward > 0 for sample in labelled_samples]
            sources += [sample.source for sample in labelled_samples]
            logps.append(_sum_logprobs(view, labelled_samples, "policy", size))
            reference_logps.append(logps[-1].new_tensor([sample.reference_logprob for sample in labelled_samples]))
            if self.config.kto.loss_type == "kto" and len(mismatched_samples) > 1:  # for the reason see `updates`
                reference_logps_B = logps[-1].new_tensor([sample.reference_logprob for sample in mismatched_samples])
                log_ratios.append(_sum_logprobs(view, mismatched_samples, "policy", size) - reference_logps_B)
        logps_B = torch.cat(logps)
        responses = LabelledLogprobs(logps_B, torch.cat(reference_logps), torch.tensor(labels, device=logps_B.device))
        kl = torch.cat(log_ratios).mean().clamp(min=0) if log_ratios else logps_B.new_zeros(())
        loss, metrics = unpaired_loss(responses, kl, self.config.kto, len(labels))
        metrics |= dataset_losses(responses, sources, kl, self.config.kto)
        return {"loss": loss.item(), **compute_means(metrics)}


def _sum_logprobs(view: TrainerView, samples: Sequence[Sample], weights: str, size: int | None = None) -> Tensor:
    sample_outputs = view.evaluate(samples, weights=weights, size=size)
    return torch.stack([row["logprobs"].sum(dtype=torch.float64) for row in sample_outputs])


ALGORITHM = Kto
