"""The stages of a pipeline that are on this rank, and torch's schedules over them.

All ranks of a pipeline have the same samples, so only hidden states travel: as one tensor of fixed size, filled as far
as a micro-batch reaches. Micro-batches of different lengths need no padding against each other.

Shape legend: B rows, T tokens, P tokens of the longest micro-batch, H hidden size, N learned tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.functional import pad
from transformers import PreTrainedModel

from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.models.base import Consume
from cosmos_core.models.scorer import Scorer, Wants
from cosmos_core.models.sequential import forward_context
from cosmos_core.parallel.fsdp import reshard
from cosmos_core.parallel.mesh import Mesh
from cosmos_core.parallel.pipeline import num_stages, own_stages, stage_of

_SINGLE = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}


class _Given(NamedTuple):
    """What a pipeline stage knows of the samples."""

    batches: Sequence[Any]
    wants: Wants
    num_tokens: int
    """P."""


class StageModule(nn.Module):
    """A pipeline stage: called with the number of a micro-batch and the hidden states of the pipeline stage before."""

    def __init__(
        self, model: PreTrainedModel, number: int, is_last: bool, train: TrainConfig, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.scorer = Scorer(model)
        self.number, self.is_last, self._train, self._dtype = number, is_last, train, dtype
        self.hidden_dtype = model.dtype
        """Of what travels; where FSDP has gathered weights the model says theirs."""
        self.given: _Given | None = None
        self.names: list[str] = []
        """Of the outputs of the last stage: torch's schedules pass on tensors alone."""

    @property
    def model(self) -> PreTrainedModel:
        """Return the whole model, in which what belongs to other stages passes its input on."""
        return self.scorer.model

    def probe(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return `hidden` of this stage by itself."""
        return self.scorer.hidden(inputs)

    def forward(self, *hidden_PH: Tensor, number: Tensor) -> Any:
        """Hidden states PH; of the last stage what the scorer is asked for, in its order."""
        assert self.given is not None
        batch = self.given.batches[int(number)]
        shape = batch.inputs["input_ids"].shape
        inputs = dict(batch.inputs)
        if hidden_PH:
            inputs["inputs_embeds"] = hidden_PH[0][: shape.numel()].view(*shape, -1)
        with forward_context(self._train, batch.chosen_N.device):
            if self.is_last:
                found = self.scorer(
                    inputs, batch.chosen_N, wants=self.given.wants, dtype=self._dtype, expected_N=batch.expected_N,
                    top_ids_NK=batch.top_ids_NK,
                )  # fmt: skip
                self.names = list(found)
                return tuple(found.values())
            hidden_BTH = self.scorer.hidden(inputs)
        missing = self.given.num_tokens - shape.numel()
        return pad(hidden_BTH.flatten(0, 1), (0, 0, 0, missing)).to(self.hidden_dtype)


class Pipelined:
    """A `models.base.Runner` over the pipeline."""

    def __init__(self, model: PreTrainedModel, train: TrainConfig, mesh: Mesh, dtype: torch.dtype) -> None:
        assert mesh.pipeline is not None
        self._model, self._sizes = model, mesh.sizes
        self._group, self._total = mesh.pipeline.get_group(), num_stages(model, mesh.sizes)
        self.roots = [
            StageModule(stage_of(model, number, mesh.sizes), number, number == self._total - 1, train, dtype)
            for number in own_stages(model, mesh.sizes, mesh.pipeline.get_local_rank())
        ]

    def rows(self, size: int) -> int:
        """Return `pp_micro_batch_size`, or less."""
        return min(size, self._sizes.pp_micro_batch_size)

    def count(self, num_batches: int, size: int) -> int:
        """Return a number that makes passes of `size` rows, each of a number of micro-batches that the number of ranks
        divides, as torch's schedules want it."""
        num_passes = self._num_passes(num_batches, size)
        return num_passes * self._whole_rounds(-(-num_batches // num_passes))

    def run(self, batches: Sequence[Callable[[], Any]], consume: Consume, wants: Wants, size: int) -> None:
        """See `Runner.run`: `size` rows at a time."""
        made = [make() for make in batches]
        num_tokens = max(batch.inputs["input_ids"].numel() for batch in made)
        each = len(made) // self._num_passes(len(made), size)

        def loss(found: Any, number: Tensor) -> Tensor | None:
            values = found if isinstance(found, tuple) else (found,)
            return consume(made[int(number)], dict(zip(self.roots[-1].names, values, strict=True)))

        for stage in self.roots:
            stage.given = _Given(made, wants, num_tokens)
        # One for all passes: at its first step a schedule drops the gradients that there are.
        schedule = self._schedule(each, num_tokens, loss)
        step = schedule.step if torch.is_grad_enabled() else schedule.eval
        for numbers in torch.arange(len(made)).split(each):
            step(number=numbers, target=numbers, return_outputs=False)
        for stage in self.roots:
            stage.given = None

    def train(self, mode: bool) -> None:
        """See `Runner.train`."""
        for stage in self.roots:
            stage.train(mode)

    def reshard(self) -> None:
        """See `Runner.reshard`."""
        for stage in self.roots:
            reshard(stage)

    def _num_passes(self, num_batches: int, size: int) -> int:
        return -(-num_batches // self._whole_rounds(-(-size // self.rows(size))))

    def _whole_rounds(self, num_batches: int) -> int:
        """The next multiple of the number of ranks."""
        return num_batches + -num_batches % self._group.size()

    def _schedule(self, num_batches: int, num_tokens: int, loss: Callable[[Any, Tensor], Tensor | None]) -> Any:
        """Torch's, for micro-batches of up to that many tokens."""
        config, model = self._model.config, self._model
        dtype = self.roots[0].hidden_dtype
        like_PH = torch.empty(num_tokens, config.hidden_size, dtype=dtype, device="meta", requires_grad=True)
        stages: list[Any] = [
            PipelineStage(
                stage, stage.number, self._total, model.device, group=self._group,
                input_args=(like_PH,) if stage.number else (), output_args=(like_PH,) * (1 + stage.is_last),
            )
            for stage in self.roots
        ]  # fmt: skip
        options: dict[str, Any] = {"n_microbatches": num_batches, "loss_fn": loss, "scale_grads": False}
        if self._sizes.pp_schedule == "Interleaved1F1B":
            return ScheduleInterleaved1F1B(stages, **options)
        return _SINGLE[self._sizes.pp_schedule](stages[0], **options)
