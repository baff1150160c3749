"""Estimate of the parameters, memory, tokens, steps and disk space of a training stage, from config.json and recipe.

The worker program of `cosmos plan --estimate`. It reads no weights and computes no step; `memory.py` traces memory.
"""

import json
import logging
import os
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig, PreTrainedModel

from cosmos_core.algorithms.registry import make_algorithm
from cosmos_core.config.media import media_settings
from cosmos_core.config.schema.dataset import RowsConfig, generator_of
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.supervised import SupervisedConfig
from cosmos_core.data.kinds.base import TRAIN
from cosmos_core.data.kinds.registry import row_kind
from cosmos_core.data.rows import load_rows, split_rows
from cosmos_core.errors import first_line
from cosmos_core.models.causal_lm import CausalLM, InputProcessing
from cosmos_core.models.flops import measure_matmul_flops
from cosmos_core.models.freeze import mark_trained_weights
from cosmos_core.models.hf import model_without_weights
from cosmos_core.rollout.registry import FALLBACK_ENGINE
from cosmos_core.run.progress import Progress
from cosmos_core.run.stage import Stage
from cosmos_core.train.feeds import micro_batch_tokens, plan_balanced_steps, total_steps
from cosmos_core.train.memory import Memory, eight_bit_moments, step_memory, untraced_memory
from cosmos_core.train.trainer import Trainer
from cosmos_core.types import Outcome

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated needs of one training stage, memory in bytes per GPU; `notes` explains values that are None."""

    parameters: int
    """Number of parameters; tied parameters count once."""
    trainable: int
    memory: Memory
    """Bytes of memory of one GPU at the peak of a train step, by use."""
    peak: int
    """Bytes of memory of one GPU at the peak of a train step, the sum over all uses."""
    engine_weights: int
    """Bytes of the rollout engine's own copy of the weights; 0 without an engine's copy."""
    kv_cache: int | None
    """Bytes of the rollout engine's KV cache if all concurrent sequences have their maximum length; None: unknown."""
    sequence_length: int
    """Number of tokens of the longest row, prompt and completion together."""
    rows: int | None
    steps: int | None
    is_steps_bound: bool
    """Whether `steps` is an upper bound, because the number of rows or the lengths that fill a batch are unknown."""
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
    """Number of training rows, and the longest and mean length in tokens of their sequences; None: unknown."""

    number: int | None
    longest: int | None = None
    mean: float | None = None


def run(stage: Stage) -> Outcome:
    """Estimate the needs of a training stage, and return the estimate as `info["estimate"]` of the outcome.

    Raises:
        ModelError, DataError: config.json or the rows are missing or wrong.
    """
    stage.progress.phase("load")
    return Outcome(info={"estimate": asdict(estimate(stage.recipe, stage.model, stage.progress, stage.data))})


def estimate(recipe: Recipe, model: str, progress: Progress, prepared_folder: Path | None = None) -> Estimate:
    """Estimate the needs of one training stage.

    Args:
        recipe: the recipe of the stage.
        model: folder or Hub id; only its config.json is read.
        progress: receives heartbeats during the trace.
        prepared_folder: data folder of a finished `prepare` stage; None: the rows of a local dataset are counted.

    Raises:
        ModelError, DataError: config.json or the rows are missing or wrong.
    """
    rows = _prepared_rows(recipe, prepared_folder) if prepared_folder else _RowStatistics(_count_rows(recipe))
    sequence_length = int(_row_length(recipe, rows.longest))
    max_steps = recipe.train.max_num_steps
    notes = []
    if rows.number is None:
        length_limit = f"at most max_num_steps = {max_steps} and what they read" if max_steps else "unknown"
        notes.append(f"steps and tokens: {length_limit}, because the rows are not on this machine yet")
    num_steps, num_tokens, is_steps_bound = _estimate_training_length(recipe, rows, prepared_folder)
    if is_steps_bound and rows.number is not None:
        notes.append(
            f"steps: at most max_num_steps = {max_steps}, because batches are filled by tokens, yet to be counted"
        )
    network, memory, trace_notes = _trace_memory(recipe, model, sequence_length, progress)
    rank_memory = sharded(memory, recipe)
    if recipe.train.activation_offload:
        notes.append("activations: as if they stayed, yet activation_offload moves them to host memory")
    notes += trace_notes
    kv_cache: int | None = 0
    if recipe.train.train_policy.has_rollouts:
        kv_cache = kv_cache_bytes(network.config, recipe, sequence_length)
        if kv_cache is None:
            notes.append(f"KV cache: unknown, because {network.config.model_type} has layers without keys and values")
    num_parameters = sum(p.numel() for p in network.parameters())
    num_trainable = sum(p.numel() for p in network.parameters() if p.requires_grad)
    return Estimate(
        parameters=num_parameters,
        trainable=num_trainable,
        memory=rank_memory,
        peak=rank_memory.total,
        engine_weights=_engine_weights(recipe, num_parameters),
        kv_cache=kv_cache,
        sequence_length=sequence_length,
        rows=rows.number,
        steps=num_steps,
        is_steps_bound=is_steps_bound,
        tokens=num_tokens,
        is_tokens_bound=rows.mean is None or recipe.train.train_policy.has_rollouts,
        disk=_checkpoint_bytes(recipe, memory, num_parameters, num_trainable, num_steps),
        machine=_describe_machine(recipe),
        notes=tuple(notes),
    )


