"""The report page and the printed summary, from run directories written here by hand."""

from __future__ import annotations

import io
import json
import re
import time
from pathlib import Path

import pytest
from markupsafe import escape

from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.observe import report
from cosmos_core.observe.console import print_status, print_summary
from cosmos_core.observe.record import compute_busy_seconds, read_run, render_loading_code
from cosmos_core.run.stage import Stage
from cosmos_core.run.state import read_state
from tasks.kinds import all_kinds
from tests.unit.observed_runs import (
    HOSTILE,
    STAGES,
    STARTED,
    Page,
    failed_run,
    finished_run,
    write,
    write_pipeline,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, which no test changes."""
    return finished_run(tmp_path_factory.mktemp("runs"), has_curves=True)


@pytest.fixture(scope="module")
def source(run: Path) -> str:
    """Its page."""
    return report.build_report(run)


def summary(run: Path) -> str:
    out = io.StringIO()
    print_summary(run, stream=out)
    return out.getvalue()


def test_the_page_of_a_finished_run_is_well_formed_loads_nothing_and_runs_no_script(source: str) -> None:
    assert str(escape(HOSTILE)) in source
    page = Page(source)
    assert 'alert("no")</script> & <b>4</b>' in page.text, "a completion is shown as it is"
    for tag, attributes in page.tags:
        assert tag not in {"script", "link", "img", "iframe", "object", "base"}
        for name, value in attributes.items():
            assert not name.startswith("on")
            assert not (name in {"src", "href", "xlink:href"} and not str(value).startswith("#")), (tag, name, value)
    assert "http://" not in source and "https://" not in source and "@import" not in source and "url(h" not in source
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_the_page_says_title_outcome_metrics_gates_model_and_lineage(run: Path, source: str) -> None:
    text = Page(source).text
    assert "arithmetic-demo done run 20251009085320 · " in text
    assert "accuracy 0.015 → 0.705" in text
    assert "accuracy 0.015 0.405 0.400 0.705 +0.690" in text and "loss 3.100 0.440 – 0.520 -2.580" in text
    assert "gate validation/accuracy >= 0.6 0.705 – passed" in text
    assert "gate validation/loss <= 0.5 0.520 – not met" in text
    model = run / "stages" / "export" / "safetensors" / "step_80"
    assert str(model) in text and f"model = AutoModelForCausalLM.from_pretrained({str(model)!r})" in text
    assert "sft prepare d-prepare0 d-sft00000 2 files, 3.7 MB" in text
    assert "reused from /runs/earlier/stages/prepare" in text
    assert "What is 17 + 35? reference: 52 0 7 7 2" in text and "17 + 35 = 52 reward 1.000" in text
    assert "no valid reward" in text and "The first 12 of 20 prompts" in text
    assert "crashed signal 9; retried in 2 s" in text and "cosmos run a b.toml" in text
    assert "torch 2.13.0" in text and "stages finished 9 of 9" in text


def test_the_graph_has_a_box_a_stage_and_an_arrow_a_dependency(source: str) -> None:
    page = Page(source)
    classes = [str(attributes.get("class")) for tag, attributes in page.tags if tag == "g"]
    boxes = [name for name in classes if name.startswith("box ")]
    arrows = [attributes for tag, attributes in page.tags if tag == "path" and "marker-end" in attributes]
    assert len(boxes) == len(STAGES) and boxes.count("box state-reused") == 1 and boxes.count("box state-done") == 7
    assert len(arrows) == sum(len(after) for _, _, after, *_ in STAGES)


def test_no_two_boxes_of_the_graph_overlap_and_arrows_go_right(source: str) -> None:
    found = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="(\d+)" height="(\d+)" rx="8"', source)
    boxes = [tuple(map(float, numbers)) for numbers in found]
    assert len(boxes) == len(STAGES)
    for i, (x, y, width, height) in enumerate(boxes):
        for other_x, other_y, *_ in boxes[:i]:
            assert abs(x - other_x) >= width or abs(y - other_y) >= height
    for path in re.findall(r'<path class="edge" d="([^"]+)"', source):
        words = path.split()
        assert float(words[-2]) > float(words[0].removeprefix("M"))


def test_a_run_that_failed_half_way_still_has_a_page(tmp_path: Path) -> None:
    source = report.build_report(failed_run(tmp_path))
    text = Page(source).text
    assert "arithmetic-demo failed" in text and 'sft: boom <script>alert("no")' in text
    assert "<script" not in source and text.count("waiting") >= 7 and "Before and after" not in text
    assert 'class="curve"' in source


def test_an_empty_folder_and_a_missing_pipeline_have_a_page(tmp_path: Path) -> None:
    assert "pipeline running" in Page(report.build_report(tmp_path / "nothing")).text
    run = finished_run(tmp_path)
    (run / "pipeline.toml").write_text("[pipeline\n")
    assert "eval-grpo" in Page(report.build_report(run)).text


def test_the_report_stage_writes_the_page_into_the_stage_and_the_run(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    path = run / "stages" / "report"
    config = StageConfig(name="report", kind="report")
    outcome = report.run(Stage(path, config, Recipe(), "", None, {}, "f", kind=all_kinds()["report"]))
    assert outcome.outputs == ("report.html",) and outcome.info == {"report": str(run / "report.html")}
    assert (path / "report.html").read_text() == (run / "report.html").read_text()
    assert "this page" in Page((run / "report.html").read_text()).text


def test_the_page_says_on_which_machines_the_ranks_ran(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    ranks = [{"host": f"node-{i // 2}", "gpus": ["H100", "H100"], "threads": 16, "versions": {}} for i in range(4)]
    write(run / "stages" / "grpo" / "facts.json", ranks)
    write(run / "stages" / "sft" / "facts.json", [{"host": "head", "gpus": [], "threads": 2, "versions": {}}])
    text = Page(report.build_report(run)).text
    assert "on node-0 (2 ranks, H100, 16 threads); node-1 (2 ranks, H100, 16 threads)" in text
    assert "on head (1 rank, cpu, 2 threads)" in text


def test_worker_time_of_parallel_stages_is_not_counted_twice_and_that_of_an_earlier_command_not_at_all(
    run: Path,
) -> None:
    covered = {begins + second for _, _, _, begins, seconds, *_ in STAGES for second in range(int(seconds))}
    assert compute_busy_seconds(read_run(run), STARTED) == len(covered) == 240
    assert compute_busy_seconds(read_run(run), STARTED + 219) == 16 + 11


def test_a_pause_before_a_resume_is_neither_time_of_the_stage_nor_overhead(tmp_path: Path) -> None:
    run = tmp_path / "20251009101500"
    write_pipeline(run)
    killed = {"state": "running", "attempt": 1, "spans": [[STARTED, None]], "heartbeat": STARTED + 5}
    write(run / "stages" / "sft" / "state.json", killed)
    before = read_state(run / "stages" / "sft").list_attempt_times(STARTED + 3600)
    assert before == [(STARTED, STARTED + 5)], "a launcher that was killed closed nothing"
    done = {"state": "done", "attempt": 2, "spans": [*before, (STARTED + 3600, STARTED + 3607)]}
    write(run / "stages" / "sft" / "state.json", {**done, "ended": STARTED + 3607})
    record = read_run(run)
    stage = next(stage for stage in record.stages if stage.name == "sft")
    assert stage.seconds == 12
    assert (compute_busy_seconds(record, STARTED), compute_busy_seconds(record, STARTED + 3600)) == (12, 7)


def test_the_summary_says_why_rows_were_skipped(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    result = json.loads((run / "stages" / "prepare" / "result.json").read_text())
    notice = "train: 3 of 10 rows skipped: 3 of an unknown role (first: rows.jsonl:2)"
    write(run / "stages" / "prepare" / "result.json", {**result, "info": {"notices": [notice]}})
    assert f"prepare: {notice}" in summary(run)


def test_the_summary_names_stages_overhead_model_and_loading_line(run: Path) -> None:
    lines = [line.rstrip() for line in summary(run).splitlines()]
    model = run / "stages" / "export" / "safetensors" / "step_80"
    assert lines[0] == "arithmetic-demo  20251009085320  done after 4m09s"
    assert lines[1].split() == ["stage", "state", "time", "metrics"]
    assert lines[2].split() == ["prepare", "≡", "reused", "rows", "20,000"]
    assert next(line for line in lines if line.startswith("grpo ")).split() == [
        "grpo", "✓", "done", "2m23s", "reward", "0.710", "loss", "-0.002"
    ]  # fmt: skip
    assert "time inside stage workers  4m00s" in lines and "orchestration overhead     8.6s" in lines
    assert f"model                      {model}" in lines
    assert f"load it with               {render_loading_code(model)}" in lines
    assert f"try it with                cosmos try {run}" in lines


def test_the_command_that_tries_a_model_can_be_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished_run(tmp_path / "my runs")
    monkeypatch.chdir(tmp_path)
    assert f"cosmos try 'my runs/{run.name}'" in summary(run)


def test_no_command_is_proposed_for_a_pipeline_of_videos_which_it_would_refuse(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    index = run / "stages" / "export" / "safetensors" / "step_80" / "model_index.json"
    for denoiser, is_tried in (("SD3Transformer2DModel", True), ("SanaVideoTransformer3DModel", False)):
        write(index, {"_class_name": "A", "transformer": ["diffusers", denoiser]})
        assert ("try it with" in summary(run)) == is_tried and "DiffusionPipeline" in summary(run)


def test_overhead_is_one_figure_on_the_console_and_on_the_page(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    write(run / "locks" / "holder.json", {"since": STARTED - 12})  # when the command was typed: the run began later
    assert "done after 4m21s" in summary(run) and "orchestration overhead     21s" in summary(run)
    assert re.search(r"overhead\s+21s|21s\s+overhead", Page(report.build_report(run)).text)


def test_the_loading_line_is_python_that_names_the_folder() -> None:
    line = render_loading_code(Path("/some where/it's"))
    compile(line, "line", "exec")
    assert line.endswith('from_pretrained("/some where/it\'s")')


def test_the_summary_of_a_failed_run_says_why(tmp_path: Path) -> None:
    text = summary(failed_run(tmp_path))
    assert f"sft: boom {HOSTILE}" in text and "failed after" in text


def test_status_shows_kind_attempt_and_step_of_a_running_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finished_run(tmp_path)
    grpo = run / "stages" / "grpo"
    write(grpo / "state.json", {"state": "running", "attempt": 2, "spans": [[time.time() - 100, None]]})
    progress = {"phase": "step", "step": 12, "total": 80, "metrics": {"reward/mean": 0.5}}
    write(grpo / "progress.json", progress)
    (grpo / "result.json").unlink()
    stage = next(stage for stage in read_run(run).stages if stage.name == "grpo")
    assert (stage.status, stage.state.attempt, stage.step_and_total) == ("running", 2, (12, 80))
    assert stage.metrics == {"reward/mean": 0.5}
    out = io.StringIO()
    print_status(run, stream=out)
    line = next(line for line in out.getvalue().splitlines() if line.startswith("grpo"))
    assert line.split() == ["grpo", "rl", "▶", "running", "2", "12/80", "1m40s", "reward", "0.500"]
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_status(run, stream=out)
    assert re.search(r"^grpo.*▶ running\S* +12/80 +1m40s +reward 0.500", out.getvalue(), re.MULTILINE)


def test_a_graph_with_many_paths_is_read_at_once(tmp_path: Path) -> None:
    stages = [f'[[pipeline.stages]]\nname = "s{i}"\nafter = {[f"s{j}" for j in range(i)]}\n' for i in range(40)]
    (tmp_path / "pipeline.toml").write_text("[pipeline]\n" + "".join(stages))
    assert [stage.depth for stage in read_run(tmp_path).stages] == list(range(40))


def test_a_flow_in_python_of_a_thousand_stages_in_a_row_is_read(tmp_path: Path) -> None:
    stages = [f'[[pipeline.stages]]\nname = "s{i}"\nafter = ["s{i - 1}"]\n' for i in range(1200)]
    (tmp_path / "pipeline.toml").write_text("[pipeline]\n" + "".join(reversed(stages)))
    assert [stage.depth for stage in read_run(tmp_path).stages] == list(range(1200))


def test_stages_come_after_what_they_wait_for(run: Path) -> None:
    names = [stage.name for stage in read_run(run).stages]
    for name, _, after, *_ in STAGES:
        assert all(names.index(other) < names.index(name) for other in after)


@pytest.mark.parametrize("is_done", [False, True], ids=["running", "done"])
def test_status_and_summary_name_the_best_step_by_validation(tmp_path: Path, is_done: bool) -> None:
    run = tmp_path / "20251009101500"
    write_pipeline(run)
    best = {"step": 20, "metric": "validation/loss", "value": 0.5125}
    sft = run / "stages" / "sft"
    write(sft / "state.json", {"state": "done" if is_done else "running", "attempt": 1, "spans": [[STARTED, None]]})
    if is_done:
        write(sft / "result.json", {
            "name": "sft", "kind": "sft", "fingerprint": "f", "metrics": {"loss": 0.7}, "info": {"best": best},
            "inputs": {}, "outputs": [], "digest": "d", "reused_from": None,
        })  # fmt: skip
    else:
        write(sft / "best.json", best)
    out = io.StringIO()
    print_status(run, stream=out)
    assert (out.getvalue() + summary(run)).count("best held-out loss 0.512 at step 20") == 2
