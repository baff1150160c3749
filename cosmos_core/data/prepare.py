"""The program of a `prepare` stage: rows in, token files out, so that training starts at once and reads no text.

    <stage>/data/train.arrow  validation.arrow  statistics.json

The same rows, tokenizer and settings give the same bytes, whatever the number of processes. A row with nothing in it
to learn is left out and counted; a row of a wrong form ends the stage. Opening these files is `prepared.py`; what is a
conversation and what is learned of it, `messages.py` and `conversation.py`.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from cosmos_core.config.media import media_of
from cosmos_core.config.schema.dataset import DatasetConfig
from cosmos_core.config.schema.grpo import GrpoConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.conversation import (
    RefusedRow,
    continued_tokens,
    conversation_tokens,
    cut,
    last_turns,
    tokenize_prompt,
)
from cosmos_core.data.images import placed_images, read_image, refuse_images
from cosmos_core.data.messages import (
    Message,
    SkippedRow,
    alternating,
    read_conversation,
    read_held_out,
    read_preference,
    read_prompt,
)
from cosmos_core.data.prepared import SCHEMAS, RowKind, split_path, visual_schema
from cosmos_core.data.rows import Row, Rows, has_local_split, load_rows, split_rows
from cosmos_core.data.statistics import Chunk, Counts
from cosmos_core.data.visual import cut_visual, visual_tokens
from cosmos_core.errors import ConfigError, DataError, Preempted
from cosmos_core.models.hf import load_tokenizer
from cosmos_core.models.processor import load_processor, processor_files
from cosmos_core.run.files import replaced_folder, write_json
from cosmos_core.run.stage import Stage
from cosmos_core.types import JsonValue, Outcome

logger = logging.getLogger(__name__)

_TRAIN, _VALIDATION = "train", "validation"
_CHUNK_ROWS = 256  # rows of one record batch and of one piece of work; part of the file's bytes


@dataclass(frozen=True)
class Job:
    """How the rows of one split become records."""

    recipe: Recipe
    kind: RowKind
    max_tokens: int
    """Sequences are cut to this; a longer prompt is left out."""
    model: str
    root: Path | None
    """What paths of images are relative to; None: the model reads text alone."""

    @property
    def schema(self) -> pa.Schema:
        """Of the file."""
        return visual_schema(self.root) if self.kind == "sequences" and self.root else SCHEMAS[self.kind]


def run(stage: Stage) -> Outcome:
    """Tokenise the training rows, and the held-out rows where there are any.

    Raises:
        DataError: a row, a file or a data set is wrong, and the message names its place; or no row is left.
        ModelError: the tokenizer is missing or has no chat template.
        Preempted: a signal came; nothing was written.
    """
    stage.progress.phase("prepare")
    splits = _splits(stage)
    load_tokenizer(stage.model, stage.recipe.policy.model_revision)  # its errors come before any process is started
    jobs = {split: _job(stage, split, rows) for split, rows in splits.items()}
    total = sum(len(rows) for rows in splits.values())
    statistics: dict[str, dict[str, Any]] = {}
    notices: list[JsonValue] = [f"{key} has no effect: videos are not read" for key in media_of(stage.recipe).ignored]
    done = 0
    with replaced_folder(stage.path / "data") as folder:
        for split, rows in splits.items():
            path = split_path(folder, split)
            counts = _write_split(stage, path, jobs[split], rows, done, total)
            done += len(rows)
            statistics[split] = counts.summary()
            logger.info("%s: %d rows, %d tokens", split, statistics[split]["rows"], statistics[split]["tokens"])
            for notice in counts.notices():
                logger.warning("%s: %s", split, notice)
                notices.append(f"{split}: {notice}")
        write_json(folder / "statistics.json", statistics)
    names = ("rows", "tokens", "skipped_rows")
    metrics = {f"data/{split}_{name}": float(statistics[split][name]) for split in splits for name in names}
    info: dict[str, JsonValue] = {"data": "data", **({"notices": notices} if notices else {})}
    return Outcome(outputs=("data",), metrics=metrics, info=info)


def _write_split(stage: Stage, path: Path, job: Job, rows: Rows, done: int, total: int) -> Counts:
    """Write one file; `done` of `total` rows went before.

    Raises:
        DataError: nothing is left to write.
    """
    counts = Counts(job.kind)
    with pa.ipc.new_file(path, job.schema) as file, closing(_tokenised(stage, job, rows)) as chunks:
        for chunk in chunks:
            if chunk.batch.num_rows:
                file.write_batch(chunk.batch)
            counts.add(chunk)
            done += chunk.batch.num_rows + len(chunk.skipped)
            stage.progress.step(done, total)
            if stage.stop_requested:
                raise Preempted(f"stopped after {done} of {total} rows were tokenised; preparing starts anew")
    if not counts.num_rows:
        raise DataError(f"{path.stem}: {counts.notices()[0]}; no row is left, give others")
    return counts


def _splits(stage: Stage) -> dict[str, Rows]:
    """Rows to train on, and held-out rows when there are any."""
    policy, validation = stage.recipe.train.train_policy, stage.recipe.validation
    annotations = media_of(stage.recipe).annotation_path
    if stage.data is None and annotations:
        train = load_rows(DatasetConfig(name=annotations), "custom.dataset.annotation_path")
    elif stage.data is None:
        train = load_rows(policy.dataset, "train.train_policy.dataset")
    else:
        train = load_rows(DatasetConfig(name=str(stage.data)), f"stage {stage.name!r}: data")
    if validation.dataset.name:
        return {_TRAIN: train, _VALIDATION: load_rows(validation.dataset, "validation.dataset")}
    if stage.data is not None and has_local_split(stage.data, _VALIDATION):
        held_out = DatasetConfig(name=str(stage.data), split=(_VALIDATION,))
        return {_TRAIN: train, _VALIDATION: load_rows(held_out, f"stage {stage.name!r}: data")}
    if policy.dataset.test_size is not None:
        train, rest = split_rows(train, policy.dataset.test_size, stage.seed)
        return {_TRAIN: train, _VALIDATION: rest}
    return {_TRAIN: train}


def _job(stage: Stage, split: str, rows: Rows) -> Job:
    recipe, validation = stage.recipe, stage.recipe.validation
    max_length = recipe.policy.model_max_length
    is_rl = isinstance(recipe.train.train_policy, GrpoConfig)
    media = media_of(recipe)
    root: Path | None = Path(os.path.expanduser(media.media_path)).absolute() if media.media_path else rows.folder
    if not processor_files(stage.model, recipe.policy.model_revision):
        root = None
    if recipe.train.train_policy.trainer_type == "dpo":
        return Job(recipe, "pairs", max_length, stage.model, root)
    if not is_rl and not (split == _VALIDATION and validation.reward_function):
        if _processor(stage.model, recipe.policy.model_revision, media.pixels) is None:
            root = None
        return Job(recipe, "sequences", max_length, stage.model, root)
    longest_answer = recipe.rollout.max_response_length
    if split == _VALIDATION:
        longest_answer = validation.max_response_length or longest_answer
    if longest_answer >= max_length:
        raise ConfigError(
            f"max_response_length = {longest_answer} ({'validation' if split == _VALIDATION else 'rollout'}) leaves no "
            f"room for a prompt in policy.model_max_length = {max_length}; lower the one or raise the other"
        )
    return Job(recipe, "prompts", max_length - longest_answer, stage.model, root)


def _tokenised(stage: Stage, job: Job, rows: Rows) -> Generator[Chunk]:
    """Chunks in the order of the rows, made in this process or in several."""
    model, revision = stage.model, job.recipe.policy.model_revision
    pieces = (
        [(rows.where(i), rows[i]) for i in range(start, min(start + _CHUNK_ROWS, len(rows)))]
        for start in range(0, len(rows), _CHUNK_ROWS)
    )
    policy = job.recipe.train.train_policy
    wanted = 0 if isinstance(policy, GrpoConfig) else policy.dataloader_num_workers
    num_workers = min(wanted, -(-len(rows) // _CHUNK_ROWS))
    if num_workers <= 1:
        tokenizer = load_tokenizer(model, revision)
        for piece in pieces:
            yield make_chunk(tokenizer, job, piece)
        return
    context = multiprocessing.get_context("spawn")  # a fork would copy locks that other threads hold
    pool = ProcessPoolExecutor(num_workers, context, _start_worker, (model, revision))
    pending = deque(pool.submit(_make_chunk_here, job, piece) for piece in islice(pieces, 2 * num_workers))
    try:
        while pending:
            yield pending.popleft().result()
            pending.extend(pool.submit(_make_chunk_here, job, piece) for piece in islice(pieces, 1))
    finally:
        pool.shutdown(cancel_futures=True)


_worker_tokenizer: PreTrainedTokenizerBase | None = None


def _start_worker(model: str, revision: str | None) -> None:
    global _worker_tokenizer
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _worker_tokenizer = load_tokenizer(model, revision)


def _die_with_parent() -> None:
    """A pool's process waits for work on a pipe that it holds open itself, so it would outlive a killed parent."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _make_chunk_here(job: Job, piece: list[tuple[str, Row]]) -> Chunk:
    assert _worker_tokenizer is not None
    return make_chunk(_worker_tokenizer, job, piece)


