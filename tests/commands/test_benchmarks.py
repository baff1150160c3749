"""The programs in `benchmarks/` run, with the smallest sizes that they take: nothing else of the suite calls them."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
GSM8K = "{data}/gsm8k"
MODEL = "--hidden 128 --layers 1"
COMMANDS = (
    "auto --case tiny --rounds 1",
    "checkpoint --gigabytes 0.05 --saves 2",
    f"clean --data {GSM8K}/train.jsonl --against {GSM8K}/test.jsonl --rows 500",
    "diffusion --steps 1",
    "front --stages 2 --files 20",
    f"grpo --steps 3 --rounds 1 {MODEL}",
    f"head --vocabulary 2000 --tokens 64 --rounds 1 {MODEL}",
    "prepare --rows 200",
    "reward_service --images 40 --clients 2 --size 32 --kill-seconds 2",
    "rewards --slow-seconds 1",
    f"rl_step --case idle --rounds 1 {MODEL}",
    f"sft --data {GSM8K}/train.jsonl --batch 4 --mini-batch 2 --steps 2 --rounds 1 {MODEL}",
    "sync --gib 0.2 --rounds 1 --bucket-mib 64",
    "uploads --rounds 1 --steps 10 --save-every 5 --hidden 32",
)


@pytest.mark.full
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.partition(" ")[0])
def test_a_benchmark_runs(command: str, test_data: Path, tmp_path: Path) -> None:
    name, *options = command.format(data=test_data).split()
    if name in {"grpo", "sft"} and find_spec("trl") is None:
        pytest.skip("pip install trl==1.16.0")
    ended = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *options],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stdout.strip()
