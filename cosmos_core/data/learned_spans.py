"""Location of the text to learn in a rendered conversation, by the {% generation %} tags of the chat template.

`spans.py` has two methods for templates that do not have these tags.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import accumulate, chain
from typing import Any, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils.chat_template_utils import render_jinja_template

from cosmos_core.data.messages import Message, SkippedRow, get_turn_texts
from cosmos_core.data.rendering import RefusedRow, TemplateRenderer, Tools, check_tools, render, render_template
from cosmos_core.data.spans import (
    RenderFn,
    Span,
    find_spans_by_placeholders,
    find_spans_by_prefixes,
    make_unused_word,
    strip_trailing_space,
)
from cosmos_core.data.template_limits import limit_resources
from cosmos_core.data.turn_weights import is_trained_turn
from cosmos_core.errors import DataError

_MIN_TURNS_FOR_PLACEHOLDERS = 64
"""Number of turns of a conversation above which `find_spans_by_placeholders` is tried first, because the time of
`find_spans_by_prefixes` is quadratic in it."""
_GENERATION_TAG_REGEX = re.compile(r"\{%[-+]?\s*(end)?generation\s*([-+]?)%\}")
_START_MARKER, _END_MARKER = "\ue000", "\ue001"  # private-use characters that mark generation tags in a rendering
_TEMPLATE_COMMENT_REGEX = re.compile(r"\{#.*?#\}", re.DOTALL)


def find_learned_spans(
    renderer: TemplateRenderer, turns: list[Message], location: str, tools: Tools = None, stop_ids: tuple[int, ...] = ()
) -> tuple[str, list[Span]]:
    """Render a conversation with the chat template; return the text, and the character spans to learn, which are in
    assistant turns without `weight` = 0. If the template has {% generation %} tags, only text inside them is learned.
    A span includes the token that ends the turn: one of `stop_ids`, at which generation stops, or the tokenizer's end
    token.

    Raise DataError if the assistant's turns cannot be located in the rendering, SkippedRow if no assistant turn with
    content is learned, and the errors of `render`."""
    if not any(map(is_trained_turn, turns)):
        raise SkippedRow(location, "without an assistant turn to learn")
    turns, rendered_text = render(renderer, turns, location, tools=tools)
    check_tools(tools, rendered_text, location)
    tokenizer: PreTrainedTokenizerBase = renderer.tokenizer if isinstance(renderer, ProcessorMixin) else renderer
    added_tokens, end_token_texts = list_added_tokens(tokenizer), _decode_end_tokens(tokenizer, stop_ids)
    render_messages = partial(render_template, renderer, location=location, tools=tools)
    if not any(map(str.strip, chain.from_iterable(get_turn_texts(turn) for turn in turns if is_trained_turn(turn)))):
        kept_keys = ("role", "content")
        plain_turns = [{key: turn[key] for key in kept_keys} if is_trained_turn(turn) else turn for turn in turns]
        with suppress(TemplateError):  # some templates fail without the tool calls; then keep the row
            if render_messages(plain_turns, False) == rendered_text:
                raise SkippedRow(location, "without an assistant turn to learn")
    spans: list[Span] | None = None
    template = renderer.chat_template if renderer is not tokenizer else tokenizer.get_chat_template(tools=tools)
    if isinstance(template, str) and _has_generation_tags(template):
        with limit_resources(f"{location}: the chat template"):
            spans = _find_marked_spans(template, tokenizer, turns, rendered_text, tools)
    has_generation_tags, assistant_turns = spans is not None, [turn for turn in turns if turn["role"] == "assistant"]
    if spans is None or not all(map(is_trained_turn, assistant_turns)):
        turn_spans = _find_turn_spans(render_messages, turns, rendered_text, added_tokens)
        if turn_spans is None:
            raise _make_missing_turns_error(turns, location)
        if spans is None and _are_tool_results_learned(render_messages, turns, added_tokens):
            raise RefusedRow(location, "with a tool's result that the chat template writes before the text of its call")
        trained_spans = [span for span, turn in zip(turn_spans, assistant_turns, strict=True) if is_trained_turn(turn)]
        spans = trained_spans if spans is None else _select_trained_spans(trained_spans, spans, turn_spans, location)
    if not spans:
        raise SkippedRow(location, "in which the chat template marks nothing to learn")
    spans = [strip_trailing_space(span, rendered_text, added_tokens) for span in spans]
    return rendered_text, [
        _extend_to_end_token(span, rendered_text, end_token_texts, has_generation_tags=has_generation_tags)
        for span in spans
    ]


def _find_turn_spans(
    render_messages: RenderFn, turns: list[Message], rendered_text: str, added_tokens: Sequence[str]
) -> list[Span] | None:
    find_placeholder_spans = partial(find_spans_by_placeholders, turn_end_tokens=added_tokens)
    turn_span_finders: list[Callable[..., list[Span] | None]] = [find_spans_by_prefixes, find_placeholder_spans]
    if len(turns) > _MIN_TURNS_FOR_PLACEHOLDERS:
        turn_span_finders.reverse()
    turn_span_finders.append(partial(find_placeholder_spans, keeps_reasoning=True))
    spans_by_finder = (find_spans(render_messages, turns, rendered_text) for find_spans in turn_span_finders)
    return next((spans for spans in spans_by_finder if spans is not None), None)


def _are_tool_results_learned(render_messages: RenderFn, turns: list[Message], added_tokens: Sequence[str]) -> bool:
    """Return whether the located spans of assistant turns include tool results, as for Gemma 4, whose chat template
    renders the results inside of the turn that calls the tools."""
    if not any("tool_calls" in turn and any(get_turn_texts(turn)) for turn in turns):
        return False
    tool_result_placeholder = make_unused_word(turns)
    turns = [{**turn, "content": tool_result_placeholder} if turn["role"] == "tool" else turn for turn in turns]
    with suppress(TemplateError):  # a template may fail because the placeholder of a tool result is not JSON
        rendered_text = render_messages(turns, False)
        spans = _find_turn_spans(render_messages, turns, rendered_text, added_tokens)
        return any(tool_result_placeholder in rendered_text[start:end] for start, end in spans or ())
    return False


def _select_trained_spans(
    trained_spans: list[Span], generation_spans: list[Span], turn_spans: list[Span], location: str
) -> list[Span]:
    """Return the `generation_spans`, those of {% generation %} tags, that overlap an assistant turn to learn
    (`trained_spans`). Raise DataError if one of them also overlaps an assistant turn with `weight` = 0: `turn_spans`
    are the spans of all assistant turns."""
    selected_generation_spans = [span for span in generation_spans if _is_span_overlapping(span, trained_spans)]
    untrained_spans = [turn_span for turn_span in turn_spans if turn_span not in trained_spans]
    if any(_is_span_overlapping(span, untrained_spans) for span in selected_generation_spans):
        remedy = "put {% generation %} around each turn, or leave out `weight`"
        problem = "weight = 0 leaves out a turn, and the chat template marks it together with another"
        raise DataError(f"{location}: {problem}; {remedy}")
    return selected_generation_spans


def _is_span_overlapping(span: Span, compared_spans: list[Span]) -> bool:
    return any(max(span[0], other_span[0]) < min(span[1], other_span[1]) for other_span in compared_spans)


def _extend_to_end_token(
    span: Span, rendered_text: str, end_token_texts: Sequence[str], *, has_generation_tags: bool
) -> Span:
    """Return the span of an assistant turn, extended by the end token after it, without which a model never learns to
    stop. Generation tags often exclude this token. In some models, such as GLM-4, the first token of the next turn is
    the end token."""
    start, end = span
    has_end_token = rendered_text[start:end].endswith(tuple(end_token_texts))
    if has_end_token and not has_generation_tags:
        return span
    end_token_start = end
    if has_generation_tags and not has_end_token:  # skip whitespace between the span and the end token
        end_token_start = len(rendered_text) - len(rendered_text[end:].lstrip())
    following_end_tokens = (text for text in end_token_texts if rendered_text.startswith(text, end_token_start))
    return start, next((end_token_start + len(text) for text in following_end_tokens), end)


@lru_cache(maxsize=4)
def _decode_end_tokens(tokenizer: PreTrainedTokenizerBase, stop_ids: tuple[int, ...]) -> tuple[str, ...]:
    stop_token_texts = [str(tokenizer.decode([token])) for token in stop_ids]
    return tuple(dict.fromkeys(filter(None, [tokenizer.eos_token, *stop_token_texts])))


def _make_missing_turns_error(turns: list[Message], location: str) -> DataError:
    """Return the DataError for a conversation whose assistant turns cannot be located in the rendering; a SkippedRow if
    an assistant turn comes first, since some chat templates leave it out."""
    first_role = next(turn["role"] for turn in turns if turn["role"] not in {"system", "developer"})
    if first_role == "assistant":  # skip the row: some templates leave out an assistant turn before the first user turn
        return SkippedRow(location, "that begins with the assistant, in a way that the chat template hides")
    return DataError(
        f"{location}: the assistant's turns cannot be found in what the chat template renders, which reorders turns, "
        "or one of them quotes the text between two turns; put {% generation %} and {% endgeneration %} around them in "
        "the model's chat template, or leave the row out"
    )


@lru_cache(maxsize=4)
def _has_generation_tags(template: str) -> bool:
    return _GENERATION_TAG_REGEX.search(_TEMPLATE_COMMENT_REGEX.sub("", template)) is not None


def _find_marked_spans(
    template: str, tokenizer: PreTrainedTokenizerBase, turns: list[Message], rendered_text: str, tools: Tools
) -> list[Span] | None:
    """Return the spans of characters inside the {% generation %} tags of `template`; None if they cannot be located.
    transformers' mask of tokens is not used, because it is wrong after a character of several tokens. Each tag is
    extended to render a marker character, because transformers' positions are wrong for tags in a macro or a `set`
    block."""
    template_arguments = {"conversations": [turns], "tools": tools, **tokenizer.special_tokens_map}

    def append_marker(tag: re.Match[str]) -> str:  # the empty `if` strips the same whitespace as the tag
        return f"{tag[0]}{{{{ '{_END_MARKER if tag[1] else _START_MARKER}' }}}}{{% if 1 %}}{{% endif {tag[2]}%}}"

    marked_template = _GENERATION_TAG_REGEX.sub(append_marker, template)
    [marked_text], _ = cast(Any, render_jinja_template)(chat_template=marked_template, **template_arguments)
    text_parts = re.split(f"([{_START_MARKER}{_END_MARKER}])", marked_text)
    if "".join(text_parts[::2]) == rendered_text:
        part_ends = list(accumulate(map(len, text_parts[::2])))
        return [(part_ends[i], part_ends[i + 1]) for i, tag in enumerate(text_parts[1::2]) if tag == _START_MARKER]
    # Marker strings in the messages change the text that this template renders, for example because of a filter. Use
    # the positions of `{% generation %}` blocks that transformers returns instead.
    rendered_conversations, spans_by_conversation = cast(Any, render_jinja_template)(
        chat_template=template, return_assistant_tokens_mask=True, **template_arguments
    )
    if rendered_conversations[0] != rendered_text:
        return None
    return [(start, end) for start, end in spans_by_conversation[0]]


@lru_cache(maxsize=4)  # cached, because it is called for every row and slow
def list_added_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the special and added tokens of a tokenizer as they appear in text, such as <|im_end|>."""
    return tuple({*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()})
