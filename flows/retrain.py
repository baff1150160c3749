"""Flow `retrain` for a schedule: if data or settings have changed, train, compare with the published model, publish.

Data is compared by content: a new modification time, or a new listing of the same content, starts no training; a new
commit of a data set on the Hub does. Only one flow run of a schedule works at a time, on all machines; see
`tasks.retrain_lease`. A later flow run continues a run that failed. A flow run that was suspended or is retried
continues the run that it created, and leaves newer data to the next flow run of the schedule.
"""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.exceptions import ObjectNotFound, Pause
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput
from prefect.logging import get_run_logger
from prefect.runtime import deployment, flow_run
from prefect.states import Completed, State

from cosmos_core.config.compose import Pipeline, load_pipeline
from cosmos_core.config.inputs import referenced_stage
from cosmos_core.config.mesh import resolve_gpu_settings
from cosmos_core.config.schema.export import UNQUANTIZED_FORMAT
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.errors import ConfigError, DataError, ModelError, UploadError
from cosmos_core.launch.clean import find_publication_targets
from cosmos_core.run import liveness
from cosmos_core.run.directory import PIPELINE_FILE, Run, claim_run, open_run, replace_budget
from cosmos_core.run.files import read_document
from cosmos_core.run.hub import failed_hub_requests, pin_hub_revisions
from cosmos_core.run.manifest import find_output_damage, read_result
from cosmos_core.run.remote import pin_urls
from cosmos_core.run.retrain_state import RetrainState, compute_retrain_digest, locate_retrain_state, save_retrain_state
from cosmos_core.upload.base import open_target
from flows.post_train import open_run_to_execute
from tasks import events
from tasks.artifacts import render_approval_form
from tasks.credentials import set_credentials
from tasks.final_states import REFUSED_STATE, make_completed_state
from tasks.kinds import all_kinds
from tasks.naming import flow_run_name
from tasks.publication import compute_models_digest, list_publishing_stages, list_stages_before_publication
from tasks.retrain_lease import RetrainLease
from tasks.stage import run_stages


class Approval(RunInput):
    """Form that a person fills in before the model is published."""

    publish: bool
    """Whether the person approves the publication of the model."""


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
    if approve:
        _check_can_be_suspended()
    unpinned_pipeline = load_pipeline(Path(os.path.expanduser(config)), overrides, all_kinds())
    set_credentials(unpinned_pipeline)
    state_file = locate_retrain_state(unpinned_pipeline, overrides, start)
    # This file records the run that this flow run has created, so that a retry of the flow run continues it.
    flow_run_state_file = state_file.with_suffix("") / f"{flow_run.id}.json"
    with RetrainLease(state_file, str(flow_run.id), str(deployment.id or "")) as lease:
        flow_run_state = read_document(flow_run_state_file, RetrainState)
        if flow_run_state is not None:
            # A retried or resumed flow run waits for the lease; if it ended here, a person's decision would be lost.
            lease.acquire()
        elif not lease.try_acquire():
            last_state = read_document(state_file, RetrainState)
            run_id = f" of run {last_state.run_id}" if last_state is not None and not last_state.outcome else ""
            return Completed(name="StillTraining", message=f"an earlier firing{run_id} has not ended; nothing was done")
        # A resumed flow run uses the data of its start and leaves later changes to the next flow run of the schedule.
        pipeline = unpinned_pipeline
        if flow_run_state is None:
            pipeline = pin_urls(pin_hub_revisions(resolve_gpu_settings(pipeline)))
        retrain_digest = flow_run_state.digest if flow_run_state else compute_retrain_digest(pipeline, start)
        last_state = read_document(state_file, RetrainState)
        if idle_state := _find_idle_state(unpinned_pipeline, retrain_digest, flow_run_state, last_state, approve):
            return idle_state
        run = _open_saved_run(pipeline, flow_run_state.run_id) if flow_run_state else None
        run = run or _open_unfinished_run(pipeline, retrain_digest, last_state)
        if run is None:
            start_overrides = make_start_overrides(pipeline) if start == "published" else []
            start_model_text = start_overrides or "the model that the pipeline names"
            get_run_logger().info("something is new; starting from %s", start_model_text)
            run = open_run_to_execute(config, [*overrides, *start_overrides], "", str(flow_run.id or ""))
            last_state = RetrainState(digest=retrain_digest, run_id=run.id)
            save_retrain_state(state_file, last_state)
        save_retrain_state(flow_run_state_file, RetrainState(digest=retrain_digest, run_id=run.id))
        stage_names = list_stages_before_publication(run.pipeline)
        if flow_run_state is not None and not _has_same_content(run.pipeline, retrain_digest, start):
            stage_names = _list_stages_to_run(run, stage_names)
            if any(run.pipeline.stage_kind(run.pipeline.stage(name)).is_reusable for name in stage_names):
                outdated_reason = "its rows, code or settings were changed; the next firing takes the new ones"
                return _make_outdated_state(run.id, outdated_reason)
        final_state, outcome = _train_and_publish(run, stage_names, approve)
        # Do not overwrite the state that a later flow run has saved for newer content.
        if outcome and (last_state is None or last_state.digest == retrain_digest):
            save_retrain_state(state_file, RetrainState(digest=retrain_digest, run_id=run.id, outcome=outcome))
        return final_state


