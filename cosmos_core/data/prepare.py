"""The program of a `prepare` stage: it tokenises rows to files, so that training starts quickly and reads no text.

    <stage>/data/train.arrow  validation.arrow  data_term.arrow  statistics.json

The same rows, tokenizer and settings give the same bytes with any number of processes. Only a few chunks of rows are in
memory at a time. Rows without content to learn and unreadable rows are left out and counted; too many unreadable rows
fail the stage. `prepared.py` opens the files; `messages.py` and `conversation.py` interpret and tokenise rows.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections import deque
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from cosmos_core.config.media import media_of
from cosmos_core.config.schema.dataset import DatasetConfig
from cosmos_core.config.schema.policy import PolicyConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.chat import chat_of, is_told_of_tools
from cosmos_core.data.clean import clean
from cosmos_core.data.formats import Located
from cosmos_core.data.kinds.base import TRAIN, VALIDATION
from cosmos_core.data.kinds.registry import row_kind, tokenised_kind
from cosmos_core.data.messages import SkippedRow
from cosmos_core.data.pool import begin
from cosmos_core.data.prepared import DATA_TERM, LEARNED_HELD_OUT, split_path
from cosmos_core.data.records import Job, make_chunk, processor_of, read_pass_rates
from cosmos_core.data.rows import Rows, has_local_split, load_rows, split_rows
from cosmos_core.data.statistics import Chunk, Counts
from cosmos_core.data.user_dataset import Opener
from cosmos_core.errors import DataError, Preempted
from cosmos_core.models.generation_config import load_generation_config
from cosmos_core.models.hf import load_tokenizer
from cosmos_core.models.processor import processor_files
from cosmos_core.run.files import replaced_folder, write_json
from cosmos_core.run.stage import Stage
from cosmos_core.types import JsonValue, Outcome

logger = logging.getLogger(__name__)

_CHUNK_ROWS = 256  # rows per record batch and per task of a process; another number changes the bytes of files


def run(stage: Stage) -> Outcome:
    """Prepare the rows of a stage by the method of their kind of rows.

    Raises:
        ModelError: a diffusion model is not a supported pipeline; and the errors of `tokenise`.
    """
    return row_kind(stage.recipe.train.train_policy.rows).prepare(stage)


def tokenise(stage: Stage) -> Outcome:
    """Tokenise the training rows, and the held-out rows if there are any.

    Raises:
        DataError: a data set is missing or malformed, too many rows are unreadable, or no row is left.
        ModelError: the tokenizer is missing or has no chat template.
        Preempted: a stop was requested; no file was written.
    """
    stage.progress.phase("prepare")
    splits = _splits(stage)
    tokenizer = _tokenizer(stage.model, stage.recipe.policy)
    ends = end_ids(stage.model, stage.recipe.policy.model_revision, tokenizer)
    jobs = {split: replace(_job(stage, split, rows), end_ids=ends) for split, rows in splits.items()}
    jobs, tool_notices = _rendered_jobs(stage, jobs, tokenizer)
    statistics: dict[str, dict[str, Any]] = {}
    notices: list[JsonValue] = [f"{key} has no effect: videos are not read" for key in media_of(stage.recipe).ignored]
    notices += tool_notices
    done = 0
    with replaced_folder(stage.path / "data") as folder:
        cleaned = clean(stage, splits[TRAIN], folder, _opener(stage))
        splits |= {TRAIN: cleaned.rows}
        notices += cleaned.notices
        total = sum(len(rows) for rows in splits.values())
        for split, rows in splits.items():
            path = split_path(folder, split)
            counts = _write_split(stage, path, jobs[split], rows, done, total)
            done += len(rows)
            if not counts.num_rows:
                continue
            statistics[split] = counts.summary()
            logger.info("%s: %d rows, %d tokens", split, statistics[split]["rows"], statistics[split]["tokens"])
            for notice in counts.notices(tokenizer.eos_token):
                logger.warning("%s: %s", split, notice)
                notices.append(f"{split}: {notice}")
        write_json(folder / "statistics.json", statistics)
    names = ("rows", "tokens", "skipped_rows")
    metrics = {f"data/{split}_{name}": float(statistics[split][name]) for split in statistics for name in names}
    info: dict[str, JsonValue] = {"data": "data", **({"notices": notices} if notices else {})}
    return Outcome(outputs=("data",), metrics=metrics | cleaned.metrics, info=info)


def _rendered_jobs(
    stage: Stage, jobs: dict[str, Job], tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, Job], list[JsonValue]]:
    """Return the jobs with the recipe's rendering of prompts, and notices about it."""
    if not any(job.kind.is_completed for job in jobs.values()):
        return jobs, []
    chat = chat_of(stage.recipe.rollout.multi_turn_config)
    notices: list[JsonValue] = []
    if chat.tools and not is_told_of_tools(tokenizer, chat):
        notices.append("the chat template leaves out the tools, so the policy is told of none; give another template")
    return {split: replace(job, chat=chat) for split, job in jobs.items()}, notices


