"""CLIP model from transformers, shared by several rewards: embeddings of images and texts as unit vectors."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from PIL import Image

from cosmos_core.errors import RewardError
from cosmos_core.rewards.images import middle_image
from cosmos_core.rewards.reward_model import RewardInput, RewardModelSettings, require_packages

DEFAULT_CLIP_MODEL = "openai/clip-vit-large-patch14"
_MAX_TEXT_TOKENS = 77


class ClipModel:
    """CLIP model that embeds images and texts; the setting `options.processor_path` names a processor that is not in
    the folder of the model."""

    def __init__(
        self, reward_name: str, settings: RewardModelSettings, model_path: str, processor_path: str = ""
    ) -> None:
        """Load the model that `settings` names, else the model `model_path` with the processor `processor_path`. Raise
        `RewardError` if the model cannot be loaded, or a package is not installed."""
        require_packages(reward_name, "install torch and transformers", "torch", "transformers")
        import torch
        from transformers import AutoModel, AutoProcessor

        self._torch = torch
        self.device = torch.device(select_device(settings))
        self.dtype = torch.float32 if self.device.type == "cpu" else getattr(torch, settings.dtype)
        path = settings.model_path or model_path
        processor_name = settings.options.get("processor_path") or ("" if settings.model_path else processor_path)
        with translate_loading_errors(reward_name, path):
            self.model = AutoModel.from_pretrained(path, dtype=self.dtype).to(self.device).eval().requires_grad_(False)
            self._processor = AutoProcessor.from_pretrained(processor_name or path)
        self.logit_scale = float(self.model.logit_scale.detach().exp())

    def embed_images(self, images: Sequence[Image.Image]) -> Any:
        """Return the embeddings of images, one unit vector each."""
        image_inputs = self._processor(images=list(images), return_tensors="pt").to(self.device)
        image_inputs["pixel_values"] = image_inputs["pixel_values"].to(self.dtype)
        with self._torch.inference_mode():
            return _to_unit_vectors(self.model.get_image_features(**image_inputs))

    def embed_texts(self, texts: Sequence[str]) -> Any:
        """Return the embeddings of texts, one unit vector each; texts are truncated to the context length of CLIP."""
        text_inputs = self._processor(
            text=list(texts), padding=True, truncation=True, max_length=_MAX_TEXT_TOKENS, return_tensors="pt"
        ).to(self.device)
        with self._torch.inference_mode():
            return _to_unit_vectors(self.model.get_text_features(**text_inputs))

    def prompt_image_similarities(self, items: Sequence[RewardInput]) -> list[float]:
        """Return the cosine similarity of the prompt and the image, or the middle frame of the video, of each item."""
        text_embeddings = self.embed_texts([item.prompt for item in items])
        image_embeddings = self.embed_images([middle_image(item.media) for item in items])
        return (text_embeddings * image_embeddings).sum(-1).float().tolist()


def select_device(settings: RewardModelSettings) -> str:
    """Return the device in the settings of a reward model, or the CPU if that device is a GPU and CUDA is not
    available."""
    import torch

    return "cpu" if settings.device.startswith("cuda") and not torch.cuda.is_available() else settings.device


@contextmanager
def translate_loading_errors(reward_name: str, path: str) -> Iterator[None]:
    """Convert the errors of the `with` block, which loads the files of a model, to `RewardError`."""
    try:
        yield
    except (OSError, ValueError) as error:
        error_text = " ".join(str(error).split())[:200]
        raise RewardError(
            f"the reward {reward_name!r} cannot load {path!r}: {error_text}; download it and set model_path to "
            "its folder"
        ) from error


def _to_unit_vectors(embeddings: Any) -> Any:
    embeddings = getattr(embeddings, "pooler_output", embeddings)
    return embeddings / embeddings.norm(dim=-1, keepdim=True).clamp_min(1e-12)
