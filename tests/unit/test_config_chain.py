"""What a stage takes from the stages before it, also through a merge: tokenizer, chat template, precision, origin."""

from __future__ import annotations

from pathlib import Path

import pytest

from cosmos_core.config.capabilities import check_capabilities
from cosmos_core.config.compose import Pipeline
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import ConfigError
from cosmos_core.launch import check
from cosmos_core.run.directory import Run
from cosmos_core.run.lineage import find_model_origin
from tasks.flow_run import PythonFlowState
from tasks.kinds import all_kinds
from tasks.stage_task import StageHandle, _make_call
from tests.unit.test_config_compose import stages
from tests.unit.test_config_load import load

SFT = """
[policy]
model_name_or_path = "org/base"
[train]
param_dtype = "float32"
[train.train_policy]
type = "sft"
dataset.name = "org/rows"
"""
DPO = '[train.train_policy]\ntype = "sft"\ntrainer_type = "dpo"\ndataset.name = "org/pairs"\n'
TRAINED = tuple(f'name = "{name}"\nkind = "sft"\nrecipe = "sft.toml"' for name in "ab")
JOINED = {
    "merge": 'name = "joined"\nkind = "merge"\nafter = ["a", "b"]',
    "select": 'name = "joined"\nkind = "select"\nafter = ["a", "b"]\nsweep = { metric = "validation/loss" }',
}
AFTER = (
    'name = "dpo"\nkind = "sft"\nrecipe = "dpo.toml"\nafter = "joined"\nmodel = "stage:joined"',
    'name = "export"\nkind = "export"\nafter = "joined"\nmodel = "stage:joined"',
)


def chain(folder: Path, *tables: str, sft: str = "", dpo: str = "") -> Pipeline:
    (folder / "sft.toml").write_text(SFT.replace("[train]", f"{sft}\n[train]"))
    (folder / "dpo.toml").write_text(f"{dpo}\n{DPO}")
    return load(folder, stages(*TRAINED, *tables))


@pytest.mark.parametrize("kind", JOINED)
def test_what_follows_a_merge_or_a_choice_has_tokenizer_and_precision_of_the_models_before_it(
    tmp_path: Path, kind: str
) -> None:
    pipeline = chain(tmp_path, JOINED[kind], *AFTER)
    assert pipeline.stage("dpo-data").model == "org/base"
    assert pipeline.recipes["export"].train.param_dtype == "float32"
    assert find_model_origin(pipeline, pipeline.stage("export")) == {"base_model": "org/base", "data": ["org/rows"]}
    inputs = [each for name in ("joined", "export") for each in pipeline.inputs(pipeline.stage(name))]
    models = {each.location for each in inputs if each.role == "model"}
    assert models <= {"org/base", "stage:joined"}, "no other model is looked up on the Hub"


def test_what_follows_a_merge_with_a_base_model_is_like_the_models_that_are_merged(tmp_path: Path) -> None:
    more = [
        f'name = "{name}"\nkind = "sft"\nafter = "a"\nmodel = "stage:a"\nrecipe = "sft.toml"\n'
        'overrides.train.param_dtype = "float16"\noverrides.policy.chat_template = "chatml"\n'
        f'overrides.train.train_policy.dataset.name = "{name}/rows"'
        for name in "cd"
    ]
    for base in ("stage:a", "org/base"):
        joined = f'name = "joined"\nkind = "merge"\nafter = ["a", "c", "d"]\nmodel = "{base}"'
        pipeline = chain(tmp_path, *more, joined, *AFTER)
        expected = ("float16", "chatml") if base == "stage:a" else ("float32", None)
        found = pipeline.recipes["export"].train.param_dtype, pipeline.recipes["dpo-data"].policy.chat_template
        assert found == expected, "those of the first model that is merged"
        origin = find_model_origin(pipeline, pipeline.stage("export"))
        assert origin == {"base_model": "org/base", "data": ["org/rows", "c/rows", "d/rows"]}


