"""Tokens and loss masks of conversations with images: the counterpart of `conversation.py` for a processor.

The model's processor expands each image into tokens, whose number depends on the image's size. The assistant's spans
are located in the text before the expansion and shifted to their positions after it; they never include an image.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from transformers import ProcessorMixin

from cosmos_core.data.conversation import make_span_token_mask
from cosmos_core.data.spans import Span
from cosmos_core.error_handling import convert_errors
from cosmos_core.errors import DataError, ModelError
from cosmos_core.models.processor import get_image_token
from cosmos_core.transient import is_transient

if TYPE_CHECKING:
    from PIL.Image import Image


class ImageTextTokens(NamedTuple):
    """Tokens of a conversation with its images expanded, not cut to a maximum length."""

    ids: list[int]
    mask: list[int]
    """Loss mask with one number per token: 1 for learned tokens, 0 for others."""
    num_image_tokens: int
    end_of_last_image: int
    """Index after the last token of the last image; 0 if the conversation has no image."""


def expand_image_placeholders(
    processor: ProcessorMixin, rendered_text: str, learned_spans: list[Span], images: list[Image], location: str
) -> ImageTextTokens:
    """Tokenise a rendered text with its images, which are in the order of their placeholders in the text; return the
    tokens, and a loss mask that is 1 in `learned_spans`. Raise DataError if the text does not have one placeholder per
    image, or the processor refuses an image, and ModelError if the processor's tokenizer returns no offsets of
    tokens."""
    if not processor.tokenizer.is_fast:
        raise ModelError("rows with images need a fast tokenizer; save one beside the model (tokenizer.json)")
    image_placeholder = get_image_token(processor)
    num_placeholders = rendered_text.count(image_placeholder)
    if num_placeholders != len(images):
        raise DataError(
            f"{location}: the turns show {len(images)} images, and the chat template writes {image_placeholder!r} "
            f"{num_placeholders} times; it may take images in turns of the user alone, or the text may have that word"
        )
    bos_token = processor.tokenizer.bos_token

    def convert_processor_error(error: Exception) -> Exception:
        problem = f"the model's processor refuses the row: {' '.join(str(error).split())}"
        return error if is_transient(error) else DataError(f"{location}: {problem}")

    with convert_errors(convert_processor_error):
        processor_output: Any = processor(
            text=[rendered_text],
            images=[images] if images else None,
            # Do not add a second BOS token to a text that already begins with one.
            add_special_tokens=not (bos_token and rendered_text.startswith(bos_token)),
            return_offsets_mapping=True,
            return_text_replacement_offsets=True,
        )
    image_spans = _find_image_spans(processor, rendered_text, processor_output, location) if images else []
    ids = list(processor_output["input_ids"][0])
    token_start_offsets, token_end_offsets = (
        np.asarray(processor_output["offset_mapping"][0], dtype=np.int64).reshape(-1, 2).T
    )

    mask, image_mask = np.zeros(len(ids), dtype=bool), np.zeros(len(ids), dtype=bool)
    # Refuse a processor that writes image tokens without returning their positions, such as that of Idefics2.
    if learned_spans and token_end_offsets.max(initial=0) > _map_to_expanded_text(len(rendered_text), image_spans):
        problem = f"{type(processor).__name__} does not return where it writes the tokens of an image"
        raise ModelError(f"{location}: {problem}, so what is learned cannot be found; take a model of another family")
    for start, end in learned_spans:
        expanded_learned_span = _map_to_expanded_text(start, image_spans), _map_to_expanded_text(end, image_spans)
        mask |= make_span_token_mask(expanded_learned_span, token_start_offsets, token_end_offsets)
    for _, expanded_span in image_spans:
        image_mask |= make_span_token_mask(expanded_span, token_start_offsets, token_end_offsets)
    media_type_ids = np.array(ProcessorMixin.create_mm_token_type_ids(processor, [ids])[0])
    other_media_token_ids = np.array(ids)[(media_type_ids > 0) & ~image_mask]
    if images and len(other_media_token_ids) and "text_replacement_offsets" in processor_output:
        problem = f"the text has the word {processor.tokenizer.decode(other_media_token_ids[:1])!r}"
        raise DataError(f"{location}: {problem}, which the model takes for a part of an image; leave the row out")
    end_of_last_image = int(np.flatnonzero(image_mask)[-1]) + 1 if image_mask.any() else 0
    return ImageTextTokens(ids, (mask & ~image_mask).astype(int).tolist(), int(image_mask.sum()), end_of_last_image)


def _find_image_spans(
    processor: ProcessorMixin, rendered_text: str, processor_output: Any, location: str
) -> list[tuple[Span, Span]]:
    """Return, for each image, the span of its placeholder word in the rendered text, and the span that replaces it in
    the text in which the processor has expanded the placeholders."""
    if "text_replacement_offsets" in processor_output:
        text_replacements = processor_output["text_replacement_offsets"][0]
        return [(tuple(each["span"]), tuple(each["new_span"])) for each in text_replacements]
    bos_token = processor.tokenizer.bos_token
    # Refuse a text without a BOS token: a processor that inserts the token would shift the offsets of all tokens.
    if bos_token and bos_token not in rendered_text:
        raise DataError(f"{location}: the chat template does not write {bos_token!r}, which the processor wants")
    placeholder_matches = re.finditer(re.escape(get_image_token(processor)), rendered_text)
    return [(match.span(), match.span()) for match in placeholder_matches]


def _map_to_expanded_text(character_position: int, image_spans: list[tuple[Span, Span]]) -> int:
    """Return where a position in the rendered text is in the expanded text, in which the placeholders of images
    (`image_spans`) have been replaced by longer ones."""
    return character_position + sum(
        (expanded_span[1] - expanded_span[0]) - (placeholder_span[1] - placeholder_span[0])
        for placeholder_span, expanded_span in image_spans
        if placeholder_span[1] <= character_position
    )
