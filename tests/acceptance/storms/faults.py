"""What can happen to a run while a command is running, and to its files between two commands.

Each is a function that is given the scene and does one thing; what it undoes itself it undoes before it returns.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.acceptance.storms.commands import Commands
from tests.acceptance.storms.shim import Shim
from tests.conftest import Workspace, processes_below

DAY = 86_400
_OF_OTHERS = ("did_", "stray.txt", "visits.txt")


@dataclass
class Scene:
    """A workspace in which a command may be running."""

    workspace: Workspace
    commands: Commands
    shim: Shim
    random: Random
    kept: dict[Path, bytes]
    """Files that were damaged, as they had been."""

    def wait(self, seconds: float) -> None:
        """Let time pass, with the watchdog looking."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.commands.watchdog.feel()
            time.sleep(0.05)

    @property
    def files(self) -> list[Path]:
        """Every file of every run, and what the runs share."""
        found = [path for path in (self.workspace.path / "outputs").rglob("*") if path.is_file()]
        return sorted(path for path in found if not path.name.startswith(_OF_OTHERS))


def _groups(scene: Scene) -> dict[str, list[int]]:
    """The processes of the tree, by what they are."""
    groups: dict[str, list[int]] = {}
    for pid, command in sorted(processes_below(scene.workspace.path).items()):
        is_supervisor = "launch.supervisor" in command
        is_server = "prefect server start" in command
        name = "server" if is_server else "worker" if "cosmos_core.worker" in command else "other"
        name = "flow" if pid in scene.commands.pids else f"{name}'s supervisor" if is_supervisor else name
        groups.setdefault(name, []).append(pid)
    return groups


def _send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _some(scene: Scene) -> tuple[str, list[int]]:
    """One process of a kind that is drawn first, so that the few are hit as often as the many; or all of them."""
    groups = _groups(scene)
    if not groups:
        return "nothing", []
    name = scene.random.choice([*sorted(groups), "all"])
    return (
        (name, [pid for group in groups.values() for pid in group])
        if name == "all"
        else (name, [scene.random.choice(groups[name])])
    )


def kill(scene: Scene) -> str:
    """SIGKILL."""
    name, pids = _some(scene)
    _send(pids, signal.SIGKILL)
    return f"killed {name}"


def terminate(scene: Scene) -> str:
    """SIGTERM."""
    name, pids = _some(scene)
    _send(pids, signal.SIGTERM)
    return f"SIGTERM to {name}"


def pause(scene: Scene) -> str:
    """SIGSTOP, and after some seconds SIGCONT."""
    name, pids = _some(scene)
    seconds = scene.random.uniform(0.5, 8.0)
    _send(pids, signal.SIGSTOP)
    scene.wait(seconds)
    _send(pids, signal.SIGCONT)
    return f"stopped {name} for {seconds:.1f} s"


def interrupt(scene: Scene) -> str:
    """Ctrl-C."""
    _send(scene.commands.pids, signal.SIGINT)
    return "SIGINT to flow"


def take_server(scene: Scene) -> str:
    """The server goes, its supervisor with it or not."""
    groups = _groups(scene)
    names = scene.random.choice([("server",), ("server", "server's supervisor")])
    _send([pid for name in names for pid in groups.get(name, ())], signal.SIGKILL)
    return f"killed {' and '.join(names)}"


def fill_disk(scene: Scene) -> str:
    """No room for some seconds."""
    seconds = scene.random.uniform(0.5, 6.0)
    scene.shim.set("is_full", 1)
    scene.wait(seconds)
    scene.shim.set("is_full", 0)
    return f"disk full for {seconds:.1f} s"


def write_protect(scene: Scene) -> str:
    """A file system that is read-only for some seconds."""
    seconds = scene.random.uniform(0.5, 6.0)
    scene.shim.set("is_read_only", 1)
    scene.wait(seconds)
    scene.shim.set("is_read_only", 0)
    return f"read-only for {seconds:.1f} s"


