"""`config/effects.toml`, printed by `cosmos config coverage`, names a test for each key in use, and the test has it."""

from __future__ import annotations

import importlib
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from cosmos_core.config import describe
from cosmos_core.config.describe import KeyDescription, list_keys
from cosmos_core.config.schema.table import Table
from tests.effects.change import Change

CHOOSES_THE_TABLE = "train.train_policy.trainer_type"
EFFECTS = Path(describe.__file__).with_name("effects.toml")


def listed() -> dict[str, list[str]]:
    """Test to keys."""
    return tomllib.loads(EFFECTS.read_text(encoding="utf-8"))


def used() -> list[KeyDescription]:
    return [key for key in list_keys() if key.status == "used" and not key.is_table]


def changes_of(test: str) -> list[Change]:
    """What a test is parametrised over."""
    file, _, name = test.partition("::")
    function = getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), name)
    marks = [mark for mark in function.pytestmark if mark.name == "parametrize"]
    cases = [getattr(case, "values", case) for mark in marks for case in mark.args[1]]  # of pytest.param, or as it is
    values = [value for case in cases for value in (case if isinstance(case, tuple) else (case,))]
    return [value for value in values if isinstance(value, Change)]


def all_changes() -> Iterator[tuple[str, Change]]:
    for file in sorted({*Path(__file__).parent.glob("test_*.py")} - {Path(__file__)}):
        module = importlib.import_module(f"tests.effects.{file.stem}")
        for name, thing in vars(module).items():
            if name.startswith("test_") and hasattr(thing, "pytestmark"):
                test = f"tests/effects/{file.name}::{name}"
                yield from ((test, change) for change in changes_of(test))


def test_every_key_in_use_has_one_test_and_no_other_key_has_any() -> None:
    counts = Counter(key for keys in listed().values() for key in keys)
    assert [key for key, count in counts.items() if count > 1] == []
    assert set(counts) == {key.name for key in used()}
    assert dict(describe.effect_test_by_key()) == {key: test for test, keys in listed().items() for key in keys}


def test_each_test_changes_the_keys_that_it_is_listed_for() -> None:
    unchanged = {test: {*keys} - {change.key for change in changes_of(test)} for test, keys in listed().items()}
    assert {test: keys for test, keys in unchanged.items() if keys} == {}


def test_where_two_tables_have_a_key_both_are_changed() -> None:
    changed = {(change.key, table_of(change)) for _, change in all_changes() if not change.key.startswith("pipeline.")}
    wanted = {(key.name, declaring(key.table, key.name)) for key in used() if not key.name.startswith("pipeline.")}
    wanted = {pair for pair in wanted if pair[0] != CHOOSES_THE_TABLE}
    assert {(key, table.__name__) for key, table in wanted - changed} == set()


def table_of(change: Change) -> type[Table]:
    """Return the table that declares the key, in the recipe before the change."""
    table: Table = change.before
    for name in change.key.split(".")[:-1]:
        found = getattr(table, name)
        table = found[0] if isinstance(found, tuple) else found
    return declaring(type(table), change.key)


def declaring(table: type[Table], key: str) -> type[Table]:
    """Return the table that declares a key for `table` and others that build on it."""
    name = key.rpartition(".")[2]
    return next(each for each in table.__mro__ if name in vars(each).get("__annotations__", {}))
