"""Find recipe keys without effect: keys that a setting disables, and keys that no stage of a pipeline reads."""

import re
from collections.abc import Iterator, Mapping, Sequence

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.inputs import referenced_stage
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.table import active_fields, affects_result, short_toml
from cosmos_core.types import is_key_within

_IMPLICITLY_READ_KEYS = ("policy.is_diffusers", "policy.model_class", "train.train_policy.type", "export.formats")
"""Keys that stages use although the declarations of stage kinds do not list them, such as `policy.is_diffusers`."""
_VALIDATION_SAMPLING_KEYS = tuple(
    f"validation.{name}" for name in ("temperature", "top_p", "top_k", "repetition_penalty", "max_response_length")
)
_FIRST_FRAMES_KEY = "policy.diffusers.flow_rl.max_conditional_frames"
_TEXT_MODEL_KEYS = (
    *_VALIDATION_SAMPLING_KEYS, "policy.model_max_length", "policy.aux_loss_coeff", "train.logprob_dtype",
    "train.transfer_dtype", "train.sync_weight_interval", "rollout.sampling_config", "rollout.parallelism",
    "train.train_policy.temperature", "train.train_policy.max_token_len_per_mini_batch",
)  # fmt: skip


def disabled_keys(pipeline: Pipeline, stage: StageConfig) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield pairs for a stage: a reason, such as `validation.enable is off`, and the prefixes of the recipe keys that
    have no effect for this reason. The fingerprint of the stage omits these keys."""
    stage_kind, recipe = pipeline.stage_kind(stage), pipeline.recipes[stage.name]
    if stage_kind.trains_model and not recipe.validation.enable:
        schema_fields = type(recipe.validation).model_fields
        yield "validation.enable is off", [f"validation.{name}" for name in schema_fields if name != "enable"]
    if recipe.teacher_for_stage(stage_kind) is None:
        schema_fields = type(recipe.distillation).model_fields
        yield "distillation.enable is off", [f"distillation.{name}" for name in schema_fields if name != "enable"]
    if not _may_complete_prompts(pipeline, stage):
        yield "nothing is generated", ["rollout"]
    has_diffusion_rollouts = not recipe.policy.modality.has_text_engines and recipe.train.train_policy.has_rollouts
    starts_from_given_frames = has_diffusion_rollouts and recipe.policy.diffusers.flow_rl.max_conditional_frames > 0
    if stage_kind.reads_data == "source" and not starts_from_given_frames:
        yield "no rollouts start from frames of clips", [_FIRST_FRAMES_KEY]
    if not recipe.uses_judge:
        yield "no reward function is judge", ["judge"]
    for modality_name, modality_keys in stage_kind.keys_by_modality.items():
        if modality_name != recipe.policy.modality.name:
            yield "the model has another modality", modality_keys
    if not recipe.export.quantized_formats:
        yield "export.formats has no quantised format", ["export.formats", "export.unproven"]


def _may_complete_prompts(pipeline: Pipeline, stage: StageConfig) -> bool:
    """Return True if a stage can generate completions, so that `[rollout]` affects it. If another stage prepares its
    rows, the recipe of that stage decides whether the rows are prompts; rows of unknown origin count as prompts."""
    stage_kind, data_stage_name = pipeline.stage_kind(stage), referenced_stage(stage.data)
    if stage_kind.feed == "rollouts" or stage_kind.has_engine:
        return True
    if stage_kind.trains_model and not pipeline.recipes[stage.name].validation.enable:
        return False
    if stage_kind.reads_data == "prepared":
        if data_stage_name is None or pipeline.stage_kind(pipeline.stage(data_stage_name)).makes != "data":
            return True  # assume that the stage completes prompts, because rows of unknown origin may be prompts
        stage = pipeline.stage(data_stage_name)
    recipe = pipeline.recipes[stage.name]
    return recipe.train.train_policy.has_rollouts or bool(recipe.validation.reward_function)


def unread_key_notices(pipeline: Pipeline, loaded_recipes: Mapping[str, Recipe]) -> Iterator[str]:
    """Yield notices about keys that change results, but are set only in recipes of stages that do not read them. The
    pipeline must contain all its stages, unlike the pipeline of a Python flow, which adds stages while it runs.
    `loaded_recipes` are the recipes of the pipeline before `resolve_gpu_settings` replaced values of the user."""
    if any(stage.entry for stage in pipeline.stages):  # report no key as unread: a user function may read any key
        return
    grid_keys = [key for s in pipeline.stages if s.sweep for branch in s.sweep.branches for key in branch.settings]
    read_settings: set[str] = set()
    reason_by_setting: dict[str, str] = {}
    for stage in pipeline.stages:
        stage_kind, recipe = pipeline.stage_kind(stage), pipeline.recipes[stage.name]
        reasons_and_disabled_keys = [*disabled_keys(pipeline, stage), *_disabled_keys_in_fingerprint(recipe)]
        for key, field, setting_value, is_set in active_fields(loaded_recipes[stage.name]):
            may_change_result = is_set and affects_result(field) and not isinstance(setting_value, dict)
            if not may_change_result or is_key_within(key, _IMPLICITLY_READ_KEYS):
                continue
            schema_key, setting_text = re.sub(r"\.\d+\.", ".", key), f"{key} = {short_toml(setting_value)}"
            reading_kinds = [each for each in pipeline.stage_kinds.values() if each.reads_key(schema_key)]
            reason = next((reason for reason, keys in reasons_and_disabled_keys if is_key_within(key, keys)), "")
            if stage_kind in reading_kinds and not reason:
                read_settings.add(setting_text)
            elif stage_kind in reading_kinds:
                reason_by_setting[setting_text] = reason
            elif reading_kinds and not (
                any(each.endswith(key) for each in grid_keys)  # do not report keys of a grid, which the branches read
                or (stage_kind.reads_data == "prepared" and all(each.reads_data == "source" for each in reading_kinds))
            ):
                reading_kind_names_text = " or ".join(repr(each.name) for each in reading_kinds)
                reason_by_setting.setdefault(setting_text, f"only stages of kind {reading_kind_names_text} read it")
    for reason in dict.fromkeys(reason_by_setting.values()):
        unread_settings = [s for s, cause in reason_by_setting.items() if cause == reason and s not in read_settings]
        if unread_settings:
            yield f"{', '.join(unread_settings)} {'have' if unread_settings[1:] else 'has'} no effect here: {reason}"


def _disabled_keys_in_fingerprint(recipe: Recipe) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield pairs of a reason and the prefixes of the recipe keys that other settings of the recipe disable. Unlike
    keys from `disabled_keys`, these remain in fingerprints."""
    train_policy = recipe.train.train_policy
    if not recipe.policy.modality.has_text_engines:
        yield "policy.is_diffusers is on", _TEXT_MODEL_KEYS
    elif not recipe.has_validation_completions:
        yield "held-out rows are not completed", [*_VALIDATION_SAMPLING_KEYS, "validation.n_generation"]
    if not train_policy.has_rollouts:
        yield "no rollouts are trained on", ["train.sync_weight_interval"]
    if recipe.mode != "disaggregated" and train_policy.rollout_lookahead[0]:
        lookahead_keys = ("allowed_outdated_steps", "max_inflight_steps")
        yield f"mode = {recipe.mode!r}", [f"train.train_policy.{name}" for name in lookahead_keys]
