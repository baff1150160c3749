"""The `cosmos` command as a user types it: help, mistakes in one line, reuse, and two users at once."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cosmos_core.cli import app
from cosmos_core.launch import worker
from cosmos_core.observe.console import ProgressDisplay
from cosmos_core.run.directory import Run
from cosmos_core.run.state import update_state
from cosmos_core.session import _keep_display_updated, _print_failures, derive_exit_code
from tests.command_line import InProcess
from tests.conftest import Workspace, wait_until
from tests.unit.data_tokenizers import CHATML
from tests.unit.run_folder import counting_run
from tests.unit.tiny_model import save_tiny_model

RECIPE = """
[policy]
model_name_or_path = "model"

[train.train_policy]
type = "sft"
dataset.name = "rows.jsonl"
"""
COUNTING = """
[pipeline]
name = "toy"
threads = 1

[[pipeline.stages]]
name = "first"
kind = "custom"
entry = "PROGRAMS/counting.py:count"
arguments = { steps = 3, seconds = 0.01 }

[[pipeline.stages]]
name = "beside"
kind = "custom"
entry = "PROGRAMS/counting.py:count"
arguments = { steps = 4, seconds = 0.01 }

[[pipeline.stages]]
name = "second"
kind = "custom"
entry = "PROGRAMS/counting.py:count"
after = "first"
arguments = { steps = 5, seconds = 0.01 }
"""


def refusal(workspace: Workspace, *arguments: str) -> str:
    """The one line that a mistake is told in."""
    done = workspace.cosmos(*arguments, code=64)
    assert done.stdout == ""
    assert done.stderr.startswith("cosmos: ")
    assert done.stderr.count("\n") == 1
    return done.stderr.removeprefix("cosmos: ").rstrip("\n")


@pytest.fixture
def in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Workspace:
    """A workspace for commands that are refused before anything starts."""
    workspace = InProcess(tmp_path, monkeypatch, capsys)
    workspace.write("recipe.toml", RECIPE)
    workspace.write("rows.jsonl", rows(GOOD))
    workspace.write("model/tokenizer.json", "{}")
    return workspace


def cpu_seconds() -> float:
    """Processor time of the commands that have ended: unlike the clock it does not see who else is at work."""
    times = os.times()
    return times.children_user + times.children_system


def rows(*values: object) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def conversation(*turns: tuple[str, str]) -> dict[str, object]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


GOOD = conversation(("user", "1+1="), ("assistant", "2"))


def test_help_and_the_check_of_a_schema_answer_at_once(workspace: Workspace) -> None:
    recipe = workspace.write("recipe.toml", RECIPE)
    for arguments in (["--help"], ["check", "--schema-only", str(recipe)]):
        before = cpu_seconds()
        done = workspace.cosmos(*arguments)
        assert cpu_seconds() - before < 1.5
        assert done.stderr == ""
    assert done.stdout == f"{recipe}: ok (3 stages: prepare, sft, export)\n"
    assert not (workspace.path / "outputs").exists()


def test_every_command_has_a_help_and_no_command_at_all_is_a_question(in_process: Workspace) -> None:
    overview = in_process.cosmos("--help").stdout
    assert in_process.cosmos().stdout == overview
    assert "..." not in "".join(overview.splitlines(keepends=True)[1:]), "a first sentence is longer than its line"
    for command in ("run", "resume", "plan", "check", "status", "logs", "lineage"):
        assert command in overview
        assert f"{command} [OPTIONS]" in CliRunner().invoke(app, [command, "--help"]).output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run"], "Missing argument 'configs'; see cosmos run --help"),
        (["status", "--bogus"], "No such option: --bogus; see cosmos status --help"),
        (["sft", "--epochs", "3"], "No such option: --epochs; a setting of the recipe is given as --set KEY=VALUE, "
         "such as --set train.epoch=2; see cosmos sft --help"),
        (["run", "recipe.yaml"],
         "recipe.yaml: a configuration is TOML, not YAML; write [table] and key = value: Expected '=' after a key in a "
         "key/value pair (at line 1, column 7)"),
        (["run", "none.toml"], "none.toml: no such file"),
        (["run", "recipes.toml"], "recipes.toml: no such file; did you mean recipe.toml?"),
        (["run", "rows.jsonl"], "rows.jsonl: rows, not a recipe; train on them with cosmos sft --model M --data "
         "rows.jsonl: Invalid statement (at line 1, column 1)"),
        (["run", "recipe.toml", "--from-stage", "stf"],
         "recipe.toml: no stage 'stf' in this pipeline; did you mean 'sft'?"),
        (["run", "recipe.toml", "--set", "train.epoch", "2"],
         "--set 'train.epoch': write key=value, for example train.optm_lr=2e-6"),
        (["run", "flow.py"], "flow.py is no TOML file; name a flow of it as well, flow.py:FLOW"),
        (["config"], "Missing command; see cosmos config --help"),
        (["reward-service", "--config", "r.toml", "--port", "-5"],
         "Invalid value for '--port': Input should be greater than or equal to -1; see cosmos reward-service --help"),
        (["resume"], "no run at all in outputs; give its path, or the folder of runs with --output-dir"),
        (["resume", "20200101000000"],
         "no run '20200101000000' in outputs; give its path, or the folder of runs with --output-dir"),
        (["status", "20200101000000"],
         "no run '20200101000000' in outputs; give its path, or the folder of runs with --output-dir"),
        (["logs"], "no run at all in outputs; give its path, or the folder of runs with --output-dir"),
        (["lineage", "model"], "FOLDER/model belongs to no run; give a run, a stage, an exported or a published model"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_command_that_makes_no_sense_is_one_line(in_process: Workspace, arguments: list[str], said: str) -> None:
    in_process.write("recipe.yaml", "policy:\n  model_name_or_path: model\n")
    assert refusal(in_process, *arguments) == said.replace("FOLDER", str(in_process.path))


WRONG: dict[str, tuple[list[str], str]] = {
    "unknown key": (["train.optm_l=1"], "recipe.toml: train.optm_l: unknown key; did you mean train.optm_lr?"),
    "wrong type": (["train.epoch=many"], "recipe.toml: train.epoch = 'many': must be an integer"),
    "no model": (
        ["policy.model_name_or_path=./nowhere"],
        "recipe.toml: stage 'prepare': policy.model_name_or_path = "
        "'./nowhere': no such folder; give a Hugging Face model folder or a Hub id",
    ),
    "no data": (
        ["train.train_policy.dataset.name=none.jsonl"],
        "recipe.toml: stage 'prepare': train.train_policy.dataset.name = 'none.jsonl': no such file or folder",
    ),
    "no reward": (
        [
            "train.train_policy={type='grpo', reward_function='exact_macth', dataset={name='rows.jsonl'}}",
            "train.train_batch_per_replica=16",
        ],
        "recipe.toml: stage 'rl': train.train_policy.reward_function: there is no reward 'exact_macth'; one of your "
        "own is module:function or path/file.py:function; did you mean 'exact_match'?",
    ),
    "output folder": (
        ["pipeline.output_dir=rows.jsonl/outputs"],
        "pipeline.output_dir = 'FOLDER/rows.jsonl/outputs' cannot be written: Not a directory; choose another folder",
    ),
    "capability": (
        ["train.async_tp_enabled=true"],
        "recipe.toml: stage 'prepare': train.async_tp_enabled = true: PyTorch "
        "overlaps tensor parallelism in compiled models alone, and those exclude tp_size here; leave it out",
    ),
}
"""Settings, and what is said of them."""


@pytest.mark.parametrize(
    ("command", "name"),
    [
        pytest.param(command, name, marks=[pytest.mark.full] * (command != "run" and name != "no model"))
        for command in ("run", "plan", "check")
        for name in WRONG
    ],
)
def test_what_can_be_found_wrong_at_once_is_one_line_and_nothing_is_made(
    in_process: Workspace, command: str, name: str
) -> None:
    settings, said = WRONG[name]
    arguments = [text for setting in settings for text in ("--set", setting)]
    assert refusal(in_process, command, "recipe.toml", *arguments) == said.replace("FOLDER", str(in_process.path))
    assert not (in_process.path / "outputs").exists()


def test_a_run_id_that_is_no_folder_name_and_a_misspelt_command_end_with_one_line(in_process: Workspace) -> None:
    assert refusal(in_process, "run", "recipe.toml", "--run-id", "../x") == (
        "run_id = '../x' must be a plain folder name of letters, digits, '.', '-' and '_', at most 100"
    )
    assert refusal(in_process, "rnu") == "No such command 'rnu'. Did you mean 'run'?; see cosmos --help"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a chat template."""
    folder = save_tiny_model(tmp_path_factory.mktemp("model") / "model")
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (rows(GOOD) + '{"messages": [}\n', "rows.jsonl:2: malformed JSON, Expecting value at column 15"),
        pytest.param("", "rows.jsonl: file holds no rows; train.train_policy.dataset.name needs at least one",
                     marks=pytest.mark.full),
        pytest.param(rows(GOOD, conversation(("boss", "hello"))),
                     "rows.jsonl:2, turn 1 of 'messages': unknown role 'boss'; known: ", marks=pytest.mark.full),
        pytest.param(rows({"words": "hello"}), "rows.jsonl:1", marks=pytest.mark.full),
    ],
    ids=["malformed", "empty", "stranger", "column"],
)  # fmt: skip
def test_rows_that_cannot_be_read_end_a_run_before_it_begins(workspace: Workspace, text: str, said: str) -> None:
    workspace.write("recipe.toml", RECIPE)
    workspace.write("rows.jsonl", text)
    workspace.write("model/tokenizer.json", "{}")
    assert refusal(workspace, "run", "recipe.toml").startswith(f"recipe.toml: stage 'prepare': {said}")
    assert not (workspace.path / "outputs" / "runs.json").exists()


