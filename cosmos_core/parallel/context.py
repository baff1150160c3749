"""Context parallelism (Ulysses, arXiv 2309.14509): each row is sharded over ranks; attention trades sequence for heads.

Rows are packed end to end and sharded equally. Only attention looks beyond a shard: before it an all-to-all gives
each rank all tokens of some heads, after it another gives each rank all heads of its tokens.

Shape legend: P packed tokens, N chosen tokens, K heads, D head size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from cosmos_core.errors import ModelError
from cosmos_core.parallel.plan import check_heads

NAME = "ulysses"


class RowShard(NamedTuple):
    """What one rank of a context has of packed rows."""

    inputs: dict[str, Any]
    """Of the model, with `shift_labels`; the bounds of sequences are still those of all rows."""
    chosen: Tensor
    """Indices of its chosen tokens in the shard."""
    is_mine_N: Tensor
    """Which of all chosen tokens they are."""


def apply_cp(model: PreTrainedModel, mesh: DeviceMesh, packed: str) -> None:
    """Make attention see whole rows. `packed`: the attention that reads packed rows, as it is registered.

    Raises:
        ModelError: the model computes attention in a way of its own, or its heads do not divide.
    """
    check_heads(model, "cp_size", mesh.size())
    if model.config.get_text_config()._attn_implementation != packed:
        raise ModelError(
            f"policy.parallelism.cp_size = {mesh.size()}: {type(model).__name__} computes attention in its own way, "
            f"which this version cannot shard over ranks; set it to 1"
        )
    attend, group = AttentionInterface()[packed], mesh.get_group()

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        size = dist.get_world_size(group)
        if key.shape[1] % size:
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        states = (exchanged(state, 1, 2, group) for state in (query, key, value))
        found_BPKD = attend(module, *states, attention_mask, **kwargs)[0]
        return exchanged(found_BPKD, 1, 2, group), None

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, AttentionMaskInterface()[packed])
    model.set_attn_implementation(NAME)


def shard_rows(inputs: dict[str, Any], chosen_N: Tensor, mesh: DeviceMesh) -> RowShard:
    """Return this rank's shard of packed rows, whose length is a multiple of the ranks."""
    ids_1P = inputs["input_ids"]
    length, rest = divmod(ids_1P.shape[1], mesh.size())
    assert not rest, "packed rows are as long as `rows_of` was told to fill them"
    start = mesh.get_local_rank() * length
    is_mine_N = (chosen_N >= start) & (chosen_N < start + length)
    here = {
        "input_ids": ids_1P,
        "position_ids": inputs["position_ids"],
        "shift_labels": ids_1P.roll(-1, dims=1),
    }
    own = {name: tensor_1P[:, start : start + length] for name, tensor_1P in here.items()}
    return RowShard({**inputs, **own}, chosen_N[is_mine_N] - start, is_mine_N)


def gather_chosen(values: Tensor, is_mine_N: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the values of all chosen tokens on every rank; each rank's gradient goes back to its own."""
    found: Tensor = _GatherChosen.apply(values, is_mine_N, mesh.get_group())
    return found


def exchanged(tensor: Tensor, chunk_dim: int, cat_dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return a tensor that ranks have a part of along one dimension as one that they have a part of along another."""
    found: Tensor = _Exchange.apply(tensor, chunk_dim, cat_dim, group)
    return found


class _Exchange(torch.autograd.Function):
    """Exchange over the ranks of a group: split along one dimension, concatenate along another."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, chunk_dim: int, cat_dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.back = (cat_dim, chunk_dim, group)
        return _traded(tensor, chunk_dim, cat_dim, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _traded(gradients[0], *ctx.back), None, None, None


def _traded(tensor: Tensor, chunk_dim: int, cat_dim: int, group: dist.ProcessGroup) -> Tensor:
    chunks = torch.stack(tensor.chunk(dist.get_world_size(group), dim=chunk_dim)).contiguous()
    found = torch.empty_like(chunks)
    dist.all_to_all_single(found, chunks, group=group)
    return torch.cat(found.unbind(), dim=cat_dim)


class _GatherChosen(torch.autograd.Function):
    """Sum over ranks of values that each has at indices of its own."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, is_mine_N: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(is_mine_N)
        found_N = values.new_zeros((len(is_mine_N), *values.shape[1:]))
        found_N[is_mine_N] = values
        dist.all_reduce(found_N, group=group)
        return found_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (is_mine_N,) = ctx.saved_tensors
        return gradients[0][is_mine_N], None, None
