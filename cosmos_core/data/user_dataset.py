"""Rows from a user's own data set class and data packer, with the interfaces of Cosmos-RL's launcher scripts.

    train.train_policy.dataset.name = "mine.py:Questions"     # a class, a function of the recipe, or an object
    train.train_policy.data_packer = "mine.py:Packer"

A data set has `__len__`, `__getitem__` and optionally `setup(config[, tokenizer])` and `get_reference_answer(index)`.
An item is a row (a dict), a conversation (a list of turns), an object with `prompt` or `conversation` and optionally
`reference_answer`, or a string. The model sees a string as it is: no chat template is applied to it.

A packer's `get_rollout_input(item)` returns the prompt of an item. `sft_process_sample(item)` returns an item in one
of the forms above, or `token_ids` and `label_ids` (-100 for tokens without a loss). The model's adapter makes the
batches, so a packer that defines other methods of the Cosmos-RL interface is refused.
"""

import inspect
import json
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from cosmos_core.config.schema.algorithm import AlgorithmConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.rl import RlConfig
from cosmos_core.config.schema.table import Table
from cosmos_core.data.formats import LocatedRow, RowReader
from cosmos_core.data.kinds.registry import load_tokenised_kind
from cosmos_core.data.messages import Row
from cosmos_core.error_handling import convert_errors
from cosmos_core.errors import ConfigError, CosmosError, DataError, StageFailed
from cosmos_core.registry import find_error_location, import_user_code
from cosmos_core.transient import is_transient

RENDERED_COLUMN = "rendered text"
"""Column with the text of a prompt exactly as the model sees it, without a chat template."""
TOKENS_COLUMN, LABELS_COLUMN = "token_ids", "label_ids"
"""Columns of a row that a user's data packer has tokenised: token ids, and labels, -100 for tokens without a loss."""
IGNORED_LABEL = -100
"""Label of a token without a loss."""

_UNSUPPORTED_PACKER_METHODS = (
    "rollout_collate_fn", "get_rollout_output", "get_policy_input", "policy_compute_max_len", "policy_collate_fn",
    "sft_compute_max_len", "sft_collate_fn", "dpo_process_sample", "dpo_collate_fn", "batch_size", "slice_batch",
)  # fmt: skip


class UserDatasetLoader:
    """Loader of data sets and data packers of user code, which a recipe names. It calls their method `setup` with the
    recipe and, if `setup` has a second parameter that is required or named `tokenizer`, with the tokenizer."""

    def __init__(self, recipe: Recipe, load_tokenizer: Callable[[], Any]) -> None:
        self._recipe, self._load_tokenizer = _convert_tuples_to_lists(recipe), load_tokenizer

    def make_row_reader(self, name: str, config_key: str) -> RowReader:
        """Return the reader of the user's data set `name`; `config_key` names its table in messages. Raise ConfigError
        if the class cannot be imported, and DataError if it raised an error or has no length."""
        user_object = import_user_code(name)
        with convert_user_code_errors(f"{config_key}.name = {name!r}", None):
            dataset = _instantiate_user_object(user_object, self._recipe)
            self._call_setup(dataset)
            length = len(dataset)
        return RowReader(name, length, partial(_iterate_items, dataset, name, length, self._recipe.train.train_policy))

    def make_packer(self) -> Callable[[Row, str], Row] | None:
        """Return a function that applies the recipe's packer to a row; None if the recipe names no packer. Raise
        ConfigError if the packer has methods that would never be called, or lacks the required method."""
        algorithm = self._recipe.train.train_policy
        if not algorithm.data_packer:
            return None
        setting_text = f"train.train_policy.data_packer = {algorithm.data_packer!r}"
        user_object = import_user_code(algorithm.data_packer)
        defined_methods = vars(user_object if inspect.isclass(user_object) else type(user_object))
        if unsupported_methods := [name for name in _UNSUPPORTED_PACKER_METHODS if name in defined_methods]:
            problem = "which nothing calls here: batches are made by the model's adapter"
            remedy = "remove it, or write an algorithm of your own"
            raise ConfigError(f"{setting_text} has {', '.join(unsupported_methods)}, {problem}; {remedy}")
        method_name = load_tokenised_kind(algorithm.rows).packer_method_name
        with convert_user_code_errors(setting_text, user_object):
            packer = _instantiate_user_object(user_object, self._recipe)
            self._call_setup(packer)
        packer_method_name = getattr(packer, method_name, None) if method_name else None
        if packer_method_name is None:
            needed_method_text = f"{method_name}, which it does not have" if method_name else "none; leave it out"
            raise ConfigError(f"{setting_text}: a training on {algorithm.rows} calls {needed_method_text}")
        return partial(_apply_packer, packer_method_name, algorithm)

    def _call_setup(self, user_object: Any) -> None:
        if not hasattr(user_object, "setup"):
            return
        parameters = list(inspect.signature(user_object.setup).parameters.values())[1:]
        # Ignore variable parameters such as `*args`, because they do not show that `setup` needs the tokenizer.
        named_parameter_kinds = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
        named_parameters = (each for each in parameters if each.kind in named_parameter_kinds)
        needs_tokenizer = any(each.name == "tokenizer" or each.default is each.empty for each in named_parameters)
        user_object.setup(*(self._recipe, self._load_tokenizer())[: 1 + needs_tokenizer])


