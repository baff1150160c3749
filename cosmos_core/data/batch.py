"""Rows of different lengths as inputs of a model: padded to a rectangle, or packed without padding.

Shape legend: B rows, T tokens of the longest row, P tokens of all rows, S = T - 1 (or P - 1) predicted tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad


class CollatedRows(NamedTuple):
    """Rows of token ids, collated to the inputs of a model: padded to one length, or packed without padding."""

    inputs: dict[str, Any]
    """Keyword arguments of a model. Padded rows: `input_ids`, `position_ids` and `attention_mask` (0: padding), each
    (rows, padded length). Packed rows: `input_ids` and `position_ids`, (1, tokens of all rows), and the values of
    `make_packed_attention_kwargs`."""
    row_start_indices: list[int]
    """Offset of each row in the flattened predictions of the model, of which a padded row has (padded length - 1).
    Token p of a row is predicted at the row's offset plus p - 1."""


class SequenceBounds:
    """Boundaries of packed sequences in host memory, wrapped so that torch.compile does not treat them as an input."""

    __slots__ = ("boundaries", "prompt_indices")

    def __init__(self, boundaries: np.ndarray, prompt_indices: Sequence[int] | None = None) -> None:
        """Store the boundaries of B packed sequences, int32, (B + 1), beginning with 0. If sequence i continues a
        prompt that is packed as a separate sequence, `prompt_indices[i]` is the index of the prompt's sequence,
        otherwise -1. None: no sequence continues another."""
        self.boundaries, self.prompt_indices = boundaries, prompt_indices or [-1] * (len(boundaries) - 1)


def collate_rows(
    rows: Sequence[np.ndarray],
    pad_id: int,
    *,
    is_packed: bool,
    padded_length_fn: Callable[[int], int] = lambda length: length,
) -> CollatedRows:
    """Collate rows of token ids to the inputs of a model: padded on the right, or packed. `padded_length_fn` maps a
    number of tokens, of the longest row or of all packed rows together, to the length after padding."""
    if is_packed:
        row_groups = [([row_index], 0) for row_index in range(len(rows))]
        return collate_shared_prompts(rows, row_groups, pad_id, padded_length_fn)
    lengths = [len(ids) for ids in rows]
    padded_length = padded_length_fn(max(lengths))
    is_real_token_BT = torch.arange(padded_length) < torch.tensor(lengths).unsqueeze(1)
    inputs = {
        "input_ids": torch.stack(
            [pad(torch.as_tensor(ids).long(), (0, padded_length - len(ids)), value=pad_id) for ids in rows]
        ),
        "attention_mask": is_real_token_BT.long(),
        "position_ids": torch.arange(padded_length).expand(len(rows), -1),
    }
    return CollatedRows(inputs, [row_index * (padded_length - 1) for row_index in range(len(rows))])


def collate_shared_prompts(
    rows: Sequence[np.ndarray],
    rows_by_prompt: Sequence[tuple[Sequence[int], int]],
    pad_id: int,
    padded_length_fn: Callable[[int], int],
) -> CollatedRows:
    """Pack rows of token ids to the inputs of a model. The rows of a group begin with the same prompt, which is packed
    only once. `rows_by_prompt` has the row indices and the prompt length of each group (0: no common prompt). For other
    arguments see `collate_rows`."""
    segments: list[tuple[int, int, int, int]] = []  # tuples of row index, start, end, and index of the prompt segment
    segment_index_by_row = {}
    for row_indices, prompt_length in rows_by_prompt:
        prompt_segment_index = len(segments) if prompt_length else -1
        segments += [(row_indices[0], 0, prompt_length, -1)] if prompt_length else []
        for row_index in row_indices:
            segment_index_by_row[row_index] = len(segments)
            segments.append((row_index, prompt_length, len(rows[row_index]), prompt_segment_index))
    packed_segment_bounds = np.cumsum([0, *(end - start for _, start, end, _ in segments)])
    num_padding_tokens = padded_length_fn(int(packed_segment_bounds[-1])) - int(packed_segment_bounds[-1])
    token_id_tensors = [*(torch.as_tensor(rows[row_index][start:end]).long() for row_index, start, end, _ in segments)]
    position_tensors = [torch.arange(start, end) for _, start, end, _ in segments]
    prompt_segment_indices = [prompt_segment_index for *_, prompt_segment_index in segments]
    if num_padding_tokens:
        token_id_tensors.append(torch.full((num_padding_tokens,), pad_id))
        position_tensors.append(torch.arange(num_padding_tokens))
        packed_segment_bounds = np.append(packed_segment_bounds, packed_segment_bounds[-1] + num_padding_tokens)
        prompt_segment_indices.append(-1)
    ids_1P, positions_1P = torch.cat(token_id_tensors).unsqueeze(0), torch.cat(position_tensors).unsqueeze(0)
    inputs = {"input_ids": ids_1P, "position_ids": positions_1P}
    inputs |= make_packed_attention_kwargs(packed_segment_bounds, prompt_segment_indices)
    row_segment_indices = [segment_index_by_row[row_index] for row_index in range(len(rows))]
    return CollatedRows(inputs, [int(packed_segment_bounds[i]) - segments[i][1] for i in row_segment_indices])


def make_packed_attention_kwargs(boundaries: np.ndarray, prompt_indices: Sequence[int] | None = None) -> dict[str, Any]:
    """Return the boundaries of packed sequences as keyword arguments of a model: the arguments that transformers passes
    to flash attention, and `sequence_bounds` in host memory, which a layer can read without synchronising with the
    device. `boundaries` and `prompt_indices` are arguments of `SequenceBounds`."""
    boundaries = np.asarray(boundaries, dtype=np.int32)
    max_length, cu_seqlens = int(np.diff(boundaries).max()), torch.from_numpy(boundaries)
    return {
        "sequence_bounds": SequenceBounds(boundaries, prompt_indices),
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": max_length,
        "max_length_k": max_length,
    }


def to_device(inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the inputs of a model with their tensors on `device`; other values are unchanged."""
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
