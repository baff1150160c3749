"""Settings that a stage takes from the stages before it: dtype of exports, base model of merges, chat template of
rows."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from cosmos_core.config.inputs import referenced_stage

if TYPE_CHECKING:
    from cosmos_core.config.compose import Pipeline
    from cosmos_core.config.schema.pipeline import StageConfig


def with_inherited_settings(pipeline: Pipeline) -> Pipeline:
    """Return the pipeline in which settings that the recipe of a stage leaves out, such as the dtype of an export, are
    taken from earlier stages. The stages must be in topological order."""
    return _inherit_chat_templates(_inherit_model_settings(pipeline))


def _inherit_model_settings(pipeline: Pipeline) -> Pipeline:
    """Set `train.param_dtype` of each export stage whose recipe leaves it out to the dtype of the stage whose model is
    exported. Set `policy.model_name_or_path` of each merge whose recipe leaves it out to the model from which the first
    of the merged models descends."""
    recipes = dict(pipeline.recipes)
    for stage in pipeline.stages:
        stage_kind, recipe, source_stage = pipeline.stage_kind(stage), recipes[stage.name], stage
        exported_stage_name = _find_source_stage(pipeline, stage)
        is_export_stage = stage_kind.makes == "model" and not stage_kind.trains_model
        if is_export_stage and exported_stage_name and "param_dtype" not in recipe.train.model_fields_set:
            exported_param_dtype = recipes[exported_stage_name].train.param_dtype
            recipe = recipe.copy_with(train=recipe.train.copy_with(param_dtype=exported_param_dtype))
        if not stage.model and exported_stage_name and "model_name_or_path" not in recipe.policy.model_fields_set:
            while (name := referenced_stage(pipeline.initial_model(source_stage))) is not None:
                source_stage = pipeline.stage(name)
            policy_config = recipes[source_stage.name].policy
            model = {"model_name_or_path": source_stage.model or policy_config.model_name_or_path}
            recipe = recipe.copy_with(
                policy=recipe.policy.copy_with(**model, model_revision=policy_config.model_revision)
            )
        recipes[stage.name] = recipe
    return replace(pipeline, recipes=recipes)


def collect_chat_templates(pipeline: Pipeline) -> dict[str, str | None]:
    """Return the chat template of the model of each stage, by stage name: `policy.chat_template` of the stage's recipe
    or, if that sets none, the template of the stage that made the model, because the exported model contains this
    template. None: no recipe sets a template."""
    chat_templates: dict[str, str | None] = {}
    for stage in pipeline.stages:
        own_template = pipeline.recipes[stage.name].policy.chat_template
        inherited_template = chat_templates.get(_find_source_stage(pipeline, stage))
        chat_templates[stage.name] = inherited_template if own_template is None else own_template
    return chat_templates


def _find_source_stage(pipeline: Pipeline, stage: StageConfig) -> str:
    """Return the name of the stage from whose model `stage` takes tokenizer and dtype; empty if the model comes from no
    stage. For a merge, it is the stage of the first merged model; the base model of a merge is not one of its merged
    models."""
    if pipeline.stage_kind(stage).merges_models:
        merged_stage_names = tuple(name for name in stage.after if name != referenced_stage(stage.model))
        stage = stage.model_copy(update={"model": "", "after": merged_stage_names})
    return referenced_stage(pipeline.initial_model(stage)) or ""


def _inherit_chat_templates(pipeline: Pipeline) -> Pipeline:
    """Set `policy.chat_template` of each stage that prepares rows to the chat template of the models that read these
    rows, unless a recipe sets one. The rows are prepared before these models exist, with the tokenizer of the base
    model, and the chat template of the base model would be wrong."""
    recipes, template_by_stage = dict(pipeline.recipes), collect_chat_templates(pipeline)
    readers_by_rows_stage: dict[str, list[str]] = defaultdict(list)
    for stage in pipeline.stages:
        if pipeline.stage_kind(stage).reads_data == "prepared" and (rows_stage_name := referenced_stage(stage.data)):
            readers_by_rows_stage[rows_stage_name].append(stage.name)
    for name, readers in readers_by_rows_stage.items():
        has_own_template = any(recipes[each].policy.chat_template is not None for each in (name, *readers))
        reader_templates = {template_by_stage[reader] for reader in readers}
        if len(reader_templates) == 1 and not (has_own_template or referenced_stage(pipeline.stage(name).model)):
            policy_config = recipes[name].policy.copy_with(chat_template=reader_templates.pop())
            recipes[name] = recipes[name].copy_with(policy=policy_config)
    return replace(pipeline, recipes=recipes)
