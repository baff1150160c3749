"""Files that several processes read and write: locks, a file that is replaced, metrics that grow."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cosmos_core.errors import ConfigError
from cosmos_core.run import digests
from cosmos_core.run.files import (
    copy_file,
    link_or_copy,
    list_files_below,
    read_document,
    read_json,
    replace_folder,
    user_cache_folder,
    write_json,
)
from cosmos_core.run.lock import FileLock, create_locked_folder
from cosmos_core.run.progress import MetricsReader, MetricsWriter, ProgressRecord
from cosmos_core.run.tail import FileTail
from cosmos_core.transient import is_transient
from tests.conftest import wait_until


def test_a_lock_has_one_holder(tmp_path: Path) -> None:
    with FileLock(tmp_path / "lock") as first, FileLock(tmp_path / "lock") as second:
        assert first.try_acquire()
        assert not second.try_acquire()
        first.release()
        assert second.try_acquire()


def test_a_lock_that_the_umask_shares_with_a_group_is_writable_for_the_group(tmp_path: Path) -> None:
    """Otherwise only the user who began the first run can begin another one in a shared folder of runs."""
    umask = os.umask(0o002)
    try:
        FileLock(tmp_path / "lock").release()
    finally:
        os.umask(umask)
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o664


def test_files_in_linked_folders_are_listed_and_circles_have_an_end(tmp_path: Path) -> None:
    """The folder of a model that is published may link to the folders of its parts."""
    for name in ("parts/unet/weights", "model/index", "model/.half.7.tmp", "model/deep/down/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "model" / "unet").symlink_to(tmp_path / "parts" / "unet")
    (tmp_path / "model" / "deep" / "back").symlink_to(tmp_path / "model")
    (tmp_path / "model" / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "linked").symlink_to(tmp_path / "model")
    for root in (tmp_path / "model", tmp_path / "linked"):
        found = [str(file.relative_to(root)) for file in list_files_below(root)]
        assert found == ["deep/down/x", "index", "unet/weights"]
    for name, other in (("unet", "clip"), ("clip", "unet")):
        (tmp_path / "pair" / name).mkdir(parents=True)
        (tmp_path / "pair" / name / "file").write_text(name)
        (tmp_path / "pair" / name / "other").symlink_to(tmp_path / "pair" / other)
    found = [str(file.relative_to(tmp_path / "pair")) for file in list_files_below(tmp_path / "pair")]
    assert found == ["clip/file", "clip/other/file", "unet/file", "unet/other/file"]


@pytest.mark.parametrize(
    ("number", "error_class", "message"),
    [(errno.ENOLCK, ConfigError, "DIR: its file system has no locks .No locks available."),
     (errno.ENOSYS, ConfigError, "DIR: its file system has no locks .Function not implemented.; take a folder on"),
     (errno.ESTALE, OSError, "Stale file handle: 'DIR/lock'")],
)  # fmt: skip
def test_a_file_system_without_locks_is_named_and_one_that_fails_may_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error_class: type[Exception], message: str
) -> None:
    """Lustre has none unless it is mounted with `flock`."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    with (
        FileLock(tmp_path / "lock") as lock,
        pytest.raises(error_class, match=message.replace("DIR", str(tmp_path))) as caught,
    ):
        lock.try_acquire()
    assert is_transient(caught.value) is (error_class is OSError)


