"""What makes pytest itself cheaper here: it compiles files of tests once, and catches log records at one logger."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import rewrite
from _pytest.logging import catching_logs


def compile_tests(config: pytest.Config) -> None:
    """Write what pytest makes of each file of tests to its cache, unless it is there: processes that begin at the same
    time would each compile all of them."""
    state = config.stash[rewrite.assertstate_key]
    for file in sorted(Path(__file__).parent.rglob("test_*.py")):
        folder = rewrite.get_cache_dir(file)
        compiled_file = folder / (file.stem + rewrite.PYC_TAIL)
        if rewrite._read_pyc(file, compiled_file) is None and rewrite.try_makedirs(folder):
            with suppress(SyntaxError):  # the process that imports the file reports it
                source_stat, code = rewrite._rewrite_test(file, config)
                rewrite._write_pyc(state, code, source_stat, compiled_file)


def catch_logs_of_root() -> None:
    """Let pytest catch log records at the root logger alone. Six times a test it would look through all loggers, and
    add a handler to each that does not propagate: 65 of the 1,300 of the libraries here, which takes 0.6 ms a test."""
    catching_logs.__enter__ = _enter  # type: ignore[method-assign]


def _enter(self: catching_logs[Any]) -> Any:
    root = logging.getLogger()
    if self.level is not None:
        self.handler.setLevel(self.level)
        self.orig_level = root.level
        root.setLevel(min(root.level, self.level))
    root.addHandler(self.handler)
    self.attached_loggers.append(root)
    return self.handler
