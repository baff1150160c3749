"""`cosmos check --schema-only` of the largest configuration: what it imports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import tomli_w

from cosmos_core.config.compose import load_pipeline
from tasks.kinds import all_kinds
from tests.unit.config_recipes import CONFIGS
from tests.unit.test_architecture import FORBIDDEN


def size_when_resolved(file: Path) -> int:
    return len(tomli_w.dumps(load_pipeline(file, [], all_kinds()).as_toml()))


def test_the_largest_recipe_is_checked_without_torch(tmp_path: Path) -> None:
    largest = max(CONFIGS.rglob("*.toml"), key=size_when_resolved)
    command = [sys.executable, "-X", "importtime", "-m", "cosmos_core", "check", "--schema-only", str(largest)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith(f"{largest}: ok (")
    imported = {name.partition(".")[0] for name in re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.M)}
    assert imported & {*FORBIDDEN, "prefect", "matplotlib"} == set()
    assert {"pydantic", "tomllib", "cosmos_core"} <= imported
