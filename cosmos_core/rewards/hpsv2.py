"""Human preference score of an image: HPS v2.1 (arXiv 2306.09341), the cosine similarity of prompt and image in a
fine-tuned CLIP ViT-H-14.

The published checkpoint needs the package `hpsv2`; a checkpoint in the format of transformers needs no other package.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cosmos_core.errors import RewardError
from cosmos_core.rewards.clip_model import ClipModel, select_device
from cosmos_core.rewards.images import middle_image
from cosmos_core.rewards.reward_model import RewardInput, RewardModelSettings, ScoreColumns, require_packages

_CHECKPOINT_FILE = "hpsv2/ckpts/HPS_v2.1_compressed.pt"
_INSTALL_HINT = "install hpsv2 in its own environment (venv_python), or set model_path to a CLIP folder of transformers"


class Hpsv2Reward:
    """Reward model with the score `hpsv2`; `model_path` is a CLIP folder of transformers or the published checkpoint.
    If `model_path` is empty, the checkpoint is read from `download_path`."""

    def __init__(self, settings: RewardModelSettings) -> None:
        is_clip_folder = bool(settings.model_path) and Path(settings.model_path, "config.json").is_file()
        self._compute_cosines = (
            ClipModel("hpsv2", settings, "").prompt_image_similarities if is_clip_folder else _load_checkpoint(settings)
        )

    def score(self, items: Sequence[RewardInput]) -> ScoreColumns:
        return {"hpsv2": self._compute_cosines(items)}


def _load_checkpoint(settings: RewardModelSettings) -> Any:
    require_packages("hpsv2", _INSTALL_HINT, "torch", "hpsv2")
    import torch
    from hpsv2.src.open_clip import create_model_and_transforms, get_tokenizer

    checkpoint_file = Path(settings.model_path or Path(settings.download_path) / _CHECKPOINT_FILE)
    if not checkpoint_file.is_file():
        remedy = "download it, or set download_path to its folder"
        raise RewardError(f"the reward 'hpsv2' needs its checkpoint, {checkpoint_file}; {remedy}")
    device = torch.device(select_device(settings))
    model, _, preprocess = create_model_and_transforms("ViT-H-14", device=device, output_dict=True)
    model.load_state_dict(torch.load(checkpoint_file, "cpu", weights_only=True)["state_dict"])
    model.eval().requires_grad_(False)
    tokenize = get_tokenizer("ViT-H-14")

    @torch.inference_mode()
    def cosine_similarities(items: Sequence[RewardInput]) -> list[float]:
        pixels = torch.stack([preprocess(middle_image(item.media)) for item in items]).to(device)
        embeddings = model(pixels, tokenize([item.prompt for item in items]).to(device))
        return (embeddings["image_features"] * embeddings["text_features"]).sum(-1).float().tolist()

    return cosine_similarities
