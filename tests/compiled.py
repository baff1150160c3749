"""Compiles the files of tests once: processes that begin at the same time would each compile all of them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def compile_tests(config: pytest.Config) -> None:
    """Write what pytest makes of each file of tests to its cache, unless it is there."""
    state = config.stash[rewrite.assertstate_key]
    for file in sorted(Path(__file__).parent.rglob("test_*.py")):
        folder = rewrite.get_cache_dir(file)
        compiled_file = folder / (file.stem + rewrite.PYC_TAIL)
        if rewrite._read_pyc(file, compiled_file) is None and rewrite.try_makedirs(folder):
            with suppress(SyntaxError):  # the process that imports the file reports it
                source_stat, code = rewrite._rewrite_test(file, config)
                rewrite._write_pyc(state, code, source_stat, compiled_file)
