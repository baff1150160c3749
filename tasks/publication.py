"""Stages that publish models, and the approval by a person that the publication of a run may need."""

import hashlib
import json

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.inputs import referenced_stage
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.errors import ConfigError
from cosmos_core.run.directory import Run
from cosmos_core.run.liveness import read_required_approval
from cosmos_core.run.manifest import read_result


def list_publishing_stages(pipeline: Pipeline) -> list[StageConfig]:
    """Return the stages that publish a model."""
    return [stage for stage in pipeline.stages if pipeline.stage_kind(stage).makes == "publication"]


def list_stages_before_publication(pipeline: Pipeline) -> list[str]:
    """Return the names of the stages that neither publish a model nor depend on a stage that publishes one."""
    publishing_stages = [stage.name for stage in list_publishing_stages(pipeline)]
    publication_stage_names = set[str]().union(*map(pipeline.stage_and_dependents, publishing_stages))
    return [stage.name for stage in pipeline.stages if stage.name not in publication_stage_names]


def compute_models_digest(run: Run) -> str:
    """Return one digest of all models that a run publishes, except those made by stages after an upload, which do not
    exist yet when a person approves. An approval is valid only for the models with this digest."""
    names = list_stages_before_publication(run.pipeline)
    model_references = sorted({stage.model for stage in list_publishing_stages(run.pipeline)})
    models_and_stages = [
        (model, name) for model in model_references if (name := referenced_stage(model) or "") in {"", *names}
    ]
    models_and_results = [(model, read_result(run.stage_path(name))) for model, name in models_and_stages]
    model_digests = [(model, result["digest"] if result else "") for model, result in models_and_results]
    return hashlib.sha256(json.dumps(model_digests).encode()).hexdigest()[:16]


def check_models_approved(run: Run) -> None:
    """Raise ConfigError if the publication of a run needs an approval and a person has not approved the current models
    of the run, which may differ from models that were approved before."""
    approval = read_required_approval(run.path)
    if approval is not None and approval.approved_models != compute_models_digest(run):
        raise ConfigError(
            f"run {run.id} publishes only models that a person has approved in the UI of Prefect, not these: "
            "approve or retry its flow run there; cosmos run with its config publishes without an approval"
        )
