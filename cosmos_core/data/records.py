"""Conversion of rows of text to records of a prepared file: the functions that the kinds of rows (`kinds/`) share.

Each row is read, tokenised and cut independently, in any process; `prepare.py` handles files and processes.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from cosmos_core.config.conditions import parse_pass_rate_range
from cosmos_core.config.media import image_settings
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.rl import RlConfig
from cosmos_core.config.schema.supervised import SupervisedConfig
from cosmos_core.data.chat import DEFAULT_RENDERING, PromptRendering
from cosmos_core.data.columns import is_filled
from cosmos_core.data.conversation import tokenise_conversation, truncate_tokens
from cosmos_core.data.formats import LocatedRow
from cosmos_core.data.images import align_images, has_image_sizes, read_image
from cosmos_core.data.kinds.base import TokenisedKind
from cosmos_core.data.learned_spans import find_learned_spans, list_added_tokens
from cosmos_core.data.messages import ColumnTrackingRow, Message, Row, SkippedRow, propose_merged_turns
from cosmos_core.data.rendering import RefusedRow, Tools
from cosmos_core.data.statistics import RowChunk, SkippedRowEntry
from cosmos_core.data.template_limits import share_template_timer
from cosmos_core.data.user_dataset import RENDERED_COLUMN
from cosmos_core.data.visual import expand_image_placeholders
from cosmos_core.errors import DataError
from cosmos_core.models.chat_templates import set_chat_template
from cosmos_core.models.processor import load_processor

if TYPE_CHECKING:
    from PIL.Image import Image

ImageFields = dict[str, Any]
"""Fields of an `ImageRef`, a reference to an image of a prepared row, as a dictionary."""
_IdsAndMask = tuple[list[int], list[int]]
_DEFAULT_CONVERSATION_COLUMN = SupervisedConfig.model_fields["conversation_column_name"].default


@dataclass(frozen=True)
class RecordSpec:
    """Settings for converting the rows of one split to records of a prepared file."""

    recipe: Recipe
    row_kind: TokenisedKind
    max_tokens: int
    """Maximum length in tokens: longer sequences are cut, longer prompts are left out."""
    model: str
    image_root: Path | None
    """Folder that image paths are relative to; None if the model reads only text."""
    stored_root: Path | None = None
    """Folder that the image paths in the prepared file are relative to; None: `image_root`."""
    stop_ids: tuple[int, ...] = ()
    """Token ids at which generation stops."""
    prompt_rendering: PromptRendering = DEFAULT_RENDERING
    """Settings for rendering prompts to complete."""
    pass_rates: Mapping[str, float | None] | None = None
    """Known pass rates of prompts, by the rendered text of the prompt; None: the rows have a column `pass_rate`."""
    pass_rate_range: str = ""
    """Pass rates of the rows to keep, as text such as `0.1 <= pass_rate <= 0.9`; empty: all rows are kept."""
    is_data_term: bool = False
    """Whether the rows are those of a supervised loss (data term) that is trained in addition to rollouts."""
    max_completion_tokens: int = 0
    """Maximum number of tokens of a completion; a completion after a long prompt gets fewer."""

    @property
    def conversation_column(self) -> str:
        """Return the name of the conversation column in the recipe; empty if the recipe leaves the default."""
        name = self.conversation_settings[0]
        return "" if name == _DEFAULT_CONVERSATION_COLUMN else name

    @property
    def conversation_settings(self) -> tuple[str, str]:
        """Return the name of the column with the conversations to learn, and the system prompt to insert into rows
        without a system turn."""
        policy = self.recipe.train.train_policy
        if isinstance(policy, SupervisedConfig):
            return policy.conversation_column_name, policy.system_prompt
        data_term = policy.supervised_rows if self.is_data_term else None
        if data_term is None or not isinstance(policy, RlConfig):
            return "", ""
        return data_term.conversation_column_name, policy.system_prompt

    @property
    def column_names(self) -> dict[str, str]:
        """Return the column names that the recipe sets for `prompt`, `response`, `chosen` and `rejected`, by these
        standard names; without those that it does not set."""
        policy = self.recipe.train.train_policy
        return policy.column_names if isinstance(policy, SupervisedConfig) else {}

    @property
    def schema(self) -> pa.Schema:
        """Return the Arrow schema of the prepared file to which the records are written."""
        return self.row_kind.make_schema(self.stored_root or self.image_root)


class Record(NamedTuple):
    """Row of a prepared file, with counts for the statistics of its split."""

    values: tuple[Any, ...]
    """One value per column of the prepared file; the last value is the location of the row."""
    has_merged_turns: bool
    counts: dict[str, int]
    """Contribution of the row to the statistics of its split: counts with the keys of `RowChunk.counts`."""


def convert_rows(tokenizer: PreTrainedTokenizerBase, row_spec: RecordSpec, rows: list[LocatedRow]) -> RowChunk:
    """Tokenise rows of a data set. Return the records as one Arrow record batch, their counts for statistics, and the
    rows that cannot be used, each with the reason."""
    records: list[Record] = []
    skipped_rows = []
    row_counts: Counter[str] = Counter()
    unread_column_counts: Counter[str] = Counter()
    column_names, conversation_column = row_spec.column_names, row_spec.conversation_column
    end_tokens = {str(tokenizer.decode([token])) for token in row_spec.stop_ids} & {*list_added_tokens(tokenizer)}
    with share_template_timer():
        for location, raw_row in rows:
            try:
                row = ColumnTrackingRow(raw_row, column_names, location)
                record = row_spec.row_kind.make_record(tokenizer, row_spec, row, location)
                if row_spec.pass_rate_range:
                    _check_pass_rate(row_spec, row, record, location)
                records.append(record)
                unread_columns = row.unread_columns
                unread_column_counts.update(unread_columns)
                row_counts["other_column"] += bool(conversation_column) and not is_filled(row, conversation_column)
                row_counts["text_alone"] += row_spec.row_kind.omits_response(row, conversation_column)
                if RENDERED_COLUMN not in raw_row:
                    read_values = [value for name, value in raw_row.items() if name not in unread_columns]
                    row_counts["rendered_texts"] += _is_rendered_twice(record, row_spec, read_values, end_tokens)
            except SkippedRow as skip_error:
                refused_row_text = f"{location}: {skip_error.reason}" if isinstance(skip_error, RefusedRow) else ""
                skipped_rows.append(SkippedRowEntry(skip_error.reason, location, refused_row_text))
            except (DataError, RecursionError) as error:
                error_description = str(error) if isinstance(error, DataError) else f"{location}: nested too deeply"
                skipped_rows.append(SkippedRowEntry("that cannot be read", error_description, error_description))
    schema = row_spec.schema
    arrow_arrays = [pa.array([record.values[i] for record in records], field.type) for i, field in enumerate(schema)]
    record_batch = pa.RecordBatch.from_arrays(arrow_arrays, schema=schema)
    row_counts["learned_ends"] = _count_learned_end_tokens(record_batch, row_spec)
    for record in records:
        row_counts.update(record.counts)
    locations_with_merged_turns = [record.values[-1] for record in records if record.has_merged_turns]
    return RowChunk(record_batch, skipped_rows, locations_with_merged_turns, row_counts, unread_column_counts)


def _is_rendered_twice(record: Record, row_spec: RecordSpec, row_cells: list[Any], end_tokens: Collection[str]) -> bool:
    """Return whether one of `row_cells`, the values of the row that were read, is text that the chat template rendered
    although it contains one of `end_tokens`: a chat template had already rendered the text before it was stored."""
    is_plain_text = bool(record.counts.keys() & {"plain_rows", "continued_rows"})
    # Ignore the text of the reference answer, which is never rendered.
    reference_response = dict(zip(row_spec.row_kind.columns, record.values, strict=False)).get("reference")
    rendered_texts = (value for value in row_cells if isinstance(value, str) and value != reference_response)
    return not is_plain_text and any(token in text for text in rendered_texts for token in end_tokens)


def read_pass_rates(pass_rates_file: Path) -> dict[str, float | None]:
    """Return the pass rate of each prompt in a file of pass rates, by the prompt's text. The rate is None if it is null
    in all lines of the prompt. Raise DataError if the file does not exist, or a line has no prompt or no pass rate."""
    try:
        rated_prompts = [json.loads(line) for line in pass_rates_file.read_text(encoding="utf-8").split("\n") if line]
        rated_prompts.sort(key=lambda each: each["pass_rate"] is not None)
        return {each["prompt"]: each["pass_rate"] for each in rated_prompts}
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        problem = f"dataset.pass_rates = {str(pass_rates_file)!r} is no file of pass rates"
        raise DataError(f"{problem} ({reason}); name another") from error


def _check_pass_rate(row_spec: RecordSpec, row: Row, record: Record, location: str) -> None:
    pass_rates_by_key: Mapping[str, Any] = row if row_spec.pass_rates is None else row_spec.pass_rates
    key_of_pass_rate, rate_source = "pass_rate", "its row"
    if row_spec.pass_rates is not None:
        key_of_pass_rate = record.values[list(row_spec.row_kind.columns).index("prompt_text")]
        rate_source = "dataset.pass_rates"
        # Refuse images, because pass rates are stored by prompt text, and prompts of equal text may differ in images.
        if record.counts.get("images"):
            problem = f"{rate_source} are by the text of prompts without images"
            raise DataError(f"{location}: {problem}; use a column pass_rate")
    if key_of_pass_rate not in pass_rates_by_key:
        pass_rate_requirement = f"which dataset.keep = {row_spec.pass_rate_range!r} needs"
        raise DataError(f"{location}: {rate_source} has no pass rate, {pass_rate_requirement}")
    raw_pass_rate = pass_rates_by_key[key_of_pass_rate]
    try:
        # A blank pass rate and NaN are unknown, because CSV files and pandas store null so.
        is_pass_rate_unknown = raw_pass_rate is None or str(raw_pass_rate).strip().lower() in {"", "nan"}
        pass_rate = None if is_pass_rate_unknown else float(raw_pass_rate)
    except (TypeError, ValueError):
        raise DataError(f"{location}: the pass rate {raw_pass_rate!r} of {rate_source} is no number or null") from None
    if pass_rate is not None and not parse_pass_rate_range(row_spec.pass_rate_range)(pass_rate):
        raise SkippedRow(location, f"with a pass rate outside of {row_spec.pass_rate_range}")


def _count_learned_end_tokens(record_batch: pa.RecordBatch, row_spec: RecordSpec) -> int:
    num_learned_end_tokens = 0
    for id_and_mask_columns in zip(row_spec.row_kind.token_id_columns, row_spec.row_kind.mask_columns, strict=False):
        ids, mask = (record_batch.column(name).values.to_numpy() for name in id_and_mask_columns)
        num_learned_end_tokens += int((np.isin(ids, row_spec.stop_ids) & (mask == 1)).sum())
    return num_learned_end_tokens


def read_images(
    row_spec: RecordSpec, turns: list[Message], row: Row, location: str
) -> tuple[list[Message], list[ImageFields], list[Image]]:
    """Read the images of a row. Return the turns with a placeholder part for each image, the fields of the `ImageRef`
    of each image, and the images."""
    image_root, stored_root = row_spec.image_root, row_spec.stored_root
    assert image_root is not None
    turns_with_placeholders, image_sources = align_images(turns, row, location)
    images_with_references = [read_image(source, image_root, location, stored_root) for source in image_sources]
    image_refs = [asdict(image_ref) for image_ref, _ in images_with_references]
    return turns_with_placeholders, image_refs, [image for _, image in images_with_references]


def find_image_root(recipe: Recipe, model: str, rows_folder: Path) -> Path | None:
    """Return the folder that image paths of rows are relative to: the recipe's `media_path` if it is set, otherwise
    `rows_folder`; None if the model reads no images."""
    image_config, policy = image_settings(recipe), recipe.policy
    if _load_processor(model, policy.model_revision, image_config.pixels, policy.chat_template) is None:
        return None
    return Path(os.path.expanduser(image_config.media_path)).absolute() if image_config.media_path else rows_folder


def get_processor(row_spec: RecordSpec) -> ProcessorMixin:
    """Return the transformers processor of the model, which converts images and text to its inputs."""
    policy, pixel_limits = row_spec.recipe.policy, image_settings(row_spec.recipe).pixels
    processor = _load_processor(row_spec.model, policy.model_revision, pixel_limits, policy.chat_template)
    assert processor is not None
    return processor


@lru_cache(maxsize=1)
def _load_processor(
    model: str, revision: str | None, pixel_limits: tuple[tuple[str, int], ...], chat_template: str | None
) -> ProcessorMixin | None:
    """Return the processor of a model; None if the model reads only text."""
    processor = load_processor(model, revision, pixel_limits)
    if processor is not None and chat_template is not None:
        set_chat_template(processor.tokenizer, chat_template)
        processor.chat_template = processor.tokenizer.chat_template
    return processor


T = TypeVar("T")


def convert_turns(convert_fn: Callable[[list[Message]], T], turns: list[Message]) -> tuple[T, bool]:
    """Return the result of `convert_fn(turns)`, and whether turns were merged before. They are merged if `convert_fn`
    raises RefusedRow, because the chat template refuses the original turns."""
    try:
        return convert_fn(turns), False
    except RefusedRow:
        for merged_turns in propose_merged_turns(turns):
            with suppress(RefusedRow):
                return convert_fn(merged_turns), True
        raise


def make_text_record(
    row_spec: RecordSpec, tokens: _IdsAndMask, location: str, *, has_merged_turns: bool = False, **counts: int
) -> Record:
    """Return the record to store for one tokenised sequence, cut to the maximum length. Raise SkippedRow if no token to
    learn is left."""
    counts["truncated_rows"] = int(len(tokens[0]) > row_spec.max_tokens)
    ids_and_mask = truncate_tokens(tokens, row_spec.max_tokens, location)
    image_cells: list[list[ImageFields]] = [] if row_spec.image_root is None else [[]]
    return Record((*ids_and_mask, *image_cells, location), has_merged_turns, counts)


def make_conversation_record(
    tokenizer: PreTrainedTokenizerBase, row_spec: RecordSpec, turns: list[Message], tools: Tools, row: Row,
    location: str,
) -> Record:  # fmt: skip
    """Tokenise a conversation and return the record to store, with the images of its row if the model reads images."""
    if row_spec.image_root is None:
        tokens_and_mask, has_merged_turns = convert_turns(
            lambda turns: tokenise_conversation(tokenizer, turns, location, tools, row_spec.stop_ids), turns
        )
        return make_text_record(row_spec, tokens_and_mask, location, has_merged_turns=has_merged_turns)
    processor = get_processor(row_spec)
    turns_with_placeholders, image_refs, images = read_images(row_spec, turns, row, location)
    text_and_learned_spans, has_merged_turns = convert_turns(
        lambda turns: find_learned_spans(processor, turns, location, tools, row_spec.stop_ids), turns_with_placeholders
    )
    tokens = expand_image_placeholders(processor, *text_and_learned_spans, images, location)
    if tokens.end_of_last_image > row_spec.max_tokens:
        raise SkippedRow(location, "longer than policy.model_max_length before the end of the last image")
    ids, mask = truncate_tokens((tokens.ids, tokens.mask), row_spec.max_tokens, location)
    counts = {"images": len(image_refs), "image_tokens": tokens.num_image_tokens}
    counts["sized_images"] = int(has_image_sizes(turns))
    counts["truncated_rows"] = int(len(tokens.ids) > row_spec.max_tokens)
    return Record((ids, mask, image_refs, location), has_merged_turns, counts)


def check_surrogates(row_content: Any, location: str) -> None:
    """Raise SkippedRow if a row has a lone surrogate (half of a character above U+FFFF), which tokenizers refuse."""
    try:
        json.dumps(row_content, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise SkippedRow(location, "with half a character (a lone surrogate)") from None
