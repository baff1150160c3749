"""Packing of several sequences into one row without padding, where each sequence attends only to itself.

On CUDA each layer calls torch's `varlen_attn` once. On other devices, or if that kernel does not support the inputs,
attention runs over batches of sequences of similar length. Positions restart in each sequence. Recurrent and chunked
layers are refused, because they would mix sequences. A probe compares packed with separate sequences before the first
use.

Shape legend: B rows, P packed tokens, K heads, D head size.
"""

import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from cosmos_core.data.batch import SequenceBounds, collate_rows, collate_shared_prompts, to_device
from cosmos_core.models.base import has_dropout
from cosmos_core.models.length_rounding import autocast_dtype, round_up_length
from cosmos_core.models.scorer import is_without_weight_data
from cosmos_core.parallel.mesh import all_reduce_any

PACKED_ATTENTION = "packed_sdpa"
_PACKED_ATTENTION_NAMES = {"sdpa": PACKED_ATTENTION, "eager": "packed_eager"}
_PACKABLE_LAYER_TYPES = {"full_attention", "sliding_attention"}
_PROBE_SEQUENCE_LENGTHS, _PROBE_SLIDING_WINDOW = (5, 9), 3
_LOGIT_TOLERANCE = 1e-3
_VARLEN_DEVICE_TYPE, _VARLEN_MIN_CAPABILITY = "cuda", (8, 0)
_VARLEN_DTYPES, _VARLEN_MAX_HEAD_SIZE = {torch.bfloat16, torch.float16}, 256
_GQA_OPTIONS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""Arguments of torch's `varlen_attn` for grouped-query attention; empty if it has no such argument."""

_MAX_SHORT_SEQUENCE_TOKENS = 16
"""Maximum length of sequences that are padded to a power of two; `round_up_length` pads longer sequences."""

logger = logging.getLogger(__name__)


def enable_packing(
    model: PreTrainedModel,
    root_modules: Sequence[nn.Module] = (),
    compute_dtype: torch.dtype | None = None,
    *,
    gathers_in_compute_dtype: bool = False,
) -> str:
    """Enable packed rows for `model`, with the inputs of `data.batch.make_packed_attention_kwargs` and `position_ids`
    that restart in each sequence. Return an empty string, or the reason why the model does not support packed rows; the
    model is then unchanged. For a sharded model, all ranks must call this function, with the `root_modules` that are
    called in place of `model`.

    `compute_dtype` is the autocast dtype of training, which determines the kernel; None: the dtype of the weights.
    `gathers_in_compute_dtype`: whether FSDP gathers weights in `compute_dtype`, so that only this dtype can be tested.
    """
    text_config = model.config.get_text_config()
    layer_types = set(getattr(text_config, "layer_types", None) or ["full_attention"])
    if not layer_types <= _PACKABLE_LAYER_TYPES or getattr(text_config, "attention_chunk_size", None):
        unsupported_types = sorted(layer_types - _PACKABLE_LAYER_TYPES) or ["chunked_attention"]
        return f"layers of kind {', '.join(unsupported_types)} mix what is packed"
    attention_name = text_config._attn_implementation
    if attention_name not in _PACKED_ATTENTION_NAMES:
        return f"attention is computed by {attention_name!r}"
    _set_attention_function(model, packed_attention_name := _PACKED_ATTENTION_NAMES[attention_name])
    if text_config._attn_implementation != packed_attention_name:  # GPT-Neo, for one, does not let it be replaced
        return "attention is computed by code of its family"
    if is_without_weight_data(model):
        return ""
    tested_dtypes = {} if gathers_in_compute_dtype else {model.dtype: None}
    if compute_dtype and (gathers_in_compute_dtype or _get_compute_device(model).type == _VARLEN_DEVICE_TYPE):
        tested_dtypes[compute_dtype] = None
    for dtype in tested_dtypes:
        _set_attention_function(model, attention_name)
        is_packing_inexact = not _is_packing_exact(model, root_modules, attention_name, dtype)
        # All ranks must take the same decision, although each pipeline rank has tested only its own layers.
        if all_reduce_any(is_packing_inexact) if root_modules else is_packing_inexact:
            _set_attention_function(model, attention_name)
            return "packed sequences have other logits than separate ones"
    return ""


