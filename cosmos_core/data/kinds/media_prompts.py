"""Prompts to sample images or clips from, with their text embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa

from cosmos_core.config.schema.algorithm import AlgorithmConfig
from cosmos_core.config.schema.policy import PolicyConfig
from cosmos_core.data.kinds.base import VALIDATION, HeldOut, RowKind
from cosmos_core.data.lazy import IndexedSequence
from cosmos_core.data.media_rows import MediaPrompts, MediaRows, open_media_prompts
from cosmos_core.types import Outcome, Prompt

if TYPE_CHECKING:
    from cosmos_core.run.stage import Stage

ENTRY = pa.struct({"shard": pa.string(), "entry": pa.string()})
"""Arrow type of the location of tensors: the shard, and the name of the entry in the shard."""
_REFERENCE_KEYS = ("reference", "answer", "label")


class MediaPromptList(IndexedSequence[Prompt]):
    """Prepared prompts for images or videos, as a sequence of `Prompt`."""

    def __init__(self, prompts: MediaPrompts, reference_key: str = "", clips: MediaRows | None = None) -> None:
        """Wrap prepared prompts, with their text embeddings.

        `reference_key` is the metadata key of the reference that rewards compare with; empty: see `find_reference`.
        `clips` are the clips of the same rows, for rollouts that are conditioned on first frames."""
        self.media, self._column, self._clips = prompts, reference_key, clips

    def __len__(self) -> int:
        return len(self.media)

    def item(self, index: int) -> Prompt:
        media_prompt = self.media[index]
        return Prompt(
            media_prompt.row,
            (),
            media_prompt.prompt,
            find_reference(media_prompt.metadata, self._column),
            embedding=dict(media_prompt.text),
            metadata=dict(media_prompt.metadata),
            conditioning_clip=self._clips[index].mean.float() if self._clips is not None else None,
        )


def find_reference(metadata: Mapping[str, Any], reference_key: str) -> str:
    """Return the reference that rewards compare with, from the metadata key `reference_key`; if empty, from a usual
    key."""
    reference_keys = (reference_key,) if reference_key else _REFERENCE_KEYS
    return next((str(metadata[name]) for name in reference_keys if metadata.get(name) is not None), "")


class MediaPromptsKind(RowKind):
    """Kind of rows that are prompts of a diffusion model."""

    name = "media_prompts"
    purpose = "to draw from (RL and validation of a diffusion model)"
    columns: ClassVar[dict[str, pa.DataType]] = {"prompt": pa.string(), "metadata": pa.string(), "text": ENTRY}

    def prepare(self, stage: Stage) -> Outcome:
        """Encode the rows of a stage with the encoders of its model."""
        # Imported here, because `prepare_media` imports diffusers, which is slow.
        return import_module("cosmos_core.data.prepare_media").run(stage)

    def prompts(self, folder: Path, split: str, policy: AlgorithmConfig, model: PolicyConfig) -> Sequence[Prompt]:
        return MediaPromptList(open_media_prompts(folder, split), getattr(policy, "response_column_name", ""))

    def open_held_out(self, folder: Path, policy: AlgorithmConfig, model: PolicyConfig, adapter: Any) -> HeldOut:
        return HeldOut(None, MediaPromptList(open_media_prompts(folder, VALIDATION)))
