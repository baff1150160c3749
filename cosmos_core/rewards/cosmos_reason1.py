"""Physical plausibility of a video by Cosmos-Reason1-7B-Reward, a Qwen2.5-VL that is prompted to find artifacts.

The score is the probability of "No" against "Yes". The model was tuned with the system prompt in its model card: set
`options.system_prompt` to that text or to a file with it; the default is a paraphrase. This module turns frames into
patches itself, so that neither a video processor nor torchvision is needed.
"""

import inspect
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from cosmos_core.rewards.clip_model import select_device, translate_loading_errors
from cosmos_core.rewards.images import DEFAULT_FPS, to_frames
from cosmos_core.rewards.reward_model import RewardInput, RewardModelSettings, ScoreColumns, require_packages

_DEFAULT_MODEL = "nvidia/Cosmos-Reason1-7B-Reward"
_DEFAULT_SYSTEM_PROMPT = (
    "You analyse videos for things that cannot be: gravity, collisions, fluids, cause and effect, objects that appear, "
    "vanish or change, bodies that move as no body can. Style, sound, light and blur do not count. Begin with a single "
    'word: "Yes" or "No".'
)
_JUDGE_QUESTION = "Does the video contain any anomalies or artifacts?"
_MAX_FRAMES = 160
_MAX_VIDEO_TOKENS = 9216
_VIDEO_PAD_TOKEN = "<|video_pad|>"
_VIDEO_TOKEN_TYPE = 2
"""Value of Qwen2.5-VL's `mm_token_type_ids` for tokens that are placeholders of video patches."""
logger = logging.getLogger(__name__)


