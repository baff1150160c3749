"""Quick check before a run that data sets exist and that their first rows can be read.

It needs no tokenizer, torch or transformers, so a wrong file or column is reported early; `prepare.py` reads all rows.
"""

from collections.abc import Callable
from functools import partial
from itertools import islice

from cosmos_core.config.schema.dataset import RowsConfig, reasoning_gym_generator
from cosmos_core.data.kinds.base import VALIDATION_SPLIT
from cosmos_core.data.kinds.registry import load_tokenised_kind
from cosmos_core.data.messages import Row, SkippedRow, read_conversation
from cosmos_core.data.rows import get_policies_by_dataset, load_rows
from cosmos_core.data.statistics import make_unusable_rows_remedy
from cosmos_core.errors import DataError
from cosmos_core.run.stage import Stage
from cosmos_core.types import Outcome

_MAX_READ_ROWS, _MAX_GENERATED_ROWS = 200, 8
"""Maximum number of rows that the check reads from a data set, and from a generator of rows, which can be slow."""


def run(stage: Stage) -> Outcome:
    """Read the first rows of each data set of a `prepare` stage; raise DataError if the stage would fail because of
    them."""
    algorithm, validation = stage.recipe.train.train_policy, stage.recipe.validation
    row_kind = load_tokenised_kind(algorithm.rows)
    for config_key, source_algorithm in get_policies_by_dataset(stage).items():
        _check_first_rows(source_algorithm.dataset, config_key, partial(row_kind.read, algorithm=source_algorithm))
    if data_term_config := algorithm.supervised_rows:
        column, system_prompt = data_term_config.conversation_column_name, getattr(algorithm, "system_prompt", "")
        read_data_term_row = partial(read_conversation, column=column, system_prompt=system_prompt, with_images=True)
        _check_first_rows(data_term_config.dataset, "train.train_policy.data_term", read_data_term_row)
    if validation.dataset.name:
        row_kind_names = row_kind.held_out_row_kinds(has_rewards=bool(validation.reward_function))
        read_row = partial(load_tokenised_kind(row_kind_names[VALIDATION_SPLIT]).read, algorithm=algorithm)
        _check_first_rows(validation.dataset, "validation.dataset", read_row)
    return Outcome()


def _check_first_rows(dataset: RowsConfig, config_key: str, read_row: Callable[[Row, str], object]) -> None:
    """Call `read_row(row, location)` for the first rows of a data set, and raise DataError if too many of these calls
    raise DataError; `config_key` is the name of the data set's table in the recipe, for messages."""
    rows, max_skipped_fraction = load_rows(dataset, config_key), dataset.max_skipped_fraction
    row_errors: list[DataError] = []
    num_checked_rows = min(len(rows), _MAX_GENERATED_ROWS if reasoning_gym_generator(dataset.name) else _MAX_READ_ROWS)
    for location, row in islice(rows, num_checked_rows):
        try:
            read_row(row, location)
        except SkippedRow:
            continue
        except DataError as error:
            row_errors.append(error)
    if len(row_errors) > max_skipped_fraction * len(rows):
        raise DataError(
            f"{row_errors[0]}; {len(row_errors)} of the first {num_checked_rows} rows cannot be used, "
            + make_unusable_rows_remedy(max_skipped_fraction, is_every_row_unusable=len(row_errors) == num_checked_rows)
        )
