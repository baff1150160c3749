"""Reward for images that compress well as JPEG; a negative weight rewards the opposite (DDPO, arXiv 2305.13301)."""

from collections.abc import Sequence
from io import BytesIO
from typing import Any

from cosmos_core.rewards.images import to_frames
from cosmos_core.rewards.reward_model import RewardInput, RewardModelSettings, ScoreColumns, score_item

_DEFAULT_JPEG_QUALITY = 95
_BYTES_PER_SCORE_UNIT = 100_000.0


class JpegSizeReward:
    """Reward model with the score `jpeg_size`: the negative size of an image as JPEG, in units of 100 kB.
    `options.quality` is the JPEG quality."""

    def __init__(self, settings: RewardModelSettings) -> None:
        self._jpeg_quality = int(settings.options.get("quality", _DEFAULT_JPEG_QUALITY))

    def score(self, items: Sequence[RewardInput]) -> ScoreColumns:
        """Return the score of each image, or the mean over the frames of each video."""
        scores = []
        for item in items:
            jpeg_sizes = []
            for image in to_frames(item.media):
                jpeg_buffer = BytesIO()
                image.save(jpeg_buffer, format="JPEG", quality=self._jpeg_quality)
                jpeg_sizes.append(jpeg_buffer.tell())
            scores.append(-sum(jpeg_sizes) / len(jpeg_sizes) / _BYTES_PER_SCORE_UNIT)
        return {"jpeg_size": scores}


def jpeg_size(to_be_evaluated: str, reference: str, *, media: Any, custom: Any = None) -> float:
    """Return the negative size of the image as JPEG, in units of 100 kB; `[custom.jpeg_size]` sets `quality`."""
    return score_item("jpeg_size", RewardInput(media=media), custom)[0]
