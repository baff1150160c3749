"""Pass rates of prompts: the file that a training or `sample` stage writes, and the stage that keeps rows by it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cosmos_core.config.capabilities import check_capabilities
from cosmos_core.config.compose import load_pipeline
from cosmos_core.config.conditions import parse_pass_rate_range
from cosmos_core.config.schema.dataset import PASS_RATES_FILE, DatasetConfig
from cosmos_core.data.kinds.registry import load_row_kind
from cosmos_core.data.records import Record, RecordSpec, _check_pass_rate, read_pass_rates
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.rewards.base import full_reward, has_full_reward
from cosmos_core.run.directory import create_run
from cosmos_core.run.inputs import check_inputs
from cosmos_core.run.manifest import commit_manifest
from cosmos_core.train.pass_rates import PassRates
from cosmos_core.types import Group, Outcome, Prompt, Score, ScoredGroup
from tasks.kinds import all_kinds
from tasks.layout import prepare_stage_folder
from tests.effects.change import GRPO, recipe
from tests.unit.run_folder import fingerprint_of, load_recipe, make_inputs

TWO = """
[pipeline]
threads = 1
output_dir = "{folder}/outputs"

[policy]
model_name_or_path = "{folder}/model"

[train.train_policy]
type = "grpo"
dataset.name = "{folder}/rows.jsonl"

[[pipeline.stages]]
name = "first"
kind = "{kind}"
{entry}

