"""MLflow and trackio, with their real clients and local databases: no step is logged and no version made twice."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from cosmos_core.cli_models import rollback
from cosmos_core.errors import ConfigError, Preempted, UploadError
from cosmos_core.observe.sinks import base as sinks
from cosmos_core.run.files import sha256
from cosmos_core.upload.base import open_target
from cosmos_core.upload.mlflow import MlflowTarget
from tests.conftest import wait_until
from tests.unit.test_deploy_nginx import free_port
from tests.unit.test_sinks import interrupted, loss, make_stage, train

ROOT = Path(__file__).parents[2]
ALL = {step: loss(step) for step in range(1, 10)}


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database that MLflow has made, by dozens of migrations; `empty.db` beside it stays as it is."""
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    file = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.chdir(file.parent)
        from mlflow import MlflowClient

        MlflowClient(f"sqlite:///{file}").search_experiments()
    shutil.copy(file, file.with_name("empty.db"))
    return file


@pytest.fixture
def mlflow(database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of an empty database: one for all tests, because each new address has its statements compiled anew."""
    with closing(sqlite3.connect(database.with_name("empty.db"))) as empty, closing(sqlite3.connect(database)) as used:
        empty.backup(used)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setattr(sinks, "SINK_CLOSE_TIMEOUT_SECONDS", 60.0)
    monkeypatch.chdir(tmp_path)
    from mlflow import MlflowClient

    return MlflowClient()


def mlflow_runs(client: Any, project: str = "cosmos_rl") -> list[Any]:
    return list(client.search_runs([client.get_experiment_by_name(project).experiment_id]))


def mlflow_losses(client: Any, run: Any) -> dict[int, float]:
    points = client.get_metric_history(run.info.run_id, "loss")
    assert len({point.step for point in points}) == len(points), "a step was logged twice"
    return {point.step: point.value for point in sorted(points, key=lambda point: point.step)}


def test_a_resumed_stage_continues_its_run_on_mlflow(mlflow: Any, tmp_path: Path) -> None:
    train(make_stage(tmp_path / "r1", "mlflow", experiment_name="small", group_name="sweep"), 1, 7)
    # killed after 7, the checkpoint was of 4; a setting that changes no result was changed
    train(make_stage(tmp_path / "r1", "mlflow", experiment_name="other", group_name="sweep"), 5, 9)
    (run,) = mlflow_runs(mlflow)
    assert mlflow_losses(mlflow, run) == ALL
    assert (run.info.run_name, run.info.status, run.data.params["train.epoch"]) == ("small-r1-sft", "FINISHED", "3")
    expected = {"cosmos.run": "r1", "cosmos.stage": "sft", "cosmos.kind": "sft", "cosmos.group": "sweep"}
    assert expected.items() <= run.data.tags.items()
    assert run.data.params["logging.experiment_name"] == "small"


@pytest.mark.full
def test_a_validation_that_was_cut_off_reaches_mlflow(mlflow: Any, tmp_path: Path) -> None:
    interrupted(tmp_path, "mlflow")
    (run,) = mlflow_runs(mlflow)
    assert mlflow_losses(mlflow, run) == {step: loss(step) for step in range(1, 7)}
    points = mlflow.get_metric_history(run.info.run_id, "validation/at")
    assert [(point.step, point.value) for point in points] == [(3, 3.0), (5, 5.0)]


def test_a_stage_that_failed_or_is_made_again_on_mlflow(mlflow: Any, tmp_path: Path) -> None:
    stage = make_stage(tmp_path / "r1", "mlflow", project_name="sums")
    with pytest.raises(ZeroDivisionError), sinks.send_to_sinks(stage):
        stage.metrics.log(0, {"validation/pass@4": 0.5, "loss": math.nan})
        raise ZeroDivisionError
    (failed,) = mlflow_runs(mlflow, "sums")
    assert (failed.info.status, failed.data.metrics["validation/pass_4"]) == ("FAILED", 0.5)
    stage.path.rename(tmp_path / "aside")
    train(make_stage(tmp_path / "r1", "mlflow", project_name="sums"), 0, 2)
    again, _ = mlflow_runs(mlflow, "sums")
    assert mlflow_losses(mlflow, again) == {step: loss(step) for step in range(3)}


KILLED = """
import os, sys
from pathlib import Path
from cosmos_core.observe.sinks.base import send_to_sinks
from tests.conftest import wait_until
from tests.unit.test_sinks import loss, make_stage

folder, sink, first, last = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

__import__(sink)  # here, because two threads that import MLflow at once fail

def newest():
    if sink == "mlflow":
        from mlflow import MlflowClient
        experiment = MlflowClient().get_experiment_by_name("cosmos_rl")
        runs = MlflowClient().search_runs([experiment.experiment_id]) if experiment else []
        return max((run.data.metrics.get("step", 0) for run in runs), default=0)
    from trackio.sqlite_storage import SQLiteStorage
    runs = SQLiteStorage.get_runs("cosmos_rl")
    return max((SQLiteStorage.get_max_step_for_run("cosmos_rl", run) or 0 for run in runs), default=0)

stage = make_stage(folder / "r1", sink)
with send_to_sinks(stage):
    stage.metrics.remove_lines_after_step(first - 1)
    for step in range(first, last):
        stage.metrics.log(step, {"loss": loss(step)})
    wait_until(lambda: newest() >= last - 1, 60, "the step before the last")
    stage.metrics.log(last, {"loss": loss(last)})
    os.kill(os.getpid(), 9)
"""


def killed(folder: Path, sink: str) -> None:
    """Train in a process that is killed after 3 and, resumed from the checkpoint of 2, after 7."""
    for first, last in ((1, 3), (3, 7)):
        command = [sys.executable, "-c", KILLED, str(folder), sink, str(first), str(last)]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
        assert done.returncode == -signal.SIGKILL


@pytest.mark.full
def test_kills_lose_and_repeat_nothing_on_mlflow(mlflow: Any, tmp_path: Path) -> None:
    killed(tmp_path, "mlflow")
    train(make_stage(tmp_path / "r1", "mlflow"), 6, 9)
    assert [mlflow_losses(mlflow, run) for run in mlflow_runs(mlflow)] == [ALL]


@pytest.fixture
def trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package, which stores below this folder."""
    storage = pytest.importorskip("trackio.sqlite_storage", reason="the extra trackio is not installed")
    monkeypatch.setattr(sinks, "SINK_CLOSE_TIMEOUT_SECONDS", 60.0)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setattr(storage, "TRACKIO_DIR", tmp_path / "trackio")
    return storage.SQLiteStorage


def trackio_losses(storage: Any) -> dict[str, dict[int, float]]:
    runs = {}
    for name in storage.get_runs("cosmos_rl"):
        lines = storage.get_logs("cosmos_rl", name)
        assert len({line["step"] for line in lines}) == len(lines), "a step was logged twice"
        runs[name] = {line["step"]: line["loss"] for line in lines}
    return runs


def test_a_resumed_stage_continues_its_run_on_trackio(trackio: Any, tmp_path: Path) -> None:
    for first, last in ((1, 7), (5, 9)):
        stage = make_stage(tmp_path / "r1", "trackio")
        train(stage, first, last)
    [(name, losses)] = trackio_losses(trackio).items()
    assert losses == ALL and name.startswith("math-r1-sft-")
    assert trackio.get_run_config("cosmos_rl", name)["train"]["epoch"] == 3
    stage.path.rename(tmp_path / "aside")
    train(make_stage(tmp_path / "r1", "trackio"), 1, 3)
    assert sorted(map(len, trackio_losses(trackio).values())) == [3, 9]


@pytest.mark.full
def test_kills_lose_and_repeat_nothing_on_trackio(trackio: Any, tmp_path: Path) -> None:
    killed(tmp_path, "trackio")
    train(make_stage(tmp_path / "r1", "trackio"), 6, 9)
    assert list(trackio_losses(trackio).values()) == [ALL]


def model(folder: Path, text: str = "weights") -> tuple[Path, dict[str, Any]]:
    (folder / "sub").mkdir(parents=True, exist_ok=True)
    for name, content in {"model.safetensors": text, "sub/config.json": "{}", "README.md": "# It\n"}.items():
        (folder / name).write_text(content)
    files = {name: sha256(folder / name) for name in ("model.safetensors", "sub/config.json", "README.md")}
    record = {"version": "r1-abc", "run_id": "r1", "stage": "/runs/r1/stages/upload", "metrics": {"accuracy": 0.75},
              "inputs": {"export": "d" * 64}, "files": files}  # fmt: skip
    return folder, record


def stored(client: Any) -> list[tuple[str, str]]:
    """Number and name of each version."""
    found = [(each.version, each.tags["cosmos.version"]) for each in client.search_model_versions("name = 'sums'")]
    return sorted((str(number), version) for number, version in found)


def test_a_version_of_a_registered_model_has_files_metrics_and_lineage(mlflow: Any, tmp_path: Path) -> None:
    target, (folder, record) = open_target("mlflow://sums"), model(tmp_path / "model")
    assert isinstance(target, MlflowTarget)
    target.check()
    assert target.published() is None and target.versions() == target.history() == []
    for _ in range(2):
        assert target.publish(folder, "r1-abc", record) == target.where("r1-abc") == "mlflow://sums@1"
    assert stored(mlflow) == [("1", "r1-abc")] and target.published() == record
    version = mlflow.get_model_version_by_alias("sums", "published")
    lineage = {"cosmos.run": "r1", "cosmos.stage": record["stage"], "cosmos.input.export": "d" * 64}
    assert lineage.items() <= version.tags.items()
    assert mlflow.get_run(version.run_id).data.metrics == {"accuracy": 0.75}
    from mlflow.artifacts import download_artifacts

    here = Path(download_artifacts("models:/sums@published", dst_path=str(tmp_path / "here")))
    assert {name: sha256(here / name) for name in record["files"]} == record["files"]
    assert target.damage(folder, "r1-abc", record) == ""
    assert target.damage(folder, "other", record) == "the version other is missing"


def test_the_alias_moves_and_one_version_is_found_without_reading_all_of_them(mlflow: Any, tmp_path: Path) -> None:
    target, (folder, first) = MlflowTarget("sums"), model(tmp_path / "one")
    target.publish(folder, "one", first | {"version": "one"})
    folder, second = model(tmp_path / "two", "other weights")
    target.publish(folder, "two", second | {"version": "two"})
    fresh, read = MlflowTarget("sums"), []
    search = fresh.client.search_model_versions
    fresh.client.search_model_versions = lambda *args, **rest: read.extend(page := search(*args, **rest)) or page
    assert fresh.record_of("one")["version"] == "one" and fresh.where("two") == "mlflow://sums@2"
    assert fresh.published() == second | {"version": "two"}
    assert {each.tags["cosmos.version"] for each in read} == {"one"}
    assert target.versions() == target.history() == ["one", "two"]
    target.point_to("one")
    assert target.published() == first | {"version": "one"} and target.history() == ["one", "two", "one"]
    with pytest.raises(UploadError, match="has no version 'three'"):
        target.point_to("three")
    # the stage was forced to run again and made other weights
    target.publish(*[folder, "one", second | {"version": "one"}])
    assert stored(mlflow) == [("1", "one"), ("2", "two"), ("3", "one")] and target.where("one") == "mlflow://sums@3"


@pytest.mark.parametrize(
    "lost", [pytest.param("set_registered_model_alias", marks=pytest.mark.full), "set_registered_model_tag"]
)
def test_a_rollback_that_breaks_off_does_not_make_the_next_one_go_forward(
    mlflow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    target, (folder, record) = MlflowTarget("sums"), model(tmp_path / "model")
    for name in ("one", "two"):
        target.publish(folder, name, record | {"version": name})

    def lose(*_: object) -> None:
        raise OSError("away")

    with monkeypatch.context() as patch, pytest.raises(UploadError, match="away"):
        patch.setattr(type(target.client), lost, lose)
        rollback("mlflow://sums")
    rollback("mlflow://sums")
    assert target.published() == record | {"version": "one"} and target.history() == ["one"]


class _Stopped(Preempted):
    """A kill at a certain call."""


def test_an_upload_that_was_interrupted_makes_one_version(mlflow: Any, tmp_path: Path) -> None:
    folder, record = model(tmp_path / "model")
    for last in range(4):
        target, calls = MlflowTarget("sums"), iter(range(100))

        def pause(last: int = last, calls: Iterator[int] = calls) -> None:
            if next(calls) == last:
                raise _Stopped("stop")

        target.prepare_upload(tmp_path, pause)
        with pytest.raises(_Stopped):
            target.publish(folder, "r1-abc", record)
        assert MlflowTarget("sums").published() is None
    assert MlflowTarget("sums").publish(folder, "r1-abc", record) == "mlflow://sums@1"
    assert stored(mlflow) == [("1", "r1-abc")] and len(mlflow_runs(mlflow, "sums")) == 1


@pytest.mark.full
def test_an_empty_file_is_complete_on_a_server_which_tells_no_size_of_it(mlflow: Any, tmp_path: Path) -> None:
    from mlflow.entities import FileInfo

    target, (folder, record) = MlflowTarget("sums"), model(tmp_path / "model")
    (folder / "empty.txt").touch()
    record["files"]["empty.txt"] = sha256(folder / "empty.txt")
    list_files = target.client.list_artifacts
    target.client.list_artifacts = lambda *arguments: [
        FileInfo(each.path, each.is_dir, each.file_size or None) for each in list_files(*arguments)
    ]
    assert target.publish(folder, "r1-abc", record) == "mlflow://sums@1"


def test_what_a_kill_left_is_one_version_whose_missing_and_short_files_are_sent_again(
    mlflow: Any, tmp_path: Path
) -> None:
    target, (folder, record) = MlflowTarget("sums"), model(tmp_path / "model")
    target.publish(folder, "r1-abc", record)
    mlflow.delete_registered_model_alias("sums", "published")
    version = mlflow.get_model_version("sums", "1")
    mlflow.create_model_version("sums", version.source, run_id=version.run_id, tags=version.tags)  # a lost response
    assert target.publish(folder, "r1-abc", record) == "mlflow://sums@1" and stored(mlflow) == [("1", "r1-abc")]
    assert target.published() == record
    source = Path(mlflow.get_model_version("sums", "1").source.removeprefix("file://"))
    (source / "model.safetensors").write_text("wei")
    (source / "sub/config.json").unlink()
    assert target.damage(folder, "r1-abc", record) == "model.safetensors is missing or altered"
    target.publish(folder, "r1-abc", record)
    assert target.damage(folder, "r1-abc", record) == "" and stored(mlflow) == [("1", "r1-abc")]
    (source / "published.json").write_text("{")
    with pytest.raises(UploadError, match="is missing or damaged; publish again"):
        target.published()
    target.publish(folder, "r1-abc", record)
    assert json.loads((source / "published.json").read_text()) == record == target.published()


@pytest.mark.full
def test_a_real_server_has_each_step_and_each_version_once(
    mlflow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = shutil.which(os.environ.get("COSMOS_TEST_MLFLOW", "mlflow-server"))
    if program is None:
        pytest.skip("no server of MLflow: set COSMOS_TEST_MLFLOW to the program `mlflow` of an environment with mlflow")
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    store = [f"--backend-store-uri=sqlite:///{tmp_path}/server.db", f"--artifacts-destination={tmp_path}/artifacts"]
    environment = os.environ | {"PYTHONPATH": "", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    server = subprocess.Popen([program, "server", *store, f"--port={port}", "--workers=1"], cwd=tmp_path,
                              env=environment, start_new_session=True)  # fmt: skip

    def answers() -> bool:
        assert server.poll() is None, "the server of MLflow has ended"
        try:
            return httpx.get(f"{address}/health").is_success
        except httpx.HTTPError:
            return False

    try:
        wait_until(answers, 120, "the server", pause=0.5)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        client = type(mlflow)()
        killed(tmp_path, "mlflow")
        train(make_stage(tmp_path / "r1", "mlflow"), 6, 9)
        assert [mlflow_losses(client, run) for run in mlflow_runs(client)] == [ALL]
        folder, record = model(tmp_path / "model")
        for _ in range(2):
            assert MlflowTarget("sums").publish(folder, "r1-abc", record) == "mlflow://sums@1"
        assert stored(client) == [("1", "r1-abc")] and MlflowTarget("sums").published() == record
        assert MlflowTarget("sums").damage(folder, "r1-abc", record) == ""
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def test_a_server_that_is_away_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(UploadError, match=r"^mlflow://sums: API request to .* failed") as caught:
        MlflowTarget("sums").check()
    assert "\n" not in str(caught.value)


def test_a_store_of_artifacts_that_refuses_is_one_line(
    mlflow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from boto3.exceptions import S3UploadFailedError

    def refuse(*_: object) -> None:
        raise S3UploadFailedError("Failed to upload x to models/x: An error occurred (AccessDenied)")

    target, (folder, record) = MlflowTarget("sums"), model(tmp_path / "model")
    target.client.log_artifact = refuse
    with pytest.raises(UploadError, match=r"^mlflow://sums: Failed to upload x to models/x: .*AccessDenied\)$"):
        target.publish(folder, "r1-abc", record)
    MlflowTarget("sums").publish(folder, "r1-abc", record)
    monkeypatch.setattr("mlflow.artifacts.load_dict", lambda _: Path("/proc/self/mem").read_bytes())
    with pytest.raises(UploadError, match="Input/output error") as unread:
        MlflowTarget("sums").published()
    assert unread.type is UploadError, "it is not called damaged, which would let others publish over it"


def test_a_location_that_names_no_model_is_one_line() -> None:
    for location in ("", "a/b", "a:b", "it's"):
        with pytest.raises(ConfigError, match=r"names no registered model; write mlflow://MODEL"):
            open_target(f"mlflow://{location}")