class _Record(NamedTuple):
    values: tuple[Any, ...]
    """One a column of the file; the last is the place of the row."""
    is_cut: bool
    is_merged: bool
    num_images: int = 0
    num_image_tokens: int = 0


def make_chunk(tokenizer: PreTrainedTokenizerBase, job: Job, piece: list[tuple[str, Row]]) -> Chunk:
    """Tokenise rows, given with their places, into one record batch."""
    make = {"prompts": _prompt, "pairs": _pair, "sequences": _sequence}[job.kind]
    records: list[_Record] = []
    skipped = []
    for where, row in piece:
        if job.root is not None and job.kind != "sequences":
            refuse_images(row, where)
        try:
            records.append(make(tokenizer, job, row, where))
        except SkippedRow as skip:
            skipped.append((skip.reason, where))
    merged = [record.values[-1] for record in records if record.is_merged]
    return Chunk(
        _batch(records, job.schema),
        sum(record.is_cut for record in records),
        skipped,
        merged,
        num_images=sum(record.num_images for record in records),
        num_image_tokens=sum(record.num_image_tokens for record in records),
    )


def _sequence(tokenizer: PreTrainedTokenizerBase, job: Job, row: Row, where: str) -> _Record:
    policy = job.recipe.train.train_policy
    assert not isinstance(policy, GrpoConfig)
    column, system_prompt = policy.conversation_column_name, policy.system_prompt
    conversation = read_conversation(row, where, column, system_prompt, with_images=job.root is not None)
    _check_characters(conversation, where)
    if job.root is not None:
        if not isinstance(conversation, str):
            return _visual_sequence(job, conversation, row, where)
        placed_images([], row, where)  # plain text has no turn to show one
    tokens, is_merged = _accepted(lambda turns: conversation_tokens(tokenizer, turns, where), conversation)
    values: tuple[Any, ...] = cut(tokens, job.max_tokens, where)
    if job.root is not None:
        values = (*values, [])
    return _Record((*values, where), len(tokens[0]) > job.max_tokens, is_merged)


