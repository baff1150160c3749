"""Print to the terminal: live progress of a run, its summary, and `cosmos status`.

Without a terminal (CI, a log file, a pipe) the same information is printed as a small number of plain lines. The module
`logs` configures log records.
"""

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cosmos_core.observe.costs import make_cost_card
from cosmos_core.observe.formatting import (
    find_headline_metric,
    find_tokens_per_second,
    format_count,
    format_duration,
    format_number,
    select_table_metrics,
    shorten_metric_name,
)
from cosmos_core.observe.record import RunRecord, StageRecord, compute_time_breakdown, read_run, render_loading_code
from cosmos_core.observe.report_server import report_url
from cosmos_core.observe.resuming import describe_interruption, quote_run_path
from cosmos_core.run.files import read_json_object
from cosmos_core.run.loading import draws_videos
from cosmos_core.run.progress import ProgressRecord
from cosmos_core.run.state import ACTIVE_STATES

MIN_LINE_INTERVAL_SECONDS = 10.0
"""Minimum number of seconds between two printed lines of a running stage if the output is no terminal."""

STATE_STYLES = {
    "waiting": "dim", "running": "cyan", "retrying": "yellow", "reused": "blue", "done": "green",
    "failed": "bold red", "refused": "bold red", "stopped": "yellow", "died": "bold red",
}  # fmt: skip
_STATE_SYMBOLS = {
    "waiting": "·", "running": "▶", "retrying": "↻", "reused": "≡", "done": "✓", "failed": "✗", "refused": "✗",
    "stopped": "■", "died": "✗",
}  # fmt: skip
_SPARKLINE_BARS = "▁▂▃▄▅▆▇█"
_MEMORY_METRIC_BY_LABEL = {"GPU": "memory/gpu_gib", "memory": "memory/host_gib"}
_SPARKLINE_WIDTH = 12  # maximum number of characters of a sparkline
# Phases of a train step: their names are shown only during the first step, because later the step number is shown.
_TRAIN_STEP_PHASES = frozenset({"step", "generate", "score"})
_PLAIN_TEXT_WIDTH = 160


@dataclass
class _StageDisplayState:
    state: str = "waiting"
    progress: ProgressRecord | None = None
    start_time: float | None = None
    end_time: float | None = None
    last_print_time: float = 0.0
    last_printed_progress: tuple[Any, ...] = ()
    """Phase, number of processed items and step in the last printed line, so that no line is printed twice."""
    phase_start_time: float = 0.0
    reported_compile_seconds: float = 0.0
    """Compilation time in seconds that a printed line has last reported."""
    printed_warnings: set[str] = field(default_factory=set)
    headline_values: dict[int, float] = field(default_factory=dict)
    """Value of the headline metric (reward, loss or accuracy) by step."""
    first_step_progress: ProgressRecord | None = None
    """First report of the current attempt with a completed step; the time per step is measured from this report on."""


