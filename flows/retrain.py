"""Flow `retrain`, started by a schedule: if data or settings have changed, train, compare with the published model, and
publish.

Data is compared by content: a new modification time, or a new commit or listing with the same content, starts no
training. Only one flow run of a schedule works at a time, on all machines; see `tasks.retrain_lease`. A later flow run
continues a run that failed. A flow run that was suspended or is retried continues the run that it created, and leaves
newer data to the next flow run of the schedule.
"""

import hashlib
import json
import time
from pathlib import Path
from typing import Any, Literal

from prefect import flow
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput
from prefect.logging import get_run_logger
from prefect.runtime import deployment, flow_run
from prefect.states import Completed, State

from cosmos_core.config.compose import Pipeline, load_pipeline
from cosmos_core.config.inputs import source_of
from cosmos_core.config.mesh import resolve_gpus
from cosmos_core.errors import EXIT_REFUSED, ConfigError, DataError, ModelError
from cosmos_core.run import liveness
from cosmos_core.run.directory import Run, claim, open_run
from cosmos_core.run.files import read_document
from cosmos_core.run.hub import pin_hub_revisions
from cosmos_core.run.manifest import find_damage, read_result
from cosmos_core.run.remote import pin_urls
from cosmos_core.run.retrain_state import RetrainState, content_digest, note_of, write_seen
from cosmos_core.run.state import read_state
from cosmos_core.upload.base import open_target
from flows.post_train import open_or_create
from tasks import events
from tasks.artifacts import approval_form_text
from tasks.credentials import set_credentials
from tasks.final_states import completed
from tasks.kinds import all_kinds
from tasks.naming import flow_run_name
from tasks.retrain_lease import RetrainLease
from tasks.stage import run_stages

_APPROVAL_SECONDS = 7 * 24 * 3600


class Approval(RunInput):
    """Form that a person fills in before the model is published."""

    publish: bool
    """Whether the model is published."""


@flow(name="retrain", flow_run_name=flow_run_name)
def retrain(
    config: str,
    overrides: list[str] = [],  # noqa: B006 - Prefect shows the default
    start: Literal["published", "base"] = "published",
    approve: bool = False,
) -> Any:
    """Train again if data or settings have changed, and publish the model if the gates of the pipeline pass.

    Args:
        config: Pipeline or recipe, a TOML file
        overrides: Settings such as train.optm_lr=2e-6, or STAGE.train.epoch=2 for one stage
        start: Start from the published model, or from the model that the pipeline names
        approve: Suspend the run before it publishes, until a person approves or declines in the UI
    """
    if approve and not deployment.id:
        raise ConfigError("approve = true needs a deployment: a run that is suspended is started again by its worker")
    unpinned_pipeline = load_pipeline(Path(config).expanduser(), overrides, all_kinds())
    set_credentials(unpinned_pipeline)
    note_path = note_of(unpinned_pipeline, overrides, start)
    flow_run_note_path = note_path.with_suffix("") / f"{flow_run.id}.json"  # names the run that this flow run created
    with RetrainLease(note_path, str(flow_run.id), str(deployment.id or "")) as retrain_lease:
        current = read_document(flow_run_note_path, RetrainState)
        if current is not None:
            # A retried or resumed flow run waits for the lease; if it ended here, a person's decision would be lost.
            retrain_lease.acquire()
        elif not retrain_lease.try_acquire():
            latest = read_document(note_path, RetrainState)
            run_id = f" of run {latest.run_id}" if latest is not None and not latest.outcome else ""
            return Completed(name="StillTraining", message=f"an earlier firing{run_id} has not ended; nothing was done")
        # A resumed flow run uses the data of its start and leaves later changes to the next flow run of the schedule.
        pipeline = unpinned_pipeline if current else pin_urls(pin_hub_revisions(resolve_gpus(unpinned_pipeline)))
        digest = current.digest if current else content_digest(pipeline)
        latest = read_document(note_path, RetrainState)
        if latest is not None and latest.digest == digest and latest.outcome:
            message = f"nothing new since run {latest.run_id}, which was {latest.outcome}"
            return Completed(name="NothingNew", message=message)
        if current is not None and latest is not None and latest.digest != digest and latest.outcome == "published":
            return _make_outdated_state(current.run_id, f"run {latest.run_id} of newer content was published since")
        run = open_run(_get_run_path(unpinned_pipeline, current.run_id), all_kinds()) if current else None
        run = run or _open_unfinished_run(pipeline, digest, latest)
        if run is None:
            start_overrides = starting_from_published(pipeline) if start == "published" else []
            model_origin = start_overrides or "the model that the pipeline names"
            get_run_logger().info("something is new; starting from %s", model_origin)
            run = open_or_create(config, [*overrides, *start_overrides], "", str(flow_run.id or ""))
            latest = RetrainState(digest=digest, run_id=run.id)
            write_seen(note_path, latest)
        write_seen(flow_run_note_path, RetrainState(digest=digest, run_id=run.id))
        stage_names = _stages_before_publication(run)
        if current is not None and not _has_same_content(run.pipeline, digest):
            stage_names = _list_stages_to_run(run, stage_names)
            if any(run.pipeline.kind_of(run.pipeline.stage(name)).is_reusable for name in stage_names):
                reason = "its rows, code or settings were changed; the next firing takes the new ones"
                return _make_outdated_state(run.id, reason)
        state, outcome = _train_and_publish(run, stage_names, approve)
        if outcome and (latest is None or latest.digest == digest):  # a later flow run may have recorded newer content
            write_seen(note_path, RetrainState(digest=digest, run_id=run.id, outcome=outcome))
        return state


