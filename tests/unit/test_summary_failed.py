"""What a run that failed ends with."""

from __future__ import annotations

import json
from pathlib import Path

from tests.unit.test_observe_run import STARTED, finished_run, summary, write


def test_a_failed_run_does_not_end_with_the_model_that_it_began_from(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    for name in ("grpo", "export"):
        (run / "stages" / name / "result.json").unlink()
    failed = {"state": "failed", "error": "boom", "spans": [[STARTED, STARTED + 1]]}
    write(run / "stages" / "grpo" / "state.json", failed)
    text = summary(run)
    assert "failed after" in text and "load it with" not in text and "\nmodel" not in text
    made = run / "stages/sft/safetensors/step_40"
    made.mkdir(parents=True)
    assert any(line.startswith("model of stage 'sft'") and str(made) in line for line in summary(run).splitlines())


def test_a_model_that_a_gate_refused_is_not_offered_and_one_that_it_did_not_judge_is(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    pipeline = run / "pipeline.toml"
    other = '[[pipeline.stages]]\nname = "other"\nkind = "sft"\nafter = ["prepare"]\n'
    pipeline.write_text(pipeline.read_text() + other)
    refused = {"state": "failed", "exit_code": 65, "error": "too low", "spans": [[STARTED, STARTED + 1]]}
    write(run / "stages" / "gate" / "state.json", refused)
    for name in ("gate", "export"):
        (run / "stages" / name / "result.json").unlink()
    sft = json.loads((run / "stages" / "sft" / "result.json").read_text())
    write(run / "stages" / "other" / "result.json", {**sft, "name": "other"})
    for name, step in (("sft", 40), ("grpo", 80), ("other", 40)):
        (run / "stages" / name / "safetensors" / f"step_{step}").mkdir(parents=True)
    text = summary(run)
    assert [line.split()[3] for line in text.splitlines() if "safetensors" in line] == ["'other'"]
    assert "refused after" in text and "✗ refused" in text and "failed" not in text
