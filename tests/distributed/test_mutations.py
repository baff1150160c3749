"""The matrix notices what it is there for: with one thing broken, its comparison fails."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.distributed.matrix import computed
from tests.distributed.mutations import MUTATIONS, run_broken
from tests.distributed.test_invariance import BAR, compare
from tests.local_ranks import LocalGroup
from tests.unit.tiny_families import save_family


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in {mutation.case.model for mutation in MUTATIONS.values()}:
        save_family(name, folder / name)
    return folder


@pytest.fixture(scope="module")
def answers(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answers")
    LocalGroup(2).run(partial(run_broken, models, folder))
    return folder


@pytest.mark.full
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_comparison_fails_when(name: str, answers: Path, models: Path, tmp_path: Path) -> None:
    expected = computed(replace(MUTATIONS[name].case, mesh=()), models, tmp_path)
    compare(expected, torch.load(answers / f"{name}, whole.pt"), BAR["float64"])
    with pytest.raises(AssertionError):
        compare(expected, torch.load(answers / f"{name}, broken.pt"), BAR["float64"])
