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
        requests = [{"to_be_evaluated": _proof(i), "reference": f"\\frac{{{i}}}{{7}}"} for i in range(2000)]
        runner.score(requests[:50])  # the processes import sympy first
        began = time.monotonic()
        scores = runner.score(requests)
        console.print(f"boxed_math, completions per second: {2000 / (time.monotonic() - began):.0f}")
    assert all(score.value == float(i % 2 == 0) for i, score in enumerate(scores))


def _proof(i: int) -> str:
    """A completion of about a hundred words, of which every other is wrong."""
    steps = " ".join(f"Then $x_{{{k}}} = {i + k}$, because it grows by one." for k in range(12))
    return f"{steps} So the answer is $\\boxed{{{i + i % 2}/7}}$."


def _requests(seconds: list[float]) -> list[dict[str, str]]:
    return [{"to_be_evaluated": str(each), "reference": ""} for each in seconds]


if __name__ == "__main__":
    main()
