"""Memory and time of a `prepare` stage over a million short rows: `python -m benchmarks.prepare [--rows N]`.

The stage runs in a process of its own, whose memory is looked at every 20 ms: `anonymous` is what the process itself
holds, `peak` counts the mapped pages of files too, which the kernel takes back when somebody needs them.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from rich.console import Console

PROGRAM = """
import sys
from pathlib import Path
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.prepare import run
from cosmos_core.run.stage import Stage
from tasks.stages.prepare import KIND

folder, kind, workers = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
policy = {"type": kind, "dataset": {"name": str(folder / "rows.jsonl")}, "dataloader_num_workers": workers}
recipe = {"train": {"train_policy": policy}, "policy": {"model_max_length": 64}, "rollout": {"max_response_length": 8}}
(folder / kind).mkdir()
config = StageConfig(name="prepare", kind="prepare")
run(Stage(folder / kind, config, Recipe.model_validate(recipe), str(folder / "model"), None, {}, "f", KIND))
"""


def main() -> None:
    """Print one line per number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--kind", choices=("sft", "grpo"), default="sft")
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    console = Console(highlight=False)
    for rows in options.rows:
        with tempfile.TemporaryDirectory() as folder:
            _write(Path(folder), rows)
            began, worked = time.monotonic(), _child_seconds()
            peak, anonymous = _watch([sys.executable, "-c", PROGRAM, folder, options.kind, str(options.workers)])
            seconds, work = time.monotonic() - began, _child_seconds() - worked
        console.print(
            f"{rows:,} rows: peak {peak / 2**20:,.0f} MiB, anonymous {anonymous / 2**20:,.0f} MiB, {seconds:.1f} s, "
            f"{work:.1f} s of CPU, {rows / work:,.0f} rows per second of it"
        )


def _child_seconds() -> float:
    """Return the processor time of all programs that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _write(folder: Path, rows: int) -> None:
    from configs.demo.arithmetic import make_tokenizer

    make_tokenizer().save_pretrained(folder / "model")
    with open(folder / "rows.jsonl", "w", encoding="utf-8") as file:
        for i in range(rows):
            file.write(json.dumps({"question": f"{i % 997}+{i % 991}=", "answer": str(i % 997 + i % 991)}) + "\n")


def _watch(command: list[str]) -> tuple[int, int]:
    """Run a program; return the most memory that it had, with the pages of files and without."""
    peak = anonymous = 0
    with subprocess.Popen(command) as process:
        program = psutil.Process(process.pid)
        while process.poll() is None:
            memory = program.memory_info()
            peak, anonymous = max(peak, memory.rss), max(anonymous, memory.rss - memory.shared)
            time.sleep(0.02)
    if process.returncode:
        raise SystemExit(process.returncode)
    return peak, anonymous


if __name__ == "__main__":
    main()
