"""A sweep by the real command: branches side by side up to the limit, the choice, and what is behind it."""

from __future__ import annotations

import pytest

from cosmos_core.run.manifest import read_result
from cosmos_core.run.state import read_state
from tests.conftest import Workspace

SWEPT = """
[pipeline]
name = "swept"

[[pipeline.stages]]
name = "count"
kind = "custom"
entry = "PROGRAMS/counting.py:count"
arguments = { seconds = 0.3 }
sweep = { grid = { "arguments.steps" = [3, 4, 5] }, metric = "count", max_parallel = 2 }

[[pipeline.stages]]
name = "behind"
kind = "custom"
entry = "PROGRAMS/counting.py:count"
after = "count"
model = "stage:count"
arguments = { steps = 2 }
"""


@pytest.mark.full
def test_a_sweep_runs_two_branches_at_once_and_hands_on_the_best(workspace: Workspace) -> None:
    workspace.write("swept.toml", SWEPT)
    planned = workspace.cosmos("plan", "swept.toml").stdout
    assert all(f"count-steps-{steps}" in planned for steps in (3, 4, 5))
    assert "count: max count of 3 branches" in planned
    workspace.cosmos("run", "swept.toml")
    spans = [read_state(workspace.stage(f"count-steps-{steps}")).spans[0] for steps in (3, 4, 5)]
    at_once = [sum(begin <= moment and (end or 0) > moment for begin, end in spans) for moment, _ in spans]
    assert max(at_once) == 2
    chosen = read_result(workspace.stage("count"))
    assert chosen is not None
    assert (chosen["info"]["chosen"], chosen["metrics"]) == ("count-steps-5", {"count": 5.0})
    assert read_state(workspace.stage("behind")).state == "done"
    assert "Sweep count" in (workspace.run / "report.html").read_text()
    again = workspace.cosmos(
        "plan", "swept.toml", "--set", 'count.sweep.grid={"arguments.steps" = [3, 4, 5, 6]}'
    ).stdout
    will_run = [line for line in again.splitlines() if line.startswith("│ count-steps") and "be reused" not in line]
    assert len(will_run) == 1 and "count-steps-6" in will_run[0]
    workspace.expect_quiet()
