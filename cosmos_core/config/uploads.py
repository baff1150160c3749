"""Add upload stages for the recipe keys `upload_s3` and `upload_hf`, one after each export of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cosmos_core.config.inputs import STAGE_PREFIX, source_of
from cosmos_core.config.schema.pipeline import STAGE_NAME_LENGTH, StageConfig
from cosmos_core.errors import ConfigError

if TYPE_CHECKING:
    from cosmos_core.config.compose import Pipeline


def with_uploads(pipeline: Pipeline) -> Pipeline:
    """Return the pipeline with an upload stage `NAME-s3` or `NAME-hub` after each export of a training whose recipe
    requests it. The stages of `pipeline` must be in topological order; existing upload stages are kept.

    Raises:
        ConfigError: a stage of another kind has the name of an upload stage.
    """
    recipes, new_upload_stages = dict(pipeline.recipes), []
    stages_by_name = {stage.name: stage for stage in pipeline.stages}
    for training_name, upload_stage in _requested_uploads(pipeline):
        existing_stage = stages_by_name.get(upload_stage.name)
        if existing_stage is None:
            recipes[upload_stage.name] = pipeline.recipes[training_name]
            new_upload_stages.append(upload_stage)
        elif existing_stage.kind != upload_stage.kind:
            raise ConfigError(
                f"{pipeline.source}: stage {upload_stage.name!r}: the name is taken by the upload of stage "
                f"{source_of(upload_stage.model)!r}"
            )
    return pipeline.with_stages((*pipeline.stages, *new_upload_stages), recipes)


def _requested_uploads(pipeline: Pipeline) -> Iterator[tuple[str, StageConfig]]:
    """Yield each upload stage that a recipe requests, together with the name of the training that has this recipe."""
    publish = next((name for name, kind in pipeline.kinds.items() if kind.makes == "publication"), "")
    for model_stage, training, is_last in _published_stages(pipeline):
        reader_stages = [stage for stage in pipeline.stages if source_of(stage.model) == model_stage.name]
        kinds = [(stage, pipeline.kind_of(stage)) for stage in reader_stages]
        export_stages = [stage for stage, kind in kinds if kind.makes == "model" and not kind.trains_model]
        source_stages, checkpoint_config = export_stages or [model_stage], pipeline.recipes[training].train.ckpt
        for source in source_stages:
            predecessors = dict.fromkeys((source.name, training) if training == model_stage.name else (source.name,))
            is_last_source = is_last and source == source_stages[-1]
            targets = checkpoint_config.targets(pipeline.config.name, source.name, is_last=is_last_source)
            for suffix, url in targets.items():
                name = f"{source.name[: STAGE_NAME_LENGTH - len(suffix) - 1]}-{suffix}"
                yield training, StageConfig(
                    name=name, kind=publish, recipe=pipeline.stage(training).recipe, after=tuple(predecessors),
                    model=f"{STAGE_PREFIX}{source.name}", target=url
                )  # fmt: skip


def _published_stages(pipeline: Pipeline) -> Iterator[tuple[StageConfig, str, bool]]:
    """Yield each stage whose model is published, the training whose recipe names the targets, and whether this is the
    last training. The stage is a training or, for trainings in branches of a sweep, the stage that chooses among the
    branches."""
    trainings = [stage for stage in pipeline.stages if pipeline.kind_of(stage).trains_model]
    for training in trainings:
        if pipeline.branch_selector(training.name) is None:
            dependents = pipeline.with_dependents(training.name)
            yield training, training.name, not any(other.name in dependents for other in trainings if other != training)
    for stage in pipeline.stages:
        if stage.sweep is not None and stage.sweep.branches:
            stages = map(pipeline.stage, stage.sweep.branches[0].stages)
            names = [branch_stage.name for branch_stage in stages if pipeline.kind_of(branch_stage).trains_model]
            yield from ((stage, name, True) for name in names[-1:])
