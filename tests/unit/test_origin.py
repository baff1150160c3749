"""What a model card says of where a model comes from: the base model and the rows that were used, nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cosmos_core.config.compose import load_pipeline
from cosmos_core.run.lineage import find_model_origin
from tasks.kinds import all_kinds
from tests.conftest import PROGRAMS
from tests.unit.run_folder import make_inputs

GRAPH = """
[policy]
model_name_or_path = "{model}"
[train.train_policy]
type = "sft"
dataset = {{ name = "rows.jsonl" }}
[[pipeline.stages]]
name = "task"
kind = "custom"
entry = "{programs}/counting.py:count"
[[pipeline.stages]]
name = "rows"
kind = "prepare"
[[pipeline.stages]]
name = "first"
kind = "sft"
after = "rows"
data = "stage:rows"
[[pipeline.stages]]
name = "more"
kind = "prepare"
after = "task"
model = "{other}"
data = "stage:task"
[[pipeline.stages]]
name = "second"
kind = "sft"
after = ["first", "more"]
model = "{start}"
data = "stage:more"
[[pipeline.stages]]
name = "export"
kind = "export"
after = "second"
model = "stage:second"
"""


@pytest.mark.parametrize(("start", "expected"), [
    ("stage:first", {"base_model": "./model", "data": ["made by COUNT", "rows.jsonl"]}),
    ("org/model", {"base_model": "org/model", "revision": "main", "data": ["made by COUNT"]}),
    ("stage:task", {"made_by": "COUNT", "data": ["made by COUNT"]}),
])  # fmt: skip
def test_a_model_card_says_what_lineage_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: str, expected: dict[str, object]
) -> None:
    make_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    text = GRAPH.format(model="./model", other="./model", start=start, programs=PROGRAMS)
    if start == "stage:task":
        text = text.replace('after = ["first", "more"]', 'after = ["first", "more", "task"]')
    (tmp_path / "p.toml").write_text(text)
    pipeline = load_pipeline(tmp_path / "p.toml", ["policy.model_revision=main"], all_kinds())
    found = find_model_origin(pipeline, pipeline.stage("export"))
    found = json.loads(
        json.dumps(found).replace(f"{PROGRAMS}/counting.py:count", "COUNT").replace(f"{tmp_path}/", "./")
    )
    assert {**found, "data": sorted(found["data"])} == expected