@torch.no_grad()
def can_merge_prompts(model: PreTrainedModel, root_modules: Sequence[Any], dtype: torch.dtype) -> bool:
    """Return True if several sequences of a packed row can share one copy of their prompt. Call `enable_packing` first.

    Sharing requires a CPU, the attention function `PACKED_ATTENTION` without sliding windows, and no dropout, which all
    sequences would share in the prompt. A probe compares the outputs in `dtype` with those of separate prompts. For a
    sharded model, all ranks must call this function, with the `root_modules` that are called in place of `model`.
    """
    config = model.config.get_text_config()
    has_window_layers = set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}
    if config._attn_implementation != PACKED_ATTENTION or has_window_layers or getattr(config, "sliding_window", None):
        return False
    if _get_compute_device(model).type != "cpu" or is_without_weight_data(model) or has_dropout(model):
        return False
    prompt, *prompt_continuations = _make_random_rows(model, (7, *_PROBE_SEQUENCE_LENGTHS))
    id_rows = [np.concatenate([prompt, continuation]) for continuation in prompt_continuations]
    merged_row = collate_shared_prompts(id_rows, [((0, 1), len(prompt))], 0, lambda length: length)
    with _evaluation_mode(model, dtype):
        separate_outputs = _compute_probe_outputs(model, root_modules, collate_rows(id_rows, 0, is_packed=True).inputs)
        merged_outputs = _compute_probe_outputs(model, root_modules, merged_row.inputs)
    row_length = len(id_rows[0])
    expected_outputs = torch.cat([separate_outputs[:row_length], separate_outputs[row_length + len(prompt) :]])
    return is_close(merged_outputs, expected_outputs, dtype)


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute the attention of packed rows; without `sequence_bounds` in `kwargs`, each row is one sequence.

    Inputs have the shape (batch, heads, positions, head size), outputs (batch, positions, heads, head size)."""
    sequence_bounds, window_size = kwargs.get("sequence_bounds"), kwargs.get("sliding_window")
    if sequence_bounds is None and not (window_size and attention_mask is None and query.shape[2] == key.shape[2]):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    dropout_rate, attention_scale = kwargs.get("dropout", 0.0), kwargs.get("scaling")
    is_gqa = query.shape[1] != key.shape[1]
    if sequence_bounds is not None and query.device.type == _VARLEN_DEVICE_TYPE:
        # Autocast does not cast the inputs of `varlen_attn`: a norm of queries may return the dtype of its weights.
        dtype = autocast_dtype(query.device)
        qkv_states = query.to(dtype or query.dtype), key.to(dtype or key.dtype), value.to(dtype or value.dtype)
        unsupported_reason = find_unsupported_varlen_reason(*qkv_states, dropout_rate)
        if not unsupported_reason:
            return _varlen_attention(qkv_states, kwargs), None
        if not torch.compiler.is_compiling():
            _log_fallback_once(unsupported_reason)

    def compute_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        length, num_prompt_tokens = query.shape[2], key.shape[2] - query.shape[2]
        mask = _sliding_window_mask(length, window_size, query.device) if window_size and window_size < length else None
        if num_prompt_tokens:
            mask = query.new_ones(length, key.shape[2], dtype=torch.bool).tril(num_prompt_tokens)
        output_BKPD = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout_rate, is_causal=mask is None, scale=attention_scale,
            enable_gqa=is_gqa,
        )  # fmt: skip
        return output_BKPD.transpose(1, 2)

    return _attend_per_sequence(sequence_bounds, compute_attention, query, key, value), None


def find_unsupported_varlen_reason(query: Tensor, key: Tensor, value: Tensor, dropout_rate: float) -> str:
    """Return the reason why torch's `varlen_attn` does not support attention with these arguments; empty if it does."""
    head_size = query.shape[-1]
    if query.dtype not in _VARLEN_DTYPES:
        return f"its kernel takes half precision, and this is {str(query.dtype).removeprefix('torch.')}"
    if head_size % 8 or head_size > _VARLEN_MAX_HEAD_SIZE:
        return f"its kernel takes heads of a multiple of 8 up to {_VARLEN_MAX_HEAD_SIZE}, and these have {head_size}"
    if value.shape[-1] != head_size:
        return f"its kernel takes values as wide as keys, and these have {value.shape[-1]} and {head_size}"
    if dropout_rate:
        return f"its kernel knows no dropout, and attention_dropout is {dropout_rate}"
    if query.is_cuda and (gpu_capability := torch.cuda.get_device_capability(query.device)) < _VARLEN_MIN_CAPABILITY:
        return f"its kernel needs capability {_VARLEN_MIN_CAPABILITY}, and this GPU has {gpu_capability}"
    return ""


