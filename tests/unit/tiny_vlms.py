"""Tiny random vision-language models with their processors, made without a download; images to show them.

Without torchvision transformers has no image processor for Llama 4: a stand-in makes one tile of an image, or two.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers.image_utils import make_flat_list_of_images

from tests.unit.tiny_families import FAMILIES
from tests.written_once import write_once

# A part or a string, as Qwen's, Gemma's and Llama's own; IMAGE stands for what the family writes for an image.
MIXED = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Parts alone, images before words, and a mark around what the assistant says, as that of LLaVA.
PARTS = (
    "{% for m in messages %}{{ m.role | upper }}: "
    "{% for part in m.content | selectattr('type', 'equalto', 'image') %}IMAGE\n{% endfor %}"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}"
    "{% if m.role == 'assistant' %}{% generation %}{{ part.text }}{% endgeneration %}"
    "{% else %}{{ part.text }} {% endif %}"
    "{% endfor %}{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_QWEN = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
_SPECIAL: dict[str, list[str]] = {
    "llava": ["<image>", "", "", ""],
    "llava-next": ["<image>", "", "", ""],
    "qwen2.5-vl": _QWEN,
    "qwen3-vl": _QWEN,
    "internvl": ["<IMG_CONTEXT>", "<video>", "<img>", "</img>"],
    "gemma3-vlm": ["<image_soft_token>", "", "<start_of_image>", "<end_of_image>"],
    "mllama": ["<|image|>", "", "", ""],
    "llama4": ["<|patch|>", "<|image|>", "<|image_start|>", "<|image_end|>"],
    "idefics3": ["<image>", "<global-img>", "<fake_token_around_image>", "<end_of_utterance>"],
}
"""Tokens 259 to 262: image, video, start and end of an image."""
VLMS = list(_SPECIAL)
_NAMED: dict[str, dict[str, int]] = {
    "internvl": {"context_image_token": 0, "video_token": 1, "start_image_token": 2, "end_image_token": 3},
    "gemma3-vlm": {"image_token": 0, "boi_token": 2, "eoi_token": 3},
}
"""Tokens that the processor asks the tokenizer for by name."""
_SHOWN = {
    "qwen2.5-vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3-vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3-vlm": "<start_of_image>",
    "llama4": "<|image|>",
}
_SIDE = {"height": 8, "width": 8}
_LLAVA = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
_PINPOINTS = [[8, 8], [8, 16], [16, 8]]
_SETTINGS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "llava": ("LlavaProcessor", _LLAVA, "LlavaImageProcessorPil", {"size": {"shortest_edge": 8}, "crop_size": _SIDE}),
    "llava-next": (
        "LlavaNextProcessor", _LLAVA, "LlavaNextImageProcessorPil",
        {"size": {"shortest_edge": 8}, "crop_size": _SIDE, "image_grid_pinpoints": _PINPOINTS},
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VLProcessor", {}, "Qwen2VLImageProcessorPil",
        {"size": {"shortest_edge": 28 * 28, "longest_edge": 4 * 56 * 28}},
    ),
    "qwen3-vl": (
        "Qwen3VLProcessor", {}, "Qwen2VLImageProcessorPil",
        {"size": {"shortest_edge": 32 * 32, "longest_edge": 4 * 64 * 32}, "patch_size": 16},
    ),
    "internvl": (
        "InternVLProcessor", {"image_seq_length": 1}, "GotOcr2ImageProcessorPil",
        {"size": _SIDE, "crop_to_patches": True, "min_patches": 1, "max_patches": 2},
    ),
    "gemma3-vlm": ("Gemma3Processor", {"image_seq_length": 4}, "Gemma3ImageProcessorPil", {"size": _SIDE}),
    "mllama": ("MllamaProcessor", {}, "MllamaImageProcessorPil", {"size": _SIDE, "max_image_tiles": 2}),
    "llama4": ("Llama4Processor", {"patch_size": 4}, "Tiles", {}),
    "idefics3": (
        "Idefics3Processor", {"image_seq_len": 1}, "Idefics3ImageProcessorPil",
        {"size": {"longest_edge": 16}, "max_image_size": {"longest_edge": 8}},
    ),
}  # fmt: skip
"""Class of the processor and its settings, class of the image processor and its settings."""


class Tiles(hf.BaseImageProcessor):
    """An image of Llama 4 as the whole of it and, where it is wide, its halves: tiles of 8 x 8."""

    model_input_names = ["pixel_values"]

    def __call__(self, images: Any, return_tensors: Any = None, **_: Any) -> hf.BatchFeature:
        tiles, ratios = [], []
        for image in make_flat_list_of_images(images):
            width, height = image.size
            is_wide = width > height
            halves = [image.crop((0, 0, width // 2, height)), image.crop((width // 2, 0, width, height))]
            tiles += [np.asarray(tile.resize((8, 8))) for tile in [*(halves if is_wide else []), image]]
            ratios.append([1, 2] if is_wide else [1, 1])
        pixels = torch.from_numpy(np.stack(tiles)).permute(0, 3, 1, 2).float() / 255 - 0.5
        return hf.BatchFeature({"pixel_values": pixels, "aspect_ratios": ratios})


hf.AutoImageProcessor.register(
    hf.Llama4Config, image_processor_classes={"pil": Tiles, "torchvision": Tiles}, exist_ok=True
)


def save_vlm(name: str, folder: Path, template: str = MIXED) -> Path:
    """Write model, tokenizer and processor of a family to `folder`."""
    return write_once(folder, _write, name, template)


def _write(folder: Path, name: str, template: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = (FAMILIES | _WITH_IMAGES)[name]()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    _tokenizer(name, template).save_pretrained(folder)
    processor, settings, images, image_settings = _SETTINGS[name]
    image_processor = Tiles() if images == "Tiles" else getattr(hf, images)(**image_settings)
    image_processor.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": processor, **settings}))


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    """A picture of noise, smooth enough to survive a resize."""
    pixels = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def _tokenizer(name: str, template: str) -> hf.PreTrainedTokenizerFast:
    special = [token or f"<|unused_{i}|>" for i, token in enumerate(_SPECIAL[name])]
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(sorted(ByteLevel.alphabet()))}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in [*_TOKENS, *special]])
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={key: special[place] for key, place in _NAMED.get(name, {}).items()},
        chat_template=template.replace("IMAGE", _SHOWN.get(name, special[0])),
    )


def _llava_next() -> hf.PreTrainedModel:
    model = FAMILIES["llava-next"]()
    model.config.image_grid_pinpoints = _PINPOINTS
    return model


def _mllama() -> hf.PreTrainedModel:
    config = FAMILIES["mllama"]().config
    config.vision_config.max_num_tiles = 2
    config.vision_config.supported_aspect_ratios = [[1, 1], [1, 2], [2, 1]]
    return hf.MllamaForConditionalGeneration(config)


def _llama4() -> hf.PreTrainedModel:
    config = FAMILIES["llama4"]().config
    config.vision_config.intermediate_size = 64  # four patches of 16 in one
    return hf.Llama4ForConditionalGeneration(config)


def _idefics3() -> hf.PreTrainedModel:
    own = {"num_attention_heads": 2, "intermediate_size": 32}
    text = {**own, "model_type": "llama", "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2}
    tower = {**own, "hidden_size": 16, "num_hidden_layers": 1, "image_size": 8, "patch_size": 4}
    config = hf.Idefics3Config(
        text_config={**text, "pad_token_id": 256},
        vision_config=tower,
        image_token_id=259,
        scale_factor=2,
        pad_token_id=256,
    )
    return hf.Idefics3ForConditionalGeneration(config)


_WITH_IMAGES = {"llava-next": _llava_next, "mllama": _mllama, "llama4": _llama4, "idefics3": _idefics3}
"""Those whose tiny model takes no image, or only one tile of it, or that is not among the families of text."""
