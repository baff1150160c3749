"""Human preference score of an image for a prompt: PickScore (arXiv 2305.01569), a fine-tuned CLIP ViT-H-14."""

from collections.abc import Sequence
from typing import Any

from cosmos_core.rewards.base import ScoreAndMetrics
from cosmos_core.rewards.clip_model import ClipModel
from cosmos_core.rewards.reward_model import RewardInput, RewardModelSettings, ScoreColumns, score_item

_DEFAULT_MODEL = "yuvalkirstain/PickScore_v1"
_DEFAULT_PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
_LOGIT_DIVISOR = 26.0


class PickscoreReward:
    """Reward model with the score `pickscore`: the logit of text and image, divided by 26 to be about 1."""

    def __init__(self, settings: RewardModelSettings) -> None:
        self._clip_model = ClipModel("pickscore", settings, _DEFAULT_MODEL, _DEFAULT_PROCESSOR)

    def score(self, items: Sequence[RewardInput]) -> ScoreColumns:
        cosines = self._clip_model.prompt_image_similarities(items)
        return {"pickscore": [self._clip_model.logit_scale * cosine / _LOGIT_DIVISOR for cosine in cosines]}


def pickscore(to_be_evaluated: str, reference: str, *, prompt: str, media: Any, custom: Any) -> ScoreAndMetrics:
    """Return the PickScore of one image or video; `[custom.pickscore]` sets `model_path` and `device`."""
    return score_item("pickscore", RewardInput(prompt, media), custom)
