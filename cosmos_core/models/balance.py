"""Load-balancing loss of mixtures of experts (Switch Transformer, arXiv 2101.03961), computed per sequence.

The loss of a sequence is E sum_e f_e P_e: f_e is the fraction of its tokens that are routed to expert e, and P_e the
mean router probability of expert e, over all layers, as in transformers' `load_balancing_loss_func` for one sequence.
The loss of an update (one optimizer step) is the mean over its sequences, weighted by their numbers of tokens. A loss
over all tokens of an update would need f before the first backward pass, and a loss per micro-batch would depend on how
the update was split into micro-batches.

Shapes: M tokens of a micro-batch, padding included, R sequences, E experts.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cosmos_core.errors import ConfigError

_AUX_LOSS_COEFF_KEY = "policy.aux_loss_coeff"
SEQUENCE_INDEX_KEY = "sequence_of_token"
"""Name of the input of `LogprobScorer` with the sequence index of each token; padding has the index `num_sequences`."""
NUM_SEQUENCES_KEY = "num_sequences"
"""Name of the input of `LogprobScorer` with the number of sequences in the micro-batch."""
LOAD_BALANCING_OUTPUT = "balance"
"""Name of the output of `LogprobScorer` with the load-balancing loss, summed over the sequences of a micro-batch."""


@dataclass(frozen=True, slots=True)
class LoadBalancingSettings:
    """Settings of the load-balancing loss of a mixture-of-experts model."""

    coefficient: float
    num_experts: int
    experts_per_token: int
    """Number of experts to which the router sends each token."""


def load_balancing_settings(model: PreTrainedModel, coefficient: float) -> LoadBalancingSettings | None:
    """Return the settings of the load-balancing loss of a model; `coefficient` is the factor of this loss in the total
    loss. Return None if `coefficient` is 0. Raise ConfigError if transformers has no such loss for the model."""
    if not coefficient:
        return None
    config: Any = model.config.get_text_config()
    num_experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    experts_per_token = getattr(config, "num_experts_per_tok", None)
    has_balancing_loss = hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func")
    if not (has_balancing_loss and num_experts and experts_per_token):
        raise ConfigError(
            f"{_AUX_LOSS_COEFF_KEY} = {coefficient}: transformers has no load-balancing loss for "
            f"{type(model).__name__}, which hands out no logits of routers; leave it out"
        )
    return LoadBalancingSettings(coefficient, int(num_experts), int(experts_per_token))


def make_sequence_index_inputs(row_inputs: dict[str, Any], sequence_lengths: Sequence[int]) -> dict[str, Any]:
    """Return two additional inputs of `LogprobScorer`: the sequence index of each token, and the number of sequences.
    `row_inputs` are the model inputs of padded or packed rows, and `sequence_lengths` are the numbers of tokens of the
    sequences."""
    sequence_indices = torch.arange(len(sequence_lengths))
    if "attention_mask" in row_inputs:
        mask_BT = row_inputs["attention_mask"].bool()
        sequence_index_M = torch.where(mask_BT, sequence_indices.unsqueeze(-1), len(sequence_lengths)).flatten()
    else:
        sequence_index_M = torch.full((row_inputs["input_ids"].numel(),), len(sequence_lengths))
        num_tokens = sum(sequence_lengths)
        sequence_index_M[:num_tokens] = sequence_indices.repeat_interleave(torch.tensor(sequence_lengths))
    return {SEQUENCE_INDEX_KEY: sequence_index_M, NUM_SEQUENCES_KEY: len(sequence_lengths)}


def load_balancing_loss(
    loss_settings: LoadBalancingSettings, router_logits: Sequence[Tensor], sequence_index_M: Tensor, num_sequences: int
) -> Tensor:
    """Return the load-balancing loss of a micro-batch: the sum of the losses of its sequences, each multiplied by its
    number of tokens and the coefficient. `router_logits` has the logits ME of each layer, and `sequence_index_M` the
    index of each token's sequence; padding has the index `num_sequences`."""
    sums_shape = (num_sequences + 1, loss_settings.num_experts)
    router_logits = [logits_ME.flatten(0, -2) for logits_ME in router_logits]
    sum_dtype = torch.promote_types(router_logits[0].dtype, torch.float32)
    routed_counts_RE, probability_sums_RE = (router_logits[0].new_zeros(sums_shape, dtype=sum_dtype) for _ in range(2))
    for logits_ME in router_logits:
        probabilities_ME = logits_ME.softmax(-1, dtype=routed_counts_RE.dtype)
        expert_ids_MK = probabilities_ME.detach().topk(loss_settings.experts_per_token, dim=-1).indices
        is_routed_ME = torch.zeros_like(probabilities_ME.detach()).scatter_(-1, expert_ids_MK, 1.0)
        routed_counts_RE = routed_counts_RE.index_add(0, sequence_index_M, is_routed_ME)
        probability_sums_RE = probability_sums_RE.index_add(0, sequence_index_M, probabilities_ME)
    num_tokens_R = torch.bincount(sequence_index_M, minlength=num_sequences + 1)[:num_sequences]
    num_routed_tokens_R = (len(router_logits) * num_tokens_R).clamp(min=1)
    unscaled_loss_R = (routed_counts_RE * probability_sums_RE).sum(-1)[:num_sequences] / num_routed_tokens_R.square()
    return loss_settings.coefficient * loss_settings.num_experts * (num_tokens_R * unscaled_loss_R).sum()
