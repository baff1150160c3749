"""Load a sharded model: initialise it on the meta device, parallelise it, then read each rank's shards from the files.

transformers' own sharded loading cannot be used, except for its weight conversions: it applies its plans during
loading, before adapters exist, and does not support pipeline stages. A rank stores at most its shards and one group of
tensors that are converted together, such as the matrices that become the fused experts of a layer. The loaded weights
and the refused models are the same as with `load_model`.
"""

import copy
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    SkipParameters,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.initialization import meta_device_safe_creation_ops
from transformers.modeling_utils import LoadStateDictInfo, str_to_torch_dtype

from cosmos_core.errors import ModelError
from cosmos_core.models.export import make_float32_predicate
from cosmos_core.models.generation_config import load_generation_config
from cosmos_core.models.hf import check_loaded_tensors, describe_nonfinite_values, load_model, model_without_weights
from cosmos_core.models.model_files import model_error, translate_load_errors, unmergeable_tensors_error, weight_files
from cosmos_core.models.recompute import RecomputeMode
from cosmos_core.parallel.fsdp import get_shard_bounds, list_parameter_names, local_shard
from cosmos_core.parallel.mesh import first_error_of_ranks
from cosmos_core.transient import is_machine_error

logger = logging.getLogger(__name__)

_WRAPPER_NAME_REGEX = re.compile(r"\.(base_layer|original_module|modules_to_save\.default)(?=\.)")
"""Pattern of the components that an adapter inserts into the names of a model's weights."""

_MAX_CHECKED_BYTES = 64 << 30
"""Maximum total size in bytes of a model's weight files; the values in larger files are not checked before a run."""
_WEIGHT_FILE_SUFFIXES = (".safetensors", ".bin")

_WeightConversion = WeightRenaming | WeightConverter
_FileTensor = tuple[str, str, Any]
"""Tensor in a model's files: its key, the source pattern of the weight conversion that matches the key (or the key
itself), and a lazy slice of its file."""


@dataclass(frozen=True)
class _TensorGroup:
    """Group of tensors in a model's files that a weight conversion of transformers turns into one or several
    weights."""

    conversion: _WeightConversion
    file_tensors: Sequence[_FileTensor]
    shapes: Mapping[str, torch.Size]
    """Shapes of the converted weights, by name in the model."""


@dataclass(frozen=True)
class _LoadingPlan:
    model: str
    device: torch.device
    tensor_groups: Sequence[_TensorGroup]


_LOADING_PLAN_BY_MODEL: WeakKeyDictionary[PreTrainedModel, _LoadingPlan] = WeakKeyDictionary()


def init_on_meta(
    model: str,
    *,
    revision: str | None = None,
    dtype: torch.dtype,
    device: torch.device,
    gradient_checkpointing: RecomputeMode = False,
) -> PreTrainedModel:
    """Return the same model as `load_model`, but with parameters on the meta device until `load_shards` reads them.

    If the files cannot be read in slices, the whole model is loaded in host memory instead, from which `apply_fsdp`
    moves it to the device block by block, because a GPU cannot hold every model. Errors are those of `load_model`,
    except for values that are not finite, which `load_shards` reports."""
    weight_file_paths, slicing_error = weight_files(model, revision)
    if not slicing_error:
        with torch.device("meta"), meta_device_safe_creation_ops():
            network = model_without_weights(
                model, revision=revision, dtype=dtype, gradient_checkpointing=gradient_checkpointing
            )
        slicing_error = _plan_loading(network, model, revision, dtype, device, weight_file_paths)
    if slicing_error:
        logger.info("every rank loads the whole of %s before it is sharded, because %s", model, slicing_error)
        return load_model(model, revision=revision, dtype=dtype, gradient_checkpointing=gradient_checkpointing)
    return network


def check_file_tensors(
    network: PreTrainedModel, model: str, revision: str | None = None, on_progress: Callable[[], None] = lambda: None
) -> str:
    """Compare the names and shapes of the tensors in a local model folder with `network`, a model on the meta device,
    and check their values; do nothing for a Hub id. Raise ModelError if `load_model` or `load_shards` would fail.
    Return a notice if the files are too large for the check of values, otherwise an empty string. `on_progress` is
    called after each group of tensors."""
    if not Path(model).expanduser().is_dir():
        return ""
    paths, slicing_error = weight_files(model, revision)
    slicing_error = slicing_error or _plan_loading(network, model, revision, network.dtype, torch.device("meta"), paths)
    local_weight_files = (file for file in Path(model).expanduser().glob("*") if file.suffix in _WEIGHT_FILE_SUFFIXES)
    total_bytes = sum(file.stat().st_size for file in local_weight_files)
    if total_bytes > _MAX_CHECKED_BYTES:
        return f"the values of {total_bytes / 1e9:,.0f} GB of weights are not looked at before the model is loaded"
    if not slicing_error:
        _check_weight_values(network, on_progress)
    elif not getattr(network.config, "quantization_config", None):
        load_model(model, revision=revision, dtype=network.dtype)
    return ""