def _write_split(stage: Stage, path: Path, job: Job, rows: Rows, done: int, total: int) -> Counts:
    """Write the file of one split; `done` of `total` rows of all splits are already processed.

    Raises:
        DataError: too many rows cannot be read, or no row is left to write.
    """
    counts = Counts(job.kind, job.column, job.room)
    with pa.ipc.new_file(path, job.schema) as file, closing(_tokenised(stage, job, rows)) as chunks:
        for chunk in chunks:
            if chunk.batch.num_rows:
                file.write_batch(chunk.batch)
            counts.add(chunk)
            # Held-out rows to learn are the rows of the validation split, whose errors are checked there.
            if path.stem != LEARNED_HELD_OUT:
                counts.check_refused(_dataset(job.recipe, path.stem).max_skipped_fraction, len(rows))
            done += chunk.batch.num_rows + len(chunk.skipped)
            stage.progress.step(done, total)
            if stage.stop_requested:
                raise Preempted(f"stopped after {done} of {total} rows were tokenised; preparing starts anew")
    # Held-out prompts may have no turn to learn; the split for learning is then removed.
    if not counts.num_rows and path.stem == LEARNED_HELD_OUT:
        path.unlink()
    elif not counts.num_rows:
        raise DataError(f"{path.stem}: {counts.notices()[0]}; no row is left, give others")
    return counts


def _splits(stage: Stage) -> dict[str, Rows]:
    """Return the rows of each split: training rows and, if any, held-out rows and rows of a supervised loss."""
    policy, opener = stage.recipe.train.train_policy, _opener(stage)
    extra_splits = {}
    if policy.real_rows is not None:
        extra_splits[DATA_TERM] = load_rows(policy.real_rows.dataset, "train.train_policy.data_term")
    splits = _own_splits(stage, opener)
    if VALIDATION in splits:
        held_out = splits[VALIDATION].first(stage.recipe.validation.max_rows)
        splits |= dict.fromkeys(_held_out_kinds(stage.recipe), held_out)
    return {**splits, **extra_splits}


def _held_out_kinds(recipe: Recipe) -> dict[str, str]:
    """Return the kind of rows of each split that held-out rows are prepared as, by the name of the split."""
    kind = row_kind(recipe.train.train_policy.rows)
    return kind.held_out_kinds(has_rewards=bool(recipe.validation.reward_function))


def _own_splits(stage: Stage, opener: Opener) -> dict[str, Rows]:
    policy, validation = stage.recipe.train.train_policy, stage.recipe.validation
    annotations = media_of(stage.recipe).annotation_path
    if stage.data is None and annotations:
        train = load_rows(DatasetConfig(name=annotations), "custom.dataset.annotation_path")
    elif stage.data is None:
        train = load_rows(policy.dataset, "train.train_policy.dataset", opener)
    else:
        train = load_rows(DatasetConfig(name=str(stage.data)), f"stage {stage.name!r}: data")
    if validation.dataset.name:
        return {TRAIN: train, VALIDATION: load_rows(validation.dataset, "validation.dataset", opener)}
    if stage.data is not None and has_local_split(stage.data, VALIDATION):
        held_out = DatasetConfig(name=str(stage.data), split=(VALIDATION,))
        return {TRAIN: train, VALIDATION: load_rows(held_out, f"stage {stage.name!r}: data")}
    if policy.dataset.test_size is not None:
        where, row = next(iter(train))
        # Read one row first, so that an error about columns comes before an error about the number of rows.
        with suppress(SkippedRow):
            tokenised_kind(policy.rows).read(row, where, policy)
        train, rest = split_rows(train, policy.dataset.test_size, stage.seed)
        return {TRAIN: train, VALIDATION: rest}
    return {TRAIN: train}


