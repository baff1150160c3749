"""Kinds of rows are found by name, and only their own folder depends on which kind it is."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cosmos_core.config.schema.algorithm import AlgorithmConfig
from cosmos_core.config.schema.methods import TRAINING_METHODS
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.kinds.base import LOCATION_COLUMN, PreparedRows
from cosmos_core.data.kinds.prompts import open_prompts
from cosmos_core.data.kinds.registry import list_row_kind_names, load_row_kind
from cosmos_core.data.kinds.sequences import open_sequences
from cosmos_core.data.prepare import run
from cosmos_core.data.prepared import open_held_out
from cosmos_core.errors import ConfigError
from tests.unit.test_data_prepare import grpo, make_stage, model, sft, write_rows  # noqa: F401 - a fixture

ROOT = Path(__file__).parents[2]
HOME = "cosmos_core/data/kinds/"
READERS = {"Sequences", "LabelledSequences", "PreferencePairs", "Prompts", "MediaRows", "NoisyRows", "MediaPrompts"}


def questions(path: str, text: str) -> Iterator[str]:
    """Yield each question about the kind of rows in a file: a comparison, `rows_kind`, an `isinstance` of its rows."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare):
            sides = [each for each in (node.left, *node.comparators) if isinstance(each, ast.Attribute)]
            # the table of an algorithm knows its own kind
            asked = [each for each in sides if each.attr == "rows" and ast.unparse(each) != "self.rows"]
            yield from (f"{path}:{each.lineno} {ast.unparse(node)}" for each in asked)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            classes = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} & READERS
            if node.func.id == "rows_kind" or (node.func.id == "isinstance" and classes):
                yield f"{path}:{node.lineno} {ast.unparse(node)}"


def test_only_the_kinds_of_rows_depend_on_which_kind_it_is() -> None:
    files = [file for folder in ("cosmos_core", "flows", "tasks") for file in sorted((ROOT / folder).rglob("*.py"))]
    paths = {str(file.relative_to(ROOT)): file for file in files}
    texts = {path: file.read_text(encoding="utf-8") for path, file in paths.items()}
    words = (".rows", "rows_kind", *READERS)  # of which a question has one
    asked = [
        question
        for path, text in texts.items()
        if not path.startswith((HOME, "cosmos_core/data/prepared.py")) and any(word in text for word in words)
        for question in questions(path, text)
    ]
    assert asked == [], "declare it in cosmos_core/data/kinds/base.py"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ('policy.rows == "pairs"', 1),
        ('recipe.train.train_policy.rows in {"pairs", "labelled"}', 1),
        ('rows_kind(folder, "train")', 1),
        ("isinstance(rows, Prompts | PreferencePairs)", 1),
        ("load_row_kind(policy.rows).open(folder, split, model)", 0),
        ('self.rows != "media"', 0),
    ],
)
def test_a_question_about_the_kind_of_rows_is_found(text: str, count: int) -> None:
    assert len(list(questions("x.py", text))) == count


def tables(table: type[AlgorithmConfig] = AlgorithmConfig) -> Iterator[type[AlgorithmConfig]]:
    yield from (each for child in table.__subclasses__() for each in (child, *tables(child)))


def test_each_kind_is_the_file_of_its_name_and_each_algorithm_names_one() -> None:
    assert {load_row_kind(name).name for name in list_row_kind_names()} == set(list_row_kind_names())
    declared = {rows for table in tables() if isinstance(rows := getattr(table, "rows", None), str)}
    assert declared | {method.rows for method in TRAINING_METHODS.values()} <= set(list_row_kind_names())
    for name in list_row_kind_names():
        schema = load_row_kind(name).schema
        assert schema.names == [*load_row_kind(name).columns, LOCATION_COLUMN]
        assert schema.metadata == {b"rows": name.encode()}
        assert load_row_kind(name).schema_with_images.names == [*load_row_kind(name).columns, "images", LOCATION_COLUMN]


def test_an_unknown_kind_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'pairs'"):
        load_row_kind("pair")


def learned_held_out(stage: Path) -> PreparedRows | None:
    recipe = Recipe.model_validate(sft("rows"))
    return open_held_out(stage / "data", recipe.train.train_policy, recipe.policy).rows


def test_held_out_rows_are_sequences_for_sft_and_prompts_when_rewards_score_them(tmp_path: Path, model: Path) -> None:  # noqa: F811
    rows, held_out = write_rows(tmp_path / "a.jsonl", 4), write_rows(tmp_path / "v.jsonl", 2, first=50)
    validation = {"dataset": {"name": str(held_out)}}
    run(make_stage(tmp_path / "loss", model, {**sft(rows), "validation": validation}))
    assert len(open_sequences(tmp_path / "loss" / "data", "validation")) == 2
    rewarded = {**validation, "reward_function": "exact_match", "max_response_length": 8}
    run(make_stage(tmp_path / "reward", model, {**sft(rows), "validation": rewarded}))
    prompts = open_prompts(tmp_path / "reward" / "data", "validation")
    assert [p.reference for p in prompts] == ["It is 51.", "It is 52."]
    assert prompts[0].text == "<|im_start|>user\nWhat is 50+1?<|im_end|>\n<|im_start|>assistant\n"
    loss = open_sequences(tmp_path / "loss" / "data", "validation")
    both = learned_held_out(tmp_path / "reward")
    assert both is not None
    assert [each.input_ids.tolist() for each in both.samples([0, 1])] == [loss[i][0].tolist() for i in range(2)]
    asked = tmp_path / "asked.jsonl"
    asked.write_text(json.dumps({"messages": [{"role": "user", "content": "?"}], "answer": "42"}) + "\n")
    asking = {**rewarded, "dataset": {"name": str(asked)}}
    run(make_stage(tmp_path / "asked", model, {**sft(rows), "validation": asking}))
    assert len(open_prompts(tmp_path / "asked" / "data", "validation")) == 1
    assert learned_held_out(tmp_path / "asked") is None, "no turn to learn"
    run(make_stage(tmp_path / "rl", model, {**grpo(rows), "validation": validation}))
    assert len(open_prompts(tmp_path / "rl" / "data", "validation")) == 2
