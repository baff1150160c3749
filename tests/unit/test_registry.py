"""Things found by name: a user's file that failed to import is no module."""

from __future__ import annotations

from pathlib import Path

import pytest

from cosmos_core.errors import ConfigError
from cosmos_core.registry import code_file, import_thing


def test_a_failed_import_is_tried_again(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("first = 1\nraise ValueError('not yet')\nthing = 2\n")
    for _ in range(2):
        with pytest.raises(ValueError, match="not yet"):
            import_thing(f"{file}:first")
    file.write_text("thing = 2\n# another size, as caches go by size and second\n")
    assert import_thing(f"{file}:thing") == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def makes(stage): ...", "has no 'make'; did you mean 'makes'?"),
        ("class Other:\n    def make(self): ...", "has no 'make'; known: Other"),
        ("", "has no 'make'"),
        ("if True:\n    make = print", ""),
        ("from shutil import move as make", ""),
        ("from shutil import *", ""),
        ("def __getattr__(name): ...", ""),
        ("def make(:", ""),
    ],
)
def test_code_that_has_nothing_of_the_name_is_found_without_running_it(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    if not said:
        assert code_file(f"{file}:make") == file
        return
    with pytest.raises(ConfigError) as caught:
        code_file(f"{file}:make")
    assert str(caught.value) == f"'{file}:make': {file} {said}"
