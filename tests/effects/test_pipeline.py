"""Keys of the pipeline and its stages: the graph, the run directory, and what a worker is given."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tomli_w
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, temporary_settings

from cosmos_core.checkpoint.load_checkpoint_model import find_checkpoint_step
from cosmos_core.config.compose import Pipeline, load_pipeline
from cosmos_core.config.load import merge_tables
from cosmos_core.config.mesh import check_meshes
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import ConfigError, GateFailed, RewardError, StageFailed
from cosmos_core.launch.estimate import render_estimate_table
from cosmos_core.rewards.protocol import PING_PATH
from cosmos_core.run.bucket import Bucket
from cosmos_core.run.directory import create_run
from cosmos_core.run.stage import Stage
from cosmos_core.run.state import update_state
from tasks.kinds import all_kinds
from tasks.remote_stage import run_remote_stage
from tasks.reward_service import reward_service
from tasks.stage import run_stage, should_retry
from tasks.stages import gate, upload
from tests import store
from tests.effects.change import GRPO, SFT, Change, changes, nested
from tests.unit.tiny_model import save_tiny_model

pytestmark = pytest.mark.usefixtures("here")

PROGRAM = Path(__file__).with_name("program.py")
CUSTOM = {"pipeline.stages.kind": "custom", "pipeline.stages.entry": f"{PROGRAM}:report"}
MESH = {**SFT, "policy.parallelism.dp_shard_size": -1}
REPORT = {"pipeline.stages.kind": "report", "pipeline.stages.model": "stage:first"}
ALONE = {**CUSTOM, "pipeline.stages.after": []}


@pytest.fixture(autouse=True, scope="module")
def variable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VARIABLE", "of the user's")
        yield


def pipeline(settings: dict[str, Any], folder: Path) -> Pipeline:
    """Keys of `pipeline.stages` are those of a stage `second` behind a stage `first`; without any, a plain recipe."""
    values = nested(settings)
    entry = values.get("pipeline", {}).pop("stages", None)
    if entry is not None:
        first = {"name": "first", "kind": "custom", "entry": f"{PROGRAM}:other"}
        if "checkpoint" in entry:
            first = {"name": "first", "kind": "sft", "overrides": nested(SFT)}
        second = {"name": "second", "after": "first", **entry}
        values = merge_tables(values, {"pipeline": {"stages": [second, first]}})
    folder.mkdir(exist_ok=True)
    (folder / "p.toml").write_text(tomli_w.dumps(values))
    return load_pipeline(folder / "p.toml", (), all_kinds())


def sides(change: Change, folder: Path) -> tuple[Pipeline, Pipeline]:
    base = dict(change.base)
    return pipeline(base, folder), pipeline({**base, change.key: change.value}, folder)


def graph(found: Pipeline) -> list[str]:
    """The stages in the order in which they can run, with their kinds."""
    return [f"{stage.name}: {stage.kind}" for stage in found.stages]


@changes(
    (Change("train.train_policy.type", "grpo"), ["prepare: prepare", "rl: rl", "export: export"]),
    (Change("train.train_policy.type", "sft", GRPO), ["prepare: prepare", "sft: sft", "export: export"]),
    (Change("train.ckpt.export_safetensors", False), ["prepare: prepare", "sft: sft"]),
    (Change("validation.enable", True),
     ["prepare: prepare", "sft: sft", "validate: validate", "export: export"]),
    (Change("pipeline.stages.name", "third", CUSTOM), ["first: custom", "third: custom"]),
    (Change("pipeline.stages.kind", "export", REPORT), ["first: custom", "second: export"]),
    (Change("pipeline.stages.after", [], CUSTOM), ["second: custom", "first: custom"]),
)  # fmt: skip
def test_it_changes_the_graph(change: Change, expected: list[str], tmp_path: Path) -> None:
    before, after = sides(change, tmp_path)
    assert graph(after) == expected
    assert graph(before) != expected


S3 = {**SFT, "pipeline.name": "sums", "train.ckpt.upload_s3": "final", "train.ckpt.s3_bucket": "models"}
HUB = {**SFT, "train.ckpt.upload_hf": True}


@changes(
    (Change("train.ckpt.upload_s3", "final", {**SFT, "pipeline.name": "sums", "train.ckpt.s3_bucket": "models"}),
     ["export-s3 -> s3://models/outputs/sums/export"]),
    (Change("train.ckpt.s3_bucket", "others", S3), ["export-s3 -> s3://others/outputs/sums/export"]),
    (Change("train.ckpt.s3_prefix", "of/us/", S3), ["export-s3 -> s3://models/of/us/sums/export"]),
    (Change("train.ckpt.upload_hf", True), ["export-hub -> hub://Comos-Reason1"]),
    (Change("train.ckpt.hf_repo_name", "team/sums", HUB), ["export-hub -> hub://team/sums"]),
)  # fmt: skip
def test_it_changes_what_a_recipe_publishes(change: Change, expected: list[str], tmp_path: Path) -> None:
    def uploads(found: Pipeline) -> list[str]:
        return [f"{stage.name} -> {stage.target}" for stage in found.stages if stage.kind == "upload"]

    before, after = sides(change, tmp_path)
    assert uploads(after) == expected
    assert uploads(before) != expected
    (tmp_path / "again.toml").write_text(tomli_w.dumps(after.as_toml()))
    assert load_pipeline(tmp_path / "again.toml", (), all_kinds()).as_toml() == after.as_toml()


@changes(
    (Change("pipeline.stages.recipe", "fast.toml", CUSTOM), 3e-3),
    (Change("pipeline.stages.overrides", {"train": {"optm_lr": 2e-3}}, CUSTOM), 2e-3),
)
def test_it_changes_the_recipe_of_its_stage_alone(change: Change, expected: float, tmp_path: Path) -> None:
    (tmp_path / "fast.toml").write_text("[train]\noptm_lr = 3e-3\n")
    before, after = sides(change, tmp_path)
    assert {recipe.train.optm_lr for recipe in before.recipes.values()} == {1e-6}
    assert {name: recipe.train.optm_lr for name, recipe in after.recipes.items()} == {"first": 1e-6, "second": expected}


@changes(
    (Change("train.output_dir", "runs", CUSTOM), {"folder": "runs"}),
    (Change("pipeline.output_dir", "runs", CUSTOM), {"folder": "runs"}),
    (Change("train.timestamp", "monday", CUSTOM), {"run_id": "monday"}),
    (Change("pipeline.name", "sums", CUSTOM), {"pipeline": "sums"}),
)
def test_it_changes_the_run_directory(change: Change, expected: dict[str, str], tmp_path: Path) -> None:
    def facts(found: Pipeline) -> dict[str, str]:
        run = create_run(found)
        said = json.loads((run.path / "run.json").read_text())
        # Two runs of one second differ in a suffix.
        run_id = "the time" if said["run_id"].startswith("20") else said["run_id"]
        return {"folder": run.path.parent.name, "run_id": run_id, "pipeline": said["pipeline"]}

    before, after = map(facts, sides(change, tmp_path))
    assert before == {"folder": "outputs", "run_id": "the time", "pipeline": "p"}
    assert after == {**before, **expected}


@changes((Change("pipeline.gpus", 4, MESH), {"sft": 4}))
def test_it_changes_the_mesh(change: Change, expected: dict[str, int], tmp_path: Path) -> None:
    before, after = map(check_meshes, sides(change, tmp_path))
    assert before == {"sft": 1}
    assert after == expected


@changes((Change("pipeline.gpus_per_node", 4, {**MESH, "pipeline.gpus": 16}), "4"))
def test_it_changes_the_nodes_of_an_estimate(change: Change, expected: str, tmp_path: Path) -> None:
    names = ("parameters", "trainable", "peak", "kv_cache", "sequence_length", "rows", "steps", "tokens")
    parts = ("weights", "casts", "reference", "gradients", "optimizer", "activations", "average")
    sizes = {**dict.fromkeys(names), "parameters": 1, "trainable": 1, "sequence_length": 1, "notes": [],
             "memory": dict.fromkeys(parts, 0)}  # fmt: skip

    def nodes(found: Pipeline) -> list[object]:
        table = render_estimate_table([("sft", sizes)], check_meshes(found), found.config.gpus_per_node)
        return [cell for column in table.columns if column.header == "nodes" for cell in column.cells]

    before, after = map(nodes, sides(change, tmp_path))
    assert (before, after) == (["2"], [expected])


def reported(found: Pipeline) -> dict[str, Any]:
    """What the program of `second` says in a worker of its own, or how it ended."""
    try:
        result, _ = run_stage(create_run(found), "second")
    except StageFailed as error:
        return {"error": str(error).partition("; log")[0]}
    return dict(result["info"])


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("usual")
    return reported(pipeline({**ALONE, "pipeline.output_dir": str(folder / "outputs")}, folder))


GIVEN = [
    (Change("pipeline.threads", 3, ALONE), {"threads": "3"}),
    (Change("pipeline.grace_seconds", 3.5, ALONE), {"grace": "3.5"}),
    (Change("pipeline.python", "./interpreter", ALONE), {"python": "mine"}),
    (Change("pipeline.stages.arguments", {"word": "hello"}, ALONE), {"word": "hello"}),
    (Change("pipeline.stages.env", ["VARIABLE"], ALONE), {"variable": "of the user's"}),
    (Change("pipeline.stages.data", "./rows.jsonl", ALONE), {"data": "rows.jsonl"}),
    (Change("policy.model_name_or_path", "org/model", ALONE), {"model": "org/model"}),
]


@pytest.fixture(scope="module")
def all_given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a program is given that the changes together differ in."""
    folder = tmp_path_factory.mktemp("given")
    interpreter = folder / "interpreter"
    interpreter.write_text(f'#!/bin/sh\nINTERPRETER=mine exec {sys.executable} "$@"\n')
    interpreter.chmod(0o755)
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        found = reported(pipeline({**ALONE, **{change.key: change.value for change, _ in GIVEN}}, folder))
    return {**found, "data": Path(found["data"]).name}


