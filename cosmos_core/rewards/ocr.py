"""Reward for images that show the text in quotes in their prompt: 1 - edits / length.

The engine is PP-OCR in rapidocr-onnxruntime, which includes the models. As in Cosmos-RL, edits ignore spaces, case and
additional text, but the length includes spaces: a completely wrong text scores the fraction of spaces in the expected
text, 1 / 11 for "hello world" and 0 for one word.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from cosmos_core.rewards.images import to_frames
from cosmos_core.rewards.reward_model import RewardInput, RewardModelSettings, ScoreColumns, require_packages

_QUOTED_TEXT_PATTERN = re.compile(r'"([^"]+)"|“([^”]+)”')
_SINGLE_QUOTED_TEXT_PATTERN = re.compile(r"(?<!\w)'(.+?)'(?!\w)")
_MAX_FRAMES = 4


class OcrReward:
    """Reward model with the score `ocr_reward`, the fraction of the expected text that an image shows; for a video, the
    mean over four frames."""

    def __init__(self, settings: RewardModelSettings) -> None:
        _load_ocr_engine()

    def score(self, items: Sequence[RewardInput]) -> ScoreColumns:
        """Return the score of each item; an item without a reference and without a text in quotes in its prompt has no
        score."""
        self.errors = [""] * len(items)
        scores: list[float | None] = []
        for i, item in enumerate(items):
            try:
                scores.append(_score_item(item))
            except ValueError as error:
                self.errors[i] = str(error)
                scores.append(None)
        return {"ocr_reward": scores}


def ocr(to_be_evaluated: str, reference: str, *, prompt: str, media: Any) -> float:
    """Return the fraction of a text that the image shows; the text is the reference, else the prompt's quoted text."""
    _load_ocr_engine()
    return _score_item(RewardInput(prompt, media, reference=reference))


def text_similarity(recognised_text: str, expected_text: str) -> float:
    """Return 1 - edits / length of the expected text, which may be anywhere in the recognised text; never below 0."""
    ocr_text, target_text = _normalise_text(recognised_text), _normalise_text(expected_text)
    num_edits = 0 if target_text in ocr_text else min(_levenshtein_distance(ocr_text, target_text), len(target_text))
    return 1.0 - num_edits / max(1, len(expected_text))


def _score_item(item: RewardInput) -> float:
    quote_match = _QUOTED_TEXT_PATTERN.search(item.prompt) or _SINGLE_QUOTED_TEXT_PATTERN.search(item.prompt)
    expected_text = item.reference or next(filter(None, quote_match.groups() if quote_match else ()), "")
    if not expected_text:
        raise ValueError("the prompt has no text in quotes, and there is no reference: nothing to look for")
    scores = []
    for frame in to_frames(item.media, _MAX_FRAMES):
        recognised_lines, _ = _load_ocr_engine()(np.asarray(frame)[..., ::-1])  # the engine expects BGR instead of RGB
        recognised_text = "".join(text for _, text, confidence in recognised_lines or [] if float(confidence) > 0)
        scores.append(text_similarity(recognised_text, expected_text))
    return sum(scores) / len(scores)


@lru_cache(maxsize=1)
def _load_ocr_engine() -> Any:
    require_packages("ocr", "pip install 'cosmos-posttrain[ocr]' (see pyproject.toml)", "rapidocr_onnxruntime")
    from rapidocr_onnxruntime import RapidOCR

    return RapidOCR(intra_op_num_threads=1, inter_op_num_threads=1)


def _normalise_text(text: str) -> str:
    return "".join(text.split()).lower()


def _levenshtein_distance(first_text: str, second_text: str) -> int:
    edit_distances = list(range(len(second_text) + 1))
    for i, a in enumerate(first_text, 1):
        diagonal, edit_distances[0] = edit_distances[0], i
        for j, b in enumerate(second_text, 1):
            substitution_distance, diagonal = diagonal + (a != b), edit_distances[j]
            edit_distances[j] = min(edit_distances[j] + 1, edit_distances[j - 1] + 1, substitution_distance)
    return edit_distances[-1]
