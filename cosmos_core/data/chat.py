"""Rendering of prompts and tool results with a chat template, its flags and the descriptions of the tools.

`rollout/turns.py` joins sampled turns and the tool text that follows each of them.
"""

import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from cosmos_core.config.schema.multi_turn import MultiTurnRolloutConfig
from cosmos_core.data.messages import Message
from cosmos_core.data.spans import common_prefix_length
from cosmos_core.data.template_limits import limit_resources
from cosmos_core.data.tool_calls import encode_arguments
from cosmos_core.errors import DataError, ModelError
from cosmos_core.models.chat_templates import check_template_text
from cosmos_core.tools.base import ToolCall, ToolResult, parse_tool_calls
from cosmos_core.tools.runner import ToolRunner

_CONFIG_TABLE = "rollout.multi_turn_config"
_EXAMPLE_USER_TURN = {"role": "user", "content": "?"}
_EXAMPLE_TOOL_RESULTS = ("forty-two", "fifty-one")
_ASSISTANT_TURN_VARIANTS: tuple[Message, ...] = (
    {"role": "assistant", "content": ""},
    # Qwen3's template adds an empty think block to the last turn, unless the turn has `reasoning_content`.
    {"role": "assistant", "content": "", "reasoning_content": "."},
    {"role": "assistant", "content": "."},
)
"""Example assistant turns, one of which is used to find the text that a chat template writes around tool results: the
first whose rendering does not change if a tool result follows."""


@dataclass(frozen=True)
class PromptRendering:
    """Settings that determine how a conversation is rendered as the prompt of a completion."""

    tools: tuple[dict[str, Any], ...] = ()
    """Descriptions of the callable tools, which are passed to the chat template."""
    template: str | None = None
    """Chat template in Jinja; None: the template of the tokenizer."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    enable_thinking: bool | None = None
    """Value of the flag `enable_thinking` that is passed to the chat template; None: the flag is not passed."""

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Return the arguments of `apply_chat_template` other than messages, tools and the generation prompt."""
        template_arguments = {
            "chat_template": self.template,
            "continue_final_message": self.continue_final_message or None,
            "enable_thinking": self.enable_thinking,
        }
        return {name: value for name, value in template_arguments.items() if value is not None}


DEFAULT_RENDERING = PromptRendering()
"""Settings for rendering prompts with the tokenizer's own chat template, with a generation prompt and without tools."""


def make_prompt_rendering(
    config: MultiTurnRolloutConfig, tools: Sequence[dict[str, Any]] | None = None
) -> PromptRendering:
    """Return a recipe's settings for rendering prompts. `tools` are the descriptions of the tools; None: describe the
    tools that the recipe names. Raise ConfigError if a tool cannot be called, or the file of the chat template is empty
    or JSON, and DataError if the file cannot be read."""
    if not config.enable:
        return DEFAULT_RENDERING
    tools = load_tool_schemas(config) if tools is None else tools
    path = config.custom_chat_template_path
    try:
        template = None if path is None else Path(os.path.expanduser(path)).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{_CONFIG_TABLE}.custom_chat_template_path = {path!r} cannot be read: {error}") from error
    if path is not None and template is not None:
        check_template_text(f"{_CONFIG_TABLE}.custom_chat_template_path", path, template)
    return PromptRendering(
        tuple(tools), template, config.add_generation_prompt, config.continue_final_message, config.enable_thinking
    )


def make_tool_runner(
    config: MultiTurnRolloutConfig, num_workers: int | None = None, send_heartbeat: Callable[[], None] = lambda: None
) -> ToolRunner:
    """Return a `ToolRunner` for the tools of a recipe, a context manager, which the caller enters. `num_workers` is the
    number of its worker processes; it calls `send_heartbeat` while it waits for results."""
    return ToolRunner(
        config.enabled_tools, timeout_seconds=config.tool_timeout_seconds, variable_names=config.tool_env,
        num_workers=num_workers, send_heartbeat=send_heartbeat,
    )  # fmt: skip


def load_tool_schemas(multi_turn_config: MultiTurnRolloutConfig) -> list[dict[str, Any]]:
    """Return the descriptions of the tools that a recipe names, as chat templates expect them."""
    if not multi_turn_config.enabled_tools:
        return []
    with make_tool_runner(multi_turn_config, num_workers=1) as tool_runner:
        return tool_runner.schemas()


