"""The page about stages: its blocks are one pipeline with every kind of stages, which runs to its end."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cosmos_core.config.compose import load_pipeline
from cosmos_core.run.manifest import read_result
from tasks.kinds import all_kinds
from tests.conftest import Workspace
from tests.unit.benchmark_tasks import write_tasks
from tests.unit.tiny_model import save_tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "stages.md"
MINE = """
from cosmos_core.types import Outcome

def count(stage, letters):
    return Outcome(metrics={"letters": float(len(letters))})
"""


def pipeline() -> str:
    return "\n".join(re.findall(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))


def test_the_page_has_an_example_and_a_section_of_each_kind(tmp_path: Path) -> None:
    file = tmp_path / "all.toml"
    file.write_text(pipeline())
    kinds = {stage.kind for stage in load_pipeline(file, [], all_kinds()).stages}
    assert kinds == set(all_kinds()) == set(re.findall(r"^## (\S+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.full
def test_the_examples_of_the_page_run_to_their_end(workspace: Workspace) -> None:
    workspace.write("all.toml", pipeline())
    workspace.write("reward.py", "def letters(completion, **_):\n    return len(set(completion)) / 40\n")
    workspace.write("mine.py", MINE)
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    workspace.write("rows.jsonl", f"{json.dumps({'messages': turns})}\n" * 8)
    workspace.write("prompts.jsonl", "".join(f'{{"prompt": "say {i}"}}\n' for i in range(8)))
    save_tiny_model(workspace.path / "model")
    write_tasks(workspace.path / "benchmarks")
    workspace.cosmos("run", "all.toml", timeout=900)
    [run] = (workspace.path / "outputs").iterdir()
    assert all(read_result(path) for path in (run / "stages").iterdir())
    assert list(workspace.path.glob("published/*/model.safetensors"))