@changes(*GIVEN)
def test_it_changes_what_the_program_of_a_stage_is_given(
    change: Change, expected: dict[str, str], usual: dict[str, Any], all_given: dict[str, Any]
) -> None:
    assert {name for name in usual if all_given[name] != usual[name]} == {name for _, told in GIVEN for name in told}
    assert {name: all_given[name] for name in expected} == expected


@changes((Change("pipeline.stages.model", "./own-model", ALONE), {"model": "own-model"}))
def test_it_changes_the_model_that_the_program_of_a_stage_is_given(
    change: Change, expected: dict[str, str], usual: dict[str, Any], tmp_path: Path
) -> None:
    save_tiny_model(tmp_path / "own-model")
    assert reported(sides(change, tmp_path)[1]) == {**usual, "model": str(tmp_path / expected["model"])}


@changes(
    (Change("pipeline.stages.entry", f"{PROGRAM}:other", ALONE), {"word": "other"}),
    (Change("pipeline.stages.timeout", "0.1s", ALONE),
     {"error": "stage 'second' was ended: longer than timeout = 0 s"}),
)  # fmt: skip
def test_it_changes_how_the_program_of_a_stage_ends(
    change: Change, expected: dict[str, str], usual: dict[str, Any], tmp_path: Path
) -> None:
    assert usual["word"] == ""
    assert reported(sides(change, tmp_path)[1]) == expected


