"""Prompts to sample images or clips from, with their text embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from cosmos_core.config.schema.algorithm import AlgorithmConfig
from cosmos_core.config.schema.policy import PolicyConfig
from cosmos_core.data.kinds.base import VALIDATION_SPLIT, HeldOutSet, RowKind
from cosmos_core.data.media_rows import open_media_prompts
from cosmos_core.types import Outcome, Prompt

if TYPE_CHECKING:
    from cosmos_core.run.stage import Stage

LOCATION_TYPE = pa.struct({"shard": pa.string(), "entry": pa.string()})
"""Arrow type of the location of tensors: the shard, and the name of the entry in the shard."""


class MediaPromptsKind(RowKind):
    """Kind of rows that are prompts of a diffusion model."""

    name = "media_prompts"
    rows_purpose = "to draw from (RL and validation of a diffusion model)"
    columns: ClassVar[dict[str, pa.DataType]] = {"prompt": pa.string(), "metadata": pa.string(), "text": LOCATION_TYPE}

    def prepare(self, stage: Stage) -> Outcome:
        """Encode the rows of a stage with the encoders of its model."""
        # Import `prepare_media` only when it is needed, because it imports diffusers, which is slow.
        return import_module("cosmos_core.data.prepare_media").prepare(stage)

    def open_prompts(
        self, folder: Path, split: str, algorithm: AlgorithmConfig, model: PolicyConfig
    ) -> Sequence[Prompt]:
        return open_media_prompts(folder, split, getattr(algorithm, "response_column_name", ""))

    def open_held_out(self, folder: Path, algorithm: AlgorithmConfig, model: PolicyConfig, adapter: Any) -> HeldOutSet:
        return HeldOutSet(None, self.open_prompts(folder, VALIDATION_SPLIT, algorithm, model))
