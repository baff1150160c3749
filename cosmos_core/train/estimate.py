"""Estimate of the parameters, memory, tokens, steps and disk space of a training stage, from config.json and recipe.

The worker program of `cosmos plan --estimate`; it reads no weights and computes no step.
"""

import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig, PreTrainedModel

from cosmos_core.algorithms.base import Algorithm
from cosmos_core.algorithms.registry import make_algorithm
from cosmos_core.config.media import image_settings
from cosmos_core.config.schema.algorithm import AlgorithmConfig
from cosmos_core.config.schema.dataset import RowsConfig, reasoning_gym_generator
from cosmos_core.config.schema.parallelism import ParallelismConfig
from cosmos_core.config.schema.policy import PolicyConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.rollout import RolloutConfig
from cosmos_core.config.schema.supervised import SupervisedConfig
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.config.schema.validation import ValidationConfig
from cosmos_core.data.kinds.base import TRAIN_SPLIT
from cosmos_core.data.kinds.registry import load_row_kind
from cosmos_core.data.rows import load_rows, split_rows
from cosmos_core.errors import first_line
from cosmos_core.models.causal_lm import CausalLM, InputProcessing
from cosmos_core.models.flops import measure_matmul_flops
from cosmos_core.models.freeze import mark_trained_weights
from cosmos_core.models.hf import model_without_weights
from cosmos_core.rollout.registry import FALLBACK_ENGINE
from cosmos_core.run.progress import ProgressWriter
from cosmos_core.run.stage import Stage
from cosmos_core.train.feeds import micro_batch_tokens, plan_balanced_steps, total_steps
from cosmos_core.train.memory import StepMemory, estimate_8bit_moment_bytes, estimate_untraced_memory, trace_step_memory
from cosmos_core.train.trainer import Trainer
from cosmos_core.types import Outcome

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainingEstimate:
    """Estimated memory, disk space, steps and tokens of a training stage; `notes` explains values that are None."""

    parameters: int
    """Number of parameters; tied parameters count once."""
    trainable: int
    memory: StepMemory
    """Bytes of memory of one GPU at the peak of a train step, for each use such as weights and activations."""
    peak: int
    """Bytes of memory of one GPU at the peak of a train step, the sum over all uses."""
    engine_weights: int
    """Bytes of memory of one GPU for the rollout engine's own copy of the weights; 0 if it uses the trainer's."""
    kv_cache: int | None
    """Bytes of the rollout engine's KV cache if all concurrent sequences have their maximum length; None: unknown."""
    sequence_length: int
    """Number of tokens of the longest row, prompt and completion together."""
    rows: int | None
    steps: int | None
    is_steps_bound: bool
    """Whether `steps` is an upper bound, because the number of rows or the lengths of sequences are unknown."""
    tokens: int | None
    """Number of tokens that all train steps together train on; None: unknown."""
    is_tokens_bound: bool
    """Whether `tokens` is an upper bound, because the lengths of rows or completions are unknown."""
    disk: int
    """Bytes of the checkpoints that are kept and of the exported model."""
    machine: dict[str, Any]
    """Description of the machine that made the estimate: `device` name, `is_cpu`, `flops` (measured matmul FLOPs per
    second) and `memory` in bytes."""
    notes: tuple[str, ...]


class _RowStatistics(NamedTuple):
    """Number of training rows, and the maximum and mean length of their sequences in tokens; None: unknown."""

    num_rows: int | None
    max_length: int | None = None
    mean_length: float | None = None


def run(stage: Stage) -> Outcome:
    """Return the estimate of a training stage as `info["estimate"]`. Raise `ModelError` or `DataError` if the model or
    the rows are unusable."""
    stage.progress.phase("load")
    return Outcome(info={"estimate": asdict(estimate(stage.recipe, stage.model, stage.progress, stage.data))})


