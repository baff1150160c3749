"""Tensor parallelism by the plan of a transformers model: matrices are split by columns, then by rows, and experts are
distributed over ranks.

The plan is implemented with torch's parallel styles, because those of transformers all-reduce the accumulated gradient
of a replicated norm after each micro-batch, so that earlier micro-batches count several times.
"""

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
from cosmos_core.parallel.expert import keep_local_experts
from cosmos_core.parallel.fsdp import local_shard
from cosmos_core.parallel.plan import check_expert_split, check_head_split, matches_pattern
from cosmos_core.transient import is_transient

_MOE_TP_STYLE = "moe_tp_experts"
_NUM_PROBE_TOKENS = 8
_GRADIENT_TOLERANCE = 1e-2
"""Tolerance of gradient differences between ranks in `check_tp_plan`, as a fraction of the largest gradient. Rounding
errors are far smaller, and a gradient that lacks the contributions of other ranks differs far more."""


class _AllReduceGradientStyle(ParallelStyle):
    """Parallel style of a module with the same weights on all ranks, such as a norm of queries, which processes only
    the attention heads of its rank. The gradients of its weights are therefore summed over ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        original_forward, group = module.forward, device_mesh.get_group()

        def forward_with_summed_gradients(*args: Any, **kwargs: Any) -> Any:
            with _replace_weights(module, lambda weight: _AllReduceGradient.apply(weight, group)):
                return original_forward(*args, **kwargs)

        module.forward = forward_with_summed_gradients  # type: ignore[method-assign]
        return module


class _ExpertShardingStyle(ParallelStyle):
    """Parallel style in which each rank holds some whole experts of a layer and processes all tokens with them; outputs
    are summed. The style of transformers would split gate and up projection, which are stored as one matrix."""

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        original_forward, group = module.forward, device_mesh.get_group()
        num_local_experts = module.num_experts
        first_expert_index = num_local_experts * device_mesh.get_local_rank()
        # Let transformers ignore the expert id `num_local_experts`, which replaces the ids of experts on other ranks.
        module._is_expert_parallel = True

        def forward_local_experts(hidden_NH: Tensor, top_k_ids_NK: Tensor, top_k_weights_NK: Tensor) -> Tensor:
            local_ids_NK = top_k_ids_NK - first_expert_index
            is_on_other_rank = (local_ids_NK < 0) | (local_ids_NK >= num_local_experts)
            hidden_NH, top_k_weights_NK = (_AllReduceGradient.apply(t, group) for t in (hidden_NH, top_k_weights_NK))
            with _replace_weights(module, local_shard):
                # Compute with the local tensors of the weights, because expert kernels do not support DTensor.
                outputs_NH = original_forward(
                    hidden_NH,
                    local_ids_NK.masked_fill(is_on_other_rank, num_local_experts),
                    top_k_weights_NK.masked_fill(is_on_other_rank, 0),
                )
            partial_sum_NH = DTensor.from_local(outputs_NH, device_mesh, [Partial()], run_check=False)
            return partial_sum_NH.redistribute(placements=[Replicate()]).to_local()

        module.forward = torch.compiler.disable(forward_local_experts)
        return module  # type: ignore[no-any-return]


_PARALLEL_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "replicated_with_grad_allreduce": _AllReduceGradientStyle,
    _MOE_TP_STYLE: _ExpertShardingStyle,
}


def apply_tp(model: PreTrainedModel, mesh: DeviceMesh, *, shards_experts: bool) -> None:
    """Shard every matrix that the model's tensor-parallel plan names over the ranks of `mesh`. For `shards_experts` and
    errors, see `find_split_matrices`."""
    for module, parallel_style in find_split_matrices(model, mesh.size(), shards_experts=shards_experts):
        if parallel_style == _MOE_TP_STYLE:
            keep_local_experts(module, mesh)
        for submodule in _find_split_modules(module, parallel_style):
            parallelize_module(submodule, mesh, _PARALLEL_STYLES[parallel_style]())


def find_split_matrices(model: PreTrainedModel, num_ranks: int, *, shards_experts: bool) -> list[tuple[nn.Module, str]]:
    """Return a list of pairs: each module that the model's tensor-parallel plan splits over `num_ranks` ranks, and the
    name of its parallel style. An embedding and a head with a shared weight are left out. `shards_experts`: whether to
    distribute experts over the ranks too; False: expert parallelism does this. Raise ModelError if the plan is missing
    or has an unsupported style, or if a size is not divisible by the number of ranks."""
    tp_plan = {name: style for name, style in (model.tp_plan or {}).items() if shards_experts or style != _MOE_TP_STYLE}
    tp_size_setting, model_name = f"policy.parallelism.tp_size = {num_ranks}", type(model).__name__
    if not tp_plan:
        raise ModelError(f"{tp_size_setting}: {model_name} has no plan; set it to 1")
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    check_head_split(model, "tp_size", num_ranks)
    tied_modules = {head, embedding} if head is not None and head.weight is embedding.weight else set()
    modules_with_styles = []
    for name, module in list(model.named_modules()):
        style = next((tp_plan[pattern] for pattern in tp_plan if matches_pattern(pattern, name)), None)
        # Skip a module without parameters, which is a placeholder for a module of another pipeline stage.
        if style is None or module in tied_modules or next(module.parameters(), None) is None:
            continue
        if style not in _PARALLEL_STYLES or (style == _MOE_TP_STYLE and not hasattr(module, "_is_expert_parallel")):
            style_problem = f"{name} of {model_name} is split by {style!r}, which this version cannot"
            raise ModelError(f"{tp_size_setting}: {style_problem}; set it to 1 and raise dp_shard_size")
        if style == _MOE_TP_STYLE:
            check_expert_split(module, num_ranks, f"{tp_size_setting}: {model_name}")
        for submodule in _find_split_modules(module, style) if style in {"colwise", "rowwise"} else ():
            weight_shape = submodule.weight.shape if isinstance(submodule, nn.Linear) else (0, 0)
            num_features = weight_shape[1 if style == "rowwise" else 0]
            if num_features % num_ranks:
                size_problem = f"does not divide the {num_features} features of {name} of {model_name}"
                raise ModelError(f"{tp_size_setting} {size_problem}; lower it")
        modules_with_styles.append((module, style))
    return modules_with_styles


def check_tp_plan(model: PreTrainedModel, root_modules: Sequence[Any], mesh: DeviceMesh) -> None:
    """Check that the tensor-parallel plan covers all operations of a model, by a forward and backward pass of
    `probe_hidden_states` of each of `root_modules`. Raise ModelError if this pass fails, or if the ranks of `mesh` have
    different gradients of a weight that is not split: then the plan lacks an operation that uses this weight, and each
    rank applies it only to its own heads or features."""
    device = torch.device(mesh.device_type)
    ids_BT = torch.arange(1, _NUM_PROBE_TOKENS + 1, device=device).unsqueeze(0)
    example_inputs = {"input_ids": ids_BT, "attention_mask": torch.ones_like(ids_BT), "position_ids": ids_BT - 1}
    error_prefix = f"policy.parallelism.tp_size = {mesh.size()}: {type(model).__name__} does more than its plan says"
    was_training = model.training
    model.eval()
    try:
        for root_module in root_modules:
            hidden_BTH = root_module.probe_hidden_states(example_inputs)
            if hidden_BTH.requires_grad:
                loss_weights_BTH = torch.arange(hidden_BTH.numel(), device=device).view_as(hidden_BTH).sin()
                (hidden_BTH * loss_weights_BTH).sum().backward()
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
        if is_transient(error):  # lack of memory or a failed collective does not show that the plan is wrong
            raise
        raise ModelError(f"{error_prefix} ({' '.join(str(error).split())[:200]}); set it to 1") from error
    finally:
        model.train(was_training)
    differing_weights = [name for name, weight in model.named_parameters() if _has_different_gradients(weight, mesh)]
    model.zero_grad(set_to_none=True)
    if differing_weights:
        gradient_problem = f"ranks disagree about the gradient of {differing_weights[0]}"
        raise ModelError(f"{error_prefix}: {gradient_problem}; set it to 1 and raise dp_shard_size")


def _has_different_gradients(parameter: nn.Parameter, mesh: DeviceMesh) -> bool:
    if parameter.grad is None:
        return False
    gradient_mesh_dim_names = parameter.grad.device_mesh.mesh_dim_names if isinstance(parameter.grad, DTensor) else None
    local_gradient = local_shard(parameter.grad)
    if not local_gradient.numel() or set(gradient_mesh_dim_names or ()) & set(mesh.mesh_dim_names or ()):
        return False
    min_gradient, max_gradient = local_gradient.clone(), local_gradient.clone()
    dist.all_reduce(min_gradient, dist.ReduceOp.MIN, mesh.get_group())
    dist.all_reduce(max_gradient, dist.ReduceOp.MAX, mesh.get_group())
    largest_gradient = max(max_gradient.abs().amax(), min_gradient.abs().amax())
    return bool((max_gradient - min_gradient).amax() > _GRADIENT_TOLERANCE * largest_gradient)


@contextmanager
def _replace_weights(module: Any, transform_weight: Callable[[nn.Parameter], Tensor]) -> Iterator[None]:
    parameter_by_name = dict(module.named_parameters(recurse=False))
    try:
        module._parameters.update({name: transform_weight(parameter) for name, parameter in parameter_by_name.items()})
        yield
    finally:
        module._parameters.update(parameter_by_name)


def _find_split_modules(module: nn.Module, parallel_style: str) -> list[nn.Module]:
    """Return the modules to split for `module`, a module that the model's tensor-parallel plan names with the style
    `parallel_style`: `module` itself, unless PEFT has wrapped it.

    In a LoRA wrapper, these are the original linear layer and one factor of the LoRA product B A: A if the style splits
    the input features (`rowwise`), otherwise B. In a wrapper for `modules_to_save`, these are the original module and
    its trained copy.
    """
    if isinstance(module, LoraLayer):
        return [module.base_layer, *(module.lora_A if parallel_style.startswith("rowwise") else module.lora_B).values()]
    if isinstance(module, ModulesToSaveWrapper):
        return [module.original_module, *module.modules_to_save.values()]
    return [module]


class _AllReduceGradient(torch.autograd.Function):
    """Identity function whose gradient is summed over the ranks of a process group."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *output_gradients: Tensor) -> Any:
        summed_gradient = output_gradients[0].contiguous().clone()
        dist.all_reduce(summed_gradient, group=ctx.group)
        return summed_gradient, None
