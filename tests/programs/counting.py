"""A trivial stage: counts to `steps` with a checkpoint each step; its output is a digest chain over all steps."""

import builtins
import hashlib
import json
import logging
import os
import subprocess
import time
from pathlib import Path

from cosmos_core.errors import DataError, Preempted
from cosmos_core.types import Outcome


def count(stage, steps=10, seconds=0.05, crash_at=0, refuse=False, stray=False):
    """Chain digests; resumes from `checkpoint.json`; crashes hard once at `crash_at`; may leave a child that hides."""
    if stray:
        subprocess.run(["setsid", "--fork", "sleep", "600"], env={"PATH": os.environ["PATH"]}, cwd=stage.path)
    if refuse:
        raise DataError("rows.jsonl:3: refused on purpose")
    checkpoint = stage.path / "checkpoint.json"
    state = json.loads(checkpoint.read_text()) if checkpoint.exists() else {"step": 0, "chain": str(stage.seed)}
    with open(stage.path / "visits.txt", "a") as visits:
        visits.write(f"start {state['step']}\n")
    while state["step"] < steps:
        stage.progress.phase("step")
        time.sleep(seconds)
        state = {"step": state["step"] + 1, "chain": hashlib.sha256(state["chain"].encode()).hexdigest()}
        stage.metrics.log(state["step"], {"loss": 1 / state["step"]})
        temporary = checkpoint.with_suffix(".new")
        temporary.write_text(json.dumps(state))
        os.replace(temporary, checkpoint)
        stage.progress.report_checkpoint(state["step"])
        stage.progress.step(state["step"], steps, loss=1 / state["step"])
        if crash_at and state["step"] == crash_at and not (stage.path / "crashed").exists():
            (stage.path / "crashed").touch()
            os.kill(os.getpid(), 9)
        if stage.stop_requested:
            raise Preempted(f"saved at step {state['step']}")
    (stage.path / "out.txt").write_text(state["chain"])
    return Outcome(outputs=("out.txt",), metrics={"count": float(steps)}, info={"model": "out.txt"})


def hang(stage):
    """Enters a phase with a deadline of one second and never beats again."""
    stage.progress.phase("collective", deadline_seconds=1)
    time.sleep(600)


def never_progress(stage):
    """Crashes at once, each time."""
    os._exit(3)


def leaves_a_child(stage):
    """Ends while a grandchild in a session of its own still runs."""
    import subprocess

    subprocess.Popen(["sleep", "600"], start_new_session=True)
    (stage.path / "out.txt").write_text("done")
    return Outcome(outputs=("out.txt",))


def leaves_a_child_without_a_mark(stage):
    """Ends while a child still runs that has left its session, its environment and its parent."""
    import subprocess

    child = subprocess.Popen(["setsid", "--fork", "sleep", "600"], env={}, stdout=subprocess.PIPE, cwd=stage.path)
    child.wait()
    return Outcome()


def leaves_files(stage):
    """Ends without removing its temporary files."""
    import tempfile

    (stage.path / "scratch").write_text(tempfile.mkdtemp())
    return Outcome(outputs=("scratch",))


def on_another_clock(stage, offset, hangs):
    """Beats, or hangs, for longer than its deadline of two seconds, on a clock that is `offset` seconds off."""
    wall, monotonic = time.time, time.monotonic
    time.time, time.monotonic = lambda: wall() + offset, lambda: monotonic() + offset
    stage.progress.phase("collective", deadline_seconds=2)
    end = monotonic() + (60 if hangs else 4)
    while monotonic() < end:
        time.sleep(0.3)
        if not hangs:
            stage.progress.beat()
    return Outcome()


def returns_nothing(stage):
    """Forgets its outcome."""


def raises(stage, error="RuntimeError", secret="", file=""):
    """Raises an error of this class, and prints and says what it knows of an environment variable, or of a file."""
    if file:
        text = Path(file).read_text()
        logging.getLogger("mine").warning("read %s", text)
        subprocess.run(["cat", file])
        raise RuntimeError(f"login failed with {text}") from ValueError(text)
    print("told:", os.environ.get(secret, "nothing"), os.environ.get("OTHER_TOKEN", "nothing"))  # noqa: T201
    subprocess.run(["sh", "-c", f"echo shell told: ${secret}"])
    raise vars(builtins)[error](f"broken on purpose: {os.environ.get(secret, 'nothing')}")
