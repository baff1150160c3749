"""Token sequences to learn, with a loss mask: conversations, or plain text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase

from cosmos_core.config.schema.policy import PolicyConfig
from cosmos_core.data.conversation import continued_tokens, conversation_tokens, truncate_tokens
from cosmos_core.data.images import align_images
from cosmos_core.data.kinds.base import IDS, MASK, VALIDATION, HeldOutRows, Seed, TokenisedKind
from cosmos_core.data.kinds.registry import row_kind
from cosmos_core.data.messages import Message, Row, SkippedRow, omits_response, plain_text_columns, read_conversation
from cosmos_core.data.prepared import (
    LEARNED_HELD_OUT,
    RowImages,
    damaged_file_error,
    mixture_of,
    open_table,
    split_path,
)
from cosmos_core.data.records import Job, Record, check_characters, processor_for, read_images, tokenise_turns
from cosmos_core.data.rendering import Tools
from cosmos_core.data.sample import Sample
from cosmos_core.data.tool_calls import read_tools
from cosmos_core.data.user_dataset import LABELS, TOKENS, UNTRAINED_LABEL
from cosmos_core.data.visual import truncate_visual_tokens, visual_tokens
from cosmos_core.errors import DataError
from cosmos_core.types import ImageRef


class Sequences(HeldOutRows):
    """Token sequences to learn; item i is `(input_ids int64, loss_mask uint8)`, copied from the memory-mapped file."""

    def __init__(
        self, table: pa.Table, path: Path, ids_column: str = "input_ids", mask_column: str = "loss_mask"
    ) -> None:
        """Wrap a table; `ids_column` and `mask_column` are the names of its columns with token ids and loss masks."""
        self.path, self.mixture = path, mixture_of(path)
        self._ids, self._masks = table[ids_column], table[mask_column]
        self.lengths: np.ndarray = pc.list_value_length(self._ids).to_numpy().astype(np.int64)
        """Number of tokens of each row, int64."""
        if not np.array_equal(self.lengths, pc.list_value_length(self._masks).to_numpy()):
            raise damaged_file_error(path, f"{mask_column} and {ids_column} differ in length")
        self._images = RowImages(table)
        self.num_images = self._images.counts
        """Number of images of each row, int64."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        ids, mask = (column[index].values.to_numpy() for column in (self._ids, self._masks))
        return ids.astype(np.int64), mask.copy()

    def images(self, index: int) -> tuple[ImageRef, ...]:
        """Return the images of a row in the order in which the row shows them, with absolute paths."""
        return self._images[index]

    def token_counts(self, *, is_packed: bool) -> np.ndarray:
        return self.lengths

    def samples(self, positions: Sequence[int], seed: Seed = None, micro_batch: int | None = None) -> list[Sample]:
        """Return a sample for each sequence."""
        return [
            Sample(*self[i], images=self.images(i), micro_batch=micro_batch, source=self.source(i)) for i in positions
        ]


def open_sequences(folder: Path, split: str) -> Sequences:
    """Return the memory-mapped sequences of a split; errors are those of `open_table`."""
    return Sequences(open_table(folder, split, row_kind("sequences")), split_path(folder, split))


class SequencesKind(TokenisedKind):
    """Kind of rows that are token sequences to learn, from conversations or plain text."""

    name = "sequences"
    purpose = "to learn (SFT)"
    columns: ClassVar[dict[str, pa.DataType]] = {"input_ids": IDS, "loss_mask": MASK}
    reader = staticmethod(read_conversation)

    def held_out_row_kinds(self, *, has_rewards: bool) -> dict[str, str]:
        """Return the kind of each held-out split: with rewards, the rows are also prepared as prompts to complete."""
        return {VALIDATION: "prompts", LEARNED_HELD_OUT: self.name} if has_rewards else {VALIDATION: self.name}

    def open(self, folder: Path, split: str, model: PolicyConfig, adapter: Any = None) -> Sequences:
        return open_sequences(folder, split)

    def omits_response(self, row: Row, column: str) -> bool:
        return omits_response(row, column)

    def record(self, tokenizer: PreTrainedTokenizerBase, job: Job, row: Row, where: str) -> Record:
        if TOKENS in row:
            return _make_tokenised_record(job, row, where)
        texts = None if tokenizer.chat_template else plain_text_columns(row, ("prompt",), ("completion", "response"))
        if texts and job.root is None and not job.conversation[1]:  # a system prompt needs a chat template
            check_characters(texts, where)
            if not texts[1].strip():
                raise SkippedRow(where, "without a completion to learn")
            tokens = continued_tokens(tokenizer, texts[0], texts[1], where)
            counts = {"truncated_rows": int(len(tokens[0]) > job.max_tokens), "continued_rows": 1}
            return Record((*truncate_tokens(tokens, job.max_tokens, where), where), False, counts)
        conversation = self.reader(row, where, *job.conversation, with_images=job.root is not None)
        tools = read_tools(row, where)
        check_characters([conversation, tools], where)
        if job.root is not None:
            if not isinstance(conversation, str):
                return _visual_sequence(job, conversation, tools, row, where)
            align_images([], row, where)  # refuse images, since plain text has no turn to show an image in
        tokens, is_merged = tokenise_turns(
            lambda turns: conversation_tokens(tokenizer, turns, where, tools, job.end_ids), conversation
        )
        ids_and_mask = truncate_tokens(tokens, job.max_tokens, where)
        counts = {
            "truncated_rows": int(len(tokens[0]) > job.max_tokens),
            "plain_rows": int(isinstance(conversation, str)),
        }
        return Record((*ids_and_mask, *job.no_images, where), is_merged, counts)


def _make_tokenised_record(job: Job, row: Row, location: str) -> Record:
    """Return the record of a sequence that a data packer has tokenised."""
    ids, labels = ([int(token) for token in row.get(name, ())] for name in (TOKENS, LABELS))
    mask = [int(label != UNTRAINED_LABEL) for label in labels]
    if len(ids) != len(labels) or any(m and token_id != b for token_id, b, m in zip(ids, labels, mask, strict=True)):
        raise DataError(
            f"{location}: {LABELS} must have a label for each of {TOKENS}: the token itself, or {UNTRAINED_LABEL} "
            f"where it is not learned; there are {len(ids)} and {len(labels)}"
        )
    ids_and_mask = truncate_tokens((ids, mask), job.max_tokens, location)
    return Record((*ids_and_mask, *job.no_images, location), False, {"truncated_rows": len(ids) > job.max_tokens})


def _visual_sequence(job: Job, conversation: list[Message], tools: Tools, row: Row, location: str) -> Record:
    processor = processor_for(job)
    placeholder_turns, image_refs, images = read_images(job, conversation, row, location)
    tokens, is_merged = tokenise_turns(
        lambda turns: visual_tokens(processor, turns, images, location, tools, job.end_ids), placeholder_turns
    )
    ids, mask = truncate_visual_tokens(tokens, job.max_tokens, location)
    counts = {"truncated_rows": len(tokens.ids) > job.max_tokens, "images": len(image_refs)}
    return Record((ids, mask, image_refs, location), is_merged, counts | {"image_tokens": tokens.num_image_tokens})
