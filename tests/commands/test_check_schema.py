"""`cosmos check --schema-only` of the largest configuration: what it imports, and how long it takes."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tomli_w

from cosmos_core.config.compose import load_pipeline
from tasks.kinds import all_kinds
from tests.unit.config_recipes import CONFIGS
from tests.unit.test_architecture import FORBIDDEN


def size_when_resolved(file: Path) -> int:
    return len(tomli_w.dumps(load_pipeline(file, [], all_kinds()).as_toml()))


def test_the_largest_recipe_is_checked_without_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    largest = max(CONFIGS.rglob("*.toml"), key=size_when_resolved)
    command = [sys.executable, "-X", "importtime", "-m", "cosmos_core", "check", "--schema-only", str(largest)]
    began = time.perf_counter()
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    seconds = time.perf_counter() - began
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(f"{largest}: ok (")
    imported = {name.partition(".")[0] for name in re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.M)}
    assert imported & {*FORBIDDEN, "prefect", "matplotlib"} == set()
    assert {"pydantic", "tomllib", "cosmos_core"} <= imported
    with capsys.disabled():  # not asserted: other work on the machine counts too
        sys.stdout.write(f"\n{largest.name}, {size_when_resolved(largest)} bytes resolved: {seconds:.2f} s\n")
