"""Rows of a data set class and of a data packer of a user's own, as launcher scripts of Cosmos-RL have them.

    train.train_policy.dataset.name = "mine.py:Questions"     # a class, a function of the recipe, or an object
    train.train_policy.data_packer = "mine.py:Packer"

A data set has `__len__`, `__getitem__` and, where wanted, `setup(config[, tokenizer])` and
`get_reference_answer(index)`.
An item is a row (a dict), a conversation (a list of turns), an object with `prompt` or `conversation` and perhaps
`reference_answer`, or a string, which is text as the model shall see it: no chat template is applied to it.

Of a packer `get_rollout_input(item)` gives the prompt of an item, and `sft_process_sample(item)` an item in one of
these forms, or `token_ids` and `label_ids` (-100 where nothing is learned). Batches are made by the model's adapter, so
that its other methods are refused where a class has them.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from cosmos_core.config.schema.algorithm import AlgorithmConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.rl import RlConfig
from cosmos_core.data.formats import Located, Part
from cosmos_core.data.messages import Row, SkippedRow
from cosmos_core.errors import ConfigError, DataError, StageFailed
from cosmos_core.registry import import_user_code, location_of
from cosmos_core.transient import is_transient

RENDERED = "rendered text"
"""Column of a prompt that is what the model sees."""
TOKENS, LABELS = "token_ids", "label_ids"
"""Columns of a sequence that is tokenised; -100 where nothing is learned."""
NOTHING = -100

_NOT_CALLED = (
    "rollout_collate_fn", "get_rollout_output", "get_policy_input", "policy_compute_max_len", "policy_collate_fn",
    "sft_compute_max_len", "sft_collate_fn", "dpo_process_sample", "dpo_collate_fn", "batch_size", "slice_batch",
)  # fmt: skip


class Opener:
    """Opens data sets and packers for one recipe; `load_tokenizer` is called for a `setup` that asks for one."""

    def __init__(self, recipe: Recipe, load_tokenizer: Callable[[], Any]) -> None:
        self._recipe, self._load_tokenizer = recipe, load_tokenizer

    def part(self, name: str, key: str) -> Part:
        """Return the rows of a data set class.

        Raises:
            ConfigError: there is none, or it cannot be imported.
            DataError: it raised, or has no length.
        """
        made = import_user_code(name)
        with _blamed(f"{key}.name = {name!r}", None):
            dataset = _thing_of(made, self._recipe)
            self._set_up(dataset)
            length = len(dataset)
        return Part(name, length, partial(_items, dataset, name, length, self._recipe.train.train_policy))

    def packer(self) -> Callable[[Row, str], Row] | None:
        """Return what the recipe's packer makes of a row; None: it names none.

        Raises:
            ConfigError: it has methods that would not be called.
        """
        policy = self._recipe.train.train_policy
        if not policy.data_packer:
            return None
        made = import_user_code(policy.data_packer)
        if unused := [name for name in _NOT_CALLED if name in vars(made if inspect.isclass(made) else type(made))]:
            raise ConfigError(
                f"train.train_policy.data_packer = {policy.data_packer!r} has {', '.join(unused)}, which nothing calls "
                "here: batches are made by the model's adapter; remove it, or write an algorithm of your own"
            )
        wanted = "get_rollout_input" if isinstance(policy, RlConfig) else "sft_process_sample"
        with _blamed(f"train.train_policy.data_packer = {policy.data_packer!r}", made):
            packer = _thing_of(made, self._recipe)
            self._set_up(packer)
        method = getattr(packer, wanted, None)
        if policy.rows == "pairs" or method is None:
            raise ConfigError(
                f"train.train_policy.data_packer = {policy.data_packer!r}: a training on {policy.rows} calls "
                + ("none; leave it out" if policy.rows == "pairs" else f"{wanted}, which it does not have")
            )
        return partial(_packed, method, policy)

    def _set_up(self, thing: Any) -> None:
        if not hasattr(thing, "setup"):
            return
        names = list(inspect.signature(thing.setup).parameters)
        wants_tokenizer = "tokenizer" in names or len(names) > 1
        thing.setup(*(self._recipe, self._load_tokenizer())[: 1 + wants_tokenizer])


def _thing_of(named: Any, recipe: Recipe) -> Any:
    """Return an object as it is, and what a class or a function makes; a function gets the recipe if it takes anything,
    a class if it cannot do without."""
    is_class = inspect.isclass(named)
    if not callable(named) or (not is_class and hasattr(named, "__getitem__")):
        return named
    parameters = inspect.signature(named).parameters.values()
    taken = [each for each in parameters if each.kind in {each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD}]
    wants_recipe = any(each.default is each.empty for each in taken) if is_class else bool(taken)
    return named(recipe) if wants_recipe else named()


def _items(dataset: Any, name: str, length: int, policy: AlgorithmConfig) -> Iterator[Located]:
    look_up = getattr(dataset, "get_reference_answer", None) if isinstance(policy, RlConfig) else None
    for index in range(length):
        where = f"{name} item {index}"
        with _blamed(where, getattr(type(dataset), "__getitem__", None)):
            row = _row(dataset[index], policy, where)
            if look_up is not None:
                row |= _reference(look_up(index), policy)
        yield where, row


def _packed(method: Callable[[Any], Any], policy: AlgorithmConfig, row: Row, where: str) -> Row:
    with _blamed(where, method):
        packed = method(row)
    if isinstance(packed, dict) or not isinstance(policy, RlConfig):
        return _row(packed, policy, where)
    kept = {name: value for name, value in row.items() if name == _reference_column(policy) or name in _REFERENCES}
    return kept | _row(packed, policy, where)


_REFERENCES = ("answer", "response", "solution", "result", "reference_answer")


def _reference_column(policy: AlgorithmConfig) -> str:
    return (isinstance(policy, RlConfig) and policy.response_column_name) or "answer"


def _row(item: Any, policy: AlgorithmConfig, where: str) -> Row:
    """Return an item as a row with the columns that the recipe reads."""
    is_prompt = isinstance(policy, RlConfig)
    column = (policy.prompt_column_name if isinstance(policy, RlConfig) else "") or (
        "prompt" if is_prompt else "messages"
    )
    if isinstance(item, dict):
        return dict(item)
    if isinstance(item, str):
        return {RENDERED: item, column: item} if is_prompt else {"text": item}
    if isinstance(item, list | tuple):
        return {column: list(item)}
    content = getattr(item, "conversation", None) or getattr(item, "prompt", None)
    if content is None:
        raise DataError(
            f"{where} is a {type(item).__name__}; the rule is a dict, a list of turns, a string, or an object with "
            "prompt or conversation"
        )
    reference = getattr(item, "reference_answer", None)
    return _row(content, policy, where) | _reference(reference, policy)


def _reference(reference: Any, policy: AlgorithmConfig) -> Row:
    """Return the column of a reference, with the text that a file would have of it; none without one."""
    if reference is None:
        return {}
    try:
        text = reference if isinstance(reference, str) else json.dumps(reference, ensure_ascii=False)
    except (TypeError, ValueError):  # a set, or a number of NumPy
        text = str(reference)
    return {_reference_column(policy): text}


@contextmanager
def _blamed(where: str, function: Any) -> Iterator[None]:
    """What a user's code raises is an error about its data, with file and line; a row that is skipped stays one, and
    what may be gone at the next attempt is no fault of the data."""
    try:
        yield
    except (ConfigError, DataError, SkippedRow):
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        kind = StageFailed if is_transient(error) else DataError
        raise kind(f"{where}: {reason} ({location_of(error, function)})") from error
