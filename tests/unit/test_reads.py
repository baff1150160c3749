"""What the programs of stages read of a recipe is what their fingerprints count: a setting that is left out of one
must not be read, or a changed setting would take the old result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from configs.demo import arithmetic
from cosmos_core.config.compose import load_pipeline
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.table import Table, affects_result, all_fields, find_table_classes
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.data import prepare
from cosmos_core.run.fingerprint import make_read_key_predicate
from cosmos_core.run.stage import Stage
from cosmos_core.train import validate
from cosmos_core.train.setup import train
from tasks.kinds import all_kinds
from tests.unit.test_train import BASE, GRPO, SFT, make_stage, recipe

MEASURED = {"enable": True, "freq": 1}
OF_STEPS = {"train.epsilon", "train.activation_offload"} | {
    f"train.{name}" for name in TrainConfig.model_fields if name.startswith("optm_")
}
"""What a trainer reads for steps, which a stage that measures does not take."""
REWARDED = {**MEASURED, "reward_function": "exact_match"}


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Collect the keys of recipes that are read and that can change results."""
    read: set[tuple[str, str]] = set()
    found: set[str] = set()
    plain = Table.__getattribute__

    def reading(table: Table, name: str) -> Any:
        read.add((type(table).__name__, name))
        return plain(table, name)

    with monkeypatch.context() as patch:
        patch.setattr(Table, "__getattribute__", reading)
        yield found
    for key, table, field in all_fields(Recipe):
        if (table.__name__, key.rpartition(".")[2]) in read and affects_result(field):
            found |= {key} if not find_table_classes(field.annotation) else set()


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    stage = make_stage(folder / "task", "custom", recipe(SFT))
    arithmetic.make(stage, train_rows=16, heldout_rows=4, hidden_size=64, layers=1)
    return folder / "task"


@pytest.mark.parametrize(
    ("kind", "policy", "validation"),
    [
        pytest.param("sft", SFT, {}, marks=pytest.mark.full),
        pytest.param("sft", SFT, MEASURED, marks=pytest.mark.full),
        ("sft", SFT, REWARDED),
        ("rl", {**GRPO, "mini_batch": 4}, {}),
        pytest.param("validate", SFT, MEASURED, marks=pytest.mark.full),
        ("validate", SFT, REWARDED),
    ],
    ids=["sft", "sft that measures", "sft that completes", "rl", "rows", "completions"],
)
def test_a_program_reads_only_what_its_fingerprint_counts(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    kind: str, policy: dict[str, Any], validation: dict[str, Any],
) -> None:  # fmt: skip
    dataset = {"name": str(task / "data/train.jsonl")}
    held_out = {**validation, "dataset": {"name": str(task / "data/validation.jsonl")}} if validation else {}
    values = {
        "policy": {**BASE["policy"], "model_name_or_path": str(task / "model")},
        "train": {**BASE["train"], "max_num_steps": 1, "train_batch_per_replica": 4,
                  "train_policy": {**policy, "dataset": dataset}},
        "rollout": {"backend": "hf", "n_generation": 4, "batch_size": 4, "max_response_length": 4},
        "validation": held_out,
    }  # fmt: skip
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps(values))
    pipeline = load_pipeline(tmp_path / "recipe.toml", [], all_kinds())
    programs: dict[str, Callable[[Stage], object]] = {"sft": train, "rl": train, "validate": validate.run}
    for name, program in (("prepare", prepare.run), (kind, programs[kind])):
        stage, data = pipeline.stage(name), None if name == "prepare" else tmp_path / "prepare/data"
        with watched(monkeypatch) as read:
            program(make_stage(tmp_path / name, name, pipeline.recipes[name], task / "model", data))
        counts = make_read_key_predicate(pipeline, stage)
        assert read, "nothing was watched"
        without = read - {"custom"} - (OF_STEPS if kind == "validate" else set())  # `custom` is a user's own
        assert sorted(key for key in without if not counts(key)) == []