@pytest.mark.parametrize(
    "read",
    [read_json, lambda path: read_document(path, ProgressRecord), lambda path: FileTail(path).read_text()],
    ids=["json", "document", "tail"],
)
def test_a_file_that_another_machine_replaces_meanwhile_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], object]
) -> None:
    """An NFS client that still reads the old file gets an error, once."""
    write_json(tmp_path / "progress.json", {"step": 3})
    expected, errors = read(tmp_path / "progress.json"), [OSError(errno.ESTALE, "stale")]

    def once_stale(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: function(*arguments) if not errors else raise_error(errors.pop())

    def raise_error(error: OSError) -> None:
        raise error

    monkeypatch.setattr(Path, "read_bytes", once_stale(Path.read_bytes))
    monkeypatch.setattr(os, "fstat", once_stale(os.fstat))
    assert expected is not None and read(tmp_path / "progress.json") == expected and not errors


def test_a_folder_for_temporary_files_without_locks_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(ConfigError, match=f"^TMPDIR = {tmp_path}: its file system has no locks .*; take a folder on a"):
        create_locked_folder(tmp_path / "cosmos-x")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_a_full_disk_leaves_without_its_lock_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_file = os.open

    def open_nothing_new(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return open_file(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", open_nothing_new)
    with pytest.raises(OSError, match="No space left"):
        create_locked_folder(tmp_path / "cosmos-x")
    assert not list(tmp_path.iterdir())


def test_waiting_for_a_lock_can_be_given_up(tmp_path: Path) -> None:
    def give_up() -> None:
        raise TimeoutError

    with FileLock(tmp_path / "lock") as first, FileLock(tmp_path / "lock") as second:
        first.acquire()
        with pytest.raises(TimeoutError):
            second.acquire(on_poll=give_up)


def test_a_child_that_was_given_the_lock_holds_it_after_its_parent_let_go(tmp_path: Path) -> None:
    with FileLock(tmp_path / "lock") as mine, FileLock(tmp_path / "lock") as other:
        mine.acquire()
        child = subprocess.Popen(["sleep", "600"], pass_fds=[mine.descriptor])
        stranger = subprocess.Popen(["sleep", "600"])
        try:
            mine.release()
            assert not other.try_acquire()
            child.kill()
            child.wait()
            assert other.try_acquire(), "a child that was not given it does not hold it"
        finally:
            for process in (child, stranger):
                process.send_signal(signal.SIGKILL)
                process.wait()


def test_readers_of_a_file_that_is_replaced_all_the_time_never_see_half_of_it(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    write_json(file, {"n": 0, "pad": "x" * 5000}, fsync=False)
    done = threading.Event()

    def write(start: int) -> None:
        for number in range(start, start + 200):
            write_json(file, {"n": number, "pad": "x" * 5000}, fsync=False)

    def read() -> int:
        looks = 0
        while not done.is_set():
            assert len(json.loads(file.read_text())["pad"]) == 5000
            looks += 1
        return looks

    with ThreadPoolExecutor(4) as pool:
        reader = pool.submit(read)
        list(pool.map(write, (0, 1000, 2000)))
        done.set()
        assert reader.result() > 0
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_metrics_that_grow_are_read_once_and_again_after_they_were_cut_back(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    metrics, reader = MetricsWriter(file), MetricsReader(file)
    assert reader.update() == []
    for step in (1, 2, 3):
        metrics.log(step, {"loss": float(step)})
    first = reader.update()
    assert [line["step"] for line in first] == [1, 2, 3]
    with open(file, "a") as opened:
        opened.write('no json\n{"step": 4, "lo')
    assert [line["step"] for line in reader.update()] == [1, 2, 3]
    with open(file, "a") as opened:
        opened.write('ss": 4.0}\n[5]\n{"step": null}\n{"step": "x"}\n')
    again = reader.update()
    assert [line["step"] for line in again] == [1, 2, 3, 4]
    assert again[0] is first[0], "it was not read again"
    metrics.remove_lines_after_step(2)
    metrics.log(3, {"loss": 30.0})
    assert [line["loss"] for line in reader.update()] == [1.0, 2.0, 30.0]


def test_a_folder_that_cannot_take_its_place_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, real = tmp_path / "model", os.rename
    with replace_folder(target) as building:
        (building / "weights").write_text("old")

    def rename(source: Path, destination: Path) -> None:
        if source.name.endswith(".tmp"):
            raise OSError(errno.EIO, "input/output error")
        real(source, destination)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="input/output"), replace_folder(target) as building:
        (building / "weights").write_text("new")
    assert (target / "weights").read_text() == "old" and [each.name for each in tmp_path.iterdir()] == ["model"]


def test_linking_again_keeps_the_file_and_no_other_link_of_the_target_changes(tmp_path: Path) -> None:
    source, target, other = (tmp_path / name for name in ("source", "target", "other"))
    source.write_text("new")
    for _ in range(2):
        link_or_copy(source, target)
    assert source.read_text() == target.read_text() == "new"
    other.write_text("old")
    target.unlink()
    target.hardlink_to(other)
    link_or_copy(source, target)
    assert (other.read_text(), target.read_text()) == ("old", "new")
    with open(target) as reader:
        copy_file(other, target)
        assert (reader.read(), target.read_text()) == ("new", "old"), "who reads a file reads it to its end"


def test_the_time_that_hashing_takes_does_not_make_a_file_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, cache = tmp_path / "weights", tmp_path / "digests.jsonl"

    def hash_slowly(path: Path) -> str:
        wait_until(lambda: time.time() > path.stat().st_ctime + 0.15, 60, "the clock has gone on")
        return "digest"

    monkeypatch.setattr(digests, "sha256", hash_slowly)
    file.write_text("one")
    assert digests.DigestCache(cache).digest_file(file) == "digest" and not cache.exists()
    assert digests.DigestCache(cache).digest_file(file) == "digest" and cache.exists()


def test_a_user_without_a_home_folder_is_told_which_variable_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_no_entry(user: int) -> None:
        raise KeyError(user)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", find_no_entry)
    with pytest.raises(ConfigError, match=f"^HOME is not set, and user {os.getuid()} has no home folder; set HOME to"):
        user_cache_folder()
    monkeypatch.setenv("HOME", "/home/ada")
    assert user_cache_folder() == Path("/home/ada/.cache/cosmos-posttrain")
