"""Whether an image shows the text that its prompt has in quotes: 1 - edits / length.

The engine is PP-OCR by rapidocr-onnxruntime, whose models are in the package. As in Cosmos-RL blanks and case do not
count for edits, text around the wanted one costs nothing, and the length is that with blanks: where nothing of the text
is right the score is the share of blanks in it, 1 / 11 for "hello world" and 0 for one word.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from cosmos_core.rewards.images import array_of, frames_of
from cosmos_core.rewards.served import Columns, Item, Settings, require

_QUOTED = re.compile(r'"([^"]+)"|“([^”]+)”')
_SINGLE_QUOTED = re.compile(r"(?<!\w)'(.+?)'(?!\w)")
_MOST_FRAMES = 4


class OcrReward:
    """Key `ocr_reward`; of a video the mean over four frames."""

    def __init__(self, settings: Settings) -> None:
        require("ocr", "pip install 'cosmos-posttrain[ocr]' (see pyproject.toml)", "rapidocr_onnxruntime")
        _engine()

    def score(self, items: Sequence[Item]) -> Columns:
        """Return the score of each item; one without a text to look for has none."""
        self.errors = [""] * len(items)
        found: list[float | None] = []
        for i, item in enumerate(items):
            try:
                found.append(_score(item))
            except ValueError as error:
                self.errors[i] = str(error)
                found.append(None)
        return {"ocr_reward": found}


def ocr(to_be_evaluated: str, reference: str, *, prompt: str, media: Any) -> float:
    """Return how much of the text that the reference is, or else the prompt has in quotes, the image shows."""
    require("ocr", "pip install 'cosmos-posttrain[ocr]' (see pyproject.toml)", "rapidocr_onnxruntime")
    return _score(Item(prompt, media, reference=reference))


def similarity(read: str, wanted: str) -> float:
    """Return 1 - edits / length of the wanted text, which may be anywhere in what was read; never below 0."""
    there, text = _plain(read), _plain(wanted)
    edits = 0 if text in there else min(_distance(there, text), len(text))
    return 1.0 - edits / max(1, len(wanted))


def _score(item: Item) -> float:
    quoted = _QUOTED.search(item.prompt) or _SINGLE_QUOTED.search(item.prompt)
    wanted = item.reference or next(filter(None, quoted.groups() if quoted else ()), "")
    if not wanted:
        raise ValueError("the prompt has no text in quotes, and there is no reference: nothing to look for")
    scores = [similarity(_read(image), wanted) for image in frames_of(item.media, _MOST_FRAMES)]
    return sum(scores) / len(scores)


def _read(image: Any) -> str:
    lines, _ = _engine()(array_of(image)[..., ::-1])  # BGR, as OpenCV has it
    return "".join(text for _, text, confidence in lines or [] if float(confidence) > 0)


@lru_cache(maxsize=1)
def _engine() -> Any:
    from rapidocr_onnxruntime import RapidOCR

    return RapidOCR(intra_op_num_threads=1, inter_op_num_threads=1)


def _plain(text: str) -> str:
    return "".join(text.split()).lower()


def _distance(one: str, other: str) -> int:
    """Return the Levenshtein distance."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        last, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (a != b))
    return row[-1]
