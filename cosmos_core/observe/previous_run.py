"""Compare a run with the previous run of the same pipeline: changed settings and metrics."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cosmos_core.config.difference import flatten_tables, group_changes_by_stage
from cosmos_core.environment import mask_settings
from cosmos_core.observe.formatting import format_number, judge_change, select_key_metrics
from cosmos_core.observe.record import RunRecord, read_run, read_stage_entries
from cosmos_core.run.directory import list_runs

_MAX_SHOWN_SETTINGS = 40  # maximum number of changed settings in the report
_MAX_SETTING_LENGTH = 60
_UNCOMPARED_SETTING_KEYS = ("recipe", "overrides")


def compare_with_previous(run: RunRecord) -> dict[str, Any] | None:
    """Compare a run with the previous run of its pipeline. Return a dict with the previous run, with key, old and new
    value of each changed setting, and with stage, name, old value, new value and verdict (`better`, `worse` or empty)
    of each metric. Return None if there is no previous run."""
    run_ids = [info.run_id for info in list_runs(run.path.parent) if info.pipeline == run.start_info.pipeline]
    if run.path.name not in run_ids or run_ids.index(run.path.name) == 0:
        return None
    previous_run = read_run(run.path.parent / run_ids[run_ids.index(run.path.name) - 1])
    settings = tuple(_list_changed_settings(read_settings(previous_run.path), read_settings(run.path)))
    return {
        "run": previous_run, "metrics": tuple(_compare_metrics(previous_run, run)),
        "settings": settings[:_MAX_SHOWN_SETTINGS], "num_omitted": max(0, len(settings) - _MAX_SHOWN_SETTINGS),
    }  # fmt: skip


def read_settings(run_path: Path) -> dict[str, dict[str, Any]]:
    """Return the settings in `pipeline.toml` of a run by stage name and dotted key; empty if the file is damaged."""
    settings_by_stage = {}
    for name, stage in read_stage_entries(run_path).items():
        stage_settings = {key: value for key, value in stage.items() if key not in _UNCOMPARED_SETTING_KEYS}
        overrides = stage["overrides"] if isinstance(stage.get("overrides"), dict) else {}
        settings_by_stage[name] = flatten_tables(stage_settings) | flatten_tables(overrides)
    return settings_by_stage


def _list_changed_settings(
    old_settings: dict[str, dict[str, Any]], new_settings: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, str, str]]:
    changes_by_stage = {}
    for name in (name for name in new_settings if name in old_settings):
        old_recipe, new_recipe = old_settings[name], new_settings[name]
        changed_keys = [key for key in old_recipe | new_recipe if old_recipe.get(key) != new_recipe.get(key)]
        changes_by_stage[name] = [
            (key, *(format_setting(key, values.get(key)) for values in (old_recipe, new_recipe)))
            for key in changed_keys
        ]
    for name, (key, old_text, new_text) in group_changes_by_stage(changes_by_stage):
        yield f"{name}.{key}" if name else key, old_text, new_text
    yield from ((name, "–", "new stage") for name in new_settings if name not in old_settings)
    yield from ((name, "a stage", "–") for name in old_settings if name not in new_settings)


def format_setting(key: str, setting_value: Any) -> str:
    """Return a setting as text without secrets, truncated to fit a cell of a table; a dash for None."""
    setting_text = "–" if setting_value is None else str(mask_settings(setting_value, key))
    return setting_text if len(setting_text) <= _MAX_SETTING_LENGTH else f"{setting_text[: _MAX_SETTING_LENGTH - 1]}…"


def _compare_metrics(old_run: RunRecord, new_run: RunRecord) -> Iterator[tuple[str, str, str, str, str]]:
    old_stage_by_name = {stage.name: stage for stage in old_run.stages}
    for stage in new_run.stages:
        old_stage_metrics = old_stage_by_name[stage.name].metrics if stage.name in old_stage_by_name else {}
        for key, value in select_key_metrics(stage.metrics).items():
            if not isinstance(old_stage_metrics.get(key), int | float):
                continue
            change_verdict = judge_change(key, value - old_stage_metrics[key])
            yield stage.name, key, format_number(old_stage_metrics[key]), format_number(value), change_verdict
