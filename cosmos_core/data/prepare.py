"""The program of a `prepare` stage: it tokenises rows to files, so that training starts quickly and reads no text.

    <stage>/data/train.arrow  validation.arrow  data_term.arrow  statistics.json

The same rows, tokenizer and settings give the same bytes with any number of processes. Only a few chunks of rows are in
memory at a time. Rows without content to learn and unreadable rows are left out and counted; too many unreadable rows
fail the stage. `prepared.py` opens the files; `messages.py` and `conversation.py` interpret and tokenise rows.
"""

import logging
import multiprocessing
import os
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from cosmos_core.config.media import image_settings
from cosmos_core.config.schema.dataset import DatasetConfig, RowsConfig, SourceConfig
from cosmos_core.config.schema.policy import PolicyConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.chat import make_prompt_rendering, template_uses_tools
from cosmos_core.data.clean import clean_training_rows, iterate_texts
from cosmos_core.data.formats import LocatedRow
from cosmos_core.data.kinds.base import TRAIN_SPLIT, VALIDATION_SPLIT
from cosmos_core.data.kinds.registry import load_row_kind, load_tokenised_kind
from cosmos_core.data.messages import SkippedRow
from cosmos_core.data.order import divide_in_proportion
from cosmos_core.data.pool import initialise_process
from cosmos_core.data.prepared import DATA_TERM_SPLIT, HELD_OUT_SEQUENCES_SPLIT, STATISTICS_FILE, get_split_path
from cosmos_core.data.records import RecordSpec, convert_rows, find_image_root, read_pass_rates
from cosmos_core.data.rows import Rows, get_policies_by_dataset, has_local_split, load_rows, split_rows
from cosmos_core.data.statistics import RowChunk, SplitCounts
from cosmos_core.data.tokenizer_check import find_lost_text
from cosmos_core.data.user_dataset import UserDatasetLoader
from cosmos_core.errors import DataError, Preempted
from cosmos_core.models.generation_config import load_generation_config
from cosmos_core.models.hf import load_tokenizer
from cosmos_core.run.files import replace_folder, write_json
from cosmos_core.run.stage import Stage
from cosmos_core.types import JsonValue, Outcome

logger = logging.getLogger(__name__)

_NUM_CHECKED_ROWS = 32  # number of rows per data set that are checked for text that the tokenizer loses
_ROWS_PER_CHUNK = 256  # number of rows per record batch, on which the bytes of the prepared files depend


def run(stage: Stage) -> Outcome:
    """Run the method `prepare` of the recipe's kind of rows, such as `sequences` or `prompts` (folder `kinds/`)."""
    return load_row_kind(stage.recipe.train.train_policy.rows).prepare(stage)