def _convert_tuples_to_lists(recipe_value: Any) -> Any:
    """Return a recipe, or a value in it, with lists in place of tuples, as user code for Cosmos-RL expects them."""
    if isinstance(recipe_value, Table):
        return recipe_value.copy_with(**{name: _convert_tuples_to_lists(value) for name, value in recipe_value})
    is_value_tuple = isinstance(recipe_value, tuple)
    return [_convert_tuples_to_lists(value) for value in recipe_value] if is_value_tuple else recipe_value


def _instantiate_user_object(user_object: Any, recipe: Recipe) -> Any:
    """Return the data set or packer of imported user code. A function or class is called: a function with the recipe if
    it takes any argument, a class with the recipe if it has a required argument. Other objects are returned as they
    are."""
    is_user_class = inspect.isclass(user_object)
    if not callable(user_object) or (not is_user_class and hasattr(user_object, "__getitem__")):
        return user_object
    parameter_kinds = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    parameters = [each for each in inspect.signature(user_object).parameters.values() if each.kind in parameter_kinds]
    should_pass_recipe = any(each.default is each.empty for each in parameters) if is_user_class else bool(parameters)
    return user_object(recipe) if should_pass_recipe else user_object()


def _iterate_items(dataset: Any, name: str, num_items: int, algorithm: AlgorithmConfig) -> Iterator[LocatedRow]:
    """Yield the location and the row of each item of a user's data set. For RL, the row includes the reference answer
    that the data set's method `get_reference_answer` returns, if it has this method."""
    get_reference_fn = getattr(dataset, "get_reference_answer", None) if isinstance(algorithm, RlConfig) else None
    for index in range(num_items):
        location = f"{name} item {index}"
        with convert_user_code_errors(location, getattr(type(dataset), "__getitem__", None)):
            row = _convert_item(dataset[index], algorithm, location)
            if get_reference_fn is not None:
                row |= _make_reference_row(get_reference_fn(index), algorithm)
        yield location, row


def _apply_packer(packer_method_name: Callable[[Any], Any], algorithm: AlgorithmConfig, row: Row, location: str) -> Row:
    """Convert a row with a method of a data packer. If the packer returns a prompt as text, turns or an object, which
    have no columns, the columns with the reference answer are taken from `row`."""
    with convert_user_code_errors(location, packer_method_name):
        packer_output = packer_method_name(row)
    packer_row = _convert_item(packer_output, algorithm, location)
    if isinstance(packer_output, dict) or not isinstance(algorithm, RlConfig):
        return packer_row
    kept_columns = {*_REFERENCE_COLUMNS, _get_reference_column(algorithm)}
    return {name: value for name, value in row.items() if name in kept_columns} | packer_row


_REFERENCE_COLUMNS = ("answer", "response", "solution", "result", "ground_truth", "reward_model", "reference_answer")


def _get_reference_column(algorithm: AlgorithmConfig) -> str:
    return (isinstance(algorithm, RlConfig) and algorithm.response_column_name) or "answer"


def _convert_item(item: Any, algorithm: AlgorithmConfig, location: str) -> Row:
    """Convert an item of a user's data set or packer to a row with the columns that the recipe reads."""
    is_prompt = isinstance(algorithm, RlConfig)
    turns_column = (algorithm.prompt_column_name or "prompt") if isinstance(algorithm, RlConfig) else "messages"
    if isinstance(item, dict):
        return {name: _convert_array(value) for name, value in item.items()}
    if isinstance(item, str):
        return {RENDERED_COLUMN: item, turns_column: item} if is_prompt else {"text": item}
    if isinstance(item, list | tuple):
        return {turns_column: list(item)}
    prompt_or_turns = getattr(item, "conversation", None) or getattr(item, "prompt", None)
    if prompt_or_turns is None:
        supported_items_text = "the rule is a dict, a list of turns, a string, or an object with prompt or conversation"
        raise DataError(f"{location} is a {type(item).__name__}; {supported_items_text}")
    reference_response = getattr(item, "reference_answer", None)
    return _convert_item(prompt_or_turns, algorithm, location) | _make_reference_row(reference_response, algorithm)


def _convert_array(value: Any) -> Any:
    """Convert a number or 1D array of NumPy, pandas or torch to Python numbers, and NaN to None; return any other value
    unchanged."""
    if getattr(value, "ndim", 2) < 2 and hasattr(value, "tolist"):
        value = value.tolist()
    return None if isinstance(value, float) and math.isnan(value) else value


def _make_reference_row(response: Any, algorithm: AlgorithmConfig) -> Row:
    """Return a row with only the column of the reference answer `response`, as text, or as JSON if it is no text; an
    empty row if `response` is None."""
    response = _convert_array(response)
    if response is None:
        return {}
    try:
        reference_text = response if isinstance(response, str) else json.dumps(response, ensure_ascii=False)
    except (TypeError, ValueError):  # write a value without a JSON form, such as a set, by `str`
        reference_text = str(response)
    return {_get_reference_column(algorithm): reference_text}


def convert_user_code_errors(
    location: str,
    user_function: Any,
    error_class: type[CosmosError] = DataError,
    excluded_errors: type[Exception] | tuple[type[Exception], ...] = (ConfigError, DataError),
) -> AbstractContextManager[None]:
    """Convert errors of a user's code to an `error_class` with file and line, except those of the classes
    `excluded_errors`; a transient error becomes a `StageFailed`, because neither the code nor the data are at fault."""

    def convert_error(error: Exception) -> CosmosError:
        error_text = " ".join(f"{type(error).__name__}: {error}".split())
        error_type = StageFailed if is_transient(error) else error_class
        return error_type(f"{location}: {error_text} ({find_error_location(error, user_function)})")

    return convert_errors(convert_error, excluded_errors)
