"""Prompts to complete, with the reference answer that rewards compare a completion with."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from cosmos_core.config.schema.algorithm import AlgorithmConfig
from cosmos_core.config.schema.policy import PolicyConfig
from cosmos_core.config.schema.rl import RlConfig
from cosmos_core.config.schema.supervised import SupervisedConfig
from cosmos_core.data.columns import find_column
from cosmos_core.data.conversation import render_prompt
from cosmos_core.data.images import has_image_sizes, is_pillow_image
from cosmos_core.data.kinds.base import IDS_TYPE, VALIDATION_SPLIT, HeldOutSet, TokenisedKind
from cosmos_core.data.kinds.registry import load_row_kind
from cosmos_core.data.kinds.sequences import open_sequences
from cosmos_core.data.messages import (
    PROMPT_COLUMNS,
    ColumnTrackingRow,
    Message,
    Row,
    SkippedRow,
    is_image_part,
    read_held_out_prompt,
    read_prompt,
)
from cosmos_core.data.order import Mixture
from cosmos_core.data.prepared import (
    HELD_OUT_SEQUENCES_SPLIT,
    IndexedSequence,
    RowImages,
    get_split_path,
    has_split,
    open_table,
    read_mixture,
    read_row_kind,
)
from cosmos_core.data.records import Record, RecordSpec, check_surrogates, convert_turns, get_processor, read_images
from cosmos_core.data.rendering import check_tools
from cosmos_core.data.tool_calls import read_tools
from cosmos_core.data.user_dataset import RENDERED_COLUMN
from cosmos_core.data.visual import expand_image_placeholders
from cosmos_core.types import Prompt

_PROMPT_COLUMNS = ("prompt_ids", "prompt_text", "reference", "metadata")
_MEDIA_COLUMNS = ("image", "images", "video", "videos")


class Prompts(IndexedSequence[Prompt]):
    """Prompts to complete; the id of a prompt is its row number."""

    def __init__(self, table: pa.Table, mixture: Mixture | None = None) -> None:
        self._table, self.mixture = table, mixture
        self._row_images = RowImages(table)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def read_item(self, index: int) -> Prompt:
        ids, text, reference_response, metadata_json = (self._table[name][index].as_py() for name in _PROMPT_COLUMNS)
        source_label = self.mixture.get_source_label(index) if self.mixture else ""
        images, metadata = self._row_images[index], json.loads(metadata_json)
        return Prompt(index, tuple(ids), text, reference_response, images, metadata=metadata, source=source_label)


def open_prompts(folder: Path, split: str) -> Prompts:
    """Return the memory-mapped prompts of a split. Raise DataError if its file is missing, is damaged or has no
    prompts."""
    return Prompts(open_table(folder, split, load_row_kind("prompts")), read_mixture(get_split_path(folder, split)))


def find_prompts(folder: Path, split: str) -> Prompts | None:
    """Return the prompts of a split of prepared rows; None if the split is missing, or its rows are no prompts. Raise
    DataError if the file is damaged."""
    is_prompt_split = has_split(folder, split) and read_row_kind(folder, split) == PromptsKind.name
    return open_prompts(folder, split) if is_prompt_split else None


class PromptsKind(TokenisedKind):
    """Kind of rows that are text prompts, which an engine completes and rewards score."""

    name = "prompts"
    rows_purpose = "to complete (RL, validation by reward)"
    columns: ClassVar[dict[str, pa.DataType]] = {
        "prompt_ids": IDS_TYPE, "prompt_text": pa.string(), "reference": pa.string(), "metadata": pa.string()
    }  # fmt: skip
    is_prompt = True
    packer_method_name = "get_rollout_input"

    def open_prompts(
        self, folder: Path, split: str, algorithm: AlgorithmConfig, model: PolicyConfig
    ) -> Sequence[Prompt]:
        return open_prompts(folder, split)

    def open_held_out(self, folder: Path, algorithm: AlgorithmConfig, model: PolicyConfig, adapter: Any) -> HeldOutSet:
        """Return the held-out prompts, and the same rows as sequences with a loss if `prepare` has written them."""
        sequences_split = HELD_OUT_SEQUENCES_SPLIT
        held_out_sequences = open_sequences(folder, sequences_split) if has_split(folder, sequences_split) else None
        return HeldOutSet(held_out_sequences, open_prompts(folder, VALIDATION_SPLIT))

    def read(self, row: Row, location: str, algorithm: AlgorithmConfig) -> tuple[list[Message], str]:
        """Return the prompt of a row as turns, and its reference answer, with which rewards compare completions."""
        return _read_prompt_row(row, location, algorithm, with_images=True)

    def make_record(self, tokenizer: PreTrainedTokenizerBase, row_spec: RecordSpec, row: Row, location: str) -> Record:
        algorithm, render_settings = row_spec.recipe.train.train_policy, row_spec.prompt_rendering
        has_images, keeps_last_turn = row_spec.image_root is not None, render_settings.continue_final_message
        messages, reference_response = _read_prompt_row(
            row, location, algorithm, with_images=has_images, keeps_last_turn=keeps_last_turn
        )
        tools = read_tools(row, location)
        check_surrogates([messages, reference_response, tools], location)
        reward_columns = {**(row.original_row if isinstance(row, ColumnTrackingRow) else {}), **row}
        reward_columns.pop(RENDERED_COLUMN, None)
        prompt_column = algorithm.prompt_column_name if isinstance(algorithm, RlConfig) else ""
        reward_columns_json = serialise_row_for_rewards(reward_columns, messages, prompt_column)
        text: Any = row.get(RENDERED_COLUMN)
        has_merged_turns, image_counts = False, dict[str, int]()
        processor = get_processor(row_spec) if has_images and text is None else None
        turns, image_refs, images = read_images(row_spec, messages, row, location) if processor else (messages, [], [])
        if text is None:
            settings = replace(render_settings, tools=tuple(tools)) if tools else render_settings
            render_turns = partial(render_prompt, processor or tokenizer, location=location, settings=settings)
            text, has_merged_turns = convert_turns(render_turns, turns)
        if processor is None:
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        else:
            tokens = expand_image_placeholders(processor, text, [], images, location)
            ids, image_counts = tokens.ids, {"images": len(image_refs), "image_tokens": tokens.num_image_tokens}
            image_counts["sized_images"] = int(has_image_sizes(messages))
        if len(ids) > row_spec.max_tokens:
            raise SkippedRow(location, "with a prompt that leaves no room for a completion in policy.model_max_length")
        check_tools(tools, text, location)
        image_cells = [image_refs] if has_images else []
        record_values = (ids, text, reference_response, reward_columns_json, *image_cells, location)
        return Record(record_values, has_merged_turns, image_counts)


def _read_prompt_row(
    row: Row, location: str, algorithm: AlgorithmConfig, *, with_images: bool, keeps_last_turn: bool = False
) -> tuple[list[Message], str]:
    if isinstance(algorithm, RlConfig):
        prompt_settings = (algorithm.prompt_column_name, algorithm.response_column_name, algorithm.system_prompt)
        return read_prompt(row, location, *prompt_settings, keeps_last_turn=keeps_last_turn, with_images=with_images)
    # Read held-out rows of supervised learning like the training rows, so that both are rendered in the same form.
    assert isinstance(algorithm, SupervisedConfig)
    if not isinstance(row, ColumnTrackingRow):
        row = ColumnTrackingRow(row, algorithm.column_names, location)
    column, system_prompt = algorithm.conversation_column_name, algorithm.system_prompt
    return read_held_out_prompt(row, location, column, system_prompt, with_images=with_images)


def serialise_row_for_rewards(row: Row, prompt: list[Message], prompt_column: str = "") -> str:
    """Return the columns of a row as a JSON object for reward functions, without bytes and columns of media. The key
    `prompt` has the prompt, as a string if its column is a string, otherwise as turns. `prompt_column` is the name of
    this column in the recipe; empty: a known column."""
    present_prompt_column = prompt_column or find_column(row, PROMPT_COLUMNS)
    prompt_column_values = [row[present_prompt_column]] if present_prompt_column in row else [*row.values()]
    turn_contents = [turn["content"] for turn in prompt if turn["role"] != "system"]
    is_text = len(turn_contents) == 1 and isinstance(turn_contents[0], str) and turn_contents[0] in prompt_column_values
    kept_columns = {name: value for name, value in row.items() if name not in _MEDIA_COLUMNS}
    return json.dumps(_to_plain_json({**kept_columns, "prompt": turn_contents[0] if is_text else prompt}), default=str)


def _to_plain_json(row_value: Any) -> Any:
    """Return a value without bytes and images, and with Python types in place of NumPy's, so that JSON can represent
    it."""
    if isinstance(row_value, dict):
        if is_image_part(row_value):
            return {"type": "image"}
        return {str(name): _to_plain_json(element) for name, element in row_value.items() if not _is_binary(element)}
    if isinstance(row_value, list | tuple):
        return [_to_plain_json(element) for element in row_value if not _is_binary(element)]
    return row_value.tolist() if hasattr(row_value, "tolist") else row_value


def _is_binary(row_value: Any) -> bool:
    return isinstance(row_value, bytes) or is_pillow_image(row_value)
