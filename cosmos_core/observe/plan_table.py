"""Table of the decisions of `cosmos plan`: whether a run would reuse or run each stage, and the reasons."""

from collections.abc import Mapping

from rich.table import Table

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.mesh import placements
from cosmos_core.observe.smallest_effects import smallest_effects
from cosmos_core.run.plan import Decision

_ACTION_TEXTS = {"adopt": "be reused", "reuse": "be reused", "run": "run", "depends": "run unless unchanged"}


def plan_table(pipeline: Pipeline, decisions: Mapping[str, Decision]) -> Table:
    """Return a table of the decision for each stage, run or reuse, with its reason. The caption lists the sweeps, the
    devices for the ranks of each stage, and the smallest differences that gates can detect."""
    table = Table("stage", "kind", "after", "will", "why", title=pipeline.config.name)
    for stage in pipeline.stages:
        decision = decisions[stage.name]
        table.add_row(stage.name, stage.kind, ", ".join(stage.after), _ACTION_TEXTS[decision.action], decision.reason)
    sweeps_by_stage = [(stage.name, stage.sweep) for stage in pipeline.stages if stage.sweep is not None]
    caption_lines = [
        f"{name}: {sweep.mode} {sweep.metric} of {len(sweep.branches)} branches" for name, sweep in sweeps_by_stage
    ]
    caption_lines += [*placements(pipeline), *smallest_effects(pipeline)]
    table.caption = "\n".join(caption_lines) or None
    return table