@pytest.mark.parametrize(
    "joined", [*JOINED.values(), pytest.param(JOINED["merge"] + '\nmodel = "org/base"', marks=pytest.mark.full)]
)
def test_rows_are_rendered_by_the_template_of_the_model_that_learns_them(tmp_path: Path, joined: str) -> None:
    measured = 'name = "measured"\nkind = "validate"\nrecipe = "dpo.toml"\nafter = "dpo"\nmodel = "stage:dpo"'
    plain = 'policy.chat_template = "plain"'

    def template(name: str, **settings: str) -> str | None:
        return chain(tmp_path, joined, AFTER[0], measured, **settings).recipes[name].policy.chat_template

    chatml_sft = {"sft": 'chat_template = "chatml"'}
    assert template("dpo-data", **chatml_sft) == "chatml", "the export of SFT has it, the base model has not"
    assert template("dpo-data", **chatml_sft, dpo=plain) == "plain"
    assert template("dpo-data") is None
    rows = 'name = "rows"\nkind = "prepare"\nrecipe = "dpo.toml"'
    second = f'{AFTER[0]}\ndata = "stage:rows"'.replace('after = "joined"', 'after = ["joined", "rows"]')
    other = 'name = "other"\nkind = "sft"\nrecipe = "dpo.toml"\nafter = "rows"\ndata = "stage:rows"'
    for readers, expected in (([second], "chatml"), ([second, other], None)):  # `other` starts from the base model
        pipeline = chain(tmp_path, joined, rows, *readers, **chatml_sft)
        assert pipeline.recipes["rows"].policy.chat_template == expected


def test_a_check_looks_at_the_base_model_with_the_template_that_its_export_will_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    templates: dict[str, str | None] = {}

    def run_check(
        _pipeline: Pipeline, stage: StageConfig, _program: str, *, recipe: Recipe | None = None, **_: object
    ) -> dict[str, dict[str, str]]:
        templates[stage.name] = recipe.policy.chat_template if recipe else None
        return {"info": {"found": "a model"}}

    monkeypatch.setattr(check, "run_check", run_check)
    tasks = 'overrides.evaluate = { tasks = ["mine"], apply_chat_template = true }'
    measured = f'name = "measured"\nkind = "evaluate"\nafter = "joined"\nmodel = "stage:joined"\n{tasks}'
    pipeline = chain(tmp_path, JOINED["merge"], measured, sft='chat_template = "chatml"')
    assert list(check.check_stages_in_worker(pipeline)) and templates["measured"] == "chatml"


@pytest.mark.parametrize("base", ["", '\nmodel = "org/base"'])
def test_a_flow_merges_a_model_with_the_one_that_it_started_from(tmp_path: Path, base: str) -> None:
    more = 'name = "more"\nkind = "sft"\nrecipe = "dpo.toml"\nafter = "a"\nmodel = "stage:a"'
    first = f'{JOINED["merge"]}{base}\noverrides.merge = {{ method = "ties", weights = [0.9, 0.2], density = 0.1 }}'
    export = 'name = "final"\nkind = "export"\nafter = "a"\nmodel = "stage:a"'
    run = Run(tmp_path / "run", chain(tmp_path, more, first, export))
    flow = PythonFlowState("flow", "id", "run", f"{tmp_path}/flow.py:flow", {}, [], run=run)
    for names in (["more", "a", "b"], ["joined", "more"], ["final", "b"]):
        handles = [StageHandle(name, run.stage_path(name), {}, {}) for name in names]
        call, file = _make_call(flow, all_kinds()["merge"], "soup", {"after": handles}, {})
        pipeline = flow._compose_pipeline(run, call, file)
        stage, recipe = pipeline.stage("soup"), pipeline.recipes["soup"]
        assert (stage.model or recipe.policy.model_name_or_path, stage.after) == ("org/base", tuple(names))
        assert (recipe.merge.method, recipe.merge.weights) == ("linear", ()), "not those of another merge"


UPLOADED = '[train.ckpt]\nupload_hf = true\nhf_repo_name = "org/published"\nupload_s3 = "final"\ns3_bucket = "b"\n'


