"""`cosmos run FILE.py:FLOW`: killed at any moment and continued, and mistakes in one line."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cosmos_core.cli import app
from cosmos_core.errors import ConfigError
from cosmos_core.run.directory import open_run
from cosmos_core.run.manifest import read_result
from tasks.kinds import all_kinds
from tests.conftest import Workspace, wait_until
from tests.faults.test_kill import chain
from tests.unit.tiny_model import save_tiny_model

STEPS = 8
FLOW = """
from prefect import flow
from cosmos_core.errors import OverBudget
from tasks import custom, report

@flow
def chain(rounds: int, seconds: float = 0.0, run_id: str = ""):
    last = ()
    for i in range(rounds):
        last = custom("PROGRAMS/counting.py:count", arguments={"steps": 8, "seconds": seconds}, after=last,
                      name=f"count-{i}")
        if last.metrics["count"] < 8:
            break
    report(after=last)

@flow
def dear():
    raise OverBudget("run dear: budget = 3 is spent")  # as a stage raises it that holds GPUs

@flow
def broken():
    return {}["missing"]

@flow
def unmet():
    first = custom.submit("PROGRAMS/counting.py:count", name="first", arguments={"refuse": True})
    custom.submit("PROGRAMS/counting.py:count", name="second", after=first).result()

@flow
async def hasty():
    custom.submit("PROGRAMS/counting.py:count", name="first", arguments={"refuse": True})

def plain(): ...
"""


RECIPE = """
[train]
compile = false
max_num_steps = 1
train_batch_per_replica = 2
optm_warmup_steps = 0
[train.train_policy]
type = "sft"
mini_batch = 2
conversation_column_name = "messages"
dataset = { name = "rows.jsonl", test_size = 2 }
[policy]
model_max_length = 96
chat_template = "chatml"
[validation]
enable = true
"""


def steps(outputs: Path) -> int:
    return sum(len(file.read_text().splitlines()) for file in outputs.glob("*/stages/*/metrics.jsonl"))


def test_a_flow_that_is_killed_is_continued_by_the_same_command_or_resume(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in a package, and run by its module."""
    workspace.write("parts/__init__.py", "")
    workspace.write("parts/steps.py", "COUNT = 'PROGRAMS/counting.py:count'\n")
    flow = FLOW.replace('last = custom("PROGRAMS/counting.py:count"', "last = custom(COUNT")
    workspace.write("parts/two.py", f"from .steps import COUNT\n{flow}")
    words = ["-p", "rounds=2", "-p", "seconds=0.3"]
    outputs = workspace.path / "outputs"
    for number, more, code in ((signal.SIGKILL, 1, -signal.SIGKILL), (signal.SIGTERM, STEPS - 1, 75)):
        process = workspace.start("run", "parts.two:chain", *words)
        wait_until(lambda more=more: steps(outputs) > more, 60, "a step of the first stage, then of the second")
        process.send_signal(number)
        assert process.wait() == code
    [run] = outputs.glob("chain-*")
    monkeypatch.chdir(workspace.path)
    for option in (["--from-stage", "count-0"], ["--verify"]):
        refused = CliRunner().invoke(app, ["resume", run.name, *option])
        assert f"{option[0]}: the run is of a flow in Python" in str(refused.exception)
    elsewhere = workspace.path / "elsewhere"
    elsewhere.mkdir()
    assert "report" in workspace.cosmos("resume", str(run), cwd=elsewhere).stdout
    assert not list(elsewhere.iterdir()), "what is relative in a flow is relative to the folder where it began"
    facts = (run / "run.json").read_text()
    (run / "run.json").write_text(facts.replace(json.dumps(str(workspace.path)), '"/gone"'))
    assert "was started in /gone" in str(CliRunner().invoke(app, ["resume", run.name]).exception)
    (run / "run.json").write_text(facts)
    for name in ("count-0", "count-1"):
        assert (run / "stages" / name / "out.txt").read_text() == chain(42, STEPS)
        assert read_result(run / "stages" / name) is not None
    assert "count-1" in CliRunner().invoke(app, ["status", run.name]).output
    assert "be reused" in workspace.cosmos("plan", "parts/two.py:chain", *words).stdout


