"""Aesthetic score of an image by the LAION predictor: linear layers over its CLIP embedding, without the prompt."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cosmos_core.errors import RewardError
from cosmos_core.rewards.clip_model import DEFAULT_CLIP_MODEL, ClipModel
from cosmos_core.rewards.images import middle_image
from cosmos_core.rewards.reward_model import RewardInput, RewardModelSettings, ScoreColumns, score_item


class AestheticReward:
    """Reward model that returns the LAION aesthetic score of an image, about 1 to 10, as `aesthetic`.
    `options.predictor` is the file of the linear layers that map the image's CLIP embedding to the score."""

    def __init__(self, settings: RewardModelSettings) -> None:
        predictor_path = str(settings.options.get("predictor") or "")
        predictor_file = Path(os.path.expanduser(predictor_path))
        if predictor_path and not predictor_file.is_file():
            path_problem = f"predictor = {predictor_path!r}: no such file in {str(Path.cwd())!r}"
            raise RewardError(f"the reward 'aesthetic': {path_problem}; give the whole path")
        if not predictor_path:
            raise RewardError(
                "the reward 'aesthetic' needs predictor, in [custom.aesthetic] of a recipe or in options of a service: "
                "the file of LAION's layers over CLIP, such as sac+logos+ava1-l14-linearMSE.pth, or as safetensors"
            )
        self._clip_model = ClipModel("aesthetic", settings, DEFAULT_CLIP_MODEL)
        self._linear_layers = _load_linear_layers(predictor_file, self._clip_model.device)

    def score(self, items: Sequence[RewardInput]) -> ScoreColumns:
        features = self._clip_model.embed_images([middle_image(item.media) for item in items]).float()
        # Apply only the linear layers: the predictor has no activations between them, and its dropout is for training.
        for weight, bias in self._linear_layers:
            features = features @ weight.T + bias
        return {"aesthetic": features[:, 0].tolist()}


def aesthetic(to_be_evaluated: str, reference: str, *, media: Any, custom: Any) -> tuple[float, dict[str, float]]:
    """Return the aesthetic score of an image or video; `[custom.aesthetic]` has `model_path`, `predictor`, `device`."""
    return score_item("aesthetic", RewardInput("", media), custom)


def _load_linear_layers(path: Path, device: Any) -> list[tuple[Any, ...]]:
    """Return the weight and the bias of each linear layer in `path`, the file of the LAION aesthetic predictor, in
    order."""
    import torch
    from safetensors.torch import load_file

    state_dict = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    layer_prefixes = [name.removesuffix("weight") for name in state_dict if name.endswith("weight")]
    layer_prefixes.sort(key=lambda name: next((int(part) for part in name.split(".") if part.isdigit()), 0))
    return [tuple(state_dict[layer + k].to(device).float() for k in ("weight", "bias")) for layer in layer_prefixes]
