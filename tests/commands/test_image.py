"""`deploy/Containerfile`: its steps, run without a container engine below a folder, make what a stage can train in."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import DEMOS

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy" / "Containerfile"
SHORT = """
[pipeline]
threads = 1
[policy]
model_max_length = 64
[train]
compile = true
max_num_steps = 2
train_batch_per_replica = 8
train_policy = { type = "sft", mini_batch = 8, conversation_column_name = "messages" }
[[pipeline.stages]]
name = "task"
kind = "custom"
entry = "DEMOS/arithmetic.py:make"
arguments = { train_rows = 64, heldout_rows = 8 }
[[pipeline.stages]]
name = "sft"
kind = "sft"
after = ["task"]
model = "stage:task"
data = "stage:task"
""".replace("DEMOS", str(DEMOS))
PLACES = ("/opt/cosmos-posttrain", "/opt/cosmos", "/runs")


def instructions() -> Iterator[tuple[str, str]]:
    """Each instruction of the file with what follows it, on one line."""
    text = re.sub(r"^#.*\n", "", FILE.read_text(), flags=re.M).replace("\\\n", " ")
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, rest = line.partition(" ")
        yield name, " ".join(rest.split())


def variants() -> dict[str, dict[str, str]]:
    """The arguments of each command that the head of the file gives, by the tag that it makes."""
    head = FILE.read_text().partition("ARG BASE")[0].replace("\\\n#", "")
    found = {}
    for command in re.findall(r"podman build (.*)", head):
        words = shlex.split(command)
        assert words[words.index("-f") + 1] == "deploy/Containerfile" and words[-1] == "."
        given = [words[i + 1] for i, word in enumerate(words) if word == "--build-arg"]
        found[words[words.index("-t") + 1]] = dict(each.split("=", 1) for each in given)
    return found


def test_the_file_has_what_its_examples_set_compilers_and_no_second_cuda() -> None:
    arguments = {rest.partition("=")[0]: rest.partition("=")[2] for name, rest in instructions() if name == "ARG"}
    gpu, cpu = variants().values()
    assert gpu == {} and cpu.keys() <= arguments.keys() and "whl/cpu" in cpu["TORCH"]
    assert arguments["TORCH"].strip('"') in (ROOT / "constraints.txt").read_text().splitlines()
    assert "vllm" in arguments["EXTRAS"] and "redis" in arguments["EXTRAS"] and "redis" in cpu["EXTRAS"]
    steps = [rest for name, rest in instructions() if name == "RUN"]
    [system] = [step for step in steps if "apt-get install" in step]
    assert {"gcc", "g++", "jq"} <= set(system.split()), "torch.compile and Triton compile at first use"
    python = re.match(r"python:3\.(\d+)-", arguments["BASE"])
    assert python and f"python3.{python[1]} -m venv" in " ".join(steps), "a release, with its headers"
    assert not re.search(r"cu1[0-9]{2}|cuda:", " ".join(map(" ".join, instructions())))


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_the_steps_make_an_environment_that_trains_compiled(tmp_path: Path) -> None:
    """For the CPU, from the indexes that pip has here; the packages of the system are looked up, not installed."""
    image = tmp_path / "image"

    def placed(text: str) -> str:
        return re.sub(rf"(?<![\w/])({'|'.join(PLACES)})(?![\w-])", rf"{image}\1", text)

    environment = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    arguments, folder = {}, tmp_path
    given = {"TORCH": "torch==2.13.0", "EXTRAS": list(variants().values())[1]["EXTRAS"]}
    for name, rest in instructions():
        if name == "ARG":
            key, _, value = rest.partition("=")
            arguments[key] = given.get(key, value.strip('"'))
        elif name == "ENV":
            for word in shlex.split(placed(rest)):
                key, _, value = word.partition("=")
                environment[key] = value.replace("$PATH", environment["PATH"])
        elif name == "WORKDIR":
            folder = Path(placed(rest))
            folder.mkdir(parents=True)
        elif name == "COPY":
            *sources, target = rest.split()
            for source in sources:
                copy, to = shutil.copytree if (ROOT / source).is_dir() else shutil.copy, folder / target
                to.mkdir(parents=True, exist_ok=True)
                copy(ROOT / source, to, **({"dirs_exist_ok": True} if copy is shutil.copytree else {}))
        elif name == "RUN" and "apt-get" in rest:
            packages = rest.partition("--no-install-recommends ")[2].partition(" &&")[0].split()
            known = subprocess.run(["apt-cache", "show", *packages], capture_output=True, text=True, check=False).stdout
            missing = [each for each in packages if not re.search(rf"^Package: {re.escape(each)}$", known, re.M)]
            assert not known or not missing, missing
        elif name == "RUN":
            step = re.sub(r"useradd [^&]*&&|chown \S+ \S+ &&", "", placed(rest))
            subprocess.run(["sh", "-ec", step], cwd=folder, env=environment | arguments, check=True, timeout=3000)
    (folder / "short.toml").write_text(SHORT)
    command = ["cosmos", "run", "short.toml"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((image / "runs").glob("2*/stages/sft/result.json")), "./outputs is the volume"
