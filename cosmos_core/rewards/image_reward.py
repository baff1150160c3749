"""Human preference score of an image: ImageReward (arXiv 2304.05977), a BLIP with cross-attention from text to image.

The checkpoint has the format of the original BLIP code; the modules are from transformers, so that no other package is
needed. Linear layers map the hidden state of the first token to a number, which is normalised by the mean and the
standard deviation of the training data.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from cosmos_core.errors import RewardError
from cosmos_core.rewards.clip_model import select_device, translate_loading_errors
from cosmos_core.rewards.images import middle_image
from cosmos_core.rewards.reward_model import RewardInput, RewardModelSettings, ScoreColumns, require_packages

_HUB_REPOSITORY, _CHECKPOINT_FILE = "THUDM/ImageReward", "ImageReward.pt"
_DEFAULT_TOKENIZER = "bert-base-uncased"
_REWARD_MEAN, _REWARD_STD = 0.16717362830052426, 1.0333394966054072
_PIXEL_MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
_PIXEL_STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)
_MAX_TEXT_TOKENS = 35
_HEAD_DIM = 64
"""Dimension of each attention head in ImageReward's text encoder (BERT) and image encoder (ViT)."""
_VISION_PARAMETER_NAMES = {
    "cls_token": "embeddings.class_embedding", "pos_embed": "embeddings.position_embedding",
    "patch_embed.proj": "embeddings.patch_embedding", "blocks": "encoder.layers", "norm1": "layer_norm1",
    "norm2": "layer_norm2", "attn.qkv": "self_attn.qkv", "attn.proj": "self_attn.projection",
}  # fmt: skip
"""Parameter names of the image encoder in an ImageReward checkpoint, and the corresponding names in transformers."""


class ImageRewardReward:
    """Reward model with the score `image_reward`. `model_path` is the file ImageReward.pt; if it is empty, the file is
    read from `download_path` or from the Hub. `options.tokenizer` is a BERT tokenizer."""

    def __init__(self, settings: RewardModelSettings) -> None:
        require_packages("image_reward", "install torch and transformers", "torch", "transformers")
        import torch
        from huggingface_hub import hf_hub_download
        from transformers import AutoTokenizer

        device = torch.device(select_device(settings))
        tokenizer_name = settings.options.get("tokenizer", _DEFAULT_TOKENIZER)
        with translate_loading_errors("image_reward", settings.model_path or f"{_HUB_REPOSITORY}/{_CHECKPOINT_FILE}"):
            checkpoint_path = Path(settings.model_path or Path(settings.download_path) / _CHECKPOINT_FILE)
            if not settings.model_path and not checkpoint_path.is_file():
                checkpoint_path = Path(hf_hub_download(_HUB_REPOSITORY, _CHECKPOINT_FILE))
            state_dict = torch.load(checkpoint_path, "cpu", weights_only=True)
            self._tokenizer = AutoTokenizer.from_pretrained(tokenizer_name)
        try:
            self._vision_encoder, self._text_encoder, self._linear_layers = _build_modules(state_dict)
        except (KeyError, RuntimeError, ValueError) as error:
            raise RewardError(f"{settings.model_path!r} is no checkpoint of ImageReward: {error!s:.300}") from error
        for module in (self._vision_encoder, self._text_encoder, self._linear_layers):
            module.to(device).eval()
        self._device, self._image_size = device, int(self._vision_encoder.config.image_size)

    def score(self, items: Sequence[RewardInput]) -> ScoreColumns:
        import torch

        pixel_values = np.stack([_preprocess_image(middle_image(item.media), self._image_size) for item in items])
        text_inputs = self._tokenizer(
            [item.prompt for item in items], padding="max_length", truncation=True, max_length=_MAX_TEXT_TOKENS,
            return_tensors="pt",
        ).to(self._device)  # fmt: skip
        with torch.inference_mode():
            features = self._vision_encoder(torch.from_numpy(pixel_values).to(self._device)).last_hidden_state
            text_hidden_states = self._text_encoder(
                input_ids=text_inputs["input_ids"], attention_mask=text_inputs["attention_mask"],
                encoder_hidden_states=features,
                encoder_attention_mask=torch.ones(features.shape[:2], dtype=torch.long, device=self._device),
            ).last_hidden_state  # fmt: skip
            rewards = (self._linear_layers(text_hidden_states[:, 0]).squeeze(-1) - _REWARD_MEAN) / _REWARD_STD
        return {"image_reward": rewards.float().tolist()}


