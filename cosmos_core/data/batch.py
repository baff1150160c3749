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
    """`input_ids` and `position_ids` of a model, with `attention_mask` (1: no padding) and shape BT if padded, or with
    the values of `packed_bounds` and shape 1P if packed."""
    starts: list[int]
    """Index of each row's first predicted token (its second token) in the flattened grid BS, or 1S if packed."""


class Bounds:
    """Boundaries of packed sequences in host memory, wrapped so that torch.compile does not treat them as an input."""

    __slots__ = ("ends", "prompts")

    def __init__(self, ends: np.ndarray, prompts: Sequence[int] | None = None) -> None:
        """Store the boundaries of the B sequences.

        Args:
            ends: boundaries, int32, (B + 1), beginning with 0.
            prompts: for each sequence the index of the sequence that it continues and attends to, its prompt; -1: the
                sequence is whole. None: all sequences are whole.
        """
        self.ends, self.prompts = ends, prompts or [-1] * (len(ends) - 1)


def rows_of(
    rows: Sequence[np.ndarray],
    pad_id: int,
    *,
    packed: bool,
    num_tokens_of: Callable[[int], int] = lambda length: length,
) -> Rows:
    """Collate rows of token ids: padded on the right, or packed. `num_tokens_of` maps the number of tokens of the
    longest row, or of all packed rows together, to the length after padding."""
    if packed:
        return shared_rows(rows, [([index], 0) for index in range(len(rows))], pad_id, num_tokens_of)
    tensors = [torch.as_tensor(ids, dtype=torch.int64) for ids in rows]
    lengths = [len(ids) for ids in rows]
    width = num_tokens_of(max(lengths))
    real_BT = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
    inputs = {
        "input_ids": torch.stack([pad(ids, (0, width - len(ids)), value=pad_id) for ids in tensors]),
        "attention_mask": real_BT.long(),
        "position_ids": torch.arange(width).expand(len(rows), -1),
    }
    return Rows(inputs, [row_index * (width - 1) for row_index in range(len(rows))])


def shared_rows(
    rows: Sequence[np.ndarray],
    groups: Sequence[tuple[Sequence[int], int]],
    pad_id: int,
    num_tokens_of: Callable[[int], int],
) -> Rows:
    """Collate rows of token ids, packed, with the common first tokens (prompt) of each group of rows only once.

    `groups` has the row indices and the prompt length of each group. The model's outputs for prompt tokens belong to no
    single row. For `pad_id` and `num_tokens_of` see `rows_of`.
    """
    pieces: list[tuple[int, int, int, int]] = []  # row index, start, end, index of the prompt's entry or -1
    numbers = {}
    for indices, length in groups:
        prompt = len(pieces) if length else -1
        pieces += [(indices[0], 0, length, -1)] if length else []
        for index in indices:
            numbers[index] = len(pieces)
            pieces.append((index, length, len(rows[index]), prompt))
    ends = np.cumsum([0, *(end - start for _, start, end, _ in pieces)])
    missing = num_tokens_of(int(ends[-1])) - int(ends[-1])
    ids = [*(torch.as_tensor(rows[index][start:end]).long() for index, start, end, _ in pieces)]
    positions = [torch.arange(start, end) for _, start, end, _ in pieces]
    prompts = [prompt for *_, prompt in pieces]
    if missing:
        ids, positions = [*ids, torch.full((missing,), pad_id)], [*positions, torch.arange(missing)]
        ends, prompts = np.append(ends, ends[-1] + missing), [*prompts, -1]
    ids_1P, positions_1P = torch.cat(ids).unsqueeze(0), torch.cat(positions).unsqueeze(0)
    inputs = {"input_ids": ids_1P, "position_ids": positions_1P, **packed_bounds(ends, prompts)}
    return Rows(inputs, [int(ends[numbers[index]]) - pieces[numbers[index]][1] for index in range(len(rows))])


def packed_bounds(bounds: np.ndarray, prompts: Sequence[int] | None = None) -> dict[str, Any]:
    """Return the boundaries of packed sequences as keyword arguments of attention.

    `sequence_bounds` (`Bounds`) stay on the host, so that no layer has to synchronise with the device to read them.
    `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k` are transformers' arguments of flash attention.
    """
    bounds = np.asarray(bounds, dtype=np.int32)
    longest, on_device = int(np.diff(bounds).max()), torch.from_numpy(bounds)
    return {
        "sequence_bounds": Bounds(bounds, prompts),
        "cu_seq_lens_q": on_device,
        "cu_seq_lens_k": on_device,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def to_device(inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Move the tensors among the inputs of a model to a device."""
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
