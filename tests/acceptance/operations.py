"""Random faults over what a team operates: a server, two workers of two pools, a schedule that asks for approval.

Pipelines with a stage on the other pool run beside a schedule that retrains whenever there is a new row. A person, who
is drawn too, approves most models and declines the others, cancels flow runs and retries those that ended. Each fault
is drawn from the seed; what it breaks is mended afterwards, as by a service manager.
"""

from __future__ import annotations

import logging
import os
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx

from cosmos_core.run.manifest import find_output_damage, read_result
from cosmos_core.run.state import FINISHED_STATES, read_state
from cosmos_core.upload.file import FileTarget
from tests.acceptance.page import Proof, table
from tests.acceptance.storms.shim import Shim
from tests.acceptance.team import FINAL, STAGES, Operation, Team
from tests.conftest import processes_below

logger = logging.getLogger(__name__)

FAULTS = int(os.environ.get("OPERATIONS_FAULTS", "50"))
SEED = int(os.environ.get("OPERATIONS_SEED", "20261127"))
MINUTES = float(os.environ.get("OPERATIONS_MINUTES", "60"))
"""No fault begins later."""
TRUE_WITHIN_SECONDS = 120.0
_EXIT_SECONDS = 60.0
_CANCEL_SECONDS = 5.0
"""A publication that had asked the server before it accepted the cancel may move its pointer for so long."""