def _check_weight_values(network: PreTrainedModel, report_progress: Callable[[], None]) -> None:
    """Read all weights of `network`, a model on the meta device, from its files; raise ModelError if a value is not
    finite or tied weights differ. Tied weights stay in memory until they are compared."""
    loading_plan, state_dict = _LOADING_PLAN_BY_MODEL.pop(network), network.state_dict(keep_vars=True)
    tensor_groups, tied_tensors = loading_plan.tensor_groups, dict[int, Tensor]()
    num_uses_by_id = Counter(id(state_dict[name]) for tensor_group in tensor_groups for name in tensor_group.shapes)
    for tensor_group in tensor_groups:
        target_tensors, loaded_tensors = dict[str, list[Tensor]](), set(tied_tensors.values())
        for name in tensor_group.shapes:
            meta_tensor, key = state_dict[name], id(state_dict[name])
            tensor = tied_tensors[key] if key in tied_tensors else torch.empty_like(meta_tensor, device="cpu").detach()
            target_tensors[name] = [tensor]
            if num_uses_by_id[key] > 1:
                tied_tensors[key] = tensor
        try:
            _read_tensor_group(tensor_group, target_tensors, network, loaded_tensors)
        except (ModelError, SafetensorError, OSError) as error:
            if is_machine_error(error):
                raise
            raise model_error(loading_plan.model, str(error)) from error
        report_progress()


def load_shards(model: PreTrainedModel) -> None:
    """Read this rank's shards of a model from `init_on_meta`; do nothing for a model that is already loaded. All ranks
    must call this function. Every rank raises the ModelError of the first rank that failed: a value is not finite,
    tensors that config.json ties differ, or a file cannot be read."""
    loading_plan = _LOADING_PLAN_BY_MODEL.pop(model, None)
    if loading_plan is None:
        return
    error_message = None
    try:
        target_tensors, loaded_tensors = _allocate_shards(model, loading_plan.device), set[Tensor]()
        for tensor_group in loading_plan.tensor_groups:
            _read_tensor_group(tensor_group, target_tensors, model, loaded_tensors)
    except (ModelError, SafetensorError, OSError) as error:
        if is_machine_error(error):  # all ranks restart after an error of memory, disk or network
            raise
        error_message = str(error)
    if error_message := first_error_of_ranks(error_message):
        raise model_error(loading_plan.model, error_message)


def _plan_loading(
    network: PreTrainedModel,
    model: str,
    revision: str | None,
    dtype: torch.dtype,
    device: torch.device,
    weight_file_paths: list[str],
) -> str:
    """Add a plan to `_LOADING_PLAN_BY_MODEL` that reads the weight files of `network` in slices, and create the buffers
    of `network`. Return the reason why the files cannot be read in slices, or an empty string; raise ModelError if
    files or tensors are wrong."""
    if getattr(network.config, "quantization_config", None):
        return "its weights are quantized"
    is_kept_in_float32 = make_float32_predicate(network, dtype)
    for name, tensor in network.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and is_kept_in_float32(name):
            tensor.data = tensor.data.float()
    with translate_load_errors("weights", model):
        weight_file_handles = [safe_open(file, framework="pt") for file in weight_file_paths]
        tensor_slices = {key: file.get_slice(key) for file in weight_file_handles for key in file.keys()}  # noqa: SIM118
    tensor_groups, loading_info = _group_file_tensors(network, tensor_slices, model)
    missing_names = set(loading_info.missing_keys)
    loading_info.missing_keys -= {
        name for tied_names in list_parameter_names(network) if set(tied_names) - missing_names for name in tied_names
    }
    names_to_initialise = set(loading_info.missing_keys)
    network._adjust_missing_and_unexpected_keys(loading_info)
    check_loaded_tensors(network, loading_info.to_dict(), model)
    if names_to_initialise - loading_info.missing_keys:
        return "transformers makes up some of its weights"
    # Move buffers to `device`, and initialise buffers that no file contains, as `from_pretrained` does.
    for tensor in network.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    network._move_missing_keys_from_meta_to_device([], {"": "cpu"}, None, None)
    network._initialize_missing_keys(is_quantized=False)
    for module in network.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                allocated_buffer = torch.empty_like(buffer, device="cpu") if buffer.is_meta else buffer
                module._buffers[name] = allocated_buffer.to(device)
    # If the model has no generation_config.json, the generation config from its config.json is kept.
    network.generation_config = load_generation_config(model, revision) or network.generation_config
    network.config._commit_hash = getattr(network.config, "_commit_hash", None) or revision
    _LOADING_PLAN_BY_MODEL[network] = _LoadingPlan(model, device, tensor_groups)
    return ""


