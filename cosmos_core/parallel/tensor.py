"""Tensor parallelism by the plan that a transformers model carries: matrices split by columns, then by rows,
and experts dealt to the ranks.

The plan says which; what each entry does is torch's own styles here, because those of transformers sum the gradient of
a replicated norm once per micro-batch over all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import PreTrainedModel

from cosmos_core.errors import ModelError
from cosmos_core.parallel.expert import keep_own
from cosmos_core.parallel.fsdp import local
from cosmos_core.parallel.plan import check_features, check_heads, matches

_EXPERTS = "moe_tp_experts"
_PROBE_TOKENS = 8
_PROBE_TOLERANCE = 1e-2
"""Of the largest gradient: ranks round alike, and what is left out is a half or more."""


class _PartialGradient(ParallelStyle):
    """A replicated module that sees this rank's heads alone: its weights' gradients are summed over the ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        forward, group = module.forward, device_mesh.get_group()

        def with_summed_gradients(*args: Any, **kwargs: Any) -> Any:
            with _weights(module, lambda weight: _SummedBackward.apply(weight, group)):
                return forward(*args, **kwargs)

        module.forward = with_summed_gradients  # type: ignore[method-assign]
        return module


class _SomeExperts(ParallelStyle):
    """Experts of which each rank has some, whole: all ranks see every token, and the sum of what they say of it is
    replicated. The plan would split each expert's matrices, which are two in one; the memory is the same."""

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        forward, group = module.forward, device_mesh.get_group()
        count = module.num_experts
        first = count * device_mesh.get_local_rank()
        module._is_expert_parallel = True  # an index of `num_experts` is of an expert that is not here

        def of_these(hidden_NH: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
            is_other_NK = (chosen_NK < first) | (chosen_NK >= first + count)
            hidden_NH, weights_NK = (_SummedBackward.apply(each, group) for each in (hidden_NH, weights_NK))
            with _weights(module, local):  # kernels know no DTensor
                found_NH = forward(
                    hidden_NH,
                    (chosen_NK - first).masked_fill(is_other_NK, count),
                    weights_NK.masked_fill(is_other_NK, 0),
                )
            partial_NH = DTensor.from_local(found_NH, device_mesh, [Partial()], run_check=False)
            return partial_NH.redistribute(placements=[Replicate()]).to_local()

        module.forward = torch.compiler.disable(of_these)
        found: nn.Module = module
        return found


_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "replicated_with_grad_allreduce": _PartialGradient,
    _EXPERTS: _SomeExperts,
}


def apply_tp(model: PreTrainedModel, mesh: DeviceMesh, *, with_experts: bool) -> None:
    """Give each rank its shard of every matrix in the model's plan; a head and an embedding that are tied stay whole.

    `with_experts`: also some of the experts; False: another axis shares them.

    Raises:
        ModelError: the model has no plan, one with a style that is not here, or sizes that do not divide.
    """
    plan = {pattern: style for pattern, style in (model.tp_plan or {}).items() if with_experts or style != _EXPERTS}
    where = f"policy.parallelism.tp_size = {mesh.size()}: {type(model).__name__}"
    if not plan:
        raise ModelError(f"{where} has no plan; set it to 1")
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    check_heads(model, "tp_size", mesh.size())
    tied = {head, embedding} if head is not None and head.weight is embedding.weight else set()
    for name, module in list(model.named_modules()):
        style = next((plan[pattern] for pattern in plan if matches(pattern, name)), None)
        if style is None or module in tied or next(module.parameters(), None) is None:  # of another pipeline stage
            continue
        if style not in _STYLES or (style == _EXPERTS and not hasattr(module, "_is_expert_parallel")):
            raise ModelError(
                f"policy.parallelism.tp_size = {mesh.size()}: {name} of {type(model).__name__} is split by "
                f"{style!r}, which this version cannot; set it to 1 and raise dp_shard_size"
            )
        if style == _EXPERTS:
            keep_own(module, mesh, where)
        for inner in _split_modules(module, style):
            check_features(model, name, inner, style, mesh.size())
            parallelize_module(inner, mesh, _STYLES[style]())


def prove_split(model: PreTrainedModel, roots: Sequence[Any], mesh: DeviceMesh) -> None:
    """Run a few tokens forward and backward: a model may do more than its plan says.

    What the plan does not split, each rank has whole, with the same gradient; where it was computed of this rank's
    heads or features alone, the gradients differ.

    Raises:
        ModelError: they do, or the model fails.
    """
    device = torch.device(mesh.device_type)
    ids = torch.arange(1, _PROBE_TOKENS + 1, device=device).unsqueeze(0)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": ids - 1}
    where = f"policy.parallelism.tp_size = {mesh.size()}: {type(model).__name__} does more than its plan says"
    was_training = model.training
    model.eval()
    try:
        for root in roots:
            hidden_BTH = root.probe(inputs)
            if hidden_BTH.requires_grad:
                waves_BTH = torch.arange(hidden_BTH.numel(), device=device).view_as(hidden_BTH).sin()
                (hidden_BTH * waves_BTH).sum().backward()
    except (torch.OutOfMemoryError, dist.DistError):
        raise  # not the model's doing
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise ModelError(f"{where} ({' '.join(str(error).split())[:200]}); set it to 1") from error
    finally:
        model.train(was_training)
    wrong = [name for name, parameter in model.named_parameters() if _differs(parameter, mesh)]
    model.zero_grad(set_to_none=True)
    if wrong:
        raise ModelError(
            f"{where}: ranks disagree about the gradient of {wrong[0]}; set it to 1 and raise dp_shard_size"
        )


def _differs(parameter: nn.Parameter, mesh: DeviceMesh) -> bool:
    """Return whether the ranks of `mesh` have different gradients for a weight that each of them has whole."""
    gradient = parameter.grad
    if gradient is None:
        return False
    axes = set(gradient.device_mesh.mesh_dim_names or ()) if isinstance(gradient, DTensor) else set()
    if axes & set(mesh.mesh_dim_names or ()):
        return False
    gradient = local(gradient)
    if not gradient.numel():
        return False
    ends = torch.stack([gradient.amax(), -gradient.amin()])
    low, high = gradient.clone(), gradient.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, mesh.get_group())
    dist.all_reduce(high, dist.ReduceOp.MAX, mesh.get_group())
    dist.all_reduce(ends, dist.ReduceOp.MAX, mesh.get_group())
    return bool((high - low).amax() > _PROBE_TOLERANCE * ends.abs().amax())


@contextmanager
def _weights(module: Any, change: Callable[[nn.Parameter], Tensor]) -> Iterator[None]:
    """Replace a module's own weights by what `change` makes of them, for a forward pass."""
    own = dict(module.named_parameters(recurse=False))
    try:
        module._parameters.update({name: change(parameter) for name, parameter in own.items()})
        yield
    finally:
        module._parameters.update(own)


def _split_modules(module: nn.Module, style: str) -> list[nn.Module]:
    """Return what is split of a module: with an adapter the base, and the factor with the dimension that is split."""
    if isinstance(module, LoraLayer):
        return [module.base_layer, *(module.lora_A if style.startswith("rowwise") else module.lora_B).values()]
    if isinstance(module, ModulesToSaveWrapper):
        return [module.original_module, *module.modules_to_save.values()]
    return [module]


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
