"""Parts of the report that say more than one stage does: the run before, rewards, resources, a layout for phones."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from transformers import AutoTokenizer

from cosmos_core.config.difference import _format_differences, flatten_tables
from cosmos_core.observe import report
from cosmos_core.observe.overlay import build_comparison_page
from cosmos_core.observe.previous_run import compare_with_previous
from cosmos_core.observe.record import read_run
from cosmos_core.observe.sections import (
    compute_reward_bins,
    format_stage_metrics,
    make_resource_rows,
    make_sample_table,
    make_summary_cards,
    make_validation_metrics_table,
)
from cosmos_core.observe.trained import decode_sample_rows, list_training_properties
from cosmos_core.run.fingerprint import Fingerprint
from tests.unit.observed_runs import STARTED, Page, finished_run, write, write_lines
from tests.unit.tiny_model import save_tiny_model


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
    found = compare_with_previous(read_run(run))
    assert found is not None and found["run"].path == old
    assert found["settings"] == (("sft.train.epoch", "7", "–"),)
    assert ("eval-grpo", "validation/accuracy", "0.900", "0.705", "worse") in found["metrics"]
    assert f'<p class="note">run {old.name}' in report.build_report(run)
    assert compare_with_previous(read_run(old)) is None and "Compared with the previous run" not in report.build_report(
        old
    )


def test_no_comparison_shows_a_secret_that_has_changed(tmp_path: Path) -> None:
    for number, secret in enumerate(("correct horse", "battery staple"), 1):
        write(tmp_path / f"r{number}" / "run.json", {"pipeline": "x", "started": float(number)})
        settings = f'arguments.api_key = "{secret}"\noverrides.custom.judge.password = "{secret}"\n'
        text = f'[pipeline]\nname = "x"\n[[pipeline.stages]]\nname = "a"\nkind = "custom"\n{settings}'
        (tmp_path / f"r{number}" / "pipeline.toml").write_text(text)
    changed = {"arguments": {"api_key": "correct horse"}}, {"arguments": {"api_key": "battery staple"}}
    old, new = (Fingerprint("f", {"entry": each}) for each in changed)
    shown = [
        report.build_report(tmp_path / "r2"), build_comparison_page([tmp_path / "r1", tmp_path / "r2"]),
        *new.describe_difference(old), *_format_differences("", *map(flatten_tables, changed)),
    ]  # fmt: skip
    assert not any(word in text for text in shown for word in ("horse", "staple"))
    assert all("api_key" in text and "***" in text for text in shown)


def test_a_hundred_metrics_of_a_stage_are_shown_and_those_of_validation_first(tmp_path: Path) -> None:
    file = finished_run(tmp_path) / "stages/sft/result.json"
    metrics = {f"mine/{i}": 1.0 for i in range(100)} | {"validation/loss": 0.5}
    write(file, {**json.loads(file.read_text()), "metrics": metrics})
    [sft] = [stage for stage in read_run(file.parents[2]).stages if stage.name == "sft"]
    shown = format_stage_metrics(sft)
    assert (len(shown), shown[0]) == (100, ("validation/loss", "0.500"))


@pytest.mark.parametrize("name", ["sft", "eval-grpo"])
def test_the_log_prob_difference_is_one_card_and_the_stages_are_those_of_the_graph(tmp_path: Path, name: str) -> None:
    run = finished_run(tmp_path)
    result = json.loads((run / "stages" / name / "result.json").read_text())
    metrics = {**result["metrics"], "rollout/logprob_difference_p95": 4e-6}
    write(run / "stages" / name / "result.json", {**result, "metrics": metrics})
    record = read_run(run)
    shown = make_summary_cards(record)
    assert [value for key, value in shown if "log-prob" in key] == ["≤ 4.0e-06"]
    assert dict(shown)["stages finished"] == "9 of 9" and len(record.stages) == 9
    write(run / "stages" / "report" / "state.json", {"state": "waiting"})
    assert dict(make_summary_cards(read_run(run)))["stages finished"] == "8 of 9"
    (run / "stages" / name / "result.json").unlink()
    write(run / "stages" / name / "progress.json", {"metrics": {"rollout/logprob_difference_p95": None}})
    assert "log-prob difference, p95" not in dict(make_summary_cards(read_run(run)))


def test_the_rewards_of_a_training_are_spread_over_bins_early_and_late(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    lines = [{"step": s, "prompt": "p", "reward": r} for s, r in ((1, 0.0), (2, 0.1), (3, 1.0), (4, 1.0), (4, None))]
    write_lines(run / "stages/grpo/samples.jsonl", lines)
    [grpo] = [stage for stage in read_run(run).stages if stage.name == "grpo"]
    bins = compute_reward_bins(grpo)
    counts = [(each["num_first_half"], each["num_second_half"]) for each in bins]
    assert counts == [(1, 0), (1, 0), *[(0, 0)] * 7, (0, 2)]
    assert (bins[0]["first"], bins[-1]["last"], bins[-1]["high"]) == (50.0, 100.0, 1.0)
    assert report.build_report(run).count('class="range"') == 10


def test_the_page_says_what_each_stage_used(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    write(run / "stages/sft/facts.json", [{"host": "node-3", "gpus": ["NVIDIA H100"], "threads": 8}] * 2)
    write_lines(run / "stages/sft/metrics.jsonl",
                [{"step": s, "throughput/tokens_per_second": 100.0 * s} for s in (1, 2, 3)])  # fmt: skip
    used = {use["stage"].name: use for use in make_resource_rows(read_run(run))}
    assert used["sft"]["gpu_hours"] == pytest.approx(2 * 61 / 3600)
    assert (used["sft"]["tokens_per_second"], used["sft"]["size"]) == (200.0, 3_660_000)
    assert "prepare" not in used, "it was reused"
    page = report.build_report(run)
    assert "node-3 (2 ranks, NVIDIA H100, 8 threads)" in page and ">0.03<" in page


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
    [(stage, facts)] = list_training_properties(read_run(run))
    found = dict(facts)
    assert (stage.name, found["base model"]) == ("sft", "Qwen/Qwen3-0.6B")
    assert found["data"] == "rows.csv, 90 rows, 10 rows held out"
    assert found["learning rate"] == "1e-05, AdamW, cosine decay"
    assert (found["trains"], found["batch"]) == ("LoRA of rank 16", "8 rows, micro-batch 2")
    text = (run / "pipeline.toml").read_text()
    rates = "seed = 0, optm_lr = { global = 1e-5, lm_head = 2e-6 }"
    (run / "pipeline.toml").write_text(text.replace("optm_lr = 1e-5", rates))
    [(_, facts)] = list_training_properties(read_run(run))
    found = dict(facts)
    assert found["learning rate"] == "1e-05 for global, 2e-06 for lm_head, AdamW, cosine decay"
    assert found["seed"] == "0"
    page = report.build_report(run)
    assert "What was trained" in page and "Qwen/Qwen3-0.6B" in page


@pytest.mark.parametrize(
    ("policy", "rewards"),
    [
        ("reward_function = { gsm8k = 1.0, 'a.py:f' = 0.5 }", "gsm8k x 1, a.py:f x 0.5"),
        ("reward_function = { single_choice = 1.0 }, use_remote_reward = true, "
         "remote_reward = { reward_fns = [{ name = 'ocr', weight = 0.5 }] }", "ocr x 0.5 of a reward service"),
        ("reward_function = { single_choice = 1.0 }, datasets = [{ name = 'a', reward_function = { gsm8k = 1.0 } }, "
         "{ name = 'b', reward_function = {} }]", "gsm8k x 1, single_choice x 1"),
    ],
)  # fmt: skip
def test_the_page_names_the_rewards_and_the_weights_that_were_trained(
    tmp_path: Path, policy: str, rewards: str
) -> None:
    run = finished_run(tmp_path)
    text = (run / "pipeline.toml").read_text()
    settings = f"overrides.policy.trainable_map = {{ visual = false }}\noverrides.train.train_policy = {{ {policy} }}\n"
    (run / "pipeline.toml").write_text(text.replace('kind = "rl"\n', f'kind = "rl"\n{settings}'))
    [(_, facts)] = list_training_properties(read_run(run))
    assert (dict(facts)["reward"], dict(facts)["trains"]) == (rewards, "some weights")


@pytest.mark.parametrize("step", [pytest.param(0, marks=pytest.mark.full), 7], ids=["model", "checkpoint"])
def test_what_was_measured_before_the_first_step_is_before_what_was_measured_after(tmp_path: Path, step: int) -> None:
    """A training may start from the checkpoint of another run, at the step of which it is measured."""
    run = finished_run(tmp_path)
    for stage, loss in (("sft", 4.1), ("grpo", 0.45)):
        start = {"step": step, "validation/loss": loss, "time/validate": 1.0}
        write_lines(run / f"stages/{stage}/metrics.jsonl", [start, {"step": step + 1, "loss": 2.0}])
        samples = [{"step": step, "prompt": "2+2?", "completion": f"of {stage}"}]
        write_lines(run / f"stages/{stage}/samples.jsonl", samples)
    names, rows = make_validation_metrics_table(read_run(run))
    assert names == ["eval-base", "before sft", "eval-sft", "before grpo", "eval-grpo"]
    [loss] = [row for row in rows if row["name"] == "loss"]
    assert loss["values"] == [3.1, 4.1, 0.44, 0.45, 0.52] and loss["change"] == "-2.580"
    assert loss["verdict"] == "better" and "before sft" in report.build_report(run)
    columns = make_sample_table(read_run(run))["columns"]
    assert [name for name in columns if name.startswith("before")] == ["before sft", "before grpo"]


def test_the_page_shows_which_tokens_of_a_row_are_learned(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    text = (run / "pipeline.toml").read_text().replace('kind = "sft"\n', 'kind = "sft"\ndata = "stage:prepare"\n')
    (run / "pipeline.toml").write_text(text)
    folder = run / "stages/sft/safetensors/step_40"
    save_tiny_model(folder)
    ids = AutoTokenizer.from_pretrained(folder)
    prompt, response = (ids(part)["input_ids"] for part in ("Two <b> and two?", " Four."))
    columns = {"input_ids": [prompt + response], "loss_mask": [[0] * len(prompt) + [1] * len(response)]}
    assert decode_sample_rows(read_run(run)) == [], "there are no rows yet"
    table = pa.table({**columns, "place": ["rows.csv:1"]})
    (run / "stages/prepare/data").mkdir()
    with pa.ipc.new_file(str(run / "stages/prepare/data/train.arrow"), table.schema) as out:
        out.write_table(table)
    [(stage, row)] = decode_sample_rows(read_run(run))
    assert (stage.name, row) == ("sft", [("Two <b> and two?", False), (" Four.", True)])
    page = report.build_report(run)
    assert '<span>Two &lt;b&gt; and two?</span><span class="learned"> Four.</span>' in page
    Page(page)
    for wrong in ("tokenizer.json", "train.arrow"):
        [file] = run.rglob(wrong)
        whole = file.read_bytes()
        file.write_bytes(whole[:200])
        assert decode_sample_rows(read_run(run)) == [] and "What the loss includes" not in report.build_report(run)
        file.write_bytes(whole)


def test_the_page_names_the_digests_of_data_and_model(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    entry = 'kind = "sft"\n'
    added = f'{entry}data = "stage:prepare"\noverrides.train.epoch = 1\n'
    (run / "pipeline.toml").write_text((run / "pipeline.toml").read_text().replace(entry, added))
    for stage, letters in (("prepare", {"model": "t", "data": "b"}), ("sft", {"model": "a"})):
        file = run / "stages" / stage / "result.json"
        sources = [{"kind": kind, "name": kind, "digest": letter * 64} for kind, letter in letters.items()]
        write(file, {**json.loads(file.read_text()), "sources": sources})
    [(_, facts)] = list_training_properties(read_run(run))
    assert dict(facts)["digest of the model"] == "a" * 12 and dict(facts)["digest of the data"] == "b" * 12


def test_samples_are_filtered_by_their_reward_without_a_script_and_phones_have_a_layout(tmp_path: Path) -> None:
    page = report.build_report(finished_run(tmp_path))
    assert 'name="viewport" content="width=device-width' in page and "@media (max-width: 640px)" in page
    rows = re.findall(r'<tr class="((?:good|bad)[^"]*)"><td class="prompt">', page)
    assert rows.count("good changed") == 11, "nothing was right before; of the twelve shown, one has no valid reward"
    assert re.findall(r'name="samples" class="(\w+)"', page) == ["all", "good", "bad", "changed"]
    assert re.findall(r'name="rollouts-grpo" class="(\w+)"', page) == ["all", "good", "bad"]
    assert "<script" not in page and ".filtered:has(input.bad:checked) tbody tr:not(.bad)" in page


def test_the_page_links_each_log_from_wherever_it_lies(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    for name in ("attempt_1.log", "attempt_2.log"):
        (run / "stages/grpo/logs").mkdir(exist_ok=True)
        (run / "stages/grpo/logs" / name).write_text("a line\n")
    for folder in (run, run / "stages/report"):
        links = [attributes["href"] for tag, attributes in Page(report.build_report(run, folder)).tags if tag == "a"]
        assert [(folder / str(link)).resolve().name for link in links] == ["attempt_1.log", "attempt_2.log"]
        assert all((folder / str(link)).is_file() for link in links)
