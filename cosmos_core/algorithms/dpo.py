"""Direct preference optimization (DPO, arXiv 2305.18290) and its variants: rank chosen above rejected responses.

The reward of a response is beta times the difference between its log-probability under the policy and under the fixed
reference, or without a reference beta times its log-probability. Formulas and names of the losses are those of TRL. If
several losses are configured, all of them use the same log-probabilities. `train/reference.py` computes those of the
reference policy.

Shapes: B sequences, T tokens, P pairs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from cosmos_core.algorithms.aggregate import Metrics, apply_mask, compute_denominator, compute_means, make_dataset_masks
from cosmos_core.algorithms.base import Algorithm, Loss, TrainerView, Update
from cosmos_core.config.schema.dpo import DpoConfig, DpoLossConfig
from cosmos_core.data.sample import Sample
from cosmos_core.models.base import MicroBatch

_MIN_NEG_LOGPROB = 1e-12
"""Lower bound of -log p in ORPO, because a response with probability 1 would have infinite odds p / (1 - p)."""


class PairLogprobs(NamedTuple):
    """Log-probabilities of both responses of each pair, summed over the trained tokens; each tensor has the shape P."""

    chosen: Tensor
    rejected: Tensor
    reference_chosen: Tensor
    """Log-probability of each chosen response under the reference policy; 0 without a reference policy."""
    reference_rejected: Tensor
    num_chosen_tokens: Tensor
    """Number of trained tokens of each chosen response."""
    num_rejected_tokens: Tensor


def preference_loss(
    pairs: PairLogprobs, config: DpoLossConfig, num_pairs: float, num_chosen_tokens: float
) -> tuple[Tensor, Metrics]:
    """Return the loss of the pairs of a micro-batch, and metrics that are summed over micro-batches. The denominators
    `num_pairs` and `num_chosen_tokens` count the pairs and the tokens of chosen responses of the optimizer step."""
    chosen_rewards_P = config.beta * (pairs.chosen - pairs.reference_chosen)
    rejected_rewards_P = config.beta * (pairs.rejected - pairs.reference_rejected)
    loss = pairs.chosen.new_zeros(())
    for name, weight in zip(config.loss_type, config.loss_weights or (1.0,) * len(config.loss_type), strict=True):
        if name in {"sft", "orpo"}:
            loss = loss - weight * pairs.chosen.sum() / num_chosen_tokens
        if name != "sft":
            pair_losses_P = _PAIR_LOSSES[name](pairs, chosen_rewards_P, rejected_rewards_P, config)
            loss = loss + weight * pair_losses_P.sum() / num_pairs
    pair_values_by_metric = {
        "rewards/chosen": chosen_rewards_P,
        "rewards/rejected": rejected_rewards_P,
        "rewards/margin": chosen_rewards_P - rejected_rewards_P,
        "rewards/accuracy": chosen_rewards_P > rejected_rewards_P,
        "logps/chosen": pairs.chosen,
        "logps/rejected": pairs.rejected,
    }
    pair_count = torch.tensor(float(len(chosen_rewards_P)), dtype=torch.float64, device=chosen_rewards_P.device)
    return loss, {
        k: torch.stack([v.detach().sum(dtype=torch.float64), pair_count]) for k, v in pair_values_by_metric.items()
    }


def dataset_losses(
    pairs: PairLogprobs, sources: Sequence[str], config: DpoLossConfig, mean_chosen_tokens: float
) -> Metrics:
    """Return the mean loss of the pairs of each data set, as metric `loss/SOURCE`. The mean of these losses, weighted
    by numbers of pairs, is the loss of the optimizer step. `mean_chosen_tokens`: mean number of tokens of the chosen
    responses of the optimizer step, the denominator of loss terms that are sums over tokens (SFT)."""
    metrics = {}
    for name, mask_P in make_dataset_masks(sources):
        dataset_pairs = PairLogprobs(*(values_P.detach()[mask_P] for values_P in pairs))
        loss, _ = preference_loss(dataset_pairs, config, 1.0, mean_chosen_tokens)
        metrics[f"loss/{name}"] = torch.stack([loss.double(), mask_P.sum().to(loss.device, torch.float64)])
    return metrics


def _smooth_log_sigmoid(margin_P: Tensor, label_smoothing: float) -> Tensor:
    return -(1 - label_smoothing) * logsigmoid(margin_P) - label_smoothing * logsigmoid(-margin_P)


def _robust_loss(pairs: PairLogprobs, chosen_P: Tensor, rejected_P: Tensor, config: DpoLossConfig) -> Tensor:
    margin_P, flip_rate = chosen_P - rejected_P, config.label_smoothing
    return (flip_rate * logsigmoid(-margin_P) - (1 - flip_rate) * logsigmoid(margin_P)) / (1 - 2 * flip_rate)


def _margin_per_token(pairs: PairLogprobs, chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
    """Return for each pair the value of the chosen response (its reward or log-probability) minus that of the rejected
    one, both divided by the number of tokens of the response."""
    return chosen_P / pairs.num_chosen_tokens.clamp(min=1) - rejected_P / pairs.num_rejected_tokens.clamp(min=1)


def _simpo_loss(pairs: PairLogprobs, chosen_P: Tensor, rejected_P: Tensor, config: DpoLossConfig) -> Tensor:
    margin_P = config.beta * _margin_per_token(pairs, pairs.chosen, pairs.rejected) - config.simpo_gamma
    return _smooth_log_sigmoid(margin_P, config.label_smoothing)


def _orpo_loss(pairs: PairLogprobs, chosen_P: Tensor, rejected_P: Tensor, config: DpoLossConfig) -> Tensor:
    """Return the ORPO loss of each pair, from the odds p / (1 - p) of both responses, where p is the geometric mean of
    the probabilities of a response's tokens."""
    log_odds = []
    for logps_P, num_tokens_P in ((pairs.chosen, pairs.num_chosen_tokens), (pairs.rejected, pairs.num_rejected_tokens)):
        mean_logprob_P = (logps_P / num_tokens_P.clamp(min=1)).clamp(max=-_MIN_NEG_LOGPROB)
        log_odds.append(mean_logprob_P - torch.log(-torch.expm1(mean_logprob_P)))
    return -config.beta * logsigmoid(log_odds[0] - log_odds[1])


