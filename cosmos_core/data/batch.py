"""Rows of different lengths as inputs of a model: padded to a rectangle, or packed without padding.

Shape legend: B rows, T tokens of the longest row, P tokens of all rows, S predicted tokens of a row of inputs.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad


class Rows(NamedTuple):
    """Inputs of a model, with the index of each row's first predicted token in the flattened grid."""

    inputs: dict[str, Any]
    """`input_ids` and `position_ids` with `attention_mask` (BT, 1: a real token), or with `packed_bounds` (1P)."""
    starts: list[int]
    """Index of each row's first predicted token (its second token) in the flattened grid BS, or 1S if packed."""


class Bounds:
    """Boundaries of packed sequences in host memory, wrapped so that torch.compile does not treat them as an input."""

    __slots__ = ("ends",)

    def __init__(self, ends: np.ndarray) -> None:
        """`ends` are the boundaries of the B sequences, int32, (B + 1), beginning with 0."""
        self.ends = ends


def rows_of(
    rows: Sequence[np.ndarray], pad_id: int, *, packed: bool, filled: Callable[[int], int] = lambda length: length
) -> Rows:
    """Collate rows of token ids: padded on the right, or packed.

    `filled` maps the length of the longest row, or of all packed rows, to the length that padding fills up to.
    """
    tensors = [torch.as_tensor(ids, dtype=torch.int64) for ids in rows]
    lengths = [len(ids) for ids in rows]
    if packed:
        if missing := filled(sum(lengths)) - sum(lengths):
            tensors.append(torch.full((missing,), pad_id))
            lengths.append(missing)
        ends = np.cumsum([0, *lengths])
        inputs = {
            "input_ids": torch.cat(tensors).unsqueeze(0),
            "position_ids": torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0),
            **packed_bounds(ends),
        }
        return Rows(inputs, [int(end) for end in ends[: len(rows)]])
    width = filled(max(lengths))
    real_BT = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
    inputs = {
        "input_ids": torch.stack([pad(ids, (0, width - len(ids)), value=pad_id) for ids in tensors]),
        "attention_mask": real_BT.long(),
        "position_ids": torch.arange(width).expand(len(rows), -1),
    }
    return Rows(inputs, [b * (width - 1) for b in range(len(rows))])


def packed_bounds(bounds: np.ndarray) -> dict[str, Any]:
    """Return the boundaries of packed sequences as keyword arguments of attention.

    `sequence_bounds` (`Bounds`) stay on the host, so that no layer has to synchronise with the device to read them.
    `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k` are transformers' arguments of flash attention.
    """
    bounds = np.asarray(bounds, dtype=np.int32)
    longest, on_device = int(np.diff(bounds).max()), torch.from_numpy(bounds)
    return {
        "sequence_bounds": Bounds(bounds),
        "cu_seq_lens_q": on_device,
        "cu_seq_lens_k": on_device,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def to_device(inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Move the tensors among the inputs of a model to a device."""
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
