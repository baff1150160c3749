"""Physical plausibility of a video by Cosmos-Reason1-7B-Reward, a Qwen2.5-VL that is prompted to find artifacts.

The score is the probability of "No" against "Yes". The model was tuned with the system prompt in its model card: set
`options.system_prompt` to that text or to a file with it; the default is a paraphrase. This module turns frames into
patches itself, so that neither a video processor nor torchvision is needed.
"""

import inspect
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from cosmos_core.rewards.clip_model import device_of, translate_loading_errors
from cosmos_core.rewards.images import to_frames
from cosmos_core.rewards.reward_model import Columns, Item, Settings, require_packages

_MODEL = "nvidia/Cosmos-Reason1-7B-Reward"
_SYSTEM = (
    "You analyse videos for things that cannot be: gravity, collisions, fluids, cause and effect, objects that appear, "
    "vanish or change, bodies that move as no body can. Style, sound, light and blur do not count. Begin with a single "
    'word: "Yes" or "No".'
)
_JUDGE_QUESTION = "Does the video contain any anomalies or artifacts?"
_MAX_FRAMES = 160
_TOKENS = 9216
_FPS = 16.0
_PAD = "<|video_pad|>"
_VIDEO_TOKEN_TYPE = 2
"""Value of `mm_token_type_ids` for tokens that are placeholders of video patches."""
log = logging.getLogger(__name__)


class CosmosReason1Reward:
    """Reward with the keys `no_score`, `prediction` (Good or Bad), `yes_logit` and `no_logit`; `options` has
    `system_prompt`, `question` and `tokens`, the maximum number of tokens of a video (9216)."""

    def __init__(self, settings: Settings) -> None:
        require_packages("cosmos_reason1", "install torch and transformers", "torch", "transformers")
        import torch
        from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

        path = settings.model_path or _MODEL
        device = torch.device(device_of(settings))
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        with translate_loading_errors("cosmos_reason1", path):
            model: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=dtype)
            self._model = model.to(device).eval()
            self._tokenizer = AutoTokenizer.from_pretrained(path)
            images: Any = AutoImageProcessor.from_pretrained(path)
        self._mean, self._std = (
            np.array(each, np.float32)[:, None, None] for each in (images.image_mean, images.image_std)
        )
        if system_prompt := settings.options.get("system_prompt", ""):
            self._system = _text(system_prompt)
        else:
            self._system = _SYSTEM
            log.warning("options.system_prompt is empty: the model is asked in other words than those of its card")
        self._question = settings.options.get("question", _JUDGE_QUESTION)
        self._tokens = int(settings.options.get("tokens", _TOKENS))
        self._yes_token, self._no_token = (
            self._tokenizer.encode(word, add_special_tokens=False)[0] for word in ("Yes", "No")
        )

    def score(self, items: Sequence[Item]) -> Columns:
        """Return the scores of each video; an image counts as a video of one frame."""
        columns: Columns = {"prediction": [], "no_score": [], "yes_logit": [], "no_logit": []}
        for item in items:
            yes, no_logit = self._logits(to_frames(item.media), float(item.info.get("video_fps") or _FPS))
            columns["prediction"].append("Bad" if yes > no_logit else "Good")
            columns["no_score"].append(1 / (1 + math.exp(min(yes - no_logit, 700.0))))
            columns["yes_logit"].append(yes)
            columns["no_logit"].append(no_logit)
        return columns

    def _logits(self, frames: Sequence[Image.Image], fps: float) -> tuple[float, float]:
        import torch

        interval = max(1, (len(frames) - 1) // _MAX_FRAMES + 1)
        chosen = frames[::interval]
        vision = self._model.config.vision_config
        patches, grid = self.patches(chosen)
        count = math.prod(grid) // vision.spatial_merge_size**2
        ids = self._tokenizer(self._prompt().replace(_PAD, _PAD * count), return_tensors="pt")["input_ids"]
        pad = self._tokenizer.convert_tokens_to_ids(_PAD)
        inputs: dict[str, Any] = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "pixel_values_videos": torch.from_numpy(patches).to(self._model.dtype),
            "video_grid_thw": torch.tensor([grid]),
            "second_per_grid_ts": torch.tensor([vision.temporal_patch_size * interval / fps]),
            "mm_token_type_ids": (ids == pad).int() * _VIDEO_TOKEN_TYPE,
        }
        parameters = inspect.signature(self._model.forward).parameters
        inputs = {name: value.to(self._model.device) for name, value in inputs.items() if name in parameters}
        with torch.inference_mode():
            logits = self._model(**inputs).logits[0, -1].float()
        return float(logits[self._yes_token]), float(logits[self._no_token])

    def _prompt(self) -> str:
        placeholder = f"<|vision_start|>{_PAD}<|vision_end|>"
        messages = [
            {"role": "system", "content": self._system},
            {"role": "user", "content": f"{placeholder}{self._question}"},
        ]
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def patches(self, frames: Sequence[Image.Image]) -> tuple[np.ndarray, tuple[int, int, int]]:
        """Return the patches of a video in the layout of Qwen2.5-VL, and their number along time, height and width."""
        vision = self._model.config.vision_config
        size, merge, depth = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size
        frames = list(frames[: len(frames) // depth * depth] or [frames[0]] * depth)
        max_pixels = self._tokens * (size * merge) ** 2 * depth // len(frames)
        height, width = fit_size(frames[0].size[::-1], size * merge, max_pixels)
        pixels = np.stack([
            np.asarray(frame.resize((width, height), Image.Resampling.BICUBIC), np.float32).transpose(2, 0, 1) / 255
            for frame in frames
        ])  # fmt: skip
        pixels = (pixels - self._mean) / self._std
        grid = (len(frames) // depth, height // size, width // size)
        patches = pixels.reshape(
            grid[0], depth, 3, grid[1] // merge, merge, size, grid[2] // merge, merge, size
        ).transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
        return patches.reshape(math.prod(grid), 3 * depth * size * size), grid


def fit_size(size: tuple[int, int], factor: int, max_pixels: int) -> tuple[int, int]:
    """Return the height and width nearest to a size that are multiples of a factor and have at most `max_pixels`
    pixels."""
    height, width = (max(factor, round(length / factor) * factor) for length in size)
    if height * width > max_pixels:
        shrink = math.sqrt(size[0] * size[1] / max_pixels)
        height, width = (max(factor, math.floor(length / shrink / factor) * factor) for length in size)
    return height, width


def _text(explicit_prompt: str) -> str:
    is_file = len(explicit_prompt) < 1000 and "\n" not in explicit_prompt and Path(explicit_prompt).is_file()
    return Path(explicit_prompt).read_text(encoding="utf-8").strip() if is_file else explicit_prompt