BAD_ROWS = {
    "late": (
        rows(*[GOOD] * 200, *[conversation(("boss", "hello"))] * 5),
        "late.jsonl:201, turn 1 of 'messages': unknown role 'boss'; known: ",
    ),
    "long": (
        rows({"prompt": "9" * 300, "answer": "2"}),
        "train: 1 of 1 rows skipped: 1 with a prompt that leaves no room for a completion in policy.model_max_length "
        "(first: long.jsonl:1); no row is left, give others",
    ),
}


def test_other_mistakes_that_only_a_worker_can_see_are_one_line_a_stage(workspace: Workspace, model: Path) -> None:
    """One run whose branches are all wrong: each is refused, none is retried, nothing behind them starts."""
    head = f'[policy]\nmodel_name_or_path = "{model}"\nmodel_max_length = 64\n[train]\ntrain_batch_per_replica = 16\n'
    stages = []
    for name, (text, _) in BAD_ROWS.items():
        workspace.write(f"{name}.jsonl", text)
        kind = "grpo" if name == "long" else "sft"
        policy = f'{{ type = "{kind}", dataset = {{ name = "{name}.jsonl" }} }}'
        stages.append(
            f'[[pipeline.stages]]\nname = "{name}"\nkind = "prepare"\n'
            f"overrides.train.train_policy = {policy}\noverrides.rollout.max_response_length = 8\n"
        )
    stages.append(
        '[[pipeline.stages]]\nname = "after-long"\nkind = "rl"\nafter = "long"\ndata = "stage:long"\n'
        'overrides.train.train_policy = { type = "grpo", reward_function = "exact_match" }\n'
        'overrides.rollout = { max_response_length = 8, backend = "hf" }\n'
    )
    workspace.write("bad.toml", head + "\n".join(stages))
    done = workspace.cosmos("run", "bad.toml", code=64)
    wanted = {name: said for name, (_, said) in BAD_ROWS.items()}
    lines = done.stderr.splitlines()
    assert len(lines) == len(wanted)
    for line, (name, said) in zip(lines, wanted.items(), strict=True):
        assert line.startswith(f"cosmos: {name}: {said}")
    assert {name: workspace.state(name) for name in wanted} == dict.fromkeys(wanted, "failed")
    assert workspace.state("after-long") == "waiting"
    for name in wanted:
        assert [path.name for path in (workspace.stage(name) / "logs").iterdir()] == ["attempt_1.log"]
    workspace.expect_quiet()


