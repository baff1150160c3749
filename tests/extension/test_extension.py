"""What a user adds in a file of his own, without an edit here: a reward, an algorithm, an engine, a stage, an upload
target and a metric sink, all of them in one pipeline. Its stages run as the flow of `cosmos run` runs them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from cosmos_core.config.compose import load_pipeline
from cosmos_core.errors import StageFailed
from cosmos_core.launch import worker
from cosmos_core.launch.worker import AttemptSettings
from cosmos_core.registry import import_object
from cosmos_core.run.directory import create_run
from cosmos_core.run.files import sha256
from cosmos_core.run.manifest import Result
from cosmos_core.run.plan import plan_stages
from cosmos_core.run.progress import read_metrics
from cosmos_core.run.state import read_state
from tasks.kinds import all_kinds
from tasks.stage import run_stage, should_retry
from tests import attempts
from tests.conftest import Workspace
from tests.unit.tiny_model import save_tiny_model

STEPS, GROUPS = 3, 2
TOY_TASK = Path(__file__).parents[2] / "configs/demo/arithmetic.py"
PIPELINE = f"""
[pipeline]
name = "extension"
threads = 1

[policy]
model_max_length = 40
model_gradient_checkpointing = false

[train]
param_dtype = "float32"
compile = false
epoch = 100
max_num_steps = {STEPS}
train_batch_per_replica = {4 * GROUPS}
optm_lr = 1e-3
optm_warmup_steps = 0
ckpt = {{ enable_checkpoint = true, save_freq = 1, save_mode = "sync" }}

[train.train_policy]
type = "grpo"
trainer_type = "user/algorithm.py:VarianceWeighted"
reward_function = "user/reward.py:variety"
mini_batch = 4

[rollout]
backend = "user/engine.py:Plain"
n_generation = 4
batch_size = {GROUPS}
max_response_length = 6

[logging]
logger = ["user/sink.py:Lines"]

[custom]
epsilon = 1e-6

[[pipeline.stages]]
name = "task"
kind = "custom"
entry = "user/stage.py:make"
arguments = {{ toy_task = "{TOY_TASK}", num_prompts = 12 }}

[[pipeline.stages]]
name = "prompts"
kind = "prepare"
after = ["task"]
model = "stage:task"
data = "stage:task"

[[pipeline.stages]]
name = "whole"
kind = "rl"
after = ["prompts"]
model = "stage:task"
data = "stage:prompts"

[[pipeline.stages]]
name = "killed"
kind = "rl"
after = ["prompts", "whole"]
model = "stage:task"
data = "stage:prompts"
overrides.custom = {{ kill_at_step = 2, kill_mark = "MARK" }}

[[pipeline.stages]]
name = "publish"
kind = "upload"
after = ["killed"]
model = "stage:killed"
target = "user/target.py:Shelf://SHELF"
"""
OF_PAGE = """
[[pipeline.stages]]
name = "task"
kind = "custom"
entry = "mine/stage.py:make"
arguments = { num_rows = 12 }

[[pipeline.stages]]
name = "rl"
kind = "rl"
after = ["task"]
data = "stage:task"

