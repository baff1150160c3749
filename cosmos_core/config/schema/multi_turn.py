"""`[rollout.multi_turn_config]` and `[rollout.async_config]`: conversations, tools and requests in flight."""

from __future__ import annotations

from typing import Annotated

from pydantic import ValidationInfo, field_validator

from cosmos_core.config.schema.table import LATER, PositiveInt, Table, Unit, planned, say

_TURNS = planned("multi-turn rollouts and tools are not in this version; leave it out")


class MultiTurnRolloutConfig(Table):
    """`[rollout.multi_turn_config]`"""

    switch = "enable"

    enable: Annotated[bool, _TURNS, LATER] = False
    """More than one assistant turn."""
    enable_tools: Annotated[bool, _TURNS, LATER] = False
    """Tool calls, parsed as Hermes writes them."""
    enable_thinking: Annotated[bool, _TURNS, LATER] = False
    """Flag of the chat template."""
    custom_chat_template_path: Annotated[str | None, _TURNS, LATER] = None
    """Jinja file; None: the tokenizer's own template."""
    max_assistant_turns: Annotated[PositiveInt, Unit("turns"), _TURNS, LATER] = 5
    """Most turns of one conversation."""
    add_generation_prompt: Annotated[bool, _TURNS, LATER] = True
    """Flag of the chat template."""
    continue_final_message: Annotated[bool, _TURNS, LATER] = False
    """Flag of the chat template; off with tools and a generation prompt."""

    @field_validator("continue_final_message")
    @classmethod
    def _tools_end_messages(cls, goes_on: bool, info: ValidationInfo) -> bool:
        if not (goes_on and info.data.get("enable_tools") and info.data.get("add_generation_prompt")):
            return goes_on
        say(info, "rollout.multi_turn_config.continue_final_message: false, because enable_tools and "
            "add_generation_prompt are set")  # fmt: skip
        return False


class RolloutAsyncConfig(Table):
    """`[rollout.async_config]`: read with `rollout.mode = "async"`."""

    max_concurrent_requests: Annotated[
        PositiveInt, Unit("requests"), planned("asynchronous rollouts are not in this version; leave it out"), LATER
    ] = 10
    """Most requests in flight."""