@cache
def _log_fallback_once(fallback_reason: str) -> None:
    logger.info("packed attention runs over groups of sequences, because %s", fallback_reason)


def _varlen_attention(qkv_states: Sequence[Tensor], kwargs: dict[str, Any]) -> Tensor:
    """Compute the attention of all sequences of a packed row with one call of torch's `varlen_attn`. Shapes and
    `kwargs` are those of `packed_attention`."""
    window_size, cu_seq_lens, max_length = kwargs.get("sliding_window"), kwargs["cu_seq_lens_q"], kwargs["max_length_q"]
    query_PKD, key_PKD, value_PKD = (qkv_state.transpose(1, 2).squeeze(0) for qkv_state in qkv_states)
    output_PKD = varlen_attn(
        query_PKD, key_PKD, value_PKD, cu_seq_lens, cu_seq_lens, max_length, max_length, scale=kwargs.get("scaling"),
        window_size=(window_size - 1 if window_size else -1, 0),  # number of keys before and after each query; -1: all
        **(_GQA_OPTIONS if query_PKD.shape[1] != key_PKD.shape[1] else {})
    )  # fmt: skip
    assert isinstance(output_PKD, Tensor)
    return output_PKD.unsqueeze(0)


def packed_eager_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute the attention of packed rows with the eager attention of the model's family, which may have sinks or soft
    caps. The signature is that of attention functions in transformers."""
    eager_attention = sys.modules[type(module).__module__].eager_attention_forward
    sequence_bounds, window_size = kwargs.get("sequence_bounds"), kwargs.get("sliding_window")
    if sequence_bounds is None and attention_mask is not None:
        return eager_attention(module, query, key, value, attention_mask, **kwargs)[0], None

    def compute_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        length, min_logit = query.shape[2], torch.finfo(query.dtype).min
        is_key_visible = _sliding_window_mask(length, window_size or length, query.device)
        mask = query.new_zeros(length, length).masked_fill(~is_key_visible, min_logit)
        return eager_attention(module, query, key, value, mask[None, None], **kwargs)[0]

    return _attend_per_sequence(sequence_bounds, compute_attention, query, key, value), None


def _make_attention_mask(make_full_mask: Callable[..., Tensor | None], *args: Any, **kwargs: Any) -> Tensor | None:
    """Return the attention mask that `make_full_mask` makes from all further arguments; None if there are neither
    padding tokens nor cached keys, because packed attention then needs no mask."""
    has_padding, has_cache = kwargs.get("attention_mask") is not None, kwargs.get("q_length") != kwargs.get("kv_length")
    return make_full_mask(*args, **kwargs) if has_padding or has_cache else None


def _attend_per_sequence(
    sequence_bounds: SequenceBounds | None, attention_fn: Callable[..., Tensor], *qkv: Tensor
) -> Tensor:
    """Compute the attention of each sequence of a packed row with `attention_fn`; `qkv` are queries, keys and values
    with the shape (batch, heads, positions, head size).

    If `sequence_bounds` is None, the row is one sequence. A sequence with a shared prompt also attends to the prompt.
    Sequences of similar length, whose prompts have equal lengths, form a batch, padded on the right, which causal
    attention ignores. `Tensor.split` divides the row: the gradient of an indexed slice would be as large as the row.
    """
    if sequence_bounds is None:
        return attention_fn(*qkv)
    lengths, prompt_indices = np.diff(sequence_bounds.boundaries).tolist(), sequence_bounds.prompt_indices
    qkv_slices = [state.squeeze(0).split(lengths, dim=1) for state in qkv]  # per sequence: (heads, tokens, head size)
    indices_by_lengths: dict[tuple[int, int], list[int]] = {}
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        length, prompt_index = lengths[index], prompt_indices[index]
        # In float32 no kernel is compiled for each shape, so a short sequence is padded only to a power of two.
        is_padded_to_power_of_2 = qkv[0].dtype == torch.float32 and length <= _MAX_SHORT_SEQUENCE_TOKENS
        padded_length = 1 << (length - 1).bit_length() if is_padded_to_power_of_2 else round_up_length(length)
        prompt_length = lengths[prompt_index] if prompt_index >= 0 else 0
        indices_by_lengths.setdefault((padded_length, prompt_length), []).append(index)
    output_by_index: dict[int, Tensor] = {}
    for (padded_length, prompt_length), indices in indices_by_lengths.items():
        batched_qkv = [_pad_and_stack([slices[i] for i in indices], padded_length) for slices in qkv_slices]
        if prompt_length:  # prepend keys and values of shared prompts, to which the sequences attend
            prompt_states = [torch.stack([slices[prompt_indices[i]] for i in indices]) for slices in qkv_slices[1:]]
            batched_qkv[1:] = [torch.cat(pair, dim=2) for pair in zip(prompt_states, batched_qkv[1:], strict=True)]
        output_by_index |= zip(indices, attention_fn(*batched_qkv).unbind(0), strict=True)
    return torch.cat([output_by_index[index][:length] for index, length in enumerate(lengths)]).unsqueeze(0)


def _pad_and_stack(sequence_states: Sequence[Tensor], length: int) -> Tensor:
    """Pad the queries, keys or values of sequences, each with the shape (heads, tokens, features), to `length` tokens,
    and stack them. Neighbouring sequences of equal length are stacked at once."""
    batches = [torch.stack(list(group)) for _, group in groupby(sequence_states, key=lambda state: state.shape[1])]
    batches = [pad(each, [0, 0, 0, length - each.shape[2]]) if each.shape[2] < length else each for each in batches]
    return batches[0] if len(batches) == 1 else torch.cat(batches)


def _sliding_window_mask(length: int, window_size: int, device: torch.device) -> Tensor:
    """Return the causal mask of a sliding window: True where the query of the row attends to the key of the column."""
    token_distances = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (token_distances >= 0) & (token_distances < window_size)


def _set_attention_function(model: PreTrainedModel, attention_name: str) -> None:
    """Make the language model in `model` use the attention function that transformers has registered as
    `attention_name`; a vision tower keeps its own, because it packs images differently."""
    text_config = model.config.get_text_config()
    text_config_keys = [key for key in model.config.sub_configs if getattr(model.config, key) is text_config]
    model.set_attn_implementation({text_config_keys[0]: attention_name} if text_config_keys else attention_name)


@contextmanager
def _shorten_sliding_windows(model: PreTrainedModel) -> Iterator[None]:
    """During the `with` block, make the sliding windows of a model shorter than the short rows with which
    `enable_packing` tests it. The test thus detects model families whose packed attention ignores the window."""
    config_and_modules: list[Any] = [model.config.get_text_config(), *model.modules()]
    windowed_modules = [(m, m.sliding_window) for m in config_and_modules if getattr(m, "sliding_window", None)]
    try:
        for module, _ in windowed_modules:
            module.sliding_window = _PROBE_SLIDING_WINDOW
        yield
    finally:
        for module, window_size in windowed_modules:
            module.sliding_window = window_size


@contextmanager
def _evaluation_mode(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        with torch.autocast(_get_compute_device(model).type, dtype, enabled=dtype != model.dtype):
            yield
    finally:
        model.train(was_training)


def _make_random_rows(model: PreTrainedModel, row_lengths: Sequence[int]) -> list[np.ndarray]:
    generator, vocab_size = torch.Generator().manual_seed(0), int(model.config.get_text_config().vocab_size)
    return [torch.randint(vocab_size, (row_length,), generator=generator).numpy() for row_length in row_lengths]


def _get_compute_device(model: PreTrainedModel) -> torch.device:
    """Return the device on which the model computes: for shards, which can be on the CPU, the device of their mesh."""
    sharded_parameter = next((parameter for parameter in model.parameters() if isinstance(parameter, DTensor)), None)
    return model.device if sharded_parameter is None else torch.device(sharded_parameter.device_mesh.device_type)


@torch.no_grad()
def _is_packing_exact(
    model: PreTrainedModel, root_modules: Sequence[Any], attention_name: str, dtype: torch.dtype
) -> bool:
    """Return True if packed rows have the same outputs (of `_compute_probe_outputs` in `dtype`) as separate rows.

    Separate rows use the attention function `attention_name`. This function leaves packed attention enabled.
    """
    id_rows = _make_random_rows(model, _PROBE_SEQUENCE_LENGTHS)

    def compute_outputs(id_rows: Sequence[Any], *, is_packed: bool) -> Tensor:
        probe_inputs = collate_rows(id_rows, 0, is_packed=is_packed).inputs
        if not is_packed:  # let the model compute positions, which begin above 0 in some families
            del probe_inputs["position_ids"]
        return _compute_probe_outputs(model, root_modules, probe_inputs)

    with _shorten_sliding_windows(model), _evaluation_mode(model, dtype):
        separate_outputs = torch.cat([compute_outputs([row], is_packed=False) for row in id_rows])
        _set_attention_function(model, _PACKED_ATTENTION_NAMES[attention_name])
        try:
            packed_outputs = compute_outputs(id_rows, is_packed=True)
        except (TypeError, ValueError, RuntimeError, AttributeError):  # the model family refuses packed inputs
            return False
    return is_close(packed_outputs, separate_outputs, dtype)


def _compute_probe_outputs(model: PreTrainedModel, root_modules: Sequence[Any], probe_inputs: dict[str, Any]) -> Tensor:
    """Return the logits of the first row of `probe_inputs` or, with `root_modules`, the concatenated hidden states that
    these modules compute."""
    probe_inputs = to_device(probe_inputs, _get_compute_device(model))
    if root_modules:
        return torch.cat([root_module.probe_hidden_states(probe_inputs)[0] for root_module in root_modules], dim=-1)
    return model(**probe_inputs, use_cache=False).logits[0]


def is_close(outputs: Tensor, expected_outputs: Tensor, dtype: torch.dtype) -> bool:
    """Return True if two computations of the same outputs in `dtype` differ only by rounding."""
    # Half precision needs a larger tolerance, because the kernels of packed and separate rows round differently.
    tolerance = max(_LOGIT_TOLERANCE, 8 * torch.finfo(dtype).eps)
    return bool((outputs - expected_outputs).abs().max() <= tolerance * max(1.0, expected_outputs.abs().max().item()))


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, partial(_make_attention_mask, sdpa_mask))
AttentionInterface.register(_PACKED_ATTENTION_NAMES["eager"], packed_eager_attention)
AttentionMaskInterface.register(_PACKED_ATTENTION_NAMES["eager"], partial(_make_attention_mask, eager_mask))