def _check_can_be_suspended() -> None:
    """Raise ConfigError if Prefect cannot suspend this flow run until a person has approved or declined a
    publication."""
    if not deployment.id:
        raise ConfigError("approve = true needs a deployment: a run that is suspended is started again by its worker")
    if flow_run.parent_flow_run_id:
        raise ConfigError(
            "approve = true: Prefect does not suspend a flow run that another flow has started; start the deployment "
            "by a schedule, or with run_deployment(..., as_subflow=False)"
        )


def _find_idle_state(
    pipeline: Pipeline, digest: str, flow_run_state: RetrainState | None, last_state: RetrainState | None, approve: bool
) -> State[Any] | None:
    """Return the final state of a flow run that has nothing to do; None if it has to train or to publish. There is
    nothing to do in three cases: the same data and settings were trained already, a model of them waits for an
    approval, or this flow run was resumed and a model of newer data was published meanwhile."""
    if last_state is None:
        return None
    if last_state.digest == digest and last_state.outcome:
        hub_outages = "".join(f"; {hub} did not respond: {reason}" for hub, (_, reason) in failed_hub_requests.items())
        message = f"nothing new since run {last_state.run_id}, which was {last_state.outcome}{hub_outages}"
        return Completed(name="NothingNew", message=message)
    approval = liveness.read_open_approval(_get_run_path(pipeline, last_state.run_id))
    if approve and flow_run_state is None and last_state.digest == digest and approval is not None:
        with suppress(ObjectNotFound, ValueError), get_client(sync_client=True) as client:
            if client.read_flow_run(UUID(approval.flow_run)).state_type == StateType.PAUSED:
                message = f"run {last_state.run_id} waits until a person approves its publication; nothing was done"
                return Completed(name="StillTraining", message=message)
    if flow_run_state is not None and last_state.digest != digest and last_state.outcome == "published":
        outdated_reason = f"run {last_state.run_id} of newer content was published since"
        return _make_outdated_state(flow_run_state.run_id, outdated_reason)
    return None


def _open_unfinished_run(pipeline: Pipeline, retrain_digest: str, last_state: RetrainState | None) -> Run | None:
    """Return the run of the last retraining if its data and settings had the digest `retrain_digest` and it has not
    ended; otherwise None."""
    if last_state is None or last_state.digest != retrain_digest:
        return None
    if not (_get_run_path(pipeline, last_state.run_id) / PIPELINE_FILE).is_file():
        return None
    get_run_logger().info("run %s did not end: it is continued", last_state.run_id)
    return _open_saved_run(pipeline, last_state.run_id)


def _open_saved_run(pipeline: Pipeline, run_id: str) -> Run:
    """Return an earlier run with the settings that it was created with, except the price of GPUs and the budget: these
    are taken from `pipeline`, so that a user can raise the budget."""
    return replace_budget(open_run(_get_run_path(pipeline, run_id), all_kinds()), pipeline.config)


def _get_run_path(pipeline: Pipeline, run_id: str) -> Path:
    return pipeline.output_dir.expanduser().absolute() / run_id


def _make_outdated_state(run_id: str, outdated_reason: str) -> State[Any]:
    return Completed(name="Outdated", message=f"run {run_id} is not continued: {outdated_reason}")


def _has_same_content(pipeline: Pipeline, retrain_digest: str, initial_model: str) -> bool:
    with suppress(ConfigError, DataError, ModelError):  # content that cannot be read counts as changed
        return compute_retrain_digest(pipeline, initial_model) == retrain_digest
    return False