def tokenise(stage: Stage) -> Outcome:
    """Tokenise the training rows and any held-out rows to files. Raise DataError if a data set is missing or malformed,
    too many rows are unreadable or no row is left, ModelError if the tokenizer is missing or has no chat template, and
    Preempted if a stop was requested. If an error is raised, no file is written."""
    stage.progress.phase("prepare")
    splits = _load_splits(stage)
    tokenizer = _load_tokenizer(stage.model, stage.recipe.policy)
    stop_ids = read_stop_tokens(stage.model, stage.recipe.policy.model_revision, tokenizer)
    row_specs = {
        split: [_make_record_spec(stage, split, source, stop_ids) for source in sources]
        for split, sources in splits.items()
    }
    for split, split_specs in row_specs.items():
        image_root_folders = {row_spec.image_root for row_spec in split_specs if row_spec.image_root is not None}
        if len(image_root_folders) > 1:
            stored_root = Path(os.path.commonpath(image_root_folders))
            row_specs[split] = [replace(each, stored_root=stored_root) for each in split_specs]
    first_row_texts = (text for source in splits[TRAIN_SPLIT] for text in _read_first_texts(stage, source))
    lost_text_notice, loses_much_text = find_lost_text(tokenizer, first_row_texts)
    row_specs, tool_notices = _add_prompt_rendering(stage, row_specs, tokenizer)
    statistics: dict[str, dict[str, Any]] = {}
    ignored_image_settings = image_settings(stage.recipe).ignored_keys
    notices: list[JsonValue] = [f"{key} has no effect: {reason}" for key, reason in ignored_image_settings]
    notices += [*tool_notices, *filter(None, [lost_text_notice])]
    if lost_text_notice:
        logger.warning("%s", lost_text_notice)
    num_rows_done, cleaning_metrics = 0, dict[str, float]()
    with replace_folder(stage.path / "data") as data_folder:
        # Clean the only source of training rows: the schema allows `clean` with one data set only.
        if stage.recipe.train.train_policy.clean is not None:
            held_out_sets = [source.rows for source in splits.get(VALIDATION_SPLIT, ())]
            dataset_loader, train_source = _make_dataset_loader(stage, stage.recipe), splits[TRAIN_SPLIT][0]
            cleaning_result = clean_training_rows(stage, train_source.rows, held_out_sets, data_folder, dataset_loader)
            cleaned_rows, cleaning_metrics, cleaning_notices = cleaning_result
            splits[TRAIN_SPLIT], notices = [replace(train_source, rows=cleaned_rows)], [*notices, *cleaning_notices]
        num_total_rows = sum(len(source.rows) for sources in splits.values() for source in sources)
        for split, sources in splits.items():
            split_counts, counts_by_source = _write_split(
                stage, get_split_path(data_folder, split), row_specs[split], sources, num_rows_done, num_total_rows
            )
            num_rows_done += sum(len(source.rows) for source in sources)
            if not split_counts.num_rows:
                continue
            statistics[split] = split_counts.make_statistics_entry()
            logger.info("%s: %d rows, %d tokens", split, statistics[split]["rows"], statistics[split]["tokens"])
            if sources[0].label:
                statistics[split]["sources"] = _make_mixture_statistics(sources, counts_by_source)
            for source, source_counts in zip(sources, counts_by_source, strict=True):
                source_description = f"{split} of {source.label}" if source.label else split
                for notice in source_counts.make_notices(tokenizer.eos_token):
                    logger.warning("%s: %s", source_description, notice)
                    notices.append(f"{source_description}: {notice}")
        write_json(data_folder / STATISTICS_FILE, statistics)
    metric_names = ("rows", "tokens", "skipped_rows")
    metrics = {f"data/{split}_{name}": float(statistics[split][name]) for split in statistics for name in metric_names}
    info_of_outcome: dict[str, JsonValue] = {"data": "data", **({"notices": notices} if notices else {})}
    info_of_outcome |= {"loses_text": lost_text_notice} if loses_much_text else {}
    return Outcome(outputs=("data",), metrics=metrics | cleaning_metrics, info=info_of_outcome)


@dataclass(frozen=True)
class _RowSource:
    """Rows of one data set of a split, and the recipe with the settings for reading these rows."""

    rows: Rows
    recipe: Recipe
    dataset: RowsConfig
    label: str = ""
    """Name of the data set in a mixture of data sets; empty if the split has only one data set."""
    weight: float | None = None


def _read_first_texts(stage: Stage, source: _RowSource) -> Iterator[str]:
    algorithm = source.recipe.train.train_policy
    apply_packer = _make_dataset_loader(stage, source.recipe).make_packer()
    for location, row in islice(source.rows, _NUM_CHECKED_ROWS):
        with suppress(DataError):
            row_of_packer = apply_packer(row, location) if apply_packer else row
            yield from iterate_texts(load_tokenised_kind(algorithm.rows).read(row_of_packer, location, algorithm))


def _add_prompt_rendering(
    stage: Stage, row_specs: dict[str, list[RecordSpec]], tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, list[RecordSpec]], list[JsonValue]]:
    """Add the recipe's settings for rendering prompts to `row_specs`, the conversion settings of each split. Return the
    new `row_specs`, and notices about the chat template."""
    if not any(row_spec.row_kind.is_prompt for split_specs in row_specs.values() for row_spec in split_specs):
        return row_specs, []
    render_settings = make_prompt_rendering(stage.recipe.rollout.multi_turn_config)
    notices: list[JsonValue] = []
    if render_settings.tools and not template_uses_tools(tokenizer, render_settings):
        notices.append("the chat template leaves out the tools, so the policy is told of none; give another template")
    row_specs = {k: [replace(each, prompt_rendering=render_settings) for each in v] for k, v in row_specs.items()}
    return row_specs, notices


