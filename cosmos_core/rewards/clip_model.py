"""CLIP of transformers, for the rewards that are made of it: an image and a text as unit vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PIL import Image

from cosmos_core.errors import RewardError
from cosmos_core.rewards.served import Settings, require

_MOST_TOKENS = 77


class ClipModel:
    """Embeds images and texts; `options`: `processor_path`, where that lies elsewhere than the model."""

    def __init__(self, name: str, settings: Settings, model_path: str, processor_path: str = "") -> None:
        """Load the model of `settings`, or `model_path` where it names none.

        Raises:
            RewardError: there is none, or its packages are not installed.
        """
        require(name, "install torch and transformers", "torch", "transformers")
        import torch
        from transformers import AutoModel, AutoProcessor

        self._torch = torch
        self.device = torch.device(device_of(settings))
        self.dtype = torch.float32 if self.device.type == "cpu" else getattr(torch, settings.dtype)
        path = settings.model_path or model_path
        processor = settings.options.get("processor_path") or (path if settings.model_path else processor_path) or path
        try:
            self.model = AutoModel.from_pretrained(path, dtype=self.dtype).to(self.device).eval().requires_grad_(False)
            self._processor = AutoProcessor.from_pretrained(processor)
        except (OSError, ValueError) as error:
            raise not_loaded(name, path, error) from error
        self.scale = float(self.model.logit_scale.detach().exp())

    def images(self, images: Sequence[Image.Image]) -> Any:
        """Return the embeddings of images, one unit vector each."""
        inputs = self._processor(images=list(images), return_tensors="pt").to(self.device)
        inputs["pixel_values"] = inputs["pixel_values"].to(self.dtype)
        with self._torch.inference_mode():
            return _unit(self.model.get_image_features(**inputs))

    def texts(self, texts: Sequence[str]) -> Any:
        """Return the embeddings of texts, one unit vector each; what is longer than CLIP reads is cut off."""
        inputs = self._processor(
            text=list(texts), padding=True, truncation=True, max_length=_MOST_TOKENS, return_tensors="pt"
        ).to(self.device)
        with self._torch.inference_mode():
            return _unit(self.model.get_text_features(**inputs))

    def similarities(self, texts: Sequence[str], images: Sequence[Image.Image]) -> list[float]:
        """Return the cosine of each text and its image."""
        found: list[float] = (self.texts(texts) * self.images(images)).sum(-1).float().tolist()
        return found


def device_of(settings: Settings) -> str:
    """Return where a model runs: on the CPU where a GPU is asked for and there is none."""
    import torch

    return "cpu" if settings.device.startswith("cuda") and not torch.cuda.is_available() else settings.device


def not_loaded(name: str, path: str, error: Exception) -> RewardError:
    """Return what to raise where the files of a model cannot be loaded."""
    reason = " ".join(str(error).split())[:200]
    return RewardError(
        f"the reward {name!r} cannot load {path!r}: {reason}; download it and set model_path to its folder"
    )


def _unit(features: Any) -> Any:
    features = getattr(features, "pooler_output", features)
    return features / features.norm(dim=-1, keepdim=True).clamp_min(1e-12)