def template_uses_tools(tokenizer: PreTrainedTokenizerBase, render_settings: PromptRendering) -> bool:
    """Return whether the chat template mentions the variable `tools`, in which it gets the descriptions of tools."""
    template = render_settings.template or tokenizer.get_chat_template(tools=list(render_settings.tools))
    return "tools" in str(template)


class ToolResultTokens:
    """Tokens that the chat template writes between two assistant turns: the tool results and the text around them.

    Only the text between the turns is tokenised. The assistant's tokens stay as they were sampled, even if the template
    would render the turns differently.
    Raise ModelError if the template renders earlier turns differently when a tool result follows, leaves the result
    out, or writes calls in a form that `parse_tool_calls` does not read."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, render_settings: PromptRendering, stop_ids: Sequence[int]
    ) -> None:
        """Find an assistant turn with which the chat template of `tokenizer` can render tool results. Raise ModelError
        if there is none. `stop_ids` are the ids of the tokens that end an assistant turn."""
        self._tokenizer, self._render_settings = tokenizer, render_settings
        self._end_token_ids = {str(tokenizer.decode([token])): token for token in stop_ids}
        # `all_special_tokens` has only tokens with a role, such as BOS, and often no marks of turns and images.
        special_added_tokens = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        special_tokens = {*tokenizer.all_special_tokens, *special_added_tokens}
        escaped_special_tokens = [re.escape(token) for token in special_tokens if len(token) > 2]
        self._escape_regex = re.compile("|".join(sorted(escaped_special_tokens, key=len, reverse=True)) or "(?!)")
        with limit_resources(f"{_CONFIG_TABLE}: the chat template"):
            self._example_assistant_turn = self._select_assistant_turn()
            self._check_call_format()

    def tokenise_results(self, tool_results: Sequence[tuple[str, ToolResult]]) -> tuple[int, ...]:
        """Return the tokens between the end of one assistant turn and the start of the next one: `tool_results`, pairs
        of tool name and result, and the template's text around them. Raise ModelError if the results change how the
        template renders the first turn."""
        end_token_and_text = self._render_text_after_call(self._example_assistant_turn, tool_results)
        if end_token_and_text is None:
            raise _make_changed_turn_error(self._tokenizer)
        end_token, text_after_turn = end_token_and_text
        # Some tokenizers insert a space before the first word, so tokenise the text together with the end token.
        ids = list(self._tokenizer(end_token + text_after_turn, add_special_tokens=False, verbose=False)["input_ids"])
        if ids[:1] != [self._end_token_ids[end_token]]:
            return tuple(self._tokenizer(text_after_turn, add_special_tokens=False, verbose=False)["input_ids"])
        return tuple(ids[1:])

    def _select_assistant_turn(self) -> Message:
        """Return the first of `_ASSISTANT_TURN_VARIANTS` whose rendering stays the same if one tool result follows it,
        and if two do."""
        failure_reason = ""
        for assistant_turn in _ASSISTANT_TURN_VARIANTS:
            if (variant_failure := self._find_failure(assistant_turn)) is None:
                return assistant_turn
            failure_reason = variant_failure or failure_reason
        raise _make_changed_turn_error(self._tokenizer, failure_reason)

    def _find_failure(self, assistant_turn: Message) -> str | None:
        """Return None if the chat template renders one and two tool results after `assistant_turn` without changing the
        turn. Otherwise return the reason, in brackets; "" means that the rendering of the turn changes."""
        for num_results, prefix in ((1, ""), (2, "of two calls in a turn: ")):
            example_tool_results = [("tool", ToolResult(text)) for text in _EXAMPLE_TOOL_RESULTS[:num_results]]
            try:
                end_token_and_text = self._render_text_after_call(assistant_turn, example_tool_results)
            except (TemplateError, ValueError, TypeError) as error:
                return f" ({prefix}{' '.join(str(error).split())})"
            if end_token_and_text is None:
                return ""
            if any(result.text not in end_token_and_text[1] for _, result in example_tool_results):
                return f" ({prefix}it leaves out what a tool says)"
        return None

    def _check_call_format(self) -> None:
        """Raise ModelError if the chat template writes tool calls in a form that `parse_tool_calls` cannot read. The
        model writes calls in the same form, so no tool would be called. A template without tool calls is accepted."""
        expected_call = ToolCall("look_up_word", {"word": "forty-two"})
        function_call = {"name": expected_call.name, "arguments": expected_call.arguments}
        tool_calls = [{"type": "function", "id": "call00000", "function": function_call}]
        unparsable_call = ""
        # The template of DeepSeek-R1 writes the calls only of a turn whose content is None.
        for encoded_calls, content in product((tool_calls, encode_arguments(tool_calls)), ("", None)):
            with suppress(TemplateError, ValueError, TypeError):
                rendered_prompt = self._render_template([_EXAMPLE_USER_TURN], add_generation_prompt=False)
                assistant_turn = {"role": "assistant", "content": content, "tool_calls": encoded_calls}
                rendered_call = self._render_template([_EXAMPLE_USER_TURN, assistant_turn], add_generation_prompt=False)
                rendered_call = rendered_call[common_prefix_length(rendered_prompt, rendered_call) :]
                if parse_tool_calls(rendered_call) == [expected_call]:
                    return
                unparsable_call = unparsable_call or rendered_call * (expected_call.name in rendered_call)
        if unparsable_call:
            raise ModelError(
                f"{_CONFIG_TABLE}.enable_tools: the chat template of {self._tokenizer.name_or_path!r} writes a tool "
                f"call as {unparsable_call.strip()[:200]!r}, which is not read; calls are read as Hermes writes them, "
                f'<tool_call>{{"name": ..., "arguments": ...}}</tool_call>: give a template that writes that with '
                f"{_CONFIG_TABLE}.custom_chat_template_path, or take another model"
            )

    def _render_text_after_call(
        self, assistant_turn: Message, tool_results: Sequence[tuple[str, ToolResult]]
    ) -> tuple[str, str] | None:
        """Return the end token of an assistant turn, and the text after it, in which the tool results are rendered;
        None if the chat template renders the assistant turn differently when tool results follow."""
        call_ids = [f"call{i:05d}" for i in range(len(tool_results))]  # Mistral's template needs ids of nine characters
        tool_calls = [
            {"type": "function", "id": call_id, "function": {"name": name, "arguments": {}}}
            for call_id, (name, _) in zip(call_ids, tool_results, strict=True)
        ]
        turn = assistant_turn if assistant_turn["content"] else {**assistant_turn, "tool_calls": tool_calls}
        tool_turns = [
            {"role": "tool", "name": name, "tool_call_id": call_id, "content": self._escape_special_tokens(result.text)}
            for call_id, (name, result) in zip(call_ids, tool_results, strict=True)
        ]
        text_without_results = self._render_template([_EXAMPLE_USER_TURN, turn], add_generation_prompt=False)
        text_with_results = self._render_template(
            [_EXAMPLE_USER_TURN, turn, *tool_turns], add_generation_prompt=self._render_settings.add_generation_prompt
        )
        for end_token in self._end_token_ids:
            turn_text = text_without_results[: text_without_results.rfind(end_token) + len(end_token)]
            is_end_token_last = end_token in text_without_results and not text_without_results[len(turn_text) :].strip()
            if is_end_token_last and text_with_results.startswith(turn_text):
                return end_token, text_with_results[len(turn_text) :]
        return None

    def _render_template(self, messages: list[Message], *, add_generation_prompt: bool) -> str:
        template_kwargs = replace(self._render_settings, continue_final_message=False).template_kwargs
        rendered_text: Any = self._tokenizer.apply_chat_template(
            messages,
            tools=list(self._render_settings.tools) or None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **template_kwargs,
        )
        return str(rendered_text)

    def _escape_special_tokens(self, text: str) -> str:
        """Insert a space into each special token in the text of a tool result, so that no special token ends a turn."""
        return self._escape_regex.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text)


def _make_changed_turn_error(tokenizer: PreTrainedTokenizerBase, failure_reason: str = "") -> ModelError:
    return ModelError(
        f"{_CONFIG_TABLE}: the chat template of {tokenizer.name_or_path!r} does not keep what it has written of an "
        f"assistant's turn, up to its end token, when a tool result follows{failure_reason}; give another with "
        "custom_chat_template_path"
    )
