"""Tables of the sweeps of a run, with a row for each branch: its settings, state and metric."""

from typing import Any

from cosmos_core.observe.formatting import as_float
from cosmos_core.observe.record import RunRecord

_STATUS_ORDER = ("failed", "refused", "died", "stopped", "running", "retrying", "waiting", "done", "reused")


def sweep_tables(run: RunRecord) -> list[dict[str, Any]]:
    """Return a table of branches for each stage of a run that chooses among branches of a sweep. Each row has the
    settings of a branch, the most urgent state among its stages, and the value of the metric that decides (None: not
    measured yet); the best branch is first, and branches without a value are last."""
    stages = {stage.name: stage for stage in run.stages}
    tables = []
    for stage, sweep in ((each, choice) for each in run.stages if (choice := each.sweep) and choice.branches):
        keys = tuple(dict.fromkeys(key for sweep_branch in sweep.branches for key in sweep_branch.settings))
        rows: list[dict[str, Any]] = []
        for sweep_branch in sweep.branches:
            branch_stages = [stages[name] for name in sweep_branch.stages if name in stages]
            value = {k: v for each in branch_stages for k, v in each.metrics.items()}.get(sweep.metric)
            stage_seconds = [each.seconds for each in branch_stages if each.seconds]
            states = sorted((each.status for each in branch_stages), key=_STATUS_ORDER.index)
            rows.append({
                "name": sweep_branch.stages[0], "settings": tuple(sweep_branch.settings.get(key) for key in keys),
                "state": states[0] if states else "waiting", "seconds": sum(stage_seconds) if stage_seconds else None,
                "value": as_float(value) if isinstance(value, int | float) else None,
                "is_chosen": stage.info.get("chosen") in sweep_branch.stages,
            })  # fmt: skip
        sort_sign = -1.0 if sweep.mode == "max" else 1.0
        rows.sort(key=lambda row: ((value := row["value"]) is None or value != value, sort_sign * (value or 0.0)))
        tables.append({"stage": stage, "metric": sweep.metric, "mode": sweep.mode, "keys": keys, "rows": rows})
    return tables


def stages_in_branches(run: RunRecord) -> set[str]:
    """Return the names of all stages of a run that belong to a branch of a sweep."""
    sweeps = [stage.sweep for stage in run.stages if stage.sweep is not None]
    return {name for sweep in sweeps for sweep_branch in sweep.branches for name in sweep_branch.stages}
