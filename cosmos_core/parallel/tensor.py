"""Tensor parallelism by the plan that a transformers model carries: matrices split by columns, then by rows.

The plan says which; what each entry does is torch's own styles here, because those of transformers sum the gradient of
a replicated norm once per micro-batch over all of them. Fused and expert matrices are not split.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from cosmos_core.errors import ModelError


class _PartialGradient(ParallelStyle):
    """A replicated module that sees this rank's heads alone: its weights' gradients are summed over the ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        forward, group = module.forward, device_mesh.get_group()

        def with_summed_gradients(*args: Any, **kwargs: Any) -> Any:
            own = dict(module.named_parameters(recurse=False))
            try:
                for name, parameter in own.items():
                    module._parameters[name] = _SummedBackward.apply(parameter, group)
                return forward(*args, **kwargs)
            finally:
                module._parameters.update(own)

        module.forward = with_summed_gradients  # type: ignore[method-assign]
        return module


_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "replicated_with_grad_allreduce": _PartialGradient,
}


def split(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Give each rank its part of every matrix in the model's plan; a head and an embedding that are tied stay whole.

    Raises:
        ModelError: the model has no plan, or one with a style that is not here.
    """
    plan = dict(model.tp_plan or {})
    if not plan:
        raise ModelError(f"policy.parallelism.tp_size = {mesh.size()}: {type(model).__name__} has no plan; set it to 1")
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = {head, embedding} if head is not None and head.weight is embedding.weight else set()
    for name, module in list(model.named_modules()):
        style = next((plan[pattern] for pattern in plan if matches(pattern, name)), None)
        if style is None or module in tied or next(module.parameters(), None) is None:  # of another pipeline stage
            continue
        if style not in _STYLES:
            raise ModelError(
                f"policy.parallelism.tp_size = {mesh.size()}: {name} of {type(model).__name__} is split by "
                f"{style!r}, which this version cannot; set it to 1 and raise dp_shard_size"
            )
        for part in _parts(module, style):
            parallelize_module(part, mesh, _STYLES[style]())


def _parts(module: nn.Module, style: str) -> list[nn.Module]:
    """What is split of a module: with an adapter the base and that factor which has the dimension that is split."""
    if isinstance(module, LoraLayer):
        return [module.base_layer, *(module.lora_A if style == "rowwise" else module.lora_B).values()]
    if isinstance(module, ModulesToSaveWrapper):
        return [module.original_module, *module.modules_to_save.values()]
    return [module]


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern of a plan means the module of that name."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name) == pattern


class _SummedBackward(torch.autograd.Function):
    """The tensor itself; its gradient is the sum over the ranks of a group."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
