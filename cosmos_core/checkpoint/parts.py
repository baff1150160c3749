"""What each rank writes of a checkpoint: a safetensors file of the parts of tensors that it alone is to write.

The layout is that of DCP's `HuggingFaceStorageWriter` with `save_distributed`, and DCP reads it, for any mesh. It is
written here because DCP's writer builds a file in memory first and needs collectives.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from cosmos_core.parallel.mesh import all_gather_object, rank_number
from cosmos_core.run.files import sha256, write_text

EXTRA = "extra.json"


class Part(NamedTuple):
    """Of a tensor, or all of it."""

    tensor: torch.Tensor
    offsets: tuple[int, ...]
    """Of its first element in the whole tensor, by dimension."""


def own_parts(tensors: Mapping[str, torch.Tensor]) -> dict[str, Part]:
    """The parts that this rank writes: of those that several ranks have, the first. All ranks must call this."""
    parts = {name: part for name, tensor in tensors.items() if (part := _part(tensor)).tensor.numel()}
    owners: dict[tuple[str, tuple[int, ...]], int] = {}
    for rank, places in enumerate(all_gather_object([(name, part.offsets) for name, part in parts.items()])):
        for place in places:
            owners.setdefault(place, rank)
    return {name: part for name, part in parts.items() if owners[name, part.offsets] == rank_number()}


def write_parts(folder: Path, parts: Mapping[str, Part], extra: str) -> dict[str, dict[str, object]]:
    """Write this rank's files to the disk; size and digest of each by name."""
    rank = rank_number()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"rank_{rank}.safetensors"
    if parts:
        offsets = {name: {SAVED_OFFSETS_KEY: part.offsets} for name, part in parts.items()}
        tensors = {name: part.tensor.cpu().contiguous() for name, part in parts.items()}
        save_file(tensors, file, metadata={"format": "pt", CUSTOM_METADATA_KEY: json.dumps(offsets)})
    write_text(folder / extra_name(rank), extra)
    written = [name for name in (file.name, extra_name(rank)) if (folder / name).exists()]
    return {
        name: {"size": (folder / name).stat().st_size, "sha256": sha256(folder / name, durable=True)}
        for name in written
    }


def extra_name(rank: int) -> str:
    """The file with what a rank needs beside tensors, its random generators among it."""
    return f"extra_{rank}.json" if rank else EXTRA


def _part(tensor: torch.Tensor) -> Part:
    if not isinstance(tensor, DTensor):
        return Part(tensor, (0,) * tensor.ndim)
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Part(tensor.to_local(), tuple(offsets))
