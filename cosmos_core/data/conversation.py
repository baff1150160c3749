"""Conversations and prompts as tokens, and which tokens are to be learned.

The text is rendered by the model's own chat template and tokenised once, as a whole, so training sees the tokens
that inference sees. Reading rows is `messages.py`, finding the assistant's turns in the rendering is `spans.py`.
"""

from __future__ import annotations

import re
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from cosmos_core.data.messages import Message, SkippedRow, texts_of
from cosmos_core.data.spans import Span, prefix_spans, skeleton_spans, trimmed
from cosmos_core.errors import DataError, ModelError

_LONG = 64  # turns; to render each beginning of a conversation takes time with the square of their number
GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


class RefusedRow(SkippedRow):
    """The chat template does not take a conversation of these roles in this order."""


def tokenize_conversation(
    tokenizer: PreTrainedTokenizerBase, conversation: list[Message] | str, max_length: int, where: str
) -> tuple[list[int], list[int]]:
    """Token ids and loss mask, cut on the right to `max_length` tokens; see `conversation_tokens` and `cut`."""
    return cut(conversation_tokens(tokenizer, conversation, where), max_length, where)


def conversation_tokens(
    tokenizer: PreTrainedTokenizerBase, conversation: list[Message] | str, where: str
) -> tuple[list[int], list[int]]:
    """Token ids and loss mask, uncut.

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
    if not any(says_something(message) for message in conversation if message["role"] == "assistant"):
        raise SkippedRow(where, "without an assistant turn to learn")
    full = render(tokenizer, conversation, where)
    render_part = partial(render_template, tokenizer)
    is_long = len(conversation) > _LONG
    spans = None if is_long else prefix_spans(render_part, conversation, full)
    if spans is None and (marked := _marked_tokens(tokenizer, conversation)):
        return marked
    closing = added_tokens(tokenizer)
    if spans is None:
        spans = skeleton_spans(render_part, conversation, full, closing)
    if spans is None and is_long:
        spans = prefix_spans(render_part, conversation, full)
    if spans is None:
        raise unfound(conversation, where)
    return _masked_tokens(tokenizer, full, [trimmed(span, full, closing) for span in spans], where)


def last_turns(tokens: tuple[list[int], list[int]], count: int) -> tuple[list[int], list[int]]:
    """The tokens with only the last `count` runs of learned ones still learned: an answer without its prompt."""
    ids, mask = tokens
    starts = [i for i, bit in enumerate(mask) if bit and mask[i - 1 : i] != [1]]
    first = starts[-count]
    return ids, [0] * first + mask[first:]


def continued_tokens(
    tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str, where: str
) -> tuple[list[int], list[int]]:
    """Token ids and loss mask of plain text of which the answer, with the end token behind it, is learned.

    A token that reaches from the prompt into the answer belongs to the answer.

    Raises:
        DataError: the tokenizer cannot say which characters a token covers, and tokens cross the border.
    """
    plain, _ = _plain_tokens(tokenizer, prompt + answer)
    ids, mask = _masked_tokens(tokenizer, prompt + answer, [(len(prompt), len(prompt) + len(answer))], where)
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
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], max_length: int, where: str
) -> tuple[list[int], str]:
    """Token ids and text of a prompt, with the generation prompt of the chat template.

    Args:
        tokenizer: of the model.
        messages: turns up to the one to answer.
        max_length: most tokens: `policy.model_max_length` less the longest answer.
        where: place of the row, for messages.

    Raises:
        SkippedRow: the prompt is longer.
        RefusedRow: the template refuses it.
        ModelError: the tokenizer has no chat template.
    """
    text = render(tokenizer, messages, where, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(ids) > max_length:
        raise SkippedRow(where, "with a prompt longer than policy.model_max_length less the longest answer")
    return ids, text


def render(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], where: str, *, add_generation_prompt: bool = False
) -> str:
    """The conversation as the chat template writes it.

    Raises:
        DataError: the template writes nothing for what the user says.
        RefusedRow: the template refuses the conversation, or leaves out its system turn.
        ModelError: the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no chat template; save one beside the model "
            "(chat_template.jinja), start from an instruct model, or give plain text in a column `text`"
        )
    try:
        text = render_template(tokenizer, messages, add_generation_prompt)
    except TemplateError as error:
        raise RefusedRow(where, f"refused by the chat template ({error})") from error
    for message in messages:
        if message["content"].strip()[-20:] in text:
            continue
        if message["role"] == "system":
            raise RefusedRow(where, "with a system turn that the chat template leaves out")
        # Templates of some vision models look for parts in the content, and write nothing for a string.
        if message["role"] == "user":
            raise DataError(
                f"{where}: the chat template leaves out the user's text {message['content'][:40]!r}; "
                "use a template that accepts strings as content"
            )
    return text


def says_something(message: Message) -> bool:
    """Whether a turn has words, or what else a chat template may render."""
    return any(text.strip() for text in texts_of(message)) or len(message) > len(("role", "content"))


def render_template(
    owner: PreTrainedTokenizerBase | ProcessorMixin, messages: list[Message], add_generation_prompt: bool
) -> str:
    """What the chat template of a tokenizer or processor writes.

    Raises:
        TemplateError: it fails, in whatever way: it is a program that came with the model.
    """
    try:
        text = owner.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    except Exception as error:
        reason = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        raise TemplateError(" ".join(reason.split())) from error
    assert isinstance(text, str)
    return text


def unfound(turns: list[Message], where: str) -> DataError:
    """What to raise where the assistant's turns cannot be told from the others."""
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


def _marked_tokens(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> tuple[list[int], list[int]] | None:
    """What the template itself marks with {% generation %}; None when it marks nothing."""
    if not tokenizer.is_fast or not GENERATION_MARK.search(tokenizer.get_chat_template()):
        return None
    encoded: Any = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = list(encoded["input_ids"]), list(encoded["assistant_masks"])
    for i, (inside, after) in enumerate(pairwise(mask)):
        # A mark that ends before the end token would teach a model that never stops.
        if inside and not after and ids[i + 1] == tokenizer.eos_token_id:
            mask[i + 1] = 1
    return (ids, mask) if any(mask) else None


def _masked_tokens(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: list[Span], where: str
) -> tuple[list[int], list[int]]:
    """Tokenise the whole text once; a token counts when it has a character inside a span."""
    if not tokenizer.is_fast:
        return _masked_piecewise(tokenizer, text, spans, where)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts, ends = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
    mask = np.zeros(len(starts), dtype=bool)
    for start, end in spans:
        # Byte-level tokenizers that trim offsets give a blank token no width, at its own end.
        mask |= (ends > start) & ((starts < end) | ((starts == ends) & (ends <= end)))
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
            "the border between prompt and answer; save a fast tokenizer (tokenizer.json) beside the model"
        )
    return ids, mask


@lru_cache(maxsize=4)  # read for every row, and slow to gather
def added_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Tokens that stand for themselves in the text, such as <|im_end|>."""
    return tuple({*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()})
