"""Keys of evaluations: what is asked, how, of how many items, by which engine, and which rewards score samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import ConfigError
from cosmos_core.evaluate import program
from cosmos_core.evaluate.engines import engine_name, open_model
from tests.effects.change import SFT, Change, changes, recipe, stage_of
from tests.tiny_pipelines import save
from tests.unit.benchmark_tasks import save_model, write_tasks

BASE = {**SFT, "evaluate.tasks": ["choice"], "evaluate.include_path": "tasks", "evaluate.engine": "hf"}
FEW = {**BASE, "evaluate.limit": 2}
CHAT = {**FEW, "evaluate.num_fewshot": 2, "evaluate.apply_chat_template": True}


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_tasks(Path("tasks"))
    save_model(Path("model"))


_USUAL: dict[str, tuple[set[str], list[str]]] = {}


def usual(given: Recipe) -> tuple[set[str], list[str]]:
    """What is asked of the tasks of this file, once for each recipe."""
    key = repr(given)
    if key not in _USUAL:
        _USUAL[key] = asked(given)
    return _USUAL[key]


def asked(given: Recipe) -> tuple[set[str], list[str]]:
    """The tasks, and a hash of each prompt."""
    path = Path("stages") / str(len(list(Path().glob("stages/*"))))
    program.run(stage_of(path.absolute(), given, kind="evaluate", model=Path("model").absolute()))
    items = pq.read_table(path / "items.parquet")
    return set(items["task"].to_pylist()), items["prompt_hash"].to_pylist()


@changes(
    Change("evaluate.num_fewshot", 1, FEW),
    Change("evaluate.apply_chat_template", True, FEW),
    Change("evaluate.fewshot_as_multiturn", False, CHAT),
    Change("evaluate.seed", 7, CHAT),
)
def test_it_changes_the_prompts(change: Change) -> None:
    (tasks, before), (same_tasks, after) = usual(change.before), asked(change.after)
    assert tasks == same_tasks == {"choice"} and len(before) == len(after) == 2
    assert not set(before) & set(after) or change.key == "evaluate.seed"
    assert before != after


@changes(
    (Change("evaluate.tasks", ["choice", "copy"], FEW), ({"choice", "copy"}, 4)),
    (Change("evaluate.limit", 3, FEW), ({"choice"}, 3)),
    (Change("evaluate.include_path", "other", FEW), ({"choice"}, 1)),
)
def test_it_changes_which_items_are_measured(change: Change, expected: Any) -> None:
    write_tasks(Path("other"), [{"question": "?", "choices": ["a", "b"], "label": 0, "answer": "a"}])
    tasks, prompts = asked(change.after)
    assert (tasks, len(prompts)) == expected
    assert usual(change.before)[0] == {"choice"}


@changes(
    (Change("evaluate.batch_size", 4, BASE), ("batch_size", 1, 4)),
    (Change("evaluate.max_length", 99, BASE), ("max_length", 256, 99)),
)
def test_it_changes_the_model_of_lm_eval(change: Change, expected: Any) -> None:
    name, before, after = expected
    for side, value in ((change.before, before), (change.after, after)):
        stage = stage_of(Path("stages/1").absolute(), side, kind="evaluate", model=Path("model").absolute())
        assert getattr(open_model(stage, lambda: None), name) == value


@changes(Change("evaluate.engine", "hf", {**SFT, "evaluate.tasks": ["choice"]}))
def test_it_changes_the_engine_of_benchmarks(change: Change) -> None:
    assert (engine_name(change.before), engine_name(change.after)) == ("vllm", "hf")


@changes(Change("evaluate.confirm_run_unsafe_code", True, {**BASE, "evaluate.include_path": "unsafe"}))
def test_it_allows_code_to_be_executed(change: Change) -> None:
    write_tasks(Path("unsafe"), unsafe_code=True)
    with pytest.raises(ConfigError, match="executes code that the model writes"):
        asked(change.before)
    assert len(asked(change.after)[1]) == 8


PROMPTS = {"policy.is_diffusers": True, "policy.diffusers.inference_size": [32, 32], "train.param_dtype": "float32",
           "policy.diffusers.sample.eval_num_steps": 1, "evaluate.prompts": ["colours.txt"],
           "evaluate.rewards": ["tests.reference.redness:redness"]}  # fmt: skip


_SAMPLED: dict[str, tuple[set[str], int]] = {}
"""What is sampled and scored before and after, found once."""


def sampled(given: Recipe, name: str) -> tuple[set[str], int]:
    """The metrics of a stage, and the number of images of the first prompt."""
    stage = stage_of(Path(name).absolute(), given, kind="evaluate", model=Path("pipeline").absolute())
    metrics = {metric.removeprefix("evaluation/") for metric in program.run(stage).metrics}
    images = list(stage.path.glob("visual_output/step_0/0-*.png"))
    return {metric for metric in metrics if not metric.endswith("invalid")}, len(images)


SAMPLED = [
    Change("evaluate.prompts", ["words.txt"], PROMPTS), Change("evaluate.rewards", ["rewards.py:one"], PROMPTS),
    Change("evaluate.samples_per_prompt", 3, PROMPTS),
]  # fmt: skip


@changes(*SAMPLED)
def test_it_changes_what_is_sampled_and_scored(change: Change) -> None:
    """All three at once: each shows in its own way."""
    save("sd3", Path("pipeline"))
    Path("colours.txt").write_text("red\n")
    Path("words.txt").write_text("blue\n")
    Path("rewards.py").write_text("def one(to_be_evaluated, reference, *, media):\n    return 1.0\n")
    for name, settings in (("before", {}), ("after", {each.key: each.value for each in SAMPLED})):
        if name not in _SAMPLED:
            _SAMPLED[name] = sampled(recipe({**PROMPTS, **settings}), name)
    before, after = _SAMPLED["before"], _SAMPLED["after"]
    assert change.before != change.after and (before, after) == (({"colours/redness"}, 1), ({"words/one"}, 3))