def _group_file_tensors(
    network: PreTrainedModel, tensor_slices: Mapping[str, Any], model: str
) -> tuple[list[_TensorGroup], LoadStateDictInfo]:
    """Return the tensors in files, in groups that a weight conversion turns into weights together, and the loading
    information of transformers, which lists missing and unexpected tensors, and tensors of another shape."""
    state_dict = network.state_dict()
    weight_conversions = get_model_conversion_mapping(network)
    weight_renamings = [conversion for conversion in weight_conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in weight_conversions if isinstance(conversion, WeightConverter)]
    converter_map = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    file_tensors_by_weight: dict[str, tuple[_WeightConversion, list[_FileTensor]]] = {}
    loading_info = LoadStateDictInfo(set(state_dict), set(), set(), [], {}, set())
    for key in sorted(tensor_slices, key=dot_natural_key):
        name, pattern = rename_source_key(key, weight_renamings, converters, network.base_model_prefix, state_dict)
        if name not in state_dict and key in state_dict:
            name, pattern = rename_source_key(key, [], [], network.base_model_prefix, state_dict)
        if name not in state_dict:
            target_patterns = converter_map[pattern].target_patterns if pattern else [""]
            loading_info.unexpected_keys |= {name.replace(target_patterns[0], target) for target in target_patterns}
            continue
        conversion: _WeightConversion = copy.deepcopy(converter_map[pattern]) if pattern else WeightRenaming(key, name)
        file_tensors_by_weight.setdefault(name, (conversion, []))[1].append((key, pattern or key, tensor_slices[key]))
    network.__dict__["_weight_conversions"] = [conversion for conversion in weight_conversions if conversion.was_used()]
    tensor_groups = []
    for name, (conversion, file_tensors) in file_tensors_by_weight.items():
        meta_tensors = [
            torch.empty(s.get_shape(), dtype=str_to_torch_dtype.get(s.get_dtype(), torch.float32), device="meta")
            for _, _, s in file_tensors
        ]
        try:
            converted_weights = _convert_tensors(name, conversion, file_tensors, meta_tensors, network, loading_info)
        except SkipParameters:
            raise unmergeable_tensors_error(model) from None
        weight_shapes = {key: tensor.shape for key, tensor in converted_weights.items()}
        tensor_groups.append(_TensorGroup(conversion, file_tensors, weight_shapes))
        loading_info.missing_keys -= weight_shapes.keys()
        loading_info.unexpected_keys |= {key for key in weight_shapes if key not in state_dict}
        for key, shape in weight_shapes.items():
            if key in state_dict and shape != state_dict[key].shape:
                loading_info.mismatched_keys.add((key, tuple(shape), tuple(state_dict[key].shape)))  # type: ignore[arg-type]
    return tensor_groups, loading_info


def _convert_tensors(
    name: str,
    conversion: _WeightConversion,
    file_tensors: Sequence[_FileTensor],
    tensors: Sequence[Any],
    model: PreTrainedModel,
    loading_info: LoadStateDictInfo | None = None,
) -> dict[str, Tensor]:
    """Return the weights, by name in the model, that `conversion`, a weight conversion of transformers, makes of
    `tensors`. These are, in the order of `file_tensors`, tensors or functions that read tensors. `name` is the name of
    the first weight."""
    conversion = copy.deepcopy(conversion)
    for (key, pattern, _), tensor in zip(file_tensors, tensors, strict=True):
        conversion.add_tensor(name, key, pattern, tensor)
    converted_weights = conversion.convert(name, model=model, config=model.config, loading_info=loading_info)
    return {key: value[0] if isinstance(value, list) else value for key, value in converted_weights.items()}


