"""Parts of the report that say more than one stage does: the run before, rewards, resources, a layout for phones."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from cosmos_core.observe import report
from cosmos_core.observe.previous_run import before
from cosmos_core.observe.record import read_run
from cosmos_core.observe.sections import cards, comparison
from cosmos_core.observe.trained import trained
from cosmos_core.observe.usage import resources, reward_bins
from tests.unit.observed_runs import STARTED, finished_run, write, write_lines


def test_the_page_sets_the_run_beside_the_one_before_it(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    old = tmp_path / "20251008085320"
    shutil.copytree(run, old)
    facts = json.loads((old / "run.json").read_text())
    write(old / "run.json", {**facts, "run_id": old.name, "started": STARTED - 86400})
    text = (old / "pipeline.toml").read_text()
    entry = 'name = "sft"\nkind = "sft"\n'
    (old / "pipeline.toml").write_text(text.replace(entry, f"{entry}overrides.train.epoch = 7\n"))
    result = json.loads((old / "stages/eval-grpo/result.json").read_text())
    write(old / "stages/eval-grpo/result.json", {**result, "metrics": {"validation/accuracy": 0.9}})
    found = before(read_run(run))
    assert found is not None and found.run.path == old
    assert found.settings == (("sft.train.epoch", "7", "–"),)
    assert ("eval-grpo", "validation/accuracy", "0.900", "0.705", "worse") in found.metrics
    assert f'<p class="note">run {old.name}' in report.build(run)
    assert before(read_run(old)) is None and "Beside the run before" not in report.build(old)


@pytest.mark.parametrize("name", ["sft", "eval-grpo"])
def test_the_log_prob_difference_is_one_card_and_the_stages_are_those_of_the_graph(tmp_path: Path, name: str) -> None:
    run = finished_run(tmp_path)
    result = json.loads((run / "stages" / name / "result.json").read_text())
    metrics = {**result["metrics"], "rollout/logprob_difference_p95": 4e-6}
    write(run / "stages" / name / "result.json", {**result, "metrics": metrics})
    record = read_run(run)
    shown = cards(record)
    assert [value for key, value in shown if "log-prob" in key] == ["≤ 4.0e-06"]
    assert dict(shown)["stages finished"] == "9 of 9" and len(record.stages) == 9
    write(run / "stages" / "report" / "state.json", {"state": "waiting"})
    assert dict(cards(read_run(run)))["stages finished"] == "8 of 9"


def test_the_rewards_of_a_training_are_spread_over_bins_early_and_late(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    lines = [{"step": s, "prompt": "p", "reward": r} for s, r in ((1, 0.0), (2, 0.1), (3, 1.0), (4, 1.0), (4, None))]
    write_lines(run / "stages/grpo/samples.jsonl", lines)
    [grpo] = [stage for stage in read_run(run).stages if stage.name == "grpo"]
    bins = reward_bins(grpo)
    assert [(each.num_first, each.num_last) for each in bins] == [(1, 0), (1, 0), *[(0, 0)] * 7, (0, 2)]
    assert (bins[0].first, bins[-1].last, bins[-1].high) == (50.0, 100.0, 1.0)
    assert report.build(run).count('class="range"') == 10


def test_the_page_says_what_each_stage_used(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    write(run / "stages/sft/facts.json", [{"host": "node-3", "gpus": ["NVIDIA H100"], "threads": 8}] * 2)
    write_lines(run / "stages/sft/metrics.jsonl",
                [{"step": s, "throughput/tokens_per_second": 100.0 * s} for s in (1, 2, 3)])  # fmt: skip
    used = {use.stage.name: use for use in resources(read_run(run))}
    assert used["sft"].gpu_hours == pytest.approx(2 * 61 / 3600)
    assert (used["sft"].tokens_per_second, used["sft"].size) == (200.0, 3_660_000)
    assert "prepare" not in used, "it was reused"
    page = report.build(run)
    assert "node-3 (2 ranks, NVIDIA H100, 8 threads)" in page and ">0.03<" in page


def test_the_page_has_a_layout_for_phones_and_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = report.build(finished_run(tmp_path))
    assert 'name="viewport" content="width=device-width' in page
    assert "@media (max-width: 640px)" in page
    assert not re.search(r"(src|href)=.?(https?:)?//", page)


def test_the_page_says_what_was_trained_from_what_and_how(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    text = (run / "pipeline.toml").read_text()
    settings = (
        'overrides.policy = { model_name_or_path = "Qwen/Qwen3-0.6B", lora = { r = 16 } }\n'
        "overrides.train = { optm_lr = 1e-5, optm_name = 'AdamW', optm_decay_type = 'cosine', epoch = 3, "
        "train_batch_per_replica = 8, train_policy = { type = 'sft', mini_batch = 2 } }\n"
    )
    text = text.replace('kind = "sft"\n', f'kind = "sft"\ndata = "stage:prepare"\n{settings}')
    rows = "overrides.train.train_policy.dataset.name = 'rows.csv'\n"
    (run / "pipeline.toml").write_text(text.replace('kind = "prepare"\n', f'kind = "prepare"\n{rows}'))
    write(run / "stages/prepare/data/statistics.json", {"train": {"rows": 90}, "validation": {"rows": 10}})
    [(stage, facts)] = trained(read_run(run))
    found = dict(facts)
    assert (stage.name, found["base model"]) == ("sft", "Qwen/Qwen3-0.6B")
    assert found["data"] == "rows.csv, 90 rows, 10 rows held out"
    assert found["learning rate"] == "1e-05, AdamW, cosine decay"
    assert (found["trains"], found["batch"]) == ("LoRA of rank 16", "8 rows, micro-batch 2")
    page = report.build(run)
    assert "What was trained" in page and "Qwen/Qwen3-0.6B" in page


def test_what_was_measured_before_the_first_step_is_before_what_was_measured_after(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    start = {"step": 0, "validation/loss": 4.1, "time/validate": 1.0}
    write_lines(run / "stages/sft/metrics.jsonl", [start, {"step": 1, "loss": 2.0}])
    names, rows = comparison(read_run(run))
    assert names == ["before sft", "eval-base", "eval-sft", "eval-grpo"]
    [loss] = [row for row in rows if row["name"] == "loss"]
    assert loss["values"] == [4.1, 3.1, 0.44, 0.52] and loss["change"] == "-3.580"
    assert loss["verdict"] == "better" and "before sft" in report.build(run)
