"""Build one standalone HTML page that compares the settings, the metrics and the curves of several runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cosmos_core.config.difference import group_changes_by_stage
from cosmos_core.errors import ConfigError
from cosmos_core.observe.formatting import judge_change, select_key_metrics
from cosmos_core.observe.plots import MAX_CURVES, REPORT_PANELS, overlay_runs
from cosmos_core.observe.previous_run import format_setting, read_settings
from cosmos_core.observe.record import RunRecord, read_run
from cosmos_core.observe.report import open_template_environment


def build_comparison_page(run_paths: Sequence[Path]) -> str:
    """Return the HTML page that compares runs stage by stage. Raise ConfigError unless there are 2 to 8 different
    runs."""
    names = [path.name for path in run_paths]
    if len(set(names)) < len(names) or not 2 <= len(names) <= MAX_CURVES:
        raise ConfigError(f"cosmos compare --html takes 2 to {MAX_CURVES} different runs; these are {', '.join(names)}")
    runs = [read_run(path) for path in run_paths]
    stage_names = list(dict.fromkeys(stage.name for run in runs for stage in run.stages))
    curves_by_stage = []
    for name in stage_names:
        lines_by_run = {run.path.name: stage.metric_lines for run in runs for stage in run.stages if stage.name == name}
        if curves_svg := overlay_runs(lines_by_run, REPORT_PANELS):
            curves_by_stage.append((name, curves_svg))
    changed_settings, metrics = _list_changed_settings(runs), _compare_metrics(runs, stage_names)
    page_template = open_template_environment().get_template("compare.html")
    return page_template.render(runs=runs, settings=changed_settings, metrics=metrics, curves=curves_by_stage)


def _list_changed_settings(runs: Sequence[RunRecord]) -> list[tuple[str, ...]]:
    """Return a row for each setting that differs between runs: its key, and its value in each run. A difference that is
    the same in all stages is one row."""
    settings_by_run = [read_settings(run.path) for run in runs]
    changes_by_stage: dict[str, list[tuple[str, ...]]] = {}
    for name in dict.fromkeys(name for run_settings in settings_by_run for name in run_settings):
        stage_settings = [run_settings.get(name, {}) for run_settings in settings_by_run]
        setting_keys = dict.fromkeys(key for stage in stage_settings for key in stage)
        setting_values = {key: [stage.get(key) for stage in stage_settings] for key in setting_keys}
        changed_values = {
            key: values for key, values in setting_values.items() if any(each != values[0] for each in values)
        }
        changes_by_stage[name] = [
            (key, *(format_setting(key, v) for v in values)) for key, values in changed_values.items()
        ]
    changed_setting_rows = group_changes_by_stage(changes_by_stage)
    return [(f"{name}.{row[0]}" if name else row[0], *row[1:]) for name, row in changed_setting_rows]


def _compare_metrics(runs: Sequence[RunRecord], stage_names: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for each of the most important metrics of each stage: its value in each run, and whether its change
    from the first to the last run is better or worse."""
    metric_rows = []
    for name in stage_names:
        metrics_by_run = [next((stage.metrics for stage in run.stages if stage.name == name), {}) for run in runs]
        for key in dict.fromkeys(key for run_metrics in metrics_by_run for key in select_key_metrics(run_metrics)):
            metric_values = [run_metrics.get(key) for run_metrics in metrics_by_run]
            outer_values = [value for value in (metric_values[0], metric_values[-1]) if isinstance(value, int | float)]
            change_verdict = judge_change(key, outer_values[1] - outer_values[0]) if len(outer_values) == 2 else ""
            metric_rows.append({"stage": name, "key": key, "values": metric_values, "verdict": change_verdict})
    return metric_rows