def uploads(pipeline: Pipeline, scheme: str) -> set[str]:
    """The models that are published at targets of a scheme."""
    return {each.model for each in pipeline.stages if each.kind == "upload" and each.target.startswith(f"{scheme}://")}


@pytest.mark.parametrize("base", ["", "stage:a"])
def test_the_hub_gets_the_model_that_is_merged_last_and_not_those_that_were_merged(tmp_path: Path, base: str) -> None:
    more = [f'name = "{name}"\nkind = "sft"\nrecipe = "sft.toml"\nafter = "a"\nmodel = "stage:a"' for name in "cd"]
    joined = f'name = "joined"\nkind = "merge"\nafter = ["c", "d", "b"]\nmodel = "{base}"'
    pipeline = chain(tmp_path, *more, joined, AFTER[1], sft=f"{UPLOADED}")
    assert uploads(pipeline, "hub") == {"stage:export"}
    assert uploads(pipeline, "s3") == {"stage:a", "stage:b", "stage:c", "stage:d", "stage:export"}


@pytest.mark.parametrize("has_grid", [True, False])
def test_the_hub_gets_no_choice_that_a_later_training_continues(tmp_path: Path, has_grid: bool) -> None:
    grid = 'name = "joined"\nkind = "sft"\nrecipe = "sft.toml"\nsweep = { grid = { "train.seed" = [1] }, metric = "m" }'
    joined = grid if has_grid else JOINED["select"]
    pipeline = chain(tmp_path, joined, AFTER[0].replace("dpo.toml", "sft.toml"), sft=UPLOADED)
    assert "stage:dpo" in uploads(pipeline, "hub") and "stage:joined" not in uploads(pipeline, "hub")
    assert uploads(pipeline, "s3") >= {"stage:joined", "stage:dpo"}


def test_the_hub_gets_a_merge_as_the_merged_models_ask_and_not_as_its_base_does(tmp_path: Path) -> None:
    asked = 'overrides.train.ckpt = { upload_hf = true, hf_repo_name = "org/published" }'
    more = [f'name = "{n}"\nkind = "sft"\nrecipe = "sft.toml"\nafter = "a"\nmodel = "stage:a"\n{asked}' for n in "cd"]
    joined = 'name = "joined"\nkind = "merge"\nafter = ["c", "d"]\nmodel = "stage:a"'
    assert uploads(chain(tmp_path, *more, joined), "hub") == {"stage:joined"}


@pytest.mark.parametrize("kind", ["export", "merge"])
def test_the_hub_gets_the_choice_of_merges_or_exports_and_not_what_was_chosen_from(tmp_path: Path, kind: str) -> None:
    made = [f'name = "{n}{n}"\nkind = "export"\nafter = "{n}"\nmodel = "stage:{n}"' for n in "ab"]
    if kind == "merge":
        made = [f'name = "{n}{n}"\nkind = "merge"\nafter = ["a", "b"]\noverrides.train.seed = 1' for n in "ab"]
    choice = JOINED["select"].replace('["a", "b"]', '["aa", "bb"]')
    pipeline = chain(tmp_path, *made, choice, sft=UPLOADED)
    assert uploads(pipeline, "hub") == {"stage:joined"}
    measured = JOINED["select"].replace('["a", "b"]', '["va", "vb"]')
    validated = [f'name = "v{n}"\nkind = "validate"\nafter = "{n}"\nmodel = "stage:{n}"' for n in "ab"]
    # A choice of measurements has no model.
    assert uploads(chain(tmp_path, *validated, measured, sft=UPLOADED), "hub") == {"stage:a", "stage:b"}


