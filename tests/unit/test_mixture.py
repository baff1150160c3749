"""Mixtures of data sets: the order of rows, what each data set is prepared and scored by, stop and resume."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from configs.demo import arithmetic
from cosmos_core.config.capabilities import unique_notices
from cosmos_core.config.compose import load_pipeline
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data import prepare, quick_check
from cosmos_core.data.kinds.prompts import open_prompts
from cosmos_core.data.order import Mixture, batch_row_numbers
from cosmos_core.data.prepared import get_split_path, read_mixture
from cosmos_core.errors import DataError
from cosmos_core.run.hub import replace_setting
from cosmos_core.train.setup import train
from tasks.kinds import all_kinds
from tests.unit.run_folder import fingerprint_of
from tests.unit.test_train import SAVED, make_stage, recipe
from tests.unit.trainers import curve, train_until

SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=4)


@settings(max_examples=30)
@given(SIZES, st.data(), st.booleans())
def test_epochs_have_each_data_set_by_weight_and_each_row_before_any_again(
    sizes: list[int], data: st.DataObject, shuffle: bool
) -> None:
    weights = [data.draw(st.sampled_from([0.5, 1.0, 2.0, 7.0])) for _ in sizes]
    mixture = Mixture(tuple(map(str, range(len(sizes)))), tuple(sizes), tuple(weights))
    num_rows, total = sum(sizes), sum(weights)
    stream = np.concatenate([mixture.epoch_order(3, epoch, shuffle) for epoch in range(4)])
    labels = [mixture.get_source_label(int(row)) for row in stream]
    for epoch in range(4):
        counts = Counter(labels[epoch * num_rows : (epoch + 1) * num_rows])
        assert sum(counts.values()) == num_rows
        for i, weight in enumerate(weights):
            assert abs(counts[str(i)] - num_rows * weight / total) < 1
    start = 0
    for i, size in enumerate(sizes):
        own = [int(row) - start for row, label in zip(stream, labels, strict=True) if label == str(i)]
        for first in range(0, len(own) - size + 1, size):
            assert sorted(own[first : first + size]) == list(range(size))  # a pass over the data set
        start += size


def test_rows_of_two_are_spread_and_a_repeated_one_gets_another_order_and_steps_follow_from_their_number() -> None:
    mixture = Mixture(("a", "b"), (40, 8), (1.0, 1.0))
    order = mixture.epoch_order(5, 0, True)
    taken = np.cumsum(order < 40)
    assert np.abs(taken - np.arange(1, 49) / 2).max() <= 1
    passes = [tuple(each) for each in order[order >= 40].reshape(3, 8)]
    assert len(set(passes)) == 3
    steps = [batch_row_numbers(5, step, 6, mixture, True).tolist() for step in range(16)]
    assert steps[9] == batch_row_numbers(5, 9, 6, mixture, True).tolist()
    assert [row for rows in steps for row in rows] == [*order.tolist(), *mixture.epoch_order(5, 1, True).tolist()]


def test_without_weights_an_epoch_is_each_row_once() -> None:
    mixture = Mixture(("a", "b", "c"), (7, 11, 2), (7, 11, 2))
    assert all(sorted(mixture.epoch_order(0, epoch, True)) == list(range(20)) for epoch in range(3))


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of additions, and rows of two forms."""
    folder = tmp_path_factory.mktemp("mixture")
    stage = make_stage(folder / "task", "custom", recipe({"type": "sft"}))
    arithmetic.make(stage, train_rows=24, heldout_rows=4, hidden_size=32, layers=1)
    write(folder / "few.jsonl", [{"ask": f"{i}+1=", "truth": str(i + 1)} for i in range(8)])
    (folder / "mine.py").write_text("def always(completion, reference):\n    return 0.25\n")
    return folder


def datasets(task: Path, **few: Any) -> list[dict[str, Any]]:
    many = {"name": str(task / "task/data"), "weight": 1.0, "test_size": 4, "label": "many"}
    columns = {"prompt": "ask", "response": "truth"}
    return [many, {"name": str(task / "few.jsonl"), "weight": 3.0, "test_size": 2, "columns": columns, **few}]


