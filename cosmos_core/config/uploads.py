"""Add upload stages for the recipe keys `upload_s3` and `upload_hf`, one after each export of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cosmos_core.config.inputs import STAGE_PREFIX, referenced_stage
from cosmos_core.config.schema.pipeline import MAX_STAGE_NAME_LENGTH, StageConfig
from cosmos_core.errors import ConfigError

if TYPE_CHECKING:
    from cosmos_core.config.compose import Pipeline


def with_upload_stages(pipeline: Pipeline) -> Pipeline:
    """Return the pipeline with an upload stage `NAME-s3` or `NAME-hub` after each export of a model whose training sets
    `upload_s3` or `upload_hf`. The stages must be in topological order; existing upload stages are kept. Raises
    `ConfigError` if a stage of another kind has the name of an upload stage."""
    recipes, new_upload_stages = dict(pipeline.recipes), []
    stages_by_name = {stage.name: stage for stage in pipeline.stages}
    for training_name, upload_stage in _list_requested_uploads(pipeline):
        stage_of_same_name = stages_by_name.get(upload_stage.name)
        if stage_of_same_name is None:
            recipes[upload_stage.name] = pipeline.recipes[training_name]
            new_upload_stages.append(upload_stage)
        elif stage_of_same_name.kind != upload_stage.kind:
            reason = f"the name is taken by the upload of stage {referenced_stage(upload_stage.model)!r}"
            raise ConfigError(f"{pipeline.source_path}: stage {upload_stage.name!r}: {reason}")
    return pipeline.with_stages((*pipeline.stages, *new_upload_stages), recipes)


def _list_requested_uploads(pipeline: Pipeline) -> Iterator[tuple[str, StageConfig]]:
    """Yield a pair for each upload that the recipe of a training requests: the name of the training, and the new upload
    stage."""
    upload_kind = next((name for name, kind in pipeline.stage_kinds.items() if kind.makes == "publication"), "")
    for model_stage, training_name, is_last_training in _list_published_stages(pipeline):
        dependent_stages = [stage for stage in pipeline.stages if referenced_stage(stage.model) == model_stage.name]
        dependent_stages = [stage for stage in dependent_stages if not pipeline.stage_kind(stage).merges_models]
        stages_and_kinds = [(stage, pipeline.stage_kind(stage)) for stage in dependent_stages]
        export_stages = [stage for stage, kind in stages_and_kinds if kind.makes == "model" and not kind.trains_model]
        uploaded_stages, checkpoint_config = export_stages or [model_stage], pipeline.recipes[training_name].train.ckpt
        for source_stage in uploaded_stages:
            sources = (source_stage.name, training_name) if training_name == model_stage.name else (source_stage.name,)
            predecessors = dict.fromkeys((*sources, *_list_gates(pipeline, {model_stage.name, source_stage.name})))
            uploads_to_hub = is_last_training and source_stage == uploaded_stages[-1]
            upload_path_parts = (pipeline.config.name, source_stage.name)
            target_urls = checkpoint_config.upload_urls(*upload_path_parts, is_last_model=uploads_to_hub)
            for target_suffix, target_url in target_urls.items():
                name = f"{source_stage.name[: MAX_STAGE_NAME_LENGTH - len(target_suffix) - 1]}-{target_suffix}"
                yield training_name, StageConfig(
                    name=name, kind=upload_kind, recipe=pipeline.stage(training_name).recipe, after=tuple(predecessors),
                    model=f"{STAGE_PREFIX}{source_stage.name}", target=target_url
                )  # fmt: skip


def _list_gates(pipeline: Pipeline, model_stage_names: set[str]) -> list[str]:
    """Return the names of the gates that judge the model of one of `model_stage_names`. The `after` of such a gate
    contains one of these stages, a stage that measures its model (also a user's program), or another such gate."""
    judged_or_gate_stage_names, gate_names = set(model_stage_names), list[str]()
    for stage in pipeline.stages:
        makes_metrics, model_name = pipeline.stage_kind(stage).makes in {"", "metrics"}, referenced_stage(stage.model)
        if stage.require and not judged_or_gate_stage_names.isdisjoint(stage.after):
            gate_names.append(stage.name)
        if stage.name in gate_names or (makes_metrics and model_name in model_stage_names):
            judged_or_gate_stage_names.add(stage.name)
    return gate_names


def _list_published_stages(pipeline: Pipeline) -> Iterator[tuple[StageConfig, str, bool]]:
    """Yield triples: a stage that trains, merges or selects models and is no branch from which another stage selects;
    the name of the training whose recipe configures the upload of its model; and whether no dependent of the stage
    trains, merges or selects models. For a merge or a selection, this training is the last one among the trainings of
    its models."""
    trainings = {stage.name for stage in pipeline.stages if pipeline.stage_kind(stage).trains_model}
    model_stage_names = trainings | {each.name for each in pipeline.stages if pipeline.stage_kind(each).merges_models}
    model_stage_names |= {each.name for each in pipeline.stages if _find_chosen_stage(pipeline, each)}
    training_by_stage: dict[str, str] = {}
    for stage in pipeline.stages:
        base_stage_name = referenced_stage(stage.model) if pipeline.stage_kind(stage).merges_models else None
        source_stages = _find_chosen_stage(pipeline, stage) or [name for name in stage.after if name != base_stage_name]
        training_names = [training_by_stage[name] for name in source_stages if name in training_by_stage]
        training_names = [stage.name] if stage.name in trainings else training_names
        if training_names:
            training_by_stage[stage.name] = training_names[-1]
        if training_names and stage.name in model_stage_names and pipeline.find_branch_selector(stage.name) is None:
            dependent_stage_names = pipeline.stage_and_dependents(stage.name) - {stage.name}
            yield stage, training_names[-1], dependent_stage_names.isdisjoint(model_stage_names)


def _find_chosen_stage(pipeline: Pipeline, stage: StageConfig) -> list[str]:
    """Return a list with the name of the stage that makes the model of the first branch, if `stage` selects the best of
    several branches; otherwise an empty list."""
    name = referenced_stage(pipeline.initial_model(stage)) if pipeline.stage_kind(stage).selects_branch else None
    return [name] if name and pipeline.stage_kind(pipeline.stage(name)).makes == "model" else []
