"""A small sample of the ten thousand recipes and thousand others of `tests/acceptance/fuzz.py`: taken, or one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from cosmos_core.data import template_limits
from tests.acceptance import fuzz


def test_recipes_changed_at_random_are_taken_or_refused_in_one_line(tmp_path: Path) -> None:
    tally = fuzz.recipes(tmp_path, 30, seed=1)
    assert not tally.wrong, "\n".join(tally.wrong)
    assert tally.num_taken and tally.num_refused > tally.num_taken
    assert tally.longest_seconds < fuzz.LONGEST_SECONDS


def test_rows_models_and_templates_changed_at_random_are_taken_or_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_limits, "MAX_TEMPLATE_SECONDS", 1.0)
    for name, tally in fuzz.others(tmp_path, 25, seed=1).items():
        assert not tally.wrong, f"{name}: " + "\n".join(tally.wrong)
        assert tally.num_taken and tally.num_refused, name
        assert tally.longest_seconds < fuzz.LONGEST_SECONDS


def test_what_is_wrong_is_noticed() -> None:
    def broken(error: BaseException) -> str:
        raise error

    tally = fuzz.Tally()
    for number, call in enumerate((
        lambda: broken(KeyError("x")), lambda: broken(fuzz.ConfigError("two\nlines")), lambda: "exit 1",
        lambda: broken(fuzz.ConfigError("one line")), lambda: "",
    )):  # fmt: skip
        fuzz.attempt(tally, f"{number}", call)
    assert [wrong.partition(":")[0] for wrong in tally.wrong] == ["0", "1", "2"]
    assert (tally.num_taken, tally.num_refused) == (2, 2)
