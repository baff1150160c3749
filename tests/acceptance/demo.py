"""The demo as the proofs run it: the real command in a folder of its own, and what such a run left on disk."""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmos_core.observe.record import read_run
from cosmos_core.run.files import sha256
from cosmos_core.run.progress import read_metrics
from tests.conftest import Workspace

CONFIG = Path(__file__).parents[2] / "configs" / "demo" / "arithmetic.toml"
ACCURACY = "validation/accuracy"
DIFFERENCE = "rollout/logprob_difference_max"
LARGEST_DIFFERENCE = 1e-4
OVERHEAD_SECONDS = 25.0
_OVERHEAD = re.compile(r"orchestration overhead\s+(?:(\d+)m)?([\d.]+)s")


@dataclass(frozen=True)
class Timed:
    """A command that has ended."""

    output: str
    seconds: float

    @property
    def overhead_seconds(self) -> float:
        """Wall time outside of workers, as the final table prints it."""
        found = _OVERHEAD.search(self.output)
        assert found, self.output
        return 60 * float(found[1] or 0) + float(found[2])


def arguments(settings: Sequence[str] = (), config: Path = CONFIG) -> list[str]:
    """Of `cosmos` for a run of the demo with these settings."""
    return ["run", str(config), *(word for setting in settings for word in ("--set", setting))]


def shown(settings: Sequence[str] = (), config: Path = CONFIG) -> str:
    """The command as a person types it."""
    words = ["cosmos", "run", f"configs/demo/{config.name}"]
    return shlex.join([*words, *(word for setting in settings for word in ("--set", setting))])


def run_to_end(workspace: Workspace, settings: Sequence[str] = (), config: Path = CONFIG) -> Timed:
    """A whole demo, which has to succeed."""
    workspace.path.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    done = workspace.cosmos(*arguments(settings, config), timeout=3600)
    return Timed(done.stdout, time.monotonic() - began)


def start(workspace: Workspace, settings: Sequence[str] = ()) -> subprocess.Popen[str]:
    """A demo that is left running."""
    workspace.path.mkdir(parents=True, exist_ok=True)
    return workspace.start(*arguments(settings))


def metrics(workspace: Workspace, stage: str) -> dict[str, Any]:
    """What a finished stage reported."""
    return {record.name: record for record in read_run(workspace.run).stages}[stage].metrics


def largest_difference(workspace: Workspace) -> float:
    """Between a sampled token's log-probability in the trainer and in the engine, over a whole run, in nats."""
    return max(float(line[DIFFERENCE]) for line in curves(workspace, "grpo") if DIFFERENCE in line)


def curves(workspace: Workspace, stage: str) -> list[dict[str, Any]]:
    """Lines of a stage's `metrics.jsonl`; none before it was begun."""
    return read_metrics(workspace.stage(stage) / "metrics.jsonl")


def accuracy_before_grpo(workspace: Workspace) -> float:
    """Held-out accuracy of the validation before the first step of GRPO, which is that after SFT."""
    return float(next(line[ACCURACY] for line in curves(workspace, "grpo") if ACCURACY in line))


def figures(workspace: Workspace, stage: str) -> list[dict[str, Any]]:
    """The same without what a clock measured."""
    return [
        {key: value for key, value in line.items() if key.partition("/")[0] not in {"time", "throughput", "memory"}}
        for line in curves(workspace, stage)
    ]


def weights(workspace: Workspace, stage: str) -> dict[str, str]:
    """sha256 of every file of safetensors of a stage, by its path below the stage."""
    folder = workspace.stage(stage)
    return {str(file.relative_to(folder)): sha256(file) for file in sorted(folder.glob("safetensors/**/*.safetensors"))}
