"""Publishing to a folder: versions are whole, the pointer moves last, and a kill leaves the old one."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from cosmos_core.cli_models import promote, rollback
from cosmos_core.config.compose import load_pipeline
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.target import absolute_publication_target, split_publication_target
from cosmos_core.errors import ConfigError, UploadError
from cosmos_core.run.manifest import commit_manifest, read_result
from cosmos_core.run.stage import Stage
from cosmos_core.types import Outcome
from cosmos_core.upload import file
from cosmos_core.upload.base import check_targets, open_target
from cosmos_core.upload.file import FileTarget
from tasks.kinds import all_kinds
from tasks.stages import gate, upload
from tests.conftest import wait_until


def model(folder: Path, text: str = "weights") -> Path:
    (folder / "sub").mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_text(text)
    (folder / "sub" / "config.json").write_text("{}")
    return folder


def record_of(folder: Path, **metrics: float) -> dict:
    files = [file for file in folder.rglob("*") if file.is_file()]
    digests = {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
    return {"metrics": metrics, "files": digests}


def published(folder: Path, *versions: str) -> FileTarget:
    """A target with versions whose weights are their names."""
    target = FileTarget(folder / "published")
    for version in versions:
        source = model(folder / version, version)
        target.publish(source, version, record_of(source, accuracy=0.5))
    return target


def tree(folder: Path) -> dict[str, str]:
    return {str(f.relative_to(folder)): f.read_text() for f in sorted(folder.rglob("*")) if f.is_file()}


def test_a_published_version_holds_every_file_and_latest_points_to_it(tmp_path: Path) -> None:
    source, target = model(tmp_path / "model"), FileTarget(tmp_path / "published")
    assert target.published() is None
    record = record_of(source, accuracy=0.5)
    assert target.publish(source, "v1", record) == str(tmp_path / "published" / "v1")
    copied = tree(tmp_path / "published" / "v1")
    assert target.published() == record
    assert set(copied) == {"model.safetensors", "sub/config.json", "published.json"}
    assert copied["model.safetensors"] == "weights"
    assert os.readlink(tmp_path / "published" / "latest") == "v1"
    assert sorted(path.name for path in (tmp_path / "published").iterdir()) == ["history.json", "latest", "v1"]


def test_publishing_again_sends_nothing_twice_and_mends_what_was_damaged(tmp_path: Path) -> None:
    source, target = model(tmp_path / "model"), FileTarget(tmp_path / "published")
    record = record_of(source)
    file = Path(target.publish(source, "v1", record)) / "model.safetensors"
    inode = file.stat().st_ino
    target.publish(source, "v1", record)
    assert file.stat().st_ino == inode
    file.write_text("damaged")
    target.publish(source, "v1", record)
    assert file.read_text() == "weights"
    (file.parent / "published.json").unlink()
    target.publish(source, "v1", record)
    assert target.published() == record
    (file.parent / "published.json").write_text("{}")
    target.publish(source, "v1", record)
    assert target.published() == record


@pytest.mark.parametrize("damage", [None, "", "[]", "{}", '{"metrics": 3}', '{"metrics": {}}'])
def test_a_damaged_record_of_what_is_published_is_not_taken_for_nothing(tmp_path: Path, damage: str | None) -> None:
    source, target = model(tmp_path / "model"), FileTarget(tmp_path / "published")
    record = Path(target.publish(source, "v1", record_of(source))) / "published.json"
    record.unlink()
    if damage is not None:
        record.write_text(damage)
    with pytest.raises(UploadError) as caught:
        target.published()
    latest = tmp_path / "published" / "latest"
    assert str(caught.value) == (f"{latest}/published.json is missing or damaged; publish again, or remove {latest}")


def test_the_pointer_goes_back_to_an_older_version_that_is_published_again(tmp_path: Path) -> None:
    for version in ("v1", "v2", "v1"):
        published(tmp_path, version)
        assert (tmp_path / "published" / "latest" / "model.safetensors").read_text() == version


def test_publications_at_once_are_all_in_the_history(tmp_path: Path) -> None:
    source, versions = model(tmp_path / "model"), [f"v{number}" for number in range(10, 30)]
    with ThreadPoolExecutor(len(versions)) as pool:
        publish = partial(FileTarget(tmp_path / "published").publish, source, record=record_of(source))
        list(pool.map(publish, versions))
    assert sorted(FileTarget(tmp_path / "published").history()) == versions


def test_the_pointer_can_be_moved_to_any_whole_version(tmp_path: Path) -> None:
    assert FileTarget(tmp_path / "published").history() == []
    target = published(tmp_path, "v1", "v2")
    shutil.copytree(tmp_path / "published" / "v2", tmp_path / "published" / ".v2.123.tmp")
    assert target.history() == target.versions() == ["v1", "v2"], "an unfinished copy is no version"
    with pytest.raises(UploadError, match="'v2' was published meanwhile"):
        target.point_to("v1", [])
    target.point_to("v1", ["v1"])
    assert os.readlink(tmp_path / "published" / "latest") == "v1" and target.history() == ["v1"]
    (tmp_path / "published" / "v2" / "model.safetensors").write_text("damaged")
    with pytest.raises(UploadError, match=r"v2: model.safetensors is missing or altered; the pointer was not moved$"):
        target.point_to("v2")
    with pytest.raises(UploadError, match=r"v3/published.json is missing or damaged; publish again$"):
        target.point_to("v3")
    assert target.history() == ["v1"]
    for name in ("latest", "../published/v1", str(tmp_path / "published" / "v1")):
        with pytest.raises(UploadError, match=r"is no version of .*; the pointer was not moved$"):
            target.point_to(name)
    assert os.readlink(tmp_path / "published" / "latest") == "v1"


def test_a_rollback_that_breaks_off_does_not_make_the_next_one_go_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, folder = published(tmp_path, "v1", "v2"), tmp_path / "published"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # as a full disk: links can be made, files not
    try:
        with pytest.raises(UploadError, match=r"File too large; the pointer was not moved$"):
            rollback(str(folder))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (os.readlink(folder / "latest"), target.history()) == ("v2", ["v1", "v2"])
    writes = iter((file.write_json,))  # for a second one there is no room, and the pointer was moved
    monkeypatch.setattr(file, "write_json", lambda *given: next(writes)(*given))
    rollback(str(folder))
    assert (os.readlink(folder / "latest"), target.history()) == ("v1", ["v1"])


def test_a_version_that_a_rollback_left_behind_is_listed_and_one_that_is_not_there_is_not_called_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, folder = published(tmp_path, "v1", "v2"), str(tmp_path / "published")
    rollback(folder)
    capsys.readouterr()
    promote(folder)
    assert capsys.readouterr().out == "v1  accuracy = 0.5  (published)\nv2  accuracy = 0.5\n"
    with pytest.raises(ConfigError, match=r"published: there is no version 'v3'; there are: v1, v2$"):
        promote(folder, "v3")
    promote(folder, "v2")
    assert target.history() == ["v1", "v2"]


def test_what_was_published_is_listed_whatever_its_metrics_are_and_what_was_removed_as_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"/typo: nothing was published; give the target of an upload stage$"):
        promote(f"{tmp_path}/typo", "")
    source = model(tmp_path / "model")
    record = {**record_of(source), "metrics": {"accuracy": 0.5, "note": "by hand"}}
    published(tmp_path, "v1").publish(source, "v2", record)
    shutil.rmtree(tmp_path / "published" / "v1")
    promote(str(tmp_path / "published"), "")
    assert capsys.readouterr().out == "v1  gone\nv2  accuracy = 0.5  (published)\n"


def test_a_copy_that_differs_from_its_record_leaves_the_pointer(tmp_path: Path) -> None:
    source, target = model(tmp_path / "model"), FileTarget(tmp_path / "published")
    target.publish(source, "v1", record_of(source))
    record = record_of(source)
    (source / "model.safetensors").write_text("altered meanwhile")
    with pytest.raises(UploadError) as caught:
        target.publish(source, "v2", record)
    place = tmp_path / "published" / "v2"
    assert str(caught.value) == (
        f"{place}: model.safetensors is missing or altered after the copy; the pointer was not moved"
    )
    assert os.readlink(tmp_path / "published" / "latest") == "v1"


def test_read_only_files_are_published(tmp_path: Path) -> None:
    source = model(tmp_path / "model")
    (source / "model.safetensors").chmod(0o444)
    FileTarget(tmp_path / "published").publish(source, "v1", record_of(source))
    assert (tmp_path / "published" / "v1" / "model.safetensors").read_text() == "weights"


def test_the_copy_of_a_read_only_folder_can_be_completed_and_removed_by_its_owner(tmp_path: Path) -> None:
    source = model(tmp_path / "model")
    for folder in (source / "sub", source):
        folder.chmod(0o555)
    FileTarget(tmp_path / "published").publish(source, "v1", record_of(source))
    version = tmp_path / "published" / "v1"
    assert [folder.stat().st_mode & 0o777 for folder in (version, version / "sub")] == [0o755, 0o755]


@pytest.mark.parametrize(("below", "reason"), [("file/x", "Not a directory"), ("file", "File exists")])
def test_a_target_that_cannot_be_written_is_one_line(tmp_path: Path, below: str, reason: str) -> None:
    source = model(tmp_path / "model")
    (tmp_path / "file").write_text("")
    with pytest.raises(UploadError) as caught:
        FileTarget(tmp_path / below).publish(source, "v1", record_of(source))
    assert str(caught.value) == (f"target {tmp_path / below} cannot be written: {reason}; the pointer was not moved")


def test_a_file_that_cannot_be_copied_is_named(tmp_path: Path) -> None:
    source = model(tmp_path / "model")
    (source / "link").symlink_to("nowhere")
    with pytest.raises(
        UploadError, match=r"cannot be written: .*No such file.*model/link.*; the pointer was not moved$"
    ) as caught:
        FileTarget(tmp_path / "published").publish(source, "v1", {"files": {}})
    assert "\n" not in str(caught.value)


def test_a_target_is_a_folder_or_the_name_of_a_file_of_ours() -> None:
    for url in ("/models/mine", "file:///models/mine"):
        target = open_target(url)
        assert isinstance(target, FileTarget)
        assert target.folder == Path("/models/mine")
    with pytest.raises(ConfigError) as caught:
        open_target("ftp://host/models")
    assert str(caught.value) == "target = 'ftp://host/models': there is no 'ftp'; known: file, hub, mlflow, s3"


USERS_TARGET = """
import json
from pathlib import Path

