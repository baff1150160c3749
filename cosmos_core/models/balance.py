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

COEFFICIENT_KEY = "policy.aux_loss_coeff"
SEQUENCES = "sequence_of_token"
"""Name of the input of `Scorer` with the sequence index of each token; padding has the index R."""
NUM_SEQUENCES = "num_sequences"
"""Name of the input of `Scorer` with the number of sequences R."""
OUTPUT = "balance"
"""Name of the output of `Scorer` with the load-balancing loss: the sum over sequences, weighted by their tokens."""


@dataclass(frozen=True, slots=True)
class LoadBalancingSettings:
    """Settings of the load-balancing loss of a mixture-of-experts model."""

    coefficient: float
    num_experts: int
    num_chosen: int
    """Number of experts to which the router sends each token."""


def load_balancing_settings(model: PreTrainedModel, coefficient: float) -> LoadBalancingSettings | None:
    """Return the settings of the load-balancing loss of a model; None if the coefficient is 0. Raise ConfigError if
    transformers has no load-balancing loss for the model."""
    if not coefficient:
        return None
    config: Any = model.config.get_text_config()
    num_experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    experts_per_token = getattr(config, "num_experts_per_tok", None)
    has_loss_function = hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func")
    if not (has_loss_function and num_experts and experts_per_token):
        raise ConfigError(
            f"{COEFFICIENT_KEY} = {coefficient}: transformers has no load-balancing loss for {type(model).__name__}, "
            f"which hands out no logits of routers; leave it out"
        )
    return LoadBalancingSettings(coefficient, int(num_experts), int(experts_per_token))


def sequences_of(inputs: dict[str, Any], lengths: Sequence[int]) -> dict[str, Any]:
    """Return the inputs of `Scorer` that contain the sequence index of each token. `inputs` are the model inputs of
    padded or packed rows, and `lengths` are the numbers of tokens of the sequences."""
    sequence_indices = torch.arange(len(lengths))
    if "attention_mask" in inputs:
        mask_BT = inputs["attention_mask"].bool()
        sequence_of_M = torch.where(mask_BT, sequence_indices.unsqueeze(-1), len(lengths)).flatten()
    else:
        sequence_of_M = torch.full((inputs["input_ids"].numel(),), len(lengths))
        sequence_of_M[: sum(lengths)] = sequence_indices.repeat_interleave(torch.tensor(lengths))
    return {SEQUENCES: sequence_of_M, NUM_SEQUENCES: len(lengths)}


def balance_loss(
    balance: LoadBalancingSettings, logits: Sequence[Tensor], sequence_of_M: Tensor, num_sequences: int
) -> Tensor:
    """Return the load-balancing loss of a micro-batch, the coefficient times the sum over sequences of tokens * loss,
    from the router logits ME of each layer; padding has the sequence index `num_sequences`."""
    shape = (num_sequences + 1, balance.num_experts)
    logits = [logits_ME.flatten(0, -2) for logits_ME in logits]
    dtype = torch.promote_types(logits[0].dtype, torch.float32)
    chosen_counts_RE, probability_sums_RE = (logits[0].new_zeros(shape, dtype=dtype) for _ in range(2))
    for logits_ME in logits:
        probability_ME = logits_ME.softmax(-1, dtype=chosen_counts_RE.dtype)
        expert_ids_MK = probability_ME.detach().topk(balance.num_chosen, dim=-1).indices
        chosen_one_hot_ME = torch.zeros_like(probability_ME.detach()).scatter_(-1, expert_ids_MK, 1.0)
        chosen_counts_RE = chosen_counts_RE.index_add(0, sequence_of_M, chosen_one_hot_ME)
        probability_sums_RE = probability_sums_RE.index_add(0, sequence_of_M, probability_ME)
    num_tokens_R = torch.bincount(sequence_of_M, minlength=num_sequences + 1)[:num_sequences]
    num_router_rows_R = (len(logits) * num_tokens_R).clamp(min=1)
    expert_products_R = (chosen_counts_RE * probability_sums_RE).sum(-1)[:num_sequences] / num_router_rows_R.square()
    return balance.coefficient * balance.num_experts * (num_tokens_R * expert_products_R).sum()
