"""Conversations and prompts as tokens, and which tokens are to be learned.

The text is rendered by the model's own chat template and tokenised once, as a whole, so training sees the tokens
that inference sees. Reading rows is `messages.py`, finding the assistant's turns in the rendering is `spans.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, cast

import numpy as np
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils.chat_template_utils import render_jinja_template

from cosmos_core.data.bounds import bounded
from cosmos_core.data.chat import PLAIN, Chat
from cosmos_core.data.messages import Message, SkippedRow, is_learned, texts_of
from cosmos_core.data.spans import Span, prefix_spans, skeleton_spans, trimmed
from cosmos_core.data.tool_calls import in_python, with_texts
from cosmos_core.errors import DataError, ModelError

NO_ROOM = "with a prompt that leaves no room for a completion in policy.model_max_length"
_LONG = 64  # turns; to render each beginning of a conversation takes time with the square of their number
_LONGEST = 1 << 26  # characters that a template writes: more than any model reads
_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


Tools = list[Any] | None
"""What the chat template is told of the tools that may be called."""


class RefusedRow(SkippedRow):
    """The chat template does not take a conversation of these roles in this order."""


def conversation_tokens(
    tokenizer: PreTrainedTokenizerBase, conversation: list[Message] | str, where: str, tools: Tools = None
) -> tuple[list[int], list[int]]:
    """Return token ids and loss mask, uncut.

    Mask 1: learn to predict this token. In a conversation these are all that the assistant has to write, the token
    that closes each of its turns included; in plain text, which ends with the end token, all.

    Raises:
        DataError: the assistant's tokens cannot be told from the others.
        SkippedRow: the assistant says nothing.
        RefusedRow: the chat template refuses the conversation.
        ModelError: the tokenizer has no chat template.
    """
    if isinstance(conversation, str):
        return _plain_tokens(tokenizer, conversation)
    full, spans = learned_spans(tokenizer, conversation, where, tools)
    return _masked_tokens(tokenizer, full, spans, where)


def learned_spans(
    owner: PreTrainedTokenizerBase | ProcessorMixin, turns: list[Message], where: str, tools: Tools = None
) -> tuple[str, list[Span]]:
    """Return the rendering of a conversation, and where the assistant speaks in it.

    Not left to transformers' own mask: that needs marks in the template, which few models have.

    Raises:
        DataError: it cannot be told.
        SkippedRow: the assistant says nothing.
        RefusedRow, ModelError: as `render`.
    """
    if not any(_says_something(turn) for turn in turns if is_learned(turn)):
        raise SkippedRow(where, "without an assistant turn to learn")
    turns, full = render(owner, turns, where, tools=tools)
    tokenizer = owner.tokenizer if isinstance(owner, ProcessorMixin) else owner
    closing = added_tokens(tokenizer)
    render_part = partial(render_template, owner, where=where, tools=tools)
    is_long = len(turns) > _LONG
    spans = None if is_long else prefix_spans(render_part, turns, full)
    if spans is None:
        with bounded(f"{where}: the chat template"):
            spans = _marked_spans(owner, tokenizer, turns, full, tools)
    if spans is None:
        spans = skeleton_spans(render_part, turns, full, closing)
    if spans is None and is_long:
        spans = prefix_spans(render_part, turns, full)
    if spans is None:
        raise _unfound(turns, where)
    return full, [trimmed(span, full, closing) for span in _of_learned(spans, turns, where)]


def _of_learned(spans: list[Span], turns: list[Message], where: str) -> list[Span]:
    """Return the spans without those of turns that say that they are not learned."""
    assistant = [turn for turn in turns if turn["role"] == "assistant"]
    if all(map(is_learned, assistant)):
        return spans
    if len(spans) != len(assistant):
        raise DataError(
            f"{where}: weight = 0 leaves out a turn, and the chat template marks {len(spans)} parts of "
            f"{len(assistant)} turns; put {{% generation %}} around each turn once, or leave out `weight`"
        )
    return [span for span, turn in zip(spans, assistant, strict=True) if is_learned(turn)]


def inside(span: Span, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return which tokens, given by the offsets of their characters, have a character inside the span."""
    start, end = span
    # Byte-level tokenizers that trim offsets give a blank token no width, at its own end.
    return (ends > start) & ((starts < end) | ((starts == ends) & (ends <= end)))


def last_turns(tokens: tuple[list[int], list[int]], count: int) -> tuple[list[int], list[int]]:
    """Return the tokens with only the last `count` runs of learned ones learned: a completion, no prompt."""
    ids, mask = tokens
    starts = [i for i, bit in enumerate(mask) if bit and mask[i - 1 : i] != [1]]
    first = starts[-count]
    return ids, [0] * first + mask[first:]


def continued_tokens(
    tokenizer: PreTrainedTokenizerBase, prompt: str, completion: str, where: str
) -> tuple[list[int], list[int]]:
    """Return token ids and loss mask of plain text of which the completion, with the end token behind it, is learned.

    A token that reaches from the prompt into the completion belongs to the completion.

    Raises:
        DataError: the tokenizer cannot say which characters a token covers, and tokens cross the border.
    """
    plain, _ = _plain_tokens(tokenizer, prompt + completion)
    ids, mask = _masked_tokens(tokenizer, prompt + completion, [(len(prompt), len(prompt) + len(completion))], where)
    start = next(i for i in range(len(plain)) if plain[i : i + len(ids)] == ids)
    return plain, [0] * start + mask + [1] * (len(plain) - start - len(ids))


