"""Worker program of `cosmos check`: validate a stage's model files, tokenizer, rows and rewards before a run."""

import importlib
import json
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.initialization import meta_device_safe_creation_ops

from cosmos_core.algorithms.base import metric_weights
from cosmos_core.algorithms.registry import algorithm_class
from cosmos_core.checkpoint.resume import check_checkpoint
from cosmos_core.config.inputs import referenced_stage
from cosmos_core.config.schema.lora import LoraConfig
from cosmos_core.config.schema.multi_turn import MultiTurnRolloutConfig
from cosmos_core.config.schema.parallelism import ParallelismConfig
from cosmos_core.config.schema.pipeline import BLOCK_PREFIX
from cosmos_core.config.schema.policy import PolicyConfig
from cosmos_core.config.schema.remote_reward import RemoteRewardConfig
from cosmos_core.config.schema.table import StageContext
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.data import prepare
from cosmos_core.data.chat import ToolResultTokens, make_prompt_rendering
from cosmos_core.data.prepare import read_stop_tokens
from cosmos_core.data.prepared import DATA_TERM_SPLIT, HELD_OUT_REMEDY, has_images, preview_rows
from cosmos_core.data.tool_calls import read_tools
from cosmos_core.errors import DataError, ModelError, RewardError
from cosmos_core.models.balance import load_balancing_settings
from cosmos_core.models.freeze import mark_trained_weights
from cosmos_core.models.generation_config import GENERATION_CONFIG_FILE, find_refused_generation_settings
from cosmos_core.models.hf import check_row_length, check_rows, load_config, load_tokenizer, model_without_weights
from cosmos_core.models.lora import has_lora_adapter
from cosmos_core.models.lora_targets import describe_adapter
from cosmos_core.models.processor import processor_files
from cosmos_core.models.sharded_load import check_file_tensors, init_on_meta
from cosmos_core.models.teacher import check_teacher, name_teacher_in_errors
from cosmos_core.models.verify_export import check_export_possible
from cosmos_core.observe.sinks.base import import_user_sinks
from cosmos_core.parallel.expert import find_split_experts
from cosmos_core.parallel.pipeline import apply_pp
from cosmos_core.parallel.plan import check_head_split
from cosmos_core.parallel.tensor import find_split_matrices
from cosmos_core.registry import suggest_names
from cosmos_core.rewards.base import RewardConfig
from cosmos_core.rewards.exchange import ping, read_service_endpoints
from cosmos_core.rewards.service.config import read_config
from cosmos_core.rewards.wan_latents import describe_vae
from cosmos_core.rollout.registry import check_engine
from cosmos_core.run.stage import Stage
from cosmos_core.tools.base import tool_paths_by_name
from cosmos_core.train.check_rewards import call_rewards, make_test_groups, read_checked_prompts, read_first_prompts
from cosmos_core.train.feeds import check_data_term_rows, unused_rows_message
from cosmos_core.train.hooks import Hooks
from cosmos_core.train.optim import check_module_paths
from cosmos_core.train.rollout_feed import make_group_filter
from cosmos_core.types import JsonValue, Outcome, StageKind

_NUM_MEDIA_PROMPTS = 2  # number of prompts of each split for which images or videos are made up to check rewards
_MAX_EXAMPLE_ROWS = 5  # maximum number of rows that the report shows as examples
_MAX_COLUMNS = 20  # maximum number of unused dataset columns that the report lists by name


