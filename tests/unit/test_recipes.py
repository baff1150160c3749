"""Every file below `configs/`: it loads as it is, and its header tells the truth about hardware, command and status."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import tomli_w

from cosmos_core.config.capabilities import check_capabilities, unique_notices
from cosmos_core.config.compose import Pipeline, load_pipeline
from cosmos_core.config.load import TomlTable
from cosmos_core.config.mesh import check_mesh
from cosmos_core.config.schema.grpo import GrpoConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.unread import unread_key_notices
from cosmos_core.errors import ConfigError
from tasks.kinds import all_kinds

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
FILES = sorted(str(file.relative_to(ROOT)) for file in CONFIGS.rglob("*.toml"))
RECIPES = [file for file in FILES if Path(file).parent.name in {"llm", "vlm", "diffusion", "pipelines"}]
FIELDS = ("Hardware", "Data", "Command", "Status")
NOTHING_REFUSED = "no key is refused"
INHERITED = {"train.train_policy.use_remote_reward": "validation.use_remote_reward"}
"""Keys that a resolved pipeline repeats elsewhere."""

MISSION = {
    "llm": {
        "mistralai/Mistral-7B": "sft grpo",
        "microsoft/phi-4": "sft grpo",
        "openai/gpt-oss-20b": "sft grpo",
        "Qwen/Qwen2.5-7B": "sft grpo",
        "Qwen/Qwen3-8B": "sft grpo",
        "Qwen/Qwen3-30B-A3B": "sft grpo",
        "meta-llama/Llama-3.1-8B": "sft grpo",
    },
    "vlm": {
        "google/gemma-3-12b": "sft grpo",
        "meta-llama/Llama-3.2-11B-Vision": "sft grpo",
        "meta-llama/Llama-4-Scout": "sft+lora",
        "llava-hf/llava-1.5-7b": "sft grpo",
        "Qwen/Qwen2.5-VL-7B": "sft grpo",
        "Qwen/Qwen3-VL-8B": "sft grpo",
    },
    "diffusion": {
        "stabilityai/stable-diffusion-3.5": "diffusion_sft diffusion_sft+lora diffusion_nft+lora",
        "Efficient-Large-Model/Sana_": "diffusion_sft diffusion_sft+lora diffusion_nft+lora",
        "Efficient-Large-Model/SANA-Video": "diffusion_sft diffusion_sft+lora diffusion_nft+lora",
        "nvidia/Cosmos-Predict2.5": "diffusion_nft+lora flow_grpo ddrl",
    },
}
"""Folder, how the model's name begins, and the trainings that have a recipe."""


@cache
def load(file: str) -> Pipeline:
    return load_pipeline(ROOT / file, [], all_kinds())


def header(file: str) -> dict[str, str]:
    """The four fields at the top of a recipe, each on one line."""
    found: dict[str, str] = {}
    name = ""
    for line in (ROOT / file).read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        match = re.fullmatch(r"# (\w+): (.+)", line)
        if match and match[1] in FIELDS:
            name = match[1]
            found[name] = match[2]
        elif name and line.startswith("#   "):
            found[name] += " " + line[4:]
    return found


def trainings(pipeline: Pipeline) -> list[Recipe]:
    return [pipeline.recipes[stage.name] for stage in pipeline.stages if pipeline.stage_kind(stage).trains_model]


def without(tables: TomlTable, keys: Sequence[str]) -> TomlTable:
    """A copy without these dotted keys."""
    here = {key: value for key, value in tables.items() if key not in keys}
    for name, inner in here.items():
        if isinstance(inner, dict):
            below = [key.removeprefix(f"{name}.") for key in keys if key.startswith(f"{name}.")]
            here[name] = without(inner, below)
    return here


def is_accepted(pipeline: Pipeline, without_keys: Sequence[str], folder: Path) -> bool:
    """Whether this version takes the pipeline, with these keys at their defaults."""
    values = pipeline.as_toml()
    without_keys = [*without_keys, *(INHERITED[key] for key in without_keys if key in INHERITED)]
    for stage in values["pipeline"]["stages"]:
        stage["overrides"] = without(stage["overrides"], without_keys)
    file = folder / "without.toml"
    file.write_bytes(tomli_w.dumps(values).encode())
    try:
        check_capabilities(load_pipeline(file, [], all_kinds()))
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("file", FILES)
def test_no_key_is_old_or_without_effect_and_some_stage_reads_each(file: str) -> None:
    pipeline = load(file)
    assert pipeline.notices == () and [notice for notice in unique_notices(pipeline) if "no effect" in notice] == []
    assert [*unread_key_notices(pipeline, pipeline.recipes)] == []