class CosmosReason1Reward:
    """Reward model that asks Cosmos-Reason1 whether a video has artifacts. The scores are `no_score` (probability of
    the reply "No"), `prediction` (Good or Bad), `yes_logit` and `no_logit`. `options` has `system_prompt`, `question`
    and `tokens`, the maximum number of tokens of a video."""

    def __init__(self, settings: RewardModelSettings) -> None:
        require_packages("cosmos_reason1", "install torch and transformers", "torch", "transformers")
        import torch
        from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

        model_path = settings.model_path or _DEFAULT_MODEL
        device = torch.device(select_device(settings))
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        with translate_loading_errors("cosmos_reason1", model_path):
            model: Any = AutoModelForImageTextToText.from_pretrained(model_path, dtype=dtype)
            self._model = model.to(device).eval()
            self._tokenizer = AutoTokenizer.from_pretrained(model_path)
            image_processor: Any = AutoImageProcessor.from_pretrained(model_path)
        self._pixel_mean = np.array(image_processor.image_mean, np.float32)[:, None, None]
        self._pixel_std = np.array(image_processor.image_std, np.float32)[:, None, None]
        self._system_prompt = settings.options.get("system_prompt") or _DEFAULT_SYSTEM_PROMPT
        if self._system_prompt is _DEFAULT_SYSTEM_PROMPT:
            logger.warning("options.system_prompt is empty: the model is asked in other words than those of its card")
        elif os.path.isfile(self._system_prompt):
            self._system_prompt = Path(self._system_prompt).read_text(encoding="utf-8").strip()
        self._judge_question = settings.options.get("question", _JUDGE_QUESTION)
        self._max_video_tokens = int(settings.options.get("tokens", _MAX_VIDEO_TOKENS))
        self._yes_token_id = self._tokenizer.encode("Yes", add_special_tokens=False)[0]
        self._no_token_id = self._tokenizer.encode("No", add_special_tokens=False)[0]

    def score(self, items: Sequence[RewardInput]) -> ScoreColumns:
        """Return the scores of each video; an image counts as a video of one frame."""
        score_columns: ScoreColumns = {"prediction": [], "no_score": [], "yes_logit": [], "no_logit": []}
        for item in items:
            fps = float(item.info.get("video_fps") or DEFAULT_FPS)
            yes_logit, no_logit = self._compute_logits(to_frames(item.media), fps)
            score_columns["prediction"].append("Bad" if yes_logit > no_logit else "Good")
            score_columns["no_score"].append(1 / (1 + math.exp(min(yes_logit - no_logit, 700.0))))
            score_columns["yes_logit"].append(yes_logit)
            score_columns["no_logit"].append(no_logit)
        return score_columns

    def _compute_logits(self, frames: Sequence[Image.Image], fps: float) -> tuple[float, float]:
        import torch

        frame_interval = max(1, (len(frames) - 1) // _MAX_FRAMES + 1)
        sampled_frames = frames[::frame_interval]
        vision_config = self._model.config.vision_config
        patches, patch_grid = self.extract_patches(sampled_frames)
        num_video_tokens = math.prod(patch_grid) // vision_config.spatial_merge_size**2
        video_placeholder = f"<|vision_start|>{_VIDEO_PAD_TOKEN * num_video_tokens}<|vision_end|>"
        chat_messages = [
            {"role": "system", "content": self._system_prompt},
            {"role": "user", "content": f"{video_placeholder}{self._judge_question}"},
        ]
        prompt = str(self._tokenizer.apply_chat_template(chat_messages, tokenize=False, add_generation_prompt=True))
        input_ids = self._tokenizer(prompt, return_tensors="pt")["input_ids"]
        video_token_id = self._tokenizer.convert_tokens_to_ids(_VIDEO_PAD_TOKEN)
        model_inputs: dict[str, Any] = {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "pixel_values_videos": torch.from_numpy(patches).to(self._model.dtype),
            "video_grid_thw": torch.tensor([patch_grid]),
            "second_per_grid_ts": torch.tensor([vision_config.temporal_patch_size * frame_interval / fps]),
            "mm_token_type_ids": (input_ids == video_token_id).int() * _VIDEO_TOKEN_TYPE,
        }
        forward_parameters = inspect.signature(self._model.forward).parameters
        model_inputs = {k: v.to(self._model.device) for k, v in model_inputs.items() if k in forward_parameters}
        with torch.inference_mode():
            logits = self._model(**model_inputs).logits[0, -1].float()
        return float(logits[self._yes_token_id]), float(logits[self._no_token_id])

    def extract_patches(self, frames: Sequence[Image.Image]) -> tuple[np.ndarray, tuple[int, int, int]]:
        """Return the patches of a video in the layout of Qwen2.5-VL, and their number per axis: time, height, width."""
        config = self._model.config.vision_config
        patch_size, merge_size, patch_frames = config.patch_size, config.spatial_merge_size, config.temporal_patch_size
        frames = frames[: len(frames) // patch_frames * patch_frames] or [frames[0]] * patch_frames
        max_pixels = self._max_video_tokens * (patch_size * merge_size) ** 2 * patch_frames // len(frames)
        height, width = fit_frame_size(frames[0].size[::-1], patch_size * merge_size, max_pixels)
        pixel_values = np.stack([
            np.asarray(frame.resize((width, height), Image.Resampling.BICUBIC), np.float32).transpose(2, 0, 1) / 255
            for frame in frames
        ])  # fmt: skip
        pixel_values = (pixel_values - self._pixel_mean) / self._pixel_std
        patch_grid = (len(frames) // patch_frames, height // patch_size, width // patch_size)
        patches = pixel_values.reshape(
            patch_grid[0], patch_frames, 3,
            patch_grid[1] // merge_size, merge_size, patch_size,
            patch_grid[2] // merge_size, merge_size, patch_size,
        ).transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)  # fmt: skip
        return patches.reshape(math.prod(patch_grid), 3 * patch_frames * patch_size * patch_size), patch_grid


def fit_frame_size(original_size: tuple[int, int], divisor: int, max_pixels: int) -> tuple[int, int]:
    """Return the height and width nearest to `original_size` that are multiples of `divisor`, with at most `max_pixels`
    pixels in total."""
    height, width = (max(divisor, round(side / divisor) * divisor) for side in original_size)
    if height * width > max_pixels:
        scale_factor = math.sqrt(original_size[0] * original_size[1] / max_pixels)
        height, width = (max(divisor, math.floor(side / scale_factor / divisor) * divisor) for side in original_size)
    return height, width