_PAIR_LOSSES: dict[str, Callable[[PairLogprobs, Tensor, Tensor, DpoLossConfig], Tensor]] = {
    "sigmoid": lambda _, c, r, config: _smooth_log_sigmoid(c - r, config.label_smoothing),
    "robust": _robust_loss,
    "bco_pair": lambda _, c, r, config: -logsigmoid(c) - logsigmoid(-r),
    "hinge": lambda _, c, r, config: torch.relu(1 - (c - r)),
    "ipo": lambda pairs, c, r, config: (_margin_per_token(pairs, c, r) / config.beta - 1 / (2 * config.beta)) ** 2,
    "apo_zero": lambda _, c, r, config: torch.sigmoid(-c) + torch.sigmoid(r),
    "apo_down": lambda _, c, r, config: torch.sigmoid(c) + torch.sigmoid(r - c),
    "sigmoid_norm": lambda pairs, c, r, config: -logsigmoid(_margin_per_token(pairs, c, r)),
    "simpo": _simpo_loss,
    "orpo": _orpo_loss,
}
"""Functions that return the loss of each pair of responses, by the name of the loss in the recipe. Their arguments are
the log-probabilities, the rewards of the chosen and of the rejected responses, and the settings."""


class Dpo(Algorithm):
    """DPO: one optimizer step per train step, with the mean loss over all pairs of the train step. The chosen sample of
    a pair comes before the rejected one, and both are in the same micro-batch."""

    config: DpoConfig

    def updates(self, samples: Sequence[Sample], view: TrainerView) -> Iterator[Update]:
        num_chosen_tokens = compute_denominator("token-mean", [sample.num_learned for sample in samples[::2]])
        num_pairs = max(1.0, len(samples) / 2)

        def loss(micro_batch: MicroBatch) -> Loss:
            sample_indices = sorted(micro_batch.indices)
            assert sample_indices == [j for i in sample_indices if i % 2 == 0 for j in (i, i + 1)], "a pair was split"
            rows_in_pair_order = sorted(range(len(sample_indices)), key=lambda row: micro_batch.indices[row])
            logps_B = apply_mask(micro_batch.logprobs_BS, micro_batch.mask_BS).sum(-1, dtype=torch.float64)
            reference_logps_B = logps_B.new_tensor([sample.reference_logprob for sample in micro_batch.samples])
            logprobs_and_lengths = (logps_B, reference_logps_B, micro_batch.mask_BS.sum(-1).to(logps_B))
            response_rows = rows_in_pair_order[::2], rows_in_pair_order[1::2]
            pairs = PairLogprobs(*(values_B[rows] for values_B in logprobs_and_lengths for rows in response_rows))
            loss_value, metrics = preference_loss(pairs, self.config.dpo, num_pairs, num_chosen_tokens)
            sources = [micro_batch.samples[row].source for row in rows_in_pair_order[::2]]
            metrics |= dataset_losses(pairs, sources, self.config.dpo, num_chosen_tokens / num_pairs)
            return Loss(loss_value, metrics)

        yield Update(samples, loss)

    def measure(self, chunks: Iterable[Sequence[Sample]], view: TrainerView, size: int) -> dict[str, float]:
        """Return metrics of held-out pairs: the loss (in total and of each data set), mean rewards, and the fraction of
        pairs whose chosen response has the higher reward. `size`: number of pairs in a forward pass."""
        logps, reference_logps, token_counts, sources = [], [], [], []
        for samples in chunks:
            sample_outputs = view.evaluate(samples, size=2 * size)
            logps.append(torch.stack([row["logprobs"].sum(dtype=torch.float64) for row in sample_outputs]).cpu())
            reference_logps += [sample.reference_logprob for sample in samples]
            token_counts += [sample.num_learned for sample in samples]
            sources += [sample.source for sample in samples[::2]]
        logprobs_and_lengths = [torch.tensor(values, dtype=torch.float64) for values in (reference_logps, token_counts)]
        logprobs_and_lengths.insert(0, torch.cat(logps))
        pairs = PairLogprobs(*(values[first::2] for values in logprobs_and_lengths for first in (0, 1)))
        num_pairs, num_chosen_tokens = len(pairs.chosen), float(sum(token_counts[::2]))
        loss, metrics = preference_loss(pairs, self.config.dpo, num_pairs, num_chosen_tokens)
        metrics |= dataset_losses(pairs, sources, self.config.dpo, num_chosen_tokens / num_pairs)
        return {"loss": loss.item(), **compute_means(metrics), "pairs": float(num_pairs)}


ALGORITHM = Dpo