[[pipeline.stages]]
name = "publish"
kind = "upload"
after = ["rl"]
model = "stage:rl"
target = "mine/target.py:Shelf://SHELF"
"""
MADE = ("task", "prompts", "whole", "killed")
"""Stages that are reused."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """The pipeline after all its stages, in this process but for `killed`, which died by SIGKILL in its third step, and
    was made by two attempts of a worker."""
    workspace = Workspace(tmp_path_factory.mktemp("extension"))
    shutil.copytree(Path(__file__).parent / "user", workspace.path / "user")
    text = PIPELINE.replace("MARK", str(workspace.path / "mark")).replace("SHELF", str(workspace.path / "shelf"))
    file = workspace.write("p.toml", text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(workspace.path)
        by_a_worker = worker.run_attempt

        def attempt(settings: AttemptSettings) -> Result:
            return (by_a_worker if settings.stage_path.name == "killed" else attempts.run_here)(settings)

        patch.setattr(worker, "run_attempt", attempt)
        made = create_run(load_pipeline(file, (), all_kinds()))
        for name in MADE[:-1]:
            run_stage(made, name)
        with pytest.raises(StageFailed) as died:
            run_stage(made, "killed")
        assert should_retry(made, "killed", died.value)
        for name in ("killed", "publish"):
            run_stage(made, name)
    return workspace


def lines(run: Workspace, stage: str) -> list[dict[str, Any]]:
    """The metrics of a stage but those of a clock."""
    found = read_metrics(run.stage(stage) / "metrics.jsonl")
    return [
        {k: v for k, v in line.items() if k.partition("/")[0] not in {"time", "throughput", "memory"}} for line in found
    ]


def weights(run: Workspace, stage: str) -> str:
    return sha256(run.stage(stage) / f"safetensors/step_{STEPS}/model.safetensors")


def test_a_reward_an_algorithm_and_an_engine_of_the_users_train(run: Workspace) -> None:
    found = lines(run, "whole")
    assert [line["step"] for line in found] == list(range(1, STEPS + 1))
    assert [line["variance/groups"] for line in found] == [GROUPS * step for step in range(1, STEPS + 1)]
    for line in found:
        assert line["variance/average"] > 0
        assert line["variance/surprise"] > 0
        assert line["reward/variety"] == pytest.approx(line["reward/mean"])
        assert line["reward/variety/length"] > 0
        assert line["grad_norm"] > 0
    assert weights(run, "whole") != sha256(run.stage("task") / "model/model.safetensors")


def test_a_killed_training_goes_on_from_its_checkpoint_with_the_state_of_the_algorithm(run: Workspace) -> None:
    assert (run.path / "mark").exists()
    assert read_state(run.stage("killed")).attempt == 2
    assert lines(run, "killed") == lines(run, "whole")
    assert weights(run, "killed") == weights(run, "whole")


@pytest.mark.parametrize("stage", ["whole", "killed"])
def test_a_sink_is_told_every_line_of_metrics(stage: str, run: Workspace) -> None:
    folder = run.stage(stage)
    told = [json.loads(line) for line in (folder / "lines.jsonl").read_text().splitlines()]
    assert {line["step"]: line for line in told} == {
        line["step"]: line for line in read_metrics(folder / "metrics.jsonl")
    }
    assert (folder / "lines.done").read_text() == "0"


def test_a_target_has_the_model_and_its_record(run: Workspace) -> None:
    (record,) = [json.loads(line) for line in (run.path / "shelf/versions.jsonl").read_text().splitlines()]
    assert record["run_id"] == run.run.name
    assert record["files"]["model.safetensors"] == weights(run, "killed")
    assert sha256(run.path / "shelf" / record["version"] / "model.safetensors") == weights(run, "killed")


def test_a_plan_reuses_all_while_no_file_of_the_users_changes(run: Workspace) -> None:
    found = re.findall(r"│ (\w+) +│ \w+ +│[^│]*│ (be reused|run)", run.cosmos("plan", "p.toml").stdout)
    assert dict(found) == {**dict.fromkeys(MADE, "be reused"), "publish": "run"}


@pytest.mark.parametrize(
    ("name", "made_again"),
    [
        ("stage", MADE),
        ("reward", ("whole", "killed")),
        ("algorithm", ("whole", "killed")),
        ("engine", ("whole", "killed")),
        ("sink", ()),  # changes no result
    ],
)
def test_a_changed_file_of_the_users_is_another_result(
    name: str, made_again: tuple[str, ...], run: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.path)
    file = run.path / "user" / f"{name}.py"
    text = file.read_text()
    file.write_text(f"{text}\n# another version\n")
    try:
        pipeline = load_pipeline(run.path / "p.toml", (), all_kinds())
        decisions = plan_stages(pipeline, all_kinds(), pipeline.output_dir)
    finally:
        file.write_text(text)
    assert {stage for stage in MADE if decisions[stage].action in {"run", "depends"}} == set(made_again)


@pytest.mark.full
def test_the_files_of_the_page_run_as_they_are(workspace: Workspace) -> None:
    page = Path(__file__).parents[2] / "docs/how-to/extending.md"
    files = dict(re.findall(r"^```python\n# (mine/\w+\.py)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))
    for name, code in files.items():
        workspace.write(name, code)
    save_tiny_model(workspace.path / "model")
    settings = PIPELINE.partition("[[pipeline.stages]]")[0].replace("epsilon = 1e-6", "scale = 1.0")
    for ours, theirs in (("user/", "mine/"), ("VarianceWeighted", "Reinforce"), ("_length = 40", "_length = 128")):
        settings = settings.replace(ours, theirs)
    settings = settings.replace("[policy]", '[policy]\nmodel_name_or_path = "model"\nchat_template = "chatml"')
    workspace.write("p.toml", settings + OF_PAGE.replace("SHELF", str(workspace.path / "shelf")))
    workspace.cosmos("run", "p.toml", timeout=600)
    assert [line["reinforce/samples"] for line in lines(workspace, "rl")] == [4.0 * GROUPS] * STEPS
    assert len((workspace.stage("rl") / "lines.jsonl").read_text().splitlines()) == STEPS
    assert (workspace.path / "shelf/versions.jsonl").is_file()
    assert import_object(f"{workspace.path}/mine/tools.py:add")(1, 2) == 3 and len(files) == 7