def _read_tensor_group(
    tensor_group: _TensorGroup, shards: Mapping[str, list[Tensor]], model: PreTrainedModel, loaded_tensors: set[Tensor]
) -> None:
    """Read the tensors of a group from the model's files, and write the converted weights to `shards`, this rank's
    shards by name of the weight. A shard in `loaded_tensors` already has values; these are only compared with the
    files. Add each written shard to `loaded_tensors`."""
    local_tensors = {name: [t for t in shards.get(name, ()) if local_shard(t).numel()] for name in tensor_group.shapes}
    if not any(local_tensors.values()):
        return
    file_tensors, conversion, row_offset = tensor_group.file_tensors, tensor_group.conversion, 0
    if isinstance(conversion, WeightRenaming):
        converted_weights: dict[str, Any] = dict.fromkeys(local_tensors, file_tensors[0][2])
    else:
        if _is_expert_stack(tensor_group):
            expert_rows = get_shard_bounds(next(iter(local_tensors.values()))[0])[0]
            tensors_by_pattern: dict[str, list[_FileTensor]] = {}
            # Group the tensors by pattern, because tensors with the same pattern are in the order of the experts.
            for file_tensor in file_tensors:
                tensors_by_pattern.setdefault(file_tensor[1], []).append(file_tensor)
            file_tensors = [t for expert_tensors in tensors_by_pattern.values() for t in expert_tensors[expert_rows]]
            row_offset = expert_rows.start
        slice_readers = [partial(tensor_slice.__getitem__, ...) for _, _, tensor_slice in file_tensors]
        converted_weights = _convert_tensors(next(iter(local_tensors)), conversion, file_tensors, slice_readers, model)
    for name, tensors in local_tensors.items():
        for tensor in tensors:
            _copy_shard(name, tensor, converted_weights[name], row_offset, should_compare=tensor in loaded_tensors)
            loaded_tensors.add(tensor)


def _is_expert_stack(tensor_group: _TensorGroup) -> bool:
    """Return True if a group has one tensor per expert (or several, such as gate and up projections), which are loaded
    as one weight with the experts as its first dimension."""
    operations = list(getattr(tensor_group.conversion, "operations", ()))
    if len(tensor_group.shapes) > 1 or not isinstance(operations[0], MergeModulelist) or operations[0].dim != 0:
        return False
    (stack_shape,) = tensor_group.shapes.values()
    num_tensors_by_pattern = Counter(pattern for _, pattern, _ in tensor_group.file_tensors)
    return set(num_tensors_by_pattern.values()) == {stack_shape[0]} and all(
        (isinstance(operation, Concatenate) and operation.dim > 0)
        or (isinstance(operation, Transpose) and min(operation.dim0, operation.dim1) > 0)
        for operation in operations[1:]
    )  # fmt: skip


def _copy_shard(name: str, tensor: Tensor, full_tensor: Any, row_offset: int, should_compare: bool) -> None:
    """Copy this rank's shard of the weight `name` to `tensor` from `full_tensor`, a tensor or a slice of a file that
    begins with row `row_offset` of the weight; raise ModelError if a value is not finite. With `should_compare`, do not
    copy, but raise ModelError if the values differ."""
    shard_slices = get_shard_bounds(tensor)
    if row_offset:
        shard_slices = (slice(shard_slices[0].start - row_offset, shard_slices[0].stop - row_offset), *shard_slices[1:])
    loaded_values, local_tensor = full_tensor[shard_slices or ...], local_shard(tensor).detach()
    if not should_compare:
        local_tensor.copy_(loaded_values)
        if problem := describe_nonfinite_values(name, local_tensor):
            raise ModelError(problem)
    elif not torch.equal(local_tensor, loaded_values.to(local_tensor)):
        raise ModelError(
            f"config.json ties {name} to a tensor that has other values in the files; they do not belong together"
        )


@torch.no_grad()
def _allocate_shards(model: PreTrainedModel, device: torch.device) -> dict[str, list[Tensor]]:
    """Allocate this rank's shard of every meta parameter. Return the tensors of the model by their names without an
    adapter; a name has several tensors if an adapter copied the weight."""
    allocated_parameters: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and local_shard(parameter).is_meta:
                if parameter not in allocated_parameters:
                    # Use `empty_like`, because `DTensor.from_local` would move shards in host memory to the GPUs.
                    empty_shard = torch.empty_like(parameter, device=device, memory_format=torch.contiguous_format)
                    allocated_parameters[parameter] = nn.Parameter(empty_shard, requires_grad=parameter.requires_grad)
                module._parameters[name] = allocated_parameters[parameter]
    shards_by_name: dict[str, list[Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        shards_by_name.setdefault(_WRAPPER_NAME_REGEX.sub("", name), []).append(tensor)
    return shards_by_name
