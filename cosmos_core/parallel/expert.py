"""Expert parallelism: each rank of a group holds some experts of every layer, and tokens are dispatched to the ranks of
their experts.

The ranks of a group have different tokens. The expert-parallel plan of the transformers model names the modules with
experts. The dispatch style of the plan sends a token once to each chosen expert and returns the outputs, so that a rank
computes only the tokens of its experts. The gradient of an expert therefore covers all tokens of the group without a
collective.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.errors import ModelError
from cosmos_core.parallel.fsdp import choose_expert_sharding, fsdp_arguments
from cosmos_core.parallel.mesh import Mesh
from cosmos_core.parallel.plan import check_expert_split, matches_pattern

_TOKEN_DISPATCH_STYLE = "ep_dispatch_experts"


def apply_ep(model: PreTrainedModel, mesh: Mesh, train_config: TrainConfig) -> None:
    """Apply expert parallelism: keep only this rank's experts of every layer, sharded by FSDP over `mesh.ep_fsdp`, and
    send tokens to the ranks of their experts. Call it before `apply_fsdp`; for errors see `find_split_experts`."""
    # `EpDispatchExpertsParallel` is not imported at module level, because transformers 5.17 lacks it.
    from transformers.distributed.tensor_parallel import EpDispatchExpertsParallel

    assert mesh.ep is not None
    # With pipeline parallelism, a rank without experts is allowed: all its layers may be dense.
    for experts in find_split_experts(model, mesh.ep.size(), allows_no_experts=mesh.pp is not None):
        keep_local_experts(experts, mesh.ep)
        EpDispatchExpertsParallel().install_forward(experts, mesh.ep)
        experts.forward = torch.compiler.disable(experts.forward)  # torch.compile would recompile for each token count
        if mesh.ep_fsdp is not None:
            shard_placement = partial(choose_expert_sharding, mesh.ep_fsdp.shape[-1])
            fsdp_options = fsdp_arguments(train_config)
            fully_shard(experts, mesh=mesh.ep_fsdp, shard_placement_fn=shard_placement, **fsdp_options)


def find_split_experts(model: PreTrainedModel, num_ranks: int, *, allows_no_experts: bool = False) -> list[Any]:
    """Return for each layer with experts the module that contains them, whose experts expert parallelism distributes
    over `num_ranks` ranks. Raise ModelError if the model has no expert-parallel plan that dispatches tokens, if an
    adapter wraps the experts, if their number is not divisible by `num_ranks`, or, without `allows_no_experts`, if the
    model has no experts."""
    expert_name_patterns = [pattern for pattern, style in model.ep_plan.items() if style == _TOKEN_DISPATCH_STYLE]
    expert_modules = {name: module for name, module in model.named_modules() if hasattr(module, "_is_expert_parallel")}
    error_prefix = f"policy.parallelism.ep_size = {num_ranks}: {type(model).__name__}"
    if not expert_name_patterns or not (expert_modules or allows_no_experts):
        raise ModelError(
            f"{error_prefix} has no plan that sends tokens to experts; set it to 1 and raise dp_shard_size"
        )
    for name, experts in expert_modules.items():
        if not any(matches_pattern(pattern, name) for pattern in expert_name_patterns):
            remedy = "leave them out of policy.lora, or set it to 1"
            raise ModelError(f"{error_prefix} has experts at {name}, where its plan has none; {remedy}")
        check_expert_split(experts, num_ranks, error_prefix)
    return list(expert_modules.values())


def keep_local_experts(experts: Any, expert_mesh: DeviceMesh) -> None:
    """Keep this rank's experts in `experts`, the module with all experts of a layer, and remove the others. The number
    of experts must be divisible by the number of ranks."""
    num_ranks = expert_mesh.size()
    for name, parameter in experts.named_parameters():
        local_weights = parameter.detach().chunk(num_ranks)[expert_mesh.get_local_rank()].clone()
        sharded_weights = DTensor.from_local(local_weights, expert_mesh, [Shard(0)], run_check=False)
        experts.register_parameter(name, nn.Parameter(sharded_weights, requires_grad=parameter.requires_grad))
    experts.num_experts //= num_ranks
