"""`cosmos reward-service --self-test`: load each reward in its own interpreter and score test inputs."""

import asyncio
import math
import sys
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from cosmos_core.errors import EXIT_OK, EXIT_USAGE
from cosmos_core.rewards.protocol import encode_request
from cosmos_core.rewards.service.config import VIDEO_REWARDS, ServiceConfig
from cosmos_core.rewards.service.engine import Engine
from cosmos_core.rewards.service.pool import ProcessError, ProcessSettings, RewardJob, RewardPool
from cosmos_core.rewards.service.request import parse_request

_TEST_PROMPT = 'a white card with the word "HELLO" on it'
_TEXT_REWARD_SAMPLES = {
    "boxed_math": (r"\boxed{42}", "42"),
    "direct_math": ("Answer: 42", "42"),
    "exact_match": ("42", "42"),
    "format": ("<think>six sevens</think>\n\n<answer>42</answer>", "42"),
    "gsm8k": ("#### 42", "#### 42"),
    "overlong": ("42", "42"),
    "single_choice": ("<answer>B</answer>", "B"),
}
"""Pairs of a correct completion and its reference, by the name of a text reward."""


async def self_test(config: ServiceConfig) -> int:
    """Load each reward in turn, score test inputs with it, and print one line; return the exit code."""
    num_failed_rewards = 0
    for reward in config.rewards:
        result_text = await _test_reward(reward.reward_type, Engine(config).process_settings(reward))
        num_failed_rewards += not result_text.startswith("works")
        sys.stdout.write(f"{reward.reward_type:16} {result_text}\n")
    return EXIT_USAGE if num_failed_rewards else EXIT_OK


async def _test_reward(name: str, settings: ProcessSettings) -> str:
    result_future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    async def set_result(job: RewardJob, result: dict[str, Any], seconds: float) -> None:
        result_future.set_result({**result, "seconds": seconds})

    pool = RewardPool(settings, set_result)
    try:
        await pool.loaded
        pool.submit(RewardJob(parse_request("self-test", _make_test_request(name), {name}), name))
        return _describe_result(await result_future)
    except ProcessError as error:
        return f"cannot be loaded: {error}"
    finally:
        await pool.close()


def _describe_result(result: dict[str, Any]) -> str:
    if result.get("error") or any(result.get("errors", [])):
        return f"fails: {result.get('error') or next(filter(None, result['errors']))}"
    score_texts = [
        f"{key} {', '.join(f'{value:.4f}' for value in values)}"
        for key, values in result["scores"].items()
        if isinstance(values, list) and all(isinstance(score, int | float) and math.isfinite(score) for score in values)
    ]
    if not score_texts:
        return "fails: it gives no number"
    return f"works in {result['seconds']:.2f} s: {'; '.join(score_texts)} (what was asked for, noise)"


def _make_test_request(name: str) -> bytes:
    """Return the body of a request with two items: a text, image or video that matches the prompt, and noise."""
    fields: dict[str, Any] = {"reward_fn": {name: 1.0}}
    if name in _TEXT_REWARD_SAMPLES:  # a correct and a wrong completion
        completion, reference = _TEXT_REWARD_SAMPLES[name]
        completions = [completion, "noise"]
        fields |= {
            "prompts": ["6 * 7 ="] * 2, "media_type": "text", "completions": completions, "references": [reference] * 2,
            "num_tokens": [8, 2**20], "finish_reason": ["stop", "length"],
            "turns": [[{"role": "assistant", "content": text}] for text in completions],
        }  # fmt: skip
        return encode_request(fields, np.zeros((2, 0), np.uint8))
    noise = np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)
    images = np.stack([np.asarray(make_word_image("HELLO")), noise])
    fields |= {"prompts": [_TEST_PROMPT] * 2, "media_type": "image"}
    if name in VIDEO_REWARDS:
        fields |= {"media_type": "video", "video_infos": [{"video_fps": 8.0}] * 2}
        return encode_request(fields, np.moveaxis(np.repeat(images[:, None], 8, axis=1), -1, 1))
    if name == "gen_eval":
        included_objects = [{"class": "book", "count": 1}]
        fields |= {"geneval_tags": ["single_object"] * 2, "geneval_includes": [included_objects] * 2}
    fields |= {"references": ["HELLO"] * 2, "completions": ["HELLO", "noise"]}
    return encode_request(fields, images)


def make_word_image(word: str) -> Image.Image:
    """Return a white card with a word on it."""
    image = Image.new("RGB", (256, 256), "white")
    ImageDraw.Draw(image).text((32, 85), word, fill="black", font_size=51.2)
    return image
