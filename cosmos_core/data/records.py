"""Conversion of rows to records of a prepared file: a sequence to learn, a pair to compare, or a prompt to complete.

Each row is read, tokenised and cut independently, in any process; `prepare.py` handles files and processes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from cosmos_core.config.media import media_of
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.rl import RlConfig
from cosmos_core.config.schema.supervised import SupervisedConfig
from cosmos_core.data.chat import PLAIN, Chat
from cosmos_core.data.conversation import (
    continued_tokens,
    conversation_tokens,
    cut,
    tokenize_prompt,
    tokenize_text,
)
from cosmos_core.data.formats import Located
from cosmos_core.data.images import placed_images, read_image
from cosmos_core.data.messages import (
    Message,
    ReadRow,
    Row,
    SkippedRow,
    alternating,
    columns_for_rewards,
    leaves_out_response,
    plain_texts,
    read_held_out,
    read_prompt,
)
from cosmos_core.data.preferences import READERS, Preference, read_label, read_preference
from cosmos_core.data.prepared import SCHEMAS, RowKind, visual_schema
from cosmos_core.data.rendering import RefusedRow
from cosmos_core.data.statistics import IDS, MASKS, Chunk, Skipped
from cosmos_core.data.tool_calls import read_tools
from cosmos_core.data.user_dataset import LABELS, NOTHING, RENDERED, TOKENS
from cosmos_core.data.visual import cut_visual, visual_prompt, visual_tokens
from cosmos_core.errors import DataError
from cosmos_core.models.chat_templates import set_template
from cosmos_core.models.processor import load_processor

if TYPE_CHECKING:
    from PIL.Image import Image

Ref = dict[str, Any]
"""Fields of an `ImageRef` as a dictionary."""
_USUAL_COLUMN = SupervisedConfig.model_fields["conversation_column_name"].default


@dataclass(frozen=True)
class Job:
    """Settings for converting the rows of one split to records."""

    recipe: Recipe
    kind: RowKind
    max_tokens: int
    """Maximum length in tokens: longer sequences are cut, longer prompts are left out."""
    model: str
    root: Path | None
    """Folder that image paths are relative to; None if the model reads only text."""
    end_ids: tuple[int, ...] = ()
    """Token ids at which generation stops."""
    chat: Chat = PLAIN
    """Rendering of prompts to complete."""
    longest_completion: int = 0
    """Maximum number of completion tokens, for prompts that leave room for so many."""

    @property
    def room(self) -> tuple[int, int]:
        """Return the lengths of the longest prompt that leaves room for a completion, and of the longest completion."""
        return self.max_tokens + 1 - self.longest_completion, self.longest_completion

    @property
    def column(self) -> str:
        """Return the conversation column that the recipe names; empty if it keeps the default name."""
        name = self.conversation[0]
        return "" if name == _USUAL_COLUMN else name

    @property
    def conversation(self) -> tuple[str, str]:
        """Return the column of conversations to learn, and the system prompt for those without a system turn."""
        policy = self.recipe.train.train_policy
        if isinstance(policy, SupervisedConfig):
            return policy.conversation_column_name, policy.system_prompt
        data_term = policy.real_rows if self.is_data_term else None
        if data_term is None or not isinstance(policy, RlConfig):
            return "", ""
        return data_term.conversation_column_name, policy.system_prompt

    @property
    def own_names(self) -> dict[str, str]:
        """Return the recipe's names for the columns of prompt and responses, by their standard names."""
        policy = self.recipe.train.train_policy
        return policy.own_names if isinstance(policy, SupervisedConfig) else {}

    @property
    def is_data_term(self) -> bool:
        """Return whether the rows are learned in addition to rollouts."""
        return self.kind == "sequences" and self.recipe.train.train_policy.has_rollouts

    @property
    def schema(self) -> pa.Schema:
        """Return the Arrow schema of the file."""
        return visual_schema(self.kind, self.root) if self.root else SCHEMAS[self.kind]


class _Record(NamedTuple):
    values: tuple[Any, ...]
    """One value per column of the file; the last is the location of the row."""
    is_merged: bool
    counts: dict[str, int]
    """Counts with the keys of `Chunk.counts`."""


