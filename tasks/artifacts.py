"""Artifacts of Prefect's UI: for each stage a progress bar, a table of metrics, the curves as an image and a final
card; for the run its name and one card at the end.

Prefect keeps every version of an artifact, so all but the progress bar are written at most twice a minute. A server
that does not respond costs a warning, never the stage.
"""

from __future__ import annotations

import base64
import logging
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

from prefect.artifacts import (
    create_image_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run

from cosmos_core.observe import formatting, gallery
from cosmos_core.observe.plots import curves
from cosmos_core.observe.record import Condition, RunRecord, loading_line, read_run
from cosmos_core.observe.report import PAGE, build
from cosmos_core.run.files import parsed, read_json, write_text
from cosmos_core.run.manifest import Result
from cosmos_core.run.progress import MetricsReader, Position
from cosmos_core.run.stage import CONDITIONS

logger = logging.getLogger(__name__)

_PROGRESS_SECONDS = 3.0
_TABLE_SECONDS = 30.0
_ROWS = 20


class StageArtifacts:
    """Artifacts of one stage, published by the task run that executes the stage."""

    def __init__(self, pipeline: str, stage_path: Path) -> None:
        self._stage_path = stage_path
        self._metrics = MetricsReader(stage_path / "metrics.jsonl")
        self._key = _key(pipeline, stage_path.name)
        self._progress_id: UUID | None = None
        self._next_progress = 0.0
        self._next_table = time.monotonic() + _TABLE_SECONDS

    def update(self, progress: Position) -> None:
        """Publish the progress of the worker, and every 30 seconds its metrics."""
        now = time.monotonic()
        with _never_costs_the_run():
            if now >= self._next_progress and progress.total:
                self._next_progress = now + _PROGRESS_SECONDS
                self._show_progress(100.0 * progress.step / progress.total)
            if now >= self._next_table:
                self._next_table = now + _TABLE_SECONDS
                self._show_metrics()

    def finish(self, result: Result) -> None:
        """Publish the final artifacts of a stage: the full progress bar, the last metrics, the curves and a card."""
        with _never_costs_the_run():
            self._show_progress(100.0)
            self._show_metrics()
            if (newest := gallery.newest_grid(self._stage_path)) is not None:
                create_image_artifact(
                    image_url=gallery.png_uri(newest), key=f"{self._key}-drawings", description=newest.parent.name
                )
            create_markdown_artifact(_card(result), key=f"{self._key}-card", description=f"Result of {result['name']}")

    def show_refusal(self) -> None:
        """Publish the conditions of a gate that refused; `finish` publishes those of a gate that passed."""
        with _never_costs_the_run():
            conditions = parsed(read_json(self._stage_path / CONDITIONS) or (), Condition)
            text = f"# {self._stage_path.name}: refused\n\n{conditions_table(conditions)}"
            create_markdown_artifact(
                text, key=f"{self._key}-card", description=f"Conditions of {self._stage_path.name}"
            )

    def _show_progress(self, percent: float) -> None:
        if self._progress_id is None:
            created = create_progress_artifact(
                progress=percent, key=f"{self._key}-progress", description=self._stage_path.name
            )
            self._progress_id = created if isinstance(created, UUID) else None
        else:
            update_progress_artifact(self._progress_id, progress=percent)

    def _show_metrics(self) -> None:
        lines = self._metrics.update()
        if not lines:
            return
        keys = ["step", *sorted({key for line in lines[-_ROWS:] for key in line} - {"step", "time"})]
        create_table_artifact(
            [{key: line.get(key) for key in keys} for line in lines[-_ROWS:]],
            key=f"{self._key}-metrics",
            description="Newest steps",
        )
        image = base64.b64encode(curves(lines)).decode()
        create_image_artifact(
            image_url=f"data:image/png;base64,{image}", key=f"{self._key}-curves", description="Curves"
        )


def name_flow_run(*words: str) -> None:
    """Rename the flow run of this process: the id of a new run is known only after Prefect named its own."""
    with _never_costs_the_run(), get_client(sync_client=True) as client:
        client.update_flow_run(UUID(flow_run.id), name=" ".join(words))


def show_run(run_path: Path) -> None:
    """Publish the card of a run: the status of every stage, its metrics, and the model."""
    run = read_run(run_path)
    with _never_costs_the_run():
        create_markdown_artifact(_run_card(run), key=_key(run.name, "run"), description=f"{run.name}: {run.outcome}")


def write_report(run_path: Path) -> None:
    """Write report.html of a run, whatever the outcome of the run."""
    with _never_costs_the_run():
        write_text(run_path / PAGE, build(run_path))


@contextmanager
def _never_costs_the_run() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - no error of the UI may fail the stage
        logger.warning("it cannot be shown now: %s", error)


def _key(*parts: str) -> str:
    """Return an artifact key made of pipeline and stage, the same for each run, so that Prefect shows their history.
    Prefect allows lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower())


def conditions_table(conditions: Sequence[Condition]) -> str:
    """Return the conditions of a gate as a table in Markdown."""
    head = "| condition | measured | bound | holds |\n|---|---|---|---|\n"
    bounds = ["–" if each.bound is None else f"{each.bound:.6g}" for each in conditions]
    return head + "".join(
        f"| {each.condition} | {each.value:.6g} | {bound} | {'yes' if each.passed else '**no**'} |\n"
        for each, bound in zip(conditions, bounds, strict=True)
    )


def _run_card(run: RunRecord) -> str:
    lines = [f"# {run.name} {run.path.name}: {run.outcome}", "", "| stage | kind | state | time | metrics |"]
    lines.append("|---|---|---|---|---|")
    for stage in run.stages:
        shown = formatting.key_metrics(stage.metrics).items()
        metrics = ", ".join(f"{key} {formatting.number(value)}" for key, value in shown)
        time_ = formatting.duration(stage.seconds)
        lines.append(f"| {stage.name} | {stage.kind.name} | {stage.status} | {time_} | {metrics} |")
    for stage in run.stages:
        if stage.conditions:
            lines += ["", f"gate **{stage.name}**", "", conditions_table(stage.conditions)]
        elif stage.status == "failed":
            lines += ["", f"**{stage.name}**: {stage.state.error}"]
    lines += ["", f"run directory `{run.path}`"]
    if run.model is not None:
        lines += ["", f"model `{run.model}`", "", "```python", loading_line(run.model), "```"]
    lines += [line for where in run.published for line in ("", f"published `{where}`")]
    return "\n".join(lines) + "\n"


def _card(result: Result) -> str:
    rows = "\n".join(f"| {key} | {value:.6g} |" for key, value in sorted(result["metrics"].items()))
    files = "\n".join(
        f"- `{file['path']}` {file['size']:,} bytes, sha256 `{file['sha256'][:12]}`"
        for file in result["outputs"][:_ROWS]
    )
    head = f"# {result['name']} ({result['kind']})\n\n| metric | value |\n|---|---|"
    gate = conditions_table(parsed(result["info"].get("conditions", []), Condition))
    shown = f"\n\n{gate}" if "conditions" in result["info"] else ""
    return f"{head}\n{rows}{shown}\n\n{files}\n\nfingerprint `{result['fingerprint'][:16]}`\n"
