"""Meshes that can exist, those that cannot, and the nearest one that is offered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from cosmos_core.config.capabilities import check_capabilities
from cosmos_core.config.compose import load_pipeline
from cosmos_core.config.mesh import check_mesh, describe_placements, read_text_model_config, resolve_gpu_settings
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import ConfigError
from tasks.kinds import all_kinds
from tests.cells import cells
from tests.unit.test_config_load import GRPO, load
from tests.unit.test_machine_properties import machine_with

QWEN = {"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "num_hidden_layers": 28}
MOE = {"num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_hidden_layers": 48}


def sft(batch: int = 8, **mesh: int) -> Recipe:
    return Recipe.model_validate(
        {"policy": {"parallelism": mesh}, "train": {"train_batch_per_replica": batch, "train_policy": {"type": "sft"}}}
    )


def grpo(mesh: dict[str, int], rollout: dict[str, int], *, batch: int = 16, **tables: Any) -> Recipe:
    train = {"train_batch_per_replica": batch, "train_policy": {"type": "grpo", "mini_batch": 2}}
    tables |= {"policy": {"parallelism": mesh}, "rollout": {"parallelism": rollout}, "train": train}
    return Recipe.model_validate(tables)


def refused(recipe: Recipe, gpus: int | None = None, model: dict[str, Any] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        check_mesh(recipe, gpus, model or {})
    return str(caught.value)


@pytest.mark.parametrize(
    ("recipe", "gpus", "taken"),
    [
        (sft(), None, 1),
        (sft(tp_size=2, dp_shard_size=4), 8, 8),
        (sft(tp_size=2, dp_shard_size=-1), 8, 8),
        (sft(tp_size=2, dp_shard_size=-1), None, 2),
        (sft(tp_size=2, dp_replicate_size=2, dp_shard_size=2, n_init_replicas=2), 16, 16),
        (grpo({"dp_shard_size": 4}, {}), 4, 4),
        (grpo({"dp_shard_size": -1}, {}), 8, 8),
        (grpo({"dp_shard_size": 2}, {"n_init_replicas": 3, "tp_size": 2}, mode="disaggregated"), 8, 8),
    ],
)
def test_a_mesh_takes_the_product_of_its_sizes(recipe: Recipe, gpus: int, taken: int) -> None:
    assert check_mesh(recipe, gpus, {}) == taken


@pytest.mark.parametrize(
    ("sizes", "model", "said"),
    [
        ({"tp_size": 3}, QWEN, "tp_size = 3 does not divide the 28 attention heads; the nearest is 2"),
        ({"tp_size": 7}, QWEN, "tp_size = 7 does not divide the 4 key-value heads; the nearest is 4"),
        ({"tp_size": 4, "cp_size": 4}, QWEN,
         "cp_size = 4 does not divide the 7 attention heads of tp_size = 4; the nearest is 1"),
        ({"tp_size": 2}, {"n_head": 25, "n_layer": 4},
         "tp_size = 2 does not divide the 25 attention heads; the nearest is 1"),
        ({"pp_size": 5}, {"n_head": 25, "n_layer": 4}, "pp_size = 5: the model has 4 layers; the nearest is 4"),
        ({"tp_size": 4}, QWEN | {"intermediate_size": 18946},
         "tp_size = 4 does not divide the 18946 features of the feed-forward part; the nearest is 2"),
        ({"pp_size": 29}, QWEN, "pp_size = 29: the model has 28 layers; the nearest is 28"),
        ({"pp_size": 8, "pp_layers_per_stage": 1}, QWEN,
         "pp_layers_per_stage = 1 makes 32 stages of the model's 28 layers; the nearest is 2"),
        ({"ep_size": 2, "dp_shard_size": 2}, QWEN, "ep_size = 2: the model has no experts; set it to 1"),
        ({"ep_size": 3, "dp_shard_size": 3}, MOE, "ep_size = 3 does not divide the 128 experts; the nearest is 2"),
        ({"ep_size": 8, "dp_shard_size": 4}, MOE,
         "ep_size = 8 does not divide the 4 ranks of dp_shard_size x cp_size; the nearest is 4"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_split_so_is_refused_with_the_nearest_size(
    sizes: dict[str, int], model: dict[str, Any], said: str
) -> None:
    assert refused(sft(24, **sizes), None, model) == f"policy.parallelism.{said}"


APART = {"n_init_replicas": 4}
REST = "policy.parallelism.dp_shard_size = -1: {} are no multiple of the {} that the other sizes take; the nearest is "


@pytest.mark.parametrize(
    ("recipe", "gpus", "said"),
    [
        (sft(tp_size=2, dp_shard_size=8), 8,
         "the mesh takes 16 GPUs, of 8 that there are; the nearest is policy.parallelism.dp_shard_size = 4"),
        (sft(tp_size=8), 6, "the mesh takes 8 GPUs, of 6 that there are; the nearest is policy.parallelism.tp_size = 4 "
         "with the other sizes 1"),
        (grpo({"dp_shard_size": 8}, {}), 4,
         "the mesh takes 8 GPUs, of 4 that there are; the nearest is policy.parallelism.dp_shard_size = 4"),
        (grpo({"dp_shard_size": 8}, APART, mode="disaggregated"), 8,
         "the mesh takes 12 GPUs, of 8 that there are; the nearest is policy.parallelism.dp_shard_size = 4"),
        (grpo({}, APART, mode="disaggregated"), 4, "the mesh takes 5 GPUs, of 4 that there are; the nearest is mode = "
         "'colocated', without the 4 GPUs of the engines"),
        (sft(tp_size=3, dp_shard_size=-1), 8, REST.format("8 GPUs", 3) + "dp_shard_size = 2, with 6 GPUs"),
        (grpo({"tp_size": 2, "dp_shard_size": -1}, {"n_init_replicas": 3}, mode="disaggregated"), 8,
         REST.format("5 GPUs without those of the engines", 2) + "dp_shard_size = 2, with 7 GPUs"),
        (grpo({"dp_shard_size": 4}, {}, batch=20), None,
         "train.train_batch_per_replica = 20 must be a multiple of dp_shard_size x mini_batch = 4 x 2; the nearest is "
         "16, or dp_shard_size = 4 with mini_batch = 1"),
    ],
)  # fmt: skip
def test_a_mesh_that_cannot_be_is_refused_with_the_nearest_that_can(
    recipe: Recipe, gpus: int | None, said: str
) -> None:
    assert refused(recipe, gpus) == said


def test_an_engine_may_have_more_ranks_than_key_value_heads_and_any_vocabulary() -> None:
    model = QWEN | {"num_attention_heads": 32, "vocab_size": 151643}
    assert check_mesh(grpo({"dp_shard_size": 8}, {"tp_size": 8}), 8, model) == 8
    assert check_mesh(sft(tp_size=4), None, model) == 4, "neither does a training need an even vocabulary"
    by_layer = {"num_key_value_heads": [2, 4]}  # as in models whose layers differ
    assert check_mesh(grpo({"tp_size": 2}, {"tp_size": 2}), None, by_layer) == 2


def test_the_facts_are_those_of_the_text_model(tmp_path: Path) -> None:
    assert read_text_model_config(tmp_path) == {}
    (tmp_path / "config.json").write_text("[3")
    assert read_text_model_config(tmp_path) == {}
    (tmp_path / "config.json").write_text(json.dumps({"vision_config": {}, "text_config": QWEN}))
    assert read_text_model_config(tmp_path) == QWEN
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    assert read_text_model_config(tmp_path) == MOE


@pytest.mark.parametrize(
    ("setting", "visible", "size"),
    [("pipeline.gpus=4", "0", 4), ("pipeline.name=p", "0,2,3", 3), ("pipeline.name=p", "", -1)],
    ids=["said", "seen", "none"],
)
def test_the_whole_world_is_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, visible: str, size: int
) -> None:
    (tmp_path / "a.toml").write_text(
        '[policy.parallelism]\ndp_shard_size = -1\n[train]\ntrain_policy = { type = "sft" }\n'
    )
    with machine_with(["H100"] * 8, monkeypatch, visible):
        pipeline = resolve_gpu_settings(load_pipeline(tmp_path / "a.toml", [setting], all_kinds()))
    assert {name: recipe.policy.parallelism.dp_shard_size for name, recipe in pipeline.recipes.items()} == {
        "prepare": -1, "sft": size, "export": -1,
    }  # fmt: skip


def test_a_world_that_the_other_sizes_do_not_divide_names_the_stage(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        '[policy.parallelism]\ndp_shard_size = -1\ntp_size = 3\n[train]\ntrain_policy = { type = "sft" }\n'
    )
    with pytest.raises(ConfigError, match=r"a\.toml: stage 'sft': policy\.parallelism\.dp_shard_size = -1: 8 GPUs"):
        resolve_gpu_settings(load_pipeline(tmp_path / "a.toml", ["pipeline.gpus=8"], all_kinds()))


OF_COSMOS_RL = """redis = "12800"
[policy.parallelism]
dp_shard_size = 2
[rollout]
parallelism = { n_init_replicas = 2, tp_size = 4 }
[train]
train_batch_per_replica = 32
train_policy = { type = "grpo" }
"""
PLACED = {
    "8 GPUs short": (8, "", "GPUs 0-1 train and generate in turns (1 engine of 2 in them)"),
    "room": (10, "", "GPUs 0-1 train, GPUs 2-9 generate (2 engines of 4)"),
    "no GPU": (0, "", "processes 0-1 train and generate in turns (1 engine of 2 in them)"),
    "one engine": (8, "rollout.parallelism.n_init_replicas=1", "GPUs 0-1 train, GPUs 2-5 generate (1 engine of 4)"),
    "both replicas": (10, "redis='';policy.parallelism.n_init_replicas=1",
                      "GPUs 0-1 train, GPUs 2-9 generate (2 engines of 4)"),
    "more ranks": (16, "policy.parallelism.n_init_replicas=4",
                   "GPUs 0-7 train, GPUs 8-15 generate (2 engines of 4)"),
    "the rest of the GPUs": (16, "policy.parallelism.dp_shard_size=-1",
                             "GPUs 0-7 train, GPUs 8-15 generate (2 engines of 4)"),
    "one of ours": (10, "redis='';rollout.parallelism.tp_size=1",
                    "GPUs 0-1 train and generate in turns (2 engines in them)"),
    "said": (10, "mode=colocated;rollout.parallelism.tp_size=2",
             "GPUs 0-1 train and generate in turns (1 engine of 2 in them)"),
    "said to be separated": (10, "mode=colocated_separated;rollout.parallelism={tp_size=1}",
                             "GPUs 0-1 train, and generate in turns (2 engines in processes of their own)"),
}  # fmt: skip
"""GPUs that there are, settings, and where the stage runs."""


@pytest.mark.parametrize("case", cells(PLACED, {"more ranks", "one engine", "both replicas", "said"}))
def test_a_recipe_of_cosmos_rl_that_leaves_mode_out_runs_as_there_where_the_gpus_are_enough(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus, settings, expected = PLACED[case]
    (tmp_path / "a.toml").write_text(OF_COSMOS_RL)
    with machine_with(["H100"] * gpus, monkeypatch):
        pipeline = resolve_gpu_settings(
            load_pipeline(tmp_path / "a.toml", settings.split(";") * bool(settings), all_kinds())
        )
        assert describe_placements(pipeline) == [f"rl: {expected}"]
    said = [line for line in pipeline.notices if line.startswith("mode is left out")]
    assert len(said) == (case in {"8 GPUs short", "no GPU"})
    assert all(f"takes 10 GPUs, and there are {gpus}: mode = 'colocated' and rollout" in line for line in said)
    check_capabilities(pipeline)
    saved = tmp_path / "saved.toml"
    saved.write_text(tomli_w.dumps(pipeline.as_toml()))
    again = resolve_gpu_settings(load_pipeline(saved, [], all_kinds()))  # on this machine, which has others
    assert again.recipes == pipeline.recipes


def test_a_stage_elsewhere_is_taken_to_have_the_gpus_and_one_that_measures_generates_in_its_ranks(
    tmp_path: Path,
) -> None:
    stages = '[[pipeline.stages]]\nname = "rl"\nkind = "rl"\nwork_pool = "gpu"\n[[pipeline.stages]]\nname = "judge"\n'
    (tmp_path / "a.toml").write_text(f'{OF_COSMOS_RL}{stages}kind = "validate"\nmodel = "stage:rl"\nafter = ["rl"]\n')
    pipeline = resolve_gpu_settings(load_pipeline(tmp_path / "a.toml", [], all_kinds()))
    assert describe_placements(pipeline) == [
        "rl: GPUs 0-1 train, GPUs 2-9 generate (2 engines of 4)", "judge: GPUs 0-1 measure",
    ]  # fmt: skip
    assert pipeline.recipes["judge"].rollout.parallelism.tp_size == 2
    assert "stage 'judge': rollout.parallelism.tp_size = 2, because its ranks generate" in pipeline.notices


@pytest.mark.parametrize(
    "settings", [["rollout.quantization=fp8"], ["rollout.quantization=mxfp4"], ["train.fp8.enable_fp8=true"]]
)
def test_what_only_a_gpu_rounds_is_left_out_on_cpu_with_a_note(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.toml").write_text(OF_COSMOS_RL)
    for gpus in (0, 10):
        with machine_with(["H100"] * gpus, monkeypatch):
            pipeline = resolve_gpu_settings(load_pipeline(tmp_path / "a.toml", settings, all_kinds()))
        said = [line for line in pipeline.notices if "there is no GPU; numbers are those of" in line]
        assert len(said) == (not gpus)
    check_capabilities(pipeline)


def test_policies_may_call_tools_where_an_engine_has_several_ranks(tmp_path: Path) -> None:
    turns = "rollout.multi_turn_config"
    tools = (f"{turns}.enable=true", f"{turns}.enable_tools=true", f"{turns}.tools=['mine.py:add']")
    mesh = ("policy.parallelism.dp_shard_size=2", "rollout.parallelism.tp_size=2")
    check_capabilities(load(tmp_path, GRPO, *tools, *mesh))