def kv_cache_bytes(config: PretrainedConfig, recipe: Recipe, length: int) -> int | None:
    """Return the bytes of the KV cache for all sequences that an engine generates concurrently; None if a layer caches
    a state other than keys and values."""
    text_config, rollout = config.get_text_config(), recipe.rollout
    window = getattr(text_config, "sliding_window", None)
    default_layer_type = "sliding_attention" if window else "full_attention"
    layer_types = getattr(text_config, "layer_types", None) or [default_layer_type] * text_config.num_hidden_layers
    chunk = getattr(text_config, "attention_chunk_size", None)
    tokens_of = {"full_attention": length, "sliding_attention": window or length, "chunked_attention": chunk or length}
    if getattr(text_config, "kv_lora_rank", None) or not set(layer_types) <= set(tokens_of):
        return None
    num_heads = getattr(text_config, "num_key_value_heads", None) or text_config.num_attention_heads
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
    parallelism = rollout.parallelism
    num_groups = rollout.groups_in_flight if recipe.num_engines else rollout.batch_size
    num_prompts = min(num_groups, max(1, recipe.train.train_batch_per_replica // rollout.n_generation))
    num_completions = min(rollout.n_generation, rollout.n_generation_mini_batch or rollout.n_generation)
    num_cached_tokens = sum(min(length, tokens_of[layer_type]) for layer_type in layer_types)
    bytes_per_token = 2 * -(-num_heads // parallelism.tp_size) * head_dim * _itemsize(recipe.train.param_dtype)
    return num_cached_tokens * bytes_per_token * num_prompts * num_completions // parallelism.pp_size


def sharded(memory: Memory, recipe: Recipe) -> Memory:
    """Return the memory of one rank under FSDP, context, tensor and pipeline parallelism; `memory` is unsharded. State
    that `train.fsdp_offload` moves to host memory counts as 0. With pipeline parallelism, the result is for the first
    pipeline stage, which holds the activations of all micro-batches in flight."""
    mesh, mini_batch = recipe.policy.parallelism, recipe.train.train_policy.mini_batch
    in_flight = {"1F1B": mesh.pp_size, "Interleaved1F1B": 2 * mesh.pp_size - 1, "GPipe": mini_batch}
    rows = min(mini_batch, in_flight[mesh.pp_schedule] * mesh.pp_micro_batch_size) if mesh.pp_size > 1 else mini_batch
    num_ranks = prod((abs(mesh.dp_shard_size), mesh.cp_size, mesh.tp_size, mesh.pp_size))
    names = ("weights", "gradients", "optimizer", "reference", "average")
    shards = {each: 0 if recipe.train.fsdp_offload else -(-getattr(memory, each) // num_ranks) for each in names}
    activations, activation_divisor = memory.activations, mesh.cp_size * mesh.tp_size * mesh.pp_size * mini_batch
    return Memory(
        casts=None if memory.casts is None else -(-memory.casts // num_ranks),
        activations=None if activations is None else -(-activations * rows // activation_divisor),
        **shards,
    )


def _trace_memory(
    recipe: Recipe, model: str, length: int, progress: Progress
) -> tuple[PreTrainedModel, Memory, list[str]]:
    """Return the model with fake tensors, its memory before sharding, and notes about memory that is unknown."""
    train, policy = recipe.train, recipe.policy
    weight_names = () if train.train_policy.scores_rows_once else train.train_policy.named_weights
    with torch.device("meta"):  # meta tensors instead of fake tensors, to which PEFT cannot add adapters
        empty_model = model_without_weights(
            model,
            revision=policy.model_revision,
            dtype=getattr(torch, train.master_dtype),
            gradient_checkpointing=policy.model_gradient_checkpointing,
        )
        mark_trained_weights(empty_model, policy)
    notes: list[str] = []
    with FakeTensorMode():
        _use_fake_tensors(empty_model)
        try:
            # torchao's compiled 8-bit optimizers cannot be traced; their moments are counted below.
            full_precision = train.derive(optm_name=train.optm_name.removesuffix("8bit"))
            trainer = Trainer(CausalLM(empty_model, full_precision, InputProcessing(0)), full_precision, progress)
            for name in weight_names:
                trainer.named_weights.add(name)
            memory = step_memory(trainer, make_algorithm(recipe), full_precision, length)
        except Exception as error:
            # A model's code may fail on fake tensors; the estimate then lacks only the memory of activations.
            logger.info("the step cannot be traced", exc_info=True)
            notes.append(f"activations: unknown, because the model cannot be traced without data ({first_line(error)})")
            memory = untraced_memory(empty_model, len(weight_names))
    if train.optm_name.endswith("8bit"):
        memory = replace(memory, optimizer=eight_bit_moments(empty_model))
    if train.ema_enable:
        num_trained = sum(parameter.numel() for parameter in empty_model.parameters() if parameter.requires_grad)
        memory = replace(memory, average=num_trained * torch.float32.itemsize)
    return empty_model, memory, notes


def _use_fake_tensors(model: PreTrainedModel) -> None:
    """Replace a model's meta tensors by fake CPU tensors in place; tied parameters stay tied."""
    fake_tensors: dict[int, torch.Tensor] = {}
    for module in model.modules():
        registries: list[dict[str, Any]] = [module._parameters, module._buffers]
        for tensors, name in [(each, name) for each in registries for name in each]:
            tensor = tensors[name]
            if tensor is not None and id(tensor) not in fake_tensors:
                fake_tensor = torch.empty(tensor.shape, dtype=tensor.dtype)
                if isinstance(tensor, torch.nn.Parameter):
                    fake_tensor = torch.nn.Parameter(fake_tensor, tensor.requires_grad)
                fake_tensors[id(tensor)] = fake_tensor
            tensors[name] = fake_tensors.get(id(tensor))


def _prepared_rows(recipe: Recipe, folder: Path) -> _RowStatistics:
    statistics = json.loads((folder / "statistics.json").read_text(encoding="utf-8"))["train"]
    longest_row_length, sequences_per_row = statistics["length"]["max"], recipe.train.train_policy.sequences_per_row
    if sequences_per_row > 1:
        rows = row_kind(recipe.train.train_policy.rows).open(folder, TRAIN, recipe.policy)
        longest_row_length = int(rows.token_counts(is_packed=False).max()) // sequences_per_row
    return _RowStatistics(statistics["rows"], longest_row_length, statistics["length"]["mean"] / sequences_per_row)


def _count_rows(recipe: Recipe) -> int | None:
    """Return the number of training rows of a local dataset; None if it must be downloaded or does not exist yet."""
    counts = [_count_dataset_rows(recipe, key, each.dataset) for key, each in recipe.train.train_policy.sources.items()]
    return None if None in counts else sum(filter(None, counts))


def _count_dataset_rows(recipe: Recipe, key: str, dataset: RowsConfig) -> int | None:
    if annotation_path := media_settings(recipe).annotation_path:
        dataset = dataset.derive(name=annotation_path, split=("train",))
    if not (generator_of(dataset.name) or (dataset.name and os.path.exists(os.path.expanduser(dataset.name)))):
        return None
    rows = load_rows(dataset, key)
    if dataset.test_size is not None and not recipe.validation.dataset.name:
        assert recipe.train.seed is not None  # the schema replaces a missing seed by its default
        rows, _ = split_rows(rows, dataset.test_size, recipe.train.seed)
    return len(rows)


def _row_length(recipe: Recipe, tokens: float | None) -> float:
    """Return the length of a row in tokens, at most the model's maximum length. In RL, the maximum length of a
    completion is added to the prompt's `tokens`. If `tokens` is None, the result is the model's maximum length."""
    completion_length = recipe.rollout.max_response_length if recipe.train.train_policy.has_rollouts else 0
    max_length = recipe.policy.model_max_length
    return max_length if tokens is None else min(max_length, tokens + completion_length)


def _estimate_training_length(
    recipe: Recipe, rows: _RowStatistics, prepared_folder: Path | None
) -> tuple[int | None, int | None, bool]:
    """Return the number of train steps and of tokens of the whole training, and whether the number of steps is an upper
    bound."""
    train, policy = recipe.train, recipe.train.train_policy
    if policy.has_token_based_batches:
        return _balanced_training_length(recipe, prepared_folder)
    steps = train.max_num_steps if rows.number is None else total_steps(recipe, rows.number)
    tokens_per_step = train.train_batch_per_replica * policy.sequences_per_row * _row_length(recipe, rows.mean)
    return steps, None if steps is None else round(steps * tokens_per_step), rows.number is None


def _balanced_training_length(recipe: Recipe, prepared_folder: Path | None) -> tuple[int, int, bool]:
    """Return the same of a training whose batches are filled by tokens. The numbers equal those of the feed; without
    prepared rows they are the maximum that the token budget allows."""
    num_steps, policy = recipe.train.max_num_steps, recipe.train.train_policy
    assert num_steps is not None and isinstance(policy, SupervisedConfig)  # the schema requires max_num_steps here
    if prepared_folder is None:
        tokens_per_step = policy.load_balanced_batches_per_optimizer_step * micro_batch_tokens(recipe)
        return num_steps, num_steps * tokens_per_step, True
    rows = row_kind(policy.rows).open(prepared_folder, TRAIN, recipe.policy)
    lengths, plan = rows.token_counts(is_packed=True), plan_balanced_steps(rows, recipe)
    assert plan is not None
    indices = [i for step in range(plan.total_steps) for batch in plan.micro_batches(step) for i in batch]
    return plan.total_steps, int(lengths[indices].sum()), False


def _checkpoint_bytes(recipe: Recipe, memory: Memory, parameters: int, trainable: int, steps: int | None) -> int:
    """Return the bytes of the checkpoints that are kept, with optimizer state, and of the exported model. Every
    validated step counts as the best so far, of which a checkpoint is saved."""
    ckpt, validates = recipe.train.ckpt, recipe.validation.enable
    num_checkpoints = 1  # the checkpoint after the last step is always saved
    if ckpt.enable_checkpoint:
        steps_per_epoch = max(1, (steps or 0) // recipe.train.epoch)
        save_freq = max(0, ckpt.save_freq_in_epoch) * steps_per_epoch or ckpt.save_freq
        frequencies = (save_freq, *([recipe.validation.freq] if validates else []))
        num_saved = len({steps, *(n for frequency in frequencies for n in range(frequency, steps or 0, frequency))})
        max_kept = max(1, ckpt.max_keep) + validates  # the best checkpoint is kept in addition
        num_checkpoints = max_kept if steps is None else num_saved if ckpt.max_keep == -1 else min(num_saved, max_kept)
    weight_bytes = trainable * _itemsize(recipe.train.master_dtype)  # checkpoints do not have frozen parameters
    checkpoint_bytes = weight_bytes + memory.optimizer + memory.reference + memory.average
    return num_checkpoints * checkpoint_bytes + parameters * _itemsize(recipe.train.param_dtype)


def _describe_machine(recipe: Recipe) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        gpu_properties = torch.cuda.get_device_properties(device)
        name, memory = gpu_properties.name, gpu_properties.total_memory
    else:
        num_threads = torch.get_num_threads()
        name, memory = f"cpu, {num_threads} thread{'s' * (num_threads > 1)}", psutil.virtual_memory().total
    matmul_flops = measure_matmul_flops(device, getattr(torch, recipe.train.param_dtype))
    return {"device": name, "is_cpu": device.type == "cpu", "flops": matmul_flops, "memory": memory}


def _engine_weights(recipe: Recipe, parameters: int) -> int:
    """Return the bytes of the engine's copy of the weights; 0 for `hf` on one rank, which generates with the trainer's
    module."""
    backend, parallelism = recipe.rollout.backend, recipe.rollout.parallelism
    if not recipe.train.train_policy.has_rollouts:
        return 0
    if backend == FALLBACK_ENGINE and recipe.policy.parallelism.world_size > 1:
        return parameters * _itemsize(recipe.train.master_dtype)
    if backend != "vllm":
        return 0
    return parameters * _itemsize(recipe.train.param_dtype) // (parallelism.tp_size * parallelism.pp_size)


def _itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)