@pytest.mark.parametrize("is_program", [True, False])
@pytest.mark.parametrize("measured", ["a", "export"])
def test_a_model_that_a_gate_refuses_is_not_published_as_its_recipe_asks(
    tmp_path: Path, measured: str, is_program: bool
) -> None:
    export = 'name = "export"\nkind = "export"\nafter = "a"\nmodel = "stage:a"'
    program = 'kind = "custom"\nentry = "mine.py:measure"' if is_program else 'kind = "validate"'
    measure = f'name = "measure"\n{program}\nafter = "{measured}"\nmodel = "stage:{measured}"'
    gate = 'name = "gate"\nkind = "gate"\nafter = "measure"\nrequire = "validation/loss < 1"'
    second = 'name = "second"\nkind = "gate"\nafter = "gate"\nrequire = "validation/loss < 0.5"'
    later = 'name = "later"\nkind = "sft"\nrecipe = "sft.toml"\nafter = "a"\nmodel = "stage:a"'
    pipeline = chain(tmp_path, export, measure, gate, second, later, sft=UPLOADED)
    assert set(pipeline.stage("export-s3").after) == {"export", "a", "gate", "second"}
    assert pipeline.stage("later-hub").after == ("later",), "the gate judges another model"


SAMPLED = """name = "sample"
kind = "sample"
overrides.train.train_policy = { type = "grpo", dataset.name = "org/prompts", reward_function = "gsm8k" }"""
MIXED = '{ type = "sft", datasets = [{ name = "org/rows" }, { name = "stage:sample" }] }'


@pytest.mark.parametrize(
    "rows",
    [
        MIXED,
        '{ type = "sft", dataset.name = "org/rows", clean.decontaminate_against = ["stage:sample"] }',
        '{ type = "grpo", reward_function = "gsm8k", '
        'dataset = { name = "org/prompts", pass_rates = "stage:sample", keep = "pass_rate < 1" } }',
    ],
)
def test_a_check_leaves_out_rows_that_need_a_stage_which_has_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: str
) -> None:
    kind = "rl" if "grpo" in rows else "sft"
    text = stages(SAMPLED, f'name = "more"\nkind = "{kind}"\noverrides.train.train_policy = {rows}')
    pipeline = load(tmp_path, f'[policy]\nmodel_name_or_path = "org/base"\n{text}')
    assert pipeline.stage("more-data").after == ("sample",)
    assert [each for each in pipeline.inputs(pipeline.stage("more-data")) if each.role == "data_code"] == []
    monkeypatch.setattr(check, "run_check", lambda _, stage, *__, **___: {"info": {"found": stage.name}})
    lines = list(check.check_stages_in_worker(pipeline))
    assert "more-data: not looked at: it starts from what stage 'sample' will make" in lines
    assert "sample-data: sample-data" in lines and "more: more" in lines


def test_a_mixture_names_stages_of_the_pipeline_that_make_rows(tmp_path: Path) -> None:
    mixed = f'name = "more"\nkind = "sft"\noverrides.train.train_policy = {MIXED}'
    with pytest.raises(ConfigError, match=r"datasets.1.name = 'stage:sample' is no stage of this pipeline"):
        load(tmp_path, stages(mixed))
    for kind in ("rl", "prepare"):
        made = f'name = "sample"\nkind = "{kind}"'
        said = f"datasets.1.name = 'stage:sample': a stage of kind '{kind}' makes no rows"
        with pytest.raises(ConfigError, match=said):
            check_capabilities(load(tmp_path, stages(made, mixed)))


def test_supervised_rows_beside_rollouts_may_be_those_of_a_stage(tmp_path: Path) -> None:
    policy = '{ type = "grpo", dataset.name = "org/prompts", data_term = { name = "stage:sample", weight = 0.1 } }'
    pipeline = load(tmp_path, stages(SAMPLED, f'name = "more"\nkind = "rl"\noverrides.train.train_policy = {policy}'))
    check_capabilities(pipeline)
    assert pipeline.stage("more-data").after == ("sample",)


def test_an_unknown_kind_is_named_also_where_it_is_chosen_from(tmp_path: Path) -> None:
    upload = 'name = "up"\nkind = "upload"\nafter = "joined"\nmodel = "stage:joined"\nformat = "int8"\ntarget = "t"'
    with pytest.raises(ConfigError, match=r"stage 'b': unknown kind 'sftt'; did you mean 'sft'"):
        load(tmp_path, stages(upload, JOINED["select"], 'name = "a"\nkind = "sft"', 'name = "b"\nkind = "sftt"'))
