"""Pipeline parallelism: each rank holds some layers of a model, and hidden states are sent from rank to rank.

A pipeline stage is the transformers model itself, in which placeholders that return their input replace the modules of
other stages. Names in the state dict, layer indices and the code that calls the modules stay those of the whole model.
The pipeline plan in the config of the model lists its modules; a model that computes anything outside its plan is
refused. The schedules are those of torch (`models/pipelined.py`).

Shape legend: B rows, T tokens, H hidden size.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from cosmos_core.config.schema.parallelism import ParallelismConfig
from cosmos_core.errors import ModelError
from cosmos_core.parallel.fsdp import local_shard, scale_gradients, total_norm

M = TypeVar("M", bound=nn.Module)

_LAYERS = "layers"
_PROBE_TOKENS = 3


class StagePlaceholder(nn.Module):
    """Placeholder for a module of another pipeline stage; it returns its input and has the module's attributes."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        # The module is not registered as a child, because its weights belong to another pipeline stage.
        self.__dict__["original"] = original

    def forward(self, hidden_BTH: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the hidden states unchanged."""
        return hidden_BTH

    def __getattr__(self, name: str) -> Any:
        if "original" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["original"], name)


class _EmbeddingPlaceholder(StagePlaceholder):
    """Placeholder for an embedding, which returns deterministic hidden states for each token id.

    It allows a probe of the body of a model without weights.
    """

    def forward(self, hidden_BTH: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        ids_BT, weight = hidden_BTH, self.weight
        waves_BTH = (ids_BT.unsqueeze(-1) * torch.arange(1, weight.shape[1] + 1, device=ids_BT.device)).sin()
        return waves_BTH.to(weight.dtype)


class _RecordingPlaceholder(StagePlaceholder):
    """Placeholder for a layer, which records the arguments of each call except the hidden states."""

    def __init__(self, original: nn.Module, recorded_inputs: list[dict[str, Any]]) -> None:
        super().__init__(original)
        self.recorded_inputs = recorded_inputs

    def forward(self, hidden_BTH: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.recorded_inputs.append({**kwargs, **{str(i): value for i, value in enumerate(args)}})
        return hidden_BTH


def layers_of(stage: int, num_stages: int, num_layers: int) -> range:
    """Return the layer indices of a pipeline stage; if layers are not divisible, first stages have one more."""
    size, remainder = divmod(num_layers, num_stages)
    start = stage * size + min(stage, remainder)
    return range(start, start + size + (stage < remainder))


def num_stages(model: PreTrainedModel, sizes: ParallelismConfig) -> int:
    """Return the total number of pipeline stages. With the schedule `Interleaved1F1B`, a rank has several stages.

    Raises:
        ModelError: the settings require more stages than the model has layers.
    """
    layers = int(model.config.num_hidden_layers)
    count = sizes.num_stages(layers)
    if count > layers:
        raise ModelError(
            f"policy.parallelism.pp_size = {sizes.pp_size} makes {count} stages of {layers} layers; lower it, or raise "
            f"pp_layers_per_stage"
        )
    return count


def stages_of_rank(model: PreTrainedModel, sizes: ParallelismConfig, rank: int) -> range:
    """Return the indices of the pipeline stages that one pipeline rank holds."""
    return range(rank, num_stages(model, sizes), sizes.pp_size)


def apply_pp(model: PreTrainedModel, sizes: ParallelismConfig, rank: int) -> None:
    """Keep the pipeline stages of one rank in the model, and free the weights of all other stages.

    Weights may be on the meta device. If embedding and head are tied, the first and the last rank keep both.

    Raises:
        ModelError: the model has no pipeline plan, or computes something outside its plan.
    """
    _check_pipeline_support(model, f"policy.parallelism.pp_size = {sizes.pp_size}: {type(model).__name__}")
    stages, total = stages_of_rank(model, sizes, rank), num_stages(model, sizes)
    _replace_other_stages(model, model.base_model, stages, total, lambda module: module.to("meta"))


def stage_of(model: PreTrainedModel, stage: int, sizes: ParallelismConfig) -> PreTrainedModel:
    """Return one pipeline stage of a model after `apply_pp`; it shares modules and weights with the model."""
    stage_model, base_model = _shallow_copy(model), _shallow_copy(model.base_model)
    stage_model._modules[model.base_model_prefix] = base_model
    _replace_other_stages(stage_model, base_model, [stage], num_stages(model, sizes), lambda module: module)
    return stage_model


def is_tied(model: PreTrainedModel) -> bool:
    """Return True if the input embedding and the output head of a model share one weight."""
    return bool(model.get_output_embeddings().weight is model.get_input_embeddings().weight)


def sum_tied_gradients(model: PreTrainedModel, pipeline: DeviceMesh) -> None:
    """Sum the gradients of a tied embedding and head over the first and last pipeline rank, which have copies."""
    group, rank, last = pipeline.get_group(), pipeline.get_local_rank(), pipeline.size() - 1
    weight = model.get_output_embeddings().weight
    if not is_tied(model) or rank not in {0, last} or weight.grad is None:
        return
    local_gradient = local_shard(weight.grad)
    peer_gradient, peer = torch.empty_like(local_gradient), dist.get_global_rank(group, last - rank)
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, local_gradient, peer, group), dist.P2POp(dist.irecv, peer_gradient, peer, group),
    ])  # fmt: skip
    for work in works:
        work.wait()
    local_gradient.add_(peer_gradient)


def clip_over_stages(model: PreTrainedModel, pipeline: DeviceMesh, max_norm: float) -> float:
    """Clip the gradients of all pipeline stages to the total norm `max_norm`, and return the norm before clipping."""
    trained = [p for p in model.parameters() if p.grad is not None]
    counted = trained
    if is_tied(model) and pipeline.get_local_rank() > 0:  # the norm counts only the first rank's copy of a tied weight
        counted = [p for p in trained if p is not model.get_output_embeddings().weight]
    gradients = [p.grad for p in counted if p.grad is not None]
    norm = total_norm(gradients) if gradients else torch.zeros((), device=model.device)
    square = norm.to(torch.float64).square()
    dist.all_reduce(square, group=pipeline.get_group())
    norm = square.sqrt()
    scale_gradients(trained, norm, max_norm)
    return float(norm)


def _shallow_copy(module: M) -> M:
    """Return a shallow copy of a module, in which children can be replaced without changing the module."""
    module_copy = copy.copy(module)
    module_copy._modules = dict(module._modules)
    return module_copy


def _modules_around_layers(model: PreTrainedModel) -> tuple[list[str], list[str]]:
    """Return the names of the modules before the layers, and of the modules after the layers, in the pipeline plan."""
    names = list(model.config.base_model_pp_plan or ())
    return names[: names.index(_LAYERS)], names[names.index(_LAYERS) + 1 :]


def _replace_other_stages(
    model: PreTrainedModel,
    base_model: nn.Module,
    stages: Sequence[int],
    total: int,
    drop: Callable[[nn.Module], nn.Module],
) -> None:
    """Replace modules that do not belong to the stages `stages`, of `total` pipeline stages, by placeholders.

    The head of `model` and the embedding, layers and norm of `base_model` may be replaced. `drop` is called with each
    replaced module, may free its weights, and returns the module from which the placeholder takes its attributes.
    """
    first_names, last_names = _modules_around_layers(model)
    is_first, is_last_stage, has_tied_head = 0 in stages, total - 1 in stages, is_tied(model)
    layers = _layers(base_model)
    kept_layers = {layer for stage in stages for layer in layers_of(stage, total, len(layers))}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    keeps_both = has_tied_head and (is_first or is_last_stage)
    around = [(base_model, name, is_first) for name in first_names]
    around += [(base_model, name, is_last_stage) for name in last_names]
    around += [(model, name, is_last_stage) for name in _head_names(model)]
    for holder, name, is_on_stage in around:
        module = holder._modules[name]
        assert module is not None
        if not is_on_stage and not (keeps_both and module in {head, embedding}):
            placeholder_class = _EmbeddingPlaceholder if module is embedding else StagePlaceholder
            holder._modules[name] = placeholder_class(drop(module))
    new_layers = (layer if i in kept_layers else StagePlaceholder(drop(layer)) for i, layer in enumerate(layers))
    base_model._modules[_LAYERS] = nn.ModuleList(new_layers)


def _layers(base_model: nn.Module) -> list[nn.Module]:
    return list(base_model.get_submodule(_LAYERS).children())


def _head_names(model: PreTrainedModel) -> list[str]:
    return [name for name, module in model._modules.items() if module is model.get_output_embeddings()]


def _check_pipeline_support(model: PreTrainedModel, where: str) -> None:
    """Raise a `ModelError`, whose message begins with `where`, for a model that cannot run as a pipeline.

    Such a model computes something outside the modules of its plan, or passes values derived from token ids to its
    layers, which later pipeline stages do not have.
    """
    plan, config = getattr(model.config, "base_model_pp_plan", None), model.config
    base_model = model._modules.get(model.base_model_prefix)
    is_planned = plan and _LAYERS in plan and config.get_text_config() is config
    if not is_planned or base_model is None or not _head_names(model):
        raise ModelError(f"{where} has no plan for a pipeline; set it to 1 and raise dp_shard_size")
    first_names, last_names = _modules_around_layers(model)
    planned_names = {*first_names, _LAYERS, *last_names}
    modules = [*map(base_model._modules.get, planned_names), *(model._modules[name] for name in _head_names(model))]
    planned = {p for module in modules if module is not None for p in module.parameters()}
    if unplanned_names := [name for name, p in model.named_parameters() if p not in planned]:
        raise ModelError(f"{where}: its plan does not know {unplanned_names[0]}; set it to 1 and raise dp_shard_size")
    try:
        reason = _computation_outside_plan(model, base_model, first_names, last_names)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:200]
    if reason:
        raise ModelError(f"{where} cannot be cut into stages ({reason}); set it to 1 and raise dp_shard_size")


@torch.no_grad()
def _computation_outside_plan(
    model: PreTrainedModel, base_model: nn.Module, first_names: Sequence[str], last_names: Sequence[str]
) -> str:
    """Return a description of what `base_model` computes outside the modules of its plan; empty if it computes nothing
    there.

    `first_names` and `last_names` are the names of the modules before and after the layers. The body runs with
    placeholders instead of its modules, because weights may be on the meta device.
    """
    device = next((buffer.device for buffer in base_model.buffers()), torch.device("cpu"))
    embedding = _EmbeddingPlaceholder(model.get_input_embeddings())
    ids_BT = torch.arange(_PROBE_TOKENS, device=device).unsqueeze(0)
    hidden_BTH = embedding(ids_BT)
    inputs = {"position_ids": ids_BT, "attention_mask": torch.ones_like(ids_BT), "use_cache": False}
    arguments: list[list[dict[str, Any]]] = []
    for start in ({"input_ids": ids_BT}, {"inputs_embeds": hidden_BTH}):
        bare, layer_arguments = _shallow_copy(base_model), list[dict[str, Any]]()
        for name in (*first_names, *last_names):
            module: Any = base_model._modules[name]
            bare._modules[name] = embedding if module is embedding.original else StagePlaceholder(module)
        recorders = (_RecordingPlaceholder(layer, layer_arguments) for layer in _layers(base_model))
        bare._modules[_LAYERS] = nn.ModuleList(recorders)
        bare.eval()
        output = bare(**inputs, **start)
        if "inputs_embeds" in start and output.last_hidden_state is not hidden_BTH:
            return "hidden states change outside its layers"
        arguments.append(layer_arguments)
    pairs = zip(*arguments, strict=True)  # layer arguments for token ids, and for hidden states
    names = [name for a, b in pairs for name in a if not _are_equal(a[name], b.get(name))]
    return f"its layers are given {names[0]!r}, which is made of tokens" if names else ""


def _are_equal(value: Any, other: Any) -> bool:
    """Return True if two arguments of a layer are equal, including tensors and tuples or lists of tensors."""
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return torch.equal(value, other)
    if isinstance(value, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(value) == len(other) and all(map(_are_equal, value, other))
    return type(value) is type(other) and bool(value == other)