class ProgressDisplay:
    """Live display of the progress of the stages with the names `stages`; its methods are thread-safe. `is_terminal`:
    whether to show a live table; None: only if `stream` (None: standard output) is a terminal that can move its cursor.
    `get_time` returns the current time in seconds."""

    def __init__(
        self,
        stages: Sequence[str],
        *,
        is_terminal: bool | None = None,
        stream: TextIO | None = None,
        get_time: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream or sys.stdout
        can_move_cursor = os.environ.get("TERM", "").lower() not in {"dumb", "unknown"}
        self._is_terminal = self._stream.isatty() and can_move_cursor if is_terminal is None else is_terminal
        self._get_time = get_time
        self._lock = threading.RLock()
        self._stage_states = {name: _StageDisplayState() for name in stages}
        self._stage_name_width = max((len(name) for name in stages), default=0)
        self._console = Console(file=self._stream, force_terminal=self._is_terminal or None, highlight=False)
        self._live_display: Live | None = None

    def __enter__(self) -> Self:
        if self._is_terminal:
            self._live_display = Live(console=self._console, get_renderable=self._render_table, refresh_per_second=4)
            self._live_display.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live_display is not None:
            self._live_display.stop()
            self._live_display = None

    def update(self, stage: str, state: str, progress: ProgressRecord | None = None) -> None:
        """Show the state of a stage: in the live table or, without one, in a printed line if it has changed. `progress`
        is the content of its `progress.json`, None if unchanged."""
        with self._lock:
            status = self._stage_states.setdefault(stage, _StageDisplayState())
            self._stage_name_width = max(self._stage_name_width, len(stage))
            has_state_changed, current_time = state != status.state, self._get_time()
            if has_state_changed:
                status.state = state
                if state in ACTIVE_STATES:
                    status.start_time = current_time if status.start_time is None else status.start_time
                    status.end_time = None
                elif status.start_time is not None and status.end_time is None:
                    status.end_time = current_time
            if progress is not None:
                if status.progress is None or status.progress.phase != progress.phase:
                    status.phase_start_time = current_time
                status.progress = progress
                if (metric := find_headline_metric(progress.metrics)) and math.isfinite(metric[1]):
                    status.headline_values[progress.step] = metric[1]
                first_progress = status.first_step_progress
                if not first_progress or first_progress.pid != progress.pid or first_progress.step > progress.step:
                    status.first_step_progress = progress if progress.step else first_progress
            should_print_progress = _get_progress_key(status) != status.last_printed_progress
            should_print_progress &= current_time - status.last_print_time >= MIN_LINE_INTERVAL_SECONDS
            if self._live_display is None and (has_state_changed or (state in ACTIVE_STATES and should_print_progress)):
                status.last_print_time = current_time
                text = "  ".join(self._format_line_parts(status, has_state_changed=has_state_changed))
                self._write_line(f"{stage:<{self._stage_name_width}}  {text}".rstrip())
                status.last_printed_progress = () if has_state_changed else _get_progress_key(status)
            new_warnings = (
                [] if progress is None else [e for e in progress.warnings if e not in status.printed_warnings]
            )
            status.printed_warnings.update(new_warnings)
        for warning in new_warnings:
            self.print_message(f"{stage:<{self._stage_name_width}}  warning: {warning}")

    def print_message(self, text: str) -> None:
        """Print one line of text; if the live table is shown, print the line above the table."""
        # Print without `self._lock` to avoid a deadlock: rich holds its own lock while it calls `_render_table`.
        if self._live_display is not None:
            self._console.print(Text(text))
            return
        with self._lock:
            self._write_line(text)

    def _write_line(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def _format_line_parts(self, status: _StageDisplayState, *, has_state_changed: bool) -> list[str]:
        line_parts = [status.state] if has_state_changed else []
        if status.state in {"waiting", "reused"} or (has_state_changed and status.state in ACTIVE_STATES):
            return line_parts
        line_parts += filter(None, (_format_phase(status), *self._format_step_texts(status)))
        if status.state not in ACTIVE_STATES:
            seconds = self._get_elapsed_seconds(status)
            return line_parts if seconds is None else [*line_parts, format_duration(seconds)]
        eta_seconds = _estimate_eta_seconds(status)
        return line_parts if eta_seconds is None else [*line_parts, f"eta {format_duration(eta_seconds)}"]

    def _format_step_texts(self, status: _StageDisplayState) -> list[str]:
        """Return the texts about steps for the next printed line of a stage: the step with its metrics, unless the last
        printed line of the running stage had the same step, and the compilation time if it has increased."""
        progress, compile_text = status.progress, ""
        if progress is None:
            return []
        if progress.phase != "compile" and progress.compile_seconds > status.reported_compile_seconds:
            status.reported_compile_seconds = progress.compile_seconds
            compile_text = f"compiled in {format_duration(progress.compile_seconds)}"
        is_step_already_printed = status.state in ACTIVE_STATES and status.last_printed_progress[2:] == (progress.step,)
        return (
            [compile_text]
            if is_step_already_printed
            else [_format_step(status), *_format_metrics(status), compile_text]
        )

    def _get_elapsed_seconds(self, status: _StageDisplayState) -> float | None:
        if status.start_time is None:
            return None
        return (self._get_time() if status.end_time is None else status.end_time) - status.start_time

    def _render_table(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        is_wide_terminal = self._console.width >= 100
        for column in range(7):
            # rich makes columns that may wrap narrower first: only metrics are cut if the terminal is narrow.
            table.add_column(justify="right" if column == 3 else "left", no_wrap=column != 4)
        with self._lock:
            for name, status in self._stage_states.items():
                style, seconds = STATE_STYLES.get(status.state, ""), self._get_elapsed_seconds(status)
                phase = _format_phase(status) if status.state == "running" else ""
                phase += f" {format_duration(self._get_time() - status.phase_start_time)}" if phase == "compile" else ""
                progress_bar = _make_progress_bar(status, 24 if is_wide_terminal else 10, self._get_time())
                metric_texts = _format_metrics(status) + (_format_resources(status) if is_wide_terminal else [])
                eta_seconds = _estimate_eta_seconds(status) if status.state in ACTIVE_STATES else None
                clock_text = format_duration(seconds) if eta_seconds is None else f"eta {format_duration(eta_seconds)}"
                table.add_row(
                    Text(f"{_STATE_SYMBOLS.get(status.state, ' ')} {name}", style=style),
                    Text(phase or status.state, style=style),
                    progress_bar if status.state != "waiting" else "",
                    _format_step(status).removeprefix("step "),
                    Text("  ".join(metric_texts), no_wrap=True, overflow="ellipsis"),
                    Text(
                        draw_sparkline(list(status.headline_values.values())) if is_wide_terminal else "", style=style
                    ),
                    Text(clock_text if seconds is not None else "", style="dim"),
                )
        return table


def print_status(run_path: Path, *, stream: TextIO | None = None) -> None:
    """Print the status of every stage of a run, and how to continue an interrupted run, to `stream` (None: stdout)."""
    run = read_run(run_path)
    title = f"{run.name}  {run.path.name}  {run.outcome}"
    console = make_console(stream)
    hidden_columns = () if console.width >= 80 else ("kind", "attempt")  # a narrow terminal needs room for metrics
    formatters = {name: formatter for name, formatter in _STATUS_COLUMNS.items() if name not in hidden_columns}
    console.print(Group(_build_table(run, formatters, title), *_list_notices(run)))
    if text := describe_interruption(run):
        # With `soft_wrap`, rich does not break the text, which contains a command to copy, into lines.
        console.print(Text(text, style="yellow"), soft_wrap=True)


def print_summary(run_path: Path, *, stream: TextIO | None = None) -> None:
    """Print the outcome of a run: its stages, the time inside and outside of stages, and how to load its model."""
    run = read_run(run_path)
    seconds = compute_time_breakdown(run) or dict.fromkeys(("wall", "inside", "overhead"), 0.0)
    time_labels = {"inside": "time inside stage workers", "overhead": "orchestration overhead"}
    summary_fields = {name: format_duration(seconds[key]) for key, name in time_labels.items()} | make_cost_card(run)
    if (run.path / "report.html").is_file():
        summary_fields["report"] = report_url(run.path) or str(run.path / "report.html")
    if run.outcome in {"failed", "refused", "stopped"}:  # `run.model` may be the base model, so show trained models
        for stage in run.trained_models:
            summary_fields[f"model of stage {stage.name!r}"] = str(stage.path / stage.info["model"])
    elif run.model is not None:
        summary_fields |= {"model": str(run.model), "load it with": render_loading_code(run.model)}
        if not draws_videos(read_json_object(run.model / "model_index.json")):
            summary_fields["try it with"] = f"cosmos try {quote_run_path(run.path)}"
    if run.published_locations:
        summary_fields["published"] = ", ".join(run.published_locations)
    title = f"{run.name}  {run.path.name}  {run.outcome} after {format_duration(seconds['wall'])}"
    label_width = max(len(key) for key in summary_fields)
    console = make_console(stream)
    # The table would wrap a title at its own width, so the title is printed separately.
    console.print(Text(title, style="bold"), soft_wrap=True)
    console.print(Group(_build_table(run, _SUMMARY_COLUMNS), *_list_notices(run)))
    for key, value in summary_fields.items():
        # With `soft_wrap`, rich does not break paths and Python code, which users copy, into lines.
        console.print(Text.assemble((f"{key:<{label_width}}  ", "dim"), value), soft_wrap=True)


def make_console(stream: TextIO | None = None) -> Console:
    """Return a console for tables and for text without markup; if the output is no terminal, the width is fixed."""
    # Print names as they are, because by default rich interprets brackets and colons in them as markup and emoji.
    console_options: dict[str, Any] = dict.fromkeys(("highlight", "markup", "emoji"), False)
    console = Console(file=stream or sys.stdout, **console_options)
    return console if console.is_terminal else Console(file=console.file, width=_PLAIN_TEXT_WIDTH, **console_options)


def _list_notices(run: RunRecord) -> list[Text]:
    """Return a line for each stage that failed or ran again, and for each notice and warning of a stage."""
    notices = []
    for stage in run.stages:
        if stage.state.state == "failed" and stage.state.error:
            notices.append(Text(f"{stage.name}: {stage.state.error}", style="red"))
        stage_notices = stage.info.get("notices")
        notice_texts = stage_notices if isinstance(stage_notices, list) else []
        rerun_texts = [f"remade: {stage.reason_for_rerun}"] if stage.reason_for_rerun else []
        warnings = [f"warning: {text}" for text in stage.warnings if text not in notice_texts]
        notices += [Text(f"{stage.name}: {text}", style="yellow") for text in (*rerun_texts, *notice_texts, *warnings)]
    return notices


def _build_table(run: RunRecord, formatters: dict[str, Callable[[StageRecord], str | Text]], title: str = "") -> Table:
    table = Table(title=title or None, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for name in formatters:
        is_numeric = name in {"attempt", "step", "time"}
        table.add_column(name, justify="right" if is_numeric else "left", header_style="dim", no_wrap=name != "metrics")
    for stage in run.stages:
        table.add_row(*(format_cell(stage) for format_cell in formatters.values()))
    return table


def _format_state(stage: StageRecord) -> Text:
    return Text(f"{_STATE_SYMBOLS.get(stage.status, ' ')} {stage.status}", style=STATE_STYLES.get(stage.status, ""))


def _format_stage_metrics(stage: StageRecord) -> Text:
    metric_texts = [f"{key} {format_number(value)}" for key, value in select_table_metrics(stage.metrics).items()]
    if best_step := stage.best_step:
        best_metric_text = f"{shorten_metric_name(best_step.metric)} {format_number(best_step.value)}"
        metric_texts.append(f"best {best_metric_text} at step {best_step.step}")
    return Text("  ".join(metric_texts))


_SUMMARY_COLUMNS: dict[str, Callable[[StageRecord], str | Text]] = {
    "stage": lambda stage: Text(stage.name),
    "state": _format_state,
    "time": lambda stage: "" if stage.seconds is None else format_duration(stage.seconds),
    "metrics": _format_stage_metrics,
}
_STATUS_COLUMNS: dict[str, Callable[[StageRecord], str | Text]] = {
    "stage": _SUMMARY_COLUMNS["stage"],
    "kind": lambda stage: stage.kind.name,
    "state": _format_state,
    "attempt": lambda stage: str(stage.state.attempt or ""),
    "step": lambda stage: _format_step_of_total(*stage.step_and_total),
    "time": _SUMMARY_COLUMNS["time"],
    "metrics": _format_stage_metrics,
}


def _format_step_of_total(step: Any, num_steps: Any) -> str:
    if step is None or (step == 0 and not num_steps):
        return ""
    return f"{step}/{num_steps}" if num_steps else str(step)


def _format_phase(status: _StageDisplayState) -> str:
    if status.progress is None or status.state not in ACTIVE_STATES:
        return ""
    progress = status.progress
    item_count_text = f" {progress.done}/{progress.count}" if progress.count else ""
    is_phase_hidden = progress.phase in _TRAIN_STEP_PHASES and progress.step and not item_count_text
    return "" if is_phase_hidden else f"{progress.phase}{item_count_text}"


def _get_progress_key(status: _StageDisplayState) -> tuple[Any, ...]:
    """Return the phase, the number of processed items and the step, by whose change a new line is printed."""
    if (progress := status.progress) is None:
        return "", 0, 0
    return progress.phase if _format_phase(status) else "", progress.done, progress.step


def _format_step(status: _StageDisplayState) -> str:
    step_text = _format_step_of_total(status.progress.step, status.progress.total) if status.progress else ""
    return f"step {step_text}" if step_text else ""


def _format_metrics(status: _StageDisplayState) -> list[str]:
    metrics = status.progress.metrics if status.progress else {}
    headline_metric, throughput = find_headline_metric(metrics), find_tokens_per_second(metrics)
    metric_texts = [f"{headline_metric[0]} {format_number(headline_metric[1])}"] if headline_metric else []
    if throughput is not None and status.state in ACTIVE_STATES:
        metric_texts.append(f"{format_count(throughput)} tok/s")
    return metric_texts


def _format_resources(status: _StageDisplayState) -> list[str]:
    """Return texts with the seconds of generation, scoring and training in the newest step, if at least two of them
    were measured, and with the used memory of the GPU or, if it was not measured, of the host."""
    metrics = status.progress.metrics if status.progress and status.state in ACTIVE_STATES else {}
    durations = [(name, metrics[key]) for name in ("generate", "score", "train") if (key := f"time/{name}") in metrics]
    duration_texts = [" ".join(f"{name} {format_duration(value)}" for name, value in durations)] * (len(durations) > 1)
    memory_texts = [f"{name} {metrics[key]:.1f} GiB" for name, key in _MEMORY_METRIC_BY_LABEL.items() if key in metrics]
    return [*duration_texts, *memory_texts[:1]]


def draw_sparkline(values: Sequence[float]) -> str:
    """Return a line of bars whose heights show `values`, scaled to their range; empty for fewer than two values."""
    if len(values) < 2:
        return ""
    num_sparkline_bars = min(_SPARKLINE_WIDTH, len(values))
    values = [values[round(i * (len(values) - 1) / (num_sparkline_bars - 1))] for i in range(num_sparkline_bars)]
    lowest, value_range = min(values), max(values) - min(values)
    return "".join(_SPARKLINE_BARS[round((value - lowest) / value_range * 7) if value_range else 0] for value in values)


def _make_progress_bar(status: _StageDisplayState, bar_width: int, now: float) -> ProgressBar:
    step, num_steps = (status.progress.step, status.progress.total) if status.progress else (0, None)
    if status.state in {"done", "reused"}:
        return ProgressBar(total=1, completed=1, width=bar_width)
    is_pulsing, bar_step = not num_steps and status.state == "running", step if num_steps else 0
    return ProgressBar(total=num_steps or 1, completed=bar_step, width=bar_width, pulse=is_pulsing, animation_time=now)


def _estimate_eta_seconds(status: _StageDisplayState) -> float | None:
    """Return the estimated seconds until a stage's last step, from its time per step so far; None if it is unknown."""
    progress, first_progress = status.progress, status.first_step_progress
    if not (progress and first_progress and progress.total and first_progress.step < progress.step < progress.total):
        return None
    seconds = progress.heartbeat - first_progress.heartbeat
    seconds -= progress.compile_seconds - first_progress.compile_seconds
    return seconds / (progress.step - first_progress.step) * (progress.total - progress.step)
