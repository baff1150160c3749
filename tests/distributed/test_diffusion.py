"""A denoiser on four ranks, as replicas, shards, both, and sharing clips: loss, gradients, predictions and weights are
those of one rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from cosmos_core.cluster.group import WorkerGroup
from tests import tiny_pipelines
from tests.distributed.diffusion import CASES, PRECISE, cells, computed, on_meshes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("denoisers")
    for name in {case.partition("-")[0] for case in CASES}:
        tiny_pipelines.save(name, found / name)
    WorkerGroup(4, "local").run(partial(on_meshes, found))
    return found


@pytest.mark.parametrize(("case", "mesh"), cells())
def test_four_ranks_do_what_one_does(case: str, mesh: str, folder: Path, tmp_path: Path) -> None:
    one, four = computed(folder, case, tmp_path), torch.load(folder / f"{mesh}-{case}.pt")
    _, tolerance = PRECISE.get(case.partition("-")[0], (torch.float64, 1e-9))
    assert four["loss"] == pytest.approx(one["loss"], rel=tolerance)
    assert four["grad_norm"] == pytest.approx(one["grad_norm"], rel=max(tolerance, 1e-7))  # norms are in float32
    for ours, theirs in zip(one["predicted"], four["predicted"], strict=True):
        assert (ours - theirs).abs().max() <= tolerance * ours.abs().max()
    assert one["gradients"].keys() == four["gradients"].keys()
    most = max(gradient.abs().max() for gradient in one["gradients"].values())
    for key, gradient in one["gradients"].items():
        assert (four["gradients"][key] - gradient).abs().max() <= tolerance * most, key
    for key, weight in one["weights"].items():
        assert four["weights"][key].shape == weight.shape, key
