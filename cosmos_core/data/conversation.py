"""Tokens and loss masks of conversations and prompts.

The text is rendered by the model's own chat template and tokenised once, as a whole, so training sees the tokens
that inference sees. `messages.py` reads rows; `learned_spans.py` locates the assistant's turns in the rendering.
"""

from itertools import pairwise

import numpy as np
from transformers import PreTrainedTokenizerBase

from cosmos_core.data.chat import DEFAULT_RENDERING, PromptRendering
from cosmos_core.data.learned_spans import find_learned_spans
from cosmos_core.data.messages import Message, SkippedRow
from cosmos_core.data.rendering import TemplateRenderer, Tools, render
from cosmos_core.data.spans import Span
from cosmos_core.errors import DataError


def tokenise_conversation(
    tokenizer: PreTrainedTokenizerBase,
    conversation: list[Message] | str,
    location: str,
    tools: Tools = None,
    stop_ids: tuple[int, ...] = (),
) -> tuple[list[int], list[int]]:
    """Return token ids and loss mask of a conversation or plain text, not cut to a maximum length; errors are those of
    `find_learned_spans`.

    The mask is 1 for tokens that are learned. In a conversation these are the tokens that the assistant has to
    generate, including the token that ends each turn (one of `stop_ids`, at which generation stops). In plain text
    these are all tokens, including the final end token.
    """
    if isinstance(conversation, str):
        return _tokenise_plain_text(tokenizer, conversation)
    rendered_text, learned_spans = find_learned_spans(tokenizer, conversation, location, tools, stop_ids)
    return _tokenise_with_loss_mask(tokenizer, rendered_text, learned_spans, location)


def make_span_token_mask(span: Span, token_starts: np.ndarray, token_ends: np.ndarray) -> np.ndarray:
    """Return a mask of the tokens that have a character inside the span, from the character offsets of tokens."""
    start, end = span
    # Include empty spans: byte-level tokenizers that trim offsets report a whitespace token as an empty span.
    return (token_ends > start) & ((token_starts < end) | ((token_starts == token_ends) & (token_ends <= end)))


def tokenise_prompt_and_completion(
    tokenizer: PreTrainedTokenizerBase, prompt: str, completion: str, location: str
) -> tuple[list[int], list[int]]:
    """Return token ids and loss mask of a prompt and completion of plain text. The mask is 1 for tokens with characters
    of the completion and for the end token. Raise DataError if a token crosses the border and the tokenizer
    has no character offsets."""
    text = prompt + completion
    token_ids, _ = _tokenise_plain_text(tokenizer, text)
    text_ids, text_mask = _tokenise_with_loss_mask(tokenizer, text, [(len(prompt), len(text))], location)
    num_leading_tokens = next(i for i in range(len(token_ids)) if token_ids[i : i + len(text_ids)] == text_ids)
    return token_ids, [0] * num_leading_tokens + text_mask + [1] * (len(token_ids) - num_leading_tokens - len(text_ids))


def truncate_tokens(tokens: tuple[list[int], list[int]], max_length: int, location: str) -> tuple[list[int], list[int]]:
    """Cut token ids and loss mask on the right to at most `max_length` tokens; raise SkippedRow if no token to learn is
    left. The first token does not count, because it is never predicted."""
    ids, mask = tokens
    if not any(mask[1:]):
        raise SkippedRow(location, "with nothing to learn")
    if not any(mask[1:max_length]):
        raise SkippedRow(location, "longer than policy.model_max_length with nothing left to learn")
    return ids[:max_length], mask[:max_length]


def render_prompt(
    renderer: TemplateRenderer, messages: list[Message], location: str, settings: PromptRendering = DEFAULT_RENDERING
) -> str:
    """Render the turns of a prompt with the chat template and return the text. It ends with the template's generation
    prompt if `settings.add_generation_prompt` is set. Raise DataError if the template leaves out the text of a user
    turn, and RefusedRow if it refuses the turns."""
    return render(
        renderer, messages, location, add_generation_prompt=settings.add_generation_prompt,
        tools=list(settings.tools) or None, template_kwargs=settings.template_kwargs,
    )[1]  # fmt: skip


def _tokenise_plain_text(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], list[int]]:
    # Do not add a second BOS token to a text that a chat template has rendered with a BOS token.
    starts_with_bos_token = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
    ids = tokenizer(text, add_special_tokens=not starts_with_bos_token, verbose=False)["input_ids"]
    end_token_id = tokenizer.eos_token_id
    if end_token_id is not None and ids[-1:] != [end_token_id]:
        ids = [*ids, end_token_id]
    return ids, [1] * len(ids)


def _tokenise_with_loss_mask(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: list[Span], location: str
) -> tuple[list[int], list[int]]:
    """Return token ids and loss mask of a text. The whole text is tokenised once; a token is learned if it has a
    character inside one of the character ranges `spans`."""
    if not tokenizer.is_fast:
        return _tokenise_between_borders(tokenizer, text, spans, location)
    tokenizer_output = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    token_starts, token_ends = np.asarray(tokenizer_output["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
    is_learned_token = np.zeros(len(token_starts), dtype=bool)
    for span in spans:
        is_learned_token |= make_span_token_mask(span, token_starts, token_ends)
    return tokenizer_output["input_ids"], is_learned_token.astype(int).tolist()


def _tokenise_between_borders(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: list[Span], location: str
) -> tuple[list[int], list[int]]:
    """Return token ids and loss mask of a text in which the character ranges `spans` are learned, for a tokenizer
    without character offsets: the texts between the borders of the ranges are tokenised separately. Raise DataError if
    tokenising the whole text gives other tokens."""
    ids, mask = list[int](), list[int]()
    span_boundaries = [0, *(boundary for span in spans for boundary in span), len(text)]
    for segment_index, (segment_start, segment_end) in enumerate(pairwise(span_boundaries)):
        segment_ids = tokenizer(text[segment_start:segment_end], add_special_tokens=False, verbose=False)["input_ids"]
        ids += segment_ids
        mask += [segment_index % 2] * len(segment_ids)
    if ids != tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]:
        raise DataError(
            f"{location}: {type(tokenizer).__name__} cannot say which characters a token covers, and its tokens cross "
            "the border between prompt and completion; save a fast tokenizer (tokenizer.json) beside the model"
        )
    return ids, mask
