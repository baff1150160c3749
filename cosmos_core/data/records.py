"""Conversion of rows of text to records of a prepared file, with the functions that all kinds of rows (`kinds/`) use.

Each row is read, tokenised and cut independently, in any process; `prepare.py` handles files and processes.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from cosmos_core.config.conditions import parse_range
from cosmos_core.config.media import media_settings
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.rl import RlConfig
from cosmos_core.config.schema.supervised import SupervisedConfig
from cosmos_core.data.chat import DEFAULT_RENDERING, PromptRendering
from cosmos_core.data.conversation import conversation_tokens, truncate_tokens
from cosmos_core.data.formats import Located
from cosmos_core.data.images import align_images, read_image
from cosmos_core.data.kinds.base import TokenisedKind
from cosmos_core.data.messages import Message, ReadRow, Row, SkippedRow, propose_merged_turns
from cosmos_core.data.rendering import RefusedRow, Tools
from cosmos_core.data.statistics import Chunk, SkippedSource
from cosmos_core.data.visual import truncate_visual_tokens, visual_tokens
from cosmos_core.errors import DataError
from cosmos_core.models.chat_templates import set_template
from cosmos_core.models.processor import load_processor

if TYPE_CHECKING:
    from PIL.Image import Image

Ref = dict[str, Any]
"""Fields of an `ImageRef` as a dictionary."""
_DEFAULT_COLUMN = SupervisedConfig.model_fields["conversation_column_name"].default


@dataclass(frozen=True)
class Job:
    """Settings for converting the rows of one split to records."""

    recipe: Recipe
    kind: TokenisedKind
    max_tokens: int
    """Maximum length in tokens: longer sequences are cut, longer prompts are left out."""
    model: str
    root: Path | None
    """Folder that image paths are relative to; None if the model reads only text."""
    stored_root: Path | None = None
    """Folder that the image paths in the prepared file are relative to; None: `root`."""
    end_ids: tuple[int, ...] = ()
    """Token ids at which generation stops."""
    chat: PromptRendering = DEFAULT_RENDERING
    """Settings for rendering prompts to complete."""
    rates: Mapping[str, float | None] | None = None
    """Pass rate of each prompt by its rendered text; None: the rows have a column `pass_rate`."""
    pass_rate_range: str = ""
    """Range of the pass rates of the rows to keep; empty: all rows."""
    is_data_term: bool = False
    """Whether the rows are those of a supervised loss (data term) that is trained in addition to rollouts."""
    longest_completion: int = 0
    """Maximum number of tokens of a completion, unless a long prompt leaves fewer."""

    @property
    def column(self) -> str:
        """Return the conversation column that the recipe names; empty if the recipe has the default name."""
        name = self.conversation[0]
        return "" if name == _DEFAULT_COLUMN else name

    @property
    def conversation(self) -> tuple[str, str]:
        """Return the column of conversations to learn, and the system prompt to insert if there is no system turn."""
        policy = self.recipe.train.train_policy
        if isinstance(policy, SupervisedConfig):
            return policy.conversation_column_name, policy.system_prompt
        data_term = policy.supervised_rows if self.is_data_term else None
        if data_term is None or not isinstance(policy, RlConfig):
            return "", ""
        return data_term.conversation_column_name, policy.system_prompt

    @property
    def column_names(self) -> dict[str, str]:
        """Return the recipe's names for the columns of prompt and responses, by their standard names."""
        policy = self.recipe.train.train_policy
        return policy.column_names if isinstance(policy, SupervisedConfig) else {}

    @property
    def no_images(self) -> list[list[Ref]]:
        """Return the value of the column `images` for a row without images; no value if there is no such column."""
        return [] if self.root is None else [[]]

    @property
    def schema(self) -> pa.Schema:
        """Return the Arrow schema of the prepared file."""
        return self.kind.schema_of(self.stored_root or self.root)


