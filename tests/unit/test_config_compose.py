"""From files to a graph: implied stages, what wins over what, `--set`, and graphs that cannot run."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w

from cosmos_core.config.compose import Pipeline, load_pipeline
from cosmos_core.config.override import parse_override
from cosmos_core.errors import ConfigError
from tasks.kinds import all_kinds
from tests.unit.test_config_load import GRPO, SFT, load, refused

CHAIN = """
[pipeline]
name = "chain"

[train]
epoch = 1
seed = 5

[[pipeline.stages]]
name = "rows"
kind = "custom"
entry = "json:loads"

[[pipeline.stages]]
name = "sft"
kind = "sft"
after = "rows"
data = "stage:rows"
overrides.train.train_policy.type = "sft"

[[pipeline.stages]]
name = "grpo"
kind = "rl"
after = ["rows", "sft"]
model = "stage:sft"
data = "stage:rows"
overrides.train.train_batch_per_replica = 16
overrides.train.train_policy.type = "grpo"

[[pipeline.stages]]
name = "accuracy"
kind = "validate"
after = "grpo"
model = "stage:grpo"
overrides.train.train_policy.type = "grpo"
"""


def graph(pipeline: Pipeline) -> dict[str, tuple[str, tuple[str, ...], str, str]]:
    return {s.name: (s.kind, s.after, s.model, s.data) for s in pipeline.stages}


def stages(*tables: str) -> str:
    return "\n".join(f"[[pipeline.stages]]\n{table}" for table in tables)


def custom(name: str, more: str = "") -> str:
    return f'name = "{name}"\nkind = "custom"\nentry = "json:loads"\n{more}\n'


def test_a_recipe_for_sft_is_a_pipeline_of_prepare_sft_validate_export(tmp_path: Path) -> None:
    assert graph(load(tmp_path, SFT)) == {
        "prepare": ("prepare", (), "", ""),
        "sft": ("sft", ("prepare",), "", "stage:prepare"),
        "validate": ("validate", ("sft", "prepare"), "stage:sft", "stage:prepare"),
        "export": ("export", ("sft",), "stage:sft", ""),
    }


def test_a_recipe_for_grpo_has_a_stage_rl_and_none_of_what_has_nothing_to_do(tmp_path: Path) -> None:
    assert list(graph(load(tmp_path, GRPO))) == ["prepare", "rl", "export"]
    assert list(graph(load(tmp_path, GRPO, "train.ckpt.export_safetensors=false"))) == ["prepare", "rl"]
    assert list(graph(load(tmp_path, GRPO, "validation.enable=true"))) == ["prepare", "rl", "validate", "export"]


def test_the_name_of_a_pipeline_is_that_of_its_file_unless_it_has_one(tmp_path: Path) -> None:
    assert load(tmp_path, SFT).config.name == "recipe"
    assert load(tmp_path, CHAIN).config.name == "chain"


def test_a_stage_without_prepared_rows_gets_a_prepare_stage_that_needs_no_training(tmp_path: Path) -> None:
    pipeline = load(tmp_path, CHAIN)
    assert graph(pipeline) == {
        "rows": ("custom", (), "", ""),
        "sft-data": ("prepare", ("rows",), "", "stage:rows"),
        "sft": ("sft", ("rows", "sft-data"), "", "stage:sft-data"),
        # The tokenizer is that of what SFT starts from, so these rows do not wait for SFT.
        "grpo-data": ("prepare", ("rows",), "", "stage:rows"),
        "grpo": ("rl", ("rows", "sft", "grpo-data"), "stage:sft", "stage:grpo-data"),
        "accuracy": ("validate", ("grpo", "grpo-data"), "stage:grpo", "stage:grpo-data"),
    }
    assert pipeline.recipes["sft-data"] == pipeline.recipes["sft"]
    other = load(tmp_path, CHAIN, "sft.policy.model_name_or_path=org/first")
    assert other.stage("grpo-data").model == "org/first"
    assert pipeline.stage_and_dependents("grpo-data") == {"grpo-data", "grpo", "accuracy"}


def test_two_stages_may_share_one_prepare_stage(tmp_path: Path) -> None:
    text = CHAIN.replace('data = "stage:rows"', 'data = "stage:shared"')
    text = text.replace('after = "rows"', 'after = "shared"').replace('["rows", "sft"]', '["shared", "sft"]')
    text += stages('name = "shared"\nkind = "prepare"\nafter = "rows"\ndata = "stage:rows"')
    assert [name for name, (kind, *_) in graph(load(tmp_path, text)).items() if kind == "prepare"] == ["shared"]


def test_a_recipe_file_wins_over_the_pipelines_tables_overrides_win_over_it_and_set_over_all(tmp_path: Path) -> None:
    (tmp_path / "inner.toml").write_text("[train]\nepoch = 2\nmax_num_steps = 2\noptm_lr = 2.0\n")
    text = "[train]\nepoch = 1\nmax_num_steps = 1\noptm_lr = 1.0\nepsilon = 1.0\n" + stages(
        custom("s", 'recipe = "inner.toml"\noverrides.train = { max_num_steps = 3, optm_lr = 3.0 }')
    )
    train = load(tmp_path, text, "train.optm_lr=4.0").recipes["s"].train
    assert (train.epsilon, train.epoch, train.max_num_steps, train.optm_lr) == (1.0, 2, 3, 4.0)


def test_set_addresses_every_stage_one_stage_its_entry_or_the_pipeline(tmp_path: Path) -> None:
    pipeline = load(
        tmp_path, CHAIN, "train.epoch=7", "sft.train.epoch=8", "sft.retries=9", "pipeline.threads=1",
        "sft.timeout=90s", "grpo.custom.note=hello world",
    )  # fmt: skip
    assert {name: recipe.train.epoch for name, recipe in pipeline.recipes.items()} == {
        "rows": 7, "sft-data": 8, "sft": 8, "grpo-data": 7, "grpo": 7, "accuracy": 7,
    }  # fmt: skip
    assert {stage.name: stage.retries for stage in pipeline.stages if stage.retries != 2} == {"sft": 9}
    assert pipeline.stage("sft").timeout_seconds == 90
    assert pipeline.config.threads == 1
    assert pipeline.recipes["grpo"].custom == {"note": "hello world"}


def test_the_last_of_two_settings_wins(tmp_path: Path) -> None:
    assert load(tmp_path, CHAIN, "sft.train.epoch=8", "train.epoch=7").recipes["sft"].train.epoch == 7
    assert load(tmp_path, CHAIN, "train.epoch=7", "train.epoch=6").recipes["sft"].train.epoch == 6


def test_set_wins_over_a_stages_overrides_even_when_it_is_for_every_stage(tmp_path: Path) -> None:
    pipeline = load(tmp_path, CHAIN, "train.train_batch_per_replica=32")
    assert pipeline.recipes["grpo"].train.train_batch_per_replica == 32


def test_the_stages_of_a_plain_recipe_can_be_addressed(tmp_path: Path) -> None:
    pipeline = load(tmp_path, SFT, "sft.retries=5", "validate.validation.batch_size=3", "validation.enable=true")
    assert pipeline.stage("sft").retries == 5
    assert pipeline.recipes["validate"].validation.batch_size == 3
    assert pipeline.recipes["sft"].validation.batch_size is None


def test_a_stage_named_like_a_table_leaves_the_table_addressable(tmp_path: Path) -> None:
    text = stages(custom("train"), custom("other"))
    pipeline = load(tmp_path, text, "train.epoch=3", "train.train.seed=4", "train.retries=5")
    assert {name: recipe.train.epoch for name, recipe in pipeline.recipes.items()} == {"train": 3, "other": 3}
    assert {name: recipe.train.seed for name, recipe in pipeline.recipes.items()} == {"train": 4, "other": 42}
    assert pipeline.stage("train").retries == 5


@pytest.mark.parametrize(
    ("text", "keys", "value"),
    [
        ("a.b=1", ("a", "b"), 1),
        ("a.b = 1e-3", ("a", "b"), 1e-3),
        ("a=true", ("a",), True),
        ('a."b.c".d=1', ("a", "b.c", "d"), 1),
        ("a.'b.c=d' = 1", ("a", "b.c=d"), 1),
        ("a=[1, 2]", ("a",), [1, 2]),
        ("a='1'", ("a",), "1"),
        ("a=org/model", ("a",), "org/model"),
        ("a=x=y", ("a",), "x=y"),
        ("a=", ("a",), ""),
        ("a=1\nb=2", ("a",), "1\nb=2"),
        ("a=" + "9" * 5000, ("a",), "9" * 5000),
        ("a=" + "[" * 100, ("a",), "[" * 100),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_setting_is_toml_and_what_is_not_is_a_string(text: str, keys: tuple[str, ...], value: object) -> None:
    setting = parse_override(text)
    assert (setting.keys, setting.value) == (keys, value)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("train.epoch", "--set 'train.epoch': write key=value, for example train.optm_lr=2e-6"),
        ("=1", "--set '=1': write key=value, for example train.optm_lr=2e-6"),
        ("train..epoch=1", "--set 'train..epoch=1': write key=value, for example train.optm_lr=2e-6"),
        ('a."b=1', """--set 'a."b=1': write key=value, for example train.optm_lr=2e-6"""),
        ("sfx.train.epoch=1", "--set 'sfx.train.epoch=1': 'sfx' is no stage and no table of a recipe; did you mean "
         "'sft'?"),
        ("dataset.max_skipped_fraction=1", "--set 'dataset.max_skipped_fraction=1': 'dataset' is no stage and no table "
         "of a recipe; did you mean 'train.train_policy.dataset.max_skipped_fraction' or "
         "'validation.dataset.max_skipped_fraction'?"),
        ("pipeline.stages=3", "--set 'pipeline.stages=3': write pipeline.KEY=VALUE with one of name, output_dir, "
         "threads, gpus, gpus_per_node, gpu_memory, gpu_tflops, price_per_gpu_hour, budget, grace_seconds, python, "
         "artifact_store, private, or STAGE.KEY=VALUE"),
        ("pipeline=3", "--set 'pipeline=3': write pipeline.KEY=VALUE with one of name, output_dir, threads, gpus, "
         "gpus_per_node, gpu_memory, gpu_tflops, price_per_gpu_hour, budget, grace_seconds, python, artifact_store, "
         "private, or STAGE.KEY=VALUE"),
        ("pipeline.thread=3", "recipe.toml: pipeline.thread: unknown key; did you mean pipeline.threads?"),
        ("sft.trian.epoch=1", "recipe.toml: stage 'sft': trian: unknown key"),
        ("sft.train.epok=1", "recipe.toml: stage 'sft': train.epok: unknown key; did you mean train.epoch?"),
        ("sft.retries=-1", "recipe.toml: stage 'sft': retries = -1: input should be greater than or equal to 0"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_one_line(tmp_path: Path, setting: str, said: str) -> None:
    assert refused(tmp_path, CHAIN, setting) == said


SFT_STAGE = 'name = "s"\nkind = "sft"\noverrides.train.train_policy.type = "sft"\n'
BAD_GRAPHS = [
    (stages(custom("a", 'after = "b"'), custom("b", 'after = "c"'), custom("c", 'after = "a"')),
     "the stages form a cycle: a -> c -> b -> a"),
    (stages(custom("a", 'after = "a"')), "the stages form a cycle: a -> a"),
    (stages(custom("start"), custom("a", 'after = ["start", "b"]'), custom("b", 'after = "a"')),
     "the stages form a cycle: a -> b -> a"),
    (stages(custom("first"), custom("b", 'after = "frist"')),
     "stage 'b': after = 'frist' is no stage of this pipeline; did you mean 'first'?"),
    (stages(custom("a"), custom("b", 'model = "stage:x"')),
     "stage 'b': model = 'stage:x' is no stage of this pipeline; known: a, b"),
    (stages(custom("a"), custom("b", 'model = "stage:a"')),
     "stage 'b': model = 'stage:a' but 'a' is not in its `after`; write after = [\"a\"]"),
    (stages(custom("a"), custom("b", 'data = "stage:a"')),
     "stage 'b': data = 'stage:a' but 'a' is not in its `after`; write after = [\"a\"]"),
    (stages(custom("a"), custom("a")), "stage 'a': the name is used twice; stage names are unique"),
    (stages(SFT_STAGE, custom("s-data")), "stage 's-data': the name is taken by the data of stage 's'"),
    (stages('name = "a"\nkind = "sfx"'), "stage 'a': unknown kind 'sfx'; did you mean 'sft'?"),
    (stages('name = "a"\nkind = "custom"'),
     "stage 'a': kind 'custom' needs entry = \"module:function\" or \"path/file.py:function\""),
    (stages('name = "a"\nkind = "report"\nentry = "json:loads"'),
     "stage 'a': entry has a meaning only with kind = 'custom'"),
    (stages('name = "a"\nkind = "report"\narguments = { x = 1 }'),
     "stage 'a': arguments has a meaning only with kind = 'custom'"),
    (stages(custom("a", 'require = "x > 1"')), "stage 'a': require has a meaning only with kind = 'gate'"),
    (stages(custom("a", 'target = "out"')), "stage 'a': target has a meaning only with kind = 'gate' or 'upload'"),
    (stages(custom("a", 'checkpoint = "best"')), "stage 'a': checkpoint has a meaning only with kind = 'export'"),
    (stages(custom("m"), 'name = "e"\nkind = "export"\nafter = "m"\nmodel = "stage:m"\ncheckpoint = "best"'),
     "stage 'e': checkpoint = 'best' needs model = \"stage:NAME\" of a training"),
    (stages('name = "e"\nkind = "export"\ncheckpoint = "0"'),
     "stage 'e': checkpoint = '0' must be 'best' or the number of a train step"),
    (stages('name = "a"\nkind = "gate"'), "stage 'a': kind 'gate' needs require = [\"METRIC >= NUMBER\"]"),
    (stages('name = "a"\nkind = "upload"\ntarget = "out"'), "stage 'a': kind 'upload' needs model = \"stage:NAME\""),
    (stages(custom("m"), 'name = "a"\nkind = "upload"\nafter = "m"\nmodel = "stage:m"'),
     "stage 'a': kind 'upload' needs target = \"FOLDER\""),
    (stages(custom("m"), 'name = "g"\nkind = "gate"\nafter = "m"\nrequire = "x >= published"'),
     "stage 'g': require compares with `published`, but there is no target to read it from; set target"),
    (stages('name = "g"\nkind = "gate"\nrequire = "accuracy over 3"'),
     "stage 'g': require: condition 'accuracy over 3' must be METRIC >= NUMBER, METRIC >= published, METRIC >= "
     "published - NUMBER (also >, <=, <, ==) or METRIC not worse than published by NUMBER"),
    (stages('name = "g"\nkind = "gate"\nrequire = "accuracy >= nan"'),
     "stage 'g': require: condition 'accuracy >= nan' must be METRIC >= NUMBER, METRIC >= published, METRIC >= "
     "published - NUMBER (also >, <=, <, ==) or METRIC not worse than published by NUMBER"),
    *((stages(custom(name)), f"stage {name!r}: name: stage name {name!r} must be at most 64 letters, digits, - and _, "
       "and start with a letter or digit") for name in ("a b", "../a", "-a", "a" * 65)),
    (stages('kind = "sft"'), "pipeline.stages[0]: name: is required"),
    (stages('name = "a"'), "stage 'a': kind: is required"),
    (stages('name = "s"\nkind = "sft"'),
     "stage 's': kind 'sft' does not train with train.train_policy.type = 'grpo'; take kind = 'rl'"),
    (stages('name = "s"\nkind = "rl"\noverrides.train.train_policy.type = "sft"'),
     "stage 's': kind 'rl' does not train with train.train_policy.type = 'sft'; take kind = 'sft'"),
    (stages(custom("a", 'timeout = "1 week"')),
     "stage 'a': timeout = '1 week' must be a number and a unit: 90s, 15m, 12h or 2d"),
    (stages(custom("a", 'recipe = "none.toml"')), "stage 'a': recipe = 'none.toml': no such file (none.toml)"),
    ("pipeline = 3", "pipeline: must be a table"),
    ("[pipeline]\nstages = 3", "pipeline.stages: must be tables, each under a line [[pipeline.stages]]"),
    ("[pipeline]\nstages = [3]", "pipeline.stages: must be tables, each under a line [[pipeline.stages]]"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said"), BAD_GRAPHS, ids=[said[:50] for _, said in BAD_GRAPHS])
def test_a_graph_that_cannot_run_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    assert refused(tmp_path, text) == f"recipe.toml: {said}"


def test_a_mistake_in_a_recipe_file_names_that_file_too(tmp_path: Path) -> None:
    (tmp_path / "inner.toml").write_text("[train]\nepok = 2\n")
    text = stages(custom("s", 'recipe = "inner.toml"'))
    assert refused(tmp_path, text) == (
        "recipe.toml: stage 's' (recipe inner.toml): train.epok: unknown key; did you mean train.epoch?"
    )
    (tmp_path / "inner.toml").write_text("[pipeline]\n")
    assert refused(tmp_path, text) == "inner.toml: a recipe used by a stage cannot have a [pipeline] of its own"


def test_a_gate_compares_with_the_target_of_the_first_upload_behind_it(tmp_path: Path) -> None:
    upload = 'kind = "upload"\nafter = "g"\nmodel = "stage:m"\n'
    text = stages(
        custom("m"),
        'name = "g"\nkind = "gate"\nafter = "m"\nrequire = "x >= published"',
        f'name = "u"\n{upload}target = "{tmp_path}/first"',
        f'name = "v"\n{upload}target = "{tmp_path}/second"',
    )
    assert load(tmp_path, text).stage("g").target == f"{tmp_path}/first"
    assert load(tmp_path, text, f"g.target={tmp_path}/third").stage("g").target == f"{tmp_path}/third"


@pytest.mark.parametrize("text", [SFT, GRPO, CHAIN], ids=["sft", "grpo", "chain"])
def test_what_is_saved_in_a_run_is_the_same_pipeline_again(tmp_path: Path, text: str) -> None:
    pipeline = load(tmp_path, text, "train.max_num_steps=3", "custom.when=2020-01-02")
    saved = tmp_path / "elsewhere" / "pipeline.toml"
    saved.parent.mkdir()
    saved.write_text(tomli_w.dumps(pipeline.as_toml()))
    again = load_pipeline(saved, (), all_kinds())
    assert again.recipes == pipeline.recipes
    assert again.config.model_dump(exclude={"stages"}) == pipeline.config.model_dump(exclude={"stages"})
    plain = {"recipe", "overrides"}  # what they said is in the recipes
    assert [s.model_dump(exclude=plain) for s in again.stages] == [s.model_dump(exclude=plain) for s in pipeline.stages]
    assert again.as_toml() == pipeline.as_toml()


def test_paths_are_looked_up_from_the_current_folder_then_beside_the_files_and_else_left_for_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there, base = tmp_path / "here", tmp_path / "there", tmp_path / "base"
    for folder in (here / "model", there / "model", there / "rows", base / "rows", base / "held"):
        folder.mkdir(parents=True)
    (there / "rewards.py").write_text("")
    monkeypatch.chdir(here)
    more = '[validation.dataset]\nname = "held"\n[validation.reward_function]\n"rewards.py:mine" = 1.0\n'
    text = SFT.replace("org/model", "model").replace("org/rows", "rows")
    (base / "base.toml").write_text(text.replace("enable_checkpoint", "upload_hf") + more)
    swept = 'kind = "sft"\nrecipe = "../base/base.toml"\nsweep = { grid = { "train.epoch" = [1] }, metric = "m" }'
    found = load(there, stages(f'name = "s"\n{swept}')).recipes
    assert {"s-data", "s-epoch-1", "s", "s-hub"} == set(found), "also of the choice and of the upload"
    for recipe in (load(there, 'extends = "../base/base.toml"').recipes["sft"], *found.values()):
        assert recipe.policy.model_name_or_path == str(here / "model")
        assert recipe.train.train_policy.dataset.name == str(there / "rows")
        assert recipe.validation.reward_function == {f"{there}/rewards.py:mine": 1.0}
        assert recipe.validation.dataset.name == str(base / "held")
    assert load(tmp_path, SFT).recipes["sft"].train.train_policy.dataset.name == "org/rows"


@pytest.mark.parametrize("name", ["a" * 5000, "~nobody-of-that-name/model"])
def test_a_name_that_can_be_no_path_is_no_crash(tmp_path: Path, name: str) -> None:
    assert load(tmp_path, SFT, f"policy.model_name_or_path={name}").recipes["sft"].policy.model_name_or_path == name


def test_asking_for_a_stage_that_is_not_there_suggests_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, CHAIN).stage("grop")
    assert str(caught.value) == f"{tmp_path}/recipe.toml: no stage 'grop' in this pipeline; did you mean 'grpo'?"


def test_a_checkpoint_is_measured_on_the_rows_of_its_training(tmp_path: Path) -> None:
    chain = (
        SFT_STAGE,
        'name = "e"\nkind = "export"\nafter = "s"\nmodel = "stage:s"\ncheckpoint = "best"',
        'name = "v"\nkind = "validate"\nafter = "e"\nmodel = "stage:e"',
    )
    pipeline = load(tmp_path, stages(*chain))
    assert [stage.name for stage in pipeline.stages] == ["s-data", "s", "e", "v"]
    assert pipeline.stage("v").data == "stage:s-data"


def test_a_run_has_one_folder_that_stages_may_name_and_not_two(tmp_path: Path) -> None:
    assert load(tmp_path, CHAIN, "grpo.train.output_dir=b").output_dir == Path("b")
    assert refused(tmp_path, CHAIN, "sft.train.output_dir=a", "grpo.train.output_dir=b") == (
        "recipe.toml: train.output_dir = 'a' of stage 'sft' and 'b' of stage 'grpo': a run has one folder; set "
        "pipeline.output_dir"
    )
    one = load(tmp_path, CHAIN, "sft.train.output_dir=a", "grpo.train.output_dir=b", "pipeline.output_dir=c")
    assert one.output_dir == Path("c")


def test_an_export_has_the_precision_of_its_training_unless_its_recipe_names_one(tmp_path: Path) -> None:
    (tmp_path / "fp32.toml").write_text('[train]\nparam_dtype = "float32"\ntrain_policy.type = "sft"\n')
    published = 'kind = "export"\nafter = "sft"\nmodel = "stage:sft"\n'
    pipeline = load(
        tmp_path,
        stages(
            'name = "sft"\nkind = "sft"\nrecipe = "fp32.toml"',
            f'name = "same"\n{published}',
            f'name = "half"\n{published}overrides.train.param_dtype = "bfloat16"',
            'name = "again"\nkind = "export"\nafter = "same"\nmodel = "stage:same"',
        ),
    )
    found = {name: pipeline.recipes[name].train.param_dtype for name in ("same", "half", "again")}
    assert found == {"same": "float32", "half": "bfloat16", "again": "float32"}
