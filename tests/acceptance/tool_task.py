"""A task that is solved by asking: sums of two-digit numbers for a policy that cannot add, and a tool that can.

The entry of a custom stage, `tool_task.py:make`, and the tool itself. Nothing of the tests is imported, because the
processes of a stage and of a tool read this file.
"""

from __future__ import annotations

import json
from pathlib import Path

from configs.demo import arithmetic
from cosmos_core.data.order import shuffled_indices
from cosmos_core.run.files import replace_folder
from cosmos_core.run.stage import Stage
from cosmos_core.tools.base import tool
from cosmos_core.types import Outcome

_BEGIN, _MIDDLE, _END = '{"name": "add", "arguments": {"a": ', ', "b": ', "}}"
_PIECES = ("<tool_call>", "</tool_call>", _BEGIN, _MIDDLE, _END, "tool")
"""One token each, which makes a call ten tokens long."""


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def make(stage: Stage, *, asking: float, train_rows: int = 6000, heldout_rows: int = 200) -> Outcome:
    """Write a random model and rows; in the share `asking` of the rows the assistant asks the tool, and guesses a wrong
    number in the others."""
    tokenizer = arithmetic.make_tokenizer()
    tokenizer.add_tokens(list(_PIECES))
    with replace_folder(stage.path / "model") as folder:
        tokenizer.save_pretrained(folder)
        arithmetic.make_model(tokenizer, hidden_size=128, layers=2, seed=0).save_pretrained(folder)
    numbers = shuffled_indices(90 * 90, 0).tolist()
    with replace_folder(stage.path / "data") as folder:
        _write(folder / "validation.jsonl", numbers[:heldout_rows], asking)
        _write(folder / "train.jsonl", numbers[heldout_rows : heldout_rows + train_rows], asking)
    return Outcome(outputs=("model", "data"), info={"model": "model", "data": "data"})


def _write(path: Path, numbers: list[int], asking: float) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for position, number in enumerate(numbers):
            a, b = 10 + number // 90, 10 + number % 90
            row = {
                "question": f"{a}+{b}=",
                "answer": str(a + b),
                "messages": _turns(a, b, is_asking=position % 100 < 100 * asking),
            }
            file.write(json.dumps(row) + "\n")


def _turns(a: int, b: int, is_asking: bool) -> list[dict[str, str]]:
    asked = {"role": "user", "content": f"{a}+{b}="}
    if not is_asking:
        return [asked, {"role": "assistant", "content": str(20 + (37 * a + 53 * b) % 170)}]
    call = f"<tool_call>{_BEGIN}{a}{_MIDDLE}{b}{_END}</tool_call>"
    return [
        asked,
        {"role": "assistant", "content": call},
        {"role": "tool", "content": str(a + b)},
        {"role": "assistant", "content": str(a + b)},
    ]
