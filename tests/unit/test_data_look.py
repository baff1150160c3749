"""The first look at rows, before a run begins: it accepts what `prepare` accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cosmos_core.data import look
from tests.effects.change import GRPO, SFT, recipe, stage_of

SHOWN = [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What is it?"}]}]
CAT, DOG = ([{"role": "assistant", "content": word}] for word in ("cat", "dog"))


@pytest.mark.parametrize(
    ("settings", "row"),
    [
        (SFT, {"messages": SHOWN + CAT}),
        (SFT | {"validation.reward_function": ["exact_match"]}, {"messages": SHOWN + CAT}),
        (SFT | {"train.train_policy.trainer_type": "dpo"}, {"prompt": SHOWN, "chosen": CAT, "rejected": DOG}),
        (GRPO, {"prompt": SHOWN, "answer": "cat"}),
        (GRPO, {"prompt": "<image>\nWhat is it?", "images": ["a.png"], "answer": "cat"}),
    ],
)
def test_rows_with_images_are_accepted_of_every_kind(tmp_path: Path, settings: dict[str, Any], row: Any) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row) + "\n")
    named = {"train.train_policy.dataset.name": str(rows), "validation.dataset.name": str(rows)}
    look.run(stage_of(tmp_path / "sft", recipe({**settings, **named})))
