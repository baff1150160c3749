"""Things found by name: a user's file that failed to import is no module."""

from __future__ import annotations

from pathlib import Path

import pytest

from cosmos_core.registry import import_thing


def test_a_failed_import_is_tried_again(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("first = 1\nraise ValueError('not yet')\nthing = 2\n")
    for _ in range(2):
        with pytest.raises(ValueError, match="not yet"):
            import_thing(f"{file}:first")
    file.write_text("thing = 2\n# another size, as caches go by size and second\n")
    assert import_thing(f"{file}:thing") == 2
