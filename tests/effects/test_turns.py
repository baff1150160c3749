"""Keys of conversations: which turns a completion has, and what tools say in between."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.rollout.base import EngineSettings, completion, generate
from cosmos_core.rollout.registry import make_engine
from cosmos_core.types import Group, Prompt, Sampling
from tests.effects.change import GRPO, Change, changes
from tests.unit.data_tokenizers import CHATML, byte_tokenizer

TOOLS = '''
import os, time
from cosmos_core.tools.base import tool

@tool
def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: The first.
        b: The second.
    """
    return a + b

@tool
def slow() -> str:
    """Take a while."""
    time.sleep(1)
    return "done"

@tool
def variable() -> str:
    """Say what a variable is."""
    return os.environ.get("VARIABLE", "not there")
'''
CALLS = {
    "add": '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>',
    "slow": '<tool_call>{"name": "slow"}</tool_call>',
    "variable": '<tool_call>{"name": "variable"}</tool_call>',
}
KEY = "rollout.multi_turn_config"


class Asks:
    """An engine that calls the tool of `custom.call` in its first two turns."""

    name, weight_format, ranks_per_engine = "asks", "shared", 1

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._waiting: list[Group] = []

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> None:
        tokenizer = self._settings.tokenizer
        for prompt in prompts:
            is_last = str(tokenizer.decode(list(prompt.token_ids))).count("<|im_start|>tool") > 1
            text = ("Done." if is_last else CALLS[self._settings.custom["call"]]) + "<|im_end|>"
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            said = completion(tokenizer, ids, [-1.0] * len(ids), version=0, ends_with_stop=True)
            self._waiting.append(Group(prompt, (said,), step))

    def completed(self) -> list[Group]:
        done, self._waiting = self._waiting, []
        return done

    def close(self) -> None:
        pass


def said(recipe: Recipe, folder: Path) -> list[str]:
    """The turns of a completion."""
    tokenizer = byte_tokenizer(CHATML)
    model: Any = torch.nn.Module()
    model.config = model.generation_config = model
    model.eos_token_id, model.get_text_config = None, lambda: model
    settings = EngineSettings(
        model, tokenizer, str(folder), recipe.rollout, 10_000, torch.float32, custom=recipe.custom
    )
    engine = make_engine(settings)
    prompt = Prompt(0, tuple(tokenizer("1 and 1?")["input_ids"]), "", "")
    [group] = generate(engine, [prompt], Sampling(max_tokens=5000), 0)
    engine.close()
    return [turn.text for turn in group.completions[0].turns]


@pytest.fixture(autouse=True)
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tools.py").write_text(TOOLS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VARIABLE", "seen")


def calling(name: str, **more: Any) -> dict[str, Any]:
    settings = {"enable": True, "enable_tools": True, "tools": [f"./tools.py:{name}"], **more}
    keys = {f"{KEY}.{key}": value for key, value in settings.items() if value is not None}
    return {**GRPO, "rollout.backend": f"{__file__}:Asks", "custom.call": name, **keys}


def turns(name: str, told: str) -> list[str]:
    return [CALLS[name], told, CALLS[name], told, "Done."]


@changes(
    (Change(f"{KEY}.enable", True, calling("add", enable=None)), ([], turns("add", "2"))),
    (Change(f"{KEY}.enable_tools", True, calling("add", enable_tools=None)), ([CALLS["add"]], turns("add", "2"))),
    (
        Change(f"{KEY}.tools", ["./tools.py:add"], calling("add", tools=None)),
        (turns("add", "Error: there is no tool 'add'; there are: none"), turns("add", "2")),
    ),
    (
        Change(f"{KEY}.tool_env", ["VARIABLE"], calling("variable")),
        (turns("variable", "not there"), turns("variable", "seen")),
    ),
    full=(
        (
            Change(f"{KEY}.tool_timeout_seconds", 0.2, calling("slow")),
            (turns("slow", "done"), turns("slow", "Error: not done in 0.2 s")),
        ),
        (Change(f"{KEY}.max_assistant_turns", 2, calling("add")), (turns("add", "2"), turns("add", "2")[:3])),
    ),
)
def test_it_changes_the_turns_of_a_completion(
    change: Change, expected: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    assert (said(change.before, tmp_path), said(change.after, tmp_path)) == expected
