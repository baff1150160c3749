"""The first look at rows, before a run begins: it accepts what `prepare` accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cosmos_core.data import quick_check
from cosmos_core.errors import DataError
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
    quick_check.run(stage_of(tmp_path / "sft", recipe({**settings, **named})))


@pytest.mark.parametrize(
    ("lines", "remedy"),
    [
        (
            [{"messages": SHOWN + CAT}, {"text": 3}],
            "more than dataset.max_skipped_fraction = 0.01 allows; mend them",
        ),
        ([{"Frage": "a", "Antwort": "b"}] * 8, "8 of the first 8 rows cannot be used, none of those read can be: this"),
    ],
)
def test_the_remedy_for_rows_of_which_none_can_be_used_is_not_to_allow_more(
    tmp_path: Path, lines: list[Any], remedy: str
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {**SFT, "train.train_policy.dataset.name": str(rows)}
    with pytest.raises(DataError) as caught:
        quick_check.run(stage_of(tmp_path / "sft", recipe(settings)))
    assert remedy in str(caught.value)
