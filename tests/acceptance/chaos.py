"""Kills at random moments of everything that a pipeline over machines without a common disk runs on.

A server, three process workers with folders of their own, and a store between them; who is killed is started again as
a service manager would. A pipeline that did not end by itself goes on by `cosmos resume`.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cosmos_core.run.files import parse_json_objects
from cosmos_core.run.manifest import read_result
from cosmos_core.run.state import FINISHED_STATES, read_state
from tests import store
from tests.acceptance.page import Proof, table
from tests.acceptance.postgres import postgres
from tests.commands.orchestra import Orchestra
from tests.commands.separate_disks import SEPARATE_DISKS
from tests.conftest import Workspace, processes_below

logger = logging.getLogger(__name__)

KILLS = int(os.environ.get("CHAOS_KILLS", "30"))
SEED = int(os.environ.get("CHAOS_SEED", "20261122"))
MINUTES = float(os.environ.get("CHAOS_MINUTES", "120"))
"""No pipeline begins later."""
POOLS = ("local", "cpu", "gpu")
VICTIMS = ("worker", "flow", "stage worker", "server")
QUIET_SECONDS = 15.0
SLOT_SECONDS = 120.0
_KILLS_PER_RUN = 5
_RUN_SECONDS = 600.0
_RESUMES = 3
_STAGES = ("task", "sft-data", "sft", "export", "gate", "publish")
_MADE_ONCE = ("task", "sft-data", "sft", "export")


@dataclass
class Round:
    """One pipeline, what was killed while it ran, and what does not hold."""

    name: str
    kills: list[str] = field(default_factory=list)
    resumes: int = 0
    seconds: float = 0.0
    slot_seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


class Chaos:
    """The server and the workers, and who of them is to be killed."""

    pools: tuple[str, ...] = POOLS
    limit = "2"

    def __init__(self, folder: Path, seed: int, database: str) -> None:
        self.random = random.Random(seed)
        self.orchestra = Orchestra(folder / "server")
        del self.orchestra.environment["PREFECT_SERVER_EVENTS_PROACTIVE_GRANULARITY"]  # dead flow runs are looked for
        if database:
            self.orchestra.environment["PREFECT_API_DATABASE_CONNECTION_URL"] = database
        self.workspace = Workspace(folder / "runs")
        self.workspace.environment |= self.orchestra.settings

    def open(self) -> None:
        """Start everything; each pool begins as many flow runs as a pipeline needs at once, and no more."""
        self.orchestra.open()
        for pool in self.pools:
            self.orchestra.prefect("work-pool", "set-concurrency-limit", pool, self.limit)
            self.start_worker(pool)

    def start_worker(self, pool: str) -> None:
        """Start the worker of a pool."""
        found = self.orchestra.start_worker(pool)
        if pool == "local":
            self.orchestra.worker = found

    def pids(self, victim: str) -> list[int]:
        """Processes of that kind that run now."""
        found = processes_below(self.orchestra.folder)
        kinds: dict[str, Callable[[str], bool]] = {
            "server": lambda command: "prefect server start" in command,
            "worker": lambda command: "worker start" in command,
            "stage worker": lambda command: "cosmos_core.worker" in command and "supervisor" not in command,
            "flow": lambda command: "flow_engine" in command or "prefect.engine" in command or " resume " in command,
        }
        return sorted(pid for pid, command in found.items() if kinds[victim](command))

    def kill(self, victim: str) -> bool:
        """Kill one process of a kind; False: there is none."""
        pids = self.pids(victim)
        with suppress(ProcessLookupError):
            if pids:
                os.kill(self.random.choice(pids), signal.SIGKILL)
                return True
        return False

    def mend(self) -> None:
        """Start a server and workers that are gone again."""
        if not self.pids("server"):
            self.orchestra.start_server()
        running = " ".join(processes_below(self.orchestra.folder).values())
        for pool in self.pools:
            if f"worker start --pool {pool}" not in running:
                self.start_worker(pool)

    def disturbed(self, name: str, kills: int) -> Round:
        """A pipeline under so many kills, to its end."""
        found, began = Round(name), time.monotonic()
        flow_run = self.begin(name)
        due, victim = began + self.random.uniform(3.0, 12.0), self.random.choice(VICTIMS)
        while True:
            if len(found.kills) < kills and time.monotonic() > due and self.kill(victim):
                found.kills.append(victim)
                logger.info("%s: killed %s after %.0f s", name, found.kills[-1], time.monotonic() - began)
                time.sleep(self.random.uniform(0.0, 3.0))
                self.mend()
                due, victim = time.monotonic() + self.random.uniform(2.0, 12.0), self.random.choice(VICTIMS)
            if self.is_complete(name):
                break
            state = self.orchestra.flow_run(flow_run)["state_type"]
            if state in {"FAILED", "CRASHED", "CANCELLED"} or time.monotonic() - began > _RUN_SECONDS:
                if found.resumes == _RESUMES or time.monotonic() - began > 2 * _RUN_SECONDS:
                    found.problems.append(f"never complete, its flow run {state}")
                    break
                logger.info("%s: its flow run is %s; resumed", name, state)
                try:
                    done = self.workspace.cosmos("resume", name, timeout=_RUN_SECONDS, code=None)
                except subprocess.TimeoutExpired:
                    found.problems.append(f"resume took more than {_RUN_SECONDS:.0f} s")
                    break
                if "is being run by another process" in done.stderr:  # which its server thinks is dead: it goes on
                    time.sleep(5.0)
                    continue
                found.resumes += 1
                if done.returncode:
                    logger.info("resume exited with %d: %s", done.returncode, done.stderr[-500:])
            time.sleep(0.5)
        found.seconds = time.monotonic() - began
        found.problems += self.leftovers(found)
        return found

    def begin(self, name: str) -> str:
        """Start a pipeline with a store and a folder of its own."""
        text = SEPARATE_DISKS.replace("OUTPUTS", str(self.workspace.path / "outputs")).replace(
            "STORE", f"s3://models/{name}"
        )
        config = self.workspace.write(f"{name}.toml", text)
        return self.orchestra.run("post-train/local", f"config={config}", f"run_id={name}")

    def is_complete(self, name: str) -> bool:
        """Whether every stage is done, as the flow's machine knows it."""
        stages = self.workspace.path / "outputs" / name / "stages"
        return all(read_state(stages / stage).state in FINISHED_STATES for stage in _STAGES)

    def leftovers(self, found: Round) -> list[str]:
        """What is left of a run that has ended: slots of its pools, processes."""
        self.mend()
        began, problems = time.monotonic(), []
        while self.occupied() and time.monotonic() - began < 2 * SLOT_SECONDS:
            time.sleep(1.0)
        found.slot_seconds = time.monotonic() - began
        if found.slot_seconds > SLOT_SECONDS:
            problems.append(f"a slot was taken for {found.slot_seconds:.0f} s after the end")
        began = time.monotonic()
        while (left := self.pids("stage worker")) and time.monotonic() - began < QUIET_SECONDS:
            time.sleep(0.2)
        return [*problems, *([f"processes left: {left}"] if left else [])]

    def occupied(self) -> list[str]:
        """Flow runs that hold a slot of their pool."""
        states = {"state": {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]}}}
        return [each["name"] for each in self.orchestra.ask("flow_runs/filter", flow_runs=states)]

    def weights(self, name: str) -> dict[str, str]:
        """Digests of the weights that were trained and exported."""
        found = {}
        for stage in ("sft", "export"):
            result = read_result(self.workspace.path / "outputs" / name / "stages" / stage)
            for file in (result or {"outputs": ()})["outputs"]:
                if file["path"].endswith(".safetensors"):
                    found[f"{stage}/{Path(file['path']).name}"] = file["sha256"]
        return found

    def folders(self) -> list[Path]:
        """Where the machines keep their runs."""
        return [self.workspace.path / "outputs", *map(self.orchestra.machine, POOLS)]

    def forget(self) -> None:
        """Remove all runs: the next one would reuse what they made."""
        for folder in self.folders():
            shutil.rmtree(folder, ignore_errors=True)

    def trained_twice(self, name: str) -> list[str]:
        """Stages that were finished more than once on any machine."""
        problems = []
        for stage in _MADE_ONCE:
            files = [folder / name / "stages" / stage / "events.jsonl" for folder in self.folders()]
            lines = {line for file in files if file.is_file() for line in file.read_text().splitlines()}
            events = Counter(event.get("event") for event in parse_json_objects(lines))
            # Whoever is killed between the result and its event is followed by one that finds the result, in the folder
            # or in the store; there is none of another pipeline.
            if events["done"] > 1 or not (events["done"] or events["reused"]):
                problems.append(f"{stage} was finished {events['done']} times")
        return problems


