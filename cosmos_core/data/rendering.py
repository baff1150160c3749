"""Rendering of a conversation with a chat template, with checks that the template leaves out no required content."""

import re
from collections.abc import Mapping
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from cosmos_core.data.messages import Message, SkippedRow, get_turn_texts
from cosmos_core.data.template_limits import limit_resources
from cosmos_core.data.tool_calls import encode_arguments_in_turns, uses_python_notation
from cosmos_core.error_handling import convert_errors
from cosmos_core.errors import DataError, ModelError

_MAX_RENDERED_CHARACTERS = 1 << 26  # maximum number of characters that a template may render, more than any model reads
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
TemplateRenderer = PreTrainedTokenizerBase | ProcessorMixin
Tools = list[Any] | None
"""Descriptions of the callable tools that are passed to the chat template; None: there are no tools."""


class RefusedRow(SkippedRow):
    """Error for a row whose conversation the chat template refuses, for example because of the order of its roles."""


def render(
    renderer: TemplateRenderer,
    turns: list[Message],
    location: str,
    *,
    add_generation_prompt: bool = False,
    tools: Tools = None,
    template_kwargs: Mapping[str, Any] = {},
) -> tuple[list[Message], str]:
    """Render turns with the chat template of a tokenizer or processor; return the turns as rendered, and the text.
    `template_kwargs` are passed to `apply_chat_template`.

    Some templates of processors expect strings for turns with text only, others expect parts in all turns. Both forms
    are tried, and the rendering that leaves out the fewest turns is returned.

    Raise DataError if the template leaves out the text of a user turn, RefusedRow if it refuses the conversation, or
    leaves out its system turn or a tool call, and ModelError if there is no chat template."""
    template, lack = template_kwargs.get("chat_template") or renderer.chat_template, "no chat template"
    if isinstance(template, dict):  # of several templates, transformers takes `default`, or `tool_use` with tools
        lack = f"no chat template named 'default', only {', '.join(sorted(template))}"
        template = template.get("default") or (tools is not None and template.get("tool_use"))
    if not template:
        name = "the processor"
        if not isinstance(renderer, ProcessorMixin):
            name = f"the tokenizer of {renderer.name_or_path!r}"
        raise ModelError(
            f"{name} has {lack}; set policy.chat_template to a Jinja file, 'plain' or 'chatml', start "
            "from an instruct model, or give plain text: a column `text`, or `prompt` and `completion`"
        )
    render_arguments: Any = {"add_generation_prompt": add_generation_prompt, "tools": tools}
    render_arguments["template_kwargs"] = template_kwargs
    renderings: list[tuple[list[Message], list[Message], str]] = []
    for rendered_turns in (turns, make_list_contents(turns)) if isinstance(renderer, ProcessorMixin) else (turns,):
        try:
            rendered_text = render_template(renderer, rendered_turns, location=location, **render_arguments)
            unrendered_turns = [turn for turn in rendered_turns if is_turn_missing(turn, rendered_text)]
            renderings.append((unrendered_turns, rendered_turns, rendered_text))
        except TemplateError as error:
            template_error = error
    turns_with_string_arguments = encode_arguments_in_turns(turns)
    tool_calls = [tool_call for turn in turns for tool_call in turn.get("tool_calls", [])]
    if turns_with_string_arguments != turns and (not renderings or uses_python_notation(tool_calls, renderings[0][2])):
        return render(renderer, turns_with_string_arguments, location, **render_arguments)
    if not renderings:
        raise RefusedRow(location, f"refused by the chat template ({template_error})")
    unrendered_turns, rendered_turns, rendered_text = min(renderings, key=lambda rendering: len(rendering[0]))
    for turn in unrendered_turns:
        if turn["role"] in {"system", "developer", "tool"}:
            raise RefusedRow(location, f"with a {turn['role']} turn that the chat template leaves out")
        # Templates of some vision models expect parts as content of a turn, and render nothing for a string.
        if turn["role"] == "user":
            problem = f"the chat template leaves out the user's text {' '.join(get_turn_texts(turn))[:40]!r}"
            raise DataError(f"{location}: {problem}; use a template that accepts strings as content")
    _check_tool_calls_and_reasoning(rendered_turns, rendered_text, location)
    return rendered_turns, rendered_text


def make_list_contents(turns: list[Message]) -> list[Message]:
    """Return the turns with each string content as a list of one text part."""
    return [
        {**turn, "content": [{"type": "text", "text": turn["content"]}]} if isinstance(turn["content"], str) else turn
        for turn in turns
    ]


def is_turn_missing(turn: Message, text: str) -> bool:
    """Return whether a turn has a text whose last 20 characters do not occur in the rendering `text`. Of a tool's text,
    only the last word is compared, because some templates write it as JSON with escaped characters."""
    if turn["role"] == "tool":
        return any(words[-1] not in text for part in get_turn_texts(turn) if (words := re.findall(r"\w+", part)))
    return any(part.strip()[-20:] not in text for part in get_turn_texts(turn))


def _check_tool_calls_and_reasoning(messages: list[Message], text: str, location: str) -> None:
    """Raise RefusedRow if `text`, the rendering of the messages, lacks the name of a called function or the thoughts of
    a final assistant turn: the model would learn not to call tools, or not to think. The thoughts of earlier turns can
    be missing."""
    for reasoning_key in _REASONING_KEYS if messages[-1]["role"] == "assistant" else ():
        reasoning_text = messages[-1].get(reasoning_key)
        if isinstance(reasoning_text, str) and reasoning_text.strip()[-20:] not in text:
            raise RefusedRow(location, f"with `{reasoning_key}` that the chat template leaves out")
    if _is_function_name_missing([call for message in messages for call in message.get("tool_calls", ())], text):
        raise RefusedRow(location, "with a tool call that the chat template leaves out")


def check_tools(tools: Tools, rendered_text: str, location: str) -> None:
    """Raise RefusedRow if the rendering of a conversation lacks the name of one of its tools: the model would learn to
    call tools that are not described."""
    if _is_function_name_missing(tools or [], rendered_text):
        raise RefusedRow(location, "with `tools` that the chat template leaves out")


def _is_function_name_missing(tools_or_tool_calls: list[Any], text: str) -> bool:
    functions = (tool_or_call.get("function", tool_or_call) for tool_or_call in tools_or_tool_calls)
    return any(isinstance(function, dict) and str(function.get("name", "")) not in text for function in functions)


def _convert_to_template_error(error: Exception) -> TemplateError:
    reason = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
    return TemplateError(" ".join(reason.split()))


def render_template(
    renderer: TemplateRenderer,
    messages: list[Message],
    add_generation_prompt: bool,
    *,
    location: str,
    tools: Tools = None,
    template_kwargs: Mapping[str, Any] = {},
) -> str:
    """Return the text that the chat template of a tokenizer or processor renders. Raise TemplateError if the template
    fails with any exception, and ModelError if it does not end, takes too much memory, or renders too much text."""
    with convert_errors(_convert_to_template_error, ModelError), limit_resources(f"{location}: the chat template"):
        rendered_text = renderer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt, tools=tools, **template_kwargs
        )
    assert isinstance(rendered_text, str)
    if len(rendered_text) > _MAX_RENDERED_CHARACTERS:
        problem = f"the chat template writes {len(rendered_text):,} characters"
        raise ModelError(f"{location}: {problem}; mend it, or leave the row out")
    return rendered_text