def _build_modules(state_dict: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Return the image encoder, the text encoder and the linear layers of an ImageReward checkpoint. Their sizes are
    taken from its tensors."""
    import torch
    from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

    vision_state_dict, text_state_dict, linear_state_dict = (
        {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        for prefix in ("blip.visual_encoder.", "blip.text_encoder.", "mlp.")
    )
    patch_weight = vision_state_dict["patch_embed.proj.weight"]
    patches_per_side = round((vision_state_dict["pos_embed"].shape[1] - 1) ** 0.5)
    vision_hidden_size = patch_weight.shape[0]
    image_encoder = BlipVisionModel(
        BlipVisionConfig(
            hidden_size=vision_hidden_size, intermediate_size=len(vision_state_dict["blocks.0.mlp.fc1.weight"]),
            num_hidden_layers=_count_layers(vision_state_dict, r"blocks\.(\d+)"),
            num_attention_heads=vision_hidden_size // _HEAD_DIM,
            image_size=patches_per_side * patch_weight.shape[-1], patch_size=patch_weight.shape[-1], layer_norm_eps=1e-6
        )
    )  # fmt: skip
    image_encoder.load_state_dict({_convert_parameter_name(name): value for name, value in vision_state_dict.items()})
    vocab_size, hidden_size = text_state_dict["embeddings.word_embeddings.weight"].shape
    text_encoder = BlipTextModel(
        BlipTextConfig(
            vocab_size=vocab_size, hidden_size=hidden_size, encoder_hidden_size=vision_hidden_size,
            intermediate_size=len(text_state_dict["encoder.layer.0.intermediate.dense.weight"]),
            num_hidden_layers=_count_layers(text_state_dict, r"encoder\.layer\.(\d+)"),
            num_attention_heads=hidden_size // _HEAD_DIM,
            max_position_embeddings=len(text_state_dict["embeddings.position_embeddings.weight"]),
        ),
        add_pooling_layer=False,
    )  # fmt: skip
    text_encoder.load_state_dict({k: value for k, value in text_state_dict.items() if not k.endswith("position_ids")})
    linear_layers = []
    for number in sorted({int(name.split(".")[1]) for name in linear_state_dict}):
        weight, bias = linear_state_dict[f"layers.{number}.weight"], linear_state_dict[f"layers.{number}.bias"]
        linear_layers.append(torch.nn.Linear(weight.shape[1], weight.shape[0]))
        linear_layers[-1].load_state_dict({"weight": weight, "bias": bias})
    return image_encoder, text_encoder, torch.nn.Sequential(*linear_layers)


def _count_layers(state_dict: Mapping[str, Any], layer_pattern: str) -> int:
    return 1 + max(int(match[1]) for name in state_dict if (match := re.match(layer_pattern, name)))


def _convert_parameter_name(parameter_name: str) -> str:
    parameter_name = re.sub(r"^norm\.", "post_layernorm.", parameter_name)
    for old_name, new_name in _VISION_PARAMETER_NAMES.items():
        parameter_name = re.sub(rf"(^|\.){re.escape(old_name)}(?=\.|$)", rf"\g<1>{new_name}", parameter_name)
    return parameter_name


def _preprocess_image(image: Image.Image, image_size: int) -> np.ndarray:
    """Return an image as encoder input of shape C, H, W: the shorter side resized, the centre cropped, normalised."""
    resize_factor = image_size / min(image.size)
    width, height = (max(image_size, int(side_length * resize_factor)) for side_length in image.size)
    x, y = round((width - image_size) / 2), round((height - image_size) / 2)
    cropped_image = image.resize((width, height), Image.Resampling.BICUBIC).crop((x, y, x + image_size, y + image_size))
    pixel_values = np.asarray(cropped_image, np.float32) / 255
    return ((pixel_values - _PIXEL_MEAN) / _PIXEL_STD).transpose(2, 0, 1)
