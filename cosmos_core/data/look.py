"""Quick check before a run that data sets exist and that their first rows can be read.

It needs no tokenizer, torch or transformers, so a wrong file or column is reported early; `prepare.py` reads all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from cosmos_core.config.media import media_of
from cosmos_core.config.schema.dataset import DatasetConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.rl import RlConfig
from cosmos_core.config.schema.supervised import SupervisedConfig
from cosmos_core.data.messages import (
    ReadRow,
    Row,
    SkippedRow,
    read_conversation,
    read_held_out,
    read_prompt,
    remedy_of,
)  # fmt: skip
from cosmos_core.data.preferences import READERS
from cosmos_core.data.rows import Rows, load_rows
from cosmos_core.errors import DataError
from cosmos_core.run.stage import Stage
from cosmos_core.types import Outcome

_NUM_ROWS = 200  # first rows of each split

Reader = Callable[[Row, str], object]


def run(stage: Stage) -> Outcome:
    """Read the first rows of each split.

    Raises:
        DataError: a file is wrong, or more rows cannot be read than may be left out, so `prepare` would fail.
    """
    recipe = stage.recipe
    policy, held_out, annotations = (
        recipe.train.train_policy,
        recipe.validation.dataset,
        media_of(recipe).annotation_path,
    )
    if stage.data is not None:
        name, key = str(stage.data), f"stage {stage.name!r}: data"
    else:
        name, key = annotations, "custom.dataset.annotation_path"
    rows = load_rows(DatasetConfig(name=name), key) if name else load_rows(policy.dataset, "train.train_policy.dataset")
    _check(rows, _reader(recipe, is_held_out=False), policy.dataset.max_skipped_fraction)
    if data_term := policy.real_rows:
        rows = load_rows(data_term.dataset, "train.train_policy.data_term")
        column, system_prompt = data_term.conversation_column_name, getattr(policy, "system_prompt", "")
        _check(rows, _conversations(column, system_prompt), data_term.max_skipped_fraction)
    if held_out.name:
        rows = load_rows(held_out, "validation.dataset")
        _check(rows, _reader(recipe, is_held_out=True), held_out.max_skipped_fraction)
    return Outcome()


def _check(rows: Rows, read: Reader, most: float) -> None:
    refused: list[DataError] = []
    for where, row in islice(rows, _NUM_ROWS):
        try:
            read(row, where)
        except SkippedRow:
            continue
        except DataError as error:
            refused.append(error)
    if len(refused) > most * len(rows):
        raise DataError(
            f"{refused[0]}; {len(refused)} of the first {min(_NUM_ROWS, len(rows))} rows cannot be used, "
            + remedy_of(most, is_all=len(refused) == min(_NUM_ROWS, len(rows)))
        )


def _reader(recipe: Recipe, *, is_held_out: bool) -> Reader:
    """Return a function that reads a row of a split as `prepare` does, but does not open images."""
    policy = recipe.train.train_policy
    if isinstance(policy, RlConfig):
        columns = (policy.prompt_column_name, policy.response_column_name, policy.system_prompt)
        return lambda row, where: read_prompt(row, where, *columns, with_images=True)
    assert isinstance(policy, SupervisedConfig)
    column, system_prompt, own_names = policy.conversation_column_name, policy.system_prompt, policy.own_names
    has_reward = is_held_out and recipe.validation.reward_function
    read = read_held_out if has_reward else READERS[policy.rows]
    return lambda row, where: read(ReadRow(row, own_names, where), where, column, system_prompt, with_images=True)


def _conversations(column: str, system_prompt: str) -> Reader:
    return lambda row, where: read_conversation(row, where, column, system_prompt, with_images=True)
