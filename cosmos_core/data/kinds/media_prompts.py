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
from cosmos_core.data.media_rows import open_media, open_media_prompts
from cosmos_core.types import Outcome, Prompt

if TYPE_CHECKING:
    from cosmos_core.run.stage import Stage

LOCATION_TYPE = pa.struct({"shard": pa.string(), "entry": pa.string()})
"""Arrow type of the location of a prepared row's tensors: the name of the shard (safetensors file), and the name of the
entry in the shard."""


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
        """Open the prepared prompts of a split. If rollouts start from frames of clips, each prompt comes with the clip
        that it describes."""
        starts_from_clips = self.has_media and algorithm.has_rollouts and model.diffusers.flow_rl.max_conditional_frames
        conditioning_rows = open_media(folder, split) if starts_from_clips else None
        return open_media_prompts(folder, split, getattr(algorithm, "response_column_name", ""), conditioning_rows)

    def open_held_out(self, folder: Path, algorithm: AlgorithmConfig, model: PolicyConfig, adapter: Any) -> HeldOutSet:
        """Return the held-out prompts, and their images or clips if training learns from them."""
        learns_from_media = self.has_media and not algorithm.has_rollouts
        rows = self.open(folder, VALIDATION_SPLIT, model, adapter) if learns_from_media else None
        return HeldOutSet(rows, self.open_prompts(folder, VALIDATION_SPLIT, algorithm, model))
