"""Several sequences as one row without padding, each attending to itself alone.

Attention runs over each sequence by its own (one kernel call on CUDA where there is one for it), so that nothing is
computed between sequences and nothing leaks: positions restart, and the recurrent or chunked layers for which that is
not enough are refused. A probe compares packed with separate sequences before the first use.

Shape legend: P packed tokens, K heads, D head size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from cosmos_core.data.batch import rows_of
from cosmos_core.models.scorer import has_no_data
from cosmos_core.models.shapes import filled

NAME = "packed_sdpa"
_NAMES = {"sdpa": NAME, "eager": "packed_eager"}
_PACKABLE = {"full_attention", "sliding_attention"}
_PROBE, _PROBE_WINDOW = (5, 9), 3
_TOLERANCE = 1e-3


def enable_packing(model: PreTrainedModel, roots: Sequence[nn.Module] = ()) -> str:
    """Make `model` understand rows end to end (`cu_seq_lens_q`, restarting `position_ids`).

    `roots`: of a model that is split over ranks, the modules to call in its place; all ranks must call this. Returns
    why it cannot, and leaves the model as it was; an empty string: it can.
    """
    text = model.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if not kinds <= _PACKABLE or getattr(text, "attention_chunk_size", None):
        return f"layers of kind {', '.join(sorted(kinds - _PACKABLE) or ['chunked_attention'])} mix what is packed"
    plain = text._attn_implementation
    if plain not in _NAMES:
        return f"attention is computed by {plain!r}"
    if has_no_data(model):
        _set_attention(model, _NAMES[plain])
        return ""
    if _is_exact(model, plain, roots):
        return ""
    _set_attention(model, plain)
    return "packed sequences have other logits than separate ones"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of transformers' interface: q BKPD in, BPKD out; without `cu_seq_lens_q` it is that of `sdpa`."""
    ends, window = kwargs.get("cu_seq_lens_q"), kwargs.get("sliding_window")
    if ends is None and not (window and attention_mask is None and query.shape[2] == key.shape[2]):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    dropout, scaling = kwargs.get("dropout", 0.0), kwargs.get("scaling")
    enable_gqa = query.shape[1] != key.shape[1]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        length = query.shape[2]
        mask = _band(length, window, query.device) if window and window < length else None
        found_BKPD = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling,
            enable_gqa=enable_gqa,
        )  # fmt: skip
        return found_BKPD.transpose(1, 2)

    return _each(ends, attend, query, key, value), None


def packed_eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The family's own attention (sinks, soft caps), a sequence at a time."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    ends, window = kwargs.get("cu_seq_lens_q"), kwargs.get("sliding_window")
    if ends is None and attention_mask is not None:
        return eager(module, query, key, value, attention_mask, **kwargs)[0], None

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        length = query.shape[2]
        lowest = torch.finfo(query.dtype).min
        mask = query.new_zeros(length, length).masked_fill(~_band(length, window or length, query.device), lowest)
        found_BPKD: Tensor = eager(module, query, key, value, mask[None, None], **kwargs)[0]
        return found_BPKD

    return _each(ends, attend, query, key, value), None


def packed_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """No mask where nothing is padded and nothing is cached; otherwise that of `sdpa`."""
    return None if _is_whole(kwargs) else sdpa_mask(*args, **kwargs)


def packed_eager_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """`packed_mask` with the mask of `eager`."""
    return None if _is_whole(kwargs) else eager_mask(*args, **kwargs)


def _is_whole(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("attention_mask") is None and kwargs.get("q_length") == kwargs.get("kv_length")


def _each(ends: Tensor | None, attend: Callable[..., Tensor], *states: Tensor) -> Tensor:
    """Attention of each sequence of a row: BPKD. `ends` None: the row is one sequence."""
    bounds = [0, states[0].shape[2]] if ends is None else ends.tolist()
    return torch.cat(
        [_one(attend, *(state[:, :, start:stop] for state in states)) for start, stop in pairwise(bounds)], dim=1
    )


def _one(attend: Callable[..., Tensor], *states: Tensor) -> Tensor:
    """Attention of one sequence, as long as kernels like it: no token sees what is behind it."""
    return attend(*(filled(state, -2) for state in states))[:, : states[0].shape[2]]


def _band(length: int, window: int, device: torch.device) -> Tensor:
    """Causal mask of a sliding window: PP, True where a query (row) sees a key."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < window)


def _set_attention(model: PreTrainedModel, name: str) -> None:
    """Of the language model alone: a vision tower packs images in its own way."""
    parts = [part for part in model.config.sub_configs if getattr(model.config, part) is model.config.get_text_config()]
    model.set_attn_implementation({parts[0]: name} if parts else name)


@contextmanager
def _short_windows(model: PreTrainedModel) -> Iterator[None]:
    """Sliding windows shorter than the rows of the probe: a family whose attention is not told its own is found out."""
    holders: list[Any] = [model.config.get_text_config(), *model.modules()]
    windows = [(holder, holder.sliding_window) for holder in holders if getattr(holder, "sliding_window", None)]
    try:
        for holder, _ in windows:
            holder.sliding_window = _PROBE_WINDOW
        yield
    finally:
        for holder, window in windows:
            holder.sliding_window = window


@torch.no_grad()
def _is_exact(model: PreTrainedModel, plain: str, roots: Sequence[Any]) -> bool:
    """Whether packed rows have the logits, or the last hidden states of each root, that separate rows have under
    attention `plain`; leaves it packed."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(model.config.get_text_config().vocab_size)
    rows = [torch.randint(vocabulary, (length,), generator=generator).numpy() for length in _PROBE]

    def logits(rows: Sequence[Any], *, packed: bool) -> Tensor:
        inputs = {name: value.to(model.device) for name, value in rows_of(rows, 0, packed=packed).inputs.items()}
        if roots:
            return torch.cat([root.probe(inputs)[0] for root in roots], dim=-1)
        found: Tensor = model(**inputs, use_cache=False).logits[0]
        return found

    was_training = model.training
    model.eval()
    with _short_windows(model):
        separate = torch.cat([logits([row], packed=False) for row in rows])
        _set_attention(model, _NAMES[plain])
        try:
            packed = logits(rows, packed=True)
        except (TypeError, ValueError, RuntimeError, AttributeError):  # the family's forward takes no such inputs
            return False
        finally:
            model.train(was_training)
    # Half precision rounds the sums of the two kernels differently.
    tolerance = max(_TOLERANCE, 8 * torch.finfo(separate.dtype).eps)
    return bool((packed - separate).abs().max() <= tolerance * max(1.0, separate.abs().max().item()))


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, packed_mask)
AttentionInterface.register(_NAMES["eager"], packed_eager_attention)
AttentionMaskInterface.register(_NAMES["eager"], packed_eager_mask)
