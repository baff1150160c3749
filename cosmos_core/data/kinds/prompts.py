"""Prompts to complete, with the reference answer that rewards compare a completion with."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from cosmos_core.config.schema.algorithm import AlgorithmConfig
from cosmos_core.config.schema.policy import PolicyConfig
from cosmos_core.config.schema.rl import RlConfig
from cosmos_core.config.schema.supervised import SupervisedConfig
from cosmos_core.data.conversation import tokenize_prompt, tokenize_text
from cosmos_core.data.kinds.base import IDS, VALIDATION, HeldOut, TokenisedKind
from cosmos_core.data.kinds.registry import row_kind
from cosmos_core.data.kinds.sequences import open_sequences
from cosmos_core.data.messages import (
    PROMPT_COLUMNS,
    Message,
    ReadRow,
    Row,
    has_value,
    is_image_part,
    read_held_out,
    read_prompt,
)
from cosmos_core.data.order import Mixture
from cosmos_core.data.prepared import (
    LEARNED_HELD_OUT,
    IndexedSequence,
    RowImages,
    has_split,
    mixture_of,
    open_table,
    read_row_kind,
    split_path,
)
from cosmos_core.data.records import Job, Record, check_characters, processor_for, read_images, tokenise_turns
from cosmos_core.data.rendering import check_tools
from cosmos_core.data.tool_calls import read_tools
from cosmos_core.data.user_dataset import RENDERED_COLUMN
from cosmos_core.data.visual import visual_prompt
from cosmos_core.types import Prompt

_COLUMNS = ("prompt_ids", "prompt_text", "reference", "metadata")
_MEDIA_COLUMNS = ("image", "images", "video", "videos")


class Prompts(IndexedSequence[Prompt]):
    """Prompts to complete; the id of a prompt is its row number."""

    def __init__(self, table: pa.Table, mixture: Mixture | None = None) -> None:
        self._table, self.mixture = table, mixture
        self._images = RowImages(table)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def item(self, index: int) -> Prompt:
        ids, text, reference_response, metadata_json = (self._table[name][index].as_py() for name in _COLUMNS)
        source = self.mixture.label_of(index) if self.mixture else ""
        values = json.loads(metadata_json)
        return Prompt(index, tuple(ids), text, reference_response, self._images[index], metadata=values, source=source)


def open_prompts(folder: Path, split: str) -> Prompts:
    """Return the memory-mapped prompts of a split; errors are those of `open_table`."""
    return Prompts(open_table(folder, split, row_kind("prompts")), mixture_of(split_path(folder, split)))


def find_prompts(folder: Path, split: str) -> Prompts | None:
    """Return the prompts of a split; None if the split does not exist, or its rows are not prompts to complete. Raise
    DataError if the file of the split is damaged."""
    has_prompts = has_split(folder, split) and read_row_kind(folder, split) == PromptsKind.name
    return open_prompts(folder, split) if has_prompts else None


class PromptsKind(TokenisedKind):
    """Kind of rows that are text prompts, which an engine completes and rewards score."""

    name = "prompts"
    purpose = "to complete (RL, validation by reward)"
    columns: ClassVar[dict[str, pa.DataType]] = {
        "prompt_ids": IDS, "prompt_text": pa.string(), "reference": pa.string(), "metadata": pa.string()
    }  # fmt: skip
    is_completed = True
    packer_method = "get_rollout_input"

    def prompts(self, folder: Path, split: str, policy: AlgorithmConfig, model: PolicyConfig) -> Sequence[Prompt]:
        return open_prompts(folder, split)

    def open_held_out(self, folder: Path, policy: AlgorithmConfig, model: PolicyConfig, adapter: Any) -> HeldOut:
        """Return the held-out prompts, and the same rows as sequences with a loss if `prepare` has written them."""
        held_out_sequences = open_sequences(folder, LEARNED_HELD_OUT) if has_split(folder, LEARNED_HELD_OUT) else None
        return HeldOut(held_out_sequences, open_prompts(folder, VALIDATION))

    def read(self, row: Row, where: str, policy: AlgorithmConfig) -> tuple[list[Message], str]:
        """Return the prompt of a row as turns, and its reference answer."""
        return _read_prompt_row(row, where, policy, with_images=True)

    def record(self, tokenizer: PreTrainedTokenizerBase, job: Job, row: Row, where: str) -> Record:
        policy, has_images, render_settings = job.recipe.train.train_policy, job.root is not None, job.chat
        messages, reference_response = _read_prompt_row(
            row, where, policy, with_images=has_images, keeps_last=render_settings.continue_final_message
        )
        tools = read_tools(row, where)
        check_characters([messages, reference_response, tools], where)
        reward_columns = columns_for_rewards(
            {name: value for name, value in row.items() if name != RENDERED_COLUMN}, messages,
            policy.prompt_column_name if isinstance(policy, RlConfig) else "",
        )  # fmt: skip
        if (rendered_prompt := row.get(RENDERED_COLUMN)) is not None:
            ids, text = tokenize_text(tokenizer, rendered_prompt, job.max_tokens, where)
            return Record((ids, text, reference_response, reward_columns, *job.no_images, where), False, {})
        if tools:
            render_settings = replace(render_settings, tools=tuple(tools))
        if job.root is not None:
            processor = processor_for(job)
            placeholder_turns, image_refs, images = read_images(job, messages, row, where)
            (tokens, text), is_merged = tokenise_turns(
                lambda turns: visual_prompt(processor, turns, images, job.max_tokens, where, render_settings),
                placeholder_turns,
            )
            check_tools(tools, text, where)
            counts = {"images": len(image_refs), "image_tokens": tokens.num_image_tokens}
            return Record((tokens.ids, text, reference_response, reward_columns, image_refs, where), is_merged, counts)
        (ids, text), is_merged = tokenise_turns(
            lambda turns: tokenize_prompt(tokenizer, turns, job.max_tokens, where, render_settings), messages
        )
        check_tools(tools, text, where)
        return Record((ids, text, reference_response, reward_columns, where), is_merged, {})


def _read_prompt_row(
    row: Row, location: str, policy: AlgorithmConfig, *, with_images: bool, keeps_last: bool = False
) -> tuple[list[Message], str]:
    if isinstance(policy, RlConfig):
        reader_arguments = (policy.prompt_column_name, policy.response_column_name, policy.system_prompt)
        return read_prompt(row, location, *reader_arguments, keeps_last_turn=keeps_last, with_images=with_images)
    # a held-out row of supervised learning is rendered in the same form as the training rows
    assert isinstance(policy, SupervisedConfig)
    if not isinstance(row, ReadRow):
        row = ReadRow(row, policy.column_names, location)
    return read_held_out(row, location, policy.conversation_column_name, policy.system_prompt, with_images=with_images)


def columns_for_rewards(row: Row, prompt: list[Message], prompt_column: str = "") -> str:
    """Return the columns of a row as JSON without bytes and media columns, for reward functions. The key `prompt` holds
    the prompt: as text if the column of the prompt is that text, else as turns. `prompt_column`: see `read_prompt`."""
    column = prompt_column or next((name for name in PROMPT_COLUMNS if has_value(row, name)), "")
    values = [row[column]] if column in row else [*row.values()]
    texts = [turn["content"] for turn in prompt if turn["role"] != "system"]
    is_text = len(texts) == 1 and isinstance(texts[0], str) and texts[0] in values
    columns = {name: value for name, value in row.items() if name not in _MEDIA_COLUMNS}
    return json.dumps(_to_plain_json({**columns, "prompt": texts[0] if is_text else prompt}), default=str)


def _to_plain_json(value: Any) -> Any:
    """Return a value without bytes, and with NumPy values as Python ones, for JSON."""
    if isinstance(value, dict):
        if is_image_part(value):
            return {"type": "image"}
        return {str(name): _to_plain_json(element) for name, element in value.items() if not isinstance(element, bytes)}
    if isinstance(value, list | tuple):
        return [_to_plain_json(element) for element in value]
    return value.tolist() if hasattr(value, "tolist") else value
