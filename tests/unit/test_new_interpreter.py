"""The interpreter that reads an export as a user's process would."""

from __future__ import annotations

import sys

from cosmos_core.models.new_interpreter import open_interpreter_pool, prestart_interpreter

MODULE = "wave"  # of the standard library, and imported by nothing else


def is_imported() -> bool:
    """Whether this interpreter has imported the module."""
    return MODULE in sys.modules


def test_one_that_was_started_early_has_imported_its_module_and_serves_one_export() -> None:
    with open_interpreter_pool():  # a training of another test may have started one and stopped before its export
        pass
    for _ in range(2):
        prestart_interpreter(MODULE)
    assert not is_imported()
    answers = []
    for _ in range(2):
        with open_interpreter_pool() as pool:
            answers.append(pool.schedule(is_imported).result())
    assert answers == [True, False]
