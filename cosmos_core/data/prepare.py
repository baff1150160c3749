"""The program of a `prepare` stage: rows in, token files out, so that training starts at once and reads no text.

    <stage>/data/train.arrow  validation.arrow  statistics.json

The same rows, tokenizer and settings give the same bytes, whatever the number of processes. Opening these files is
`prepared.py`; what is a conversation and what is learned of it, `messages.py` and `conversation.py`.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from cosmos_core.config.schema.dataset import DatasetConfig
from cosmos_core.config.schema.grpo import GrpoConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.conversation import conversation_tokens, cut, tokenize_prompt
from cosmos_core.data.messages import Message, read_conversation, read_held_out, read_prompt
from cosmos_core.data.prepared import SCHEMAS, RowKind, split_path
from cosmos_core.data.rows import Row, Rows, has_local_split, load_rows, split_rows
from cosmos_core.errors import ConfigError, Preempted
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
    """Sequences are cut to this; a longer prompt is an error."""


class Chunk(NamedTuple):
    """Some rows, tokenised."""

    batch: pa.RecordBatch
    num_cut: int
    """Sequences that were longer than the model."""


def run(stage: Stage) -> Outcome:
    """Tokenise the training rows, and the held-out rows where there are any.

    Raises:
        DataError: a row, a file or a data set is wrong; the message names its place.
        ModelError: the tokenizer is missing or has no chat template.
        Preempted: a signal came; nothing was written.
    """
    stage.progress.phase("prepare")
    splits = _splits(stage)
    jobs = {split: _job(stage.recipe, split) for split in splits}
    total = sum(len(rows) for rows in splits.values())
    load_tokenizer(stage.model, stage.recipe.policy.model_revision)  # its errors come before any process is started
    statistics: dict[str, dict[str, Any]] = {}
    done = 0
    with replaced_folder(stage.path / "data") as folder:
        for split, rows in splits.items():
            path = split_path(folder, split)
            statistics[split] = _write_split(stage, path, jobs[split], rows, done, total)
            done += len(rows)
            logger.info("%s: %d rows, %d tokens", split, statistics[split]["rows"], statistics[split]["tokens"])
        write_json(folder / "statistics.json", statistics)
    metrics = {f"data/{s}_{name}": float(statistics[s][name]) for s in splits for name in ("rows", "tokens")}
    info: dict[str, JsonValue] = {"data": "data"}
    return Outcome(outputs=("data",), metrics=metrics, info=info)


def _write_split(stage: Stage, path: Path, job: Job, rows: Rows, done: int, total: int) -> dict[str, Any]:
    """Write one file; `done` of `total` rows went before. Returns its statistics."""
    counts = _Counts(job.kind)
    with pa.ipc.new_file(path, SCHEMAS[job.kind]) as file, closing(_tokenised(stage, job, rows)) as chunks:
        for chunk in chunks:
            file.write_batch(chunk.batch)
            counts.add(chunk)
            done += chunk.batch.num_rows
            stage.progress.step(done, total)
            if stage.stop_requested:
                raise Preempted(f"stopped after {done} of {total} rows were tokenised; preparing starts anew")
    return counts.summary()


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


def make_chunk(tokenizer: PreTrainedTokenizerBase, job: Job, piece: list[tuple[str, Row]]) -> Chunk:
    """Tokenise rows, given with their places, into one record batch."""
    if job.kind == "prompts":
        prompts = [_prompt(tokenizer, job, row, where) for where, row in piece]
        return Chunk(_batch(prompts, "prompts"), 0)
    records, num_cut = [], 0
    for where, row in piece:
        tokens = conversation_tokens(tokenizer, _conversation(job.recipe, row, where), where)
        num_cut += len(tokens[0]) > job.max_tokens
        records.append((*cut(tokens, job.max_tokens, where), where))
    return Chunk(_batch(records, "sequences"), num_cut)


def _conversation(recipe: Recipe, row: Row, where: str) -> list[Message] | str:
    policy = recipe.train.train_policy
    assert not isinstance(policy, GrpoConfig)
    return read_conversation(row, where, policy.conversation_column_name, policy.system_prompt)


def _prompt(tokenizer: PreTrainedTokenizerBase, job: Job, row: Row, where: str) -> tuple[list[int], str, str, str]:
    policy = job.recipe.train.train_policy
    if isinstance(policy, GrpoConfig):
        columns = (policy.prompt_column_name, policy.response_column_name)
        messages, reference = read_prompt(row, where, *columns, policy.system_prompt)
    else:  # what the model learned to answer, in the form in which it learned it
        messages, reference = read_held_out(row, where, policy.conversation_column_name, policy.system_prompt)
    ids, text = tokenize_prompt(tokenizer, messages, job.max_tokens, where)
    return ids, text, reference, where


def _batch(records: list[Any], kind: RowKind) -> pa.RecordBatch:
    schema = SCHEMAS[kind]
    columns = zip(*records, strict=True)
    arrays = [pa.array(values, type=field.type) for values, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


class _Counts:
    """What `statistics.json` says of one split."""

    def __init__(self, kind: RowKind) -> None:
        self._kind = kind
        self._lengths: list[np.ndarray] = []
        self._num_labels = 0
        self._num_cut = 0

    def add(self, chunk: Chunk) -> None:
        self._lengths.append(np.diff(chunk.batch.column(0).offsets.to_numpy()))
        self._num_cut += chunk.num_cut
        if self._kind == "sequences":
            self._num_labels += int(chunk.batch.column("loss_mask").values.to_numpy().sum(dtype=np.int64))

    def summary(self) -> dict[str, Any]:
        lengths = np.concatenate(self._lengths)
        p50, p95 = np.percentile(lengths, [50, 95])
        return {
            "kind": self._kind,
            "rows": len(lengths),
            "tokens": int(lengths.sum()),
            "label_tokens": self._num_labels,
            "length": {
                "min": int(lengths.min()), "mean": float(lengths.mean()), "p50": float(p50), "p95": float(p95),
                "max": int(lengths.max()),
            },
            "truncated_rows": self._num_cut,
        }  # fmt: skip