def estimate(
    recipe: Recipe, model: str, progress_writer: ProgressWriter, prepared_folder: Path | None = None
) -> TrainingEstimate:
    """Estimate memory, disk space, steps and tokens of a training of `model` from its config.json. `prepared_folder`:
    data of a finished `prepare` stage; None: count the rows of a local dataset. Raise `ModelError` or `DataError`."""
    train, mesh, has_rollouts = recipe.train, recipe.policy.parallelism, recipe.train.train_policy.has_rollouts
    if prepared_folder is None:
        split_seed = None if recipe.validation.dataset.name else train.seed
        row_stats = _RowStatistics(_count_rows(train.train_policy, image_settings(recipe).annotation_path, split_seed))
    else:
        row_stats = _read_row_statistics(train.train_policy, recipe.policy, prepared_folder)
    max_length, completion_length = recipe.policy.model_max_length, recipe.rollout.max_response_length
    estimate_num_tokens = partial(_estimate_sequence_length, max_length, completion_length if has_rollouts else 0)
    sequence_length = int(estimate_num_tokens(row_stats.max_length))
    max_steps, caveats = train.max_num_steps, []
    if row_stats.num_rows is None:
        step_limit_text = f"at most max_num_steps = {max_steps} and what they read" if max_steps else "unknown"
        caveats.append(f"steps and tokens: {step_limit_text}, because the rows are not on this machine yet")
    num_steps, num_tokens, is_steps_bound = _estimate_training_length(
        train, recipe.policy, recipe.group_size, row_stats, estimate_num_tokens(row_stats.mean_length), prepared_folder
    )
    if is_steps_bound and row_stats.num_rows is not None:
        caveats.append(
            f"steps: at most max_num_steps = {max_steps}, because batches are filled by tokens, yet to be counted"
        )
    fake_model, memory, trace_caveats = _trace_memory(
        partial(make_algorithm, recipe), train, recipe.policy, model, sequence_length, progress_writer
    )
    memory_per_rank = shard_memory(memory, train, mesh)
    if train.activation_offload:
        caveats.append("activations: as if they stayed, yet activation_offload moves them to host memory")
    caveats += trace_caveats
    num_parameters = sum(p.numel() for p in fake_model.parameters())
    num_trainable_params = sum(p.numel() for p in fake_model.parameters() if p.requires_grad)
    kv_cache_size: int | None = 0
    engine_weight_bytes = 0
    if has_rollouts:
        engine_weight_bytes = _estimate_engine_weight_bytes(recipe.rollout, train, mesh.world_size, num_parameters)
        max_groups = recipe.rollout.max_prompts_in_flight if recipe.num_engines else recipe.rollout.batch_size
        kv_cache_size = estimate_kv_cache_bytes(fake_model.config, recipe.rollout, train, max_groups, sequence_length)
        if kv_cache_size is None:
            model_type = fake_model.config.model_type
            caveats.append(f"KV cache: unknown, because {model_type} has layers without keys and values")
    return TrainingEstimate(
        parameters=num_parameters,
        trainable=num_trainable_params,
        memory=memory_per_rank,
        peak=memory_per_rank.total_bytes,
        engine_weights=engine_weight_bytes,
        kv_cache=kv_cache_size,
        sequence_length=sequence_length,
        rows=row_stats.num_rows,
        steps=num_steps,
        is_steps_bound=is_steps_bound,
        tokens=num_tokens,
        is_tokens_bound=row_stats.mean_length is None or has_rollouts,
        disk=_estimate_disk_bytes(train, recipe.validation, memory, (num_parameters, num_trainable_params), num_steps),
        machine=_describe_machine(train.param_dtype),
        notes=tuple(caveats),
    )


