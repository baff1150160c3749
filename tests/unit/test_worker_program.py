"""What the program of a worker makes of the ways in which a user's function may end."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from cosmos_core.errors import ProgramError
from cosmos_core.worker import program


def test_a_function_that_exits_as_a_script_does_is_one_line() -> None:
    """Otherwise the log alone tells why the stage has crashed, or that it wrote no result."""
    stage: Any = SimpleNamespace(name="mine", config=SimpleNamespace(entry="mine.py:main", arguments={}))
    for code in (0, "no rows left"):
        with pytest.raises(ProgramError, match=f"^stage 'mine': mine.py:main exited with {code!r} instead of"):
            program._call_program(lambda _, code=code: sys.exit(code), stage)
