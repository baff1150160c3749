"""Human preference score of an image: HPS v3 (arXiv 2508.03789), a Qwen2-VL 7B that predicts the mean and the standard
deviation of the preference."""

from collections.abc import Sequence
from pathlib import Path

from cosmos_core.rewards.clip_model import select_device
from cosmos_core.rewards.images import middle_image
from cosmos_core.rewards.reward_model import RewardInput, RewardModelSettings, ScoreColumns, require_packages

_CHECKPOINT_FILE = "hpsv3/HPSv3.safetensors"
_INSTALL_HINT = "install hpsv3 in its own environment and name that in venv_python"


class Hpsv3Reward:
    """Reward model with the score `hpsv3`: HPS v3 predicts the mean and the standard deviation of human preference for
    an image, and the score is the mean. If `options.sigma` is true, the standard deviation is returned as
    `hpsv3_sigma`; `options.config_path` is a config of the package `hpsv3`."""

    def __init__(self, settings: RewardModelSettings) -> None:
        require_packages("hpsv3", _INSTALL_HINT, "torch", "hpsv3")
        from hpsv3 import HPSv3RewardInferencer

        checkpoint_file = Path(settings.model_path or Path(settings.download_path) / _CHECKPOINT_FILE)
        path_by_parameter = {"config_path": settings.options.get("config_path")}
        path_by_parameter["checkpoint_path"] = str(checkpoint_file) if checkpoint_file.is_file() else None
        non_empty_paths = {name: path for name, path in path_by_parameter.items() if path}
        self._inferencer = HPSv3RewardInferencer(device=select_device(settings), **non_empty_paths)
        self._returns_sigma = bool(settings.options.get("sigma", False))

    def score(self, items: Sequence[RewardInput]) -> ScoreColumns:
        images = [middle_image(item.media) for item in items]
        predicted_rewards = self._inferencer.reward(prompts=[item.prompt for item in items], image_paths=images)
        predictions = predicted_rewards.float().reshape(len(items), -1).tolist()
        score_columns: ScoreColumns = {"hpsv3": [row[0] for row in predictions]}
        if self._returns_sigma and len(predictions[0]) > 1:
            score_columns["hpsv3_sigma"] = [row[1] for row in predictions]
        return score_columns