@changes(Change("train.signal_to_handle", ["SIGUSR2"], {**ALONE, "pipeline.stages.arguments.ask_to_stop": "SIGUSR2"}))
def test_it_changes_which_signals_ask_to_stop(change: Change, tmp_path: Path) -> None:
    before, after = map(reported, sides(change, tmp_path))
    assert before == {"error": "stage 'second' crashed (signal 12)"}
    assert after["stops"]


@changes(Change("pipeline.stages.retries", 0, ALONE))
def test_it_changes_how_often_a_stage_is_tried(change: Change, tmp_path: Path) -> None:
    def attempts(found: Pipeline) -> int:
        run, failures = create_run(found), 1
        update_state(run.stage_path("second"), failures=failures)
        while should_retry(run, "second", StageFailed("crashed")):
            failures += 1
            update_state(run.stage_path("second"), failures=failures)
        return failures

    assert tuple(map(attempts, sides(change, tmp_path))) == (3, 1)


def second(found: Pipeline, folder: Path) -> Stage:
    """The stage as a program of the front half gets it."""
    stage, kinds = found.stage("second"), all_kinds()
    inputs = {} if stage.kind == "upload" else {"first": {"metrics": {"loss": 2.0}, "path": str(folder)}}
    path, model = folder / "stages/second", str(folder / "model")
    return Stage(path, stage, Recipe(), model, None, inputs, "f", kind=kinds[stage.kind])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of deployments that a server is asked for, which has none."""
    names: list[str] = []

    def run_deployment(name: str, **parameters: Any) -> None:
        names.append(name)
        raise ObjectNotFound(LookupError(name))

    for module in ("remote_stage", "reward_service"):
        monkeypatch.setattr(f"tasks.{module}.run_deployment", run_deployment)
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        yield names


@changes((Change("pipeline.stages.work_pool", "gpu", ALONE), "stage/gpu"))
def test_it_changes_where_a_stage_runs(change: Change, expected: str, tmp_path: Path, asked: list[str]) -> None:
    before, after = sides(change, tmp_path)
    assert before.stage("second").work_pool == ""
    with pytest.raises(ConfigError, match=r"work_pool = 'gpu': the server has no deployment stage/gpu; add one like"):
        run_remote_stage(create_run(after), after.stage("second"))
    assert asked == [expected]


@changes((Change("pipeline.artifact_store", "s3://models/ours", ALONE), "stages/second/result.json"))
def test_it_changes_where_results_are_stored(
    change: Change, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stored(found: Pipeline) -> list[str]:
        run = create_run(found)
        run_stage(run, "second")
        objects = Bucket("models").list_objects(f"ours/runs/{run.id}/")
        return [each.key.partition(f"/{run.id}/")[2] for each in objects if each.key.endswith("result.json")]

    with store.store() as proxy:
        store.use(proxy.url, monkeypatch)
        before, after = sides(change, tmp_path)
        assert before.config.artifact_store == "" and stored(after) == [expected]


@changes((Change("pipeline.stages.reward_service_pool", "gpu", {**ALONE, "pipeline.stages.reward_service": "r.toml"}),
          "reward-service/gpu"))  # fmt: skip
def test_it_changes_where_the_reward_service_runs(
    change: Change, expected: str, tmp_path: Path, asked: list[str]
) -> None:
    (tmp_path / "r.toml").write_text('[[reward_args]]\nreward_type = "exact_match"\n')
    before, after = sides(change, tmp_path)
    assert before.stage("second").reward_service_pool == ""
    said = r"pool = 'gpu': the server has no deployment reward-service/gpu; add one like"
    with pytest.raises(ConfigError, match=said), reward_service(create_run(after), after.stage("second")):
        pass
    assert asked == [expected]


@changes(Change("pipeline.stages.require", ["loss <= 1"], {"pipeline.stages.kind": "gate",
                                                           "pipeline.stages.require": ["loss <= 3"]}))  # fmt: skip
def test_it_changes_what_passes_a_gate(change: Change, tmp_path: Path) -> None:
    before, after = sides(change, tmp_path)
    assert gate.run(second(before, tmp_path)).metrics == {"loss": 2.0}
    with pytest.raises(GateFailed, match="loss = 2, bound 1"):
        gate.run(second(after, tmp_path))


@changes(Change("pipeline.stages.confidence", 0.95, {"pipeline.stages.kind": "gate", "pipeline.stages.target": "there",
                                                     "pipeline.stages.require": ["loss < published"]}))  # fmt: skip
def test_it_changes_how_certain_a_gate_must_be(change: Change, tmp_path: Path) -> None:
    before, after = sides(change, tmp_path)
    (tmp_path / "there/v1").mkdir(parents=True)
    (tmp_path / "there/latest").symlink_to("v1")
    (tmp_path / "there/v1/published.json").write_text('{"files": {}, "metrics": {"loss": 2.1, "loss_stderr": 0.5}}')
    stages = [second(side, tmp_path) for side in (before, after)]
    for stage in stages:
        stage.inputs["first"]["metrics"]["loss_stderr"] = 0.5
    assert gate.run(stages[0]).metrics["loss"] == 2.0
    with pytest.raises(GateFailed, match=r"loss = 2, bound 2\.1, noise 1\.16"):
        gate.run(stages[1])


@changes(Change("pipeline.stages.target", "there", {"pipeline.stages.kind": "upload", "pipeline.stages.target": "here",
                                                    "pipeline.stages.model": "stage:first"}))  # fmt: skip
def test_it_changes_where_a_model_is_published(change: Change, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "stages/second").mkdir(parents=True)
    before, after = (upload.run(second(side, tmp_path)).info["published"] for side in sides(change, tmp_path))
    assert [Path(str(place)).parent for place in (before, after)] == [tmp_path / "here", tmp_path / "there"]
    assert (Path(str(after)) / "config.json").read_text() == "{}"


@changes(Change("pipeline.stages.checkpoint", "2", {"pipeline.stages.kind": "export",
                                                    "pipeline.stages.checkpoint": "4",
                                                    "pipeline.stages.model": "stage:first"}))  # fmt: skip
def test_it_changes_which_checkpoint_is_exported(change: Change, tmp_path: Path) -> None:
    before, after = sides(change, tmp_path)
    for step in (2, 4):
        policy = tmp_path / f"checkpoints/step_{step}/policy"
        policy.mkdir(parents=True)
        (policy / "extra.json").write_text("{}")
        extra = {"size": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}
        (policy / "manifest.json").write_text(json.dumps({"step": step, "files": {"extra.json": extra}}))
    assert [find_checkpoint_step(second(side, tmp_path)) for side in (before, after)] == [4, 2]


SCORED = {**ALONE, "pipeline.stages.entry": f"{PROGRAM}:scored"}


@changes(Change("pipeline.stages.reward_service", "rewards.toml", SCORED))
def test_it_changes_whether_a_reward_service_runs_beside_the_stage(change: Change, tmp_path: Path) -> None:
    (tmp_path / "rewards.toml").write_text('[[reward_args]]\nreward_type = "exact_match"\n')
    before, after = sides(change, tmp_path)
    assert before.stage("second").reward_service == ""
    found = reported(after)
    assert found["value"] == 1.0
    host = found["url"].removeprefix("http://").partition("/")[0]
    try:  # another test may have taken the port
        answer = httpx.get(f"http://{host}{PING_PATH}", timeout=5).status_code
    except httpx.HTTPError:
        answer = 0
    assert answer != 200


def test_a_reward_service_that_cannot_start_ends_the_stage_with_its_own_line(tmp_path: Path) -> None:
    (tmp_path / "rewards.toml").write_text('[[reward_args]]\nreward_type = "exact_mach"\n')
    found = pipeline({**SCORED, "pipeline.stages.reward_service": "rewards.toml"}, tmp_path)
    with pytest.raises(RewardError, match=r"reward 'exact_mach' cannot be loaded: .* did you mean 'exact_match'"):
        run_stage(create_run(found), "second")
