"""Artifacts in Prefect's UI: for each stage a progress bar, a table of metrics, the curves as an image, samples and a
final card; for the run one card at its end. If the Prefect server does not respond, a warning is logged.

Prefect keeps every version of an artifact, so each one except the progress bar is written at most twice per minute.
"""

import hashlib
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.artifacts import (
    create_image_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from cosmos_core.config.schema.pipeline import PipelineConfig
from cosmos_core.error_handling import log_errors
from cosmos_core.observe import completions, formatting, gallery
from cosmos_core.observe.costs import make_cost_card
from cosmos_core.observe.plots import plot_curves
from cosmos_core.observe.record import GateCondition, RunRecord, StageRecord, read_run, render_loading_code
from cosmos_core.observe.report import REPORT_FILE, build_report
from cosmos_core.observe.report_server import report_url
from cosmos_core.run.files import parse_documents, read_json, write_text
from cosmos_core.run.manifest import Result
from cosmos_core.run.progress import MetricsReader, ProgressRecord
from cosmos_core.run.stage import CONDITIONS_FILE
from tasks.naming import get_user_name

logger = logging.getLogger(__name__)

_UPDATE_PERIOD_SECONDS = {"progress": 3.0, "metrics": 30.0, "samples": 600.0}
_MAX_PUBLISH_WAIT_SECONDS = 300.0  # maximum number of seconds to wait for the thread that publishes artifacts
_MAX_TABLE_ROWS = 20
_MAX_PLOTTED_LINES = 10_000
_MAX_CELL_CHARACTERS = 1000  # maximum number of characters of one prompt or completion in a table


class StageArtifacts:
    """Publisher of the artifacts of one stage, used by the task run that executes the stage. Prefect artifacts have no
    tags, so each description names the run and the user. No samples of a private run are published, since every user of
    the server could read them."""

    def __init__(self, pipeline: PipelineConfig, stage_path: Path) -> None:
        self._stage_path = stage_path
        self._metrics_reader = MetricsReader(stage_path / "metrics.jsonl")
        self._artifact_key_prefix = _make_artifact_key(pipeline.name, stage_path.name)
        self._is_private = bool(pipeline.private)
        self._run_description = f"run {stage_path.parent.parent.name} of {get_user_name()}"
        self._progress_artifact_id: UUID | None = None
        self._next_update_times = {name: time.monotonic() + seconds for name, seconds in _UPDATE_PERIOD_SECONDS.items()}
        self._next_update_times["progress"] = 0.0
        self._thread: threading.Thread | None = None

    def update(self, progress: ProgressRecord) -> None:
        """Publish the progress of the worker every 3 s, its metrics every 30 s and its samples every 10 minutes, in a
        thread: Prefect repeats a request to a server that does not respond for minutes."""
        if time.monotonic() >= min(self._next_update_times.values()) and not (self._thread and self._thread.is_alive()):
            thread_args = (self._publish_due_artifacts, progress)
            self._thread = threading.Thread(target=copy_context().run, args=thread_args, name="artifacts", daemon=True)
            self._thread.start()

    def _publish_due_artifacts(self, progress: ProgressRecord) -> None:
        progress_percent = 100.0 * progress.step / progress.total if progress.total else None
        current_time = time.monotonic()
        publish_functions: dict[str, Callable[[], None]] = {
            "progress": partial(self._show_progress, progress_percent),
            "metrics": self._show_metrics,
            "samples": self._show_samples,
        }
        with log_ui_errors():
            for name, publish in publish_functions.items():
                if current_time >= self._next_update_times[name]:
                    self._next_update_times[name] = current_time + _UPDATE_PERIOD_SECONDS[name]
                    publish()

    def finish(self, result: Result) -> None:
        """Publish the final artifacts of a stage: the full progress bar, the last metrics, the curves and a card."""
        if self._thread is not None:
            self._thread.join(_MAX_PUBLISH_WAIT_SECONDS)
            if self._thread.is_alive():
                logger.warning("the Prefect server does not respond: the result of this stage is not shown there")
                return
        with log_ui_errors():
            self._show_progress(100.0)
            self._show_metrics()
            self._show_samples()
            self._show_card(_render_result_card(result), "Result")

    def show_refusal(self) -> None:
        """Publish a card with the conditions of a gate that refused; `finish` does so for a gate that passed."""
        with log_ui_errors():
            conditions = parse_documents(read_json(self._stage_path / CONDITIONS_FILE) or (), GateCondition)
            card_text = f"# {self._stage_path.name}: refused\n\n{render_conditions_table(conditions)}"
            self._show_card(card_text, "Conditions")

    def _show_card(self, card_text: str, card_title: str) -> None:
        description = f"{card_title} of {self._stage_path.name}, {self._run_description}"
        create_markdown_artifact(card_text, key=f"{self._artifact_key_prefix}-card", description=description)

    def _show_samples(self) -> None:
        """Publish the newest completions as a table, and the newest grid of generated images of a diffusion model."""
        if self._is_private:
            return
        if completion_lines := completions.read_newest_completions(self._stage_path, _MAX_TABLE_ROWS):
            rows = [_make_sample_row(line, self._stage_path) for line in completion_lines]
            create_table_artifact(rows, f"{self._artifact_key_prefix}-samples", f"Samples, {self._run_description}")
        if (grid_path := gallery.find_newest_grid(self._stage_path)) is not None:
            image_url = gallery.make_data_uri("image/png", grid_path.read_bytes())
            description = f"{grid_path.parent.name}, {self._run_description}"
            create_image_artifact(image_url, f"{self._artifact_key_prefix}-drawings", description)

    def _show_progress(self, percent: float | None) -> None:
        if percent is not None and self._progress_artifact_id is None:
            description = f"{self._stage_path.name}, {self._run_description}"
            artifact_id = create_progress_artifact(percent, f"{self._artifact_key_prefix}-progress", description)
            self._progress_artifact_id = artifact_id if isinstance(artifact_id, UUID) else None
        elif percent is not None and self._progress_artifact_id is not None:
            update_progress_artifact(self._progress_artifact_id, progress=percent)

    def _show_metrics(self) -> None:
        metric_records = self._metrics_reader.update()
        if not metric_records:
            return
        # Drop every second step of the older half, so that at most `_MAX_PLOTTED_LINES` steps are plotted.
        while len(metric_records) > _MAX_PLOTTED_LINES:
            del metric_records[: len(metric_records) // 2 : 2]
        last_metric_records = metric_records[-_MAX_TABLE_ROWS:]
        column_names = ["step", *sorted({key for line in last_metric_records for key in line} - {"step", "time"})]
        rows = [{key: _to_json_value(line.get(key)) for key in column_names} for line in last_metric_records]
        create_table_artifact(rows, f"{self._artifact_key_prefix}-metrics", f"Newest steps, {self._run_description}")
        image_url = gallery.make_data_uri("image/png", plot_curves(metric_records))
        create_image_artifact(image_url, f"{self._artifact_key_prefix}-curves", f"Curves, {self._run_description}")


def publish_run_report(run_path: Path) -> None:
    """Write the HTML report of a run and publish the card of the run, whatever its outcome; errors are only logged."""
    with log_ui_errors():
        write_text(run_path / REPORT_FILE, build_report(run_path))
    run = read_run(run_path)
    with log_ui_errors():
        description = f"{run.name}: {run.outcome}, run {run_path.name} of {get_user_name()}"
        # Without `_sync`, the call returns a coroutine at the end of an asynchronous flow.
        create_markdown_artifact(_render_run_card(run), make_run_card_key(run.name), description, _sync=True)  # type: ignore[call-arg]


def log_ui_errors() -> AbstractContextManager[None]:
    """Log any error of the `with` block as a warning, because an error of Prefect's UI must not fail a stage."""
    return log_errors(partial(logger.warning, "it cannot be shown now: %s"))


def make_run_card_key(pipeline_name: str) -> str:
    """Return the artifact key of the card that all runs of a pipeline share."""
    return _make_artifact_key(pipeline_name, "run")


def _make_artifact_key(*key_parts: str) -> str:
    """Return an artifact key made of the names of pipeline and stage, in lower-case letters, digits and dashes, which
    Prefect requires. All runs of a pipeline share the key, so that Prefect shows the history of the artifact."""
    name = "-".join(key_parts).lower()
    key = re.sub(r"[^a-z0-9]+", "-", name)
    return key if name.isascii() else f"{key.strip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def render_conditions_table(conditions: Sequence[GateCondition]) -> str:
    """Return the conditions of a gate as a table in Markdown."""
    table_lines = ["| condition | measured | bound | holds |", "|---|---|---|---|"]
    for condition in conditions:
        bound_text = "–" if condition.bound is None else f"{condition.bound:.6g}"
        condition_outcome_text = "yes" if condition.passed else "**no**"
        table_lines.append(f"| {condition.title} | {condition.value:.6g} | {bound_text} | {condition_outcome_text} |")
    return "\n".join([*table_lines, ""])


def _make_sample_row(line: dict[str, Any], stage_path: Path) -> dict[str, Any]:
    sample_texts = {"prompt": line.get("prompt", ""), "completion": completions.format_completion(line, stage_path)}
    for name, text in sample_texts.items():
        sample_texts[name] = text if len(text) <= _MAX_CELL_CHARACTERS else f"{text[:_MAX_CELL_CHARACTERS]}…"
    return {"step": line["step"], **sample_texts, "reward": _to_json_value(line.get("reward"))}


def _to_json_value(metric_value: Any) -> Any:
    """Return a metric for a table in Prefect. Infinity becomes text, as JSON has none and Prefect replaces only NaN."""
    return str(metric_value) if metric_value in (math.inf, -math.inf) else metric_value


def _render_run_card(run: RunRecord) -> str:
    card_lines = [f"# {run.name} {run.path.name}: {run.outcome}", "", *_render_stages(run)]
    card_lines += [line for name, cost in make_cost_card(run).items() for line in ("", f"{name}: {cost}")]
    card_lines += ["", f"run directory `{run.path}`"]
    if url := report_url(run.path):
        card_lines += ["", f"[report]({url})"]
    if run.model is not None:
        card_lines += ["", f"model `{run.model}`", "", "```python", render_loading_code(run.model), "```"]
    card_lines += [line for location in run.published_locations for line in ("", f"published `{location}`")]
    return "\n".join(card_lines) + "\n"


def render_approval_form(run_path: Path) -> str:
    """Return the text of the form in which a person approves a publication: metrics of stages, and gate conditions."""
    run = read_run(run_path)
    lines = [f"Publish the model of run {run_path.name}?", ""]  # a list, because Prefect truncates wide tables
    for stage in run.stages:
        for condition in stage.conditions:
            bound_text = "nothing is published" if condition.bound is None else f"bound {condition.bound:.6g}"
            condition_outcome_text = "holds" if condition.passed else "**does not hold**"
            measurement_text = f"measured {condition.value:.6g}, {bound_text}, {condition_outcome_text}"
            lines.append(f"- gate {stage.name}: {condition.title}: {measurement_text}")
    return "\n".join([*lines, *(f"- {stage.name}: {text}" for stage in run.stages if (text := _format_metrics(stage)))])


def _render_stages(run: RunRecord) -> list[str]:
    markdown_lines = ["| stage | kind | state | time | metrics |", "|---|---|---|---|---|"]
    for stage in run.stages:
        stage_row_cells = (stage.name, stage.kind.name, stage.status, formatting.format_duration(stage.seconds))
        markdown_lines.append(f"| {' | '.join(stage_row_cells)} | {_format_metrics(stage)} |")
    for stage in run.stages:
        if stage.conditions:
            markdown_lines += ["", f"gate **{stage.name}**", "", render_conditions_table(stage.conditions)]
        elif stage.state.state == "failed":
            markdown_lines += ["", f"**{stage.name}**: {stage.state.error}"]
    return markdown_lines


def _format_metrics(stage: StageRecord) -> str:
    metrics = formatting.select_table_metrics(stage.metrics).items()
    return ", ".join(f"{name} {formatting.format_number(value)}" for name, value in metrics)


def _render_result_card(result: Result) -> str:
    lines = [f"# {result['name']} ({result['kind']})", "", "| metric | value |", "|---|---|"]
    lines += [f"| {key} | {value:.6g} |" for key, value in sorted(result["metrics"].items())]
    if (gate_conditions := result["info"].get("conditions")) is not None:
        lines += ["", render_conditions_table(parse_documents(gate_conditions, GateCondition))]
    output_files = result["outputs"][:_MAX_TABLE_ROWS]
    output_file_lines = [
        f"- `{file['path']}` {file['size']:,} bytes, sha256 `{file['sha256'][:12]}`" for file in output_files
    ]
    return "\n".join([*lines, "", *output_file_lines, "", f"fingerprint `{result['fingerprint'][:16]}`", ""])