def make_chunk(tokenizer: PreTrainedTokenizerBase, job: Job, rows: list[Located]) -> Chunk:
    """Convert rows to one record batch; rows that cannot be used are skipped and recorded with a reason."""
    make = {"prompts": _prompt, "pairs": _pair, "labelled": _labelled, "sequences": _sequence}[job.kind]
    records: list[_Record] = []
    skipped = []
    counts: Counter[str] = Counter()
    unread: Counter[str] = Counter()
    for where, given in rows:
        try:
            row = ReadRow(given, job.own_names, where)
            records.append(make(tokenizer, job, row, where))
            unread.update(row.unread)
            counts["other_column"] += bool(job.column) and row.get(job.column) is None
            counts["text_alone"] += job.kind == "sequences" and leaves_out_response(row, job.column)
        except RefusedRow as error:
            skipped.append(Skipped(error.reason, where, f"{where}: {error.reason}"))
        except SkippedRow as skip:
            skipped.append(Skipped(skip.reason, where))
        except DataError as error:
            skipped.append(Skipped("that cannot be read", str(error), str(error)))
    batch = _batch(records, job.schema)
    counts["learned_ends"] = _num_ends(batch, job)
    for record in records:
        counts.update(record.counts)
    return Chunk(batch, skipped, [record.values[-1] for record in records if record.is_merged], counts, unread)


def check_columns(recipe: Recipe, located: Located) -> None:
    """Read one row, so that an error about columns is raised before an error about the number of rows.

    Raises:
        DataError: the row has none of the columns that are read, or a column has the wrong form.
    """
    where, row = located
    policy = recipe.train.train_policy
    if isinstance(policy, SupervisedConfig):
        row = ReadRow(row, policy.own_names, where)
    with suppress(SkippedRow):
        if isinstance(policy, RlConfig):
            read_prompt(row, where, policy.prompt_column_name, policy.response_column_name, with_images=True)
        elif isinstance(policy, SupervisedConfig):
            READERS[policy.rows](row, where, policy.conversation_column_name, with_images=True)


def _num_ends(batch: pa.RecordBatch, job: Job) -> int:
    """Return the number of end tokens that are learned in a batch."""
    count = 0
    for ids, mask in zip(IDS[job.kind], MASKS[job.kind], strict=False):
        is_end = np.isin(batch.column(ids).values.to_numpy(), job.end_ids)
        count += int((is_end & (batch.column(mask).values.to_numpy() == 1)).sum())
    return count


def _sequence(tokenizer: PreTrainedTokenizerBase, job: Job, row: Row, where: str) -> _Record:
    """Return the record of a sequence to learn."""
    if TOKENS in row:
        return _tokenised_sequence(job, row, where)
    texts = None if tokenizer.chat_template else plain_texts(row, "prompt", ("completion", "response"))
    if texts and job.root is None and not job.conversation[1]:  # a system prompt needs a template
        _check_characters(texts, where)
        if not texts[1].strip():
            raise SkippedRow(where, "without a completion to learn")
        tokens = continued_tokens(tokenizer, texts[0], texts[1], where)
        counts = {"truncated_rows": int(len(tokens[0]) > job.max_tokens), "continued_rows": 1}
        return _Record((*cut(tokens, job.max_tokens, where), where), False, counts)
    conversation = READERS[job.kind](row, where, *job.conversation, with_images=job.root is not None)
    _check_characters(conversation, where)
    if job.root is not None:
        if not isinstance(conversation, str):
            return _visual_sequence(job, conversation, row, where)
        placed_images([], row, where)  # plain text has no turn to show one
    tools = read_tools(row, where)
    tokens, is_merged = _accepted(
        lambda turns: conversation_tokens(tokenizer, turns, where, tools, job.end_ids), conversation
    )
    values: tuple[Any, ...] = cut(tokens, job.max_tokens, where)
    if job.root is not None:
        values = (*values, [])
    counts = {"truncated_rows": int(len(tokens[0]) > job.max_tokens), "plain_rows": int(isinstance(conversation, str))}
    return _Record((*values, where), is_merged, counts)


def _labelled(tokenizer: PreTrainedTokenizerBase, job: Job, row: Row, where: str) -> _Record:
    label, record = read_label(row, where), _sequence(tokenizer, job, row, where)
    return record._replace(values=(label, *record.values))


