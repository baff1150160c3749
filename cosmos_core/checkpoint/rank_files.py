"""Files that each rank writes for a checkpoint: a safetensors file with its local tensors, and a JSON file.

Only one rank writes a replicated tensor. The layout is that of torch's distributed checkpoint (DCP),
`HuggingFaceStorageWriter` with `save_distributed`, and DCP reads it on any mesh. DCP's writer is not used because it
builds a file in memory first, needs collectives and computes no digests; this module hashes the bytes while writing, so
that no file is read again.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from transformers.modeling_utils import str_to_torch_dtype

from cosmos_core.parallel.fsdp import get_shard_bounds, local_shard
from cosmos_core.parallel.mesh import all_gather_object, rank_number

FIRST_RANK_JSON_FILE = "extra.json"
_DTYPE_NAMES = {dtype: name for name, dtype in str_to_torch_dtype.items()}
_CHUNK_BYTES = 1 << 24


class LocalTensor(NamedTuple):
    """Local shard of a tensor on one rank, or the whole tensor if it is not sharded."""

    tensor: torch.Tensor
    global_offset: tuple[int, ...]
    """Offsets of the first element of the shard in the full tensor, one for each dimension."""


def select_owned_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, LocalTensor]:
    """Return those local tensors that this rank writes to a checkpoint, by name. If several ranks have the same shard,
    the lowest of them writes it. The function is collective: every rank calls it."""
    local_tensors = {
        name: LocalTensor(shard, tuple(bounds.start for bounds in get_shard_bounds(tensor)))
        for name, tensor in tensors.items()
        if (shard := local_shard(tensor)).numel() or not tensor.numel()
    }
    shards_by_rank = all_gather_object([(name, local.global_offset) for name, local in local_tensors.items()])
    shards_of_lower_ranks = {shard for rank_shards in shards_by_rank[: rank_number()] for shard in rank_shards}
    return {
        name: local for name, local in local_tensors.items() if (name, local.global_offset) not in shards_of_lower_ranks
    }


def write_rank_files(folder: Path, tensors: Mapping[str, LocalTensor], state_json: str) -> dict[str, dict[str, object]]:
    """Write this rank's files of a checkpoint to the disk; return size and digest of each file, by file name.
    `state_json` is the content of the JSON file; without `tensors` no safetensors file is written."""
    rank = rank_number()
    folder.mkdir(parents=True, exist_ok=True)
    file_records = {json_file_name(rank): _write_file(folder / json_file_name(rank), [state_json.encode()])}
    if tensors:
        offset_metadata = {name: {SAVED_OFFSETS_KEY: each.global_offset} for name, each in tensors.items()}
        metadata = {"format": "pt", CUSTOM_METADATA_KEY: json.dumps(offset_metadata)}
        tensor_file_blocks = safetensors_blocks({name: each.tensor for name, each in tensors.items()}, metadata)
        tensor_file = folder / f"rank_{rank}.safetensors"
        file_records[tensor_file.name] = _write_file(tensor_file, tensor_file_blocks)
    return file_records


def json_file_name(rank: int) -> str:
    """Return the name of a rank's JSON file in a checkpoint. The file has the rank's state other than tensors, such as
    random generators."""
    return f"extra_{rank}.json" if rank else FIRST_RANK_JSON_FILE


def safetensors_blocks(tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]) -> Iterable[memoryview | bytes]:
    """Yield the blocks of a safetensors file: eight bytes with the length of the header, the header, the tensors."""
    # Tensors of wide dtypes come first, so that the offset of each tensor is a multiple of its element size.
    sorted_tensors = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {"__metadata__": metadata}
    end_byte = 0
    for name, tensor in sorted_tensors:
        offsets = [end_byte, end_byte + tensor.nbytes]
        header[name] = {"dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        end_byte += tensor.nbytes
    header_bytes = json.dumps(header).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    yield len(header_bytes).to_bytes(8, "little") + header_bytes
    for _, tensor in sorted_tensors:
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _write_file(output_path: Path, byte_blocks: Iterable[memoryview | bytes]) -> dict[str, object]:
    """Write a file, wait until it is on the disk, and return its size and digest."""
    digest, num_written_bytes = hashlib.sha256(), 0
    with open(output_path, "wb") as output_file, ThreadPoolExecutor(1) as hash_executor:
        for block in byte_blocks:
            for start in range(0, len(block), _CHUNK_BYTES):
                chunk = block[start : start + _CHUNK_BYTES]
                # Hash the chunk in a second thread while it is written, because both take long.
                hash_future = hash_executor.submit(digest.update, chunk)
                num_written_bytes += output_file.write(chunk)
                hash_future.result()
        output_file.flush()
        os.fsync(output_file.fileno())
    return {"size": num_written_bytes, "sha256": digest.hexdigest()}
