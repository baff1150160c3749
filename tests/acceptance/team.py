"""What a team operates: a server, two workers of two pools, pipelines, and a schedule that asks a person."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.acceptance.chaos import Chaos

STAGES = ("first", "second", "model", "publish")
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
_MOST_AT_ONCE = 2
_STEPS = 40
_PIPELINE = f"""
[pipeline]
name = "NAME"
threads = 1
grace_seconds = 10
output_dir = "OUTPUTS"

[[pipeline.stages]]
name = "first"
kind = "custom"
entry = "PROGRAMS/counting.py:count"
work_pool = "cpu"
arguments = {{ steps = {_STEPS}, seconds = 0.1INDEX }}

[[pipeline.stages]]
name = "second"
kind = "custom"
entry = "PROGRAMS/counting.py:count"
after = "first"
arguments = {{ steps = {_STEPS - 1}, seconds = 0.1INDEX }}

[[pipeline.stages]]
name = "model"
kind = "custom"
entry = "PROGRAMS/growing.py:grow"
after = "second"
arguments = {{ by = 1INDEX }}

[[pipeline.stages]]
name = "publish"
kind = "upload"
after = "model"
model = "stage:model"
target = "TARGETS/NAME"
"""
_NIGHTLY = """
[pipeline]
name = "nightly"
threads = 1
grace_seconds = 10
output_dir = "OUTPUTS"

[[pipeline.stages]]
name = "learn"
kind = "custom"
entry = "PROGRAMS/learning.py:learn"
data = "ROWS"
work_pool = "cpu"

[[pipeline.stages]]
name = "publish"
kind = "upload"
after = "learn"
model = "stage:learn"
target = "TARGETS/nightly"
"""


@dataclass
class Operation:
    """A pipeline that was started, its flow run, and when its cancel was accepted (seconds since 1970; 0: never)."""

    name: str
    flow_run: str
    cancelled: float = 0.0
    resumes: int = 0
    problems: list[str] = field(default_factory=list)


class Team(Chaos):
    """The server, the workers, what runs on them, and the person."""

    pools = ("local", "cpu")
    limit = "4"

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__(folder, seed, "")
        self.orchestra.program = "cosmos_core.launch.prefect"
        self.outputs, self.targets = (self.workspace.path / name for name in ("outputs", "targets"))
        self.operations: list[Operation] = []
        self.rows: list[dict[str, Any]] = []
        self.approved: dict[str, bool] = {}
        """What the person has said, by flow run of the schedule."""

    def begin_schedule(self) -> None:
        """Let the schedule fire every 45 seconds, each time for whatever rows there are."""
        self.add_row()
        text = _NIGHTLY.replace("ROWS", str(self.workspace.path / "rows.jsonl"))
        self.nightly = str(self.write("nightly", text))
        parameters = {"config": self.nightly, "approve": True}
        [retrain] = self.orchestra.ask("deployments/filter", deployments={"name": {"any_": ["local"]}},
                                       flows={"name": {"any_": ["retrain"]}})  # fmt: skip
        schedule = {"schedule": {"interval": 45}, "active": True, "parameters": parameters}
        self.orchestra.post(f"deployments/{retrain['id']}/schedules", [schedule])
        self.deployment = retrain["id"]

    def add_row(self) -> None:
        """Give the schedule something new: a row, whose number is what its model learns."""
        self.rows.append({"accuracy": (len(self.rows) + 1) / 1000})
        lines = "".join(json.dumps(row) + "\n" for row in self.rows)
        temporary = self.workspace.path / "rows.new"
        temporary.write_text(lines)
        temporary.replace(self.workspace.path / "rows.jsonl")

    def write(self, name: str, text: str) -> Path:
        """Write the config of a pipeline."""
        text = text.replace("OUTPUTS", str(self.outputs)).replace("TARGETS", str(self.targets)).replace("NAME", name)
        return self.workspace.write(f"{name}.toml", text)

    def look_after(self) -> None:
        """Start pipelines up to the number that runs at once, and say what is to become of suspended flow runs."""
        with suppress(httpx.HTTPError, AssertionError):  # the server is away: later
            going = [each for each in self.operations if self.state(each) not in FINAL]
            if len(going) < _MOST_AT_ONCE:
                self.start_one()
            for run in self.suspended():
                self.decide(run, publish=self.approved.setdefault(run, self.random.random() < 0.75))

    def start_one(self) -> None:
        """Start a pipeline with a run id of its own."""
        name = f"pipeline-{len(self.operations) + 1}"
        text = _PIPELINE.replace("INDEX", f"{len(self.operations):04d}")  # or its stages would be reused
        config = self.write(name, text)
        [found] = self.orchestra.ask("deployments/filter", deployments={"name": {"any_": ["local"]}},
                                     flows={"name": {"any_": ["post-train"]}})  # fmt: skip
        made = self.orchestra.post(
            f"deployments/{found['id']}/create_flow_run",
            {"parameters": {"config": str(config), "run_id": name}, "idempotency_key": name},
        )
        self.operations.append(Operation(name, made["id"]))

    def suspended(self) -> list[str]:
        """Flow runs of the schedule that wait for the person."""
        states = {"state": {"name": {"any_": ["Suspended"]}}}
        return [each["id"] for each in self.orchestra.ask("flow_runs/filter", flow_runs=states)]

    def decide(self, flow_run: str, *, publish: bool) -> None:
        """Fill in the form of a flow run, as the UI does, and give the schedule something new."""
        self.orchestra.post(f"flow_runs/{flow_run}/resume", {"run_input": {"publish": publish}})
        self.add_row()

    def state(self, operation: Operation) -> str:
        """The type of the state that the server knows."""
        return str(self.orchestra.flow_run(operation.flow_run)["state_type"])