class Shelf:
    def __init__(self, place):
        self.file = Path(place) / "shelf.json"

    def published(self):
        return json.loads(self.file.read_text())["record"] if self.file.exists() else None

    def publish(self, folder, version, record):
        names = sorted(path.name for path in Path(folder).iterdir())
        self.file.write_text(json.dumps({"version": version, "names": names, "record": record}))
        return f"shelf:{version}"
"""


def test_a_users_class_is_a_target_for_the_upload_and_for_the_gate(tmp_path: Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text(USERS_TARGET)
    stage = upload_stage(tmp_path)
    target = f"{code}:Shelf://{tmp_path}"
    stage.config = stage.config.model_copy(update={"target": target})
    assert upload.run(stage).info == {
        "model": "shelf:20250101000000-abcdef01", "published": "shelf:20250101000000-abcdef01",
    }  # fmt: skip
    assert json.loads((tmp_path / "shelf.json").read_text())["names"] == ["model.safetensors", "sub"]
    settings = {"name": "gate", "kind": "gate", "after": ("export",), "target": target}
    stage.config = StageConfig(**settings, require=("validation/accuracy >= published",))
    (condition,) = gate.run(stage).info["conditions"]
    assert condition["bound"] == 0.75 and condition["passed"], "the gate reads what the class published"


def test_a_users_target_that_cannot_be_imported_is_one_line(tmp_path: Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text("import json\nraise RuntimeError('not\\ntoday')\n")
    with pytest.raises(ConfigError, match=r"mine\.py:Shelf' cannot be imported: RuntimeError: not") as caught:
        open_target(f"{code}:Shelf")
    assert str(caught.value).startswith(f"target = '{code}:Shelf': ") and f"({code}:2)" in str(caught.value)


@pytest.mark.parametrize(
    ("written", "kept", "parts"),
    [
        ("models", "HERE/models", ("file", "HERE/models")),
        ("file://models", "HERE/models", ("file", "HERE/models")),
        ("mine.py:Shelf", "HERE/mine.py:Shelf", ("HERE/mine.py:Shelf", "")),
        ("mine.py:Shelf://s/x", "HERE/mine.py:Shelf://s/x", ("HERE/mine.py:Shelf", "s/x")),
        ("my.shelves:Shelf", "my.shelves:Shelf", ("my.shelves:Shelf", "")),
        ("s3://bucket/x", "s3://bucket/x", ("s3", "bucket/x")),
        ("~nobody-here/x", "~nobody-here/x", ("file", "~nobody-here/x")),
        ("./~nobody-here", "HERE/~nobody-here", ("file", "HERE/~nobody-here")),
    ],
)
def test_a_target_is_kept_so_that_a_run_can_be_resumed_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, kept: str, parts: tuple[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = absolute_publication_target(written, os.path.abspath)
    assert found == kept.replace("HERE", str(tmp_path))
    assert split_publication_target(found) == tuple(part.replace("HERE", str(tmp_path)) for part in parts)


PUBLISH = """
import sys
from pathlib import Path
from cosmos_core.upload.file import FileTarget
from tests.unit.test_upload import record_of
folder, target = Path(sys.argv[1]), Path(sys.argv[2])
FileTarget(target).publish(folder, "v2", record_of(folder))
"""


def test_a_kill_in_the_middle_leaves_the_old_version_and_the_next_try_completes(tmp_path: Path) -> None:
    old, new, target = model(tmp_path / "old", "old"), model(tmp_path / "new", "new"), tmp_path / "published"
    FileTarget(target).publish(old, "v1", record_of(old))
    before = tree(target / "latest")
    for number in range(1500):
        (new / f"{number:04}").write_text("x" * 1000)
    process = subprocess.Popen([sys.executable, "-c", PUBLISH, str(new), str(target)], cwd=Path(__file__).parents[2])
    wait_until(lambda: any(target.glob(".v2.*/0*")) or process.poll() is not None, 60, "the copy has begun")
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it was killed in the middle"
    assert os.readlink(target / "latest") == "v1"
    assert tree(target / "latest") == before
    FileTarget(target).publish(new, "v2", record_of(new))
    assert os.readlink(target / "latest") == "v2"
    assert len(tree(target / "v2")) == 1503
    left = sorted(path.name for path in target.iterdir())
    assert left == ["history.json", "latest", "v1", "v2"], "nothing half-written stays"


def upload_stage(folder: Path, *, reference: str = "stage:export") -> Stage:
    """An upload stage behind a finished export."""
    source = folder / "20250101000000" / "stages" / "export"
    model(source / "model")
    outcome = Outcome(outputs=("model",), metrics={"validation/accuracy": 0.75}, info={"model": "model"})
    commit_manifest(source, outcome, kind="export", fingerprint="e" * 64, inputs={})
    result = read_result(source)
    assert result is not None
    (source.parent / "publish").mkdir(exist_ok=True)
    target = str(folder / "published")
    config = StageConfig(name="publish", kind="upload", after=("export",), model=reference, target=target)
    return Stage(
        path=source.parent / "publish", config=config, recipe=Recipe(), model=str(source / "model"), data=None,
        inputs={"export": {**result, "path": str(source)}}, fingerprint="abcdef0123456789",
        kind=all_kinds()["upload"],
    )  # fmt: skip


def test_a_target_that_cannot_be_written_is_found_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    stages = "[[pipeline.stages]]\nname = 'm'\nkind = 'custom'\nentry = 'json:loads'\n" + (
        "[[pipeline.stages]]\nname = 'up'\nkind = 'upload'\nafter = 'm'\nmodel = 'stage:m'\ntarget = '{}'\n"
    )
    for target in (tmp_path / "new/folder", tmp_path):
        (tmp_path / "p.toml").write_text(stages.format(target))
        check_targets(load_pipeline(tmp_path / "p.toml", [], all_kinds()))
    assert not (tmp_path / "new").exists()
    below = tmp_path / "file/models"
    (tmp_path / "p.toml").write_text(stages.format(below))
    with pytest.raises(ConfigError) as caught:
        check_targets(load_pipeline(tmp_path / "p.toml", [], all_kinds()))
    said = f"target = '{below}': {below} cannot be written: {tmp_path / 'file'} is no folder"
    assert str(caught.value) == f"{tmp_path}/p.toml: stage 'up': {said}"


def test_a_target_that_a_gate_cannot_read_is_found_before_anything_runs(tmp_path: Path) -> None:
    target = published(tmp_path, "v1").folder
    (tmp_path / "p.toml").write_text(
        "[[pipeline.stages]]\nname = 'm'\nkind = 'custom'\nentry = 'json:loads'\n[[pipeline.stages]]\nname = 'g'\n"
        f"kind = 'gate'\nafter = 'm'\nrequire = ['m.accuracy >= published']\ntarget = '{target}'\n"
    )
    pipeline = load_pipeline(tmp_path / "p.toml", [], all_kinds())
    check_targets(pipeline)
    lacking = load_pipeline(tmp_path / "p.toml", ["g.require=['loss < published']"], all_kinds())
    with pytest.raises(
        ConfigError, match=r"stage 'g': target = .*: 'loss < published': what is published has no 'loss'"
    ):
        check_targets(lacking)
    (target / "v1" / "published.json").write_text("{")
    with pytest.raises(ConfigError, match=f"stage 'g': target = '{target}': .*published.json is missing or damaged"):
        check_targets(pipeline)


def test_a_target_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    source, target = model(tmp_path / "model"), FileTarget(tmp_path / "published")
    target.publish(source, "v1", record_of(source))
    record = tmp_path / "published/v1/published.json"
    record.unlink()
    record.symlink_to(record)
    for function in (target.published, lambda: target.record_of("v1"), lambda: target.point_to("v1")):
        with pytest.raises(UploadError, match=r"published cannot be read: Too many levels of symbolic links$"):
            function()
