"""Pipeline parallelism: each rank holds some layers of a model, and hidden states are sent from rank to rank.

A pipeline stage is the transformers model itself, in which placeholders that return their input replace the modules of
other stages. Names in the state dict, layer indices and the code that calls the modules stay those of the whole model.
The pipeline plan in the config of the model lists its modules; a model that computes anything outside its plan is
refused. The schedules are those of torch (`models/pipeline_runner.py`).

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

_LAYERS_NAME = "layers"
_NUM_PROBE_TOKENS = 3


class StagePlaceholder(nn.Module):
    """Placeholder for a module of another pipeline stage; it returns its input and has the module's attributes."""

    def __init__(self, original_module: nn.Module) -> None:
        super().__init__()
        # The module is not registered as a child, because its weights belong to another pipeline stage.
        self.__dict__["original_module"] = original_module

    def forward(self, hidden_BTH: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the hidden states BTH unchanged, in place of a module of another pipeline stage."""
        return hidden_BTH

    def __getattr__(self, name: str) -> Any:
        if "original_module" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["original_module"], name)


class _EmbeddingPlaceholder(StagePlaceholder):
    """Placeholder for an embedding, which returns deterministic hidden states for each token id, so that the body of a
    model can be probed without weights."""

    def forward(self, hidden_BTH: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        ids_BT, weight = hidden_BTH, self.weight
        probe_hidden_BTH = (ids_BT.unsqueeze(-1) * torch.arange(1, weight.shape[1] + 1, device=ids_BT.device)).sin()
        return probe_hidden_BTH.to(weight.dtype)


class _RecordingPlaceholder(StagePlaceholder):
    """Placeholder for a layer of a model, which returns its input and records the arguments of each call except the
    hidden states."""

    def __init__(self, original_module: nn.Module, recorded_inputs: list[dict[str, Any]]) -> None:
        super().__init__(original_module)
        self.recorded_inputs = recorded_inputs

    def forward(self, hidden_BTH: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.recorded_inputs.append({**kwargs, **{str(i): value for i, value in enumerate(args)}})
        return hidden_BTH


def stage_layer_indices(stage_index: int, num_stages: int, num_layers: int) -> range:
    """Return the layer indices of a pipeline stage. If stages cannot be equal, the first ones have one layer more."""
    layers_per_stage, num_longer_stages = divmod(num_layers, num_stages)
    first_layer_index = stage_index * layers_per_stage + min(stage_index, num_longer_stages)
    return range(first_layer_index, first_layer_index + layers_per_stage + (stage_index < num_longer_stages))


def num_stages(model: PreTrainedModel, parallelism: ParallelismConfig) -> int:
    """Return the number of pipeline stages of the whole model; with the schedule `Interleaved1F1B`, each rank has
    several. Raise a `ModelError` if the settings require more stages than the model has layers."""
    num_layers = int(model.config.num_hidden_layers)
    num_model_stages = parallelism.num_pipeline_stages(num_layers)
    if num_model_stages > num_layers:
        pp_size_setting = f"policy.parallelism.pp_size = {parallelism.pp_size}"
        remedy = "lower it, or raise pp_layers_per_stage"
        raise ModelError(f"{pp_size_setting} makes {num_model_stages} stages of {num_layers} layers; {remedy}")
    return num_model_stages


def stages_of_rank(model: PreTrainedModel, parallelism: ParallelismConfig, pipeline_rank: int) -> range:
    """Return the indices of the pipeline stages of the rank with index `pipeline_rank` in its pipeline."""
    return range(pipeline_rank, num_stages(model, parallelism), parallelism.pp_size)


def apply_pp(model: PreTrainedModel, parallelism: ParallelismConfig, pipeline_rank: int) -> None:
    """Keep the pipeline stages of one rank in the model, and free all others; weights can be on the meta device. If the
    input embedding and the output head are tied, the first and the last pipeline rank keep both. Raise ModelError if
    the model has no pipeline plan, or computes something outside its plan."""
    _check_pipeline_support(model, f"policy.parallelism.pp_size = {parallelism.pp_size}: {type(model).__name__}")
    stage_indices, num_model_stages = stages_of_rank(model, parallelism, pipeline_rank), num_stages(model, parallelism)
    _replace_other_stages(model, model.base_model, stage_indices, num_model_stages, lambda module: module.to("meta"))


def extract_pipeline_stage(model: PreTrainedModel, stage_index: int, parallelism: ParallelismConfig) -> PreTrainedModel:
    """Return the pipeline stage `stage_index` as a model that shares the weights of `model`. Call `apply_pp` first."""
    stage_model, base_model = _shallow_copy(model), _shallow_copy(model.base_model)
    stage_model._modules[model.base_model_prefix] = base_model
    _replace_other_stages(stage_model, base_model, [stage_index], num_stages(model, parallelism), lambda module: module)
    return stage_model


def has_tied_embeddings(model: PreTrainedModel) -> bool:
    """Return True if the input embedding and the output head of a model share one weight."""
    return bool(model.get_output_embeddings().weight is model.get_input_embeddings().weight)


def sum_tied_gradients(model: PreTrainedModel, pp_mesh: DeviceMesh) -> None:
    """If input embedding and output head share a weight, sum its gradients over the first and the last pipeline rank,
    which each have a copy of the weight; otherwise do nothing."""
    pp_group, pipeline_rank, last_rank = pp_mesh.get_group(), pp_mesh.get_local_rank(), pp_mesh.size() - 1
    tied_weight = model.get_output_embeddings().weight
    if not has_tied_embeddings(model) or pipeline_rank not in {0, last_rank} or tied_weight.grad is None:
        return
    gradient = local_shard(tied_weight.grad)
    peer_gradient, peer_rank = torch.empty_like(gradient), dist.get_global_rank(pp_group, last_rank - pipeline_rank)
    p2p_operations: list[tuple[Any, Tensor]] = [(dist.isend, gradient), (dist.irecv, peer_gradient)]
    for work in dist.batch_isend_irecv([dist.P2POp(*operation, peer_rank, pp_group) for operation in p2p_operations]):
        work.wait()
    gradient.add_(peer_gradient)


def clip_gradients_over_stages(model: PreTrainedModel, pp_mesh: DeviceMesh, max_norm: float) -> float:
    """Clip the gradients of all pipeline stages to the total norm `max_norm`, and return the norm before clipping."""
    weight_gradients = {parameter: parameter.grad for parameter in model.parameters() if parameter.grad is not None}
    trained_parameters = list(weight_gradients)
    if has_tied_embeddings(model) and pp_mesh.get_local_rank() > 0:
        # Count a tied weight, which the first and the last pipeline stage hold, only once, on the first rank.
        weight_gradients.pop(model.get_output_embeddings().weight, None)
    gradient_norm = total_norm(weight_gradients.values()) if weight_gradients else torch.zeros((), device=model.device)
    squared_norm = gradient_norm.to(torch.float64).square()
    dist.all_reduce(squared_norm, group=pp_mesh.get_group())
    gradient_norm = squared_norm.sqrt()
    scale_gradients(trained_parameters, gradient_norm, max_norm)
    return float(gradient_norm)


def _shallow_copy(module: M) -> M:
    module_copy = copy.copy(module)
    module_copy._modules = dict(module._modules)
    return module_copy


def _module_names_around_layers(model: PreTrainedModel) -> tuple[list[str], list[str]]:
    """Return two lists from the pipeline plan of a model: the names of the modules before the layers, and of those
    after the layers."""
    module_names = list(model.config.base_model_pp_plan or ())
    return module_names[: module_names.index(_LAYERS_NAME)], module_names[module_names.index(_LAYERS_NAME) + 1 :]


def _replace_other_stages(
    model: PreTrainedModel,
    base_model: nn.Module,
    stage_indices: Sequence[int],
    num_all_stages: int,
    discard_module: Callable[[nn.Module], nn.Module],
) -> None:
    """Replace the modules of all pipeline stages except `stage_indices` by placeholders.

    Replaced are the head of `model`, and the embedding, layers and norm of `base_model`. `discard_module` is called
    with each replaced module and can free its weights; it returns the module whose attributes the placeholder has.
    """
    module_names_before_layers, module_names_after_layers = _module_names_around_layers(model)
    is_first_stage, is_last_stage = 0 in stage_indices, num_all_stages - 1 in stage_indices
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied_modules = {head, embedding} if has_tied_embeddings(model) and (is_first_stage or is_last_stage) else set()
    replaceable_modules = [(base_model, name, is_first_stage) for name in module_names_before_layers]
    replaceable_modules += [(base_model, name, is_last_stage) for name in module_names_after_layers]
    replaceable_modules += [(model, name, is_last_stage) for name in _output_head_names(model)]
    for parent_module, name, is_on_stage in replaceable_modules:
        module = parent_module._modules[name]
        assert module is not None
        if not is_on_stage and module not in tied_modules:
            placeholder_class = _EmbeddingPlaceholder if module is embedding else StagePlaceholder
            parent_module._modules[name] = placeholder_class(discard_module(module))
    layers = list(base_model.get_submodule(_LAYERS_NAME).children())
    kept_layer_indices = {i for stage in stage_indices for i in stage_layer_indices(stage, num_all_stages, len(layers))}
    base_model._modules[_LAYERS_NAME] = nn.ModuleList(
        layer if i in kept_layer_indices else StagePlaceholder(discard_module(layer)) for i, layer in enumerate(layers)
    )


def _output_head_names(model: PreTrainedModel) -> list[str]:
    return [name for name, module in model._modules.items() if module is model.get_output_embeddings()]


def _check_pipeline_support(model: PreTrainedModel, error_prefix: str) -> None:
    """Raise a `ModelError`, which begins with `error_prefix`, if pipeline parallelism does not support a model: it has
    no pipeline plan, it computes something outside the modules of this plan, or its layers get values derived from
    token ids, which later pipeline stages do not have."""
    pipeline_plan, config = getattr(model.config, "base_model_pp_plan", None) or {}, model.config
    base_model = model._modules.get(model.base_model_prefix)
    has_pipeline_plan = _LAYERS_NAME in pipeline_plan and config.get_text_config() is config
    remedy = "set it to 1 and raise dp_shard_size"
    if not has_pipeline_plan or base_model is None or not _output_head_names(model):
        raise ModelError(f"{error_prefix} has no plan for a pipeline; {remedy}")
    modules = [
        *map(base_model._modules.get, pipeline_plan),
        *(model._modules[name] for name in _output_head_names(model)),
    ]
    parameters_in_plan = {parameter for module in modules if module is not None for parameter in module.parameters()}
    if unplanned_names := [name for name, parameter in model.named_parameters() if parameter not in parameters_in_plan]:
        raise ModelError(f"{error_prefix}: its plan does not know {unplanned_names[0]}; {remedy}")
    try:
        operation_outside_plan = _find_compute_outside_plan(model, base_model)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        operation_outside_plan = " ".join(str(error).split())[:200]
    if operation_outside_plan:
        raise ModelError(f"{error_prefix} cannot be cut into stages ({operation_outside_plan}); {remedy}")


@torch.no_grad()
def _find_compute_outside_plan(model: PreTrainedModel, base_model: nn.Module) -> str:
    """Return a text about what `base_model` computes outside the modules of its pipeline plan; empty if it computes
    nothing else.

    For this test, placeholders replace the modules of the plan, because weights can be on the meta device."""
    module_names_before_layers, module_names_after_layers = _module_names_around_layers(model)
    device = next((buffer.device for buffer in base_model.buffers()), torch.device("cpu"))
    embedding = _EmbeddingPlaceholder(model.get_input_embeddings())
    token_ids_BT = torch.arange(_NUM_PROBE_TOKENS, device=device).unsqueeze(0)
    hidden_BTH = embedding(token_ids_BT)
    probe_inputs = {"position_ids": token_ids_BT, "attention_mask": torch.ones_like(token_ids_BT), "use_cache": False}
    layer_arguments_by_input: list[list[dict[str, Any]]] = []
    for probe_input in ({"input_ids": token_ids_BT}, {"inputs_embeds": hidden_BTH}):
        probe_model, layer_arguments = _shallow_copy(base_model), list[dict[str, Any]]()
        for name in (*module_names_before_layers, *module_names_after_layers):
            module: Any = base_model._modules[name]
            probe_model._modules[name] = embedding if module is embedding.original_module else StagePlaceholder(module)
        layers = base_model.get_submodule(_LAYERS_NAME).children()
        probe_model._modules[_LAYERS_NAME] = nn.ModuleList(_RecordingPlaceholder(m, layer_arguments) for m in layers)
        probe_model.eval()
        probe_output = probe_model(**probe_inputs, **probe_input)
        if "inputs_embeds" in probe_input and probe_output.last_hidden_state is not hidden_BTH:
            return "hidden states change outside its layers"
        layer_arguments_by_input.append(layer_arguments)
    for arguments_from_ids, arguments_from_hidden in zip(*layer_arguments_by_input, strict=True):
        for name, argument in arguments_from_ids.items():
            if not _are_arguments_equal(argument, arguments_from_hidden.get(name)):
                return f"its layers are given {name!r}, which is made of tokens"
    return ""


def _are_arguments_equal(argument: Any, other_argument: Any) -> bool:
    """Return True if two arguments of a layer are equal, including tensors and tuples or lists of tensors."""
    if isinstance(argument, Tensor) and isinstance(other_argument, Tensor):
        return torch.equal(argument, other_argument)
    if isinstance(argument, (tuple, list)) and isinstance(other_argument, (tuple, list)):
        return len(argument) == len(other_argument) and all(map(_are_arguments_equal, argument, other_argument))
    return type(argument) is type(other_argument) and bool(argument == other_argument)
