"""Cache of encoded texts and media, addressed by content, so that no run encodes the same content again.

    <output_dir>/.cosmos/media/<encoders>/<key>.safetensors   the tensors of a shard's entries
    <output_dir>/.cosmos/media/<encoders>/<key>.json          digest of the shard, written last as its commit record

An entry is an encoder's output for one text or one image; its key is the digest of that text or image. A shard holds
consecutive entries. Its key is the digest of their keys and of the encoders, so the same data gives the same files in
whatever order runs encode them. The keys also determine where a shard ends: a row that is inserted into a data set
changes only the shard that contains it.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from cosmos_core.models.disk import translate_disk_errors
from cosmos_core.run.files import apply_umask, read_json, remove_temporary_files, sha256, sync_folder, write_json

logger = logging.getLogger(__name__)

_TEXT_CACHE_VERSION, _MEDIA_CACHE_VERSION = 2, 3  # increase a version to invalidate the cached texts or media
_LEFTOVER_AGE_SECONDS = 3600  # age at which a temporary file counts as left by a killed process, and is removed
_TYPICAL_SHARD_ENTRIES, _MAX_SHARD_ENTRIES = 32, 128

EncoderOutput = dict[str, Tensor]
T = TypeVar("T")


def compute_digest(*json_values: object) -> str:
    """Return the first 32 hexadecimal digits of the SHA-256 digest of values that JSON can represent."""
    return hashlib.sha256(json.dumps(json_values, sort_keys=True, ensure_ascii=True).encode()).hexdigest()[:32]


def group_into_shards(keys_and_items: Iterable[tuple[str, T]]) -> Iterator[dict[str, T]]:
    """Divide items to encode, pairs of cache key and text or image, into shards, which are stored in one file each;
    yield each shard as a dictionary of items by key. Where a shard ends depends only on the keys. An item that occurs
    several times is in one shard only."""
    added_keys: set[str] = set()
    shard: dict[str, T] = {}
    for key, item in keys_and_items:
        if key in added_keys:
            continue
        added_keys.add(key)
        shard[key] = item
        if int(key[:8], 16) % _TYPICAL_SHARD_ENTRIES == 0 or len(shard) == _MAX_SHARD_ENTRIES:
            yield shard
            shard = {}
    if shard:
        yield shard


class MediaCache:
    """Cache of the outputs of a model's encoders, in files (shards) with the outputs for several texts or media.
    Several processes can write to the cache at the same time."""

    def __init__(self, cache_root: Path, encoders_digest: str) -> None:
        """Open the cache; `encoders_digest` is the digest of the encoders' weights and settings."""
        self.folder = cache_root / encoders_digest
        self._encoders_digest = encoders_digest
        self.folder.mkdir(parents=True, exist_ok=True)
        # Keep recent temporary files, because processes on other machines may be writing them.
        remove_temporary_files(self.folder, lambda path: time.time() - path.lstat().st_mtime < _LEFTOVER_AGE_SECONDS)

    def compute_shard_key(self, entry_keys: Sequence[str], *, is_media: bool) -> str:
        """Return the key of the shard with the encoder outputs for the cache keys `entry_keys`, which are keys of texts
        or, if `is_media` is set, of media."""
        cache_version = _MEDIA_CACHE_VERSION if is_media else _TEXT_CACHE_VERSION
        return compute_digest(cache_version, self._encoders_digest, list(entry_keys))

    def has_shard(self, shard_key: str) -> bool:
        """Return whether the shard with this key is in the cache and is intact; a damaged shard is logged and removed
        from the cache."""
        record, path = read_json(self._get_record_path(shard_key)), self.get_shard_path(shard_key)
        if not isinstance(record, dict):
            return False
        if path.is_file() and path.stat().st_size == record.get("size") and sha256(path) == record.get("sha256"):
            return True
        logger.warning("%s is damaged; its rows are encoded again", path)
        # Keep the file, which the next encoding replaces: another process may have replaced it before its new record.
        self._get_record_path(shard_key).unlink(missing_ok=True)
        return False

    def read_skip_reasons(self, shard_key: str) -> dict[str, str]:
        """Return the reasons why texts or images of a shard could not be encoded, by their cache keys."""
        shard_record = read_json(self._get_record_path(shard_key))
        return dict(shard_record.get("refused", {})) if isinstance(shard_record, dict) else {}

    def write_shard(self, shard_key: str, entry_by_key: Mapping[str, EncoderOutput | str]) -> None:
        """Write the encoder outputs in `entry_by_key` to a shard, then the record that marks the shard as complete. An
        entry is the output for one text or image, or the reason why it could not be encoded."""
        shard_path = self.get_shard_path(shard_key)
        temporary_shard_path = shard_path.with_name(f".{shard_path.name}.{os.getpid()}.tmp")
        tensors = {
            f"{key}.{name}": tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            for key, entry in entry_by_key.items()
            if not isinstance(entry, str)
            for name, tensor in entry.items()
        }
        with translate_disk_errors(str(shard_path), lambda: "what was encoded before it stays encoded"):
            save_file(tensors, temporary_shard_path)
        apply_umask(temporary_shard_path)
        digest = sha256(temporary_shard_path, fsync=True)
        num_bytes = temporary_shard_path.stat().st_size
        temporary_shard_path.replace(shard_path)
        sync_folder(shard_path.parent)
        skip_reasons = {key: entry for key, entry in entry_by_key.items() if isinstance(entry, str)}
        write_json(self._get_record_path(shard_key), {"size": num_bytes, "sha256": digest, "refused": skip_reasons})

    def read_tensor_shapes(self, shard_key: str, tensor_name: str) -> dict[str, list[int]]:
        """Return the shape of the tensor `tensor_name` of each entry of a shard, by the entry's cache key. Only the
        header of the shard's file is read."""
        shape_by_entry_key = {}
        with safe_open(str(self.get_shard_path(shard_key)), framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - a safetensors file cannot be iterated
                entry_key, _, key_tensor_name = key.partition(".")
                if key_tensor_name == tensor_name:
                    shape_by_entry_key[entry_key] = list(file.get_slice(key).get_shape())
        return shape_by_entry_key

    def get_shard_path(self, shard_key: str) -> Path:
        """Return the path of the safetensors file of a shard."""
        return self.folder / f"{shard_key}.safetensors"

    def _get_record_path(self, shard_key: str) -> Path:
        return self.folder / f"{shard_key}.json"
