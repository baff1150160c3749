"""Which image people would prefer: ImageReward (arXiv 2304.05977), a BLIP with a head, by its own package."""

from __future__ import annotations

from collections.abc import Sequence

from cosmos_core.rewards.clip_model import device_of
from cosmos_core.rewards.images import image_of
from cosmos_core.rewards.served import Columns, Item, Settings, require

_MODEL = "ImageReward-v1.0"
_INSTALL = "install image-reward in its own environment and name that in venv_python"


class ImageRewardReward:
    """Key `image_reward`; `model_path`: its file, empty for the published one, kept in `download_path`."""

    def __init__(self, settings: Settings) -> None:
        require("image_reward", _INSTALL, "torch", "ImageReward")
        import ImageReward

        self._model = ImageReward.load(
            settings.model_path or _MODEL, device=device_of(settings), download_root=settings.download_path or None
        ).eval()

    def score(self, items: Sequence[Item]) -> Columns:
        """Return the score of each image; of a video that of its middle frame."""
        return {"image_reward": [float(self._model.score(item.prompt, image_of(item.media))) for item in items]}
