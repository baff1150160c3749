"""Rows of different lengths as inputs of a model: one rectangle, or end to end without padding.

Shape legend: B rows, T tokens of the longest row, P tokens of all rows, S predicted tokens of a row of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad


class Rows(NamedTuple):
    """Inputs of a model, and where each row's predicted tokens begin in their flat grid."""

    inputs: dict[str, Tensor]
    """`input_ids` and `position_ids` with `attention_mask` (BT, 1: a real token), or with `cu_seq_lens_q` and
    `cu_seq_lens_k` (1P; int32, B + 1 bounds)."""
    starts: list[int]
    """Place of the first predicted token (the second token) of each row in the flat BS grid, or 1S when packed."""


def rows_of(
    rows: Sequence[np.ndarray], pad_id: int, *, packed: bool, filled: Callable[[int], int] = lambda length: length
) -> Rows:
    """Put rows of token ids together: padded on the right, or packed.

    `filled`: how long to make rows of the length that it is given; packed ones by a sequence more.
    """
    tensors = [torch.as_tensor(ids, dtype=torch.int64) for ids in rows]
    lengths = [len(ids) for ids in rows]
    if packed:
        if missing := filled(sum(lengths)) - sum(lengths):
            tensors.append(torch.full((missing,), pad_id))
            lengths.append(missing)
        ends = np.cumsum([0, *lengths])
        bounds = torch.as_tensor(ends, dtype=torch.int32)
        inputs = {
            "input_ids": torch.cat(tensors).unsqueeze(0),
            "position_ids": torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0),
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
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