def _open_unfinished_run(pipeline: Pipeline, digest: str, latest_state: RetrainState | None) -> Run | None:
    """Return the run of the last retraining if it has the same content digest and has not ended; otherwise None."""
    if latest_state is None or latest_state.digest != digest:
        return None
    path = _get_run_path(pipeline, latest_state.run_id)
    if not (path / "pipeline.toml").is_file():
        return None
    get_run_logger().info("run %s did not end: it is continued", latest_state.run_id)
    return open_run(path, all_kinds())


def _get_run_path(pipeline: Pipeline, run_id: str) -> Path:
    return pipeline.output_dir.expanduser().absolute() / run_id


def _make_outdated_state(run_id: str, reason: str) -> State[Any]:
    return Completed(name="Outdated", message=f"run {run_id} is not continued: {reason}")


def _has_same_content(pipeline: Pipeline, digest: str) -> bool:
    try:
        return content_digest(pipeline) == digest
    except (ConfigError, DataError, ModelError):  # a data source no longer exists
        return False


def _stages_before_publication(run: Run) -> list[str]:
    """Return the names of the stages that neither publish a model nor depend on a stage that publishes one."""
    last = set[str]().union(*map(run.pipeline.with_dependents, _list_publishing_stages(run)))
    return [stage.name for stage in run.pipeline.stages if stage.name not in last]


def _list_publishing_stages(run: Run) -> list[str]:
    return [stage.name for stage in run.pipeline.stages if run.pipeline.kind_of(stage).makes == "publication"]


