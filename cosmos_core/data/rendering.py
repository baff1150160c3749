"""What a chat template writes of a conversation, and what it must not leave out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from cosmos_core.data.bounds import bounded
from cosmos_core.data.messages import Message, SkippedRow, texts_of
from cosmos_core.data.tool_calls import in_python, with_texts
from cosmos_core.errors import DataError, ModelError

_LONGEST = 1 << 26  # characters that a template writes: more than any model reads
Tools = list[Any] | None
"""What the chat template is told of the tools that may be called."""


class RefusedRow(SkippedRow):
    """The chat template does not take a conversation of these roles in this order."""


def render(
    owner: PreTrainedTokenizerBase | ProcessorMixin,
    turns: list[Message],
    where: str,
    *,
    add_generation_prompt: bool = False,
    tools: Tools = None,
    options: Mapping[str, Any] = {},
) -> tuple[list[Message], str]:
    """Return what the chat template of a tokenizer or processor writes, and the turns as they were given to it.

    `options` go to `apply_chat_template`.

    Of a processor's templates some want strings where there is text alone, others parts everywhere: the form counts of
    which the template writes the most.

    Raises:
        DataError: the template writes nothing for what the user says.
        RefusedRow: the template refuses the conversation, or leaves out its system turn or a tool call.
        ModelError: there is no chat template.
    """
    if not (options.get("chat_template") or owner.chat_template):
        whose = "the processor" if isinstance(owner, ProcessorMixin) else f"the tokenizer of {owner.name_or_path!r}"
        raise ModelError(
            f"{whose} has no chat template; set policy.chat_template to a Jinja file, 'plain' or 'chatml', start from "
            "an instruct model, or give plain text: a column `text`, or `prompt` and `completion`"
        )
    found: list[tuple[list[Message], list[Message], str]] = []
    for form in (turns, _in_parts(turns)) if isinstance(owner, ProcessorMixin) else (turns,):
        try:
            text = render_template(owner, form, add_generation_prompt, where=where, tools=tools, options=options)
            found.append((_left_out(form, text), form, text))
        except TemplateError as error:
            reason = error
    written = _with_written_arguments(turns)
    if written != turns and (not found or any(in_python(turn.get("tool_calls"), found[0][2]) for turn in turns)):
        return render(owner, written, where, add_generation_prompt=add_generation_prompt, tools=tools, options=options)
    if not found:
        raise RefusedRow(where, f"refused by the chat template ({reason})")
    left_out, form, text = min(found, key=lambda each: len(each[0]))
    for turn in left_out:
        if turn["role"] == "system":
            raise RefusedRow(where, "with a system turn that the chat template leaves out")
        # Templates of some vision models look for parts in the content, and write nothing for a string.
        if turn["role"] == "user":
            raise DataError(
                f"{where}: the chat template leaves out the user's text {' '.join(texts_of(turn))[:40]!r}; "
                "use a template that accepts strings as content"
            )
    _check_tool_calls(form, text, where)
    return form, text


def _in_parts(turns: list[Message]) -> list[Message]:
    return [
        {**turn, "content": [{"type": "text", "text": turn["content"]}]} if isinstance(turn["content"], str) else turn
        for turn in turns
    ]


def _with_written_arguments(turns: list[Message]) -> list[Message]:
    """Return the turns in the form that a few chat templates want, as that of DeepSeek does: arguments as JSON text."""
    return [{**turn, "tool_calls": with_texts(turn["tool_calls"])} if "tool_calls" in turn else turn for turn in turns]


def _left_out(turns: list[Message], text: str) -> list[Message]:
    return [turn for turn in turns if any(part.strip()[-20:] not in text for part in texts_of(turn))]


def _check_tool_calls(messages: list[Message], text: str, where: str) -> None:
    """Refuse a rendering without the row's tool calls, of which the model would learn to say nothing.

    Raises:
        RefusedRow: the name of a called function is not in the text.
    """
    for call in (call for message in messages for call in message.get("tool_calls") or []):
        function = call.get("function", call) if isinstance(call, dict) else None
        if isinstance(function, dict) and str(function.get("name", "")) not in text:
            raise RefusedRow(where, "with a tool call that the chat template leaves out")


def render_template(
    owner: PreTrainedTokenizerBase | ProcessorMixin,
    messages: list[Message],
    add_generation_prompt: bool,
    *,
    where: str,
    tools: Tools = None,
    options: Mapping[str, Any] = {},
) -> str:
    """Return what the chat template of a tokenizer or processor writes.

    Raises:
        TemplateError: it fails, in whatever way: it is a program that came with the model.
        ModelError: it does not end, or takes too much memory.
    """
    try:
        with bounded(f"{where}: the chat template"):
            text = owner.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, tools=tools, **options
            )
    except ModelError:
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        raise TemplateError(" ".join(reason.split())) from error
    assert isinstance(text, str)
    if len(text) > _LONGEST:
        raise ModelError(f"{where}: the chat template writes {len(text):,} characters; mend it, or leave the row out")
    return text