def estimate_kv_cache_bytes(
    config: PretrainedConfig, rollout: RolloutConfig, train: TrainConfig, max_groups: int, sequence_length: int
) -> int | None:
    """Return the bytes of the KV cache of all concurrent sequences; None if a layer does not cache keys and values.
    `max_groups`: maximum number of prompts that an engine completes at a time."""
    text_config = config.get_text_config()
    window_size = getattr(text_config, "sliding_window", None)
    default_layer_type = "sliding_attention" if window_size else "full_attention"
    layer_types = getattr(text_config, "layer_types", None) or [default_layer_type] * text_config.num_hidden_layers
    chunk_size = getattr(text_config, "attention_chunk_size", None)
    max_cached_lengths = {"full_attention": sequence_length, "chunked_attention": chunk_size or sequence_length}
    max_cached_lengths["sliding_attention"] = window_size or sequence_length
    if getattr(text_config, "kv_lora_rank", None) or not set(layer_types) <= set(max_cached_lengths):
        return None
    num_kv_heads = getattr(text_config, "num_key_value_heads", None) or text_config.num_attention_heads
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
    parallelism = rollout.parallelism
    num_prompts = min(max_groups, max(1, train.train_batch_per_replica // rollout.n_generation))
    num_completions = min(rollout.n_generation, rollout.n_generation_mini_batch or rollout.n_generation)
    num_cached_tokens = sum(min(sequence_length, max_cached_lengths[layer_type]) for layer_type in layer_types)
    bytes_per_token = 2 * -(-num_kv_heads // parallelism.tp_size) * head_dim * _element_bytes(train.param_dtype)
    return num_cached_tokens * bytes_per_token * num_prompts * num_completions // parallelism.pp_size


def shard_memory(memory: StepMemory, train: TrainConfig, mesh: ParallelismConfig) -> StepMemory:
    """Return the memory of one rank of the mesh, from the `memory` of an unsharded model. State that
    `train.fsdp_offload` moves to host memory counts as 0. With pipeline parallelism, the rank is in the first pipeline
    stage, which holds the activations of all micro-batches in flight."""
    rows_per_pass = train.rows_per_pass
    micro_batches_in_flight = {"1F1B": mesh.pp_size, "Interleaved1F1B": 2 * mesh.pp_size - 1, "GPipe": rows_per_pass}
    max_pipeline_rows = micro_batches_in_flight[mesh.pp_schedule] * mesh.pp_micro_batch_size
    num_rows_in_memory = min(rows_per_pass, max_pipeline_rows) if mesh.pp_size > 1 else rows_per_pass
    num_ranks = prod((abs(mesh.dp_shard_size), mesh.cp_size, mesh.tp_size, mesh.pp_size))
    state_memory_fields = ("weights", "gradients", "optimizer", "reference", "average")
    state_bytes = {n: 0 if train.fsdp_offload else -(-getattr(memory, n) // num_ranks) for n in state_memory_fields}
    activations, activation_divisor = memory.activations, mesh.cp_size * mesh.tp_size * mesh.pp_size * rows_per_pass
    return StepMemory(
        casts=None if memory.casts is None else -(-memory.casts // num_ranks),
        activations=None if activations is None else -(-activations * num_rows_in_memory // activation_divisor),
        **state_bytes,
    )


def _trace_memory(
    build_algorithm: Callable[[], Algorithm], train: TrainConfig, policy_config: PolicyConfig, model_path: str,
    sequence_length: int, progress_writer: ProgressWriter,
) -> tuple[PreTrainedModel, StepMemory, list[str]]:  # fmt: skip
    """Return the model with fake tensors, its memory without sharding, and notes about unknown memory."""
    weight_sets = () if train.train_policy.precomputes_reference_logprobs else train.train_policy.auxiliary_model_names
    with torch.device("meta"):  # PEFT can add adapters to meta tensors, but not to fake tensors
        fake_model = model_without_weights(
            model_path,
            revision=policy_config.model_revision,
            dtype=getattr(torch, train.master_dtype),
            gradient_checkpointing=policy_config.model_gradient_checkpointing,
        )
        mark_trained_weights(fake_model, policy_config)
    trace_caveats: list[str] = []
    with FakeTensorMode():
        _use_fake_tensors(fake_model)
        try:
            # Trace the optimizer without 8-bit moments, because torchao's compiled 8-bit optimizers cannot be traced.
            traced_config = train.copy_with(optm_name=train.optm_name.removesuffix("8bit"))
            trainer = Trainer(CausalLM(fake_model, traced_config, InputProcessing(0)), traced_config, progress_writer)
            for name in weight_sets:
                trainer.weight_sets.add(name)
            memory = trace_step_memory(trainer, build_algorithm(), traced_config, sequence_length)
        except Exception as error:
            # A model's code may fail on fake tensors; then only the memory of activations and casts remains unknown.
            logger.info("the step cannot be traced", exc_info=True)
            problem = f"the model cannot be traced without data ({first_line(error)})"
            trace_caveats = [f"activations: unknown, because {problem}"]
            memory = estimate_untraced_memory(fake_model, len(weight_sets))
    if train.optm_name.endswith("8bit"):
        memory = replace(memory, optimizer=estimate_8bit_moment_bytes(fake_model))
    if train.ema_enable:
        num_trainable = sum(parameter.numel() for parameter in fake_model.parameters() if parameter.requires_grad)
        memory = replace(memory, average=num_trainable * torch.float32.itemsize)
    return fake_model, memory, trace_caveats


def _use_fake_tensors(model: PreTrainedModel) -> None:
    """Replace a model's meta tensors by fake CPU tensors in place; tied parameters stay tied."""
    fake_tensor_by_id: dict[int, torch.Tensor] = {}
    for module in model.modules():
        tensor_dicts: list[dict[str, Any]] = [module._parameters, module._buffers]
        for tensors, name in [(tensors_by_name, name) for tensors_by_name in tensor_dicts for name in tensors_by_name]:
            tensor = tensors[name]
            if tensor is not None and id(tensor) not in fake_tensor_by_id:
                fake_tensor = torch.empty(tensor.shape, dtype=tensor.dtype)
                if isinstance(tensor, torch.nn.Parameter):
                    fake_tensor = torch.nn.Parameter(fake_tensor, tensor.requires_grad)
                fake_tensor_by_id[id(tensor)] = fake_tensor
            tensors[name] = fake_tensor_by_id.get(id(tensor))


def _read_row_statistics(policy: AlgorithmConfig, policy_config: PolicyConfig, prepared_folder: Path) -> _RowStatistics:
    statistics = json.loads((prepared_folder / "statistics.json").read_text(encoding="utf-8"))["train"]
    longest_row_length, sequences_per_row = statistics["length"]["max"], policy.num_sequences_per_row
    if sequences_per_row > 1:
        rows = load_row_kind(policy.rows).open(prepared_folder, TRAIN_SPLIT, policy_config)
        longest_row_length = int(rows.token_counts(is_packed=False).max()) // sequences_per_row
    return _RowStatistics(statistics["rows"], longest_row_length, statistics["length"]["mean"] / sequences_per_row)


def _count_rows(algorithm_config: AlgorithmConfig, annotation_path: str, split_seed: int | None) -> int | None:
    """Return the number of training rows of a local dataset; None if it must be downloaded or does not exist yet.
    `split_seed`: seed by which held-out rows are split off; None: the held-out rows are in another dataset."""
    num_rows = 0
    for dataset_key, dataset_table in algorithm_config.tables_by_dataset.items():
        dataset: RowsConfig = dataset_table.dataset
        if annotation_path:
            dataset = dataset.copy_with(name=annotation_path, split=("train",))
        is_local_path = dataset.name and os.path.exists(os.path.expanduser(dataset.name))
        if not (is_local_path or reasoning_gym_generator(dataset.name)):
            return None
        dataset_rows = load_rows(dataset, dataset_key)
        if dataset.test_size is not None and split_seed is not None:
            dataset_rows, _ = split_rows(dataset_rows, dataset.test_size, split_seed)
        num_rows += len(dataset_rows)
    return num_rows


def _estimate_sequence_length(max_length: int, completion_length: int, row_length: float | None) -> float:
    """Return the number of tokens of a row together with its longest completion, at most `max_length`; `max_length` if
    the number of tokens of the row, `row_length`, is unknown."""
    return max_length if row_length is None else min(max_length, row_length + completion_length)


def _estimate_training_length(
    train: TrainConfig, policy_config: PolicyConfig, group_size: int, rows: _RowStatistics, mean_length: float,
    prepared_folder: Path | None,
) -> tuple[int | None, int | None, bool]:  # fmt: skip
    """Return the number of train steps, the number of tokens that they train on (None: unknown), and whether the number
    of steps is an upper bound. `mean_length`: mean number of tokens of a sequence, including its completion."""
    if train.train_policy.has_token_based_batches:
        return _estimate_balanced_training_length(train, policy_config, prepared_folder)
    num_steps = train.max_num_steps if rows.num_rows is None else total_steps(train, group_size, rows.num_rows)
    sequences_per_step = train.train_batch_per_replica * train.train_policy.num_sequences_per_row
    num_tokens = None if num_steps is None else round(num_steps * (sequences_per_step * mean_length))
    return num_steps, num_tokens, rows.num_rows is None


def _estimate_balanced_training_length(
    train: TrainConfig, policy_config: PolicyConfig, prepared_folder: Path | None
) -> tuple[int, int, bool]:
    """Return, for a training that fills micro-batches up to a token budget, the number of train steps, the number of
    tokens, and whether the number of steps is an upper bound, as it is without `prepared_folder`."""
    num_steps, algorithm, max_length = train.max_num_steps, train.train_policy, policy_config.model_max_length
    assert num_steps is not None and isinstance(algorithm, SupervisedConfig)  # the schema ensures both conditions
    if prepared_folder is None:
        tokens_per_step = algorithm.load_balanced_batches_per_optimizer_step * micro_batch_tokens(train, max_length)
        return num_steps, num_steps * tokens_per_step, True
    rows = load_row_kind(algorithm.rows).open(prepared_folder, TRAIN_SPLIT, policy_config)
    row_lengths, plan = rows.token_counts(is_packed=True), plan_balanced_steps(rows, train, max_length)
    assert plan is not None
    row_indices = [i for step in range(plan.total_steps) for batch in plan.micro_batches(step) for i in batch]
    return plan.total_steps, int(row_lengths[row_indices].sum()), False


def _estimate_disk_bytes(
    train: TrainConfig, validation: ValidationConfig, memory: StepMemory, num_params: tuple[int, int], steps: int | None
) -> int:
    """Return the bytes of the exported model and of the checkpoints that are kept. A checkpoint is assumed to be saved
    for each validated step, because each may be the best so far. `num_params`: number of all parameters, and of the
    trainable ones."""
    ckpt, has_validation = train.ckpt, validation.enable
    num_checkpoints = 1  # the checkpoint after the last step is always saved
    if ckpt.enable_checkpoint:
        steps_per_epoch = max(1, (steps or 0) // train.epoch)
        save_freq = max(0, ckpt.save_freq_in_epoch) * steps_per_epoch or ckpt.save_freq
        checkpoint_intervals = (save_freq, *([validation.freq] if has_validation else []))
        saved_steps = (step for interval in checkpoint_intervals for step in range(interval, steps or 0, interval))
        num_saves = len({steps, *saved_steps})
        max_kept = max(1, ckpt.max_keep) + has_validation  # the best checkpoint is kept besides `max_keep` others
        num_checkpoints = max_kept if steps is None else num_saves if ckpt.max_keep == -1 else min(num_saves, max_kept)
    weight_bytes = num_params[1] * _element_bytes(train.master_dtype)  # checkpoints have no frozen parameters
    checkpoint_bytes = weight_bytes + memory.optimizer + memory.reference + memory.average
    return num_checkpoints * checkpoint_bytes + num_params[0] * _element_bytes(train.param_dtype)


def _describe_machine(dtype: str) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        gpu_properties = torch.cuda.get_device_properties(device)
        device_name, memory_bytes = gpu_properties.name, gpu_properties.total_memory
    else:
        num_threads = torch.get_num_threads()
        device_name, memory_bytes = f"cpu, {num_threads} thread{'s' * (num_threads > 1)}", psutil.virtual_memory().total
    matmul_flops = measure_matmul_flops(device, getattr(torch, dtype))
    return {"device": device_name, "is_cpu": device.type == "cpu", "flops": matmul_flops, "memory": memory_bytes}


def _estimate_engine_weight_bytes(
    rollout: RolloutConfig, train: TrainConfig, num_ranks: int, num_parameters: int
) -> int:
    """Return the bytes that one GPU needs for the rollout engine's copy of the weights; 0 if the engine uses the
    trainer's module."""
    if rollout.backend == FALLBACK_ENGINE and num_ranks > 1:
        return num_parameters * _element_bytes(train.master_dtype)
    if rollout.backend != "vllm":
        return 0
    num_engine_shards = rollout.parallelism.tp_size * rollout.parallelism.pp_size
    return num_parameters * _element_bytes(train.param_dtype) // num_engine_shards


def _element_bytes(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)