def mixed(task: Path, kind: str, **policy: Any) -> Recipe:
    policy = {"type": kind, "mini_batch": 4, **policy}
    given: dict[str, Any] = {"train_batch_per_replica": 8, "max_num_steps": 5, "ckpt": SAVED}
    own = {"reward_function": f"{task}/mine.py:always"} if kind == "grpo" else {}
    policy |= {"datasets": datasets(task, **own), **({"reward_function": "exact_match"} if own else {})}
    values = recipe(policy, **given).model_dump(exclude_unset=True)
    return Recipe.model_validate(values | {"validation": {"enable": True, "freq": 5, "max_response_length": 4}})


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_stopped_and_resumed_ends_with_the_same_bits_and_metrics_by_data_set(
    task: Path, tmp_path: Path, kind: str
) -> None:
    config = mixed(task, "grpo" if kind == "rl" else kind)
    prepared = make_stage(tmp_path / "data", "prepare", config, task / "task/model")
    prepare.run(prepared)
    data = prepared.path / "data"
    held_out = read_mixture(get_split_path(data, "validation"))
    assert held_out is not None and (held_out.labels, held_out.sizes) == (("many", "few"), (4, 2))
    whole = make_stage(tmp_path / "whole", kind, config, task / "task/model", data)
    expected = train(whole)
    stage = make_stage(tmp_path / "cut", kind, config, task / "task/model", data)
    train_until(stage, 3)
    found = train(make_stage(tmp_path / "cut", kind, config, task / "task/model", data))
    weights = expected.adapter.model.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in found.adapter.model.state_dict().items())
    assert curve(whole) == curve(stage)
    last = curve(whole)[-1]
    if kind == "rl":
        assert last["reward/few/mean"] == last["reward/always"] == last["validation/reward/few/mean"] == 0.25
        assert {"reward/many/mean", "reward/exact_match", "validation/accuracy"} <= last.keys()
        (prompts, sources) = open_prompts(data, "train"), Counter[str]()
        for row in batch_row_numbers(config.train.order_seed, 0, 26, prompts.mixture or 0, True):
            sources[prompts[int(row)].source] += 1
        assert sources == {"few": 19, "many": 7}  # three quarters of 26, less than a row off
    else:
        assert {"loss/many", "loss/few", "validation/loss/many", "validation/loss/few"} <= last.keys()
        for prefix in ("", "validation/"):
            losses = [last[f"{prefix}loss{name}"] for name in ("/many", "/few", "")]
            assert min(losses[:2]) < losses[2] < max(losses[:2])


@pytest.mark.parametrize("trainer_type", ["kto", pytest.param("dpo", marks=pytest.mark.full)])
def test_a_preference_has_a_loss_by_data_set(task: Path, tmp_path: Path, trainer_type: str) -> None:
    if trainer_type == "dpo":
        rows = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "0"} for i in range(4)]
    else:
        rows = [{"prompt": f"{i}+1=", "completion": str(i + 1), "label": i % 2 == 0} for i in range(4)]
    names = [write(tmp_path / f"{name}.jsonl", rows) for name in "ab"]
    policy = {
        "type": "sft", "trainer_type": trainer_type, "mini_batch": 3,
        "datasets": [{"name": name, "test_size": 1} for name in names],
    }  # fmt: skip
    values = recipe(policy, train_batch_per_replica=6, max_num_steps=2).model_dump(exclude_unset=True)
    config = Recipe.model_validate(values | {"validation": {"enable": True, "freq": 1}})
    prepared = make_stage(tmp_path / "data", "prepare", config, task / "task/model")
    prepare.run(prepared)
    at = make_stage(tmp_path / "train", "sft", config, task / "task/model", prepared.path / "data")
    train(at)
    line = curve(at)[-1]
    for prefix in ("", "validation/"):
        losses = [line[f"{prefix}loss/{name}"] for name in "ab"]
        assert min(losses) <= line[f"{prefix}loss"] <= max(losses)


def test_pairs_are_mixed_with_columns_of_their_own(task: Path, tmp_path: Path) -> None:
    pair = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    names = write(tmp_path / "a.jsonl", [pair] * 4), write(tmp_path / "b.jsonl", [{**pair, "good": "4"}] * 2)
    policy = {
        "trainer_type": "dpo",
        "datasets": [{"name": names[0]}, {"name": names[1], "columns": {"chosen": "good"}}],
    }
    stage = make_stage(tmp_path / "s", "prepare", recipe({"type": "sft", **policy}), task / "task/model")
    prepare.run(stage)
    mixture = read_mixture(get_split_path(stage.path / "data", "train"))
    assert mixture == Mixture(("a", "b"), (4, 2), (4, 2))


def test_a_wrong_row_of_any_data_set_is_found_before_the_run(task: Path, tmp_path: Path) -> None:
    bad = write(tmp_path / "bad.jsonl", [{"ask": 3}])
    for program in (quick_check.run, prepare.run):
        with pytest.raises(DataError, match=r"bad\.jsonl:1: "):
            config = replace_setting(mixed(task, "grpo"), "train.train_policy.datasets.1.name", bad)
            program(make_stage(tmp_path / "s", "prepare", config, task / "task/model"))
    with pytest.raises(DataError, match=r"datasets\.0\.name = .*does not exist"):
        config = replace_setting(mixed(task, "grpo"), "train.train_policy.datasets.0.name", str(tmp_path / "no.jsonl"))
        quick_check.run(make_stage(tmp_path / "s", "prepare", config, task / "task/model"))


