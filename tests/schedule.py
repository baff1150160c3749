"""Which tests run where, and in which order: the longest first, by times that were measured.

A file's tests stay together, because they share servers and engines, as do those of one folder, save where `SPLIT`
says that they share nothing.
`python -m pytest ... --record-durations` writes `durations.json` anew.
"""

from __future__ import annotations

import json
from collections import defaultdict
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

DURATIONS = Path(__file__).with_name("durations.json")
SHORTEST = 1.0
"""Seconds: a group that takes less is not written down."""
UNKNOWN = 0.1
"""Seconds: of a group that is not written down."""
FAST_SECONDS = 1.0
"""That the tests of a file of the fast ring take together, at most."""
FAST_FOLDERS = ("tests/unit/", "tests/reference/")
STARTS_PROGRAMS = frozenset({"tests/unit/test_cli_train.py"})
"""Files that are short only where `warm/` forks their programs, which it does not in the fast ring."""
SPLIT = frozenset({
    "tests/commands/test_cli.py", "tests/commands/test_visual.py", "tests/distributed/test_group.py",
    "tests/distributed/test_run.py", "tests/faults/test_kill.py", "tests/faults/test_worker.py",
})  # fmt: skip
"""Files whose tests are dealt one by one."""
TOGETHER = "tests/flows/"
"""A folder whose tests share one server, which each process would start for itself."""


class Longest(LoadScopeScheduling):
    """Deals groups in the order in which they were collected; a worker that has little left gets the next."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def group_of(nodeid: str) -> str:
    """The group of tests that run one after the other in one process."""
    file = nodeid.partition("::")[0]
    if file.startswith(TOGETHER):
        return TOGETHER
    return nodeid if file in SPLIT else file


@cache
def durations() -> dict[str, float]:
    """Seconds of the groups that took longer than `SHORTEST`."""
    return json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}


def sort_key(nodeid: str) -> tuple[float, str]:
    """Return the key by which tests are sorted: the longest group first; within a group the order stays."""
    group = group_of(nodeid)
    return -durations().get(group, UNKNOWN), group


def is_fast(file: str) -> bool:
    """Whether a file belongs to the fast ring."""
    seconds = sum(seconds for group, seconds in durations().items() if group.partition("::")[0] == file)
    return file.startswith(FAST_FOLDERS) and file not in STARTS_PROGRAMS and seconds <= FAST_SECONDS


def record(measured: dict[str, float]) -> None:
    """Write down what groups took, by the times of their tests; groups that did not run keep their times."""
    totals: dict[str, float] = defaultdict(float)
    for nodeid, seconds in measured.items():
        totals[group_of(nodeid)] += seconds
    totals = {**durations(), **totals}
    long = {group: round(seconds, 1) for group, seconds in sorted(totals.items()) if seconds >= SHORTEST}
    DURATIONS.write_text(json.dumps(long, indent=0) + "\n")
