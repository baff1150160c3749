"""Sweeps: the graph that a grid becomes, the choice of the best branch, and how the report shows them."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest
import tomli_w

from cosmos_core.config.capabilities import check_capabilities, unique_notices
from cosmos_core.config.compose import Pipeline, load_pipeline
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import ConfigError, GateFailed
from cosmos_core.launch.slots import hold_semaphore, make_branch_semaphores
from cosmos_core.observe.record import read_run
from cosmos_core.observe.report import build_report
from cosmos_core.observe.sections import make_sweep_tables
from cosmos_core.run.directory import create_run
from cosmos_core.run.manifest import read_result
from cosmos_core.run.stage import Stage
from cosmos_core.upload.base import open_target
from flows.retrain import make_start_overrides
from tasks.kinds import all_kinds
from tasks.layout import resolve_output
from tasks.stage import run_stage
from tasks.stages import select
from tests.conftest import PROGRAMS
from tests.unit.run_folder import fingerprint_of, finish, make_inputs

SFT = """
[pipeline]
name = "swept"
threads = 1
output_dir = "{folder}/outputs"

[policy]
model_name_or_path = "{folder}/model"

[train.train_policy]
type = "sft"
dataset.name = "{folder}/rows.jsonl"

[[pipeline.stages]]
name = "sft"
kind = "sft"
sweep = {{ {sweep} }}

