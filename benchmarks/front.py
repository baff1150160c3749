"""How long the front half takes: runs of many light stages, new and reused, digests of many files, and the wait for
the first worker. It trains nothing.

    python -m benchmarks.front [--stages 50] [--files 2000]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cosmos_core.observe.logs import add_log_silencing_variables

PROGRAM = """
import time
from cosmos_core.types import Outcome


def make(stage, number):
    (stage.path / "out.txt").write_text(str(number))
    return Outcome(outputs=("out.txt",), metrics={"began": time.time()}, info={"model": "out.txt"})
"""


def main() -> None:
    """Print the seconds of each part as one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=50)
    parser.add_argument("--files", type=int, default=2000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report(digest_seconds(Path(folder), arguments.files))
        report(first_stage_seconds(Path(folder)))
        report(run_seconds(Path(folder), arguments.stages))


def report(seconds: dict[str, float]) -> None:
    """Write one line of JSON to standard output."""
    sys.stdout.write(json.dumps({name: round(value, 2) for name, value in seconds.items()}) + "\n")
    sys.stdout.flush()


def digest_seconds(folder: Path, count: int) -> dict[str, float]:
    """Hash a folder of `count` small files, then look at it again with the digests remembered."""
    from cosmos_core.run.content import list_data_files
    from cosmos_core.run.digests import DigestCache

    data = folder / "files"
    data.mkdir()
    for number in range(count):
        (data / f"{number}.jsonl").write_text(f'{{"row": {number}}}\n')
    seconds = {}
    for name in ("new", "remembered"):
        began = time.perf_counter()
        DigestCache(folder / "digests.jsonl").digest_files(data, list_data_files(data))
        seconds[f"digests of {count} files, {name}"] = time.perf_counter() - began
    return seconds


def first_stage_seconds(folder: Path) -> dict[str, float]:
    """From the command to the first line of the first stage's worker, in a new folder of runs."""
    path = write_pipeline(folder / "one", 1)
    began = time.time()
    cosmos(path)
    [state] = (json.loads(file.read_text()) for file in (folder / "one").glob("outputs/*/stages/*/state.json"))
    [result] = (json.loads(file.read_text()) for file in (folder / "one").glob("outputs/*/stages/*/result.json"))
    return {
        "command to the first worker's start": state["spans"][0][0] - began,
        "command to the first worker's program": result["metrics"]["began"] - began,
        "command to the end, one stage": time.time() - began,
    }


def run_seconds(folder: Path, count: int) -> dict[str, float]:
    """Run `count` stages one behind the other; then all of them reused by a new run, and by a resume.

    `cpu` is the processor time of the command and all that it started, which does not see who else is at work.
    """
    path = write_pipeline(folder / "many", count)
    seconds = {}
    for name, command in (("new", "run"), ("reused by another run", "run"), ("resumed", "resume")):
        began, before = time.perf_counter(), os.times()
        cosmos(path, command)
        seconds[f"{count} stages, {name}"] = time.perf_counter() - began
        after = os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        seconds[f"{count} stages, {name}, cpu"] = cpu
    return seconds


def write_pipeline(folder: Path, count: int) -> Path:
    """Make a pipeline of `count` stages, each behind the one before."""
    folder.mkdir()
    (folder / "program.py").write_text(PROGRAM)
    lines = ["[pipeline]", "threads = 1"]
    for number in range(count):
        lines += ["[[pipeline.stages]]", f'name = "s{number}"', 'kind = "custom"', 'entry = "program.py:make"']
        lines += [f"arguments = {{ number = {number} }}", *([f'after = "s{number - 1}"'] if number else [])]
    path = folder / "pipeline.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def cosmos(path: Path, command: str = "run") -> None:
    """Run the command to its end."""
    environment: dict[str, Any] = add_log_silencing_variables(
        {k: v for k, v in os.environ.items() if not k.startswith("PREFECT")}
    )
    words = [command, path.name] if command == "run" else [command]
    root = str(Path(__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-m", "cosmos_core", *words],
        cwd=path.parent, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)


if __name__ == "__main__":
    main()
