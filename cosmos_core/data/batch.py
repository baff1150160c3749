"""Rows of different lengths as one rectangle of tensors.

Shape legend: B rows, T tokens of the longest row. Packing and position ids are not here: rows are padded on the
right, where a causal model never looks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def pad_sequences(rows: Sequence[tuple[np.ndarray, np.ndarray]], pad_id: int) -> dict[str, torch.Tensor]:
    """Pad pairs of token ids and loss mask on the right.

    Returns:
        `input_ids_BT` int64, `attention_mask_BT` int64 (1: a real token), `loss_mask_BT` bool (True: learn to
        predict this token; padding is False).
    """
    shape = (len(rows), max(len(ids) for ids, _ in rows))
    input_ids_BT = torch.full(shape, pad_id, dtype=torch.int64)
    attention_mask_BT = torch.zeros(shape, dtype=torch.int64)
    loss_mask_BT = torch.zeros(shape, dtype=torch.bool)
    for b, (ids, mask) in enumerate(rows):
        assert len(ids) == len(mask)
        input_ids_BT[b, : len(ids)] = torch.as_tensor(ids, dtype=torch.int64)
        attention_mask_BT[b, : len(ids)] = 1
        loss_mask_BT[b, : len(ids)] = torch.as_tensor(mask, dtype=torch.bool)
    return {"input_ids_BT": input_ids_BT, "attention_mask_BT": attention_mask_BT, "loss_mask_BT": loss_mask_BT}