[[pipeline.stages]]
name = "measure"
kind = "validate"
after = "sft"
model = "stage:sft"
{more}
"""
EXPORT = '[[pipeline.stages]]\nname = "export"\nkind = "export"\nafter = "measure"\nmodel = "stage:sft"\n'
RATES = '"train.optm_lr" = [1e-5, 0.5]'
MEASURED = 'metric = "validation/loss", mode = "min", through = "measure"'


def swept(folder: Path, sweep: str, *overrides: str, more: str = EXPORT) -> Pipeline:
    make_inputs(folder)
    file = folder / "swept.toml"
    file.write_text(SFT.format(folder=folder, sweep=sweep, more=more))
    return load_pipeline(file, overrides, all_kinds())


def graph(pipeline: Pipeline) -> dict[str, tuple[str, ...]]:
    return {stage.name: stage.after for stage in pipeline.stages}


def test_each_point_of_a_grid_is_a_branch_and_what_is_behind_follows_the_choice(tmp_path: Path) -> None:
    pipeline = swept(tmp_path, f'grid = {{ {RATES}, "train.seed" = [1, 2] }}, {MEASURED}')
    points = ["optm_lr-1e-5-seed-1", "optm_lr-1e-5-seed-2", "optm_lr-0_5-seed-1", "optm_lr-0_5-seed-2"]
    branches = [name for point in points for name in (f"sft-{point}", f"measure-{point}")]
    assert list(graph(pipeline)) == ["sft-data", *branches, "sft", "export"]
    assert graph(pipeline)["measure-optm_lr-0_5-seed-2"] == ("sft-optm_lr-0_5-seed-2", "sft-data")
    assert (graph(pipeline)["sft"], graph(pipeline)["export"]) == (tuple(branches), ("sft",))
    assert (pipeline.stage("sft").kind, pipeline.stage("export").model) == ("select", "stage:sft")
    trained = {name: (recipe.train.optm_lr, recipe.train.seed) for name, recipe in pipeline.recipes.items()}
    assert [trained[f"sft-{point}"] for point in points] == [(1e-5, 1), (1e-5, 2), (0.5, 1), (0.5, 2)]
    assert trained["measure-optm_lr-0_5-seed-2"] == trained["sft-data"]  # held-out rows and sampling are the same
    (tmp_path / "again.toml").write_text(tomli_w.dumps(pipeline.as_toml()))
    assert load_pipeline(tmp_path / "again.toml", (), all_kinds()).as_toml() == pipeline.as_toml()


def test_a_choice_of_the_largest_loss_that_nobody_asked_for_is_said(tmp_path: Path) -> None:
    for metric, mode, is_said in (("loss", "", True), ("loss", ', mode = "max"', False), ("accuracy", "", False)):
        sweep = f'grid = {{ {RATES} }}, metric = "validation/{metric}", through = "measure"{mode}'
        notices = [notice for notice in unique_notices(swept(tmp_path, sweep)) if "sweep" in notice]
        assert notices == is_said * [
            "stage 'sft': sweep.metric = 'validation/loss': the branch with its largest value is chosen; set "
            "sweep.mode = 'min' for the smallest"
        ]


def test_an_override_of_a_key_in_the_grid_is_said_to_do_nothing(tmp_path: Path) -> None:
    pipeline = swept(tmp_path, f"grid = {{ {RATES} }}, {MEASURED}", "train.optm_lr=1e-4", "train.epoch=2")
    notices = [said for said in pipeline.notices if "--set" in said]
    assert notices == ["--set 'train.optm_lr=1e-4' has no effect on stage 'sft': its sweep.grid sets the key"]


@pytest.mark.parametrize(
    "grid", ['sft.sweep.grid={"train.seed" = [1, 2]}', 'sft.sweep={grid = {"train.seed" = [1, 2]}}']
)
def test_a_grid_on_the_command_line_replaces_that_of_the_file_and_one_key_of_it_is_added(
    tmp_path: Path, grid: str
) -> None:
    branches = swept(tmp_path, f"grid = {{ {RATES} }}, {MEASURED}", grid).stage("sft").sweep.branches
    assert [branch.settings for branch in branches] == [{"train.seed": 1}, {"train.seed": 2}]
    added = 'sft.sweep.grid."train.seed"=[1]'
    branches = swept(tmp_path, f"grid = {{ {RATES} }}, {MEASURED}", added).stage("sft").sweep.branches
    assert [branch.settings for branch in branches] == [{"train.optm_lr": r, "train.seed": 1} for r in (1e-5, 0.5)]


def test_a_part_of_a_key_with_a_dot_is_quoted_as_in_an_override(tmp_path: Path) -> None:
    grid = """grid = { 'policy.lora.alpha_pattern."mlp.up"' = [1.0, 2.0] }"""
    lora = ("policy.lora.r=2", 'policy.lora.alpha_pattern."mlp.up"=4')
    pipeline = swept(tmp_path, f"{grid}, {MEASURED}", *lora)
    found = [pipeline.recipes[f"sft-mlp_up-{alpha}_0"].policy.lora for alpha in (1, 2)]
    assert [each and each.alpha_pattern for each in found] == [{"mlp.up": 1.0}, {"mlp.up": 2.0}]
    assert any(lora[1] in notice and "no effect on stage 'sft'" in notice for notice in pipeline.notices)


def test_a_key_of_a_grid_needs_no_quotes(tmp_path: Path) -> None:
    grids = (f"grid = {{ {key} = [1, 2] }}, {MEASURED}" for key in ('"train.seed"', "train.seed"))
    quoted, plain = (swept(tmp_path, grid).stage("sft").sweep for grid in grids)
    assert quoted is not None and quoted == plain
    assert [branch.settings for branch in quoted.branches] == [{"train.seed": 1}, {"train.seed": 2}]


def test_a_larger_grid_leaves_the_branches_that_were_there_what_they_are(tmp_path: Path) -> None:
    small, large = (swept(tmp_path, f'grid = {{ {RATES}, "train.seed" = {s} }}, {MEASURED}') for s in ([1], [1, 2]))
    branches = [name for name in graph(small) if name.startswith(("sft-", "measure-"))]
    for name in branches:
        assert fingerprint_of(small, name).value == fingerprint_of(large, name).value
    assert len({fingerprint_of(large, name).value for name in graph(large) if name.startswith("sft-optm")}) == 4


def test_rows_are_prepared_by_each_branch_only_where_the_grid_decides_about_them(tmp_path: Path) -> None:
    def prepared(grid: str) -> list[str]:
        pipeline = swept(tmp_path, f"grid = {{ {grid} }}, {MEASURED}", more="")
        return [stage.name for stage in pipeline.stages if stage.kind == "prepare"]

    assert prepared('"train.seed" = [1, 2]') == ["sft-data"]
    by_length = prepared('"policy.model_max_length" = [64, 128]')
    assert by_length == ["sft-data-model_max_length-64", "sft-data-model_max_length-128"]


def test_pass_rates_of_a_stage_of_the_branch_are_those_of_the_same_branch(tmp_path: Path) -> None:
    second = '[[pipeline.stages]]\nname = "second"\nkind = "rl"\nmodel = "stage:sft"\nafter = "measure"\n'
    dataset = "second.train.train_policy.dataset"
    settings = ("train.train_policy.type=grpo", "sft.kind=rl", f"{dataset}.pass_rates=stage:sft")
    sweep = f'grid = {{ {RATES} }}, metric = "m", through = "second"'
    pipeline = swept(tmp_path, sweep, *settings, f"{dataset}.keep=pass_rate < 1", more=second)
    for end in ("optm_lr-1e-5", "optm_lr-0_5"):
        rows = pipeline.recipes[f"second-data-{end}"].train.train_policy.dataset
        assert rows.pass_rates == f"stage:sft-{end}" and graph(pipeline)[f"second-data-{end}"] == (f"sft-{end}",)


def test_a_plain_recipe_is_swept_from_the_command_line_and_publishes_the_best_alone(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    (tmp_path / "recipe.toml").write_text(
        f'[policy]\nmodel_name_or_path = "{tmp_path}/model"\n'
        f'[train.train_policy]\ntype = "sft"\ndataset.name = "{tmp_path}/rows.jsonl"\n'
        '[train.ckpt]\nupload_s3 = "final"\ns3_bucket = "models"\n'
    )
    grid = '{"policy.model_max_length" = [8, 9]}'
    sweep = f'sft.sweep={{grid = {grid}, metric = "validation/loss", mode = "min", through = "validate"}}'
    pipeline = load_pipeline(tmp_path / "recipe.toml", [sweep, "validation.enable=true"], all_kinds())
    ends = [f"-model_max_length-{i}" for i in (8, 9)]
    assert {stage.name for stage in pipeline.stages} == {
        f"{name}{end}" for name in ("prepare", "sft", "validate") for end in ends
    } | {"sft", "export", "export-s3"}
    assert pipeline.stage("export-s3").model == "stage:export"
    with pytest.raises(ConfigError, match=r"stage 'validate': data = 'stage:prepare' is in every branch of the sweep"):
        load_pipeline(tmp_path / "recipe.toml", [sweep, "validation.enable=true", "sft.sweep.through=[]"], all_kinds())


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        ('metric = "m"', r"stage 'sft': sweep needs grid"),
        ('grid = { "train.seed" = 1 }, metric = "m"', r'grid: "train.seed" = 1 must be a list of values'),
        ('grid = { "train.seed" = [1, 1] }, metric = "m"', r'"train.seed" = \[1, 1\] names a value twice'),
        ('grid = { "train.seed" = [1], "trian.seed" = [1] }, metric = "m"', r"'trian.seed' is no key of a recipe"),
        ('grid = { "train.sede" = [1] }, metric = "m"', r"'sft' with train.sede = 1: train.sede: unknown key; did you"),
        ('grid = { "train.seed" = [1] }, metric = "m", through = "measrue"', r"'measrue' is no stage.*did you mean"),
        ('grid = { "train.seed" = [1] }, metric = "m", through = "gate"', r"'gate' of kind 'gate' cannot be in a"),
        ('grid = { "train.seed" = [1] }, metric = "validation/los"', r"sweep.metric = 'validation/los': no stage of"),
        ('grid = { "train.seed" = [1] }, metric = "m", through = "sft-data"', r"'sft-data' is not behind 'sft'"),
        ('grid = { "train.seed" = [1] }', r"sweep.metric: "),
        ('grid = { "arguments.x" = [1] }, metric = "m"', r"'arguments.x': a stage of kind 'sft' takes no arguments"),
        ('grid = { "train.epoch" = [' + ",".join(map(str, range(1, 300))) + '] }, metric = "m"', r"299 combinations"),
    ],
)  # fmt: skip
def test_a_sweep_that_cannot_be_made_is_refused_in_one_line(tmp_path: Path, sweep: str, said: str) -> None:
    gate = '[[pipeline.stages]]\nname = "gate"\nkind = "gate"\nafter = "measure"\nrequire = "validation/loss < 1"\n'
    with pytest.raises(ConfigError, match=said) as refused:
        check_capabilities(swept(tmp_path, sweep, more=gate))
    assert "\n" not in str(refused.value)


def choice(folder: Path, mode: str, *values: float) -> Stage:
    """A choice among branches of a training and its measurement."""
    inputs: dict[str, Any] = {}
    for i, value in enumerate(values):
        model = folder / f"stages/sft-{i}/safetensors/step_3"
        model.mkdir(parents=True)
        (model / "model.safetensors").write_text(f"weights {i}")
        info = {"model": "safetensors/step_3", "step": 3, "data": "data"}
        inputs[f"sft-{i}"] = {"metrics": {"loss": 9.0}, "info": info, "path": str(folder / f"stages/sft-{i}")}
        inputs[f"measure-{i}"] = {"metrics": {"loss": value}, "info": {}, "path": str(folder / f"stages/measure-{i}")}
    branches = [{"stages": [f"sft-{i}", f"measure-{i}"]} for i in range(len(values))]
    config = StageConfig.model_validate({
        "name": "sft", "kind": "select", "sweep": {"metric": "loss", "mode": mode, "branches": branches},
    })  # fmt: skip
    return Stage(folder / "stages/sft", config, Recipe(), "", None, inputs, "f" * 64, kind=all_kinds()["select"])


@pytest.mark.parametrize(
    ("mode", "values", "best"),
    [("max", (1.0, 3.0, 2.0), 1), ("min", (1.0, 3.0, 2.0), 0), ("max", (2.0, 2.0), 0), ("min", (math.nan, 7.0), 1)],
)
def test_the_best_branch_hands_on_its_model_and_its_metrics(
    tmp_path: Path, mode: str, values: tuple[float, ...], best: int
) -> None:
    outcome = select.run(choice(tmp_path, mode, *values))
    assert outcome.info == {"model": "safetensors/step_3", "step": 3, "chosen": f"sft-{best}"}
    assert outcome.metrics == {"loss": values[best]}
    assert (tmp_path / "stages/sft/safetensors/step_3/model.safetensors").read_text() == f"weights {best}"
    assert outcome.outputs == ("safetensors/step_3",)


def test_the_best_branch_hands_on_each_format_of_its_export(tmp_path: Path) -> None:
    stage = choice(tmp_path, "max", 1.0, 2.0)
    folder = Path(stage.inputs["sft-1"]["path"])
    (folder / "int8/step_3").mkdir(parents=True)
    (folder / "int8/step_3/model.safetensors").write_text("small weights")
    formats = {"bf16": "safetensors/step_3", "int8": "int8/step_3"}
    stage.inputs["sft-1"]["info"]["formats"] = formats
    outcome = select.run(stage)
    assert (outcome.info["formats"], outcome.outputs) == (formats, ("safetensors/step_3", "int8/step_3"))
    chosen = {"sft": {"info": outcome.info, "path": str(stage.path)}}
    published = resolve_output("upload", "model", "stage:sft", chosen, "int8")
    assert (Path(published) / "model.safetensors").read_text() == "small weights"


@pytest.mark.parametrize("where", ["/published", "../../published", "s3://bucket/v1"])
def test_a_model_outside_of_the_folder_of_its_stage_stays_where_it_is(tmp_path: Path, where: str) -> None:
    stage = choice(tmp_path, "max", 1.0)
    published = tmp_path / "published"
    published.mkdir()
    (published / "model.safetensors").write_text("published")
    address = str(published) if where == "/published" else where
    cast(dict[str, Any], stage.inputs["sft-0"])["info"]["model"] = address
    outcome = select.run(stage)
    assert (published / "model.safetensors").read_text() == "published"
    if where.startswith("s3:"):
        assert outcome.info["model"] == where and not outcome.outputs
    else:
        assert outcome.outputs == ("model",) and outcome.info["model"] == "model"
        assert (tmp_path / "stages/sft/model/model.safetensors").read_text() == "published"


def test_a_run_can_publish_a_format_of_the_best_export(tmp_path: Path) -> None:
    upload = f'name = "upload"\nkind = "upload"\nafter = "export"\nmodel = "stage:export"\ntarget = "{tmp_path}/new"\n'
    more = f'{EXPORT}overrides.export.formats = ["int8"]\n[[pipeline.stages]]\n{upload}format = "int8"\n'
    pipeline = swept(tmp_path, f'grid = {{ {RATES} }}, metric = "validation/loss", through = "export"', more=more)
    (tmp_path / "saved.toml").write_text(tomli_w.dumps(pipeline.as_toml()))
    again = load_pipeline(tmp_path / "saved.toml", (), all_kinds()).stage("upload")
    assert (again.model, again.format) == ("stage:sft", "int8") and graph(pipeline)["upload"] == ("sft",)


def test_branches_without_a_number_or_without_the_metric_are_not_chosen_among(tmp_path: Path) -> None:
    with pytest.raises(GateFailed, match="loss is not a number in any of 2 branches"):
        select.run(choice(tmp_path / "nan", "max", math.nan, math.nan))
    stage = choice(tmp_path, "max", 1.0, 2.0)
    del stage.inputs["sft-1"]["metrics"]["loss"], stage.inputs["measure-1"]["metrics"]["loss"]
    with pytest.raises(ConfigError, match="branch 'sft-1' did not report 'loss'; reported: nothing"):
        select.run(stage)


COUNTED = """
[pipeline]
threads = 1
output_dir = "{folder}/outputs"

