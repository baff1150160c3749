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
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from cosmos_core.config.schema.dataset import DatasetConfig
from cosmos_core.config.schema.grpo import GrpoConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.conversation import RefusedRow, conversation_tokens, cut, tokenize_prompt
from cosmos_core.data.messages import (
    Message,
    SkippedRow,
    alternating,
    read_conversation,
    read_held_out,
    read_prompt,
)
from cosmos_core.data.prepared import SCHEMAS, RowKind, split_path
from cosmos_core.data.rows import Row, Rows, has_local_split, load_rows, split_rows
from cosmos_core.data.statistics import Chunk, Counts
from cosmos_core.errors import ConfigError, DataError, Preempted
from cosmos_core.models.hf import load_tokenizer
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


def run(stage: Stage) -> Outcome:
    """Tokenise the training rows, and the held-out rows where there are any.

    Raises:
        DataError: a row, a file or a data set is wrong, and the message names its place; or no row is left.
        ModelError: the tokenizer is missing or has no chat template.
        Preempted: a signal came; nothing was written.
    """
    stage.progress.phase("prepare")
    splits = _splits(stage)
    jobs = {split: _job(stage.recipe, split) for split in splits}
    total = sum(len(rows) for rows in splits.values())
    load_tokenizer(stage.model, stage.recipe.policy.model_revision)  # its errors come before any process is started
    statistics: dict[str, dict[str, Any]] = {}
    notices: list[JsonValue] = []
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
    with pa.ipc.new_file(path, SCHEMAS[job.kind]) as file, closing(_tokenised(stage, job, rows)) as chunks:
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
    if stage.data is None:
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


def _job(recipe: Recipe, split: str) -> Job:
    validation, max_length = recipe.validation, recipe.policy.model_max_length
    is_rl = isinstance(recipe.train.train_policy, GrpoConfig)
    if not is_rl and not (split == _VALIDATION and validation.reward_function):
        return Job(recipe, "sequences", max_length)
    longest_answer = recipe.rollout.max_response_length
    if split == _VALIDATION:
        longest_answer = validation.max_response_length or longest_answer
    if longest_answer >= max_length:
        raise ConfigError(
            f"max_response_length = {longest_answer} ({'validation' if split == _VALIDATION else 'rollout'}) leaves no "
            f"room for a prompt in policy.model_max_length = {max_length}; lower the one or raise the other"
        )
    return Job(recipe, "prompts", max_length - longest_answer)


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


def make_chunk(tokenizer: PreTrainedTokenizerBase, job: Job, piece: list[tuple[str, Row]]) -> Chunk:
    """Tokenise rows, given with their places, into one record batch."""
    make = _prompt if job.kind == "prompts" else _sequence
    records: list[_Record] = []
    skipped = []
    for where, row in piece:
        try:
            records.append(make(tokenizer, job, row, where))
        except SkippedRow as skip:
            skipped.append((skip.reason, where))
    merged = [record.values[-1] for record in records if record.is_merged]
    return Chunk(_batch(records, job.kind), sum(record.is_cut for record in records), skipped, merged)


def _sequence(tokenizer: PreTrainedTokenizerBase, job: Job, row: Row, where: str) -> _Record:
    policy = job.recipe.train.train_policy
    assert not isinstance(policy, GrpoConfig)
    conversation = read_conversation(row, where, policy.conversation_column_name, policy.system_prompt)
    _check_characters(conversation, where)
    tokens, is_merged = _accepted(lambda turns: conversation_tokens(tokenizer, turns, where), conversation)
    return _Record((*cut(tokens, job.max_tokens, where), where), len(tokens[0]) > job.max_tokens, is_merged)


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


def _batch(records: list[_Record], kind: RowKind) -> pa.RecordBatch:
    schema = SCHEMAS[kind]
    arrays = [pa.array([record.values[i] for record in records], field.type) for i, field in enumerate(schema)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