def _visual_sequence(job: Job, conversation: list[Message], row: Row, where: str) -> _Record:
    processor = _processor(job.model, job.recipe.policy.model_revision, media_of(job.recipe).pixels)
    assert processor is not None and job.root is not None
    placed, sources = placed_images(conversation, row, where)
    found = [read_image(source, job.root, where) for source in sources]
    refs, images = [ref._asdict() for ref, _ in found], [image for _, image in found]
    tokens, is_merged = _accepted(lambda turns: visual_tokens(processor, turns, images, where), placed)
    ids, mask = cut_visual(tokens, job.max_tokens, where)
    is_cut = len(tokens.ids) > job.max_tokens
    return _Record((ids, mask, refs, where), is_cut, is_merged, len(refs), tokens.num_image_tokens)


@lru_cache(maxsize=1)
def _processor(model: str, revision: str | None, pixels: tuple[tuple[str, int], ...]) -> ProcessorMixin | None:
    return load_processor(model, revision, pixels)


def _pair(tokenizer: PreTrainedTokenizerBase, job: Job, row: Row, where: str) -> _Record:
    policy = job.recipe.train.train_policy
    assert not isinstance(policy, GrpoConfig)
    prompt, *answers = read_preference(row, where, policy.conversation_column_name, policy.system_prompt)
    _check_characters([prompt, *answers], where)
    values: list[list[int]] = []
    is_cut = is_merged = False
    for answer in answers:
        tokens, merged = _answer_tokens(tokenizer, prompt, answer, where)
        is_cut, is_merged = is_cut or len(tokens[0]) > job.max_tokens, is_merged or merged
        values += cut(tokens, job.max_tokens, where)
    if values[0] == values[2]:
        up_to = " up to policy.model_max_length" if is_cut else ""
        raise SkippedRow(where, f"with equal chosen and rejected{up_to}")
    return _Record((*values, where), is_cut, is_merged)


