"""Checkpoints go to a store beside the training: whole and once."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cosmos_core.errors import Preempted
from cosmos_core.run.bucket import Bucket
from cosmos_core.run.lock import FileLock
from cosmos_core.upload import checkpoint_upload
from cosmos_core.upload.artifact_store import ArtifactStore
from cosmos_core.upload.checkpoint_upload import CheckpointUploader, checkpoint_url, upload_checkpoints_in_background
from tests.conftest import wait_until
from tests.store import Proxy


@pytest.fixture(autouse=True)
def url(here: Proxy, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(checkpoint_upload, "_POLL_INTERVAL_SECONDS", 0.05)
    return checkpoint_url(f"s3://models/{request.node.name}", "sft", "20250101000000")


def checkpoint(stage: Path, step: int) -> Path:
    policy = stage / "checkpoints" / f"step_{step}" / "policy"
    policy.mkdir(parents=True)
    content = bytes([step]) * 1000
    (policy / "rank_0.safetensors").write_bytes(content)
    files = {"rank_0.safetensors": {"size": 1000, "sha256": hashlib.sha256(content).hexdigest()}}
    (policy / "manifest.json").write_text(json.dumps({"step": step, "files": files}))
    return policy


def sent(proxy: Proxy) -> list[str]:
    return ["/".join(request.key.split("/")[-3:]) for request in proxy.requests if request.method == "PUT"]


def test_each_complete_checkpoint_is_sent_once_and_its_manifest_last(tmp_path: Path, url: str, proxy: Proxy) -> None:
    checkpoint(tmp_path, 2)
    (checkpoint(tmp_path, 4) / "manifest.json").unlink()
    assert url.endswith("/sft/saves/20250101000000")
    assert list(CheckpointUploader(tmp_path, url).push()) == ["step_2"]
    assert sent(proxy) == [f"step_2/policy/{name}" for name in ("rank_0.safetensors", "manifest.json")]
    assert list(CheckpointUploader(tmp_path, url).push()) == []
    assert not list((tmp_path / "sending").iterdir())


def test_a_training_that_began_anew_replaces_what_it_sent_before(tmp_path: Path, url: str, proxy: Proxy) -> None:
    for stage, text in ((tmp_path / "before", b"1"), (tmp_path / "now", b"2")):
        file = checkpoint(stage, 2) / "rank_0.safetensors"
        file.write_bytes(text)
        files = {file.name: {"size": 1, "sha256": hashlib.sha256(text).hexdigest()}}
        (file.parent / "manifest.json").write_text(json.dumps({"step": 2, "files": files}))
        assert list(CheckpointUploader(stage, url).push()) == ["step_2"]
        assert list(CheckpointUploader(stage, url).push()) == []
        key = url.removeprefix("s3://models/") + "/step_2/policy"
        assert Bucket("models").read(f"{key}/{file.name}") == text
        assert json.loads(Bucket("models").read(f"{key}/manifest.json") or b"")["files"] == files


def test_what_a_disk_refuses_is_sent_later(
    tmp_path: Path, url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [OSError(errno.EIO, "input/output error"), KeyError("of a library")]

    def linked(source: Path, target: Path) -> Any:
        if failures:
            raise failures.pop()
        return real(source, target)

    real = checkpoint_upload.link_checkpoint
    monkeypatch.setattr(checkpoint_upload, "link_checkpoint", linked)
    monkeypatch.setattr(checkpoint_upload, "_RETRY_DELAY_SECONDS", 0.1)
    checkpoint(tmp_path, 2)
    with upload_checkpoints_in_background(tmp_path, url):
        wait_until(lambda: "step_2/policy/manifest.json" in sent(proxy), 20, "it is sent")
    told = (tmp_path / "events.jsonl").read_text()
    assert told.count("not sent") == 2 and "KeyError: 'of a library'" in told


def test_they_are_sent_while_the_training_goes_on_and_a_store_that_fails_costs_nothing(
    tmp_path: Path, url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_upload, "_RETRY_DELAY_SECONDS", 7200.0)  # longer than a test may take
    checkpoint(tmp_path, 2)
    with upload_checkpoints_in_background(tmp_path, url):
        wait_until(lambda: "step_2/policy/manifest.json" in sent(proxy), 20, "it is sent")
        shutil.rmtree(tmp_path / "checkpoints")
        proxy.reset(lambda request: "403")
        checkpoint(tmp_path, 4)
        wait_until(lambda: proxy.requests, 20, "it is tried")
    wait_until(lambda: "not sent" in (tmp_path / "events.jsonl").read_text(), 5, "it is said")
    proxy.reset()
    assert list(CheckpointUploader(tmp_path, url).push()) == ["step_4"], "the stage that publishes sends it"
    assert "step_2 to s3://models/" in (tmp_path / "events.jsonl").read_text()


@pytest.mark.parametrize("is_stopping", [False, True])
def test_the_last_checkpoint_is_sent_where_no_later_stage_has_it(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, is_stopping: bool
) -> None:
    def check_stop() -> None:
        if is_stopping:
            raise Preempted("the process is asked to stop")

    monkeypatch.setattr(checkpoint_upload, "_POLL_INTERVAL_SECONDS", 7200.0)  # longer than a test may take
    with upload_checkpoints_in_background(tmp_path, url, check_stop):
        checkpoint(tmp_path, 2)
    assert list(CheckpointUploader(tmp_path, url).push()) == ["step_2"] * is_stopping


def test_without_a_url_nothing_is_begun(tmp_path: Path, proxy: Proxy) -> None:
    with upload_checkpoints_in_background(tmp_path, ""):
        checkpoint(tmp_path, 2)
        assert "saves" not in {thread.name for thread in threading.enumerate()}
    assert proxy.requests == []


def test_the_uploads_to_a_target_and_to_the_artifact_store_do_not_share_a_folder(tmp_path: Path, url: str) -> None:
    policy = checkpoint(tmp_path, 2)
    stored = ArtifactStore(url).open_checkpoints("f", tmp_path)
    with checkpoint_upload.link_checkpoint(policy, tmp_path / "sending/step_2") as folder:
        assert folder is not None and stored.push() == ["step_2"]
        assert (folder / "rank_0.safetensors").is_file()


def test_the_best_checkpoint_comes_to_another_machine_with_the_newest(tmp_path: Path, url: str) -> None:
    here, there, store = tmp_path / "here", tmp_path / "there", ArtifactStore(url)
    for step in (2, 4, 6):
        (checkpoint(here, step) / "extra.json").write_text(json.dumps({"best": {"step": 2}}))
        manifest = here / f"checkpoints/step_{step}/policy/manifest.json"
        extra = (manifest.parent / "extra.json").read_bytes()
        files = json.loads(manifest.read_text())["files"]
        files["extra.json"] = {"size": len(extra), "sha256": hashlib.sha256(extra).hexdigest()}
        manifest.write_text(json.dumps({"step": step, "files": files}))
    store.open_checkpoints("f", here).push()
    assert store.open_checkpoints("f", there).pull() == "step_6"
    assert sorted(path.name for path in (there / "checkpoints").iterdir()) == ["step_2", "step_6"]


def test_one_sender_at_a_time_which_may_be_stopped(tmp_path: Path, url: str) -> None:
    def stop() -> None:
        raise InterruptedError

    checkpoint(tmp_path, 2)
    with FileLock(tmp_path / "sending.lock") as other:
        other.acquire()
        with pytest.raises(InterruptedError):
            list(CheckpointUploader(tmp_path, url).push(stop))
        with upload_checkpoints_in_background(tmp_path, url):
            wait_until(lambda: "saves" in {thread.name for thread in threading.enumerate()}, 60, "it waits")
            time.sleep(0.3)  # longer than it waits before it looks for checkpoints
    with pytest.raises(InterruptedError):
        list(CheckpointUploader(tmp_path, url).push(stop))
    assert list(CheckpointUploader(tmp_path, url).push()) == ["step_2"]


def test_an_account_that_may_remove_nothing_sends_new_checkpoints(tmp_path: Path, url: str, proxy: Proxy) -> None:
    checkpoint(tmp_path, 2)
    proxy.reset(lambda request: "403" if request.method == "DELETE" else "")
    assert list(CheckpointUploader(tmp_path, url).push()) == ["step_2"]