def _train_and_publish(
    run: Run, first_stages: list[str], approve: bool
) -> tuple[Any, Literal["", "published", "refused", "declined"]]:
    """Run the given first stages, then the stages that publish; return the final state and the run's outcome."""
    nonpublishing_stages = _stages_before_publication(run)
    last_stages = [stage.name for stage in run.pipeline.stages if stage.name not in nonpublishing_stages]
    with claim(run):
        state = run_stages(run, first_stages)
        if not state.is_completed():
            states = [read_state(run.stage_path(name)) for name in first_stages]
            failed_states = [stage_state for stage_state in states if stage_state.state == "failed"]
            if failed_states and all(stage_state.exit_code == EXIT_REFUSED for stage_state in failed_states):
                message = f"run {run.id}: {'; '.join(stage_state.error for stage_state in failed_states)}"
                return Completed(name="NotPromoted", message=message), "refused"
            return state, ""
    if approve and last_stages:
        approval_form = Approval.with_initial_data(description=approval_form_text(run.path), publish=False)
        suspend_key = f"publish-{run.id}-{_compute_models_digest(run)}"
        request, earlier = liveness.Approval(until=time.time() + _APPROVAL_SECONDS), liveness.read_approval(run.path)
        liveness.note_approval(run.path, request)
        if earlier is None or earlier.is_declined:  # the flow is executed again from the beginning after an approval
            events.run_waiting(run)
        decision = suspend_flow_run(wait_for_input=approval_form, timeout=_APPROVAL_SECONDS, key=suspend_key)
        if not decision.publish:  # type: ignore[attr-defined]
            liveness.note_approval(run.path, request.model_copy(update={"is_declined": True}))
            return Completed(name="Declined", message=f"run {run.id}: its model is not published"), "declined"
    if last_stages:
        with claim(run):
            state = run_stages(run, last_stages)
    if not state.is_completed():
        return state, ""
    return completed(run, [stage.name for stage in run.pipeline.stages]), "published"


def _list_stages_to_run(run: Run, names: list[str]) -> list[str]:
    """Return the names of the stages without a complete result, and of stages that always run, such as gates."""
    results = {name: read_result(run.stage_path(name)) for name in names}
    complete = {name for name, result in results.items() if result and not find_damage(run.stage_path(name), result)}
    pipeline = run.pipeline
    return [name for name in names if name not in complete or not pipeline.kind_of(pipeline.stage(name)).is_reusable]


def _compute_models_digest(run: Run) -> str:
    """Return one digest of all models to publish. An approval is valid only for the models with this digest."""
    references = sorted({run.pipeline.stage(name).model for name in _list_publishing_stages(run)})
    results = [read_result(run.stage_path(source_of(model) or "")) for model in references]
    digests = [(model, result["digest"] if result else "") for model, result in zip(references, results, strict=True)]
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:16]


def starting_from_published(pipeline: Pipeline) -> list[str]:
    """Return overrides that start each training that depends on no other training from the published model; an empty
    list if no model was published yet, or if the publication target lacks `where`, which returns a model's address."""
    targets = [s.target for s in pipeline.stages if pipeline.kind_of(s).makes == "publication"]
    readable_targets = [target for target in targets if not target.startswith("mlflow://")]
    if targets and not readable_targets:
        raise ConfigError(f"start = 'published': no training reads {targets[-1]}; publish to a folder or s3:// too")
    target = open_target(readable_targets[-1]) if readable_targets else None
    record, get_address = (target.published() if target else None), getattr(target, "where", None)
    if record is None or get_address is None or "version" not in record:
        return []
    published_address, revision = str(get_address(str(record["version"]))), ""
    if published_address.startswith("hub://"):
        published_address, _, revision = published_address.removeprefix("hub://").partition("@")
    overrides = []
    for stage in pipeline.stages:
        if not pipeline.kind_of(stage).trains_model or _depends_on_training(pipeline, stage.name):
            continue
        key = "model" if stage.model else "policy.model_name_or_path"
        choice = pipeline.branch_selector(stage.name)
        # Overrides use stage names of the file: branches of a grid come from one stage, named like the select stage.
        is_grid = choice is not None and choice.sweep is not None and any(b.settings for b in choice.sweep.branches)
        name = choice.name if choice is not None and is_grid else stage.name
        overrides.append(f"{name}.{key}={published_address}")
        overrides += [f"{name}.policy.model_revision={revision}"] if revision else []
    return list(dict.fromkeys(overrides))


def _depends_on_training(pipeline: Pipeline, name: str) -> bool:
    stage = pipeline.stage(name)
    while (source_stage := source_of(pipeline.starts_from(stage))) is not None:
        stage = pipeline.stage(source_stage)
        if pipeline.kind_of(stage).trains_model:
            return True
    return False