def prove(folder: Path) -> Proof:
    """An undisturbed pipeline, then as many under kills as it takes."""
    began, rounds = time.monotonic(), list[Round]()
    with store.store() as proxy, postgres() as database, pytest.MonkeyPatch.context() as patch:
        store.use(proxy.url, patch)
        for name in ("server", "runs"):
            (folder / name).mkdir()
        chaos = Chaos(folder, SEED, database)
        logger.info("seed %d", SEED)
        try:
            chaos.open()
            whole = chaos.disturbed("undisturbed", 0)
            expected = chaos.weights("undisturbed")
            assert len(expected) == 2, expected
            chaos.forget()
            logger.info("undisturbed: %.0f s", whole.seconds)
            while (left := KILLS - sum(len(each.kills) for each in rounds)) > 0:
                if time.monotonic() - began > 60 * MINUTES:
                    break
                each = chaos.disturbed(f"chaos_{len(rounds) + 1}", min(left, _KILLS_PER_RUN))
                if chaos.weights(each.name) != expected:
                    each.problems.append("weights differ")
                each.problems += chaos.trained_twice(each.name)
                rounds.append(each)
                chaos.forget()
                logger.info("%s: %s", each.name, "; ".join(each.problems) or "identical")
        finally:
            chaos.orchestra.close()
        left_over = processes_below(folder)
    kept_in = "PostgreSQL" if database else "SQLite"
    return proof(rounds, whole, kept_in, time.monotonic() - began, list(left_over.values()))


