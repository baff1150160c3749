"""A small sample of the two thousand cases of `tests/acceptance/promise.py`: what the check lets pass, runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance import promise


@pytest.mark.parametrize("count", [5, pytest.param(300, marks=pytest.mark.full)])
def test_what_the_check_lets_pass_reaches_its_first_step_and_its_export(count: int, tmp_path: Path) -> None:
    found = promise.promises(tmp_path, count)
    said = f"seed {promise.SEED}, {count} cases: {found.num_kept} ran, {sum(found.refused.values())} were refused"
    assert not found.broken, "\n".join([said, *found.broken])
    assert found.num_kept >= count // 5 and found.counts[0] == count, said
