"""Training on drawn images on several ranks: each draws some of them, or a part of each clip, and the training is that
of one rank."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from cosmos_core.run.stage import Stage
from cosmos_core.train.setup import run
from tests.distributed import members
from tests.local_ranks import LocalGroup
from tests.unit.test_flow_training import TRAININGS, Inputs, metrics_of

FEW = {"train.max_num_steps": 2, "train.ema_enable": False, "train.optm_lr": 1e-3}
MESHES: dict[str, dict[str, int]] = {
    "dp": {"dp_shard_size": 2}, "hsdp": {"dp_replicate_size": 2, "dp_shard_size": 2}, "context": {"cp_size": 2},
    "context of heads": {"cp_size": 2},
}  # fmt: skip
CLIPS = {"context": "sana_video", "context of heads": "cosmos_predict"}
"""Families whose clips ranks share."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return Inputs(tmp_path_factory.mktemp("inputs"))


def weights_of(stage: Stage) -> dict[str, Any]:
    return load_file(stage.path / "safetensors/step_2/transformer/diffusion_pytorch_model.safetensors")


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(*cell, marks=() if cell == ("nft", "dp") else pytest.mark.full)
        for cell in product(TRAININGS, MESHES)
    ],
)
def test_a_mesh_draws_and_learns_as_one_rank(inputs: Inputs, name: str, mesh: str, tmp_path: Path) -> None:
    sizes = {f"policy.parallelism.{axis}": size for axis, size in MESHES[mesh].items()}
    family, settings = "sd3", {**TRAININGS[name], **FEW}
    if mesh in CLIPS:
        reward = f"{inputs.folder / 'reward.py'}:bright"
        family = CLIPS[mesh]
        settings |= {"policy.diffusers.inference_frames": 5, "train.train_policy.reward_function": reward}
    alone = inputs.stage(tmp_path / "alone", family, **settings)
    run(alone)
    done = inputs.stage(tmp_path / "done", family, **settings, **sizes)
    size = done.recipe.policy.parallelism.world_size
    LocalGroup(size).run(partial(members.train, done, None, tmp_path))
    for line, other in zip(metrics_of(done), metrics_of(alone), strict=True):
        assert line.keys() == other.keys()
        for metric in ("reward/mean", "loss", "grad_norm", "kl", "watch/diversity"):
            # Advantages add up to 0, and the loss of FlowGRPO with them while ratios are 1: what is left is rounding.
            assert line[metric] == pytest.approx(other[metric], rel=1e-3, abs=1e-5), metric
    one, other = weights_of(alone), weights_of(done)
    for weight in one:
        # Adam turns the rounding of a tiny gradient into some of the rate of 1e-3.
        assert (one[weight] - other[weight]).abs().max() <= 5e-4, weight
