"""Commands that look at runs: the list, two side by side, the page, following, and clearing up after a dead flow."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cosmos_core.cli import app
from cosmos_core.config.compose import load_pipeline
from cosmos_core.errors import ConfigError
from cosmos_core.observe import overlay
from cosmos_core.observe.record import read_run
from cosmos_core.observe.runs import _compare_stage_metrics, is_run_inactive, make_run_table
from cosmos_core.run import directory
from cosmos_core.run.directory import claim_run, create_run
from cosmos_core.run.files import write_json
from cosmos_core.run.manifest import commit_manifest
from cosmos_core.run.state import read_state, update_state
from cosmos_core.types import Outcome
from tasks.kinds import all_kinds
from tasks.stage import run_stage
from tests.conftest import PROGRAMS
from tests.unit.observed_runs import Page, finished_run

PIPELINE = f"""
[pipeline]
name = "counting"
output_dir = "OUTPUTS"
threads = 1

[[pipeline.stages]]
name = "first"
kind = "custom"
entry = "{PROGRAMS}/counting.py:count"
arguments = {{ steps = 2, seconds = 0 }}
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with two runs that differ in a setting."""
    folder = tmp_path_factory.mktemp("runs")
    file = folder / "counting.toml"
    file.write_text(PIPELINE.replace("OUTPUTS", str(folder / "outputs")))
    for name, steps in (("one", 2), ("two", 4)):
        setting = f"first.arguments={{steps={steps}, seconds=0}}"
        run_stage(create_run(load_pipeline(file, [setting], all_kinds()), run_id=name), "first")
    yield folder / "outputs"


def said(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output + str(done.exception)
    return done.output


def test_a_flow_in_python_is_checked_when_it_runs() -> None:
    done = CliRunner().invoke(app, ["check", "flow.py:main"])
    assert isinstance(done.exception, ConfigError) and "flow.py:main is a flow in Python" in str(done.exception)


def test_an_unknown_gpu_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text('[policy]\nmodel_name_or_path = "./none"\n')
    done = CliRunner().invoke(app, ["plan", str(tmp_path / "r.toml"), "--on", "h1000"])
    assert isinstance(done.exception, ConfigError) and "--on h1000: known are" in str(done.exception)


def test_a_tilde_behind_an_equals_sign_is_the_home_of_the_user(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(outputs.parent))
    assert said("runs", "--output-dir=~/outputs") == said("runs", "--output-dir", str(outputs))


def test_a_folder_without_runs_is_an_error_because_its_name_may_be_misspelt(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["runs", "--output-dir", str(tmp_path / "outpust")])
    assert isinstance(done.exception, ConfigError) and "no run at all in" in str(done.exception)


def test_runs_lists_them_once_the_newest_last(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, paths = directory.read_start_info, list[Path]()
    monkeypatch.setattr(directory, "read_start_info", lambda path: paths.append(path) or read(path))
    lines = [line for line in said("runs", "--output-dir", str(outputs)).splitlines() if "counting" in line]
    assert [line.split()[1] for line in lines] == ["one", "two"]
    assert all("1/1" in line for line in lines) and "count 4" in lines[1]
    assert sorted(path.name for path in paths) == ["one", "two"]
    assert " one " not in said("runs", "--output-dir", str(outputs), "--most", "1")


def test_runs_shows_what_was_measured_and_not_the_size_of_the_export(tmp_path: Path) -> None:
    stages = "".join(
        f'[[pipeline.stages]]\nname = "{name}"\nkind = "custom"\nentry = "{PROGRAMS}/counting.py:count"\n'
        for name in "ab"
    )
    (tmp_path / "p.toml").write_text(f'[pipeline]\nname = "p"\noutput_dir = "{tmp_path}/outputs"\n{stages}')
    run = create_run(load_pipeline(tmp_path / "p.toml", (), all_kinds()), run_id="one")
    for name, metrics in {"a": {"validation/loss": 0.5}, "b": {"export/bytes": 7.0}}.items():
        run.stage_path(name).mkdir(parents=True)
        commit_manifest(run.stage_path(name), Outcome(metrics=metrics), kind="custom", fingerprint="f", inputs={})
    [row] = make_run_table(run.path.parent, 1).columns[-1].cells
    assert row == "held-out loss 0.5"


def test_a_name_in_brackets_is_shown_as_it_is(tmp_path: Path) -> None:
    text = PIPELINE.replace("OUTPUTS", str(tmp_path / "outputs")).replace('"counting"', '"counting [ab] :x: [/b]"')
    (tmp_path / "p.toml").write_text(text)
    run = create_run(load_pipeline(tmp_path / "p.toml", [], all_kinds()), run_id="one")
    shown = [said("runs", *arguments, "--output-dir", str(run.output_dir)) for arguments in ((), ("--cost",))]
    for output in (*shown, said("status", str(run.path)), said("plan", str(tmp_path / "p.toml"))):
        assert "counting [ab] :x: [/b]" in output


def test_compare_shows_settings_and_metrics_that_differ(outputs: Path) -> None:
    text = said("compare", "one", "two", "--output-dir", str(outputs))
    assert "arguments.steps: 2 -> 4" in text
    assert re.search(r"first\s*│\s*count\s*│\s*2\s*│\s*4\s*│\s*\+2\s*│", text), text
    assert "the settings are the same" in said("compare", "one", "one", "--output-dir", str(outputs))


def test_a_run_that_is_the_newest_is_compared_with_no_other(outputs: Path) -> None:
    assert "arguments.steps: 2 -> 4" in said("compare", "one", "--output-dir", str(outputs))
    with pytest.raises(ConfigError, match="two is the newest run; name another one too"):
        CliRunner().invoke(app, ["compare", "two", "--output-dir", str(outputs)], catch_exceptions=False)


def test_samples_of_a_run_without_completions_says_which_stages_have_some(outputs: Path) -> None:
    with pytest.raises(ConfigError, match=r"one: no completions; stages with some: none, .* cosmos try one"):
        CliRunner().invoke(app, ["samples", "one", "--output-dir", str(outputs)], catch_exceptions=False)


def test_compare_lays_the_curves_of_several_runs_over_each_other_in_one_page(tmp_path: Path) -> None:
    first = finished_run(tmp_path, has_curves=True)
    text = (first / "pipeline.toml").read_text()
    for name, rate in (("second", "1e-4"), ("third", "1e-5")):
        shutil.copytree(first, tmp_path / name)
        entry = 'kind = "sft"\n'
        changed = text.replace(entry, f"{entry}overrides.train.optm_lr = {rate}\n")
        (tmp_path / name / "pipeline.toml").write_text(changed)
    page = tmp_path / "new/page.html"
    names = [first.name, "second", "third"]
    assert said("compare", *names, "--html", str(page), "--output-dir", str(tmp_path)).strip() == str(page)
    html = page.read_text()
    shown = Page(html).text
    assert "sft.train.optm_lr – 0.0001 1e-05" in shown
    assert {"train/loss", "validation/loss", "reward/mean"} <= set(re.findall(r'aria-label="(\S+) by step"', html))
    [loss] = re.findall(r'<svg [^>]*aria-label="train/loss by step".*?</svg>', html, re.DOTALL)
    assert all(name in loss for name in names), "the legend names each run"
    assert len(set(re.findall(r"var\(--line-\d", loss))) == 3
    assert not re.search(r"(src|href)=.?(https?:)?//|<script", html)
    for wrong in ([tmp_path / "second"] * 2, [tmp_path / "second"], [tmp_path / str(i) for i in range(9)]):
        with pytest.raises(ConfigError, match="2 to 8 different runs"):
            overlay.build_comparison_page(wrong)


def test_report_is_written_at_any_time(outputs: Path) -> None:
    assert said("report", "one", "--output-dir", str(outputs)).strip() == str(outputs / "one" / "report.html")
    assert "counting" in (outputs / "one" / "report.html").read_text()


def test_watch_ends_where_nothing_happens_any_more(outputs: Path) -> None:
    assert "done" in said("watch", "two", "--output-dir", str(outputs))


def test_watch_waits_for_the_first_stage_of_a_run_that_began_and_for_stages_that_wait_for_gpus(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(PIPELINE.replace("OUTPUTS", str(tmp_path / "outputs")))
    run = create_run(load_pipeline(tmp_path / "p.toml", [], all_kinds()), run_id="one")
    assert not is_run_inactive(read_run(run.path))
    write_json(run.path / "run.json", {"run_id": "one", "started": time.time() - 999})
    assert is_run_inactive(read_run(run.path))
    lock = claim_run(run, time.time() - 999)
    assert not is_run_inactive(read_run(run.path))
    update_state(run.stage_path("first"), state="failed", ended=time.time() - 999)
    assert is_run_inactive(read_run(run.path))
    lock.release()


def test_version_says_what_it_runs_with() -> None:
    assert re.match(
        r"cosmos \d+\.\d+\.\d+ \(prefect 3\.\S+, torch 2\S+, transformers 5\S+, Python 3\.\d+", said("--version")
    )


def test_reap_ends_what_a_dead_flow_left_and_no_run_that_somebody_has(outputs: Path) -> None:
    assert said("reap", "--output-dir", str(outputs)) == "nothing is left over\n"
    file = outputs.parent / "counting.toml"
    run = create_run(load_pipeline(file, (), all_kinds()), run_id="dead")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    update_state(run.stage_path("first"), state="running", launcher_pid=gone.pid, launcher_started=1.0)
    held = claim_run(run)
    assert said("reap", "--output-dir", str(outputs)) == "nothing is left over\n"
    held.release()
    update_state(run.stage_path("first"), launcher_host="another", heartbeat=time.time())
    assert said("reap", "--output-dir", str(outputs)) == "dead/first: runs on another; reap there what is left of it\n"
    update_state(run.stage_path("first"), heartbeat=time.time() - 601)
    assert said("reap", "--output-dir", str(outputs)) == (
        f"dead/first: ended; it goes on with: cosmos resume {run.path}\n"
    )
    assert read_state(run.stage_path("first")).state == "stopped"


def test_a_number_too_large_for_a_float_is_infinite_in_the_tables(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    file = run / "stages/eval-grpo/result.json"
    write_json(file, {**json.loads(file.read_text()), "metrics": {"reward/mean": 10**400}})
    [*_, cell] = make_run_table(tmp_path, 1).columns[-1].cells
    assert cell == "reward inf"
    [_, row] = _compare_stage_metrics(*[next(s for s in read_run(run).stages if s.name == "eval-grpo")] * 2)
    assert row == ("reward/mean", "inf", "inf", "")
