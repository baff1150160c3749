"""Rewards for a service under test: what they do is said by the prompt of each item."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_core.rewards.reward_model import RewardInput, RewardModelSettings


def mean(to_be_evaluated: str, reference: str, prompt: str, media: Any) -> tuple[float, dict[str, float]]:
    """The mean of the pixels; `raise` raises."""
    if prompt == "raise":
        raise ValueError("nobody can score it")
    pixels = np.asarray(media, dtype=np.float64)
    return float(pixels.mean()), {"largest": float(pixels.max())}


class Counted:
    """Scores an item with the number in its prompt, and writes it to a file; `die`, `hang`, `nap` do so, and after
    `fault` the device is of no more use to the process."""

    def __init__(self, settings: RewardModelSettings) -> None:
        self._file = Path(settings.options["file"])
        self._seconds = settings.options.get("seconds", 0.0)
        self._has_fault = False
        if "load_seconds" in settings.options:
            self._file.touch()  # it loads
            time.sleep(settings.options["load_seconds"])

    def score(self, items: Sequence[RewardInput]) -> dict[str, list[float]]:
        prompts = [item.prompt for item in items]
        time.sleep(self._seconds * len(items))
        if "die" in prompts:
            os._exit(3)
        self._has_fault |= "fault" in prompts
        if self._has_fault:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if "hang" in prompts:
            time.sleep(60)
        if "nap" in prompts:
            time.sleep(0.5)
        with self._file.open("a") as file:
            file.write("".join(f"{prompt}\n" for prompt in prompts))
        return {"counted": [float(prompt) if prompt.isdigit() else -1.0 for prompt in prompts]}