def test_a_budget_that_is_spent_is_said_in_one_line(workspace: Workspace) -> None:
    workspace.write("my.py", FLOW)
    done = workspace.cosmos("run", "my.py:dear", code=75)
    assert "run dear: budget = 3 is spent" in done.stderr
    assert "the same command continues" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["my.py:broken"], "KeyError: 'missing' ("),
        (["my.py:unmet"], "a stage was called with the future of a stage that failed"),
        (["my.py:hasty"], "stage 'first' is not done, and the flow did not wait for it: call .result() of its future"),
    ],
)
def test_a_mistake_is_one_line(workspace: Workspace, words: list[str], message: str) -> None:
    workspace.write("my.py", FLOW)
    done = workspace.cosmos("run", *words, code=None)
    assert done.returncode in {1, 64} and message in done.stderr.splitlines()[-1], done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "my.py:chain"], "chain"),
        (["plan", "my.py:chain", "-p", "rounds=two"], "rounds"),
        (["plan", "typo.py:chain"], "typo.py:chain: ModuleNotFoundError: No module named 'numpie' (/"),
        (["plan", "my.py:chain", "-p", "round=2"], "flow 'chain': no parameter 'round'; did you mean 'rounds'?"),
        (["run", "my.py:chain", "-p", "rounds"], "-p rounds: write NAME=VALUE"),
        (["run", "my.py:chain", "--set", "train.epoch=2"], "my.py:chain is a flow in Python: --set"),
        (["plan", "my.py:none"], "my.py:none"),
        (["plan", "my.py:plain"], "'plain' is not a flow. Make sure that it is decorated with '@flow'"),
        (["run", "your.py:chain"], "your.py:chain: no such file: your.py"),
        (["run", "parts.none:chain"], "module 'parts.none' was not found"),
        (["plan", "parts.two:first"], "'first'"),
    ],
)
def test_a_mistake_is_found_before_the_flow_begins(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    """`plan` and `run` read the file, the name and the parameters of a flow alike."""
    workspace.write("my.py", FLOW)
    workspace.write("typo.py", f"import numpie\n{FLOW}")
    workspace.write("parts/__init__.py", "")
    workspace.write("parts/two.py", "")
    monkeypatch.chdir(workspace.path)
    monkeypatch.setattr(sys, "path", [str(workspace.path), *sys.path])
    done = CliRunner().invoke(app, words)
    for name in [name for name in sys.modules if name.partition(".")[0] in {"my", "parts"}]:
        del sys.modules[name]
    assert isinstance(done.exception, ConfigError) and message in str(done.exception), done.output


def write_example(workspace: Workspace, file: str) -> None:
    """Write the program of this name on the page about flows, and the recipe, rows and model that it uses."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "flows.md").read_text()
    workspace.write(file, page.partition(f"```python\n# {file}\n")[2].partition("```")[0])
    workspace.write("sft.toml", RECIPE)
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    workspace.write("rows.jsonl", f"{json.dumps({'messages': turns})}\n" * 6)
    save_tiny_model(workspace.path / "model")


@pytest.mark.full
def test_the_flow_of_the_documentation_searches_and_publishes(workspace: Workspace) -> None:
    write_example(workspace, "search.py")
    workspace.cosmos("run", "search.py:search", "-p", "rates=[1e-4, 2e-4]")
    [run] = workspace.path.glob("outputs/search-*")
    names = sorted(path.name for path in (run / "stages").iterdir())
    assert names == [
        "export", "gate", "sft-0", "sft-0-data", "sft-1", "sft-1-data", "upload",
        "validate-0", "validate-1",
    ]  # fmt: skip
    assert list(workspace.path.glob("published/*/model.safetensors"))


@pytest.mark.full
def test_the_sweep_of_the_documentation_trains_the_better_half_further(workspace: Workspace) -> None:
    write_example(workspace, "halving.py")
    workspace.cosmos("run", "halving.py:halving", "-p", "rates=[1e-5, 1e-2, 2e-2, 1e-6]", timeout=400)
    [run] = workspace.path.glob("outputs/halving-*")
    names = sorted(path.name for path in (run / "stages").iterdir() if not path.name.endswith("-data"))
    assert names == ["export", *(f"sft-1-{i}" for i in range(4)), "sft-2-0", "sft-2-1", "upload"]
    losses = [(read_result(run / "stages" / f"sft-1-{i}") or {})["metrics"]["validation/loss"] for i in range(4)]
    better = sorted(range(4), key=losses.__getitem__)[:2]
    recipes = open_run(run, all_kinds()).pipeline.recipes
    assert [recipes[f"sft-2-{i}"].train.optm_lr for i in range(2)] == [
        recipes[f"sft-1-{i}"].train.optm_lr for i in better
    ]
    assert list(workspace.path.glob("published/*/model.safetensors"))


@pytest.mark.full
def test_an_ensemble_of_adapters_is_merged(workspace: Workspace) -> None:
    write_example(workspace, "ensemble.py")
    workspace.write("lora.toml", RECIPE.replace("[validation]\nenable = true", "[policy.lora]\nr = 2"))
    workspace.cosmos("run", "ensemble.py:ensemble", "-p", "seeds=[1, 2]")
    [run] = workspace.path.glob("outputs/ensemble-*")
    result = read_result(run / "stages/merge")
    assert result and result["info"]["merged"] == ["sft-1", "sft-2"]
    assert list(workspace.path.glob("published/*/model.safetensors"))


SAMPLE = """
[train]
compile = false
[train.train_policy]
type = "grpo"
reward_function = "reward.py:letters"
dataset = { name = "prompts.jsonl" }
[policy]
model_max_length = 96
chat_template = "chatml"
[rollout]
backend = "hf"
n_generation = 4
max_response_length = 8
[sample]
keep = { best = 1, finished = false }
"""


@pytest.mark.full
def test_expert_iteration_samples_learns_and_stops_early(workspace: Workspace) -> None:
    write_example(workspace, "expert.py")
    workspace.write(
        "sft.toml",
        RECIPE.replace("[validation]\nenable = true", "").replace(
            'conversation_column_name = "messages"\ndataset = { name = "rows.jsonl", test_size = 2 }', "dataset = {}"
        ),
    )
    workspace.write("sample.toml", SAMPLE)
    workspace.write("reward.py", "def letters(completion, **_):\n    return len(set(completion)) / 40\n")
    workspace.write("prompts.jsonl", "".join(f'{{"prompt": "say {i}"}}\n' for i in range(6)))
    workspace.cosmos("run", "expert.py:expert_iteration", "-p", "enough=1000")  # a gain of so much is never made
    [run] = workspace.path.glob("outputs/expert-iteration-*")
    assert sorted(path.name for path in (run / "stages").iterdir()) == [
        "export", "sample-0", "sample-0-data", "sample-1", "sample-1-data", "sft-0", "sft-0-data", "upload",
    ]  # fmt: skip
    rows = [json.loads(line) for line in (run / "stages/sample-1/rows/train.jsonl").read_text().splitlines()]
    result = read_result(run / "stages/sft-0")
    assert len(rows) == 6 and result and {row["model_digest"] for row in rows} == {result["digest"]}
    assert list(workspace.path.glob("published/*/model.safetensors"))