def set_clock(scene: Scene) -> str:
    """The clock jumps, and stays there."""
    seconds = scene.random.choice([-400 * DAY, -DAY, -3600, -5, 5, 3600, DAY, 400 * DAY])
    scene.shim.set("clock_offset_seconds", seconds)
    return f"clock off by {seconds} s"


def second_command(scene: Scene) -> str:
    """Another command on the same run, beside the first."""
    if not scene.commands.has_run:
        return "no run yet"
    other = scene.commands.start("resume", *scene.commands.run_name)
    code = scene.commands.follow(other)
    return f"a second command, which ended with {code}"


def second_run(scene: Scene) -> str:
    """Another run that wants the same result; then the first is killed."""
    first, other = scene.commands.pids, scene.commands.start("run", "p.toml", "--run-id", "other")
    scene.wait(scene.random.uniform(2.0, 12.0))
    _send(first, signal.SIGKILL)
    code = scene.commands.follow(other)
    return f"another run of the same, the first killed; it ended with {code}"


LIVE: dict[Callable[[Scene], str], int] = {
    kill: 8, terminate: 4, pause: 4, interrupt: 1, take_server: 2, fill_disk: 4, write_protect: 3, set_clock: 3,
    second_command: 2, second_run: 2,
}  # fmt: skip
"""With how often each is drawn."""


def _damage(scene: Scene, path: Path) -> None:
    scene.kept.setdefault(path, path.read_bytes())


def flip_bytes(scene: Scene) -> str:
    """Some bytes of some files become others."""
    files = [path for path in scene.files if path.stat().st_size]
    names = []
    for path in scene.random.sample(files, min(len(files), scene.random.randint(1, 4))):
        _damage(scene, path)
        content = bytearray(path.read_bytes())
        for _ in range(scene.random.choice([1, 1, 8])):
            content[scene.random.randrange(len(content))] ^= scene.random.randint(1, 255)
        path.chmod(path.stat().st_mode | 0o200)
        path.write_bytes(content)
        names.append(_short(scene, path))
    return f"flipped bytes in {', '.join(names) or 'nothing'}"


def lose_file(scene: Scene) -> str:
    """A file is gone, or has lost its end."""
    if not (files := scene.files):
        return "no file to lose"
    path = scene.random.choice(files)
    _damage(scene, path)
    if scene.random.random() < 0.5:
        path.unlink()
        return f"removed {_short(scene, path)}"
    size = scene.random.randint(0, path.stat().st_size)
    os.truncate(path, size)
    return f"cut {_short(scene, path)} to {size} bytes"


def damage_checkpoint(scene: Scene) -> str:
    """The newest checkpoint of a stage is truncated, deleted, or swapped for a link to an older one or to nothing."""
    steps = sorted(
        (scene.workspace.path / "outputs").glob("*/stages/*/checkpoints/step_*"), key=lambda path: path.stat().st_mtime
    )
    steps = [path for path in steps if not path.is_symlink()]
    if not steps:
        return "no checkpoint to damage"
    newest, how = steps[-1], scene.random.choice(["cut", "delete", "link to an older one", "link to nothing"])
    if how == "cut":
        files = sorted(path for path in newest.rglob("*") if path.is_file())
        victim = scene.random.choice(files) if files else newest
        if files:
            os.truncate(victim, victim.stat().st_size // 2)
        return f"cut {_short(scene, victim)}"
    shutil.rmtree(newest)
    older = [path for path in steps[:-1] if path.parent == newest.parent]
    if how != "delete":
        newest.symlink_to(older[-1].name if older and "older" in how else "step_999999")
    return f"{how}: {_short(scene, newest)}"


RESTING: dict[Callable[[Scene], str], int] = {flip_bytes: 4, lose_file: 2, damage_checkpoint: 3}


def drawn(random: Random, faults: dict[Callable[[Scene], str], int]) -> Callable[[Scene], str]:
    """Draw a fault."""
    return random.choices(list(faults), weights=list(faults.values()))[0]


def _short(scene: Scene, path: Path) -> str:
    return str(path.relative_to(scene.workspace.path / "outputs"))
