"""Two nodes of Ray in two network namespaces of this machine, and the link between them cut for 20 seconds.

Needs root. The ranks are in one namespace and the engines in the other, with the driver beside those that Ray gives
room first; all that they say to each other goes over a pair of virtual network devices. What was made is taken away
again, whatever happens.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from cosmos_core.run.files import sha256
from cosmos_core.run.stage import Stage
from tests.acceptance.page import Proof, table
from tests.distributed import test_fleet as fleet
from tests.distributed.test_fleet import STEPS, recipe, rl, steps, validated

logger = logging.getLogger(__name__)

SEED = 20261123
MOMENTS = 3
NUM_STEPS_BEFORE = 3
"""The link is cut after one of these, since what is left takes a second or two."""
CUT_SECONDS = 20.0
SECONDS = 600
HEAD, NEAR, FAR = "10.99.0.1", "10.99.0.3", "10.99.0.2"
_RAY = str(Path(sys.executable).with_name("ray"))
_REPOSITORY = Path(__file__).parents[2]


class Nodes:
    """The namespaces `a`, of the head of Ray and the driver, and `b`; ranks are in one, engines in the other."""

    def __init__(self, folder: Path) -> None:
        mark = secrets.token_hex(2)
        self.a, self.b = f"cosmos-a-{mark}", f"cosmos-b-{mark}"
        self.devices = {self.a: f"ca{mark}", self.b: f"cb{mark}"}
        self._folder = folder
        self.environment = {
            **os.environ, "RAY_ADDRESS": f"{HEAD}:6379", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32), "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    def make(self) -> None:
        """Make both, with a link."""
        for name in self.devices:
            _ip("netns", "add", name)
        _ip(
            "link", "add", self.devices[self.a], "netns", self.a, "type", "veth", "peer", "name", self.devices[self.b],
            "netns", self.b,
        )  # fmt: skip
        for name, addresses in {self.a: (HEAD, NEAR), self.b: (FAR,)}.items():
            for address in addresses:
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", self.devices[name])
            for device in ("lo", self.devices[name]):
                _ip("-n", name, "link", "set", device, "up")

    def start(self, name: str, *arguments: str) -> None:
        """Start a node of Ray in a namespace."""
        environment = {key: value for key, value in self.environment.items() if key != "RAY_ADDRESS"}
        environment["GLOO_SOCKET_IFNAME"] = self.devices[name]
        memory = "--object-store-memory=200000000"
        command = ["ip", "netns", "exec", name, _RAY, "start", memory, "--disable-usage-stats", *arguments]
        subprocess.run(command, env=environment, cwd=_REPOSITORY, check=True, capture_output=True, timeout=120)

    def start_head(self) -> None:
        """Start the node that knows the others and computes nothing, and beside it one with room for ranks or engines:
        for the first that ask."""
        self.start(
            self.a, "--head", f"--node-ip-address={HEAD}", "--port=6379", "--num-cpus=0",
            "--include-dashboard=false", f"--temp-dir={self._folder}",
        )  # fmt: skip
        self.start(self.a, f"--address={HEAD}:6379", f"--node-ip-address={NEAR}", "--num-cpus=2")

    def start_other(self) -> None:
        """Start the node for what has no room beside the driver."""
        self.start(self.b, f"--address={HEAD}:6379", f"--node-ip-address={FAR}", "--num-cpus=2")

    def processes(self, name: str) -> list[psutil.Process]:
        """What runs in a namespace."""
        found = []
        for pid in _ip("netns", "pids", name).split():
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return found

    def named(self, name: str, actor: str) -> list[psutil.Process]:
        """The processes in a namespace that run an actor of this name."""
        return [each for each in self.processes(name) if f"ray::{actor}" in _title(each)]

    def cut(self, seconds: float) -> None:
        """Take the link away for so long."""
        _ip("-n", self.b, "link", "set", self.devices[self.b], "down")
        time.sleep(seconds)
        _ip("-n", self.b, "link", "set", self.devices[self.b], "up")

    def remove(self) -> None:
        """End what runs in the namespaces, and take them away."""
        for name in self.devices:
            with suppress(subprocess.CalledProcessError):
                processes = self.processes(name)
                for each in processes:
                    with suppress(psutil.NoSuchProcess):
                        each.send_signal(signal.SIGKILL)
                psutil.wait_procs(processes, timeout=10)
                _ip("netns", "del", name)


@contextmanager
def nodes(folder: Path) -> Iterator[Nodes]:
    """Make two namespaces with a node of Ray in each."""
    made = Nodes(folder)
    try:
        made.make()
        made.start_head()
        yield made
    finally:
        made.remove()


def prove(folder: Path) -> Proof:
    """A training whose link stays, then some whose link is cut."""
    began, generator = time.monotonic(), random.Random(SEED)
    if os.geteuid() != 0:
        raise SystemExit("network namespaces need root; run this part as root")
    task = fleet.make_task(folder, recipe(0))
    rows, met, expected = [], True, ""
    for number in range(MOMENTS + 1):
        step, delay = (
            (generator.randrange(1, NUM_STEPS_BEFORE + 1), generator.uniform(0, 0.3)) if number else (None, 0.0)
        )
        stage = rl(task, folder / f"nodes_{number}", recipe(2, ranks=2))
        at = time.monotonic()
        with nodes(folder / f"ray_{number}") as made:
            near, problems = _run(made, stage, step, delay)
        seconds = time.monotonic() - at
        digest = sha256(stage.path / f"safetensors/step_{STEPS}/model.safetensors")
        expected = expected or digest
        if [line["step"] for line in steps(stage)] != list(range(1, STEPS + 1)) or digest != expected:
            problems.append("another result")
        if [at_step for at_step, _ in validated(stage)] != [0, 2, 4, 6]:
            problems.append("validations are missing")
        met = met and not problems
        restarts = int(sum(line["rollout/restarts"] for line in steps(stage)))
        what = "the link stays" if step is None else f"cut after step {step}"
        rows.append([what, near, f"{seconds:.0f}", restarts, "; ".join(problems) or "the same bits, nothing left"])
        logger.info("%s", " | ".join(map(str, rows[-1])))
    return Proof(
        title="Two nodes, and the link between them cut",
        is_met=met,
        claim=(
            f"GRPO of {STEPS} steps, with validation while it trains: two engines on one node of Ray, two ranks on "
            f"the other, in network namespaces of one machine that a pair of virtual devices connects. At a random "
            f"moment (seed {SEED}) the link is down for {CUT_SECONDS:.0f} s. The weights have the sha256 of a "
            f"training whose link stays, so every prompt was trained once, and no process of the run is left."
        ),
        commands=["python -m tests.acceptance nodes"],
        body=table(["link", "near the driver", "seconds, with Ray's start", "engines asked anew", "result"], rows),
        seconds=time.monotonic() - began,
    )


def _run(made: Nodes, stage: Stage, step: int | None, delay: float) -> tuple[str, list[str]]:
    """Run the worker, and cut the link once a step is done; return what was near the driver, and what does not hold."""
    problems: list[str] = []
    near = ""
    with open(stage.path / "log", "w") as log:
        command = ["ip", "netns", "exec", made.a, sys.executable, "-m", "cosmos_core.worker", str(stage.path)]
        worker = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=made.environment, cwd=_REPOSITORY)
    deadline, is_due, has_room = time.monotonic() + SECONDS, step is not None, False
    while worker.poll() is None and time.monotonic() < deadline:
        if not has_room and made.named(made.a, "RolloutEngine") + made.named(made.a, "Rank"):
            made.start_other()
            has_room = True
        if not near and steps(stage):
            near = _near(made)
        if is_due and step is not None and max((line["step"] for line in steps(stage)), default=0) >= step:
            time.sleep(delay)
            made.cut(CUT_SECONDS)
            is_due = False
        time.sleep(0.1)
    if worker.poll() is None:
        worker.kill()
    if worker.wait() != 0:
        raise AssertionError((stage.path / "log").read_text()[-6000:])
    if is_due:
        problems.append("the training ended before the moment came")
    if not near:
        problems.append("engines and ranks were never on a node each")
    return near, problems + _left(made)


def _near(made: Nodes) -> str:
    """Say what is on the node of the driver; nothing until all engines are on one node and all ranks on the other."""
    engines, ranks = ([len(made.named(name, actor)) for name in (made.a, made.b)] for actor in fleet_actors())
    return {(2, 0, 0, 2): "engines", (0, 2, 2, 0): "ranks"}.get((*engines, *ranks), "")


def fleet_actors() -> Sequence[str]:
    """What a run has on a cluster."""
    return "RolloutEngine", "Rank"


def _left(made: Nodes) -> list[str]:
    """Say which processes of the run outlive it by ten seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        found = [each for name in (made.a, made.b) for actor in fleet_actors() for each in made.named(name, actor)]
        found += [each for name in (made.a, made.b) for each in made.processes(name) if "spawn_main" in _title(each)]
        if not found:
            return []
        time.sleep(0.2)
    return [f"{len(found)} processes left"]


def _title(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return " ".join(process.cmdline())
    return ""


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
