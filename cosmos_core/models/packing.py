"""Several sequences as one row without padding, each attending to itself alone.

Attention runs over each sequence by its own (one kernel call on CUDA where there is one for it), so that nothing is
computed between sequences and nothing leaks: positions restart, and the recurrent or chunked layers for which that is
not enough are refused. A probe compares packed with separate sequences before the first use.

Shape legend: P packed tokens, K heads, D head size.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from cosmos_core.data.batch import rows_of
from cosmos_core.models.scorer import has_no_data

NAME = "packed_sdpa"
_PACKABLE = {"full_attention", "sliding_attention"}
_PROBE = (5, 9)
_TOLERANCE = 1e-3


def enable_packing(model: PreTrainedModel) -> str:
    """Make `model` understand rows end to end: `cu_seq_lens_q`, `position_ids` that restart. Returns why it cannot, or
    an empty string."""
    text = model.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if not kinds <= _PACKABLE or getattr(text, "attention_chunk_size", None):
        return f"layers of kind {', '.join(sorted(kinds - _PACKABLE) or ['chunked_attention'])} mix what is packed"
    if text._attn_implementation != "sdpa":
        return f"attention is computed by {text._attn_implementation!r}"
    model.set_attn_implementation(NAME)
    if has_no_data(model) or _is_exact(model):
        return ""
    model.set_attn_implementation("sdpa")
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
    dropout, scaling = kwargs.get("dropout", 0.0), kwargs.get("scaling")
    if ends is None and not (window and attention_mask is None and query.shape[2] == key.shape[2]):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    bounds = ends.tolist() if ends is not None else [0, query.shape[2]]
    enable_gqa = query.shape[1] != key.shape[1]
    parts = []
    for start, stop in pairwise(bounds):
        here = slice(start, stop)
        mask = _band(stop - start, window, query.device)
        parts.append(
            scaled_dot_product_attention(
                query[:, :, here], key[:, :, here], value[:, :, here], attn_mask=mask, dropout_p=dropout,
                is_causal=mask is None, scale=scaling, enable_gqa=enable_gqa,
            )
        )  # fmt: skip
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def packed_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """No mask where nothing is padded and nothing is cached; otherwise that of `sdpa`."""
    if kwargs.get("attention_mask") is None and kwargs.get("q_length") == kwargs.get("kv_length"):
        return None
    return sdpa_mask(*args, **kwargs)


def _band(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Causal mask of a sliding window; None: the window is no shorter than the sequence."""
    if not window or window >= length:
        return None
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (distance >= 0) & (distance < window)


@torch.no_grad()
def _is_exact(model: PreTrainedModel) -> bool:
    was_training = model.training
    model.eval()
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(model.config.get_text_config().vocab_size)
    sequences = [torch.randint(vocabulary, (n,), generator=generator) for n in _PROBE]

    def logits(*rows: Tensor) -> Tensor:
        inputs = rows_of([row.numpy() for row in rows], 0, packed=True).inputs
        moved = {name: value.to(model.device) for name, value in inputs.items()}
        found: Tensor = model(**moved, use_cache=False).logits[0]
        return found

    try:
        packed, separate = logits(*sequences), torch.cat([logits(row) for row in sequences])
    except (TypeError, ValueError, RuntimeError):  # the family's forward takes no such inputs
        return False
    finally:
        model.train(was_training)
    scale = max(1.0, separate.abs().max().item())
    return bool((packed - separate).abs().max() <= _TOLERANCE * scale)


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, packed_mask)