@pytest.mark.parametrize("file", RECIPES)
def test_the_header_has_the_four_fields_and_the_command_that_runs_the_file(file: str) -> None:
    found = header(file)
    assert tuple(found) == FIELDS
    assert re.match(rf"cosmos run {re.escape(file)}(?= |$)", found["Command"])
    if settings := re.findall(r"--set (\S+)", found["Command"]):
        load_pipeline(ROOT / file, settings, all_kinds())
    assert "not yet run on a GPU" in found["Status"]
    read = {
        split for recipe in load(file).recipes.values() for rows in recipe.datasets.values() for split in rows.split
    }
    assert set(re.findall(r"(\w+)\.jsonl", found["Data"])) <= read


@pytest.mark.parametrize("file", RECIPES)
def test_the_gpus_of_the_header_are_those_of_the_largest_training_and_batches_divide_on_them(file: str) -> None:
    pipeline = load(file)
    match = re.match(r"(\d+) x (?:24|48|80) GB\b", header(file)["Hardware"])
    assert match
    gpus = int(match[1])
    assert max(check_mesh(recipe, gpus, {}) for recipe in trainings(pipeline)) == gpus
    if Path(file).parent.name == "pipelines":
        assert pipeline.config.gpus == gpus
    for recipe in trainings(pipeline):
        batch, policy, mesh = recipe.train.train_batch_per_replica, recipe.train.train_policy, recipe.policy.parallelism
        ranks = mesh.dp_shard_size * mesh.dp_replicate_size
        assert batch % (ranks * policy.mini_batch) == 0
        assert mesh.dp_shard_size * mesh.cp_size % mesh.ep_size == 0
        if isinstance(policy, GrpoConfig):
            assert batch % recipe.rollout.n_generation == 0
            assert recipe.rollout.max_response_length < recipe.policy.model_max_length
            assert mesh.world_size % recipe.rollout.parallelism.tp_size == 0


@pytest.mark.parametrize("file", RECIPES)
def test_the_status_is_true(file: str, tmp_path: Path) -> None:
    """What a recipe waits for is all that is refused, and each of it is."""
    pipeline, status = load(file), header(file)["Status"].partition(";")[0]
    if status == NOTHING_REFUSED:
        check_capabilities(pipeline)
        return
    assert status.startswith("waits for ")
    keys = status.removeprefix("waits for ").split(", ")
    assert is_accepted(pipeline, keys, tmp_path)
    for key in keys:
        others = [other for other in keys if other != key]
        assert not is_accepted(pipeline, others, tmp_path), f"{key} is no reason to wait any more"


@pytest.mark.parametrize("folder", MISSION)
def test_every_family_of_the_mission_has_its_recipes(folder: str) -> None:
    found: dict[str, set[str]] = {}
    for file in RECIPES:
        if Path(file).parent.name == folder:
            (recipe,) = trainings(load(file))
            kind = recipe.train.train_policy.trainer_type + ("+lora" if recipe.policy.lora else "")
            for model in MISSION[folder]:
                if recipe.policy.model_name_or_path.startswith(model):
                    found.setdefault(model, set()).add(kind)
    assert found == {model: set(kinds.split()) for model, kinds in MISSION[folder].items()}


@pytest.mark.parametrize("gpus", [4, 8])
def test_llava_format_is_said_as_cosmos_rl_says_it(gpus: int) -> None:
    pipeline = load(f"configs/vlm/llava-format-{gpus}gpu.toml")
    (recipe,) = trainings(pipeline)
    assert recipe.policy.parallelism.world_size == gpus
    assert recipe.custom["dataset"] == {
        "annotation_path": "./data/llava/annotations.json",
        "media_path": "./data/llava/media",
    }


def test_pipelines_chain_what_the_mission_names() -> None:
    kinds = {
        name: " ".join(stage.kind for stage in load(f"configs/pipelines/{name}.toml").stages if stage.kind != "prepare")
        for name in ("one-gpu-math", "qwen3-8b-math", "qwen3-vl-8b", "sd3.5-lora-nft", "nightly-retrain")
    }
    assert kinds == {
        "one-gpu-math": "sft rl validate gate export upload report",
        "qwen3-8b-math": "sft rl validate gate export upload report",
        "qwen3-vl-8b": "sft validate export upload",
        "sd3.5-lora-nft": "sft rl export upload",
        "nightly-retrain": "sft export validate gate upload",
    }
