"""Pairs of completions of one prompt to compare: a chosen and a rejected completion."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from cosmos_core.config.schema.policy import PolicyConfig
from cosmos_core.data.conversation import tokenise_prompt_and_completion
from cosmos_core.data.images import align_images, get_column_images
from cosmos_core.data.kinds.base import IDS_TYPE, MASK_TYPE, PreparedRows, StepSeed, TokenisedKind
from cosmos_core.data.kinds.registry import load_row_kind
from cosmos_core.data.kinds.sequences import Sequences
from cosmos_core.data.messages import Message, Row, SkippedRow, mask_assistant_turns, read_plain_texts
from cosmos_core.data.preferences import Preference, read_preference, remove_repeated_prompt
from cosmos_core.data.prepared import get_split_path, open_table, read_mixture
from cosmos_core.data.records import Record, RecordSpec, check_surrogates, make_conversation_record, make_text_record
from cosmos_core.data.sample import Sample
from cosmos_core.data.tool_calls import read_tools
from cosmos_core.errors import DataError


class PreferencePairs(PreparedRows):
    """Pairs of completions to compare: `chosen[i]` and `rejected[i]` begin with the same prompt, which has no loss."""

    has_sample_pairs = True

    def __init__(self, table: pa.Table, path: Path) -> None:
        self.path, self.mixture = path, read_mixture(path)
        self.chosen = Sequences(table, path, "chosen_ids", "chosen_mask")
        self.rejected = Sequences(table, path, "rejected_ids", "rejected_mask")

    def __len__(self) -> int:
        return len(self.chosen)

    def token_counts(self, *, is_packed: bool) -> np.ndarray:
        """Return the number of tokens that each pair takes in a micro-batch: the sum of both sequences if packed,
        otherwise twice the longer sequence."""
        sequence_lengths = np.stack([self.chosen.lengths, self.rejected.lengths])
        return sequence_lengths.sum(0) if is_packed else 2 * sequence_lengths.max(0)

    def micro_batches(self, row_ids: np.ndarray, max_rows: int) -> list[list[int]]:
        """Divide the pairs `row_ids` into micro-batches of at most `max_rows` pairs with similar lengths and equal
        numbers of images."""
        padded_lengths, num_images = self._padded_lengths, self.chosen.num_images
        rows_by_length = sorted(row_ids.tolist(), key=lambda i: -padded_lengths[i])
        row_groups = [[i for i in rows_by_length if num_images[i] == n] for n in np.unique(num_images[rows_by_length])]
        return [rows[start : start + max_rows] for rows in row_groups for start in range(0, len(rows), max_rows)]

    @cached_property
    def _padded_lengths(self) -> np.ndarray:
        return self.token_counts(is_packed=False)

    def samples(self, row_ids: Sequence[int], seed: StepSeed = None, micro_batch: int | None = None) -> list[Sample]:
        """Return the chosen, then the rejected sample of each pair, each with its log-probability under the reference
        policy; 0 without a reference policy."""
        samples = []
        for i in row_ids:
            logprobs = (0.0, 0.0) if self.reference_logprobs is None else self.reference_logprobs[i].tolist()
            images = self.chosen.images(i)  # use the same images for both completions, because the prompt shows them
            for sequences, logprob in zip((self.chosen, self.rejected), logprobs, strict=True):
                sample_fields: dict[str, Any] = {"micro_batch": micro_batch, "source": self.get_source_label(i)}
                samples.append(Sample(*sequences[i], reference_logprob=logprob, images=images, **sample_fields))
        return samples


def open_pairs(folder: Path, split: str) -> PreferencePairs:
    """Return the memory-mapped pairs of a split. Raise DataError if its file is missing, is damaged or has no pairs."""
    return PreferencePairs(open_table(folder, split, load_row_kind("pairs")), get_split_path(folder, split))


class PairsKind(TokenisedKind):
    """Kind of rows that are a prompt with a chosen and a rejected completion."""

    name = "pairs"
    rows_purpose = "to compare (DPO)"
    columns: ClassVar[dict[str, pa.DataType]] = {
        "chosen_ids": IDS_TYPE, "chosen_mask": MASK_TYPE, "rejected_ids": IDS_TYPE, "rejected_mask": MASK_TYPE
    }  # fmt: skip
    packer_method_name = None
    has_one_response = False
    read_row_fn = staticmethod(read_preference)

    def open(self, folder: Path, split: str, model: PolicyConfig, adapter: Any = None) -> PreferencePairs:
        return open_pairs(folder, split)

    def make_record(self, tokenizer: PreTrainedTokenizerBase, row_spec: RecordSpec, row: Row, location: str) -> Record:
        has_images = row_spec.image_root is not None
        preference_pair = self.read_row_fn(row, location, *row_spec.conversation_settings, with_images=has_images)
        # Without a chat template, texts are concatenated. Images and a system prompt require a template.
        is_plain_text = not (tokenizer.chat_template or has_images or row_spec.conversation_settings[1])
        if is_plain_text and (plain_texts := read_plain_texts(row, location, ("prompt",), ("chosen",), ("rejected",))):
            preference_pair = Preference(plain_texts[0], *(remove_repeated_prompt(*plain_texts) or plain_texts[1:]))
        prompt, *completions = preference_pair
        tools = read_tools(row, location)
        check_surrogates([prompt, *completions, tools], location)
        if has_images and get_column_images(row, ("rejected_images",)) not in ([], get_column_images(row)):
            problem = "column 'rejected_images' differs from the images of the chosen completion"
            raise DataError(f"{location}: {problem}; show both in the prompt, or leave the row out")
        if has_images and isinstance(prompt, str):
            # Let `align_images` raise an error if the row has images, because plain text cannot show them.
            align_images([], row, location)

        def make_completion_record(completion: list[Message] | str) -> Record:
            if isinstance(prompt, str) or isinstance(completion, str):
                ids_and_mask = tokenise_prompt_and_completion(tokenizer, str(prompt), str(completion), location)
                return make_text_record(row_spec, ids_and_mask, location)
            turns = [*mask_assistant_turns(prompt), *completion]
            return make_conversation_record(tokenizer, row_spec, turns, tools, row, location)

        chosen, rejected = map(make_completion_record, completions)
        (chosen_ids, _, *images), (rejected_ids, _, *rejected_images) = chosen.values, rejected.values
        if images != rejected_images:
            raise DataError(f"{location}: chosen and rejected show different images; show them in the prompt")
        is_truncated = bool(chosen.counts["truncated_rows"] or rejected.counts["truncated_rows"])
        if chosen_ids == rejected_ids:
            truncation_note = " up to policy.model_max_length" if is_truncated else ""
            raise SkippedRow(location, f"with equal chosen and rejected{truncation_note}")
        num_image_tokens = sum(record.counts.get("image_tokens", 0) for record in (chosen, rejected))
        row_counts = chosen.counts | {"truncated_rows": is_truncated, "image_tokens": num_image_tokens}
        record_values = (*chosen.values[:2], *rejected.values[:2], *images)
        return Record(record_values, chosen.has_merged_turns or rejected.has_merged_turns, row_counts)
