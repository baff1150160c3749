"""Rows with images on two ranks: loss and gradients of each family are those of one rank.

Of five rows two show no image, two show one and one shows two: a rank has to follow in a batch of which it has no row.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.distributed.matrix import chosen
from tests.distributed.visual import computed, of_families
from tests.local_ranks import LocalGroup
from tests.unit.test_visual_families import prepared
from tests.unit.tiny_vlms import VLMS, save_vlm

USUAL = {"llava", "qwen3-vl", "mllama"}
"""Images as tokens of a square, as tokens of any shape, and read by cross-attention."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    found = tmp_path_factory.mktemp("families")
    names = [VLMS[index] for index in sorted(chosen(request, "test_two_ranks_do_what_one_does"))]
    for name in names:
        prepared(save_vlm(name, found / name / "model"), found / name)
    LocalGroup(2).run(partial(of_families, names, found))
    return found


@pytest.mark.parametrize(
    "index",
    [pytest.param(i, id=name, marks=() if name in USUAL else pytest.mark.full) for i, name in enumerate(VLMS)],
)
def test_two_ranks_do_what_one_does(index: int, folder: Path, tmp_path: Path) -> None:
    name = VLMS[index]
    one = computed(folder / name / "model", folder / name / "stage" / "data", tmp_path)
    two = torch.load(folder / f"{name}.pt")
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-7)
    assert two["evaluated"] == pytest.approx(one["evaluated"], rel=1e-7)
    assert one["gradients"].keys() == two["gradients"].keys()
    assert any("vision" in key or "visual" in key for key in one["gradients"])
    for key, gradient in one["gradients"].items():
        difference = (two["gradients"][key] - gradient).abs().max()
        assert difference <= 1e-6 * gradient.abs().max() + 1e-13, key  # norms are in float32
