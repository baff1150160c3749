"""`[policy]`: which model is trained, and how it is laid out."""

from __future__ import annotations

from typing import Annotated

from pydantic import field_validator

from cosmos_core.config.table import NoResult, PositiveInt, Table


class ParallelismConfig(Table):
    """`[policy.parallelism]`: the device mesh. This version trains on one rank, so every size is 1."""

    tp_size: PositiveInt = 1
    """Tensor-parallel ranks."""
    cp_size: PositiveInt = 1
    """Context-parallel ranks."""
    ep_size: PositiveInt = 1
    """Expert-parallel ranks."""
    dp_shard_size: int = 1
    """Ranks that shard the parameters (FSDP); -1: whatever the other sizes leave."""
    pp_size: PositiveInt = 1
    """Pipeline stages."""
    dp_replicate_size: PositiveInt = 1
    """Replicas of the sharded group (HSDP)."""

    @field_validator("dp_shard_size")
    @classmethod
    def _shard_size(cls, size: int) -> int:
        if size == 0 or size < -1:
            raise ValueError(f"dp_shard_size = {size} must be -1 (the rest of the world) or at least 1")
        return size

    @property
    def world_size(self) -> int:
        """Ranks that this mesh needs."""
        return self.tp_size * self.cp_size * abs(self.dp_shard_size) * self.pp_size * self.dp_replicate_size


class PolicyConfig(Table):
    """`[policy]`"""

    parallelism: ParallelismConfig = ParallelismConfig()
    """Device mesh of the trainer."""
    model_name_or_path: Annotated[str, NoResult] = "Qwen/Qwen2.5-VL-7B-Instruct"
    """Folder in Hugging Face format, or a Hub id (the fingerprint takes its content, not its name); in a pipeline
    `model = "stage:NAME"` replaces it."""
    model_revision: str | None = None
    """Hub revision; None: the newest."""
    model_max_length: PositiveInt = 4096
    """Longest sequence in tokens: longer SFT rows are cut on the right, prompt + answer never exceed it."""
    model_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: less memory, about a third more compute."""

    @field_validator("model_name_or_path")
    @classmethod
    def _not_empty(cls, name: str) -> str:
        if not name.strip():
            raise ValueError("model_name_or_path is empty; give a folder or a Hub id")
        return name