def proof(rounds: list[Round], whole: Round, kept_in: str, seconds: float, left_over: list[str]) -> Proof:
    """The section of `docs/acceptance.md`."""
    victims = Counter(kill for each in rounds for kill in each.kills)
    rows = [
        [
            each.name, ", ".join(each.kills), each.resumes, f"{each.seconds:.0f} s", f"{each.slot_seconds:.0f} s",
            "; ".join(each.problems) or "identical",
        ]
        for each in rounds
    ]  # fmt: skip
    header = ["run", "killed", "`cosmos resume`", "took", "slots free after", "result"]
    total = ", ".join(f"{name} {count}" for name, count in victims.most_common())
    return Proof(
        title="Chaos over machines that share no disk",
        is_met=sum(victims.values()) >= 30 and not left_over and not any(each.problems for each in rounds),
        claim=(
            "30 `kill -9` of worker, flow process, stage worker and server, each started again, while a pipeline whose "
            "stages are on two work pools without a common disk runs: it completes by itself or after `cosmos resume`, "
            "weights of SFT and export have the sha256 of an undisturbed run's, no stage is finished twice on any "
            f"machine, no slot of a pool stays taken for more than {SLOT_SECONDS:.0f} s, and no process is left."
        ),
        commands=[f"CHAOS_SEED={SEED} CHAOS_KILLS={KILLS} python -m tests.acceptance chaos"],
        body=(
            f"{sum(victims.values())} kills: {total}. Undisturbed: {whole.seconds:.0f} s. Its server keeps state in "
            f"{kept_in}.\n\n{table(header, rows)}"
        ),
        seconds=seconds,
    )