def _tokenised_sequence(job: Job, row: Row, where: str) -> _Record:
    """Return the record of a sequence that a data packer has tokenised."""
    ids, labels = ([int(token) for token in row.get(name, ())] for name in (TOKENS, LABELS))
    mask = [int(label != NOTHING) for label in labels]
    if len(ids) != len(labels) or any(m and a != b for a, b, m in zip(ids, labels, mask, strict=True)):
        raise DataError(
            f"{where}: {LABELS} must have a label for each of {TOKENS}: the token itself, or {NOTHING} where it is not "
            f"learned; there are {len(ids)} and {len(labels)}"
        )
    values: tuple[Any, ...] = cut((ids, mask), job.max_tokens, where)
    if job.root is not None:
        values = (*values, [])
    return _Record((*values, where), False, {"truncated_rows": len(ids) > job.max_tokens})


def _visual_sequence(job: Job, conversation: list[Message], row: Row, where: str) -> _Record:
    processor = _processor(job)
    placed, refs, images = _read_images(job, conversation, row, where)
    tools = read_tools(row, where)
    tokens, is_merged = _accepted(
        lambda turns: visual_tokens(processor, turns, images, where, tools, job.end_ids), placed
    )
    ids, mask = cut_visual(tokens, job.max_tokens, where)
    counts = {"truncated_rows": len(tokens.ids) > job.max_tokens, "images": len(refs)}
    return _Record((ids, mask, refs, where), is_merged, counts | {"image_tokens": tokens.num_image_tokens})


def _read_images(job: Job, turns: list[Message], row: Row, where: str) -> tuple[list[Message], list[Ref], list[Image]]:
    """Return the turns with a placeholder part for each image, the fields of their `ImageRef`s, and the images."""
    assert job.root is not None
    placed, sources = placed_images(turns, row, where)
    loaded = [read_image(source, job.root, where) for source in sources]
    return placed, [asdict(ref) for ref, _ in loaded], [image for _, image in loaded]


def _processor(job: Job) -> ProcessorMixin:
    policy = job.recipe.policy
    processor = processor_of(job.model, policy.model_revision, media_of(job.recipe).pixels, policy.chat_template)
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


def _pair(tokenizer: PreTrainedTokenizerBase, job: Job, row: Row, where: str) -> _Record:
    policy = job.recipe.train.train_policy
    assert isinstance(policy, SupervisedConfig)
    preference = read_preference(
        row, where, policy.conversation_column_name, policy.system_prompt, with_images=job.root is not None
    )
    if not tokenizer.chat_template and (texts := plain_texts(row, "prompt", ("chosen",), ("rejected",))):
        preference = Preference(*texts)
    prompt, *completions = preference
    _check_characters([prompt, *completions], where)
    if job.root is not None:
        if not isinstance(prompt, str):
            return _visual_pair(job, [[*_unlearned(prompt), *turns] for turns in completions], row, where)
        placed_images([], row, where)  # plain text has no turn to show one
    values: list[list[int]] = []
    is_cut = is_merged = False
    tools = read_tools(row, where)
    for completion in completions:
        if isinstance(prompt, str) or isinstance(completion, str):
            tokens, merged = continued_tokens(tokenizer, str(prompt), str(completion), where), False
        else:
            tokens, merged = _accepted(
                lambda turns: conversation_tokens(tokenizer, turns, where, tools, job.end_ids),
                [*_unlearned(prompt), *completion],
            )
        is_cut, is_merged = is_cut or len(tokens[0]) > job.max_tokens, is_merged or merged
        values += cut(tokens, job.max_tokens, where)
    _check_differ(values, where, is_cut=is_cut)
    if job.root is not None:
        return _Record((*values, [], where), is_merged, {"truncated_rows": is_cut})
    return _Record((*values, where), is_merged, {"truncated_rows": is_cut})


def _check_differ(values: list[list[int]], where: str, *, is_cut: bool) -> None:
    if values[0] == values[2]:
        up_to = " up to policy.model_max_length" if is_cut else ""
        raise SkippedRow(where, f"with equal chosen and rejected{up_to}")