def cut(tokens: tuple[list[int], list[int]], max_length: int, where: str) -> tuple[list[int], list[int]]:
    """Cut ids and mask on the right.

    Raises:
        SkippedRow: no token to learn is left; the first token of a row never is one, as nothing predicts it.
    """
    ids, mask = tokens
    if not any(mask[1:]):
        raise SkippedRow(where, "with nothing to learn")
    if not any(mask[1:max_length]):
        raise SkippedRow(where, "longer than policy.model_max_length with nothing left to learn")
    return ids[:max_length], mask[:max_length]


def tokenize_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], max_length: int, where: str, chat: Chat = PLAIN
) -> tuple[list[int], str]:
    """Return token ids and text of a prompt, with the generation prompt of the chat template unless `chat` has none.

    Args:
        tokenizer: of the model.
        messages: turns up to the one to complete.
        max_length: most tokens: `policy.model_max_length` less one for a completion.
        where: location of the row, for messages.
        chat: how it is rendered.

    Raises:
        SkippedRow: the prompt is longer.
        RefusedRow: the template refuses it.
        ModelError: the tokenizer has no chat template.
    """
    _, text = render(
        tokenizer, messages, where, add_generation_prompt=chat.add_generation_prompt, tools=list(chat.tools) or None,
        options=chat.options,
    )  # fmt: skip
    return tokenize_text(tokenizer, text, max_length, where)


def tokenize_text(tokenizer: PreTrainedTokenizerBase, text: str, max_length: int, where: str) -> tuple[list[int], str]:
    """Return token ids and text of a rendered prompt.

    Raises:
        SkippedRow: it is longer.
    """
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) > max_length:
        raise SkippedRow(where, NO_ROOM)
    return ids, text


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
            f"{whose} has no chat template; save one beside the model (chat_template.jinja), start from an instruct "
            "model, or give plain text in a column `text`"
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


def _says_something(message: Message) -> bool:
    """Return whether a turn has words, or what else a chat template may render."""
    return any(text.strip() for text in texts_of(message)) or len(message) > len(("role", "content"))


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


def _unfound(turns: list[Message], where: str) -> DataError:
    """Return what to raise where the assistant's turns cannot be told from the others."""
    first = next(turn["role"] for turn in turns if turn["role"] not in {"system", "developer"})
    if first == "assistant":  # the row's doing, not the template's
        return SkippedRow(where, "that begins with the assistant, in a way that the chat template hides")
    return DataError(
        f"{where}: the assistant's turns cannot be found in what the chat template renders; put "
        "{% generation %} and {% endgeneration %} around them in the model's chat template"
    )


def _plain_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[int]]:
    ids = tokenizer(text, verbose=False)["input_ids"]
    end = tokenizer.eos_token_id
    if end is not None and ids[-1:] != [end]:
        ids = [*ids, end]
    return ids, [1] * len(ids)


def _marked_spans(
    owner: PreTrainedTokenizerBase | ProcessorMixin,
    tokenizer: PreTrainedTokenizerBase,
    turns: list[Message],
    full: str,
    tools: Tools,
) -> list[Span] | None:
    """Return what the template itself marks with {% generation %}, with the end token behind it; None: nothing.

    In characters: a mask of tokens would lose the bytes of a character that is several tokens, and what follows it.
    """
    template = (
        owner.get_chat_template(tools=tools) if isinstance(owner, PreTrainedTokenizerBase) else owner.chat_template
    )
    if not isinstance(template, str) or not _GENERATION_MARK.search(template):
        return None
    texts, marked = cast(Any, render_jinja_template)(
        conversations=[turns],
        chat_template=template,
        return_assistant_tokens_mask=True,
        tools=tools,
        **tokenizer.special_tokens_map,
    )
    if texts[0] != full:
        return None
    end = tokenizer.eos_token or ""  # a mark that ends before it would teach a model that never stops
    return [(start, stop + len(end) * full.startswith(end, stop)) for start, stop in marked[0]] or None


def _masked_tokens(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: list[Span], where: str
) -> tuple[list[int], list[int]]:
    """Tokenise the whole text once; a token counts when it has a character inside a span."""
    if not tokenizer.is_fast:
        return _masked_piecewise(tokenizer, text, spans, where)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts, ends = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
    mask = np.zeros(len(starts), dtype=bool)
    for span in spans:
        mask |= inside(span, starts, ends)
    return encoded["input_ids"], mask.astype(int).tolist()


def _masked_piecewise(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: list[Span], where: str
) -> tuple[list[int], list[int]]:
    """Without offsets: tokenise between the borders of the spans, right when that changes no token."""
    ids: list[int] = []
    mask: list[int] = []
    borders = [0, *(border for span in spans for border in span), len(text)]
    for number, (start, end) in enumerate(pairwise(borders)):
        piece = tokenizer(text[start:end], add_special_tokens=False, verbose=False)["input_ids"]
        ids += piece
        mask += [number % 2] * len(piece)
    if ids != tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]:
        raise DataError(
            f"{where}: {type(tokenizer).__name__} cannot say which characters a token covers, and its tokens cross "
            "the border between prompt and completion; save a fast tokenizer (tokenizer.json) beside the model"
        )
    return ids, mask


@lru_cache(maxsize=4)  # read for every row, and slow to gather
def added_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return tokens that stand for themselves in the text, such as <|im_end|>."""
    return tuple({*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()})
