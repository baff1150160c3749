"""Names of flow runs: those that Prefect makes up, and those that a person gives."""

from __future__ import annotations

import pytest
from prefect.utilities.names import generate_slug

from tasks.naming import is_generated_name


def test_a_name_that_prefect_makes_up_is_known() -> None:
    assert [name for name in (generate_slug(2) for _ in range(2000)) if not is_generated_name(name)] == []


@pytest.mark.parametrize(
    "name", ["nightly-eval", "my-run", "before the release", "x", "", "cosmic-", "a-b-c", "grpo-lr-3e-6"]
)
def test_a_name_that_a_person_gives_is_kept(name: str) -> None:
    assert not is_generated_name(name)