@pytest.mark.parametrize(("policy", "message"), [
    ({"dataset": {"name": "a"}, "datasets": [{"name": "b"}]}, "datasets takes the place of dataset"),
    ({"dataset": {"keep": "pass_rate > 0"}, "datasets": [{"name": "b"}]}, "dataset; name all .* with their keep"),
    ({"datasets": [{"name": "x/a.jsonl"}, {"name": "y/a.csv"}]}, "two are called 'a' in metrics"),
    ({"datasets": [{"name": "a", "weight": 1.0}, {"name": "b"}]}, "give each a weight, or none"),
    ({"datasets": [{"name": "a", "columns": {"chosen": "x"}}]}, r"datasets\.0: sft has no chosen_column_name"),
    ({"datasets": [{"name": "a", "columns": {"prompt": "x"}}]}, r"datasets\.0: .*name both columns, or neither"),
    ({"datasets": [{"name": "a", "reward_function": "gsm8k"}]}, r"datasets\.0: sft has no reward_function"),
    ({"datasets": [{"name": " "}]}, "name is empty"),
])  # fmt: skip
def test_mistakes_are_one_line(policy: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        recipe({"type": "sft", **policy})


@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_values_of_another_type_are_errors_of_the_schema(kind: str) -> None:
    for wrong in (5, True, 0.5, "a", {"name": "a"}, [3], ["a"], [{"name": 3}], [{"name": None}]):
        with pytest.raises(ValidationError, match=r"datasets"):
            recipe({"type": kind, "datasets": wrong})


def test_held_out_rows_that_a_default_scores_are_mentioned(tmp_path: Path) -> None:
    def notices(settings: str = "", reward: str = "") -> list[str]:
        (tmp_path / "r.toml").write_text(
            f'[policy]\nmodel_name_or_path = "m"\n[validation]\nenable = true\n{settings}\n[train.train_policy]\n'
            f'type = "grpo"\n{reward}\n[[train.train_policy.datasets]]\nname = "a"\nreward_function = "gsm8k"\n'
        )
        return unique_notices(load_pipeline(tmp_path / "r.toml", [], all_kinds()))

    named = 'dataset.name = "held"'
    [found] = [notice for notice in notices(named) if "datasets do not score its rows" in notice]
    assert found.startswith("validation.dataset.name = 'held'") and found.endswith("set validation.reward_function")
    for given_settings in (("",), (f'{named}\nreward_function = "gsm8k"',), (named, 'reward_function = "gsm8k"')):
        assert not any("do not score" in notice for notice in notices(*given_settings))


def test_each_stage_is_made_again_for_the_keys_that_it_reads(task: Path, tmp_path: Path) -> None:
    def stages(**few: Any) -> dict[str, str]:
        tables = "\n".join(f"[[train.train_policy.datasets]]\n{toml(each)}" for each in datasets(task, **few))
        (tmp_path / "r.toml").write_text(
            f'[policy]\nmodel_name_or_path = "{task}/task/model"\n[train.train_policy]\ntype = "grpo"\n{tables}\n'
        )
        pipeline = load_pipeline(tmp_path / "r.toml", [], all_kinds())
        return {stage.name: fingerprint_of(pipeline, stage.name).value for stage in pipeline.stages}

    before = stages()
    renamed = write(tmp_path / "renamed.jsonl", [])
    shutil.copy(task / "few.jsonl", renamed)  # prepared rows have the label, which follows from the name
    changed = {"weight": 2.0, "system_prompt": "Add.", "reward_function": ["gsm8k"], "split": ["train[:4]"]}
    made_again = {
        key: {name for name, value in stages(**{key: value}).items() if value != before[name]}
        for key, value in {**changed, "name": renamed}.items()
    }
    assert made_again == {
        "weight": {"prepare"}, "system_prompt": {"prepare"}, "split": {"prepare"}, "reward_function": {"rl"},
        "name": {"prepare"}
    }  # fmt: skip
    (task / "few.jsonl").write_text((task / "few.jsonl").read_text() + '{"ask": "9+1=", "truth": "10"}\n')
    assert stages()["prepare"] != before["prepare"]


def toml(values: dict[str, Any]) -> str:
    def text(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key} = {text(each)}" for key, each in value.items()) + "}"
        return json.dumps(value)

    return "\n".join(f"{key} = {text(value)}" for key, value in values.items())
