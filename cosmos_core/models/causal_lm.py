"""Model adapter of causal language models and vision-language models, which computes log-probabilities of tokens.

Shapes: B samples, T tokens, S = T - 1 predicted tokens, N trained tokens of a micro-batch.
"""

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.data.batch import collate_rows, collate_shared_prompts, to_device
from cosmos_core.data.sample import Sample
from cosmos_core.errors import ModelError
from cosmos_core.models.balance import LOAD_BALANCING_OUTPUT, LoadBalancingSettings, make_sequence_index_inputs
from cosmos_core.models.base import Batch, ExportResult, MicroBatch, MicroBatchRunner, ModelAdapter
from cosmos_core.models.export import export_model
from cosmos_core.models.kernels import remove_fp8, unpatch_liger
from cosmos_core.models.length_rounding import kernel_padded_length
from cosmos_core.models.lora import ADAPTER_FOLDER, has_lora_adapter
from cosmos_core.models.micro_batches import (
    count_tokens_sharing_prompt,
    group_by_prompt,
    merge_prompts,
    saves_enough_tokens,
    shared_prompt_length,
    split_by_length,
)
from cosmos_core.models.new_interpreter import prestart_interpreter
from cosmos_core.models.packing import PACKED_ATTENTION, can_merge_prompts, enable_packing
from cosmos_core.models.pipeline_runner import PipelineRunner
from cosmos_core.models.processor import ImageReader
from cosmos_core.models.scorer import LOGPROBS_ONLY, LogprobScorer, RequestedOutputs
from cosmos_core.models.sequential_runner import SequentialRunner, forward_context
from cosmos_core.models.sharded_load import load_shards
from cosmos_core.models.verify_export import verify_export
from cosmos_core.parallel.context import apply_cp, gather_scored_tokens, shard_rows
from cosmos_core.parallel.expert import apply_ep
from cosmos_core.parallel.fsdp import apply_fsdp, copy_without_weights, gathers_in_param_dtype
from cosmos_core.parallel.mesh import Mesh
from cosmos_core.parallel.pipeline import apply_pp
from cosmos_core.parallel.tensor import apply_tp, check_tp_plan

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TokenBatch(Batch):
    samples: Sequence[Sample]
    scored_index_N: Tensor
    """Indices of the trained tokens whose log-probabilities this rank computes, as `LogprobScorer.forward` expects."""
    is_local_N: Tensor | None
    """Mask over all trained tokens: True for tokens whose log-probabilities this rank computes; None: all tokens."""
    trained_positions: Sequence[np.ndarray]
    """For each sample, the indices of its trained tokens among its S predicted tokens."""
    loss_gradient_N: Tensor | None = None
    """Derivative of the loss with respect to the log-probability of each trained token on this rank; None: not known
    before the forward pass."""
    top_ids_NK: Tensor | None = None
    """Token ids whose log-probabilities are computed at each trained token on this rank; None: the most likely ids."""


class InputProcessing(NamedTuple):
    """Tokenizer, image reader and processor files of a model, which convert text and images to model inputs."""

    pad_id: int
    """Token id for padding. Any id is valid, because masks are built from positions."""
    image_reader: ImageReader | None = None
    """Converter of the images of samples to model inputs; None: samples have no images."""
    tokenizer: PreTrainedTokenizerBase | None = None
    """Tokenizer for rollout engines and exports; None: the model has no rollout engine and is not exported."""
    processor_files: Mapping[str, bytes] = {}
    """Content of the processor files that exports include, by path in the model's folder."""
    num_token_ids: int | None = None
    """Number of token ids of the tokenizer, which the output head can exceed; None: each of its rows is a token id."""


def make_input_processing(
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    image_reader: ImageReader | None = None,
    processor_files: Mapping[str, bytes] = {},
) -> InputProcessing:
    """Return the `InputProcessing` of a model. The tokenizer must have a pad token; if the model has no embedding for
    it, the token with id 0 is used for padding."""
    pad_id, num_token_ids = int(tokenizer.pad_token_id), int(max(tokenizer.get_vocab().values())) + 1
    pad_id = pad_id if pad_id < model.config.get_text_config().vocab_size else 0
    return InputProcessing(pad_id, image_reader, tokenizer, processor_files, num_token_ids)


