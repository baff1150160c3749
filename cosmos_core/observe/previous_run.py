"""Compare a run with the previous run of the same pipeline: changed settings and metrics."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cosmos_core.config.difference import flat, group_by_stage
from cosmos_core.observe import formatting
from cosmos_core.observe.record import RunRecord, read_pipeline, read_run
from cosmos_core.run.directory import runs_in

_MAX_SETTINGS = 40
_MAX_VALUE_LETTERS = 60
_EXCLUDED_KEYS = ("recipe", "overrides")


def compare_with_previous(run: RunRecord) -> dict[str, Any] | None:
    """Return the previous run of the pipeline of a run, with key, old and new value of each changed setting, and stage,
    name, old value, new value and verdict (`better`, `worse` or empty) of each metric; None for a first run."""
    run_ids = [info.run_id for info in runs_in(run.path.parent) if info.pipeline == run.start_info.pipeline]
    if run.path.name not in run_ids or run_ids.index(run.path.name) == 0:
        return None
    previous_run = read_run(run.path.parent / run_ids[run_ids.index(run.path.name) - 1])
    settings = tuple(_list_changed_settings(resolved(previous_run.path), resolved(run.path)))
    return {
        "run": previous_run, "settings": settings[:_MAX_SETTINGS],
        "num_omitted": max(0, len(settings) - _MAX_SETTINGS), "metrics": tuple(_compare_metrics(previous_run, run)),
    }  # fmt: skip


def resolved(path: Path) -> dict[str, dict[str, Any]]:
    """Return the settings in `pipeline.toml` of a run by stage name and dotted key; empty if the file is damaged."""
    stages, settings = read_pipeline(path).get("stages", []), {}
    for stage in stages if isinstance(stages, list) else []:
        if isinstance(stage, dict) and isinstance(stage.get("name"), str):
            entry = {key: value for key, value in stage.items() if key not in _EXCLUDED_KEYS}
            overrides = stage.get("overrides")
            settings[stage["name"]] = flat(entry) | flat(overrides if isinstance(overrides, dict) else {})
    return settings


def _list_changed_settings(
    old_settings: dict[str, dict[str, Any]], new: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, str, str]]:
    changes = {}
    for name in (name for name in new if name in old_settings):
        values = [(key, old_settings[name].get(key), new[name].get(key)) for key in {**old_settings[name], **new[name]}]
        changes[name] = [(key, format_setting(was), format_setting(now)) for key, was, now in values if was != now]
    yield from ((f"{name}.{key}" if name else key, was, now) for name, (key, was, now) in group_by_stage(changes))
    yield from ((name, "–", "new stage") for name in new if name not in old_settings)
    yield from ((name, "a stage", "–") for name in old_settings if name not in new)


def format_setting(value: Any) -> str:
    """Return the value of a setting as text, truncated to fit a cell of a table; a dash for None."""
    text = "–" if value is None else str(value)
    return text if len(text) <= _MAX_VALUE_LETTERS else f"{text[: _MAX_VALUE_LETTERS - 1]}…"


def _compare_metrics(old_run: RunRecord, new_run: RunRecord) -> Iterator[tuple[str, str, str, str, str]]:
    old_stages = {stage.name: stage for stage in old_run.stages}
    for stage in new_run.stages:
        old_metrics = old_stages[stage.name].metrics if stage.name in old_stages else {}
        for key, value in formatting.key_metrics(stage.metrics).items():
            if not isinstance(old_metrics.get(key), int | float):
                continue
            verdict = formatting.judge_change(key, value - old_metrics[key])
            yield stage.name, key, formatting.number(old_metrics[key]), formatting.number(value), verdict
