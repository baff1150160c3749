"""Context parallelism of video denoisers: the tokens of a clip are sharded over ranks, block by block.

Before the first block and after the last layer every rank has the whole clip. Within the blocks each rank has an equal
number of consecutive tokens, padded with zeros on the last rank. Layers that need tokens of other ranks exchange data:
softmax attention exchanges tokens for heads (Ulysses, arXiv 2309.14509), linear attention sums over the ranks, and a
convolution over time gets the frames at both borders. A rank computes the gradients of its own tokens; FSDP sums the
gradients over the ranks.

The file of each model family selects the exchanges for its layers.

Shapes: B samples, N tokens of a rank, K heads, D head size, C channels, F frames of a rank, S positions of a frame.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from cosmos_core.parallel.context import all_to_all

TokenDimByArgument = Mapping[str, int]
"""Index of the token dimension of arguments of a module, by name; other arguments have no token dimension."""


class ClipSharding:
    """Distribution of the tokens of one video clip over the ranks. Each transformer block sets it anew, so that a block
    that is recomputed in the backward pass uses the same distribution as in the forward pass."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group, self.num_ranks, self.rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()
        self.num_tokens = self.num_local_tokens = 0

    def distribute_tokens(self, num_tokens: int, tokens_per_unit: int = 1) -> None:
        """Set the distribution of a clip with `num_tokens` tokens over the ranks: each rank gets an equal number of
        units of `tokens_per_unit` consecutive tokens, such as whole frames, except for padding on the last ranks."""
        self.num_tokens = num_tokens
        self.num_local_tokens = tokens_per_unit * -(-num_tokens // (tokens_per_unit * self.num_ranks))

    def take_local_tokens(self, tensor: Tensor, token_dim: int) -> Tensor:
        """Return this rank's tokens of `tensor`, which has all tokens of a clip; zeros fill up the last ranks."""
        token_start = min(self.rank * self.num_local_tokens, self.num_tokens)
        local_tensor = tensor.narrow(token_dim, token_start, min(self.num_local_tokens, self.num_tokens - token_start))
        return self.pad_tokens(local_tensor, token_dim, self.num_local_tokens)

    def make_token_mask(self, like_tensor: Tensor) -> Tensor:
        """Return a mask of this rank's N token positions, 1 for tokens and 0 for padding, in the dtype of
        `like_tensor`."""
        position_N = self.rank * self.num_local_tokens + torch.arange(self.num_local_tokens, device=like_tensor.device)
        return (position_N < self.num_tokens).to(like_tensor.dtype)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor` over ranks. Gradients are summed over ranks too, because each rank uses the sum
        only for its own tokens."""
        return all_reduce(tensor, "sum", self.group)

    def add_border_frames(self, frames_BCFS: Tensor) -> Tensor:
        """Return the frames of this rank with one more frame at each end, from the neighbouring ranks. The frames
        before the first and after the last frame of the clip are zeros."""
        local_border_frames = torch.stack([frames_BCFS[:, :, 0], frames_BCFS[:, :, -1]])
        border_padding = (0,) * 2 * local_border_frames.ndim + (self.rank, self.num_ranks - 1 - self.rank)
        border_frames_by_rank = self.all_reduce(functional.pad(local_border_frames[None], border_padding))
        zero_frame = torch.zeros_like(local_border_frames[0])
        previous_frame = border_frames_by_rank[self.rank - 1, 1] if self.rank else zero_frame
        next_frame = border_frames_by_rank[self.rank + 1, 0] if self.rank + 1 < self.num_ranks else zero_frame
        return torch.cat([previous_frame[:, :, None], frames_BCFS, next_frame[:, :, None]], dim=2)

    @staticmethod
    def pad_tokens(tensor: Tensor, token_dim: int, padded_length: int) -> Tensor:
        """Return a tensor with zeros at the end of its tokens, up to `padded_length` tokens."""
        pad_widths = (0, 0) * (tensor.ndim - 1 - token_dim) + (0, padded_length - tensor.shape[token_dim])
        return functional.pad(tensor, pad_widths) if pad_widths[-1] else tensor


def shard_blocks(
    denoiser: Any,
    clip_sharding: ClipSharding,
    token_dims: TokenDimByArgument,
    prepare_arguments: Callable[[dict[str, Any]], None],
    token_dims_by_layer: Mapping[str, TokenDimByArgument],
) -> None:
    """Make the transformer blocks of a denoiser process only this rank's tokens. The denoiser has the attributes
    `transformer_blocks` and, as its last layer, `proj_out`, after which the tokens of all ranks are gathered. Before
    each block, `prepare_arguments` is called with the arguments of the block, by name, which it can change; it must
    call `clip_sharding.distribute_tokens`.

    `token_dims` has the token dimension of the sharded arguments of a block, except `hidden_states`.
    `token_dims_by_layer` has the same for layers after the blocks, by name of the layer.
    """

    def shard_arguments(arguments: dict[str, Any], token_dims: TokenDimByArgument) -> None:
        for name, dim in token_dims.items():
            argument, num_tokens = arguments.get(name), clip_sharding.num_tokens
            if isinstance(argument, tuple):
                arguments[name] = tuple(clip_sharding.take_local_tokens(tensor, dim) for tensor in argument)
            elif isinstance(argument, Tensor) and argument.ndim > dim and argument.shape[dim] == num_tokens:
                arguments[name] = clip_sharding.take_local_tokens(argument, dim)

    for block_index, block in enumerate(denoiser.transformer_blocks):

        def prepare_and_shard(arguments: dict[str, Any], is_first_block: bool = block_index == 0) -> None:
            prepare_arguments(arguments)
            shard_arguments(arguments, {**token_dims, **({"hidden_states": 1} if is_first_block else {})})

        _register_argument_hook(block, prepare_and_shard)
    for name, layer_token_dims in token_dims_by_layer.items():
        _register_argument_hook(denoiser.get_submodule(name), partial(shard_arguments, token_dims=layer_token_dims))

    def gather_tokens(module: nn.Module, args: Any, output_BNC: Tensor) -> Tensor:
        tokens_of_all_ranks: Tensor = _ConcatenateOverRanks.apply(output_BNC, clip_sharding.group)
        return tokens_of_all_ranks.narrow(1, 0, clip_sharding.num_tokens)

    denoiser.proj_out.register_forward_hook(gather_tokens)


class UlyssesAttention:
    """Softmax attention over all tokens of a clip, with the formula of `CosmosAttnProcessor2_0` in diffusers."""

    def __init__(self, clip_sharding: ClipSharding) -> None:
        self._clip_sharding = clip_sharding

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Tensor:
        assert encoder_hidden_states is None and attention_mask is None, "blocks attend to their own tokens so"

        def split_heads(projection: nn.Module) -> Tensor:
            return projection(hidden_states).unflatten(2, (attn.heads, -1)).transpose(1, 2)

        query, key = attn.norm_q(split_heads(attn.to_q)), attn.norm_k(split_heads(attn.to_k))
        value = split_heads(attn.to_v)
        if image_rotary_emb is not None:
            apply_rope = partial(apply_rotary_emb, freqs_cis=image_rotary_emb, use_real=True, use_real_unbind_dim=-2)
            query, key = apply_rope(query), apply_rope(key)
        # Exchange this rank's tokens of all heads for all tokens of this rank's heads, and back after the attention.
        clip_sharding = self._clip_sharding
        qkv_states = [all_to_all(states, 1, 2, clip_sharding.group) for states in (query, key, value)]
        query, key, value = (states.narrow(2, 0, clip_sharding.num_tokens) for states in qkv_states)
        output_BKND = functional.scaled_dot_product_attention(query, key, value)
        output_BKND = clip_sharding.pad_tokens(output_BKND, 2, clip_sharding.num_local_tokens * clip_sharding.num_ranks)
        output_BKND = all_to_all(output_BKND, 2, 1, clip_sharding.group)
        return _project_output(attn, output_BKND.transpose(1, 2).flatten(2, 3).type_as(query))


class SummedLinearAttention:
    """Linear attention over all tokens of a clip, with the formula of `SanaLinearAttnProcessor3_0` in diffusers. Each
    rank sums over the keys and values of its own tokens, and these sums are added over the ranks."""

    def __init__(self, clip_sharding: ClipSharding) -> None:
        self._clip_sharding = clip_sharding

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Any = None,
    ) -> Tensor:
        assert encoder_hidden_states is None, "blocks attend to their own tokens so"

        def split_heads(states: Tensor) -> Tensor:
            return states.unflatten(2, (attn.heads, -1))

        query, key, value = attn.to_q(hidden_states), attn.to_k(hidden_states), split_heads(attn.to_v(hidden_states))
        query = query if attn.norm_q is None else attn.norm_q(query)
        key = key if attn.norm_k is None else attn.norm_k(key)
        query, key = functional.relu(split_heads(query)), functional.relu(split_heads(key))
        key = key * self._clip_sharding.make_token_mask(key)[None, :, None, None]

        def apply_rotary_embedding(states: Tensor) -> Tensor:
            even_elements, odd_elements = states.unflatten(-1, (-1, 2)).unbind(-1)
            cos, sin = rotary_emb[0][..., 0::2], rotary_emb[1][..., 1::2]
            rotated_pairs = [even_elements * cos - odd_elements * sin, even_elements * sin + odd_elements * cos]
            return torch.stack(rotated_pairs, -1).flatten(-2).type_as(states)

        rotated_query, rotated_key = (apply_rotary_embedding(states).float() for states in (query, key))
        key_sum_BKD = self._clip_sharding.all_reduce(key.sum(1))
        value_key_sum_BKDD = self._clip_sharding.all_reduce(torch.einsum("bnkc,bnkd->bkcd", value.float(), rotated_key))
        normalizer_BNK = 1 / (torch.einsum("bkd,bnkd->bnk", key_sum_BKD, query) + 1e-15)
        output_BNKD = torch.einsum("bkcd,bnkd->bnkc", value_key_sum_BKDD, rotated_query) * normalizer_BNK[..., None]
        return _project_output(attn, output_BNKD.flatten(2).to(hidden_states.dtype))


def exchange_frames(convolution: nn.Module, clip_sharding: ClipSharding, tokens_per_frame: Callable[[], int]) -> None:
    """Make a convolution over time (B, C, F, S) use the neighbouring frames of other ranks at both ends. Otherwise the
    convolution would pad each rank's frames with zeros. `tokens_per_frame` returns the number of tokens of a frame."""

    def add_neighbour_frames(module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        (frames_BCFS,) = args
        frame_mask_F = clip_sharding.make_token_mask(frames_BCFS)[:: tokens_per_frame()]
        return (clip_sharding.add_border_frames(frames_BCFS * frame_mask_F[:, None]),)

    convolution.register_forward_pre_hook(add_neighbour_frames)
    convolution.register_forward_hook(lambda module, args, output: output[:, :, 1:-1])


def _project_output(attn: Any, attention_output: Tensor) -> Tensor:
    return attn.to_out[1](attn.to_out[0](attention_output))


def _register_argument_hook(module: nn.Module, change_arguments: Callable[[dict[str, Any]], None]) -> None:
    forward_signature = inspect.signature(module.forward)

    def argument_hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        bound_arguments = forward_signature.bind(*args, **kwargs)
        change_arguments(bound_arguments.arguments)
        return bound_arguments.args, bound_arguments.kwargs

    module.register_forward_pre_hook(argument_hook, with_kwargs=True)


class _ConcatenateOverRanks(torch.autograd.Function):
    """Differentiable concatenation of the tokens of all ranks. Gradients are not summed over ranks, because every rank
    computes the same loss from the result."""

    @staticmethod
    def forward(ctx: Any, tokens_BNC: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.num_local_tokens = group, tokens_BNC.shape[1]
        tokens_by_rank = [
            torch.empty_like(tokens_BNC, memory_format=torch.contiguous_format) for _ in range(group.size())
        ]
        dist.all_gather(tokens_by_rank, tokens_BNC.contiguous(), group=group)
        return torch.cat(tokens_by_rank, 1)

    @staticmethod
    def backward(ctx: Any, *output_gradients: Tensor) -> Any:
        token_start = dist.get_rank(ctx.group) * ctx.num_local_tokens
        return output_gradients[0].narrow(1, token_start, ctx.num_local_tokens), None
