"""Build `report.html`, which shows a run on one standalone page without scripts or external resources.

The page is built from the run directory alone, so that a failed run has a report too. `run` is the entry point of
stages of kind `report`.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from cosmos_core.observe import formatting, sections
from cosmos_core.observe.costs import cost_of
from cosmos_core.observe.dag import layout
from cosmos_core.observe.previous_run import compare_with_previous
from cosmos_core.observe.record import model_loading_code, read_run
from cosmos_core.observe.trained import sample_rows, training_properties
from cosmos_core.run.files import write_text
from cosmos_core.run.stage import Stage
from cosmos_core.types import Outcome

REPORT_FILE = "report.html"
_MAX_LETTERS = 1200  # maximum number of characters of a prompt or completion in the report


def run(stage: Stage) -> Outcome:
    """Write the report into the folder of the stage, and into the folder of the run, where users look for it."""
    for folder in (stage.path, stage.run_path):
        write_text(folder / REPORT_FILE, build(stage.run_path, folder))
    return Outcome(outputs=(REPORT_FILE,), info={"report": str(stage.run_path / REPORT_FILE)})


def build(run_path: Path, folder: Path | None = None) -> str:
    """Return the report of a run as HTML, with links to logs relative to `folder` (None: the folder of the run)."""
    run_record = read_run(run_path)
    page_template = environment().get_template(REPORT_FILE)
    return page_template.render(
        root="" if folder in {None, run_path} else f"{os.path.relpath(run_path, folder)}/",
        run=run_record, graph=layout(run_record), cards=sections.summary_cards(run_record),
        trained=training_properties(run_record),
        sample_rows=sample_rows(run_record), comparison=sections.comparison(run_record),
        sweeps=sections.sweep_tables(run_record),
        before=compare_with_previous(run_record), cost=cost_of(run_path), resources=sections.resources(run_record),
        gates=[(stage, condition) for stage in run_record.stages for condition in stage.conditions],
        samples=sections.samples(run_record),
        lineage=sections.lineage(run_record),
        loading=model_loading_code(run_record.model) if run_record.model else "", setting=sections.setting(run_record),
    )  # fmt: skip


@cache
def environment() -> Environment:
    """Return the Jinja environment with the filters and templates of the report; it compiles each template once."""
    jinja_environment = Environment(
        loader=PackageLoader("cosmos_core.observe"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    filters: dict[str, Any] = {
        "clock": formatting.clock, "duration": formatting.duration, "number": formatting.number,
        "size": formatting.size, "json": json.dumps, "items_of": dict, "px": lambda length: f"{length:g}",
        "cut": lambda text: text if len(text) <= _MAX_LETTERS else f"{text[:_MAX_LETTERS]}…",
        "label": sections.label, "headline": sections.headline, "times": sections.times,
        "metrics": sections.metrics, "operators": sections.operators, "reward_bins": sections.reward_bins,
        "info": sections.info, "curves": sections.curves, "rollouts": sections.rollouts,
        "drawings": sections.completion_media, "services": sections.services, "logs": sections.logs,
        "outcome_of": sections.outcome_of
    }  # fmt: skip
    jinja_environment.filters |= filters
    return jinja_environment
