"""How long it takes to score 20 completions of which 4 are slow: `python -m benchmarks.rewards`.

The reward of a slow completion sleeps, within the deadline, so that the time is about waiting and not about the
machine's cores. Also printed: what a quick reward costs, and how many completions `boxed_math` judges in a second, each
over 2,000 of them.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import psutil
from rich.console import Console

from cosmos_core.rewards.runner import RewardRunner

PROGRAM = """
import time

def wait(to_be_evaluated, reference):
    time.sleep(float(to_be_evaluated))
    return 1.0
"""


def main() -> None:
    """Print both times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slow-seconds", type=float, default=9.0)
    console = Console(highlight=False)
    slow = parser.parse_args().slow_seconds
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "sleeper.py")
        file.write_text(PROGRAM)
        started = time.monotonic()
        with RewardRunner({f"{file}:wait": 1.0}, timeout_seconds=10.0) as runner:
            ready = time.monotonic()
            scores = runner.score(_requests([slow if i % 5 == 0 else 0.0 for i in range(20)]))
            done = time.monotonic()
    assert all(score.value == 1.0 for score in scores)
    console.print(f"{len(os.sched_getaffinity(0))} cores; start {ready - started:.2f} s")
    console.print(f"20 completions, 4 of them {slow:g} s: {done - ready:.1f} s")
    with RewardRunner({"gsm8k": 1.0}, timeout_seconds=10.0) as runner:
        began = time.monotonic()
        runner.score([{"to_be_evaluated": f"text #### {i}", "reference": f"#### {i}"} for i in range(2000)])
        console.print(f"one quick completion of 2,000: {(time.monotonic() - began) / 2:.3f} ms")
    with RewardRunner({"boxed_math": 1.0}, timeout_seconds=10.0) as runner:
        for what, over in {"integers": "", "fractions": "/7"}.items():
            requests = [_request(i, i // 8, over) for i in range(2000)]
            runner.score([_request(i, -i, over) for i in range(1, 50)])  # the processes import sympy first
            began, cpu = time.monotonic(), _cpu_seconds()
            scores = runner.score(requests)
            seconds, cpu = time.monotonic() - began, _cpu_seconds() - cpu
            console.print(f"boxed_math, {what}: {2000 / seconds:.0f} completions per second, {cpu:.2f} s of CPU")
            assert all(score.value == float(i % 2 == 0) for i, score in enumerate(scores))


def _cpu_seconds() -> float:
    """Of this process and its children."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(each.cpu_times()[:2]) for each in family)


def _request(i: int, number: int, over: str) -> dict[str, str]:
    """A completion of about a hundred words, every other of which is wrong; eight are of one prompt."""
    steps = " ".join(f"Then $x_{{{k}}} = {i + k}$, because it grows by one." for k in range(12))
    text = f"{steps} So we have $\\boxed{{{number + i % 2 * (1 + i % 8)}{over}}}$."
    return {"to_be_evaluated": text, "reference": f"\\frac{{{number}}}{{7}}" if over else str(number)}


def _requests(seconds: list[float]) -> list[dict[str, str]]:
    return [{"to_be_evaluated": str(each), "reference": ""} for each in seconds]


if __name__ == "__main__":
    main()