def run(stage: Stage) -> Outcome:
    """Check the model, tokenizer, rows and rewards of the stage, and return a report as the outcome's `info`."""
    if stage.kind.trains_model:  # import user-defined code now, so that its errors are reported before the run
        algorithm_class(stage.recipe.train.train_policy)
        Hooks(stage)
        if isinstance(stage.recipe.train.resume, str):
            check_checkpoint(Path(stage.recipe.train.resume))
    import_user_sinks(stage.recipe.logging.logger)
    if stage.recipe.policy.is_diffusers:
        return Outcome(info=_check_diffusion(stage))
    revision = stage.recipe.policy.model_revision
    config = load_config(stage.model, revision)
    check_row_length(config, stage.recipe.policy.model_max_length)
    tokenizer = load_tokenizer(stage.model, revision, stage.recipe.policy.chat_template)
    architectures = config.architectures
    architecture = architectures[0] if isinstance(architectures, list) and architectures else type(config).__name__
    report_lines = [f"{architecture}, vocabulary of {len(tokenizer)}"]
    outcome_info: dict[str, JsonValue] = {}
    make_model = partial(_make_meta_model, stage.model, revision, stage.recipe.train.master_dtype)
    if stage.kind.makes == "data":
        preparation_outcome = prepare.run(stage)
        if lost_text_message := preparation_outcome.info.get("loses_text"):
            raise DataError(str(lost_text_message))
        split_statistics = json.loads((stage.path / "data" / "statistics.json").read_text(encoding="utf-8"))
        train_rewards, held_out_rewards = metric_weights(stage.recipe.train.train_policy), stage.recipe.held_out_rewards
        scored_splits = ("train",) * bool(train_rewards) + ("validation",) * bool(held_out_rewards)
        report_lines += _describe_rows(split_statistics, stage.recipe.policy.model_max_length, scored_splits)
        report_lines += cast(list[str], preparation_outcome.info.get("notices", []))
        splits = stage.recipe.completed_splits
        report_lines += filter(None, [check_rows(config, stage.path / "data", make_model, completed_splits=splits)])
        recipe, num_rows = stage.recipe, split_statistics["train"]["rows"]
        outcome_info |= _check_row_counts(recipe.train, recipe.group_size, num_rows, split_statistics, report_lines)
        outcome_info |= {"has_images": True} if has_images(stage.path / "data") else {}
        outcome_info["prompts"] = read_first_prompts(stage.path / "data")
        outcome_info["shown"] = cast(list[JsonValue], preview_rows(stage.path / "data", tokenizer, _MAX_EXAMPLE_ROWS))
    else:
        report_lines += filter(None, [check_file_tensors(make_model(), stage.model, revision, stage.progress.beat)])
        report_lines += _check_model(stage.recipe.policy, stage.recipe.train, stage.kind, stage.model)
        if _generates_completions(StageContext(stage.recipe, stage.kind)):
            rollout, refused_keys = stage.recipe.rollout, find_refused_generation_settings(stage.model, revision)
            # Check only external models, because a stage exports its model without the settings that vLLM refuses.
            is_external_model = referenced_stage(stage.config.model) is None
            if refused_keys and is_external_model and rollout.checks_generation_config and find_spec(rollout.backend):
                refusal_message = f"vLLM refuses to load {', '.join(refused_keys)}"
                raise ModelError(f"{stage.model}/{GENERATION_CONFIG_FILE}: {refusal_message}; remove it there")
            check_engine(rollout.backend, config, stage.model, tp_size=rollout.parallelism.tp_size)
            prompts_by_split = read_checked_prompts(stage.path, stage.data)
            report_lines += _check_tools(rollout.multi_turn_config, tokenizer, stage.model, revision, prompts_by_split)
        if stage.kind.trains_model:
            processor_contents = processor_files(stage.model, revision, stage.recipe.policy.chat_template)
            check_export_possible(config, tokenizer, stage.model, processor_contents)
            report_lines += _describe_precision(config, stage.recipe.train.param_dtype)
        teacher_config = stage.recipe.teacher_for_stage(stage.kind)
        if teacher_config and referenced_stage(teacher_config.model_name_or_path) is None:
            report_lines.append(check_teacher(teacher_config, stage.recipe, tokenizer))
            teacher_name, teacher_revision = teacher_config.model_name_or_path, teacher_config.model_revision
            parallelism, master_dtype = stage.recipe.policy.parallelism, stage.recipe.train.master_dtype
            check_teacher_parallelism(teacher_name, teacher_revision, master_dtype, parallelism)
        report_lines += check_rewards(stage)
    return Outcome(info={**outcome_info, "found": "; ".join(report_lines)})


def _make_meta_model(model: str, revision: str | None, dtype: str) -> PreTrainedModel:
    with torch.device("meta"), meta_device_safe_creation_ops():
        return model_without_weights(model, revision=revision, dtype=getattr(torch, dtype))


