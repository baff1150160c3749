"""A denoiser on four ranks, as replicas, shards, both, and sharing clips: loss, gradients, predictions and weights are
those of one rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests import tiny_pipelines
from tests.distributed.diffusion import PRECISE, cells, computed, on_meshes, usual_cells
from tests.local_ranks import LocalGroup

FURTHER = [cell for cell in cells() if cell not in usual_cells()]


def answers(found: Path, chosen: list[tuple[str, str]]) -> Path:
    for name in {case.partition("-")[0] for case, _ in chosen}:
        tiny_pipelines.save(name, found / name)
    LocalGroup(4).run(partial(on_meshes, found, chosen))
    return found


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return answers(tmp_path_factory.mktemp("denoisers"), usual_cells())


@pytest.fixture(scope="module")
def further(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return answers(tmp_path_factory.mktemp("denoisers"), FURTHER)


@pytest.mark.parametrize(("case", "mesh"), usual_cells())
def test_four_ranks_do_what_one_does(case: str, mesh: str, usual: Path, tmp_path: Path) -> None:
    compare(case, mesh, usual, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(("case", "mesh"), FURTHER)
def test_so_they_do_further_cases(case: str, mesh: str, further: Path, tmp_path: Path) -> None:
    compare(case, mesh, further, tmp_path)


def compare(case: str, mesh: str, folder: Path, tmp_path: Path) -> None:
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
