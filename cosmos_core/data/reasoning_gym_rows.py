"""Rows of the generators of the package `reasoning-gym`: questions with references, scored by functions of the package.

    train.train_policy.dataset.name = "reasoning-gym:chain_sum"
    train.train_policy.dataset.arguments = { size = 2000, seed = 1, max_terms = 4 }

A row has the columns `question`, `answer` and `metadata`, and `reasoning_gym`, which the reward `reasoning_gym` reads.
"""

import ast
import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from cosmos_core.config.schema.dataset import REASONING_GYM_PREFIX
from cosmos_core.data.formats import LocatedRow, RowReader
from cosmos_core.error_handling import convert_errors
from cosmos_core.errors import DataError, first_line
from cosmos_core.registry import suggest_names


def make_generator_reader(generator_name: str, arguments: Mapping[str, Any], config_key: str) -> RowReader:
    """Return the reader of a generator's rows; `config_key` names the data set's table in messages. Raise DataError if
    the package is not installed, has no such generator, or refuses the arguments."""
    name = REASONING_GYM_PREFIX + generator_name
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        problem = f"the package reasoning-gym cannot be imported ({first_line(error)})"
        remedy = "pip install 'cosmos-posttrain[reasoning-gym]'"
        raise DataError(f"{config_key}.name = {name!r}: {problem}; {remedy}") from error
    if generator_name not in DATASETS:
        problem = f"reasoning-gym has no generator {generator_name!r}{suggest_names(generator_name, list(DATASETS))}"
        raise DataError(f"{config_key}.name = {name!r}: {problem}")
    generator_arguments = {"seed": 0, **arguments}
    error_prefix = f"{config_key}.arguments: {generator_name} refuses {dict(arguments)}"
    with convert_errors(lambda error: DataError(f"{error_prefix}: {first_line(error)}")):
        dataset = reasoning_gym.create_dataset(generator_name, **generator_arguments)
    return RowReader(name, len(dataset), partial(_iterate_generated_rows, dataset, generator_name, generator_arguments))


def _iterate_generated_rows(dataset: Any, generator_name: str, arguments: Mapping[str, Any]) -> Iterator[LocatedRow]:
    def convert_error(error: Exception) -> DataError:
        return DataError(f"{location}: the generator raised {type(error).__name__}: {first_line(error)}")

    for row_index in range(len(dataset)):
        location = f"{REASONING_GYM_PREFIX}{generator_name} row {row_index}"
        with convert_errors(convert_error):
            entry = dataset[row_index]
        scoring_info = {"generator": generator_name, "arguments": dict(arguments), "entry": _to_python_literal(entry)}
        columns_of_entry = {name: entry[name] for name in ("question", "answer", "metadata")}
        yield location, {**columns_of_entry, "reasoning_gym": scoring_info}


def _to_python_literal(generated_entry: Mapping[str, Any]) -> str:
    """Return the text of a Python literal with an entry of a `reasoning-gym` data set. A literal is used because JSON
    does not support tuples, sets and keys of any type."""
    try:
        literal_text = repr(generated_entry)
        if ast.literal_eval(literal_text) == generated_entry:
            return literal_text
    except (ValueError, SyntaxError):
        pass
    return repr(json.loads(json.dumps(generated_entry, default=str)))
