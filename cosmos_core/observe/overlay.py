"""Build one standalone HTML page that compares the settings, the metrics and the curves of several runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cosmos_core.config.difference import group_changes_by_stage
from cosmos_core.errors import ConfigError
from cosmos_core.observe.formatting import judge_change, select_key_metrics
from cosmos_core.observe.plots import MAX_CURVES, REPORT_PANELS, overlay_svg
from cosmos_core.observe.previous_run import format_setting, read_settings
from cosmos_core.observe.record import RunRecord, read_run
from cosmos_core.observe.report import open_template_environment


def build_comparison_page(paths: Sequence[Path]) -> str:
    """Return the HTML page that compares the runs at `paths`, matching stages by name; raise ConfigError unless these
    are 2 to 8 different runs."""
    names = [path.name for path in paths]
    if len(set(names)) < len(names) or not 2 <= len(names) <= MAX_CURVES:
        raise ConfigError(f"cosmos compare --html takes 2 to {MAX_CURVES} different runs; these are {', '.join(names)}")
    runs = [read_run(path) for path in paths]
    stages = list(dict.fromkeys(stage.name for run in runs for stage in run.stages))
    curves = []
    for name in stages:
        lines = {run.path.name: stage.metric_lines for run in runs for stage in run.stages if stage.name == name}
        if svg := overlay_svg(lines, REPORT_PANELS):
            curves.append((name, svg))
    settings, metrics = _list_changed_settings(runs), _compare_metrics(runs, stages)
    template = open_template_environment().get_template("compare.html")
    return template.render(runs=runs, settings=settings, metrics=metrics, curves=curves)


def _list_changed_settings(runs: Sequence[RunRecord]) -> list[tuple[str, ...]]:
    """Return a row for each setting that differs: its key and a value per run; all stages share a row if they can."""
    settings = [read_settings(run.path) for run in runs]
    changes_by_stage: dict[str, list[tuple[str, ...]]] = {}
    for name in dict.fromkeys(name for run_settings in settings for name in run_settings):
        stage_settings = [run_settings.get(name, {}) for run_settings in settings]
        keys = dict.fromkeys(key for stage in stage_settings for key in stage)
        rows = [(key, *(format_setting(stage.get(key)) for stage in stage_settings)) for key in keys]
        changes_by_stage[name] = [row for row in rows if len(set(row[1:])) > 1]
    changes = group_changes_by_stage(changes_by_stage)
    return [(f"{name}.{row[0]}" if name else row[0], *row[1:]) for name, row in changes]


def _compare_metrics(runs: Sequence[RunRecord], stages: Sequence[str]) -> list[dict[str, Any]]:
    """Return the key metrics of each stage by run, and whether the change from first to last run is better or worse."""
    rows = []
    for name in stages:
        metrics = [next((stage.metrics for stage in run.stages if stage.name == name), {}) for run in runs]
        for key in dict.fromkeys(key for run_metrics in metrics for key in select_key_metrics(run_metrics)):
            values = [run_metrics.get(key) for run_metrics in metrics]
            numbers = [value for value in (values[0], values[-1]) if isinstance(value, int | float)]
            verdict = judge_change(key, numbers[1] - numbers[0]) if len(numbers) == 2 else ""
            rows.append({"stage": name, "key": key, "values": values, "verdict": verdict})
    return rows