def _check_row_counts(
    train: TrainConfig, group_size: int, num_rows: int, statistics_by_split: Mapping[str, Any], report_lines: list[str]
) -> dict[str, JsonValue]:
    """Append a message to `report_lines` if an epoch leaves rows unused. Return a message under the key `no_held_out`
    if no row is held out, and under `too_few` if the rows fill no train step; these are errors only if a later stage
    trains or validates on the rows."""
    row_errors: dict[str, JsonValue] = {}
    if "validation" not in statistics_by_split:
        row_errors["no_held_out"] = f"no row is held out; {HELD_OUT_REMEDY}"
    try:
        report_lines += filter(None, [unused_rows_message(train, group_size, num_rows)])
        if (supervised_rows := train.train_policy.supervised_rows) and DATA_TERM_SPLIT in statistics_by_split:
            check_data_term_rows(supervised_rows, statistics_by_split[DATA_TERM_SPLIT]["rows"])
    except DataError as error:
        row_errors["too_few"] = str(error)
    return row_errors


def _check_model(policy_config: PolicyConfig, train: TrainConfig, stage_kind: StageKind, model_name: str) -> list[str]:
    """Build the model without weights. Check that it has the modules which the recipe names, and that its layers can be
    split over the mesh. Return report lines about its LoRA adapter."""
    parallelism = policy_config.parallelism if stage_kind.has_mesh else ParallelismConfig()
    with nullcontext() if parallelism.pp_size > 1 else torch.device("meta"), meta_device_safe_creation_ops():
        model = _make_model_without_weights(model_name, policy_config.model_revision, train.master_dtype, parallelism)
        if stage_kind.trains_model:
            mark_trained_weights(model, policy_config)
            load_balancing_settings(model, policy_config.aux_loss_coeff)
            check_module_paths(model, train)
    report_lines = _describe_adapter(model, policy_config.lora)
    _check_parallelism(model, parallelism)
    return report_lines


def _make_model_without_weights(
    model_name: str, revision: str | None, dtype: str, parallelism: ParallelismConfig
) -> PreTrainedModel:
    """Return a model without weights, in a form that `_check_parallelism` can split into pipeline stages."""
    if parallelism.pp_size == 1:
        return _make_meta_model(model_name, revision, dtype)
    with meta_device_safe_creation_ops():
        return init_on_meta(model_name, revision=revision, dtype=getattr(torch, dtype), device=torch.device("cpu"))


def _check_parallelism(model: PreTrainedModel, parallelism: ParallelismConfig) -> None:
    for axis, tp_size in (("tp_size", 1), ("cp_size", parallelism.tp_size)):
        check_head_split(model, axis, getattr(parallelism, axis), tp_size)
    if parallelism.tp_size > 1:
        find_split_matrices(model, parallelism.tp_size, shards_experts=parallelism.ep_size == 1)
    if parallelism.ep_size > 1:
        find_split_experts(model, parallelism.ep_size)
    if parallelism.pp_size > 1:
        apply_pp(model, parallelism, 0)


def check_teacher_parallelism(
    model_name: str, revision: str | None, dtype: str, parallelism: ParallelismConfig
) -> None:
    """Check that a mesh of several ranks can split the layers of a teacher model by its parallelism settings. A mesh of
    one rank needs no check."""
    if parallelism.world_size > 1:
        with name_teacher_in_errors():
            _check_parallelism(_make_model_without_weights(model_name, revision, dtype, parallelism), parallelism)


def _generates_completions(stage: StageContext) -> bool:
    recipe, uses_sample_endpoint = stage.recipe, stage.kind.table == "sample" and bool(stage.recipe.sample.endpoint)
    completes_held_out_prompts = stage.measures_held_out_rows and recipe.has_validation_completions
    return completes_held_out_prompts or (stage.kind.completes_prompts and not uses_sample_endpoint)


def _describe_precision(config: PretrainedConfig, dtype: str) -> list[str]:
    """Return a report line if exports have 16-bit weights although the base model has wider weights; else no line."""
    base_dtype = str(getattr(config.get_text_config(), "dtype", None) or config.dtype or dtype).removeprefix("torch.")
    if base_dtype not in {"float32", "float64"} or torch.finfo(getattr(torch, dtype)).bits > 16:
        return []
    return [
        f"exports will be in {dtype}, the base is in {base_dtype}: train.param_dtype = '{base_dtype}' would keep that"
    ]


