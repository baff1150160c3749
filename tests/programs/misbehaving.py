"""A custom stage that counts, and behaves badly on the way: what it makes is right all the same."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cosmos_core.errors import Preempted
from cosmos_core.types import Outcome


def chain(seed, steps):
    """What the stage makes when nothing disturbs it."""
    text = str(seed)
    for _ in range(steps):
        text = hashlib.sha256(text.encode()).hexdigest()
    return text


def count(stage, ways=(), steps=20, seconds=0.1):
    """Chain digests with a checkpoint each step; behave badly in each of these `ways` once, evenly over the steps."""
    checkpoint = stage.path / "checkpoint.json"
    step, text = _continued(checkpoint, str(stage.seed))
    while step < steps:
        stage.progress.phase("step")
        time.sleep(seconds)
        step, text = step + 1, hashlib.sha256(text.encode()).hexdigest()
        _save(checkpoint, step, text)
        stage.progress.report_checkpoint(step)
        stage.progress.step(step, steps)
        if stage.stop_requested:
            raise Preempted(f"saved at step {step}")
        for number, way in enumerate(ways, start=1):
            done = stage.path / f"did_{way}"
            if step >= number * steps // (len(ways) + 1) and not done.exists():
                done.touch()
                WAYS[way](stage)
    (stage.path / "out.txt").write_text(text)
    return Outcome(outputs=("out.txt",), metrics={"count": float(steps)})


def _continued(checkpoint, first):
    """Step and text of a checkpoint that is whole; the beginning, if it is not."""
    try:
        saved = json.loads(checkpoint.read_bytes())
        if saved["digest"] == _digest(saved["step"], saved["text"]):
            return saved["step"], saved["text"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return 0, first


def _save(checkpoint, step, text):
    temporary = checkpoint.with_suffix(".new")
    temporary.write_text(json.dumps({"step": step, "text": text, "digest": _digest(step, text)}))
    os.replace(temporary, checkpoint)


def _digest(step, text):
    return hashlib.sha256(f"{step} {text}".encode()).hexdigest()


def _crash(stage):
    os.kill(os.getpid(), signal.SIGKILL)


def _exit(stage):
    os._exit(3)


def _hang(stage):
    stage.progress.phase("collective", deadline_seconds=2)
    time.sleep(600)


def _raise(stage):
    raise ConnectionResetError("a network that is not there")


def _stray(stage):
    """Start what leaves session and parent; it keeps its environment."""
    (stage.path / "stray.txt").touch()
    subprocess.run(["setsid", "--fork", "tail", "-f", str(stage.path / "stray.txt")], stdout=subprocess.DEVNULL)


def _unmarked_stray(stage):
    """Start what leaves session, parent and environment."""
    (stage.path / "stray.txt").touch()
    command = ["setsid", "--fork", "tail", "-f", str(stage.path / "stray.txt")]
    subprocess.run(command, env={"PATH": os.environ["PATH"]}, stdout=subprocess.DEVNULL)


def _deaf(stage):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _noise(stage):
    os.write(1, b"\0\xff\x1b[2J\r" * 20_000 + b"\n" * 5_000)
    sys.stderr.write("loud\n" * 2_000)


def _litter(stage):
    (Path(tempfile.mkdtemp()) / "large").write_bytes(bytes(1 << 20))


def _close(stage):
    os.close(1)
    os.close(2)


def _move(stage):
    os.chdir("/")
    os.umask(0o077)


WAYS = {
    "crash": _crash, "exit": _exit, "hang": _hang, "raise": _raise, "stray": _stray, "unmarked_stray": _unmarked_stray,
    "deaf": _deaf, "noise": _noise, "litter": _litter, "close": _close, "move": _move,
}  # fmt: skip