def visits(workspace: Workspace, name: str) -> int:
    """How often a stage was begun in the newest run."""
    file = workspace.stage(name) / "visits.txt"
    return len(file.read_text().splitlines()) if file.exists() else 0


def made(workspace: Workspace) -> dict[str, int]:
    return {name: visits(workspace, name) for name in ("first", "beside", "second")}


@pytest.mark.full
def test_a_run_makes_only_what_is_new_changed_or_damaged(workspace: Workspace) -> None:
    workspace.write("toy.toml", COUNTING)
    done = workspace.cosmos("run", "toy.toml")
    assert done.stderr == ""
    first_run = workspace.run
    assert made(workspace) == {"first": 1, "beside": 1, "second": 1}

    workspace.write("README.md", "Other words.")
    workspace.cosmos("run", "toy.toml", "--run-id", "2998")
    assert workspace.run.name == "2998"
    assert made(workspace) == {"first": 0, "beside": 0, "second": 0}
    assert {workspace.state(name) for name in made(workspace)} == {"reused"}
    assert "same fingerprint as run 2998" in workspace.cosmos("plan", "toy.toml").stdout

    (first_run / "stages" / "first" / "out.txt").write_text("altered")  # the other run has a copy
    for run in (first_run, workspace.run):
        (run / "stages" / "beside" / "out.txt").unlink()
    planned = workspace.cosmos("plan", "toy.toml", "--set", "second.arguments.steps=6").stdout
    assert "made before, but" in planned
    workspace.cosmos("run", "toy.toml", "--run-id", "2999", "--set", "second.arguments.steps=6")
    assert workspace.run.name == "2999"
    assert made(workspace) == {"first": 0, "beside": 1, "second": 1}
    assert (workspace.stage("first") / "out.txt").read_text() != "altered"
    workspace.expect_quiet()


