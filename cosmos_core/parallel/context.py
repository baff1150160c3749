"""Context parallelism (Ulysses, arXiv 2309.14509): packed rows are sharded over ranks along the sequence dimension.

Rows are packed end to end, and each rank gets a shard of the same length. Only attention needs tokens of other shards:
an all-to-all before attention gives each rank all tokens of some heads, and an all-to-all after attention gives each
rank all heads of its tokens. Scored tokens are the tokens whose outputs the loss needs.

Shape legend: P packed tokens, N scored tokens, K heads, D head size.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from cosmos_core.errors import ModelError
from cosmos_core.parallel.plan import check_head_split

ULYSSES_ATTENTION = "ulysses"


def apply_cp(model: PreTrainedModel, mesh: DeviceMesh, attention_name: str, tp_size: int) -> None:
    """Make the attention of a model exchange tokens and heads over the ranks of `mesh`. `attention_name` is the name
    under which transformers has registered the attention function for packed rows. `tp_size` is the number of ranks
    over which tensor parallelism has already split the heads. Raise ModelError if the model uses another attention
    function, or if its heads cannot be divided among the ranks."""
    check_head_split(model, "cp_size", mesh.size(), tp_size)
    if model.config.get_text_config()._attn_implementation != attention_name:
        raise ModelError(
            f"policy.parallelism.cp_size = {mesh.size()}: {type(model).__name__} computes attention in its own way, "
            f"which this version cannot shard over ranks; set it to 1"
        )
    attention_fn, group = AttentionInterface()[attention_name], mesh.get_group()

    def ulysses_attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        if key.shape[1] % dist.get_world_size(group):
            num_key_repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(num_key_repeats, 1), value.repeat_interleave(num_key_repeats, 1)
        head_sharded_qkv = (all_to_all(qkv_state, 1, 2, group) for qkv_state in (query, key, value))
        return all_to_all(attention_fn(module, *head_sharded_qkv, attention_mask, **kwargs)[0], 1, 2, group), None

    AttentionInterface.register(ULYSSES_ATTENTION, ulysses_attention)
    AttentionMaskInterface.register(ULYSSES_ATTENTION, AttentionMaskInterface()[attention_name])
    model.set_attn_implementation(ULYSSES_ATTENTION)


def shard_rows(
    inputs: dict[str, Any], scored_index_N: Tensor, mesh: DeviceMesh
) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Return for this rank: its shard of the model inputs of packed rows, with `shift_labels`, the next token of each
    token; the indices in this shard of its scored tokens (tokens whose outputs the loss needs); and a mask that marks
    them among all N scored tokens. `scored_index_N` are the indices of all scored tokens in the packed rows.
    `sequence_bounds` stay those of the whole packed rows, whose length must be divisible by the number of ranks."""
    ids_1P = inputs["input_ids"]
    shard_length, num_remaining_tokens = divmod(ids_1P.shape[1], mesh.size())
    assert not num_remaining_tokens, "packed rows are as long as `collate_rows` was told to fill them"
    shard_start = mesh.get_local_rank() * shard_length
    is_local_N = (scored_index_N >= shard_start) & (scored_index_N < shard_start + shard_length)
    inputs_1P = {"input_ids": ids_1P, "position_ids": inputs["position_ids"], "shift_labels": ids_1P.roll(-1, dims=1)}
    input_shards = {name: values[:, shard_start : shard_start + shard_length] for name, values in inputs_1P.items()}
    return {**inputs, **input_shards}, scored_index_N[is_local_N] - shard_start, is_local_N


def gather_scored_tokens(local_values: Tensor, is_local_N: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return on every rank the values of all scored tokens (tokens whose outputs the loss needs). `local_values` are
    the values that this rank computed, for the scored tokens that `is_local_N` marks. In the backward pass each rank
    gets the gradients of `local_values`."""
    return _GatherScoredTokens.apply(local_values, is_local_N, mesh.get_group())  # type: ignore[no-any-return]


def all_to_all(tensor: Tensor, split_dim: int, concat_dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return a tensor resharded by an all-to-all: each rank's tensor is split along `split_dim`, and the received
    chunks are concatenated along `concat_dim`."""
    sent_chunks = torch.stack(tensor.chunk(dist.get_world_size(group), dim=split_dim))
    received_chunks = all_to_all_single_autograd(sent_chunks, None, None, group)
    return torch.cat(received_chunks.unbind(), dim=concat_dim)


class _GatherScoredTokens(torch.autograd.Function):
    """Differentiable gather of one value per token from the ranks that compute the values."""

    @staticmethod
    def forward(ctx: Any, local_values: Tensor, is_local_N: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(is_local_N)
        gathered_values_N = local_values.new_zeros((len(is_local_N), *local_values.shape[1:]))
        gathered_values_N[is_local_N] = local_values
        dist.all_reduce(gathered_values_N, group=group)
        return gathered_values_N

    @staticmethod
    def backward(ctx: Any, *output_gradients: Tensor) -> Any:
        (is_local_N,) = ctx.saved_tensors
        return output_gradients[0][is_local_N], None, None