class Record(NamedTuple):
    """Row of a prepared file, with counts for the statistics of its split."""

    values: tuple[Any, ...]
    """One value per column of the file; the last is the location of the row."""
    is_merged: bool
    counts: dict[str, int]
    """Counts about the row for the statistics of the split, with the keys of `Chunk.counts`."""


def convert_rows(tokenizer: PreTrainedTokenizerBase, job: Job, rows: list[Located]) -> Chunk:
    """Convert rows to one record batch; rows that cannot be used are skipped and recorded with a reason."""
    records: list[Record] = []
    skipped_rows = []
    counts: Counter[str] = Counter()
    unread_counts: Counter[str] = Counter()
    for location, raw_row in rows:
        try:
            row = ReadRow(raw_row, job.column_names, location)
            record = job.kind.record(tokenizer, job, row, location)
            if job.pass_rate_range:
                _check_pass_rate(job, row, record, location)
            records.append(record)
            unread_counts.update(row.unread_columns)
            counts["other_column"] += bool(job.column) and row.get(job.column) is None
            counts["text_alone"] += job.kind.omits_response(row, job.column)
        except SkippedRow as skipped:
            refusal = f"{location}: {skipped.reason}" if isinstance(skipped, RefusedRow) else ""
            skipped_rows.append(SkippedSource(skipped.reason, location, refusal))
        except DataError as error:
            skipped_rows.append(SkippedSource("that cannot be read", str(error), str(error)))
    schema = job.schema
    arrays = [pa.array([record.values[i] for record in records], field.type) for i, field in enumerate(schema)]
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    counts["learned_ends"] = _count_learned_ends(batch, job)
    for record in records:
        counts.update(record.counts)
    merged_locations = [record.values[-1] for record in records if record.is_merged]
    return Chunk(batch, skipped_rows, merged_locations, counts, unread_counts)