def _write_split(
    stage: Stage, split_path: Path, row_specs: list[RecordSpec], sources: list[_RowSource], num_rows_done: int,
    total_rows: int,
) -> tuple[SplitCounts, list[SplitCounts]]:  # fmt: skip
    """Tokenise the rows of a split and write them to a file; return the statistics of the split and of each of its data
    sets. Raise DataError if too many rows cannot be read, or no row of a data set is left. For progress reports,
    `total_rows` is the number of rows of all splits, `num_rows_done` of which were processed before."""
    split_counts, counts_by_source = SplitCounts(row_specs[0]), [SplitCounts(row_spec) for row_spec in row_specs]
    row_chunks = _tokenise_sources(stage, row_specs, sources)
    with pa.ipc.new_file(split_path, row_specs[0].schema) as split_file, closing(row_chunks):
        for i, chunk in row_chunks:
            if chunk.batch.num_rows:
                split_file.write_batch(chunk.batch)
            split_counts.add(chunk)
            counts_by_source[i].add(chunk)
            # HELD_OUT_SEQUENCES_SPLIT has the same rows as the validation split, whose check covers these rows.
            if split_path.stem != HELD_OUT_SEQUENCES_SPLIT:
                counts_by_source[i].check_unusable_rows(sources[i].dataset.max_skipped_fraction, len(sources[i].rows))
            num_rows_done += chunk.batch.num_rows + len(chunk.skipped_rows)
            stage.progress.step(num_rows_done, total_rows)
            if stage.stop_requested:
                num_rows_done_text = f"{num_rows_done} of {total_rows} rows"
                raise Preempted(f"stopped after {num_rows_done_text} were tokenised; preparing starts anew")
    # Remove the file of the split HELD_OUT_SEQUENCES_SPLIT if it is empty, because no held-out prompt has a response.
    if split_path.stem == HELD_OUT_SEQUENCES_SPLIT and not split_counts.num_rows:
        split_path.unlink()
    elif split_path.stem != HELD_OUT_SEQUENCES_SPLIT:
        for source, source_counts in zip(sources, counts_by_source, strict=True):
            if not source_counts.num_rows:
                source_description = f"{split_path.stem} of {source.label}" if source.label else split_path.stem
                raise DataError(f"{source_description}: {source_counts.make_notices()[0]}; no row is left, give others")
    return split_counts, counts_by_source


def _tokenise_sources(
    stage: Stage, row_specs: list[RecordSpec], sources: list[_RowSource]
) -> Generator[tuple[int, RowChunk]]:
    for source_index, (row_spec, source) in enumerate(zip(row_specs, sources, strict=True)):
        with closing(_tokenise_rows(stage, row_spec, source.rows)) as row_chunks:
            yield from ((source_index, row_chunk) for row_chunk in row_chunks)


def _make_mixture_statistics(sources: list[_RowSource], counts_by_source: list[SplitCounts]) -> list[dict[str, Any]]:
    """Return the statistics of each data set of a mixture. Raise DataError if the weight of a data set is so low that
    no row of an epoch is from this data set."""
    source_statistics = [
        {
            "source": source.label,
            "weight": source.weight or source_counts.num_rows,
            **(source_counts.make_statistics_entry() if source_counts.num_rows else {"rows": 0}),
        }
        for source, source_counts in zip(sources, counts_by_source, strict=True)
    ]
    num_rows_of_sources = sum(entry["rows"] for entry in source_statistics)
    row_counts = divide_in_proportion(num_rows_of_sources, [entry["weight"] for entry in source_statistics])
    for entry, count in zip(source_statistics, row_counts, strict=True):
        if not count and entry["rows"]:
            problem = f"is {entry['weight']:g}, which gives it none of the {num_rows_of_sources:,} rows of an epoch"
            raise DataError(f"train.train_policy.datasets: the weight of {entry['source']} {problem}; raise it")
    return source_statistics