def _opener(stage: Stage) -> Opener:
    return Opener(stage.recipe, partial(_tokenizer, stage.model, stage.recipe.policy))


def _dataset(recipe: Recipe, split: str) -> DatasetConfig:
    """Return the config table of the data set that a split's rows come from."""
    data_term, held_out = recipe.train.train_policy.real_rows, recipe.validation.dataset
    if split == DATA_TERM and data_term is not None:
        return data_term.dataset
    return held_out if split in (VALIDATION, LEARNED_HELD_OUT) and held_out.name else recipe.train.train_policy.dataset


def end_ids(model: str, revision: str | None, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that stop generation: the tokenizer's end token and the tokens in generation_config.json."""
    generation = load_generation_config(model, revision)
    listed: Any = generation and generation.eos_token_id
    listed = listed if isinstance(listed, list) else [listed]
    return tuple(token for token in (tokenizer.eos_token_id, *listed) if token is not None)


def _job(stage: Stage, split: str, rows: Rows) -> Job:
    recipe, validation = stage.recipe, stage.recipe.validation
    max_length = recipe.policy.model_max_length
    is_data_term, policy = split == DATA_TERM, recipe.train.train_policy
    name = "sequences" if is_data_term else _held_out_kinds(recipe).get(split, policy.rows)
    kind = tokenised_kind(name)
    media = media_of(recipe)
    root: Path | None = Path(os.path.expanduser(media.media_path)).absolute() if media.media_path else rows.folder
    revision = recipe.policy.model_revision
    dataset = _dataset(recipe, split)
    rates = read_pass_rates(Path(dataset.pass_rates)) if dataset.pass_rates else None
    named = (revision, media.pixels, recipe.policy.chat_template)
    if not processor_files(stage.model, revision) or processor_of(stage.model, *named) is None:
        root = None
    if not kind.is_completed:
        return Job(recipe, kind, max_length, stage.model, root, keep=dataset.keep, is_data_term=is_data_term)
    longest = recipe.rollout.max_response_length
    if split == VALIDATION:
        longest = validation.max_response_length or longest
    job = Job(recipe, kind, max_length - 1, stage.model, root, longest_completion=longest)
    return replace(job, rates=rates, keep=dataset.keep)


def _tokenised(stage: Stage, job: Job, rows: Rows) -> Generator[Chunk]:
    """Yield chunks in the order of the rows, made in this process or in several."""
    model, policy = stage.model, job.recipe.policy
    pack = None if job.is_data_term else _opener(stage).packer()
    remaining = ((where, pack(row, where)) for where, row in rows) if pack else iter(rows)
    chunks = iter(lambda: list(islice(remaining, _CHUNK_ROWS)), [])
    num_workers = min(job.recipe.train.train_policy.dataloader_num_workers, -(-len(rows) // _CHUNK_ROWS))
    if num_workers <= 1:
        yield from map(partial(make_chunk, _tokenizer(model, policy), job), chunks)
        return
    convert = partial(_make_chunk_there, model, policy, job)
    context = multiprocessing.get_context("spawn")  # a forked process would copy locks that other threads hold
    pool = ProcessPoolExecutor(num_workers, context, begin)
    pending = deque(pool.submit(convert, chunk) for chunk in islice(chunks, 2 * num_workers))
    try:
        while pending:
            yield pending.popleft().result()
            pending.extend(pool.submit(convert, chunk) for chunk in islice(chunks, 1))
    finally:
        pool.shutdown(cancel_futures=True)


def _make_chunk_there(model: str, policy: PolicyConfig, job: Job, rows: list[Located]) -> Chunk:
    return make_chunk(_held_tokenizer(model, policy.model_revision, policy.chat_template), job, rows)


def _tokenizer(model: str, policy: PolicyConfig) -> PreTrainedTokenizerBase:
    return load_tokenizer(model, policy.model_revision, policy.chat_template)


_held_tokenizer = lru_cache(maxsize=1)(load_tokenizer)