[[pipeline.stages]]
name = "second"
kind = "rl"
overrides.train.train_policy.dataset = {{ keep = "pass_rate < 1", pass_rates = "stage:first" }}
"""


@pytest.mark.parametrize(
    ("text", "kept"),
    [("0.1 <= pass_rate <= 0.9", "0.1 0.5 0.9"), ("0.1<pass_rate<0.9", "0.5"), ("pass_rate >= 0.9", "0.9 1"),
     ("pass_rate > 0.9", "1"), ("0.5 <= pass_rate", "0.5 0.9 1"), ("pass_rate <= 0", "0")],
)  # fmt: skip
def test_a_range_keeps_the_rates_in_it(text: str, kept: str) -> None:
    rates = ["0", "0.1", "0.5", "0.9", "1"]
    assert [rate for rate in rates if parse_pass_rate_range(text)(float(rate))] == kept.split()


@pytest.mark.parametrize(
    "text", ["pass_rate", "", "rate < 1", "pass_rate == 1", "0.1 >= pass_rate", "pass_rate < 1.2.3"]
)
def test_anything_else_is_no_range(text: str) -> None:
    with pytest.raises(ValueError, match="must be NUMBER <= pass_rate <= NUMBER"):
        parse_pass_rate_range(text)


def test_prompts_that_differ_in_their_images_have_no_rates_by_text() -> None:
    kind = load_row_kind("prompts")
    spec = RecordSpec(recipe(GRPO), kind, 8, "m", None, pass_rates={"look": 0.5}, pass_rate_range="pass_rate < 1")
    values = ([1], "look", "", "{}", "rows:1")
    _check_pass_rate(spec, {}, Record(values, False, {}), "rows:1")
    with pytest.raises(DataError, match=r"rows:1: dataset\.pass_rates are by the text of prompts without images"):
        _check_pass_rate(spec, {}, Record(values, False, {"images": 1, "image_tokens": 4}), "rows:1")


def test_a_blank_cell_of_a_csv_file_is_an_unknown_rate() -> None:
    spec = RecordSpec(recipe(GRPO), load_row_kind("prompts"), 8, "m", None, pass_rate_range="pass_rate < 1")
    record = Record(([1], "look", "", "{}", "rows:1"), False, {})
    for rate in ("", " ", None, "NaN", float("nan"), "0.5"):
        _check_pass_rate(spec, {"pass_rate": rate}, record, "rows:1")
    with pytest.raises(DataError, match=r"rows:1: the pass rate \[0\.5\] of its row is no number or null"):
        _check_pass_rate(spec, {"pass_rate": [0.5]}, record, "rows:1")


def test_a_file_without_a_range_is_refused() -> None:
    with pytest.raises(ValueError, match="pass_rates needs keep"):
        DatasetConfig(name="x", pass_rates="rates.jsonl")


def test_the_full_reward_may_differ_by_a_rounding_error() -> None:
    full = full_reward({"a": 0.1, "b": 0.2, "overlong": 1.0})
    assert full is not None and has_full_reward(0.1 + 0.2, full) and has_full_reward(0.3, full)
    assert not has_full_reward(0.2999, full)


@pytest.mark.parametrize("content", [None, "[]\n", '{"prompt": "p"}\n', "{"])
def test_a_file_of_another_form_is_named(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "rates.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(DataError, match=r"dataset\.pass_rates = .*rates\.jsonl' is no file of pass rates \("):
        read_pass_rates(file)
    file.write_text(json.dumps({"prompt": "a\u2028b", "pass_rate": None}, ensure_ascii=False) + "\n")
    assert read_pass_rates(file) == {"a\u2028b": None}


def test_a_prompt_that_comes_twice_has_the_rate_of_the_row_that_was_sampled(tmp_path: Path) -> None:
    for rates in ((1.0, None), (None, 1.0)):
        file = tmp_path / "rates.jsonl"
        file.write_text("".join(json.dumps({"prompt": "p", "pass_rate": rate}) + "\n" for rate in rates))
        assert read_pass_rates(file) == {"p": 1.0}


def test_rates_of_another_stage_are_read_once_it_is_done_and_only_of_one_that_completes_prompts(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    file = tmp_path / "p.toml"
    file.write_text(TWO.format(folder=tmp_path, kind="sample", entry=""))
    pipeline = load_pipeline(file, [], all_kinds())
    check_capabilities(pipeline)
    assert pipeline.stage("second-data").after == ("first",)
    run = create_run(pipeline)
    path = run.stage_path("first")
    path.mkdir(parents=True)
    commit_manifest(path, Outcome(), kind="sample", fingerprint="f", inputs={})
    laid_out = prepare_stage_folder(run, pipeline.stage("second-data"), fingerprint_of(pipeline, "second-data"))
    assert laid_out.recipe.train.train_policy.dataset.pass_rates == str(path / "pass_rates.jsonl")
    file.write_text(TWO.format(folder=tmp_path, kind="custom", entry=f'entry = "{tmp_path}/mine.py:score"'))
    with pytest.raises(ConfigError, match=r"dataset\.pass_rates = 'stage:first' completes no prompts"):
        check_capabilities(load_pipeline(file, [], all_kinds()))


def test_a_missing_file_and_rows_to_learn_are_refused_before_anything_runs(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    dataset = "train.train_policy.dataset"
    settings = (f"{dataset}.keep=pass_rate < 1", f"{dataset}.pass_rates={tmp_path}/none.jsonl")
    with pytest.raises(DataError, match=r"dataset\.pass_rates = .*none\.jsonl': no such file or folder"):
        check_inputs(load_recipe(tmp_path, *settings, kind="grpo"))
    with pytest.raises(ConfigError, match=r"dataset\.pass_rates: the rates of prompts to complete"):
        check_capabilities(load_recipe(tmp_path, *settings))
    several = f"[{{name='a.jsonl'}},{{name='b.jsonl', keep='pass_rate < 1', pass_rates='{tmp_path}/none.jsonl'}}]"
    with pytest.raises(ConfigError, match=r" train\.train_policy\.datasets\.1\.pass_rates: the rates of prompts to"):
        check_capabilities(load_recipe(tmp_path, f"{dataset}.name=''", f"{dataset}s={several}"))
    (tmp_path / "none.jsonl").write_text("one")
    first = fingerprint_of(load_recipe(tmp_path, *settings, kind="grpo"), "prepare")
    (tmp_path / "none.jsonl").write_text("two")
    assert fingerprint_of(load_recipe(tmp_path, *settings, kind="grpo"), "prepare").value != first.value


def test_pass_rates_of_a_checkpoint_are_not_those_of_other_rows(tmp_path: Path) -> None:
    """`train.resume = PATH` may go on with other rows."""
    rates, resumed = (PassRates(lambda *score: 1.0) for _ in range(2))
    kept, changed, other = Prompt(0, (1,), "a", "1"), Prompt(1, (1,), "b", "1"), Prompt(1, (1,), "c", "1")

    def num_groups(*prompts: Prompt) -> list[int]:
        resumed.write(tmp_path, prompts)
        return [json.loads(line)["drawn"] for line in (tmp_path / PASS_RATES_FILE).read_text().splitlines()]

    rates.add([ScoredGroup(Group(prompt, (), 0), (Score(1.0),)) for prompt in (kept, changed)])
    resumed.load_state_dict(rates.state_dict())
    assert num_groups(kept, changed) == [1, 1] and num_groups(kept, other) == [1, 0]
    resumed.load_state_dict({"0": [1.0] * 5})  # as an earlier version saved them
    assert num_groups(kept, other) == [1, 0]
