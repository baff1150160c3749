"""`kill -9` at random moments over the whole demo, then `cosmos resume`: the same bits as if nothing had happened."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from cosmos_core.run.files import read_json
from cosmos_core.run.manifest import read_result
from tasks.kinds import all_kinds
from tests.acceptance import demo
from tests.acceptance.page import Proof, table
from tests.conftest import Workspace, processes_below
from tests.faults.test_kill import pids

logger = logging.getLogger(__name__)

TARGETS = ("flow", "worker", "supervisor", "server", "all") * 2
SEED = 20261121
QUIET_SECONDS = 15.0
# Fewer and smaller steps than the demo has, so that ten runs take half an hour; every stage is there.
SHORTENED = (
    "sft.train.max_num_steps=100",
    "sft.train.ckpt.save_freq=10",
    "grpo.train.max_num_steps=20",
    "grpo.train.train_batch_per_replica=128",
    "grpo.train.train_policy.mini_batch=64",
    "grpo.train.ckpt.save_freq=2",
    "grpo.validation.freq=5",
    'gate.require=["grpo-accuracy.validation/accuracy >= 0"]',
)
_TRAINED = ("sft", "grpo")
_WITH_WEIGHTS = (*_TRAINED, "export")


@dataclass(frozen=True)
class Kill:
    """What was hit, and how things stood."""

    what: str
    seconds: float
    """After the start of the command."""
    running: dict[str, int]
    """Step of the newest checkpoint of each unfinished training stage that had begun; absent where none had."""
    finished: dict[str, float]
    """When each finished, reusable stage was made, unix time."""
    unix: float
    exit_code: int
    quiet_seconds: float | None
    """Until no process was left; None: the flow lived on."""


def prove(folder: Path) -> Proof:
    """An undisturbed run, then one a target with a kill at a random moment."""
    began = time.monotonic()
    reference = Workspace(folder / "reference")
    whole = demo.run_to_end(reference, SHORTENED).seconds
    logger.info("reference: %.0f s", whole)
    generator = random.Random(SEED)
    rows, met = [], True
    for number, what in enumerate(TARGETS, start=1):
        workspace = Workspace(folder / f"kill_{number}")
        # Not to the very end: this run may be faster than the reference was, and over before the moment comes.
        kill = _kill(workspace, what, generator.uniform(0.0, 0.85 * whole))
        workspace.cosmos("resume", timeout=3600)
        left = processes_below(workspace.path)
        problems = [*_problems(workspace, reference, kill), *(["processes left after resume"] if left else [])]
        met = met and not problems
        rows.append(_row(number, kill, workspace, problems))
        logger.info("kill %d: %s", number, " | ".join(map(str, rows[-1])))
    header = [
        "run", "killed", "at", "exit", "quiet after", "finished stages reused", "went on from checkpoint", "result",
    ]  # fmt: skip
    return Proof(
        title="Ten kills",
        is_met=met,
        claim=(
            f"`kill -9` of one kind of process, or of all of them, at a random moment in the first 85 % of the demo "
            f"(seed {SEED}, an "
            f"undisturbed run takes {whole:.0f} s), then `cosmos resume`: weights of SFT, GRPO and export have the "
            f"sha256 of the undisturbed run's and `metrics.jsonl` the same figures but for times; stages that were "
            f"finished are not made again, in the others no step before the newest checkpoint is; where the flow was "
            f"killed, no process of the run is left after {QUIET_SECONDS:.0f} s, nor is any when `resume` returns. "
            f"Every stage of the demo, with fewer and smaller steps."
        ),
        commands=[demo.shown(SHORTENED), "kill -9 ...", "cosmos resume"],
        body=f"{table(header, rows)}\n\n{_digests(reference)}",
        seconds=time.monotonic() - began,
    )


def _kill(workspace: Workspace, what: str, seconds: float) -> Kill:
    """Start a run, kill at that moment, or at the next at which there is such a process, and wait for its end.

    A flow that has not yet written its run directory has nothing to resume, so that moment is waited for too.
    """
    began = time.monotonic()
    flow = demo.start(workspace, SHORTENED)
    while time.monotonic() - began < seconds or not _has_run(workspace) or not _targets(workspace, flow, what):
        if flow.poll() is not None:
            raise AssertionError(f"the run ended before there was a {what} to kill at {seconds:.0f} s")
        time.sleep(0.02)
    finished, running = _standing(workspace)
    for pid in _targets(workspace, flow, what):
        _kill_pid(pid)
    at, unix = time.monotonic(), time.time()
    code = flow.wait(timeout=3600)
    quiet = _seconds_until_quiet(workspace, at) if what in {"flow", "all"} else None
    return Kill(what, at - began, running, finished, unix, code, quiet)


def _has_run(workspace: Workspace) -> bool:
    return bool(list((workspace.path / "outputs").glob("2*/run.json")))


def _targets(workspace: Workspace, flow: subprocess.Popen[str], what: str) -> list[int]:
    """What there is to kill at this moment; empty: nothing of the kind."""
    supervisors = pids(workspace, "launch.supervisor")
    found = {
        "worker": [pid for pid in pids(workspace, "cosmos_core.worker") if pid not in supervisors],
        "supervisor": [pid for pid in supervisors if pid in pids(workspace, "cosmos_core.worker")],
        "server": [pid for pid in pids(workspace, "prefect server start") if pid not in supervisors],
    }
    if what == "all":
        return [flow.pid, *(pid for group in found.values() for pid in group)] if flow.poll() is None else []
    return [flow.pid] if what == "flow" else found[what]


def _kill_pid(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:  # another of them took it along
        return


def _standing(workspace: Workspace) -> tuple[dict[str, float], dict[str, int]]:
    """Finished stages with the time they were made; unfinished training stages with their newest checkpoint."""
    finished: dict[str, float] = {}
    running: dict[str, int] = {}
    runs = list((workspace.path / "outputs").glob("2*"))
    for path in sorted(runs[0].glob("stages/*")) if runs else ():
        result, progress = read_result(path), read_json(path / "progress.json")
        if result is not None:
            if all_kinds()[result["kind"]].is_reusable:
                finished[path.name] = result["created"]
        elif path.name in _TRAINED and isinstance(progress, dict) and progress["checkpoint_step"]:
            running[path.name] = progress["checkpoint_step"]
    return finished, running


def _seconds_until_quiet(workspace: Workspace, since: float) -> float:
    while processes_below(workspace.path) and time.monotonic() - since < 4 * QUIET_SECONDS:
        time.sleep(0.05)
    return time.monotonic() - since


def _problems(workspace: Workspace, reference: Workspace, kill: Kill) -> list[str]:
    """What does not hold; empty: the bar is met."""
    found = [
        f"weights of {name} differ"
        for name in _WITH_WEIGHTS
        if demo.weights(workspace, name) != demo.weights(reference, name)
    ]
    found += [
        f"figures of {name} differ"
        for name in _TRAINED
        if demo.figures(workspace, name) != demo.figures(reference, name)
    ]
    found += [f"{name} was made again" for name in kill.finished if not _is_reused(workspace, kill, name)]
    found += [
        f"{name} lost steps before its checkpoint"
        for name, step in kill.running.items()
        if _steps_kept(workspace, kill, name) < step
    ]
    if kill.quiet_seconds is not None and kill.quiet_seconds > QUIET_SECONDS:
        found.append(f"processes left after {QUIET_SECONDS:.0f} s")
    if kill.quiet_seconds is None and kill.exit_code:
        found.append("the flow did not survive")
    return found


def _is_reused(workspace: Workspace, kill: Kill, name: str) -> bool:
    result = read_result(workspace.stage(name))
    return result is not None and result["created"] == kill.finished[name]


def _steps_kept(workspace: Workspace, kill: Kill, name: str) -> int:
    """Steps that were taken before the kill and not again."""
    return sum(line["step"] > 0 and line["time"] < kill.unix for line in demo.curves(workspace, name))


def _row(number: int, kill: Kill, workspace: Workspace, problems: list[str]) -> list[object]:
    reused = sum(_is_reused(workspace, kill, name) for name in kill.finished)
    kept = [f"{name}: {_steps_kept(workspace, kill, name)}" for name in kill.running]
    return [
        number,
        kill.what,
        f"{kill.seconds:.1f} s",
        "-9" if kill.exit_code == -signal.SIGKILL else kill.exit_code,
        "lived on" if kill.quiet_seconds is None else f"{kill.quiet_seconds:.1f} s",
        f"{reused} of {len(kill.finished)}",
        ", ".join(kept) or "none running",
        "; ".join(problems) or "identical",
    ]


def _digests(reference: Workspace) -> str:
    lines = [
        f"{name}/{path}  {digest}" for name in _WITH_WEIGHTS for path, digest in demo.weights(reference, name).items()
    ]
    return "\n".join(["sha256 of the undisturbed run and of all ten:", "", "```", *lines, "```"])
