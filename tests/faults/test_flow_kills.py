"""Every diffusion training survives SIGKILL: the same bits as an undisturbed run, a better figure, a proven export."""

from __future__ import annotations

import pytest

from tests.faults.flow_cells import CELLS, Cell, Cells


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Cells:
    return Cells(tmp_path_factory.mktemp("cells"))


@pytest.mark.full
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_killed_training_ends_with_the_same_bits(cells: Cells, cell: Cell) -> None:
    assert cells.run(cell).problems == []
