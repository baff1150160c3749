"""FSDP2 and HSDP sharding of a model over ranks, and gathering of full tensors.

Gradients are summed over ranks, not averaged, because losses are already divided by a denominator over all samples.
"""

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.parallel.mesh import Mesh, all_gather_object, is_first_rank, num_ranks

T = TypeVar("T", bound=Tensor)
ModuleT = TypeVar("ModuleT", bound=nn.Module)

# Hide torch's warning that two small all-reduces of a gradient norm on a 2-D mesh could be merged.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def fsdp_arguments(config: TrainConfig, *, should_cast: bool = True) -> dict[str, Any]:
    """Return the arguments of torch's `fully_shard` for the settings `config`. `should_cast`: whether FSDP gathers
    weights in `param_dtype`, the dtype in which autocast multiplies them; False: in the dtype of the weights."""
    param_dtype = getattr(torch, config.param_dtype) if should_cast and gathers_in_param_dtype(config) else None
    mp_policy = MixedPrecisionPolicy(param_dtype, getattr(torch, config.fsdp_reduce_dtype), cast_forward_inputs=False)
    fsdp_options: dict[str, Any] = {"mp_policy": mp_policy}
    if config.fsdp_offload:
        fsdp_options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    return fsdp_options


def gathers_in_param_dtype(train_config: TrainConfig) -> bool:
    """Return True if FSDP casts the weights of transformer blocks to `param_dtype` when it gathers them."""
    return train_config.param_dtype != train_config.master_dtype


def apply_fsdp(root_module: nn.Module, model: nn.Module, mesh: Mesh, config: TrainConfig) -> None:
    """Shard `model` block by block inside `root_module`, the module whose `forward` or `probe_hidden_states` is called.

    Modules outside of blocks (embeddings, head, last norm) stay gathered from the forward pass of `root_module` to the
    end of its backward pass, because the head is applied and differentiated outside of the model's forward pass. Their
    weights are gathered without a cast, because the residual stream begins and ends in these modules.
    """
    if mesh.fsdp is None:
        return
    num_shards = mesh.fsdp.shape[-1]
    # FSDP ignores the weights of experts that expert parallelism (`apply_ep`) has already sharded.
    ep_expert_weights = {p for p in model.parameters() if isinstance(p, DTensor) and p.device_mesh == mesh.ep}
    # If tensor parallelism has distributed whole experts over ranks, their weights need a placement of their own.
    expert_layers = [module for module in model.modules() if getattr(module, "_is_expert_parallel", False)]
    tp_expert_weights = {p for layer in expert_layers for p in layer.parameters()} - ep_expert_weights

    def shard_placement(parameter: nn.Parameter) -> Shard | None:
        return choose_expert_sharding(num_shards, parameter) if parameter in tp_expert_weights else None

    fsdp_options: Any = {"mesh": mesh.fsdp, "ignored_params": ep_expert_weights, "shard_placement_fn": shard_placement}
    should_reshard = {"always": True, "never": False, "default": mesh.pp is None}[config.fsdp_reshard_after_forward]
    for block in transformer_blocks(model):
        fully_shard(block, reshard_after_forward=should_reshard, **fsdp_options, **fsdp_arguments(config))
    fully_shard(root_module, reshard_after_forward=False, **fsdp_options, **fsdp_arguments(config, should_cast=False))
    register_fsdp_forward_method(root_module, "probe_hidden_states")
    for module in root_module.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale values during a reduction


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model: the modules of the classes in its `_no_split_modules`. A module inside another
    block is no block, although some model families list its class too."""
    block_class_names = set(getattr(model, "_no_split_modules", None) or ())
    blocks: list[nn.Module] = []
    modules_in_blocks: set[nn.Module] = set()
    for module in model.modules():
        if type(module).__name__ in block_class_names and module not in modules_in_blocks:
            blocks.append(module)
            modules_in_blocks.update(module.modules())
    return blocks


def choose_expert_sharding(num_shards: int, parameter: nn.Parameter) -> Shard:
    """Return the dimension along which FSDP shards `parameter`, the stacked weights of experts (experts, features,
    ...), over `num_shards` ranks: the dimension of features, because there can be fewer experts than ranks, or the
    dimension of experts if the number of features is not divisible by `num_shards`."""
    return Shard(0 if parameter.shape[1] % num_shards else 1)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the buffers of a model to `device`, because FSDP moves only parameters."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)


def reshard(root_module: nn.Module) -> None:
    """Free the gathered parameters that FSDP keeps after a forward pass without a backward pass, because they are
    outdated after the next change of the weights. Also wait until the GPU has read all shards in host memory."""
    for module in root_module.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    if torch.cuda.is_available() and any(parameter.device.type == "cpu" for parameter in root_module.parameters()):
        torch.cuda.synchronize()


def full_tensors(tensors: nn.Module | Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the full tensor of each entry of `tensors`, a mapping or a model with its state dict, in the
    same order on all ranks, which must iterate together. A tensor that some ranks lack, such as a weight of another
    pipeline stage, is broadcast by the lowest rank that has it. An unsharded tensor is yielded without a copy."""
    local_tensors = tensors.state_dict(keep_vars=True) if isinstance(tensors, nn.Module) else tensors
    local_tensor_metadata = {name: (t.shape, t.dtype, local_shard(t).device.type) for name, t in local_tensors.items()}
    tensor_metadata_by_rank = all_gather_object(local_tensor_metadata)
    for name in dict.fromkeys(name for metadata in tensor_metadata_by_rank for name in metadata):
        owner_ranks = [rank for rank, metadata in enumerate(tensor_metadata_by_rank) if name in metadata]
        if name in local_tensors:
            full_tensor = _full_tensor(local_tensors[name].detach())
        else:
            # Allocate the tensor on its owner's device type, which selects the backend of the broadcast.
            full_shape, dtype, device = tensor_metadata_by_rank[owner_ranks[-1]][name]
            full_tensor = torch.empty(full_shape, dtype=dtype, device=device)
        if len(owner_ranks) < num_ranks():
            full_tensor = full_tensor.contiguous()
            dist.broadcast(full_tensor, src=owner_ranks[0])
        yield name, full_tensor