class CausalLM(ModelAdapter):
    """Model adapter of a causal language model, which is sharded over the device mesh."""

    default_output_request: RequestedOutputs = LOGPROBS_ONLY

    def __init__(
        self,
        model: PreTrainedModel,
        train_config: TrainConfig,
        input_processing: InputProcessing,
        mesh: Mesh | None = None,
        load_balancing: LoadBalancingSettings | None = None,
    ) -> None:
        """Parallelise the model over the mesh and prepare it for training. `load_balancing` has the settings of the
        load-balancing loss of experts, which is added to the loss of each optimizer step; None: no such loss."""
        self.model, self.mesh, self.has_auxiliary_loss = model, mesh, load_balancing is not None
        self.device = torch.device(mesh.dp.device_type) if mesh else model.device
        self.meta_copy = copy_without_weights(model) if mesh else None
        self.tokenizer, self.image_reader = input_processing.tokenizer, input_processing.image_reader
        self._train_config, self._logprob_dtype = train_config, getattr(torch, train_config.logprob_dtype)
        self._pad_id, self._processor_files = input_processing.pad_id, input_processing.processor_files
        is_packing_enabled = train_config.sequence_packing
        if is_packing_enabled is None:
            is_packing_enabled = self.device.type == "cuda" or not train_config.compile
        self._merges_prompts = False
        self._packs_rows = (is_packing_enabled and self.image_reader is None) or bool(mesh and mesh.cp)
        if train_config.sequence_packing and self.image_reader is not None:
            logger.warning("train.sequence_packing: rows are padded, because some show images")
        self.runner = self._parallelize()
        for scorer in (module for root_module in self.runner.root_modules for module in root_module.modules()):
            if isinstance(scorer, LogprobScorer):
                scorer.num_token_ids, scorer.load_balancing = input_processing.num_token_ids, load_balancing

    def export(self, export_folder: Path) -> ExportResult | None:
        model = self.gather_whole_model()
        if model is None:
            return None
        # The model moves to the CPU, because the verification needs two copies of it, which may not fit on a GPU.
        nn.Module.to(unpatch_liger(remove_fp8(model)), "cpu")
        export_model(model, self.tokenizer, export_folder, dtype=None, extra_files=self._processor_files)
        passed_checks = verify_export(model, export_folder, dtype=None, tokenizer=self.tokenizer)
        return ExportResult(tuple(passed_checks), ADAPTER_FOLDER if has_lora_adapter(model) else "")

    def prestart_verification(self) -> None:
        prestart_interpreter(verify_export.__module__)

    def num_tokens(self, sample: Sample) -> int:
        return len(sample.input_ids)

    def batching_key(self, sample: Sample) -> int:
        return self.image_reader.batching_key(sample) if self.image_reader else 0

    def assigned_batch_id(self, sample: Sample) -> Hashable | None:
        return sample.micro_batch

    def arrange_micro_batches(
        self, samples: Sequence[Sample], sorted_indices: Sequence[int], max_rows: int, num_ranks: int
    ) -> list[list[int]] | None:
        """Return micro-batches, as lists of indices in `samples`. If packed rows can share prompts, a micro-batch has
        completions of the same prompt, otherwise padded rows of similar length. Return None if micro-batches of equal
        numbers of rows need hardly more computation.

        Samples without rollout log-probabilities (SFT) are not rearranged, because another order of summation would
        round gradients differently.
        """
        if any(samples[i].rollout_logprobs is None for i in sorted_indices):
            return None
        if self._merges_prompts:
            return merge_prompts(samples, sorted_indices, max_rows, num_ranks)
        if self._packs_rows or self.device.type != "cpu" or (self.mesh and self.mesh.pp):
            return None
        return split_by_length(samples, sorted_indices, max_rows, num_ranks, self._padded_row_length)

    def collate(self, samples: Sequence[Sample], indices: Sequence[int], padding_sample: Sample) -> TokenBatch:
        collated_samples, device, pad_id = samples, self.device, self._pad_id
        if not samples:
            loss_mask = np.zeros_like(padding_sample.loss_mask)
            top_ids = None if padding_sample.top_ids is None else padding_sample.top_ids[:0]
            collated_samples = [replace(padding_sample, loss_mask=loss_mask, rollout_logprobs=None, top_ids=top_ids)]
        token_ids = [sample.input_ids for sample in collated_samples]
        has_rollout_logprobs = all(sample.rollout_logprobs is not None for sample in samples)
        prompt_groups = group_by_prompt(collated_samples) if self._merges_prompts and has_rollout_logprobs else []
        samples_by_prompt = [[collated_samples[i] for i in group] for group in prompt_groups]
        num_tokens_if_shared = sum(map(count_tokens_sharing_prompt, samples_by_prompt))
        if prompt_groups and saves_enough_tokens(sum(map(len, token_ids)), num_tokens_if_shared):
            prompt_lengths = [
                shared_prompt_length(collated_samples[group[0]]) * (len(group) > 1) for group in prompt_groups
            ]
            shared_prompt_groups = list(zip(prompt_groups, prompt_lengths, strict=True))
            rows = collate_shared_prompts(token_ids, shared_prompt_groups, pad_id, self._padded_row_length)
        else:
            rows = collate_rows(token_ids, pad_id, is_packed=self._packs_rows, padded_length_fn=self._padded_row_length)
        trained_positions = [np.flatnonzero(sample.loss_mask[1:]) for sample in collated_samples]
        scored_indices_by_row = [np.add(*pair) for pair in zip(rows.row_start_indices, trained_positions, strict=True)]
        inputs = to_device(rows.inputs, device)
        if not (self._packs_rows or (self.mesh and self.mesh.pp)):
            # Let the model compute positions, because those of some model families are 2-D or begin above 0.
            del inputs["position_ids"]
        if collated_samples[0].images:
            for name, tensor in self.image_reader.make_image_inputs(collated_samples, rows.inputs["input_ids"]).items():
                inputs[name] = tensor.to(device, self.model.dtype if tensor.is_floating_point() else None)
        if self.has_auxiliary_loss:
            inputs |= to_device(make_sequence_index_inputs(rows.inputs, list(map(len, token_ids))), device)
        scored_index_N = torch.from_numpy(np.concatenate(scored_indices_by_row)).to(device)
        is_local_N: Tensor | None = None
        top_id_arrays = [sample.top_ids for sample in collated_samples if sample.top_ids is not None]
        assert len(top_id_arrays) in {0, len(collated_samples)}, "all samples of a micro-batch name ids, or none does"
        top_ids_NK = torch.from_numpy(np.concatenate(top_id_arrays)).to(device) if top_id_arrays else None
        if self.mesh and self.mesh.cp:
            inputs, scored_index_N, is_local_N = shard_rows(inputs, scored_index_N, self.mesh.cp)
            top_ids_NK = None if top_ids_NK is None else top_ids_NK[is_local_N]
        return TokenBatch(
            samples, indices, inputs, scored_index_N, is_local_N, trained_positions, top_ids_NK=top_ids_NK
        )

    def gather_outputs(self, batch: TokenBatch, outputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs of all trained tokens, of which each context-parallel rank computes only some."""
        if batch.is_local_N is None:
            return outputs
        assert self.mesh and self.mesh.cp
        return {name: gather_scored_tokens(values, batch.is_local_N, self.mesh.cp) for name, values in outputs.items()}

    def make_micro_batch(self, batch: TokenBatch, outputs: dict[str, Tensor]) -> MicroBatch:
        """Convert outputs of trained tokens to a `MicroBatch` with tensors of shape BS, which are 0 for other
        tokens."""
        outputs = dict(outputs)
        load_balancing_loss = outputs.pop(LOAD_BALANCING_OUTPUT, None)
        sample_indices_N = np.repeat(np.arange(len(batch.samples)), list(map(len, batch.trained_positions)))
        grid_index_arrays = (sample_indices_N, np.concatenate(batch.trained_positions))
        grid_index_tensors = tuple(torch.from_numpy(indices_N).to(self.device) for indices_N in grid_index_arrays)
        padded_shape = (len(batch.samples), max(len(sample.input_ids) for sample in batch.samples) - 1)

        def scatter_to_rows(values_N: Tensor) -> Tensor:
            return values_N.new_zeros((*padded_shape, *values_N.shape[1:])).index_put(grid_index_tensors, values_N)

        mask_BS = scatter_to_rows(torch.ones_like(outputs["logprobs"], requires_grad=False)).bool()
        padded_outputs = {name: scatter_to_rows(values) for name, values in outputs.items()}
        return MicroBatch(batch.samples, batch.indices, padded_outputs, mask_BS, load_balancing_loss)

    def split_outputs(self, micro_batch: MicroBatch) -> list[dict[str, Tensor]]:
        return [
            {name: output[row_index, : len(sample.input_ids) - 1] for name, output in micro_batch.outputs.items()}
            for row_index, sample in enumerate(micro_batch.samples)
        ]

    def attach_loss_derivative(self, batch: TokenBatch, loss: Callable[[MicroBatch], Tensor]) -> TokenBatch:
        num_trained_tokens = sum(map(len, batch.trained_positions))
        logprobs_N = torch.zeros(num_trained_tokens, dtype=self._logprob_dtype, device=self.device, requires_grad=True)
        (gradient_N,) = torch.autograd.grad(loss(self.make_micro_batch(batch, {"logprobs": logprobs_N})), logprobs_N)
        return replace(batch, loss_gradient_N=gradient_N if batch.is_local_N is None else gradient_N[batch.is_local_N])

    def check_parallel_plan(self) -> None:
        """With tensor parallelism, raise ModelError if the model's plan for it does not cover all operations."""
        if self.mesh and self.mesh.tp:
            with forward_context(self._train_config, self.device) if self._should_autocast_blocks else nullcontext():
                check_tp_plan(self.model, self.runner.root_modules, self.mesh.tp)
            self.runner.reshard()

    def _parallelize(self) -> MicroBatchRunner:
        mesh, model = self.mesh, self.model
        if mesh and mesh.pp:
            apply_pp(model, mesh.parallelism, mesh.pp.get_local_rank())
        if mesh and mesh.tp:
            apply_tp(model, mesh.tp, shards_experts=mesh.ep is None)
        if mesh and mesh.ep:
            apply_ep(model, mesh, self._train_config)
        if mesh and mesh.pp:
            runner: MicroBatchRunner = PipelineRunner(model, self._train_config, mesh, self._logprob_dtype)
        else:
            scorer = LogprobScorer(model)
            score_batch = partial(scorer.score_batch, dtype=self._logprob_dtype)
            runner = SequentialRunner(scorer, score_batch, self._train_config, self.device)
        if mesh:
            for root_module in runner.root_modules:
                stage_module: Any = root_module
                apply_fsdp(root_module, stage_module.model, mesh, self._train_config)
            load_shards(model)
            for parameter in model.parameters() if mesh.fsdp is None else ():
                if parameter.device.type != self.device.type:  # move weights that `init_on_meta` loaded on the CPU
                    parameter.data = parameter.data.to(self.device)
        if self._packs_rows:
            self._enable_packed_rows(runner)
        if mesh and mesh.cp:
            apply_cp(model, mesh.cp, PACKED_ATTENTION, mesh.parallelism.tp_size)
        return runner

    def _enable_packed_rows(self, runner: MicroBatchRunner) -> None:
        """Enable packed rows in `runner`'s model; if the model does not support them, use padded rows or, with context
        parallelism, which needs packed rows, raise ModelError."""
        mesh = self.mesh
        compute_dtype = getattr(torch, self._train_config.param_dtype)
        fsdp_roots = runner.root_modules if mesh else ()
        unsupported_reason = enable_packing(
            self.model, fsdp_roots, compute_dtype, gathers_in_compute_dtype=self._should_autocast_blocks
        )
        runner.reshard()
        if unsupported_reason and mesh and mesh.cp:
            raise ModelError(f"policy.parallelism.cp_size = {mesh.cp.size()}: {unsupported_reason}; set it to 1")
        if unsupported_reason:
            log_level = logging.WARNING if self._train_config.sequence_packing else logging.INFO
            logger.log(log_level, "train.sequence_packing: rows are padded, because %s", unsupported_reason)
            self._packs_rows = False
            return
        has_model_parallelism = mesh and (mesh.cp or mesh.pp or mesh.tp or mesh.ep)
        if not (has_model_parallelism or self.has_auxiliary_loss or self._train_config.compile):
            forward_dtype = compute_dtype if self._should_autocast_blocks else self.model.dtype
            self._merges_prompts = can_merge_prompts(self.model, fsdp_roots, forward_dtype)
            runner.reshard()

    @property
    def _should_autocast_blocks(self) -> bool:
        return bool(self.mesh and self.mesh.fsdp) and gathers_in_param_dtype(self._train_config)

    def _padded_row_length(self, length: int) -> int:
        length = kernel_padded_length(length, self.device, getattr(torch, self._train_config.param_dtype))
        return length + -length % (self.mesh.cp.size() if self.mesh and self.mesh.cp else 1)
