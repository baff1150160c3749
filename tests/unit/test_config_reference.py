"""The written reference of all keys is that of the schema."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from cosmos_core.config import describe
from cosmos_core.config.compat import trl
from cosmos_core.config.compat.translate import INEFFECTIVE_KEYS, RENAMED_KEYS
from cosmos_core.config.describe import explain_key, find_keys, list_keys
from cosmos_core.config.reference import render_config_reference
from cosmos_core.config.schema.pipeline import PipelineConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.table import all_fields
from cosmos_core.errors import ConfigError
from tasks.kinds import all_kinds

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_what_the_schema_makes() -> None:
    assert PAGE.read_text(encoding="utf-8") == render_config_reference(all_kinds()), (
        "docs/configuration.md is stale: run make docs"
    )


def test_the_table_of_an_algorithm_is_headed_by_the_name_that_chooses_it() -> None:
    named = re.findall(r"^## .* with `trainer_type = \"(\w+)\"`$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    modules = (PAGE.parents[1] / "cosmos_core/algorithms").glob("*.py")
    assert sorted(named) == sorted(file.stem for file in modules if "\nALGORITHM = " in file.read_text("utf-8"))


def test_every_key_has_a_row_of_all_columns() -> None:
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in PAGE.read_text(encoding="utf-8").splitlines()
            if line.startswith("| `")]  # fmt: skip
    assert {len(row) for row in rows} == {7}
    named = [row[0].strip(" `") for row in rows]
    assert sorted(named) == sorted(key.name for key in list_keys() if not key.is_table or key.default)
    assert all(row[1].strip() and row[4].strip() and row[5].strip() for row in rows)
    assert [key.name for key in list_keys() if "\n" in key.default] == [], "a default is in TOML syntax on one line"


@pytest.mark.parametrize(
    ("key", "cells"),
    [
        ("train.optm_warmup_steps",
         ["integer or number", "`20`", "train steps or fraction",
          "Length of the warm-up of the learning rate: a number of steps, or, as a float up to 1.0, a fraction of all.",
          "Cosmos-RL", "rl, sft"]),
        ("train.ckpt.max_keep",
         ["integer", "`5`", "checkpoints", "Number of newest checkpoints to keep in addition to the best; -1: all.",
          "Cosmos-RL", "rl, sft"]),
        ("redis",
         ["string or integer", '`""`', "",
         "Port of the Redis server of Cosmos-RL's controller; a recipe with this key is one for Cosmos-RL, see `mode`.",
         "later Cosmos-RL",
          "no effect: stages are processes on their own; there is no controller to find"]),
        ("pipeline.stages.timeout",
         ["string", '`""`', "", "Time limit of one attempt of the stage, e.g. `12h`; empty: no limit.", "ours", ""]),
    ],
)  # fmt: skip
def test_a_row_says_type_default_unit_meaning_generation_and_use(key: str, cells: list[str]) -> None:
    [line] = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| `{key}` |")]
    assert [cell.strip() for cell in line.split("|")[2:-1]] == cells


def test_older_and_dead_names_are_listed() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"- `{old}` is today's `{new}`" in text for old, new in RENAMED_KEYS.items())
    assert all(f"- `{key}` would have meant {meaning}" in text for key, meaning in INEFFECTIVE_KEYS.items())


def test_the_page_for_users_of_trl_has_every_name_and_key() -> None:
    text = PAGE.with_name("coming-from-trl.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    listed = {name: set(re.findall(r"`([a-z0-9_]+(?:\.[a-z0-9_]+)+)`", row[1]))
              for row in rows for name in re.findall(r"`(\w+)`", row[0])}  # fmt: skip
    assert {name: set(keys) <= listed.get(name, set()) for name, keys in trl.KEYS_BY_TRL_NAME.items()} == dict.fromkeys(
        trl.KEYS_BY_TRL_NAME, True
    )
    known = {key.name for key in list_keys()}
    leading = {name: keys for name, keys in listed.items() if keys and name.islower()}
    assert [name for name, keys in leading.items() if not keys & {key.name for key in find_keys(name)}] == []
    assert {key for keys in (*trl.KEYS_BY_TRL_NAME.values(), *listed.values()) for key in keys} <= known
    assert [name for name in (*trl.KEYS_BY_TRL_NAME, *trl._ADVICE_BY_TRL_NAME) if name in known] == []
    for name, meaning in trl._ADVICE_BY_TRL_NAME.items():
        assert f"| {name} | {meaning.replace('rollout.sampling_config.', '')} |" in text.replace("`", "")
    same = text[text.index("`mask_truncated_completions`") :]
    last = {key.rpartition(".")[2] for key in known}
    assert set(re.findall(r"`(\w+)`", same)) <= last, "they have the same names here"


def test_a_name_without_its_tables_shows_the_keys_of_all() -> None:
    names = [key.name for key in find_keys("temperature")]
    assert {"train.train_policy.temperature", "rollout.sampling_config.temperature"} <= set(names)
    assert not [line for line in explain_key("temperature", {}) if "in TRL" in line]
    assert "pipeline.stages.model" in [key.name for key in find_keys("model")]  # `[model]` of old recipes did nothing
    assert "  in TRL    learning_rate" in explain_key("learning_rate", {})
    assert {key.name for key in find_keys("epsilon")} == {"train.epsilon", "train.train_policy.epsilon_low"}
    assert {key.name.rpartition(".")[0] for key in find_keys("mask_truncated_completions")} == {"train.train_policy"}


@pytest.mark.parametrize("name", list(trl._ADVICE_BY_TRL_NAME))
def test_a_name_of_trl_without_a_key_says_what_is_here(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown key; {name} of transformers, PEFT and TRL is (always on|not )"):
        find_keys(name)
    assert (
        trl.describe_equivalent_key(f"train.train_policy.{name}")
        == f"; {name} of transformers, PEFT and TRL is {trl._ADVICE_BY_TRL_NAME[name]}"
    )


def test_status_toml_names_keys_that_the_schema_has() -> None:
    notes = tomllib.loads(Path(describe.__file__).with_name("status.toml").read_text(encoding="utf-8"))
    named = [(table, name) for notes in notes.values() for tables in notes.values()
             for table, names in tables.items() for name in names.split()]  # fmt: skip
    fields = (*all_fields(Recipe), *all_fields(PipelineConfig))
    known = {(base.__name__, key.rpartition(".")[2]) for key, table, _ in fields for base in table.__mro__}
    assert [at for at in named if at not in known and at[1] != "*"] == []
    assert [table for table, _ in named if table not in {table for table, _ in known}] == []


@pytest.mark.parametrize(("name", "meant"), [("train.lr", "train.optm_lr"), ("polcy", "policy")])
def test_a_misspelt_key_is_compared_with_keys_of_its_depth(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: unknown key; did you mean '{meant}'"):
        find_keys(name)