def _load_splits(stage: Stage) -> dict[str, list[_RowSource]]:
    """Return the rows of each split: training rows and, if any, held-out rows and rows of a supervised loss."""
    algorithm, validation = stage.recipe.train.train_policy, stage.recipe.validation
    train_sources, held_out_sources = _load_train_and_held_out(stage)
    splits = {TRAIN_SPLIT: train_sources}
    if held_out_sources:
        if validation.max_rows is not None:
            row_limits = divide_in_proportion(validation.max_rows, [len(source.rows) for source in held_out_sources])
            held_out_sources = [
                replace(each, rows=each.rows.take(n)) for each, n in zip(held_out_sources, row_limits, strict=True) if n
            ]
        splits |= dict.fromkeys(_get_held_out_row_kinds(stage.recipe), held_out_sources)
    if algorithm.supervised_rows is not None:
        dataset = algorithm.supervised_rows.dataset
        rows = load_rows(dataset, "train.train_policy.data_term")
        splits[DATA_TERM_SPLIT] = [_RowSource(rows, stage.recipe, dataset)]
    return splits


def _load_train_and_held_out(stage: Stage) -> tuple[list[_RowSource], list[_RowSource]]:
    """Return the data sets with training rows, and the data sets with held-out rows; the second list is empty if no
    rows are held out."""
    recipe, validation = stage.recipe, stage.recipe.validation
    train_sources: list[_RowSource] = []
    for config_key, algorithm in get_policies_by_dataset(stage).items():
        source_recipe, row_source_fields = recipe, dict[str, Any]()
        dataset: RowsConfig = algorithm.dataset
        if isinstance(dataset, SourceConfig):
            source_recipe = recipe.copy_with(train=recipe.train.copy_with(train_policy=algorithm))
            row_source_fields = {"label": dataset.label, "weight": dataset.weight}
        dataset_loader = None if stage.data is not None else _make_dataset_loader(stage, source_recipe)
        rows = load_rows(dataset, config_key, dataset_loader)
        train_sources.append(_RowSource(rows, source_recipe, dataset, **row_source_fields))
    if validation.dataset.name:
        rows = load_rows(validation.dataset, "validation.dataset", _make_dataset_loader(stage, recipe))
        return train_sources, [_RowSource(rows, recipe, validation.dataset)]
    if stage.data is not None and has_local_split(stage.data, VALIDATION_SPLIT):
        rows = load_rows(DatasetConfig(name=str(stage.data), split=(VALIDATION_SPLIT,)), f"stage {stage.name!r}: data")
        return train_sources, [_RowSource(rows, recipe, _remove_pass_rates(train_sources[0].dataset))]
    held_out_sources = []
    for source_index, source in enumerate(train_sources):
        algorithm = source.recipe.train.train_policy
        if algorithm.dataset.test_size is None:
            continue
        try:
            rows, held_out_rows = split_rows(source.rows, algorithm.dataset.test_size, stage.seed)
        except DataError:
            if not algorithm.data_packer:  # report an unreadable first row instead of too few rows
                location, row = next(iter(source.rows))
                with suppress(SkippedRow):
                    load_tokenised_kind(algorithm.rows).read(row, location, algorithm)
            raise
        train_sources[source_index] = replace(source, rows=rows)
        held_out_sources.append(
            replace(source, rows=held_out_rows, dataset=_remove_pass_rates(source.dataset), weight=None)
        )
    return train_sources, held_out_sources


def _remove_pass_rates(dataset: RowsConfig) -> RowsConfig:
    """Return the settings of a data set without the selection of rows by pass rate. They are for held-out rows, because
    only training rows are selected, and files of pass rates have only training prompts."""
    return dataset.copy_with(keep="", pass_rates="")


def _get_held_out_row_kinds(recipe: Recipe) -> dict[str, str]:
    row_kind = load_row_kind(recipe.train.train_policy.rows)
    return row_kind.held_out_row_kinds(has_rewards=bool(recipe.validation.reward_function))


