"""Kind `upload`: what it publishes under which name, and when it publishes nothing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from cosmos_core.errors import ConfigError, GateFailed, UploadError
from cosmos_core.run.directory import supersede_stage
from cosmos_core.run.manifest import commit_manifest
from cosmos_core.run.state import update_state
from cosmos_core.types import Outcome
from cosmos_core.upload.file import FileTarget
from tasks.stages import gate, upload
from tests.unit.test_gate import gate_stage
from tests.unit.test_upload import model, record_of, tree, upload_stage


def test_the_upload_stage_publishes_under_run_and_fingerprint_with_the_metrics_of_what_it_follows(
    tmp_path: Path,
) -> None:
    stage = upload_stage(tmp_path)
    outcome = upload.run(stage)
    place = tmp_path / "published" / "20250101000000-abcdef01"
    assert outcome.info == {"model": str(place), "published": str(place)}
    assert outcome.metrics == {"validation/accuracy": 0.75}
    published = FileTarget(tmp_path / "published").published()
    assert published is not None
    assert published["metrics"] == {"validation/accuracy": 0.75}
    assert published["run_id"] == "20250101000000"
    assert published["stage"] == str(stage.path)
    assert published["inputs"] == {"export": stage.inputs["export"]["digest"]}
    assert published["files"] == record_of(Path(stage.model))["files"]


@pytest.mark.parametrize(("returned", "address"), [("Path('v1')", "v1"), ("None", None)])
def test_a_users_target_may_return_a_path_or_nothing(tmp_path: Path, returned: str, address: str | None) -> None:
    code = f"class Shelf:\n    def __init__(self, where): ...\n    publish = lambda *others: {returned}\n"
    (tmp_path / "shelf.py").write_text(f"from pathlib import Path\n{code}")
    stage = upload_stage(tmp_path)
    target = f"{tmp_path}/shelf.py:Shelf"
    stage.config = stage.config.model_copy(update={"target": target})
    outcome = upload.run(stage)
    assert outcome.info == dict.fromkeys(("model", "published"), address or target)
    commit_manifest(stage.path, outcome, kind="upload", fingerprint="f", inputs={})


def test_a_model_that_was_altered_since_it_was_made_is_not_published_even_with_its_old_time(tmp_path: Path) -> None:
    stage = upload_stage(tmp_path)
    file = Path(stage.model) / "model.safetensors"
    status = file.stat()
    with open(file, "r+") as opened:
        opened.write("tampere")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(UploadError) as caught:
        upload.run(stage)
    said = "stage 'publish' publishes nothing: stage 'export': model/model.safetensors was altered"
    assert str(caught.value) == said
    assert not (tmp_path / "published").exists()
    (file.parents[1] / "result.json").unlink()
    with pytest.raises(UploadError, match=r"stage 'export': its result is gone$"):
        upload.run(stage)


def test_there_must_be_a_model_to_publish(tmp_path: Path) -> None:
    stage = upload_stage(tmp_path, reference="./nowhere")
    shutil.rmtree(stage.model)
    with pytest.raises(ConfigError) as caught:
        upload.run(stage)
    said = "stage 'publish': model = './nowhere' is no folder to publish; write model = \"stage:NAME\""
    assert str(caught.value) == said


def test_the_same_weights_are_not_published_a_second_time(tmp_path: Path) -> None:
    stage = upload_stage(tmp_path)
    first = upload.run(stage).info["published"]
    stage.fingerprint = "0" * 16
    (Path(stage.model) / "README.md").write_text("# of another run\n")
    stage.inputs = {}
    assert upload.run(stage).info == {"model": first, "published": first, "was_published": True}
    assert FileTarget(tmp_path / "published").history() == ["20250101000000-abcdef01"]


@pytest.mark.parametrize("damaged", ["model.safetensors", "published.json"])
@pytest.mark.parametrize("text", [None, "{"])
def test_the_same_weights_are_published_again_where_the_published_version_is_damaged(
    tmp_path: Path, damaged: str, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    stage = upload_stage(tmp_path)
    first = Path(upload.run(stage).info["published"])
    (first / damaged).unlink() if text is None else (first / damaged).write_text(text)
    stage.fingerprint = "0" * 16
    second = upload.run(stage).info
    assert second == dict.fromkeys(("model", "published"), str(tmp_path / "published" / "20250101000000-00000000"))
    assert tree(Path(second["published"]))["model.safetensors"] == "weights"
    assert FileTarget(tmp_path / "published").history() == [first.name, Path(second["published"]).name]
    [said] = [each.getMessage() for each in caplog.records if each.name == "tasks.stages.upload"]
    assert damaged in said and "anew" in said


@pytest.mark.parametrize(
    "since",
    ["rolled back", "another", "another, and a gate compared with that", "another, and a kill came before the record"],
)
def test_a_stage_that_has_published_leaves_a_pointer_that_was_moved_since(
    tmp_path: Path, since: str, caplog: pytest.LogCaptureFixture
) -> None:
    target, older = FileTarget(tmp_path / "published"), model(tmp_path / "older", "older")
    target.publish(older, "v0", record_of(older) | {"version": "v0"})
    stage = upload_stage(tmp_path)
    first = upload.run(stage).info["published"]
    if since == "rolled back":
        target.point_to("v0", ["v0"])
    else:
        target.publish(older, "v2", record_of(older) | {"version": "v2"})
    before = target.history()
    if since.endswith("with that"):  # the fingerprint is another, and the folder is moved aside
        supersede_stage(stage.path)
        stage.path.mkdir()
        stage.fingerprint = "0" * 16
    if since.endswith("record"):
        (stage.path / "publication.json").unlink()
        update_state(stage.path, attempt=2)
    assert upload.run(stage).info == {"model": first, "published": first, "was_published": True}
    assert target.history() == before
    name = "20250101000000-abcdef01"
    assert [each.getMessage() for each in caplog.records if each.name == "tasks.stages.upload"] == [
        f"{first} is not what is published now, which stays; cosmos promote {tmp_path}/published {name} publishes it "
        "again"
    ]


@pytest.mark.parametrize("why", ["--from-stage", "damaged", "cut off", "another model"])
def test_a_stage_that_has_published_publishes_again_where_there_is_a_reason(tmp_path: Path, why: str) -> None:
    target, older = FileTarget(tmp_path / "published"), model(tmp_path / "older", "older")
    stage = upload_stage(tmp_path)
    first = Path(upload.run(stage).info["published"])
    target.publish(older, "v2", record_of(older) | {"version": "v2"})
    if why == "--from-stage":
        supersede_stage(stage.path)
        update_state(stage.path, forced=True)
    elif why == "damaged":
        (first / "model.safetensors").write_text("damaged")
    elif why == "cut off":  # before the pointer moved to it
        (stage.path / "publication.json").unlink()
        update_state(stage.path, attempt=2)
        (tmp_path / "published" / "history.json").write_text('["v2"]')
    else:
        model(stage.path.parent / "export" / "model", "others")
        export, outcome = stage.path.parent / "export", Outcome(outputs=("model",))
        stage.inputs["export"] |= commit_manifest(export, outcome, kind="export", fingerprint="e" * 64, inputs={})
    assert upload.run(stage).info["published"] == str(first)
    assert target.history() == [first.name] * (why != "cut off") + ["v2", first.name]
    assert (first / "model.safetensors").read_text() == ("others" if why == "another model" else "weights")


def test_a_published_model_is_published_to_a_second_target(tmp_path: Path) -> None:
    stage = upload_stage(tmp_path)
    first = Path(upload.run(stage).info["published"])
    stage.model, stage.inputs = str(tmp_path / "published" / "latest"), {}
    stage.config = stage.config.model_copy(update={"target": str(tmp_path / "prod")})
    second = Path(upload.run(stage).info["published"])
    record = FileTarget(tmp_path / "prod").published()
    assert record is not None and set(record["files"]) == {"model.safetensors", "sub/config.json"}
    assert (record["stage"], record["metrics"]) == (str(stage.path), {}), "it is its own record"
    assert tree(second).keys() == tree(first).keys()


@pytest.mark.parametrize("order", [("mine", "other"), ("other", "mine")])
def test_a_gate_compares_the_stage_that_it_names_with_what_the_same_stage_measured_of_the_published_model(
    tmp_path: Path, order: tuple[str, str]
) -> None:
    name, target = "validation/reward", FileTarget(str(tmp_path / "published"))
    (tmp_path / "model").mkdir()

    def judge(run: str, mine: float, other: float) -> dict[str, float]:
        stage = gate_stage(tmp_path / run, (f"mine.{name} > published",))
        stage.config = stage.config.model_copy(update={"target": str(target.folder), "confidence": 0.5})
        rewards = {"mine": mine, "other": other}
        stage.inputs = {each: {"metrics": {name: rewards[each], f"{name}_stderr": 0.01}} for each in order}
        return dict(gate.run(stage).metrics)

    for run, mine, other in (("first", 0.3, 0.8), ("second", 0.4, 0.1)):
        target.publish(tmp_path / "model", run, {"run_id": run, "metrics": judge(run, mine, other), "files": {}})
    with pytest.raises(GateFailed, match=r"= 0\.35, bound 0\.4"):
        judge("third", 0.35, 0.9)
    assert judge("second", 0.4, 0.1)[f"mine.{name}"] == 0.4, "a resumed run is not compared with itself"


def test_a_gate_that_compares_with_numbers_reads_no_published_record(tmp_path: Path) -> None:
    stage = gate_stage(tmp_path, ("accuracy >= 0.6",), {"accuracy": 0.9})
    (Path(stage.config.target) / "v1/published.json").write_text("damaged")
    assert gate.run(stage).metrics["accuracy"] == 0.7, "the next upload repairs the record"


def test_a_users_target_that_records_no_metrics_is_told_what_a_gate_misses(tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text(
        "class Bare:\n    def __init__(self, _): ...\n    def published(self): return {'version': 'v1'}\n"
    )
    stage = gate_stage(tmp_path, ("accuracy >= published",))
    stage.config = stage.config.model_copy(update={"target": f"{tmp_path}/bare.py:Bare"})
    with pytest.raises(ConfigError, match="what is published has no 'accuracy'; compare with a number"):
        gate.run(stage)


def test_a_stage_whose_weights_another_run_had_published_leaves_a_newer_version(tmp_path: Path) -> None:
    target, stage = FileTarget(tmp_path / "published"), upload_stage(tmp_path)
    weights, newer = Path(stage.model), model(tmp_path / "newer", "newer")
    first = target.publish(weights, "v1", record_of(weights) | {"version": "v1"})
    assert upload.run(stage).info["published"] == first
    target.publish(newer, "v2", record_of(newer) | {"version": "v2"})
    assert upload.run(stage).info["published"] == first, "as a resumed run does"
    assert target.history() == ["v1", "v2"]


def test_folders_of_git_and_of_downloads_are_no_part_of_a_model(tmp_path: Path) -> None:
    stage = upload_stage(tmp_path)
    for name in (".git/config", ".cache/huggingface/download/config.json.metadata"):
        (Path(stage.model) / name).parent.mkdir(parents=True)
        (Path(stage.model) / name).write_text("")
    upload.run(stage)
    record = FileTarget(tmp_path / "published").published()
    assert record is not None and set(record["files"]) == {"model.safetensors", "sub/config.json"}


def test_a_resumed_run_is_compared_with_an_older_version_where_the_one_before_it_was_removed(tmp_path: Path) -> None:
    stage = gate_stage(tmp_path, ("accuracy > published",), {"accuracy": 0.65})
    outcome, target = gate.run(stage), FileTarget(stage.config.target)
    record = {"run_id": tmp_path.name, "metrics": outcome.metrics, "files": {}}
    (tmp_path / "model").mkdir()
    target.publish(tmp_path / "model", "v2", {**record, "run_id": "another"})
    target.publish(tmp_path / "model", "v3", record)
    shutil.rmtree(Path(stage.config.target) / "v2")
    assert gate.run(stage) == outcome, "with v1"
    shutil.rmtree(Path(stage.config.target) / "v1")
    assert gate.run(stage).info["conditions"][0]["bound"] is None, "with nothing"
