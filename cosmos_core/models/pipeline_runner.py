"""Runner of micro-batches through the pipeline stages on this rank, with torch's schedules.

All ranks of a pipeline have the same samples, so they exchange only hidden states. These are sent in a tensor of fixed
size that a shorter micro-batch fills only partly, so that micro-batches need not be padded to the same length.

Shape legend: B rows, T tokens, P tokens of the longest micro-batch, H hidden size, N trained tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.functional import pad
from transformers import PreTrainedModel

from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.models.base import LossFn, MicroBatchRunner, OutputSpec
from cosmos_core.models.scorer import LOGPROBS_ONLY, LogprobScorer
from cosmos_core.models.sequential_runner import forward_context
from cosmos_core.parallel.mesh import Mesh
from cosmos_core.parallel.pipeline import extract_pipeline_stage, num_stages, stages_of_rank

_SCHEDULE_CLASSES = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe, "Interleaved1F1B": ScheduleInterleaved1F1B}


class StageModule(nn.Module):
    """Pipeline stage as a module; its inputs are the index of a micro-batch and the previous stage's output."""

    def __init__(
        self, model: PreTrainedModel, stage_index: int, is_last_stage: bool, config: TrainConfig, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.scorer = LogprobScorer(model)
        self.stage_index, self.is_last_stage = stage_index, is_last_stage
        self._train_config, self._logprob_dtype = config, dtype
        self.hidden_dtype = model.dtype
        """Dtype of the hidden states that pipeline stages exchange, stored because `model.dtype` changes while FSDP
        gathers weights."""
        self.batches: Sequence[Any] = ()
        """Micro-batches of the current call of `PipelineRunner.run`; empty outside of a call."""
        self.output_request, self.num_tokens = LOGPROBS_ONLY, 0
        """Outputs to compute for the current micro-batches, and number of tokens P of the longest micro-batch."""
        self.output_names: list[str] = []
        """Names of the outputs of the last pipeline stage, stored because torch's schedules pass only tensors."""

    @property
    def model(self) -> PreTrainedModel:
        """Return the model of this pipeline stage, in which placeholders replace the modules of other stages."""
        return self.scorer.model

    def probe_hidden_states(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the hidden states that this pipeline stage computes from token inputs."""
        return self.scorer.compute_hidden_states(inputs)

    def forward(self, *hidden_PH: Tensor, batch_index: Tensor) -> Any:
        """Return this pipeline stage's hidden states PH of a micro-batch or, if it is the last stage, the outputs of
        its `LogprobScorer`."""
        batch = self.batches[int(batch_index)]
        token_ids_shape = batch.inputs["input_ids"].shape
        model_inputs = dict(batch.inputs)
        if hidden_PH:
            model_inputs["inputs_embeds"] = hidden_PH[0][: token_ids_shape.numel()].view(*token_ids_shape, -1)
        with forward_context(self._train_config, batch.scored_index_N.device):
            if self.is_last_stage:
                outputs = self.scorer.score_batch(batch, self.output_request, self._logprob_dtype, model_inputs)
                self.output_names = list(outputs)
                return tuple(outputs.values())
            hidden_BTH = self.scorer.compute_hidden_states(model_inputs)
        return pad(hidden_BTH.flatten(0, 1), (0, 0, 0, self.num_tokens - token_ids_shape.numel())).to(self.hidden_dtype)


class PipelineRunner(MicroBatchRunner):
    """Runner of micro-batches through the pipeline stages of this rank."""

    def __init__(self, model: PreTrainedModel, config: TrainConfig, mesh: Mesh, dtype: torch.dtype) -> None:
        assert mesh.pp is not None
        self._model, self._parallelism = model, mesh.parallelism
        self._device = torch.device(mesh.dp.device_type)  # with `fsdp_offload`, `model.device` would be the CPU
        self._pipeline_group, self._num_stages = mesh.pp.get_group(), num_stages(model, mesh.parallelism)
        self.root_modules: list[StageModule] = [
            StageModule(extract_pipeline_stage(model, i, mesh.parallelism), i, i == self._num_stages - 1, config, dtype)
            for i in stages_of_rank(model, mesh.parallelism, mesh.pp.get_local_rank())
        ]

    def rows_per_micro_batch(self, max_rows: int) -> int:
        """Return the number of rows of each micro-batch: `max_rows`, but at most the setting `pp_micro_batch_size`."""
        return min(max_rows, self._parallelism.pp_micro_batch_size)

    def num_micro_batches(self, num_batches: int, max_rows: int) -> int:
        """Return `num_batches`, the number of micro-batches with samples, plus the number of empty ones that are added.
        They are run in passes of about `max_rows` rows, and the number of micro-batches in each pass must be divisible
        by the number of pipeline ranks, as torch's schedules require."""
        num_pipeline_passes = self._num_pipeline_passes(num_batches, max_rows)
        return num_pipeline_passes * self._round_up_to_ranks(-(-num_batches // num_pipeline_passes))

    def run(
        self, batch_builders: Sequence[Callable[[], Any]], loss_fn: LossFn, output_request: OutputSpec, max_rows: int
    ) -> None:
        """Run the micro-batches that `batch_builders` build through all pipeline stages, in passes of about `max_rows`
        rows. The last stage calls `loss_fn` for each micro-batch."""
        micro_batches = [build_batch() for build_batch in batch_builders]
        num_tokens = max(batch.inputs["input_ids"].numel() for batch in micro_batches)
        num_batches_per_pass = len(micro_batches) // self._num_pipeline_passes(len(micro_batches), max_rows)

        def compute_loss(stage_outputs: Any, batch_index: Tensor) -> Tensor | None:
            output_tensors = stage_outputs if isinstance(stage_outputs, tuple) else (stage_outputs,)
            outputs_by_name = dict(zip(self.root_modules[-1].output_names, output_tensors, strict=True))
            return loss_fn(micro_batches[int(batch_index)], outputs_by_name)

        for module in self.root_modules:
            module.batches, module.output_request, module.num_tokens = micro_batches, output_request, num_tokens
        # All passes use the same schedule, because the first step of a new schedule discards existing gradients.
        schedule = self._build_schedule(num_batches_per_pass, num_tokens, compute_loss)
        run_step = schedule.step if torch.is_grad_enabled() else schedule.eval
        for batch_indices in torch.arange(len(micro_batches)).split(num_batches_per_pass):
            run_step(batch_index=batch_indices, target=batch_indices, return_outputs=False)
        for stage_module in self.root_modules:
            stage_module.batches = ()

    def _num_pipeline_passes(self, num_batches: int, max_rows: int) -> int:
        return -(-num_batches // self._round_up_to_ranks(-(-max_rows // self.rows_per_micro_batch(max_rows))))

    def _round_up_to_ranks(self, num_batches: int) -> int:
        return num_batches + -num_batches % self._pipeline_group.size()

    def _build_schedule(
        self, num_batches: int, num_tokens: int, loss_fn: Callable[[Any, Tensor], Tensor | None]
    ) -> Any:
        hidden_dtype, hidden_size = self.root_modules[0].hidden_dtype, self._model.config.hidden_size
        meta_hidden_PH = torch.empty(num_tokens, hidden_size, dtype=hidden_dtype, device="meta", requires_grad=True)
        pipeline_stages: list[Any] = [
            PipelineStage(
                stage_module, stage_module.stage_index, self._num_stages, self._device, group=self._pipeline_group,
                input_args=(meta_hidden_PH,) if stage_module.stage_index else (),
                output_args=(meta_hidden_PH,) * (1 + stage_module.is_last_stage)
            )
            for stage_module in self.root_modules
        ]  # fmt: skip
        schedule_class: Any = _SCHEDULE_CLASSES[self._parallelism.pp_schedule]
        is_schedule_interleaved = schedule_class is ScheduleInterleaved1F1B
        schedule_stages: Any = pipeline_stages if is_schedule_interleaved else pipeline_stages[0]
        return schedule_class(schedule_stages, num_batches, loss_fn=loss_fn, scale_grads=False)
