"""Tables of the sweeps of a run, with a row for each branch: its settings, state and metric."""

from dataclasses import dataclass
from typing import Any

from cosmos_core.observe.formatting import as_float
from cosmos_core.observe.record import RunRecord, StageRecord

_STATUS_ORDER = ("failed", "refused", "died", "stopped", "running", "retrying", "waiting", "done", "reused")


@dataclass(frozen=True)
class Row:
    """Row of a table of branches: one branch of a sweep with its settings, state and metric."""

    name: str
    settings: tuple[Any, ...]
    state: str
    """Most urgent state among the stages of the branch, for example `failed`."""
    value: float | None
    """Value of the metric that decides between branches; None: not measured yet."""
    seconds: float | None
    is_chosen: bool


@dataclass(frozen=True)
class SweepTable:
    """Table of the branches of a sweep from which a stage chooses."""

    stage: StageRecord
    metric: str
    mode: str
    keys: tuple[str, ...]
    rows: tuple[Row, ...]
    """Rows of the branches, the best branch first and branches without a value last."""


def sweep_tables(run: RunRecord) -> list[SweepTable]:
    """Return a table of branches for each stage of a run that chooses among branches of a sweep."""
    stages = {stage.name: stage for stage in run.stages}
    tables = []
    for stage in run.stages:
        if stage.sweep is None or not stage.sweep.branches:
            continue
        keys = tuple(dict.fromkeys(key for sweep_branch in stage.sweep.branches for key in sweep_branch.settings))
        rows = []
        for sweep_branch in stage.sweep.branches:
            branch_stages = [stages[name] for name in sweep_branch.stages if name in stages]
            metrics = {key: value for branch_stage in branch_stages for key, value in branch_stage.metrics.items()}
            value, stage_seconds = (
                metrics.get(stage.sweep.metric),
                [each.seconds for each in branch_stages if each.seconds],
            )
            states = sorted((each.status for each in branch_stages), key=_STATUS_ORDER.index)
            rows.append(Row(
                name=sweep_branch.stages[0], settings=tuple(sweep_branch.settings.get(key) for key in keys),
                state=states[0] if states else "waiting", seconds=sum(stage_seconds) if stage_seconds else None,
                value=as_float(value) if isinstance(value, int | float) else None,
                is_chosen=stage.info.get("chosen") in sweep_branch.stages,
            ))  # fmt: skip
        sort_sign = -1.0 if stage.sweep.mode == "max" else 1.0
        rows.sort(key=lambda row: (row.value is None or row.value != row.value, sort_sign * (row.value or 0.0)))
        tables.append(SweepTable(stage, stage.sweep.metric, stage.sweep.mode, keys, tuple(rows)))
    return tables


def stages_in_branches(run: RunRecord) -> set[str]:
    """Return the names of all stages of a run that belong to a branch of a sweep."""
    sweeps = [stage.sweep for stage in run.stages if stage.sweep is not None]
    return {name for sweep in sweeps for sweep_branch in sweep.branches for name in sweep_branch.stages}
