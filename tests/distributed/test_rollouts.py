"""Rollouts on several ranks: every rank generates a share, and the training is that of one rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data import prepare
from cosmos_core.errors import Preempted
from cosmos_core.run.files import read_json
from cosmos_core.run.progress import read_metrics
from cosmos_core.run.stage import Stage
from cosmos_core.train.setup import run
from tests.conftest import wait_until
from tests.distributed import members
from tests.distributed.stages import make_task, stage_of
from tests.local_ranks import LocalGroup

STEPS = 3
REWARD = f"{Path(__file__).with_name('reward.py')}:variety"
GRPO = {
    "type": "grpo", "mini_batch": 3, "reward_function": REWARD, "kl_beta": 0.1, "mu_iterations": 2,
    "batch_size_per_optimize": 12,
}  # fmt: skip
SFT = {"type": "sft", "mini_batch": 3, "conversation_column_name": "messages"}
LORA = {"lora": {"r": 4, "target_modules": "all-linear"}}
MESHES: dict[str, dict[str, int]] = {
    "dp": {"dp_shard_size": 2},
    "tp": {"tp_size": 2},
    "cp": {"cp_size": 2},
    "pp": {"pp_size": 2},
    "hsdp": {"dp_replicate_size": 2, "dp_shard_size": 2},
}
EXACT = ("reward/", "completion/", "rollout/version_lag", "validation/", "tokens")
"""Figures of the answers, which are the same tokens."""
Alone = Callable[[Mapping[str, Any]], Stage]


def recipe(policy: Mapping[str, Any], mesh: Mapping[str, int], **train: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "policy": {"model_max_length": 32, "model_gradient_checkpointing": False, "parallelism": mesh, **policy},
            "train": {
                "param_dtype": "float32", "compile": False, "optm_lr": 1e-3, "train_batch_per_replica": 24,
                "max_num_steps": STEPS, "epoch": 9, "ema_enable": True, "train_policy": GRPO,
                "ckpt": {"enable_checkpoint": True, "save_freq": 1, "save_mode": "sync"}, **train,
            },
            "rollout": {"backend": "hf", "n_generation": 4, "batch_size": 3, "max_response_length": 5},
            "validation": {"enable": True, "freq": 2, "batch_size": 3, "reward_function": REWARD},
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("task"), recipe({}, {}), hidden_size=128)


def rl(task: Path, path: Path, policy: Mapping[str, Any], mesh: Mapping[str, int]) -> Stage:
    return stage_of(path, "rl", recipe(policy, mesh), task / "task/model", task / "rows/data")


def on(done: Stage, scratch: Path, stop_after: int | None = None) -> Any:
    size = done.recipe.policy.parallelism.world_size
    return LocalGroup(size).run(partial(members.train, done, stop_after, scratch))


@pytest.fixture(scope="module")
def alone(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """The training with these keys of `[policy]` on one rank, in this process."""
    done: dict[str, Stage] = {}

    def trained(policy: Mapping[str, Any]) -> Stage:
        if str(policy) not in done:
            done[str(policy)] = rl(task, tmp_path_factory.mktemp("alone"), policy, {})
            run(done[str(policy)])
        return done[str(policy)]

    return trained


def assert_like(done: Stage, alone: Stage) -> None:
    lines, expected = (read_metrics(each.path / "metrics.jsonl") for each in (done, alone))
    assert [line["step"] for line in lines] == [line["step"] for line in expected] == list(range(1, STEPS + 1))
    assert any(line["reward/std"] > 0 for line in expected), "no step would have a gradient"
    for line, other in zip(lines, expected, strict=True):
        assert line.keys() == other.keys()
        for name in other:
            if name.startswith(EXACT):
                assert line[name] == other[name], name
        for name in ("loss", "grad_norm", "kl", "entropy"):
            assert line[name] == pytest.approx(other[name], rel=1e-4, abs=1e-7), name
        assert line["rollout/logprob_difference_max"] < 1e-4
    samples = [(each.path / "samples.jsonl").read_text().splitlines() for each in (done, alone)]
    assert [json.loads(line) for line in samples[0]] == [json.loads(line) for line in samples[1]]
    weights = [load_file(each.path / f"safetensors/step_{STEPS}/model.safetensors") for each in (done, alone)]
    assert weights[0].keys() == weights[1].keys()
    for name, weight in weights[1].items():
        # Adam turns the rounding of a tiny gradient into a share of the rate of 1e-3.
        assert (weights[0][name] - weight).abs().max() <= 1e-4, name


@pytest.mark.parametrize(
    "mesh", [mesh if mesh == "tp" else pytest.param(mesh, marks=pytest.mark.full) for mesh in MESHES]
)
def test_a_mesh_generates_and_learns_as_one_rank(mesh: str, task: Path, tmp_path: Path, alone: Alone) -> None:
    done = rl(task, tmp_path / "rl", {}, MESHES[mesh])
    outcome = on(done, tmp_path)
    assert [check.partition(":")[0] for check in outcome.info["checks"]] == ["keys", "bytes", "reload", "tokenizer"]
    assert_like(done, alone({}))
    recipe, model = (
        done.recipe.copy_with(train=done.recipe.train.copy_with(ema_enable=False)),
        f"safetensors/step_{STEPS}",
    )
    on(stage_of(tmp_path / "measured", "validate", recipe, done.path / model, task / "rows/data"), tmp_path)
    measured, lines = read_json(tmp_path / "measured/metrics.json"), read_metrics(done.path / "metrics.jsonl")
    assert isinstance(measured, dict)
    assert {name: lines[-1][name] for name in measured} == measured, "the same model, measured by itself"


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["pp"])
def test_an_adapter_too(mesh: str, task: Path, tmp_path: Path, alone: Alone) -> None:
    done = rl(task, tmp_path / "rl", LORA, MESHES[mesh])
    on(done, tmp_path)
    assert_like(done, alone(LORA))


@pytest.mark.full
def test_it_stops_on_two_ranks_and_goes_on_on_four_and_on_one(task: Path, tmp_path: Path, alone: Alone) -> None:
    with pytest.raises(Preempted, match="stopped after step 1 of 3; checkpoint saved"):
        on(rl(task, tmp_path / "rl", {}, MESHES["dp"]), tmp_path, stop_after=1)
    with pytest.raises(Preempted, match="stopped after step 2 of 3; checkpoint saved"):
        on(rl(task, tmp_path / "rl", {}, MESHES["hsdp"]), tmp_path, stop_after=2)
    one = rl(task, tmp_path / "rl", {}, {})
    run(one)
    assert_like(one, alone({}))


def shared_memory() -> list[Path]:
    return list(Path("/dev/shm").glob("*cpushm*"))


@pytest.fixture
def left_by_a_killed_run() -> Iterator[None]:
    path = Path("/dev/shm/-tp:0-[0-1]-cpushm_0")  # as vLLM itself names it
    path.touch()
    yield
    path.unlink(missing_ok=True)


@pytest.mark.full
@pytest.mark.usefixtures("left_by_a_killed_run")
@pytest.mark.parametrize(("mesh", "tp_size"), [("dp", 2), ("tp", 1)])
def test_vllm_answers_on_every_rank_and_over_ranks(mesh: str, tp_size: int, task: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    done = rl(task, tmp_path / "rl", {}, MESHES[mesh])
    rollout = done.recipe.rollout.copy_with(
        backend="vllm", parallelism=done.recipe.rollout.parallelism.copy_with(tp_size=tp_size)
    )
    done.recipe = done.recipe.copy_with(rollout=rollout)
    before = set(shared_memory())
    on(done, tmp_path)
    wait_until(lambda: set(shared_memory()) <= before, 30, "no name of shared memory stays behind")  # of tests beside
    lines = read_metrics(done.path / "metrics.jsonl")
    assert [line["rollout/version_lag"] for line in lines] == [0.0] * STEPS
    assert all(line["rollout/logprob_difference_max"] < 1e-4 for line in lines), "a rank has other weights"
    assert any(line["reward/std"] > 0 for line in lines)


@pytest.mark.full
def test_supervised_training_on_a_mesh_measures_generated_answers(task: Path, tmp_path: Path) -> None:
    found = []
    for name, mesh in (("one", {}), ("two", MESHES["dp"])):
        config = recipe({}, mesh, train_policy=SFT, train_batch_per_replica=9)
        prepare.run(stage_of(tmp_path / name / "rows", "prepare", config, task / "task/model", task / "task/data"))
        stage = stage_of(tmp_path / name / "sft", "sft", config, task / "task/model", tmp_path / name / "rows/data")
        if mesh:
            on(stage, tmp_path)
        else:
            run(stage)
        found.append([line for line in read_metrics(stage.path / "metrics.jsonl") if "validation/accuracy" in line])
    assert [line["step"] for line in found[0]] == [2, 3]
    for one, two in zip(*found, strict=True):
        one, two = ({k: v for k, v in line.items() if "validation/" in k} for line in (one, two))
        for name in ("validation/loss", "validation/perplexity"):  # summed over ranks in another order
            assert one.pop(name) == pytest.approx(two.pop(name), rel=1e-6)
        assert one == two
