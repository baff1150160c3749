"""CLIPScore of an image and its prompt: 2.5 max(cos, 0) (Hessel et al., arXiv 2104.08718)."""

from collections.abc import Sequence
from typing import Any

from cosmos_core.rewards.base import ScoreAndMetrics
from cosmos_core.rewards.clip_model import DEFAULT_CLIP_MODEL, ClipModel
from cosmos_core.rewards.reward_model import RewardInput, RewardModelSettings, ScoreColumns, score_item

_CLIP_SCORE_WEIGHT = 2.5


class ClipScoreReward:
    """Reward model that returns the CLIPScore as `clip_score`."""

    def __init__(self, settings: RewardModelSettings) -> None:
        self._clip_model = ClipModel("clip_score", settings, DEFAULT_CLIP_MODEL)

    def score(self, items: Sequence[RewardInput]) -> ScoreColumns:
        cosines = self._clip_model.prompt_image_similarities(items)
        return {"clip_score": [_CLIP_SCORE_WEIGHT * max(cosine, 0.0) for cosine in cosines]}


def clip_score(to_be_evaluated: str, reference: str, *, prompt: str, media: Any, custom: Any) -> ScoreAndMetrics:
    """Return the CLIPScore of one image or video; `[custom.clip_score]` sets `model_path` and `device`."""
    return score_item("clip_score", RewardInput(prompt, media), custom)