def _train_and_publish(
    run: Run, training_stages: list[str], approve: bool
) -> tuple[Any, Literal["", "published", "refused", "declined"]]:
    """Run `training_stages`, then the stages that publish a model. With `approve`, the flow run is suspended before the
    publication until a person approves or declines. Return the final state of the flow run and the outcome of the
    retraining, as in `RetrainState.outcome`."""
    nonpublishing_stages = list_stages_before_publication(run.pipeline)
    publication_stage_names = [stage.name for stage in run.pipeline.stages if stage.name not in nonpublishing_stages]
    with claim_run(run):
        approval = None
        if approve and publication_stage_names:
            approval = liveness.read_required_approval(run.path) or liveness.PublicationApproval()
        liveness.save_approval(run.path, approval)  # with this file, `cosmos resume` refuses until a person approves
        final_state = run_stages(run, training_stages)
        if final_state.name == REFUSED_STATE:
            return Completed(name="NotPromoted", message=final_state.message), "refused"
        if not final_state.is_completed():
            return final_state, ""
    if approval is not None and not _is_approved(run, approval):
        return Completed(name="Declined", message=f"run {run.id}: its model is not published"), "declined"
    if publication_stage_names:
        with claim_run(run):
            final_state = run_stages(run, publication_stage_names)
    if not final_state.is_completed():
        return final_state, ""
    return make_completed_state(run, [stage.name for stage in run.pipeline.stages]), "published"


def _is_approved(run: Run, approval: liveness.PublicationApproval) -> bool:
    """Return True if a person has approved the models to publish, and False if a person has declined; suspend the flow
    run until a person decides. The decision is saved in the run, because Prefect forgets it when the flow run is
    retried."""
    models_digest = compute_models_digest(run)
    if approval.approved_models == models_digest:
        return True
    # The key has the number of attempts, because Prefect refuses a second request with the same key.
    approval_key, timeout_seconds = f"publish-{models_digest}-{flow_run.run_count}", liveness.APPROVAL_TIMEOUT_SECONDS
    approval_form = Approval.with_initial_data(description=render_approval_form(run.path), publish=False)
    try:
        approval_decision = suspend_flow_run(wait_for_input=approval_form, timeout=timeout_seconds, key=approval_key)
    except Pause:  # the flow run is suspended until a person decides
        pending_approval = liveness.PublicationApproval(until=time.time() + timeout_seconds, flow_run=str(flow_run.id))
        liveness.save_approval(run.path, pending_approval)
        events.emit_run_waiting(run)
        raise
    is_approved = bool(approval_decision.publish)  # type: ignore[attr-defined]
    approval = liveness.PublicationApproval(is_declined=not is_approved, approved_models=models_digest * is_approved)
    liveness.save_approval(run.path, approval)
    return is_approved


def _list_stages_to_run(run: Run, stage_names: list[str]) -> list[str]:
    """Return those of `stage_names` that have no complete result, and stages that always run, such as gates."""
    run_results = {name: read_result(run.stage_path(name)) for name in stage_names}
    finished_stages = {
        name for name, result in run_results.items() if result and not find_output_damage(run.stage_path(name), result)
    }
    get_stage, get_kind = run.pipeline.stage, run.pipeline.stage_kind
    return [name for name in stage_names if name not in finished_stages or not get_kind(get_stage(name)).is_reusable]


def make_start_overrides(pipeline: Pipeline) -> list[str]:
    """Return overrides with which the first trainings of each published model (see `_find_first_trainings`) start from
    the published version instead of a base model. Return an empty list if no model was published yet, or the target has
    no method `where`. If several stages publish the model of a training, the version of the last stage is used."""
    publishing_stages = list_publishing_stages(pipeline)
    loadable_stages = [
        stage
        for stage in publishing_stages
        if not stage.target.startswith("mlflow://") and stage.format in {"", UNQUANTIZED_FORMAT}
    ]
    if publishing_stages and not loadable_stages:
        problem_text = f"no training reads {publishing_stages[-1].target}"
        raise ConfigError(f"start = 'published': {problem_text}; publish to a folder or s3:// too, without quantising")
    addresses_by_training: dict[str, tuple[str, str]] = {}
    for stage in loadable_stages:
        first_trainings = _find_first_trainings(pipeline, stage)
        if hasattr(open_target(stage.target), "where"):  # check the settings even if nothing is published
            for training_name in sorted(first_trainings):
                _check_initial_weights(pipeline, pipeline.stage(training_name), stage.target)
        if (published_address := _find_published_address(pipeline, stage.target)) is not None:
            addresses_by_training |= dict.fromkeys(first_trainings, published_address)
    overrides = []
    for stage in pipeline.stages:
        if stage.name not in addresses_by_training:
            continue
        model_address, model_revision = addresses_by_training[stage.name]
        setting_key = "model" if stage.model else "policy.model_name_or_path"
        overridden_stage_name, select_stage = stage.name, pipeline.find_branch_selector(stage.name)
        # An override must name a stage of the pipeline file. In the file, a sweep with a grid is one stage, which has
        # the name of the stage that selects the best branch.
        stage_sweep = select_stage.sweep if select_stage else None
        if select_stage and stage_sweep and any(branch.settings for branch in stage_sweep.branches):
            overridden_stage_name = select_stage.name
        overrides.append(f"{overridden_stage_name}.{setting_key}={model_address}")
        overrides += [f"{overridden_stage_name}.policy.model_revision={model_revision}"] if model_revision else []
    return list(dict.fromkeys(overrides))