[[pipeline.stages]]
name = "count"
kind = "custom"
entry = "{programs}/counting.py:count"
arguments = {{ seconds = 0.01 }}
sweep = {{ grid = {{ "arguments.steps" = [{steps}] }}, metric = "count", mode = "min" }}

[[pipeline.stages]]
name = "behind"
kind = "custom"
entry = "{programs}/counting.py:count"
after = "count"
model = "stage:count"
arguments = {{ steps = 2, seconds = 0.01 }}
"""


def counted(folder: Path, steps: str) -> Pipeline:
    (folder / "counted.toml").write_text(COUNTED.format(folder=folder, programs=PROGRAMS, steps=steps))
    return load_pipeline(folder / "counted.toml", (), all_kinds())


def test_a_larger_grid_runs_its_new_branches_and_nothing_behind_the_choice_while_the_best_is_the_same(
    tmp_path: Path,
) -> None:
    def made(steps: str) -> dict[str, bool]:
        run = create_run(counted(tmp_path, steps))
        return {stage.name: not run_stage(run, stage.name)[1] for stage in run.pipeline.stages}

    assert made("3") == dict.fromkeys(["count-steps-3", "count", "behind"], True)
    again = made("3, 4")
    assert [name for name, is_new in again.items() if is_new] == ["count-steps-4", "count"] and len(again) == 4
    better = made("1, 3")
    assert [name for name, is_new in better.items() if is_new] == ["count-steps-1", "count", "behind"]
    newest = sorted((tmp_path / "outputs").glob("2*"), key=lambda path: path.stat().st_ctime)[-1]
    result = read_result(newest / "stages" / "count")
    assert result is not None
    assert (result["info"]["chosen"], result["metrics"]["count"]) == ("count-steps-1", 1.0)


def test_no_more_stages_of_branches_run_at_once_than_may(tmp_path: Path) -> None:
    most, running, lock = [], [0], threading.Lock()

    def body(slot: threading.Semaphore) -> None:
        with hold_semaphore(slot):
            with lock:
                running[0] += 1
                most.append(running[0])
            time.sleep(0.02)
            with lock:
                running[0] -= 1

    for given, expected in (("max_parallel = 2, ", 2), ("", 1)):
        slots = make_branch_semaphores(swept(tmp_path, f'{given}grid = {{ "train.seed" = [1, 2, 3] }}, {MEASURED}'))
        assert len(slots) == 6
        threads = [threading.Thread(target=body, args=(slot,)) for slot in slots.values()]
        most.clear()
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert max(most) == expected
    elsewhere = swept(tmp_path, f'grid = {{ "train.seed" = [1, 2] }}, {MEASURED}', "sft.work_pool=gpu")
    assert set(make_branch_semaphores(elsewhere)) == {"measure-seed-1", "measure-seed-2"}


def test_the_report_has_a_table_of_all_branches_the_best_first(tmp_path: Path) -> None:
    run = create_run(swept(tmp_path, f"grid = {{ {RATES} }}, {MEASURED}"))
    finish(run, "sft-data")
    for rate, loss in (("1e-5", 0.75), ("0_5", 0.25)):
        finish(run, f"sft-optm_lr-{rate}")
        finish(run, f"measure-optm_lr-{rate}", **{"validation/loss": loss})
    run_stage(run, "sft")
    [table] = make_sweep_tables(read_run(run.path))
    assert (table["metric"], table["mode"], table["keys"]) == ("validation/loss", "min", ("train.optm_lr",))
    assert [(row["name"], row["settings"], row["value"], row["is_chosen"]) for row in table["rows"]] == [
        ("sft-optm_lr-0_5", (0.5,), 0.25, True), ("sft-optm_lr-1e-5", (1e-5,), 0.75, False),
    ]  # fmt: skip
    page = build_report(run.path)
    assert "<h2>Sweep sft</h2>" in page
    assert page.index("<td>0.5</td>") < page.index("<td>1e-05</td>")


def test_the_report_has_the_value_of_the_exported_checkpoint_by_which_a_branch_was_chosen(tmp_path: Path) -> None:
    export = f"{EXPORT}checkpoint = 'best'\n"
    choice = 'metric = "validation/loss", mode = "min", through = "export"'
    overrides = ("export.after=sft", "validation.enable=true", "train.ckpt.enable_checkpoint=true")
    run = create_run(swept(tmp_path, f"grid = {{ {RATES} }}, {choice}", *overrides, more=export))
    finish(run, "sft-data")
    for rate, best, last in (("1e-5", 0.1, 0.9), ("0_5", 0.2, 0.3)):
        info = {"step": 3, "best": {"step": 2, "metric": "validation/loss", "value": best}}
        finish(run, f"sft-optm_lr-{rate}", info=info, **{"validation/loss": last})
        finish(run, f"export-optm_lr-{rate}")
    run_stage(run, "sft")
    [table] = make_sweep_tables(read_run(run.path))
    shown = [(row["settings"], row["value"], row["is_chosen"]) for row in table["rows"]]
    assert shown == [((1e-5,), 0.1, True), ((0.5,), 0.2, False)]


def test_retraining_starts_each_branch_from_the_published_model_by_the_name_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    record = {"version": "v1", "metrics": {}, "files": {}}
    open_target(str(tmp_path / "published")).publish(tmp_path / "new", "v1", record)
    upload = (
        '[[pipeline.stages]]\nname = "upload"\nkind = "upload"\nafter = "sft"\nmodel = "stage:sft"\n'
        f'target = "{tmp_path}/published"\n'
    )
    pipeline = swept(tmp_path, f"grid = {{ {RATES} }}, {MEASURED}", more=upload)
    assert make_start_overrides(pipeline) == [f"sft.policy.model_name_or_path={tmp_path}/published/v1"]