def _full_tensor(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def copy_without_weights(model: ModuleT) -> ModuleT:
    """Return a copy of a model with parameters on the meta device, which take no memory; call this function before
    `apply_fsdp`, which changes the classes of modules."""
    return copy.deepcopy(
        model, {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
    )


def gather_full_model(meta_model: ModuleT, model: nn.Module) -> ModuleT | None:
    """Fill `meta_model`, a copy of `model` without weights, with the weights of the sharded `model`. The first rank
    returns it on the CPU, other ranks return None. All ranks must call this function."""
    full_tensor_by_name = {name: tensor.to("cpu", copy=True) for name, tensor in full_tensors(model) if is_first_rank()}
    if not is_first_rank():
        return None
    names_by_parameter = list_parameter_names(meta_model)
    meta_model.load_state_dict(full_tensor_by_name, assign=True)
    for first_name, *tied_names in names_by_parameter:
        # Tie the weights again without `tie_weights()`, which fails for an output head that an adapter wraps.
        for name in tied_names:
            module_name, _, parameter_name = name.rpartition(".")
            meta_model.get_submodule(module_name)._parameters[parameter_name] = meta_model.get_parameter(first_name)
    return nn.Module.to(meta_model, "cpu")


def list_parameter_names(model: nn.Module) -> list[list[str]]:
    """Return for each parameter of a model the list of its names; a tied weight has several names."""
    names_by_parameter: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_by_parameter.setdefault(parameter, []).append(name)
    return list(names_by_parameter.values())


def group_by_mesh(tensors: Iterable[T]) -> list[list[T]]:
    """Return the tensors in one list per device mesh, because operations on several DTensors require the same mesh."""
    tensors_by_mesh: dict[DeviceMesh | None, list[T]] = {}
    for tensor in tensors:
        tensors_by_mesh.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(tensors_by_mesh.values())


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Return the 2-norm over all elements of all `gradients`. Sharded gradients are reduced over their meshes, so that
    each element counts once."""
    mesh_norms = [_full_tensor(torch.nn.utils.get_total_norm(each)) for each in group_by_mesh(gradients)]
    return mesh_norms[0] if len(mesh_norms) == 1 else torch.nn.utils.get_total_norm(mesh_norms)


def scale_gradients(parameters: Iterable[nn.Parameter], gradient_norm: Tensor, max_norm: float) -> None:
    """Scale the gradients of `parameters`, whose total norm is `gradient_norm`, down to the norm `max_norm`. Do nothing
    if `max_norm` is 0, or if `gradient_norm` is smaller or not finite."""
    if max_norm > 0 and torch.isfinite(gradient_norm):
        for mesh_parameters in group_by_mesh(parameters):
            torch.nn.utils.clip_grads_with_norm_(mesh_parameters, max_norm, gradient_norm)


def get_shard_bounds(tensor: Tensor) -> tuple[slice, ...]:
    """Return the range of the full tensor that this rank's shard covers, as one slice per dimension."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, local_shard(tensor).shape, strict=True))


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