def _visual_pair(job: Job, talks: list[list[Message]], row: Row, where: str) -> _Record:
    """Return the record of two conversations that begin with the same turns, the only ones that show images."""
    processor, tools = _processor(job), read_tools(row, where)
    values: list[list[int]] = []
    shown: list[list[Ref]] = []
    is_cut = is_merged = False
    num_image_tokens = 0
    for talk in talks:
        placed, refs, images = _read_images(job, talk, row, where)
        shown.append(refs)
        rest: dict[str, Any] = {"images": images, "where": where, "tools": tools, "end_ids": job.end_ids}
        tokens, merged = _accepted(partial(visual_tokens, processor, **rest), placed)
        is_cut, is_merged = is_cut or len(tokens.ids) > job.max_tokens, is_merged or merged
        num_image_tokens += tokens.num_image_tokens
        values += cut_visual(tokens, job.max_tokens, where)
    if shown[0] != shown[1]:
        raise DataError(f"{where}: chosen and rejected show different images; show them in the prompt")
    _check_differ(values, where, is_cut=is_cut)
    counts = {"truncated_rows": is_cut, "images": len(shown[0]), "image_tokens": num_image_tokens}
    return _Record((*values, shown[0], where), is_merged, counts)


def _unlearned(prompt: list[Message]) -> list[Message]:
    return [{**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in prompt]


def _prompt(tokenizer: PreTrainedTokenizerBase, job: Job, row: Row, where: str) -> _Record:
    policy, has_images = job.recipe.train.train_policy, job.root is not None
    if isinstance(policy, RlConfig):
        names = (policy.prompt_column_name, policy.response_column_name)
        keeps_last = job.chat.continue_final_message
        messages, reference = read_prompt(
            row, where, *names, policy.system_prompt, keeps_last=keeps_last, with_images=has_images
        )
    else:  # a held-out row, rendered in the same form as the training rows
        assert isinstance(policy, SupervisedConfig)
        messages, reference = read_held_out(
            row, where, policy.conversation_column_name, policy.system_prompt, with_images=has_images
        )
    _check_characters([messages, reference], where)
    columns = columns_for_rewards({name: value for name, value in row.items() if name != RENDERED}, messages)
    chat = job.chat
    if tools := read_tools(row, where):
        chat = replace(chat, tools=tuple(tools))
    if has_images:
        processor = _processor(job)
        placed, refs, images = _read_images(job, messages, row, where)
        (tokens, text), is_merged = _accepted(
            lambda turns: visual_prompt(processor, turns, images, job.max_tokens, where, chat), placed
        )
        counts = {"images": len(refs), "image_tokens": tokens.num_image_tokens}
        return _Record((tokens.ids, text, reference, columns, refs, where), is_merged, counts)
    if (rendered := row.get(RENDERED)) is not None:
        ids, text = tokenize_text(tokenizer, rendered, job.max_tokens, where)
        return _Record((ids, text, reference, columns, where), False, {})
    (ids, text), is_merged = _accepted(
        lambda turns: tokenize_prompt(tokenizer, turns, job.max_tokens, where, chat), messages
    )
    return _Record((ids, text, reference, columns, where), is_merged, {})


_Turns = TypeVar("_Turns", list[Message], list[Message] | str)
_Tokens = TypeVar("_Tokens")


def _accepted(tokenise: Callable[[_Turns], _Tokens], turns: _Turns) -> tuple[_Tokens, bool]:
    """Tokenise turns, merged if the chat template refuses them; return the tokens and whether turns were merged."""
    try:
        return tokenise(turns), False
    except RefusedRow:
        assert not isinstance(turns, str)  # plain text needs no template
        for merged_turns in alternating(turns):
            with suppress(RefusedRow):
                return tokenise(merged_turns), True
        raise


def _check_characters(content: Any, where: str) -> None:
    """Skip a row with a lone surrogate (half of a character above U+FFFF): JSON allows it, tokenizers refuse it."""
    try:
        json.dumps(content, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise SkippedRow(where, "with half a character (a lone surrogate)") from None


def _batch(records: list[_Record], schema: pa.Schema) -> pa.RecordBatch:
    arrays = [pa.array([record.values[i] for record in records], field.type) for i, field in enumerate(schema)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
