"""Emit events for the automations of a Prefect server: a stage or a run ended, a gate refused, a model was published.

Prefect sends the events from a queue in a separate thread, so that an unreachable server neither delays nor fails a
stage.
"""

import logging
import math
from functools import partial
from typing import Any

from prefect.events import emit_event
from prefect.settings import get_current_settings

from cosmos_core.error_handling import log_errors
from cosmos_core.errors import CosmosError, GateFailed, Preempted
from cosmos_core.observe.formatting import float_or_inf
from cosmos_core.observe.report import REPORT_FILE
from cosmos_core.observe.report_server import report_url
from cosmos_core.run.directory import Run
from cosmos_core.run.liveness import has_flow_completed
from cosmos_core.run.manifest import Result, read_result
from cosmos_core.run.state import FINISHED_STATES, read_state
from tasks.artifacts import make_run_card_key

logger = logging.getLogger(__name__)


def emit_stage_completed(
    run: Run, stage_name: str, result: Result, *, was_reused: bool, earlier_result: Result | None = None
) -> None:
    """Emit an event that a stage has its result. Emit a second event if the stage has published a model that neither
    another run nor `earlier_result`, the previous result of the stage, had published before."""
    event_payload = {"reused": was_reused, "metrics": _keep_finite_metrics(result["metrics"])}
    _emit_event("cosmos.stage.completed", run, stage_name, event_payload)
    is_publication = run.pipeline.stage_kind(run.pipeline.stage(stage_name)).makes == "publication"
    published_address, was_model_published = result["info"].get("published"), "was_published" in result["info"]
    if earlier_result is not None:
        was_model_published |= earlier_result["info"].get("published") == published_address
    if is_publication and not was_reused and not was_model_published:
        publication_details = {"target": run.pipeline.stage(stage_name).target, "published": published_address}
        _emit_event("cosmos.model.published", run, stage_name, event_payload | publication_details)


def emit_stage_failed(run: Run, stage_name: str, error: CosmosError) -> None:
    """Emit an event that a gate refused, or that a stage failed and is not retried; no event for a stopped stage."""
    if not isinstance(error, Preempted):
        event_name = "cosmos.gate.failed" if isinstance(error, GateFailed) else "cosmos.stage.failed"
        _emit_event(event_name, run, stage_name, {"error": str(error), "exit_code": error.exit_code})


def emit_run_ended(run: Run, *, has_run_failed: bool) -> None:
    """Emit an event that a run failed, or that its Python flow has completed or all its stages have results, with the
    metrics of the last stage that reported metrics."""
    state_by_stage_name = {stage.name: read_state(run.stage_path(stage.name)).state for stage in run.pipeline.stages}
    if has_run_failed:
        failed_stages = [name for name, state in state_by_stage_name.items() if state == "failed"]
        if failed_stages:  # a run that was only stopped emits no event
            _emit_event("cosmos.run.failed", run, "", {"failed": failed_stages})
    elif has_flow_completed(run.path) or FINISHED_STATES.issuperset(state_by_stage_name.values()):
        stage_results = [result for name in state_by_stage_name if (result := read_result(run.stage_path(name)))]
        last_metrics: Any = next((result["metrics"] for result in reversed(stage_results) if result["metrics"]), {})
        _emit_event("cosmos.run.completed", run, "", {"metrics": _keep_finite_metrics(last_metrics)})


def emit_run_waiting(run: Run) -> None:
    """Emit an event that a run waits until a person approves a publication."""
    _emit_event("cosmos.run.waiting", run, "", {})


def emit_run_over_budget(run: Run) -> None:
    """Emit an event if the run has stopped because its budget is spent."""
    stage_states = [read_state(run.stage_path(stage.name)) for stage in run.pipeline.stages]
    if error_message := next((state.error for state in stage_states if state.is_over_budget), ""):
        _emit_event("cosmos.run.over_budget", run, "", {"error": error_message, "budget": run.pipeline.config.budget})


def _emit_event(event_name: str, run: Run, stage_name: str, extra_payload: dict[str, Any]) -> None:
    pipeline_name, ui_url = run.pipeline.config.name, get_current_settings().ui_url
    event_resource = {
        "prefect.resource.id": f"cosmos.stage.{run.id}.{stage_name}" if stage_name else f"cosmos.run.{run.id}",
        "prefect.resource.name": stage_name or run.id,
        "cosmos.pipeline": pipeline_name,
        "cosmos.run": run.id,
    }
    report_location = report_url(run.path) or str(run.path / REPORT_FILE)
    event_payload = {"run": run.id, "pipeline": pipeline_name, "path": str(run.path), "report": report_location}
    if ui_url:
        event_payload["card"] = f"{ui_url}/artifacts/key/{make_run_card_key(pipeline_name)}"
    if stage_name:
        event_resource["cosmos.stage"] = event_payload["stage"] = stage_name
    with log_errors(partial(logger.warning, "event %s is not sent: %s", event_name)):
        emit_event(event_name, event_resource, payload=event_payload | extra_payload)


def _keep_finite_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics without infinite and NaN values, which JSON cannot represent."""
    return {key: value for key, value in metrics.items() if math.isfinite(float_or_inf(value))}
