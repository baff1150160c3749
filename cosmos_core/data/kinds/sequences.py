"""Token sequences to learn, with a loss mask: conversations, or plain text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase

from cosmos_core.config.schema.policy import PolicyConfig
from cosmos_core.data.conversation import tokenise_conversation, tokenise_prompt_and_completion
from cosmos_core.data.images import align_images
from cosmos_core.data.kinds.base import IDS_TYPE, MASK_TYPE, VALIDATION_SPLIT, PreparedRows, StepSeed, TokenisedKind
from cosmos_core.data.kinds.registry import load_row_kind
from cosmos_core.data.messages import Row, SkippedRow, omits_response, read_conversation, read_plain_texts
from cosmos_core.data.prepared import (
    HELD_OUT_SEQUENCES_SPLIT,
    RowImages,
    get_split_path,
    make_damaged_file_error,
    open_table,
    read_mixture,
)
from cosmos_core.data.records import Record, RecordSpec, check_surrogates, make_conversation_record, make_text_record
from cosmos_core.data.sample import Sample
from cosmos_core.data.tool_calls import read_tools
from cosmos_core.data.user_dataset import IGNORED_LABEL, LABELS_COLUMN, TOKENS_COLUMN
from cosmos_core.errors import DataError, first_line
from cosmos_core.types import ImageRef

_TOKEN_ID_LIMIT = 1 << 31  # greater token ids are refused, because prepared rows store 32-bit integers


class Sequences(PreparedRows):
    """Token sequences to learn; item i is `(input_ids int64, loss_mask uint8)`, copied from the memory-mapped file."""

    def __init__(
        self, table: pa.Table, path: Path, ids_column: str = "input_ids", mask_column: str = "loss_mask"
    ) -> None:
        """Open the sequences in the prepared table `table` of the file `path`. `ids_column` and `mask_column` are the
        names of the columns with token ids and loss masks."""
        self.path, self.mixture = path, read_mixture(path)
        self._id_column, self._mask_column = table[ids_column], table[mask_column]
        self.lengths: np.ndarray = pc.list_value_length(self._id_column).to_numpy().astype(np.int64)
        """Number of tokens of each row, int64."""
        if not np.array_equal(self.lengths, pc.list_value_length(self._mask_column).to_numpy()):
            raise make_damaged_file_error(path, f"{mask_column} and {ids_column} differ in length")
        self._row_images = RowImages(table)
        self.num_images = self._row_images.num_images
        """Number of images of each row, int64."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        token_ids, mask = (list_column[index].values.to_numpy() for list_column in (self._id_column, self._mask_column))
        return token_ids.astype(np.int64), mask.copy()

    def images(self, index: int) -> tuple[ImageRef, ...]:
        """Return the images of row number `index` in the order in which the row shows them, with absolute paths."""
        return self._row_images[index]

    def token_counts(self, *, is_packed: bool) -> np.ndarray:
        return self.lengths

    def samples(self, row_ids: Sequence[int], seed: StepSeed = None, micro_batch: int | None = None) -> list[Sample]:
        """Return the training samples of the rows with numbers `row_ids`: tokens, loss mask and images of each row."""
        return [
            Sample(*self[i], images=self.images(i), micro_batch=micro_batch, source=self.get_source_label(i))
            for i in row_ids
        ]


def open_sequences(folder: Path, split: str) -> Sequences:
    """Return the memory-mapped sequences of a split. Raise DataError if its file is missing, is damaged or has no
    sequences."""
    return Sequences(open_table(folder, split, load_row_kind("sequences")), get_split_path(folder, split))


class SequencesKind(TokenisedKind):
    """Kind of rows that are token sequences to learn, from conversations or plain text."""

    name = "sequences"
    rows_purpose = "to learn (SFT)"
    columns: ClassVar[dict[str, pa.DataType]] = {"input_ids": IDS_TYPE, "loss_mask": MASK_TYPE}
    read_row_fn = staticmethod(read_conversation)

    def held_out_row_kinds(self, *, has_rewards: bool) -> dict[str, str]:
        """Return the name of the kind of rows of each held-out split, by the name of the split. With rewards, the
        held-out rows are prepared twice: as prompts to complete, and as sequences with a loss."""
        if not has_rewards:
            return {VALIDATION_SPLIT: self.name}
        return {VALIDATION_SPLIT: "prompts", HELD_OUT_SEQUENCES_SPLIT: self.name}

    def open(self, folder: Path, split: str, model: PolicyConfig, adapter: Any = None) -> Sequences:
        return open_sequences(folder, split)

    def omits_response(self, row: Row, column: str) -> bool:
        return omits_response(row, column)

    def make_record(self, tokenizer: PreTrainedTokenizerBase, row_spec: RecordSpec, row: Row, location: str) -> Record:
        if row.get(TOKENS_COLUMN) is not None:
            return make_text_record(row_spec, _read_packer_tokens(row, location), location)
        has_images = row_spec.image_root is not None
        text_column_names = ("prompt",), ("completion", "response")
        plain_texts = None if tokenizer.chat_template else read_plain_texts(row, location, *text_column_names)
        # Concatenate plain texts only if the recipe has no system prompt, which only a chat template can insert.
        if plain_texts and not has_images and not row_spec.conversation_settings[1]:
            check_surrogates(plain_texts, location)
            if not plain_texts[1].strip():
                raise SkippedRow(location, "without a completion to learn")
            ids_and_mask = tokenise_prompt_and_completion(tokenizer, plain_texts[0], plain_texts[1], location)
            return make_text_record(row_spec, ids_and_mask, location, continued_rows=1)
        conversation = self.read_row_fn(row, location, *row_spec.conversation_settings, with_images=has_images)
        tools = read_tools(row, location)
        check_surrogates([conversation, tools], location)
        if not isinstance(conversation, str):
            return make_conversation_record(tokenizer, row_spec, conversation, tools, row, location)
        if has_images:
            # Let `align_images` raise an error if the row has images, because plain text cannot show them.
            align_images([], row, location)
        ids_and_mask = tokenise_conversation(tokenizer, conversation, location)
        return make_text_record(row_spec, ids_and_mask, location, plain_rows=1)


def _read_packer_tokens(row: Row, location: str) -> tuple[list[int], list[int]]:
    """Return token ids and loss mask of a sequence that a data packer has tokenised."""
    try:
        ids, labels = ([int(token) for token in row.get(name, ())] for name in (TOKENS_COLUMN, LABELS_COLUMN))
    except (TypeError, ValueError, RuntimeError) as error:  # the packer returned no flat list of integers
        problem = f"{TOKENS_COLUMN} and {LABELS_COLUMN} must be flat lists of integers: {first_line(error)}"
        raise DataError(f"{location}: {problem}") from error
    if not all(0 <= token_id < _TOKEN_ID_LIMIT for token_id in ids):
        raise DataError(f"{location}: {TOKENS_COLUMN} must be from 0 to 2**31 - 1; some are {min(ids)} and {max(ids)}")
    mask = [int(label != IGNORED_LABEL) for label in labels]
    if len(ids) != len(labels) or any(m and token_id != b for token_id, b, m in zip(ids, labels, mask, strict=True)):
        rule = f"the token itself, or {IGNORED_LABEL} where it is not learned; there are {len(ids)} and {len(labels)}"
        raise DataError(f"{location}: {LABELS_COLUMN} must have a label for each of {TOKENS_COLUMN}: {rule}")
    return ids, mask