def _describe_adapter(model: nn.Module, lora_config: LoraConfig | None) -> list[str]:
    return [describe_adapter(model, lora_config.target_modules)] if lora_config and has_lora_adapter(model) else []


def _check_diffusion(stage: Stage) -> dict[str, JsonValue]:
    """Return the report on a diffusion model and its training rows, without reading the model's weights."""
    policy_config = stage.recipe.policy
    stage.progress.phase("load")
    pipeline = importlib.import_module("cosmos_core.models.families").open_pipeline(stage.model, policy_config)
    report_lines = [f"{pipeline.folder.class_name}, {pipeline.folder.component_class(pipeline.denoiser_name).__name__}"]
    num_frames = policy_config.diffusers.inference_frames if pipeline.is_video else 1
    pipeline.latent_shape(*policy_config.diffusers.inference_size, num_frames)
    sample_config = policy_config.diffusers.sample
    if pipeline.schedule and not sample_config.sigma_schedule:  # raise an error now if noise levels are unusable
        for num_steps in {sample_config.num_steps, sample_config.eval_num_steps}:
            pipeline.set_scheduler_timestep(num_steps)
    if stage.kind.makes == "data":
        previews_by_split = importlib.import_module("cosmos_core.data.prepare_media").preview(stage)
        report_lines += [line for line, *_ in previews_by_split.values()]
        prompts = {name: split_prompts[:_NUM_MEDIA_PROMPTS] for name, (*_, split_prompts) in previews_by_split.items()}
        shown_rows: list[JsonValue] = [f"{row['location']}: {row['text']!r}" for row in previews_by_split["train"][2]]
        num_rows, train_config, group_size = previews_by_split["train"][1], stage.recipe.train, stage.recipe.group_size
        row_errors = _check_row_counts(train_config, group_size, num_rows, previews_by_split, report_lines)
        return row_errors | {"found": "; ".join(report_lines), "prompts": prompts, "shown": shown_rows}
    if stage.kind.has_mesh and policy_config.parallelism.cp_size > 1:
        pipeline.check_context_parallel_size(policy_config.parallelism.cp_size)
    if stage.kind.trains_model:
        with torch.device("meta"):
            denoiser = pipeline.folder.build_component(pipeline.denoiser_name)
            mark_trained_weights(denoiser, policy_config, pipeline.lora_targets)
            check_module_paths(denoiser, stage.recipe.train)
        report_lines += _describe_adapter(denoiser, policy_config.lora)
    media_shape = (num_frames, *policy_config.diffusers.inference_size)
    return {"found": "; ".join(report_lines + check_rewards(stage, media_shape))}


def check_rewards(stage: Stage, media_shape: tuple[int, int, int] | None = None) -> list[str]:
    """Call the local rewards of a stage on made-up completions, query its reward services, and return report lines.

    `media_shape`: frames, height and width of made-up media; None: text. Raise `RewardError` if a reward cannot
    be loaded, scores no completion, is missing in the reward service, or is missing although groups of
    completions are filtered by it.
    """
    train_policy = stage.recipe.train.train_policy
    if stage.kind.trains_model:
        make_group_filter(train_policy)
    report_lines = []
    for rewards, split_names in _group_splits_by_rewards(StageContext(stage.recipe, stage.kind)):
        if not isinstance(rewards, RemoteRewardConfig):
            prompts = read_checked_prompts(stage.path, stage.data)
            test_groups = make_test_groups(prompts, split_names, train_policy, media_shape)
            report_lines.append(call_rewards(stage.recipe.reward_settings, rewards, test_groups, stage.progress.beat))
            continue
        reward_names = [reward_fn.name for reward_fn in rewards.reward_fns]
        report_lines.append(_check_reward_service(stage.config.reward_service, reward_names))
        if rewards.video_vae:
            report_lines.append(describe_vae("remote_reward.video_vae", rewards.video_vae))
    return report_lines