def _check_initial_weights(pipeline: Pipeline, stage: StageConfig, target: str) -> None:
    """Raise ConfigError if a setting of a training would change the weights of the model published at `target`."""
    recipe, policy_config = pipeline.recipes[stage.name], pipeline.recipes[stage.name].policy
    initial_weight_settings = {
        "policy.model_safetensor_path": policy_config.model_safetensor_path,
        "policy.lora.lora_path": policy_config.lora and policy_config.lora.lora_path,
        "train.resume": isinstance(recipe.train.resume, str) and recipe.train.resume,
    }
    for key, value in initial_weight_settings.items():
        if value:
            raise ConfigError(
                f"stage {stage.name!r}: start = 'published': {key} = {value!r} would change the weights of {target}; "
                "leave it out, or take start = 'base'"
            )


def _find_published_address(pipeline: Pipeline, target: str) -> tuple[str, str] | None:
    """Return the address of the published version of a target, and its revision if the address is a repository on a
    Hub; return None if the target has no published version. Raises `UploadError` if it has none although a run has
    published to the target, for example because the disk of the target is not mounted."""
    publication_target = open_target(target)
    published_record, locate_version = publication_target.published(), getattr(publication_target, "where", None)
    if locate_version is None:
        return None
    if published_record is None:
        run_paths = [file.parent for file in sorted(pipeline.output_dir.expanduser().glob(f"*/{PIPELINE_FILE}"))]
        if published_runs := find_publication_targets(run_paths).get(target):
            raise UploadError(
                f"start = 'published': {target} has no published version, but run {published_runs[-1].name} has "
                "published there; mount its disk, set its credentials, or take start = 'base'"
            )
        return None
    if "version" not in published_record:
        return None
    model_address = str(locate_version(str(published_record["version"])))
    if not model_address.startswith("hub://"):
        return model_address, ""
    repository_name, _, revision = model_address.removeprefix("hub://").partition("@")
    return repository_name, revision


def _find_first_trainings(pipeline: Pipeline, publishing_stage: StageConfig) -> set[str]:
    """Return the names of the trainings from which a published model descends and that depend on no other training, and
    of the merges whose base model is the initial model of such a training. A teacher or a reward model is no ancestor
    of the model that learns from it."""

    def list_trainings(names: set[str]) -> set[str]:
        return {name for name in names if pipeline.stage_kind(pipeline.stage(name)).trains_model}

    def get_initial_model(name: str) -> str:
        return pipeline.stage(name).model or pipeline.recipes[name].policy.model_name_or_path

    ancestor_names = _list_model_ancestors(pipeline, publishing_stage.model)
    first_trainings = {
        name
        for name in list_trainings(ancestor_names)
        if not list_trainings(_list_model_ancestors(pipeline, pipeline.stage(name).model))
    }
    merge_stages = {name for name in ancestor_names if pipeline.stage_kind(pipeline.stage(name)).merges_models}
    initial_models = set(map(get_initial_model, first_trainings))
    return first_trainings | {name for name in merge_stages if get_initial_model(name) in initial_models}


def _list_model_ancestors(pipeline: Pipeline, model: str) -> set[str]:
    pending_stages, ancestor_names = [referenced_stage(model)], set[str]()
    while pending_stages:
        if (name := pending_stages.pop()) is None or name in ancestor_names:
            continue
        ancestor_names.add(name)
        stage = pipeline.stage(name)
        stage_kind, source_stage_name = pipeline.stage_kind(stage), referenced_stage(stage.model)
        pending_stages += [name for branch in (stage.sweep.branches if stage.sweep else ()) for name in branch.stages]
        # A stage that merges models names them only in `after`, so its model descends from all stages in `after`.
        has_one_source_model = source_stage_name or stage_kind.trains_model
        pending_stages += [source_stage_name] if has_one_source_model and not stage_kind.merges_models else stage.after
    return ancestor_names
