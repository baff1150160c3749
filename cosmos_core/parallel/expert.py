"""Expert parallelism: each rank of a group holds some experts of every layer, and tokens are dispatched to the ranks of
their experts.

The ranks of a group have different tokens. The expert-parallel plan of the transformers model names the modules with
experts. The dispatch style of the plan sends a token once to each chosen expert and returns the outputs, so that a rank
computes only the tokens of its experts. The gradient of an expert therefore covers all tokens of the group without a
collective.
"""

from functools import partial
from math import gcd
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.errors import ModelError
from cosmos_core.parallel.fsdp import expert_sharding, fsdp_arguments
from cosmos_core.parallel.mesh import Mesh
from cosmos_core.parallel.plan import matches_pattern

_DISPATCHED = "ep_dispatch_experts"


def apply_ep(model: PreTrainedModel, mesh: Mesh, train: TrainConfig) -> None:
    """Keep this rank's experts of every layer, sharded over `mesh.expert_fsdp`, and dispatch tokens to experts of other
    ranks.

    Call this function before `apply_fsdp`.

    Raises:
        ModelError: the model has no plan that dispatches tokens, an adapter wraps the experts, or the number of experts
            is not divisible by the number of ranks.
    """
    from transformers.distributed.tensor_parallel import EpDispatchExpertsParallel  # transformers 5.17 lacks this class

    assert mesh.expert is not None
    plan = [pattern for pattern, style in model.ep_plan.items() if style == _DISPATCHED]
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "_is_expert_parallel")}
    where = f"policy.parallelism.ep_size = {mesh.expert.size()}: {type(model).__name__}"
    if not plan or not (layers or mesh.pipeline):  # with a pipeline, all layers of this rank may be dense
        raise ModelError(f"{where} has no plan that sends tokens to experts; set it to 1 and raise dp_shard_size")
    for name, experts in layers.items():
        if not any(matches_pattern(pattern, name) for pattern in plan):
            remedy = "leave them out of policy.lora, or set it to 1"
            raise ModelError(f"{where} has experts at {name}, where its plan has none; {remedy}")
        keep_local_experts(experts, mesh.expert, where)
        EpDispatchExpertsParallel().install_forward(experts, mesh.expert)
        experts.forward = torch.compiler.disable(experts.forward)  # torch would recompile for each number of tokens
        if mesh.expert_fsdp is not None:
            placement = partial(expert_sharding, mesh.expert_fsdp.shape[-1])
            fully_shard(experts, mesh=mesh.expert_fsdp, shard_placement_fn=placement, **fsdp_arguments(train))


def keep_local_experts(experts: Any, group: DeviceMesh, where: str) -> None:
    """Keep this rank's experts of a layer, and remove the experts of other ranks from the module.

    Raises:
        ModelError: the number of experts is not divisible by the number of ranks; the message begins with `where`.
    """
    if experts.num_experts % group.size():
        nearest = gcd(experts.num_experts, group.size())
        raise ModelError(f"{where} has {experts.num_experts} experts, which do not divide by it; set it to {nearest}")
    for name, parameter in experts.named_parameters():
        local_weights = parameter.detach().chunk(group.size())[group.get_local_rank()].clone()
        sharded = DTensor.from_local(local_weights, group, [Shard(0)], run_check=False)
        experts.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
    experts.num_experts //= group.size()