def _check_reward_service(service_config_file: str, reward_names: list[str]) -> str:
    """Check that the stage's reward service provides the rewards `reward_names`. A running service is queried. For a
    service that the run will start, only the configuration file is read."""
    if not service_config_file or service_config_file.startswith(BLOCK_PREFIX):
        ping(read_service_endpoints(), reward_names)
        return f"rewards {', '.join(reward_names)} of a service"
    served_reward_names = [reward.reward_type for reward in read_config(Path(service_config_file)).rewards]
    if unknown_rewards := [name for name in reward_names if name not in served_reward_names]:
        raise RewardError(
            f"reward_service = {service_config_file!r} does not serve "
            f"{unknown_rewards[0]!r}{suggest_names(unknown_rewards[0], served_reward_names)}"
        )
    return f"rewards {', '.join(reward_names)} of {service_config_file}"


def _group_splits_by_rewards(stage: StageContext) -> list[tuple[RewardConfig, list[str]]]:
    """Return the distinct rewards of a stage, local functions or a service, each with the names of the splits (`train`,
    `validation`) whose completions are scored by them."""
    rewards_and_splits = [(stage.recipe.training_rewards, "train")] if stage.kind.completes_prompts else []
    rewards_and_splits += [(stage.recipe.held_out_rewards, "validation")] if stage.measures_held_out_rows else []
    rewards_and_splits_by_key: dict[str, tuple[RewardConfig, list[str]]] = {}
    for rewards, split_name in rewards_and_splits:
        if rewards:
            rewards_and_splits_by_key.setdefault(repr(rewards), (rewards, []))[1].append(split_name)
    return list(rewards_and_splits_by_key.values())


def _check_tools(
    multi_turn_config: MultiTurnRolloutConfig, tokenizer: PreTrainedTokenizerBase, model: str, revision: str | None,
    prompts_by_split: Mapping[str, Any],
) -> list[str]:  # fmt: skip
    """Load the tools that the policy can call, and check that the chat template can render their results. Return a
    report line with the names of the tools; empty if the recipe enables none."""
    if not multi_turn_config.enable or not multi_turn_config.enable_tools:
        return []
    ToolResultTokens(tokenizer, make_prompt_rendering(multi_turn_config), read_stop_tokens(model, revision, tokenizer))
    tool_names = tool_paths_by_name(multi_turn_config.enabled_tools)
    report_line = f"tools {', '.join(tool_names)}"
    prompt_metadata = [prompt["metadata"] for prompts in prompts_by_split.values() for prompt in prompts]
    described_tools = [tool.get("function", tool) for row in prompt_metadata for tool in read_tools(row, "tools") or ()]
    if missing_names := sorted({str(tool.get("name")) for tool in described_tools} - tool_names.keys()):
        report_line += f"; rows describe {', '.join(missing_names)} in their column `tools`, whose calls all fail: "
        report_line += "rollout.multi_turn_config.tools does not name it"
    return [report_line]


def _describe_rows(statistics_by_split: dict[str, Any], max_length: int, scored_splits: tuple[str, ...]) -> list[str]:
    report_lines = []
    for name, split_counts in statistics_by_split.items():
        summary = f"{name}: {split_counts['rows']:,} rows, {split_counts['tokens']:,} tokens"
        if split_counts["label_tokens"]:
            summary += f", {split_counts['label_tokens'] / max(1, split_counts['tokens']):.0%} of them learned"
        if split_counts.get("images"):
            summary += f", {split_counts['images']:,} images of {split_counts['image_tokens']:,} tokens"
        if split_counts.get("truncated_rows"):
            summary += f", {split_counts['truncated_rows']:,} rows cut at {max_length}"
        if num_masked := split_counts.get("continued_rows"):
            summary += f", {num_masked:,} rows of plain text whose prompt is masked, as the model has no chat template"
        if num_unmasked := split_counts.get("plain_rows"):
            summary += f", {num_unmasked:,} rows of plain text in which no token is masked"
        if unused_columns := split_counts.get("unread_columns"):
            listed_columns = [column or "(unnamed)" for column in unused_columns[:_MAX_COLUMNS]]
            reader_clause = "only rewards can read" if name in scored_splits else "nothing reads"
            summary += f", columns that {reader_clause}: {', '.join(listed_columns)}"
            summary += f" and {len(unused_columns) - _MAX_COLUMNS} more" if len(unused_columns) > _MAX_COLUMNS else ""
        report_lines.append(summary)
    return report_lines
