"""Rows of reasoning-gym and their reward, beside what the package itself makes and scores."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cosmos_core.config.schema.dataset import DatasetConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.kinds.prompts import serialise_row_for_rewards
from cosmos_core.data.messages import read_prompt
from cosmos_core.data.rows import load_rows
from cosmos_core.errors import CosmosError, DataError
from cosmos_core.machine_properties import measure_machine
from cosmos_core.rewards.base import load_reward
from cosmos_core.run.inputs import check_inputs
from tests.cells import cells
from tests.unit.run_folder import fingerprint_of, load_recipe, make_inputs

NAME = "train.train_policy.dataset.name=reasoning-gym:chain_sum"
GENERATORS = {
    "chain_sum": {"size": 3, "seed": 4, "max_terms": 3},
    "arc_agi": {"size": 2},  # its scoring compares tuples
    "knights_knaves": {"size": 2, "seed": 1},  # its metadata have objects
    "countdown": {"size": 3, "seed": 7},  # more than one right answer
    "graph_color": {"size": 2, "seed": 2},  # no answer given
    "basic_arithmetic": {"size": 3, "operators": ["+", "-"], "seed": 9},
}


def generated(name: str, **arguments: Any) -> list[dict[str, Any]]:
    config = DatasetConfig(name=f"reasoning-gym:{name}", arguments=arguments)
    return [row for _, row in load_rows(config, "train.train_policy.dataset")]


@pytest.mark.parametrize("name", cells(GENERATORS, {"basic_arithmetic", "chain_sum"}))
def test_rows_and_scores_are_those_of_the_package(name: str) -> None:
    import reasoning_gym

    oracle = reasoning_gym.create_dataset(name, **{"seed": 0, **GENERATORS[name]})
    rows, reward = generated(name, **GENERATORS[name]), load_reward("reasoning_gym")
    assert [(row["question"], row["answer"]) for row in rows] == [(e["question"], e["answer"]) for e in oracle]
    answers = ["17", "x", "", *(entry["answer"] for entry in oracle if entry["answer"])]
    for row, entry in zip(rows, oracle, strict=True):
        prompt, reference = read_prompt(row, "row")
        assert prompt == [{"role": "user", "content": entry["question"]}] and reference == (entry["answer"] or "")
        metadata = json.loads(serialise_row_for_rewards(row, prompt))
        for answer in answers:
            expected = oracle.score_answer(answer.strip(), entry)
            for text in (answer, f"<think>9</think> <answer>no</answer> so\n<answer>{answer}</answer>."):
                fields = {"to_be_evaluated": text, "reference": reference, "metadata": metadata}
                assert reward(fields) == (expected, {}), (name, text)


def test_a_row_of_another_origin_is_invalid() -> None:
    with pytest.raises(ValueError, match="no generator of reasoning-gym made it"):
        load_reward("reasoning_gym")({"to_be_evaluated": "4", "reference": "4", "metadata": {}})


def test_the_reward_is_chosen_for_generated_rows_alone_and_never_over_another() -> None:
    def rewards(**policy: Any) -> dict[str, float]:
        return Recipe.model_validate({"train": {"train_policy": {"type": "grpo", **policy}}}).train.train_policy.rewards

    generated = {"dataset": {"name": "reasoning-gym:chain_sum"}}
    assert rewards(**generated) == {"reasoning_gym": 1.0}
    assert rewards(**generated, reward_function="format") == {"format": 1.0}
    assert rewards(dataset={"name": "rows.jsonl"}) == rewards() == {"single_choice": 1.0}
    several = [generated["dataset"], {"name": "a"}]
    assert rewards(datasets=several[:1]) == {"reasoning_gym": 1.0}
    assert rewards(datasets=several) == {"reasoning_gym": 1.0, "single_choice": 1.0}
    assert rewards(datasets=several, reward_function="format") == {"format": 1.0}


@pytest.mark.parametrize(("settings", "message"), [
    ({"name": "reasoning-gym:chain_sums"}, r"no generator 'chain_sums'; did you mean 'chain_sum'\?"),
    ({"name": "reasoning-gym:chain_sum", "arguments": {"terms": 3}}, r"arguments: chain_sum refuses .*'terms'"),
    ({"name": "reasoning-gym:chain_sum", "arguments": {"min_terms": 9, "max_terms": 2}}, "arguments: chain_sum refus"),
    ({"name": "reasoning-gym:chain_sum", "split": ("test",)}, r"k\.split: .*set k\.arguments\.size"),
])  # fmt: skip
def test_a_mistake_is_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load_rows(DatasetConfig(**settings), "k")
    assert "\n" not in str(caught.value)


def test_arguments_without_a_generator_are_refused() -> None:
    with pytest.raises(ValidationError, match="arguments are for a generator"):
        DatasetConfig(name="rows.jsonl", arguments={"size": 3})


def test_the_fingerprint_has_generator_arguments_and_version(tmp_path: Path) -> None:
    make_inputs(tmp_path)

    def stages(*overrides: str) -> dict[str, str]:
        pipeline = load_recipe(tmp_path, NAME, *overrides, kind="grpo")
        return {name: fingerprint_of(pipeline, name).value for name in ("prepare", "rl")}

    seed = stages("train.train_policy.dataset.arguments.seed=1")
    other = stages(NAME.replace("chain_sum", "countdown"))
    before = stages()
    assert before == stages() and len({before["prepare"], seed["prepare"], other["prepare"]}) == 3
    assert before["rl"] == seed["rl"]  # changed by the rows that it is given

    versions = {"reasoning-gym": version("reasoning-gym")}
    pipeline, plain = (load_recipe(tmp_path, *given, kind="grpo") for given in ([NAME], []))
    for name in before:
        assert fingerprint_of(pipeline, name).ingredients["generators"] == versions
        assert "generators" not in fingerprint_of(plain, name).ingredients


def test_a_missing_package_is_one_line_of_check(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    python = tmp_path / "python"  # an interpreter that has none of the packages
    python.write_text(f"#!/bin/sh\necho '{json.dumps(asdict(measure_machine()))}'\n")
    python.chmod(0o755)
    message = r"dataset\.name = 'reasoning-gym:chain_sum': the package reasoning-gym is not installed; pip"
    with pytest.raises(CosmosError, match=message):
        check_inputs(load_recipe(tmp_path, NAME, f"pipeline.python={python}", kind="grpo"))