def read_pass_rates(file: Path) -> dict[str, float | None]:
    """Return the pass rate of each prompt in a file, by the prompt's text; None if no row of the prompt was sampled.
    Raise DataError if the file does not exist, or a line has no prompt or no rate."""
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
        return {line["prompt"]: line["pass_rate"] for line in sorted(lines, key=lambda x: x["pass_rate"] is not None)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        problem = f"dataset.pass_rates = {str(file)!r} is no file of pass rates"
        raise DataError(f"{problem} ({reason}); name another") from error


def _check_pass_rate(job: Job, row: Row, record: Record, location: str) -> None:
    """Raise SkippedRow if the pass rate of a row is outside of the job's range."""
    rates: Mapping[str, Any] = row if job.rates is None else job.rates
    key, holder = "pass_rate", "its row"
    if job.rates is not None:
        key, holder = record.values[list(job.kind.columns).index("prompt_text")], "dataset.pass_rates"
        if record.counts.get("images"):  # prompts with the same text can show different images
            raise DataError(f"{location}: {holder} are by the text of prompts without images; use a column pass_rate")
    if key not in rates:
        raise DataError(f"{location}: {holder} has no pass rate, which dataset.keep = {job.pass_rate_range!r} needs")
    raw_rate = rates[key]
    try:
        pass_rate = None if raw_rate is None else float(raw_rate)
    except (TypeError, ValueError):
        raise DataError(f"{location}: the pass rate {raw_rate!r} of {holder} is no number or null") from None
    if pass_rate is not None and not parse_range(job.pass_rate_range)(pass_rate):
        raise SkippedRow(location, f"with a pass rate outside of {job.pass_rate_range}")


def _count_learned_ends(batch: pa.RecordBatch, job: Job) -> int:
    """Return the number of end tokens that are learned in a batch."""
    num_learned_ends = 0
    for columns in zip(job.kind.id_columns, job.kind.mask_columns, strict=False):
        ids, mask = (batch.column(name).values.to_numpy() for name in columns)
        num_learned_ends += int((np.isin(ids, job.end_ids) & (mask == 1)).sum())
    return num_learned_ends


def read_images(
    job: Job, turns: list[Message], row: Row, location: str
) -> tuple[list[Message], list[Ref], list[Image]]:
    """Return the turns with a placeholder part for each image, the fields of their `ImageRef`s, and the images."""
    assert job.root is not None
    placeholder_turns, sources = align_images(turns, row, location)
    refs_and_images = [read_image(source, job.root, location, job.stored_root) for source in sources]
    image_refs = [asdict(image_ref) for image_ref, _ in refs_and_images]
    return placeholder_turns, image_refs, [image for _, image in refs_and_images]


def image_root(recipe: Recipe, model: str, rows_folder: Path) -> Path | None:
    """Return the folder that image paths are relative to, of the recipe or of the rows; None if only text is read."""
    media, policy = media_settings(recipe), recipe.policy
    if processor_of(model, policy.model_revision, media.pixels, policy.chat_template) is None:
        return None
    return Path(os.path.expanduser(media.media_path)).absolute() if media.media_path else rows_folder


def processor_for(job: Job) -> ProcessorMixin:
    """Return the processor of the model, which reads images."""
    policy = job.recipe.policy
    processor = processor_of(job.model, policy.model_revision, media_settings(job.recipe).pixels, policy.chat_template)
    assert processor is not None
    return processor


@lru_cache(maxsize=1)
def processor_of(
    model: str, revision: str | None, pixels: tuple[tuple[str, int], ...], chat_template: str | None
) -> ProcessorMixin | None:
    """Return the processor of a model, cached for the next row; None if the model reads only text."""
    processor = load_processor(model, revision, pixels)
    if processor is not None and chat_template is not None:
        set_template(processor.tokenizer, chat_template)
        processor.chat_template = processor.tokenizer.chat_template
    return processor


_Tokens = TypeVar("_Tokens")


def tokenise_turns(tokenise_fn: Callable[[list[Message]], _Tokens], turns: list[Message]) -> tuple[_Tokens, bool]:
    """Tokenise turns, merged if the chat template refuses them; return the tokens and whether turns were merged."""
    try:
        return tokenise_fn(turns), False
    except RefusedRow:
        for merged_turns in propose_merged_turns(turns):
            with suppress(RefusedRow):
                return tokenise_fn(merged_turns), True
        raise


def make_text_record(
    job: Job, tokens: tuple[list[int], list[int]], location: str, *, is_merged: bool = False, **counts: int
) -> Record:
    """Return the record of one sequence of text, cut to the maximum length; errors are those of `truncate_tokens`."""
    counts["truncated_rows"] = int(len(tokens[0]) > job.max_tokens)
    ids_and_mask = truncate_tokens(tokens, job.max_tokens, location)
    return Record((*ids_and_mask, *job.no_images, location), is_merged, counts)


def make_conversation_record(
    tokenizer: PreTrainedTokenizerBase, job: Job, turns: list[Message], tools: Tools, row: Row, location: str
) -> Record:
    """Return the record of one conversation, with the images of its row if the model reads images; errors are those of
    `conversation_tokens` and `visual_tokens`."""
    if job.root is None:
        text_tokens, is_merged = tokenise_turns(
            lambda turns: conversation_tokens(tokenizer, turns, location, tools, job.end_ids), turns
        )
        return make_text_record(job, text_tokens, location, is_merged=is_merged)
    processor = processor_for(job)
    placeholder_turns, image_refs, images = read_images(job, turns, row, location)
    tokens, is_merged = tokenise_turns(
        lambda turns: visual_tokens(processor, turns, images, location, tools, job.end_ids), placeholder_turns
    )
    ids, mask = truncate_visual_tokens(tokens, job.max_tokens, location)
    counts = {"truncated_rows": int(len(tokens.ids) > job.max_tokens), "images": len(image_refs)}
    return Record((ids, mask, image_refs, location), is_merged, counts | {"image_tokens": tokens.num_image_tokens})


def check_characters(content: Any, location: str) -> None:
    """Raise SkippedRow if a row has a lone surrogate (half of a character above U+FFFF), which tokenizers refuse."""
    try:
        json.dumps(content, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise SkippedRow(location, "with half a character (a lone surrogate)") from None
