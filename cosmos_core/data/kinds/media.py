"""Images or clips to learn, as latents, with the text embeddings of their prompts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from cosmos_core.config.schema.diffusers import DiffusersConfig
from cosmos_core.config.schema.policy import PolicyConfig
from cosmos_core.data.flow_sample import FlowSample, NoiseSampler, derive_seed
from cosmos_core.data.kinds.base import PreparedRows, StepSeed
from cosmos_core.data.kinds.media_prompts import LOCATION_TYPE, MediaPromptsKind
from cosmos_core.data.media_rows import MediaRows, open_media

_HELD_OUT_STEP_IN_SEED = -1
"""Value used in place of the number of the train step in the noise seeds of held-out rows."""


class NoisyRows(PreparedRows):
    """Images or clips, each at a noise level that is sampled anew for each train step."""

    is_prefetched = True

    def __init__(self, rows: MediaRows, noise_sampler: NoiseSampler) -> None:
        self._rows, self._noise_sampler = rows, noise_sampler

    def __len__(self) -> int:
        return len(self._rows)

    def samples(
        self, row_ids: Sequence[int], seed: StepSeed = None, micro_batch: int | None = None
    ) -> list[FlowSample]:
        """Return a sample for each row, with noise and a noise level; captions of held-out rows are never dropped."""
        add_noise = self._noise_sampler.sample
        seed_parts, prompt_dropout = ((_HELD_OUT_STEP_IN_SEED,), 0.0) if seed is None else (seed, None)
        return [add_noise(self._rows[i], derive_seed(*seed_parts, i), prompt_dropout=prompt_dropout) for i in row_ids]


class MediaKind(MediaPromptsKind):
    """Kind of rows that are images or clips with their prompts."""

    name = "media"
    rows_purpose = "to learn (SFT of a diffusion model)"
    columns: ClassVar[dict[str, pa.DataType]] = {
        **MediaPromptsKind.columns, "media": LOCATION_TYPE, "shape": pa.list_(pa.int32())
    }  # fmt: skip
    has_media = True

    def open(self, folder: Path, split: str, model: PolicyConfig, adapter: Any = None) -> NoisyRows:
        rows = open_media(folder, split)
        return NoisyRows(rows, make_noise_sampler(rows, model.diffusers, adapter))


def make_noise_sampler(rows: MediaRows, diffusers_config: DiffusersConfig, model_adapter: Any) -> NoiseSampler:
    """Return the sampler of noise, noise levels and caption dropout for the training rows of a diffusion model."""
    model_family = model_adapter.family
    null_text = model_family.dropped_text(rows.null_text)
    return NoiseSampler(diffusers_config, null_text, model_family.train_shift, model_family.max_conditioning_frames)