class Operations(Team):
    """The server, the workers, what runs on them, and the person."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, seed)
        self.shim = Shim(folder / "switches", folder / "runs")
        self.orchestra.environment |= self.shim.environment
        self.happened: list[str] = []
        self.kinds: dict[str, Callable[[], str]] = {
            "kill": self.kill_one, "outage": self.take_server_away, "cancel": self.cancel_one, "retry": self.retry_one,
            "full disk": self.fill_disk, "locked database": self.lock_database, "paused pool": self.pause_pool,
        }  # fmt: skip

    # Faults: each breaks one thing and returns what it was, or "" if there was nothing to break.

    def disturb(self) -> str:
        """Draw a fault that can happen now, let it happen and mend what it broke."""
        what = ""
        while not what:
            kind = self.random.choice(sorted(self.kinds))
            try:
                what = self.kinds[kind]()
            except (httpx.HTTPError, AssertionError) as error:
                what = f"{kind}: the server did not respond ({type(error).__name__})"
        self.shim.calm()
        self.mend()
        self.happened.append(what)
        return what

    def kill_one(self) -> str:
        """SIGKILL to one process of a kind."""
        victim = self.random.choice(("worker", "flow", "stage worker", "server"))
        return f"kill {victim}" if self.kill(victim) else ""

    def take_server_away(self) -> str:
        """A server that does not respond for 5 to 60 seconds."""
        self.kill("server")
        seconds = self.random.uniform(5, 60)
        self.wait(seconds)
        return f"outage of {seconds:.0f} s"

    def cancel_one(self) -> str:
        """Cancel a pipeline, as the button of the UI does."""
        going = [each for each in self.operations if not each.cancelled and self.state(each) not in FINAL]
        if not going:
            return ""
        chosen = self.random.choice(going)
        self.set_state(chosen.flow_run, "CANCELLING", "Cancelling")
        if self.state(chosen) in {"CANCELLING", "CANCELLED"}:
            chosen.cancelled = time.time()
        return "cancel"

    def retry_one(self) -> str:
        """Retry a pipeline that ended without a result and was not cancelled, as the button of the UI does."""
        ended = [each for each in self.operations if not each.cancelled and self.state(each) in {"FAILED", "CRASHED"}]
        if not ended:
            return ""
        self.set_state(self.random.choice(ended).flow_run, "SCHEDULED", "AwaitingRetry")
        return "retry"

    def set_state(self, flow_run: str, kind: str, name: str) -> None:
        """Ask the server for a state."""
        self.orchestra.post(f"flow_runs/{flow_run}/set_state", {"state": {"type": kind, "name": name}})

    def fill_disk(self) -> str:
        """No room below the folder of runs, for all processes of the workers."""
        seconds = self.random.uniform(1, 8)
        self.shim.set("is_full", 1)
        self.wait(seconds)
        return f"full disk for {seconds:.0f} s"

    def lock_database(self) -> str:
        """Another program holds the lock of the server's database."""
        seconds = self.random.uniform(3, 20)
        path = self.orchestra.folder / ":memory:" / "prefect.db"
        with closing(sqlite3.connect(path, timeout=20, isolation_level=None)) as database:
            with suppress(sqlite3.OperationalError):
                database.execute("begin immediate")
            time.sleep(seconds)
        return f"database locked for {seconds:.0f} s"

    def pause_pool(self) -> str:
        """A pool whose workers get nothing for some seconds."""
        pool, seconds = self.random.choice(self.pools), self.random.uniform(5, 30)
        self.set_paused(pool, is_paused=True)
        self.wait(seconds)
        self.set_paused(pool, is_paused=False)
        return f"pool {pool} paused for {seconds:.0f} s"

    def set_paused(self, pool: str, *, is_paused: bool) -> None:
        """Pause a pool or let it go on."""
        url = f"{self.orchestra.url}/work_pools/{pool}"
        httpx.patch(url, json={"is_paused": is_paused}, timeout=60).raise_for_status()

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.5)

    # What has to hold.

    def rest(self) -> list[str]:
        """End the schedule after the last fault and wait until every flow run is in its final state; problems."""
        for pool in self.pools:
            self.set_paused(pool, is_paused=False)
        for schedule in self.orchestra.ask("deployments/filter", deployments={"id": {"any_": [self.deployment]}})[0][
            "schedules"
        ]:
            httpx.delete(f"{self.orchestra.url}/deployments/{self.deployment}/schedules/{schedule['id']}", timeout=60)
        began, last = time.monotonic(), ""
        while (left := self.unfinished()) and time.monotonic() - began < 2 * TRUE_WITHIN_SECONDS:
            with suppress(httpx.HTTPError, AssertionError):
                for run in self.suspended():
                    self.decide(run, publish=self.approved.setdefault(run, True))
            now = ", ".join(sorted(f"{each['name']} {each['state_name']}" for each in left))
            if now != last:
                logger.info("%.0f s after the last fault: %s", time.monotonic() - began, now)
            last = now
            time.sleep(2)
        self.seconds_until_true = time.monotonic() - began
        problems = [f"{each['name']} is {each['state_name']}" for each in left]
        if self.seconds_until_true > TRUE_WITHIN_SECONDS:
            problems.append(f"states became true after {self.seconds_until_true:.0f} s, at last {last}")
        return problems

    def unfinished(self) -> list[dict[str, Any]]:
        """Flow runs that are in no final state; scheduled ones count where they are late."""
        states = {"state": {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING", "PAUSED", "SCHEDULED"]}}}
        with suppress(httpx.HTTPError):
            found: list[dict[str, Any]] = self.orchestra.ask("flow_runs/filter", flow_runs=states)
            return found
        return [{"name": "the server", "state_name": "away"}]

    def look_at(self, each: Operation) -> list[str]:
        """What of a pipeline is not as it says, before anybody resumes it."""
        state, path = self.state(each), self.outputs / each.name / "stages"
        stages = {name: read_state(path / name).state for name in STAGES}
        is_done = set(stages.values()) <= FINISHED_STATES
        problems = []
        if state == "COMPLETED" and not is_done:
            problems.append(f"COMPLETED with {stages}")
        if state == "CANCELLED" and not each.cancelled:
            problems.append("CANCELLED by nobody")
        moved = self.published_at(each.name)
        if each.cancelled and moved > each.cancelled + _CANCEL_SECONDS:
            problems.append(f"published {moved - each.cancelled:.0f} s after a cancel")
        folder, began = Path(each.flow_run), time.monotonic()
        # The process of a flow run ends after it has sent the final state and its log.
        while (running := list(processes_below(folder).values())) and time.monotonic() - began < _EXIT_SECONDS:
            time.sleep(0.5)
        return problems + ([f"processes left: {running}"] if running else [])

    def published_at(self, name: str) -> float:
        """When the pointer of a target moved, in seconds since 1970; 0: never."""
        latest = self.targets / name / "latest"
        return os.lstat(latest).st_mtime if latest.is_symlink() else 0.0

    def complete(self, each: Operation) -> list[str]:
        """Resume a pipeline that nobody cancelled until it is done; what was lost or done twice."""
        while each.resumes < 3 and not self.is_done(each):
            each.resumes += 1
            self.workspace.cosmos("resume", each.name, timeout=300, code=None)
        if not self.is_done(each):
            return ["not complete after three times `cosmos resume`"]
        problems = []
        for name in ("first", "second"):
            stage = self.outputs / each.name / "stages" / name
            result = read_result(stage)
            damage = find_output_damage(stage, result, ignores_cache=True) if result else "no result"
            problems += [f"{name}: {damage}"] if damage else []
            starts = [int(line.split()[1]) for line in (stage / "visits.txt").read_text().splitlines()]
            problems += [f"{name} went back: {starts}"] * (starts != sorted(starts))
        return problems + ["nothing is published"] * (not self.published_at(each.name))

    def is_done(self, each: Operation) -> bool:
        """Whether all stages are finished."""
        stages = self.outputs / each.name / "stages"
        return all(read_state(stages / name).state in FINISHED_STATES for name in STAGES)

    def look_at_schedule(self) -> list[str]:
        """Whether models were published in the order of their rows, each approved, and the last one not lost."""
        self.add_row()
        fired = self.orchestra.post(
            f"deployments/{self.deployment}/create_flow_run", {"parameters": {"config": self.nightly, "approve": False}}
        )
        self.orchestra.wait_for(fired["id"], "COMPLETED", 120)
        target = FileTarget(str(self.targets / "nightly"))
        published = [target.record_of(name)["metrics"]["validation/accuracy"] for name in target.history()]
        problems = [] if published == sorted(set(published)) else [f"published in another order: {published}"]
        if published[-1:] != [self.rows[-1]["accuracy"]]:
            problems.append(f"the newest row is {self.rows[-1]}, published is {published[-1:]}")
        most = sum(self.approved.values()) + 1
        if len(published) > most:
            problems.append(f"{len(published)} were published, {most} might be")
        self.num_published = len(published)
        return problems


def prove(folder: Path) -> Proof:
    """As many faults as there is time for, a rest, and what has to hold after it."""
    began = time.monotonic()
    for name in ("server", "runs"):
        (folder / name).mkdir()
    team = Operations(folder, SEED)
    logger.info("seed %d", SEED)
    try:
        team.open()
        team.begin_schedule()
        while len(team.happened) < FAULTS and time.monotonic() - began < 60 * MINUTES:
            team.look_after()
            team.wait(team.random.uniform(2, 10))
            logger.info("fault %d: %s", len(team.happened) + 1, team.disturb())
        problems = team.rest()
        for each in team.operations:
            each.problems = [f"{each.name}: {text}" for text in team.look_at(each)]
            logger.info("%s: %s", each.name, each.problems)
        for each in team.operations:
            if not each.cancelled:
                each.problems += [f"{each.name}: {text}" for text in team.complete(each)]
        problems += [text for each in team.operations for text in each.problems] + team.look_at_schedule()
    finally:
        team.orchestra.close()
    return proof(team, problems, time.monotonic() - began)


def proof(team: Operations, problems: list[str], seconds: float) -> Proof:
    """The section of `docs/acceptance.md`."""
    kinds = Counter(re.sub(r" (of|for) \d+ s", "", what) for what in team.happened)
    cancelled = sum(bool(each.cancelled) for each in team.operations)
    rows = [
        ["pipelines", len(team.operations)],
        ["of them cancelled", cancelled],
        ["of them resumed after the last fault", sum(bool(each.resumes) for each in team.operations)],
        ["models of the schedule approved", sum(team.approved.values())],
        ["models published, with one of a last firing", team.num_published],
        ["seconds until every state was true", f"{team.seconds_until_true:.0f}"],
        ["what did not hold", "; ".join(problems) or "nothing"],
    ]
    faults = ", ".join(f"{name} {count}" for name, count in kinds.most_common())
    return Proof(
        title="Faults of a team's server, workers, pools and schedule",
        is_met=len(team.happened) >= 50 and not problems,
        claim=(
            "50 random faults over a server, two workers of two pools, pipelines with a stage on the other pool and a "
            "schedule whose models a person approves: nothing is published after a cancel or without an approval, no "
            "step is lost or done again behind a checkpoint, published models keep the order of their rows, and every "
            f"flow run is in its final, true state within {TRUE_WITHIN_SECONDS:.0f} s of the last fault."
        ),
        commands=[
            f"OPERATIONS_SEED={SEED} OPERATIONS_FAULTS={FAULTS} OPERATIONS_MINUTES={MINUTES:g} "
            "python -m tests.acceptance operations"
        ],
        body=f"{len(team.happened)} faults: {faults}.\n\n{table(['', ''], rows)}",
        seconds=seconds,
    )