def _make_dataset_loader(stage: Stage, recipe: Recipe) -> UserDatasetLoader:
    return UserDatasetLoader(recipe, partial(_load_tokenizer, stage.model, recipe.policy))


def read_stop_tokens(model: str, revision: str | None, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids of tokens that stop generation: the tokenizer's end token, and those in generation_config.json."""
    generation_config = load_generation_config(model, revision)
    stop_ids: Any = generation_config and generation_config.eos_token_id
    stop_ids = stop_ids if isinstance(stop_ids, list) else [stop_ids]
    # Some published models have the token id -1, which means that there is no such token.
    return tuple(token_id for token_id in (tokenizer.eos_token_id, *stop_ids) if token_id is not None and token_id >= 0)


def _make_record_spec(stage: Stage, split: str, source: _RowSource, stop_ids: tuple[int, ...]) -> RecordSpec:
    recipe, dataset, is_data_term = source.recipe, source.dataset, split == DATA_TERM_SPLIT
    held_out_row_kinds = _get_held_out_row_kinds(recipe) | {DATA_TERM_SPLIT: "sequences"}
    row_kind = load_tokenised_kind(held_out_row_kinds.get(split, recipe.train.train_policy.rows))
    max_completion_tokens = recipe.rollout.max_response_length
    if split == VALIDATION_SPLIT:
        max_completion_tokens = recipe.validation.max_response_length or max_completion_tokens
    return RecordSpec(
        recipe, row_kind, recipe.policy.model_max_length - row_kind.is_prompt, stage.model,
        find_image_root(recipe, stage.model, source.rows.folder), stop_ids=stop_ids, pass_rate_range=dataset.keep,
        pass_rates=read_pass_rates(Path(dataset.pass_rates)) if dataset.pass_rates and row_kind.is_prompt else None,
        is_data_term=is_data_term, max_completion_tokens=max_completion_tokens if row_kind.is_prompt else 0,
    )  # fmt: skip


def _tokenise_rows(stage: Stage, row_spec: RecordSpec, rows: Rows) -> Generator[RowChunk]:
    """Tokenise rows in this process or in a pool of processes; yield chunks of tokenised rows, in the order of the
    rows."""
    model, policy_config = stage.model, row_spec.recipe.policy
    apply_packer = None if row_spec.is_data_term else _make_dataset_loader(stage, row_spec.recipe).make_packer()
    row_iterator = ((location, apply_packer(row, location)) for location, row in rows) if apply_packer else iter(rows)
    row_chunks = iter(lambda: list(islice(row_iterator, _ROWS_PER_CHUNK)), [])
    num_workers = min(row_spec.recipe.train.train_policy.dataloader_num_workers, -(-len(rows) // _ROWS_PER_CHUNK))
    if num_workers <= 1:
        yield from map(partial(convert_rows, _load_tokenizer(model, policy_config), row_spec), row_chunks)
        return
    convert_chunk = partial(_convert_in_worker, model, policy_config, row_spec)
    spawn_context = multiprocessing.get_context("spawn")  # a forked process could wait forever for a lock of a thread
    process_pool = ProcessPoolExecutor(num_workers, spawn_context, initialise_process)
    pending_futures = deque(process_pool.submit(convert_chunk, chunk) for chunk in islice(row_chunks, 2 * num_workers))
    try:
        while pending_futures:
            yield pending_futures.popleft().result()
            pending_futures.extend(process_pool.submit(convert_chunk, chunk) for chunk in islice(row_chunks, 1))
    finally:
        process_pool.shutdown(cancel_futures=True)


def _convert_in_worker(
    model: str, policy_config: PolicyConfig, row_spec: RecordSpec, rows: list[LocatedRow]
) -> RowChunk:
    tokenizer = _load_cached_tokenizer(model, policy_config.model_revision, policy_config.chat_template)
    return convert_rows(tokenizer, row_spec, rows)


def _load_tokenizer(model: str, policy_config: PolicyConfig) -> PreTrainedTokenizerBase:
    return load_tokenizer(model, policy_config.model_revision, policy_config.chat_template)


_load_cached_tokenizer = lru_cache(maxsize=1)(load_tokenizer)