@pytest.mark.full
def test_two_identical_runs_started_together_train_once(workspace: Workspace) -> None:
    workspace.write("toy.toml", COUNTING.replace("steps = 3, seconds = 0.01", "steps = 100, seconds = 0.1"))
    both = [workspace.start("run", "toy.toml") for _ in range(2)]
    assert [process.wait(timeout=300) for process in both] == [0, 0]
    runs = sorted((workspace.path / "outputs").glob("2*"))
    assert len(runs) == 2
    for name in ("first", "beside", "second"):
        found = [file.read_text() for run in runs if (file := run / "stages" / name / "visits.txt").exists()]
        assert found == ["start 0\n"]
    texts = {(run / "stages" / "second" / "out.txt").read_text() for run in runs}
    assert len(texts) == 1
    workspace.expect_quiet()


def ending(run: Run, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    code = derive_exit_code(run)
    _print_failures(run, code)
    return code, capsys.readouterr().err.splitlines()


def test_the_exit_code_says_what_can_help(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = counting_run(tmp_path)
    first, second = run.stage_path("first"), run.stage_path("second")
    hint = f"cosmos: run {run.id} is not complete; continue it with: cosmos resume {run.path}"
    update_state(first, state="stopped")
    assert ending(run, capsys) == (75, [hint])
    update_state(first, state="failed", exit_code=1, error="stage 'first' crashed\n(signal 9)")
    assert ending(run, capsys) == (1, ["cosmos: first: stage 'first' crashed (signal 9)", hint])
    update_state(second, state="failed", exit_code=64, error="rows.jsonl:3: wrong")
    assert ending(run, capsys) == (
        64, ["cosmos: first: stage 'first' crashed (signal 9)", "cosmos: second: rows.jsonl:3: wrong"]
    )  # fmt: skip
    update_state(first, state="failed", exit_code=65, error="gate 'first': loss < 1 does not hold")
    update_state(second, state="waiting")
    code, lines = ending(run, capsys)
    assert code == 65 and "does not hold" in lines[0] and "resuming it would end the same way" in lines[1]
    update_state(first, state="reused")
    update_state(second, state="done")
    assert ending(run, capsys) == (0, [])


def test_what_is_asked_to_stop_says_that_it_saves(tmp_path: Path) -> None:
    run, out = counting_run(tmp_path), io.StringIO()
    with (
        worker.register_active_run(),
        ProgressDisplay(["first", "second"], stream=out) as display,
        _keep_display_updated(lambda: run, display),
    ):
        worker.stop_all()
        wait_until(lambda: "stopping, saving a checkpoint: at most 5 s\n" in out.getvalue(), 5, "a word about it")
    assert out.getvalue().count("stopping") == 1


def test_a_run_goes_on_without_a_reader_of_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, (reader, writer) = counting_run(tmp_path), os.pipe()
    os.close(reader)
    update_state(run.stage_path("first"), state="running")
    with open(writer, "w", encoding="utf-8") as out, ProgressDisplay(["first"], stream=out) as display:
        monkeypatch.setattr(sys, "stdout", out)
        with _keep_display_updated(lambda: run, display):
            pass
        out.flush()


def test_a_run_is_looked_at_from_its_directory_alone_wherever_it_lies(workspace: Workspace) -> None:
    run = counting_run(workspace.path)
    moved = shutil.move(run.path, workspace.path / "elsewhere")
    assert "first" in workspace.cosmos("status", str(moved)).stdout
    assert "no result.json" in refusal(workspace, "lineage", f"{moved}/stages/first")
