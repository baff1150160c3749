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
    "reasoning_gym": ("42", ""),
    "single_choice": ("<answer>B</answer>", "B"),
}
"""Pairs of a correct completion and its reference, by the name of a text reward."""
_REASONING_GYM_ROW = {"reasoning_gym": {"generator": "chain_sum", "arguments": {}, "entry": "{'answer': '42'}"}}


async def self_test(config: ServiceConfig) -> int:
    """Load each reward of the service in turn, score test inputs with it, and print one line per reward; return the
    exit code."""
    num_failed_rewards = 0
    for reward_args in config.rewards:
        result_text = await _test_reward(reward_args.reward_type, Engine(config).process_settings(reward_args))
        num_failed_rewards += not result_text.startswith("works")
        sys.stdout.write(f"{reward_args.reward_type:16} {result_text}\n")
    return EXIT_USAGE if num_failed_rewards else EXIT_OK


async def _test_reward(reward_name: str, process_settings: ProcessSettings) -> str:
    result_future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

    async def receive_result(job: RewardJob, result: dict[str, Any], scoring_seconds: float) -> None:
        result_future.set_result({**result, "seconds": scoring_seconds})

    pool = RewardPool(process_settings, receive_result)
    try:
        await pool.loaded_future
        pool.submit(RewardJob(parse_request("self-test", _make_test_request(reward_name), {reward_name}), reward_name))
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


def _make_test_request(reward_name: str) -> bytes:
    """Return the body of a request with two items: a text, image or video that matches the prompt, and noise."""
    json_fields: dict[str, Any] = {"reward_fn": {reward_name: 1.0}}
    if reward_name in _TEXT_REWARD_SAMPLES:  # a reward of texts scores a correct and a wrong completion
        json_fields |= {"prompts": ["6 * 7 ="] * 2, "media_type": "text", "metadata": [_REASONING_GYM_ROW] * 2}
        json_fields |= _make_completion_fields(*_TEXT_REWARD_SAMPLES[reward_name])
        return encode_request(json_fields, np.zeros((2, 0), np.uint8))
    noise_image = np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)
    word_and_noise_images = np.stack([np.asarray(make_word_image("HELLO")), noise_image])
    json_fields |= {"prompts": [_TEST_PROMPT] * 2, "media_type": "image"}
    if reward_name in VIDEO_REWARDS:
        json_fields |= {"media_type": "video", "video_infos": [{"video_fps": 8.0}] * 2}
        return encode_request(json_fields, np.moveaxis(np.repeat(word_and_noise_images[:, None], 8, axis=1), -1, 1))
    if reward_name == "gen_eval":
        included_objects = [{"class": "book", "count": 1}]
        json_fields |= {"geneval_tags": ["single_object"] * 2, "geneval_includes": [included_objects] * 2}
    return encode_request(json_fields | _make_completion_fields("HELLO", "HELLO"), word_and_noise_images)


def _make_completion_fields(completion: str, reference: str) -> dict[str, Any]:
    """Return the request fields of a correct completion and a wrong one, for text rewards and user functions."""
    completions = [completion, "noise"]
    return {
        "completions": completions, "references": [reference] * 2,
        "num_tokens": [8, 2**20], "finish_reason": ["stop", "length"],
        "turns": [[{"role": "assistant", "content": text}] for text in completions],
    }  # fmt: skip


def make_word_image(word: str) -> Image.Image:
    """Return a white card with a word on it."""
    image = Image.new("RGB", (256, 256), "white")
    ImageDraw.Draw(image).text((32, 85), word, fill="black", font_size=51.2)
    return image
