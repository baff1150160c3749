"""Three storms of `make storm`, always the same ones; `python -m tests.acceptance.storm` has the rest of them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.storm import Storms
from tests.acceptance.storms import pipelines, shim
from tests.acceptance.storms.commands import Stuck, Watchdog
from tests.acceptance.storms.faults import RESTING, drawn
from tests.conftest import Workspace

pytestmark = pytest.mark.skipif(not shim.has_compiler(), reason="the shim of clock and disk needs a C compiler")


@pytest.fixture(scope="module")
def storms() -> Iterator[Storms]:
    folder = Path(tempfile.mkdtemp(prefix="s"))
    yield Storms(folder)
    shutil.rmtree(folder)
    shim.remove_library()


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_after_a_storm_all_is_as_if_nothing_had_happened(storms: Storms, seed: int) -> None:
    storm = storms.weather(seed, trunk="sft")
    assert not storm.problems, storm


def test_a_storm_that_gains_nothing_is_ended(tmp_path: Path) -> None:
    watchdog = Watchdog(Workspace(tmp_path), tmp_path, seconds=0.0)
    watchdog._looked -= 1
    with pytest.raises(Stuck, match="nothing was gained for 0 s"):
        watchdog.feel()
        watchdog._looked -= 1
        watchdog.feel()


def test_a_seed_always_draws_the_same_storm() -> None:
    from random import Random

    def storm(seed: int) -> tuple[str, list[str]]:
        random = Random(seed)
        return pipelines.draw(random).text(), [drawn(random, RESTING).__name__ for _ in range(20)]

    assert storm(5) == storm(5) != storm(6)