def _answer_tokens(
    tokenizer: PreTrainedTokenizerBase, prompt: list[Message] | str, answer: list[Message] | str, where: str
) -> tuple[tuple[list[int], list[int]], bool]:
    """The prompt with one answer, of which alone something is learned; whether turns were put together."""
    if isinstance(prompt, str):
        assert isinstance(answer, str)
        return continued_tokens(tokenizer, prompt, answer, where), False
    assert not isinstance(answer, str)
    count = sum(turn["role"] == "assistant" for turn in answer)
    return _accepted(lambda turns: last_turns(conversation_tokens(tokenizer, turns, where), count), [*prompt, *answer])


def _prompt(tokenizer: PreTrainedTokenizerBase, job: Job, row: Row, where: str) -> _Record:
    policy = job.recipe.train.train_policy
    if isinstance(policy, GrpoConfig):
        columns = (policy.prompt_column_name, policy.response_column_name)
        messages, reference = read_prompt(row, where, *columns, policy.system_prompt)
    else:  # what the model learned to answer, in the form in which it learned it
        messages, reference = read_held_out(row, where, policy.conversation_column_name, policy.system_prompt)
    _check_characters([messages, reference], where)
    (ids, text), is_merged = _accepted(lambda turns: tokenize_prompt(tokenizer, turns, job.max_tokens, where), messages)
    return _Record((ids, text, reference, where), False, is_merged)


_Turns = TypeVar("_Turns", list[Message], list[Message] | str)
_Tokens = TypeVar("_Tokens")


def _accepted(tokenise: Callable[[_Turns], _Tokens], turns: _Turns) -> tuple[_Tokens, bool]:
    """The tokens of the turns, put together where the chat template refuses them as they are; whether it was so."""
    try:
        return tokenise(turns), False
    except RefusedRow:
        assert not isinstance(turns, str)  # plain text needs no template
        for others in alternating(turns):
            with suppress(RefusedRow):
                return tokenise(others), True
        raise


def _check_characters(content: Any, where: str) -> None:
    """JSON can hold half of a character outside the first 65536, and no tokenizer takes it."""
    try:
        json.dumps(content, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise SkippedRow(where, "with half a character (a lone surrogate)") from None


def _batch(records: list[_Record], schema: pa.Schema) -> pa.RecordBatch:
    arrays = [pa.array([record.values[i] for record in records], field.type) for i, field in enumerate(schema)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
