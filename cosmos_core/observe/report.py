"""Build `report.html`, which shows a run on one standalone page without scripts or external resources.

The page is built from the run directory alone, so that a failed run has a report too. `run` is the entry point of
stages of kind `report`.
"""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader

from cosmos_core.observe import sections
from cosmos_core.observe.costs import compute_run_cost
from cosmos_core.observe.dag import compute_layout
from cosmos_core.observe.formatting import format_bytes, format_duration, format_number, format_timestamp
from cosmos_core.observe.previous_run import compare_with_previous
from cosmos_core.observe.record import read_run, render_loading_code
from cosmos_core.observe.trained import decode_sample_rows, list_training_properties
from cosmos_core.run.files import write_text
from cosmos_core.run.stage import Stage
from cosmos_core.types import Outcome

REPORT_FILE = "report.html"
_MAX_TEXT_LENGTH = 1200  # maximum number of characters of a prompt or completion in the report


def run(stage: Stage) -> Outcome:
    """Write the report into the folder of the stage, and into the folder of the run, where users look for it."""
    for folder in (stage.path, stage.run_path):
        write_text(folder / REPORT_FILE, build_report(stage.run_path, folder))
    return Outcome(outputs=(REPORT_FILE,), info={"report": str(stage.run_path / REPORT_FILE)})


def build_report(run_path: Path, page_folder: Path | None = None) -> str:
    """Return the report of a run as HTML; links are relative to `page_folder`, by default the folder of the run."""
    run_record = read_run(run_path)
    return open_template_environment().get_template(REPORT_FILE).render(
        root="" if page_folder in {None, run_path} else f"{os.path.relpath(run_path, page_folder)}/",
        run=run_record, graph=compute_layout(run_record), cards=sections.make_summary_cards(run_record),
        trained=list_training_properties(run_record), sample_rows=decode_sample_rows(run_record),
        comparison=sections.make_validation_metrics_table(run_record), sweeps=sections.make_sweep_tables(run_record),
        before=compare_with_previous(run_record), cost=compute_run_cost(run_path),
        resources=sections.make_resource_rows(run_record),
        gates=[(stage, condition) for stage in run_record.stages for condition in stage.conditions],
        samples=sections.make_sample_table(run_record), lineage=sections.make_lineage_rows(run_record),
        loading=render_loading_code(run_record.model) if run_record.model else "",
        setting=sections.list_run_start_fields(run_record),
    )  # fmt: skip


@cache
def open_template_environment() -> Environment:
    """Return a Jinja environment with the templates of the report and the filters that they use."""
    jinja_environment = Environment(
        loader=PackageLoader("cosmos_core.observe"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    template_filters: dict[str, Any] = {
        "clock": format_timestamp, "duration": format_duration, "number": format_number,
        "size": format_bytes, "json": json.dumps, "items_of": dict, "px": lambda length: f"{length:g}",
        "cut": lambda text: text if len(text) <= _MAX_TEXT_LENGTH else f"{text[:_MAX_TEXT_LENGTH]}…",
        "label": sections.get_displayed_status, "headline": sections.format_headline_metric,
        "times": sections.list_stage_times, "metrics": sections.format_stage_metrics, "logs": sections.list_log_files,
        "operators": sections.read_slowest_operators, "reward_bins": sections.compute_reward_bins,
        "info": sections.select_info_to_show, "curves": sections.draw_stage_curves,
        "rollouts": sections.select_shown_rollouts, "drawings": sections.load_completion_media,
        "services": sections.make_service_rows, "outcome_of": sections.choose_css_classes,
    }  # fmt: skip
    jinja_environment.filters |= template_filters
    return jinja_environment
