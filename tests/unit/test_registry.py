"""Things found by name: a user's file that failed to import is no module."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from cosmos_core.errors import ConfigError
from cosmos_core.registry import import_object, locate_code, read_signature
from cosmos_core.run.inputs import check_inputs
from cosmos_core.upload.base import open_target
from tests.unit.run_folder import counting_run


def test_a_failed_import_is_tried_again(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("first = 1\nraise ValueError('not yet')\nthing = 2\n")
    for _ in range(2):
        with pytest.raises(ValueError, match="not yet"):
            import_object(f"{file}:first")
    file.write_text("thing = 2\n# another size, as caches go by size and second\n")
    assert import_object(f"{file}:thing") == 2


def test_a_file_that_another_thread_still_imports_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stages of a flow may publish to targets of one file at once."""
    begun, go_on = threading.Event(), threading.Event()
    monkeypatch.setitem(sys.modules, "gate_of_a_test", SimpleNamespace(begun=begun, go_on=go_on))  # type: ignore[misc]
    (tmp_path / "slow.py").write_text("from gate_of_a_test import *\nbegun.set()\nassert go_on.wait(30)\nthing = 1\n")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(import_object, f"{tmp_path}/slow.py:thing")
        assert begun.wait(30)
        second = pool.submit(import_object, f"{tmp_path}/slow.py:thing")
        wait([second], timeout=0.05)
        go_on.set()
        assert [first.result(), second.result()] == [1, 1]


def test_a_target_of_a_package_in_the_current_folder_is_imported_where_only_scripts_are_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shelves").mkdir()
    (tmp_path / "shelves/rooms.py").write_text("ROOM = 'attic'\n")
    code = "from shelves.rooms import ROOM\n\nclass Shelf:\n    def __init__(self, where): self.where = ROOM + where\n"
    (tmp_path / "shelves/shelf.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    for name in ("shelves.shelf:Shelf", "shelves/shelf.py:Shelf"):
        monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in {"", str(tmp_path)}])
        assert open_target(f"{name}://x").where == "atticx"
        assert locate_code(name).samefile("shelves/shelf.py")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def makes(stage): ...", "has no 'make'; did you mean 'makes'?"),
        ("class Other:\n    def make(self): ...", "has no 'make'; known: Other"),
        ("", "has no 'make'"),
        ("if True:\n    make = print", ""),
        ("from shutil import move as make", ""),
        ("from shutil import *", ""),
        ("def __getattr__(name): ...", ""),
        ("def make(:", ""),
    ],
)
def test_code_that_has_nothing_of_the_name_is_found_without_running_it(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    if not said:
        assert locate_code(f"{file}:make") == file
        return
    with pytest.raises(ConfigError) as caught:
        locate_code(f"{file}:make")
    assert str(caught.value) == f"'{file}:make': {file} {said}"


@pytest.mark.parametrize(
    ("text", "signature"),
    [
        ("def make(stage, n: int = gone(), /, *more, k: gone, j=[gone], **rest) -> gone: return 1 / 0",
         "(stage, n=None, /, *more, k, j=None, **rest)"),
        ("raise SystemExit\ndef make(stage): ...", "(stage)"),
        ("@wrapped\ndef make(stage): ...", None),
        ("def make(stage): ...\nmake = print", None),
        ("if gone:\n    def make(stage): ...", None),
        ("from gone import make\nclass Other:\n    def make(self): ...", None),
        ("def make(:", None),
    ],
)  # fmt: skip
def test_a_signature_is_read_without_running_the_file(tmp_path: Path, text: str, signature: str | None) -> None:
    (tmp_path / "mine.py").write_text(text)
    found = read_signature(f"{tmp_path}/mine.py:make")
    assert (found and str(found)) == signature


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("first.arguments.step=9", "got an unexpected keyword argument 'step'"),
        ("first.entry='{}:none'", "too many positional arguments"),
        ("first.entry='{}:more'", "missing a required argument: 'other'"),
        ("first.entry='{}:fits'", ""),
    ],
)
def test_arguments_that_do_not_fit_a_users_stage_are_refused_before_anything_runs(
    tmp_path: Path, arguments: str, problem: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def none(): ...\ndef more(stage, other, **rest): ...\ndef fits(stage, *, steps, seconds=1): ...\n")
    said = f"stage 'first': arguments do not fit .*: {problem}"
    with pytest.raises(ConfigError, match=said) if problem else nullcontext():
        check_inputs(counting_run(tmp_path, arguments.format(file)).pipeline)


@pytest.mark.usefixtures("executed")
def test_files_are_looked_into_from_several_threads_at_once() -> None:
    """A collection in the middle of `ast.parse` lets another thread parse, which Python 3.11 does not survive."""
    code = """
import ast, gc, time
from concurrent.futures import ThreadPoolExecutor
from cosmos_core.registry import locate_code
gc.set_threshold(50)
gc.callbacks.append(lambda *_: time.sleep(0))
with ThreadPoolExecutor(8) as pool:
    files = list(pool.map(locate_code, ["ast:parse"] * 12))
assert {str(file) for file in files} == {ast.__file__}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
