"""Load a sharded model: initialise it on the meta device, parallelise it, then read each rank's shards from the files.

transformers' own sharded loading cannot be used: it applies its plans during loading, before adapters exist, and does
not support pipeline stages. Only the weight conversions of transformers are used. A rank stores at most its shards and
one group of tensors that transformers converts together, such as the matrices that become the fused experts of a layer.
The loaded weights and the refused models are the same as with `load_model`.
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
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    SkipParameters,
    Transpose,
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)
from transformers.initialization import meta_device_safe_creation_ops
from transformers.modeling_utils import LoadStateDictInfo, str_to_torch_dtype

from cosmos_core.errors import ModelError
from cosmos_core.models.generation_config import load_generation_config
from cosmos_core.models.hf import check_loaded_tensors, load_model, model_without_weights, nonfinite_message
from cosmos_core.models.model_files import merge_error, model_error, translate_load_errors, weight_files
from cosmos_core.models.recompute import Recompute
from cosmos_core.parallel.fsdp import local_shard, names_of_tied_weights, shard_bounds
from cosmos_core.parallel.mesh import first_error_of_ranks
from cosmos_core.transient import is_machine_error

logger = logging.getLogger(__name__)

_ADAPTER_COMPONENTS = re.compile(r"\.(base_layer|original_module|modules_to_save\.default)(?=\.)")
"""Name components that an adapter inserts into the names of weights. Names in the files do not have them."""

_MAX_AUDITED_BYTES = 64 << 30
"""Maximum total size of weight files whose values are checked before a run."""
_WEIGHT_SUFFIXES = (".safetensors", ".bin")

_Transform = WeightRenaming | WeightConverter
_Source = tuple[str, str, Any]
"""Key of a tensor in the files, pattern of a transform that matches the key, and the tensor as a lazy slice."""


@dataclass(frozen=True)
class _TensorGroup:
    """Group of tensors in the files that a transform converts together to one or several weights of the model."""

    transform: _Transform
    sources: Sequence[_Source]
    shapes: Mapping[str, torch.Size]
    """Shapes of the converted weights, by name in the model."""


@dataclass(frozen=True)
class _LoadingPlan:
    """Plan for reading the weights of a model that is still on the meta device."""

    model: str
    device: torch.device
    groups: Sequence[_TensorGroup]


_LOADING_PLANS: WeakKeyDictionary[PreTrainedModel, _LoadingPlan] = WeakKeyDictionary()


def init_on_meta(
    model: str,
    *,
    revision: str | None = None,
    dtype: torch.dtype,
    device: torch.device,
    gradient_checkpointing: Recompute = False,
) -> PreTrainedModel:
    """Return the same model as `load_model`, but with parameters on the meta device until `load_sharded` reads them.

    If the files cannot be read in slices, the whole model is loaded on `device` instead.

    Raises:
        ModelError: an error of `load_model`, except for values that are not finite, which `load_sharded` reports.
    """
    files, reason = weight_files(model, revision)
    if not reason:
        with torch.device("meta"), meta_device_safe_creation_ops():
            network = model_without_weights(
                model, revision=revision, dtype=dtype, gradient_checkpointing=gradient_checkpointing
            )
        reason = _plan_loading(network, model, revision, dtype, device, files)
    if reason:
        logger.info("every rank loads the whole of %s before it is sharded, because %s", model, reason)
        return load_model(
            model, revision=revision, dtype=dtype, device=device, gradient_checkpointing=gradient_checkpointing
        )
    return network


def check_file_tensors(
    network: PreTrainedModel, model: str, revision: str | None = None, beat: Callable[[], None] = lambda: None
) -> str:
    """Compare the tensors in a local model folder with those of `network`, a model on the meta device, and check their
    values one group at a time, with a call of `beat` after each. Return a notice if the files are too large to read.

    Raises:
        ModelError: `load_model` or `load_sharded` would fail.
    """
    if not Path(model).expanduser().is_dir():
        return ""
    files, reason = weight_files(model, revision)
    reason = reason or _plan_loading(network, model, revision, network.dtype, torch.device("meta"), files)
    size = sum(file.stat().st_size for file in Path(model).expanduser().glob("*") if file.suffix in _WEIGHT_SUFFIXES)
    if size > _MAX_AUDITED_BYTES:
        return f"the values of {size / 1e9:,.0f} GB of weights are not looked at before the model is loaded"
    if not reason:
        _audit_values(network, beat)
    elif not getattr(network.config, "quantization_config", None):
        load_model(model, revision=revision, dtype=network.dtype)
    return ""


def _audit_values(network: PreTrainedModel, beat: Callable[[], None]) -> None:
    """Check the values of all weights in a loading plan; tied weights stay in memory until they are compared."""
    plan, state, tied_tensors = (_LOADING_PLANS.pop(network), network.state_dict(keep_vars=True), dict[int, Tensor]())
    num_names = Counter(id(state[name]) for group in plan.groups for name in group.shapes)
    for group in plan.groups:
        targets, loaded = dict[str, list[Tensor]](), set(tied_tensors.values())
        for name in group.shapes:
            key = id(state[name])
            targets[name] = [
                tied_tensors[key] if key in tied_tensors else torch.empty_like(state[name], device="cpu").detach()
            ]
            if num_names[key] > 1:
                tied_tensors[key] = targets[name][0]
        try:
            _read_group(group, targets, network, loaded)
        except (ModelError, SafetensorError, OSError) as error:
            if is_machine_error(error):
                raise
            raise model_error(plan.model, str(error)) from error
        beat()


def load_sharded(model: PreTrainedModel) -> None:
    """Read this rank's shards of a model from `init_on_meta`; do nothing for a model that is already loaded.

    All ranks must call this function.

    Raises:
        ModelError: a value is not finite, tensors that config.json ties differ, or a file cannot be read. Every rank
            raises the error of the first rank that failed.
    """
    plan = _LOADING_PLANS.pop(model, None)
    if plan is None:
        return
    problem = None
    try:
        targets, loaded_tensors = _materialise(model, plan.device), set[Tensor]()
        for group in plan.groups:
            _read_group(group, targets, model, loaded_tensors)
    except (ModelError, SafetensorError, OSError) as error:
        if is_machine_error(error):  # errors of memory, disk or network end this rank, and all ranks restart
            raise
        problem = str(error)
    if problem := first_error_of_ranks(problem):
        raise model_error(plan.model, problem)


def _plan_loading(
    network: PreTrainedModel,
    model: str,
    revision: str | None,
    dtype: torch.dtype,
    device: torch.device,
    files: list[str],
) -> str:
    """Plan the reading of weight files in slices, and create the buffers of the model. Return the reason why the files
    cannot be read in slices, or an empty string; raise ModelError if files or tensors are wrong."""
    if getattr(network.config, "quantization_config", None):
        return "its weights are quantized"
    keeps_float32 = _keeps_float32(network, dtype)
    for name, tensor in network.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and keeps_float32(name):
            tensor.data = tensor.data.float()
    with translate_load_errors("weights", model):
        opened = [safe_open(file, framework="pt") for file in files]
        slices = {key: file.get_slice(key) for file in opened for key in file.keys()}  # noqa: SIM118
    groups, info = _plan(network, slices, model)
    missing = set(info.missing_keys)
    info.missing_keys -= {name for names in names_of_tied_weights(network) if set(names) - missing for name in names}
    needed_names = set(info.missing_keys)
    network._adjust_missing_and_unexpected_keys(info)
    check_loaded_tensors(network, info.to_dict(), model)
    if needed_names - info.missing_keys:
        return "transformers makes up some of its weights"
    _make_buffers(network, device)
    if generation := load_generation_config(model, revision):  # without this file, config.json determines the config
        network.generation_config = generation
    network.config._commit_hash = getattr(network.config, "_commit_hash", None) or revision
    _LOADING_PLANS[network] = _LoadingPlan(model, device, groups)
    return ""


def _plan(
    network: PreTrainedModel, slices: Mapping[str, Any], model: str
) -> tuple[list[_TensorGroup], LoadStateDictInfo]:
    """Return the groups of tensors in files that become weights, and the loading information of transformers. The
    loading information lists missing and unexpected tensors, and tensors of another shape."""
    state = network.state_dict()
    mapping = get_model_conversion_mapping(network)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    sources_by_target: dict[str, tuple[_Transform, list[_Source]]] = {}
    info = LoadStateDictInfo(set(state), set(), set(), [], {}, set())
    for key in sorted(slices, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, network.base_model_prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], network.base_model_prefix, state)
        if name not in state:
            targets = by_pattern[pattern].target_patterns if pattern else [""]
            info.unexpected_keys |= {name.replace(targets[0], other) for other in targets}
            continue
        transform: _Transform = copy.deepcopy(by_pattern[pattern]) if pattern else WeightRenaming(key, name)
        sources_by_target.setdefault(name, (transform, []))[1].append((key, pattern or key, slices[key]))
    network.__dict__["_weight_conversions"] = [entry for entry in mapping if entry.was_used()]
    groups = []
    for name, (transform, sources) in sources_by_target.items():
        empty = [_empty(each) for _, _, each in sources]
        try:
            converted = _convert(name, transform, sources, empty, network, info)
        except SkipParameters:
            raise merge_error(model) from None
        groups.append(_TensorGroup(transform, sources, {key: tensor.shape for key, tensor in converted.items()}))
        for key, tensor in converted.items():
            info.missing_keys.discard(key)
            if key not in state:
                info.unexpected_keys.add(key)
            elif tensor.shape != state[key].shape:
                info.mismatched_keys.add((key, tuple(tensor.shape), tuple(state[key].shape)))  # type: ignore[arg-type]
    return groups, info


def _empty(source: Any) -> Tensor:
    dtype = str_to_torch_dtype.get(source.get_dtype(), torch.float32)
    return torch.empty(source.get_shape(), dtype=dtype, device="meta")


def _convert(
    name: str,
    transform: _Transform,
    sources: Sequence[_Source],
    tensors: Sequence[Any],
    model: PreTrainedModel,
    info: LoadStateDictInfo | None = None,
) -> dict[str, Tensor]:
    """Convert tensors in files, or functions that read them, to weights; return the weights by name in the model."""
    transform = copy.deepcopy(transform)
    for (key, pattern, _), tensor in zip(sources, tensors, strict=True):
        transform.add_tensor(name, key, pattern, tensor)
    converted = transform.convert(name, model=model, config=model.config, loading_info=info)
    return {key: value[0] if isinstance(value, list) else value for key, value in converted.items()}


def _read_group(
    group: _TensorGroup, targets: Mapping[str, Sequence[Tensor]], model: PreTrainedModel, loaded_tensors: set[Tensor]
) -> None:
    """Fill this rank's shards of the weights of a group; `loaded_tensors` are the tensors that are filled already."""
    local_targets = {name: [t for t in targets.get(name, ()) if local_shard(t).numel()] for name in group.shapes}
    if not any(local_targets.values()):
        return
    sources, first = group.sources, 0
    if isinstance(group.transform, WeightRenaming):
        converted: dict[str, Any] = dict.fromkeys(local_targets, sources[0][2])
    else:
        if _is_expert_stack(group):
            rows = shard_bounds(next(iter(local_targets.values()))[0])[0]
            sources, first = _select_experts(sources, rows), rows.start
        readers = [partial(source.__getitem__, ...) for _, _, source in sources]
        converted = _convert(next(iter(local_targets)), group.transform, sources, readers, model)
    for name, tensors in local_targets.items():
        for tensor in tensors:
            _copy(name, tensor, converted[name], first, is_dry_run=tensor in loaded_tensors)
            loaded_tensors.add(tensor)


def _is_expert_stack(group: _TensorGroup) -> bool:
    """Return True if a group becomes one weight of stacked experts, each with its own tensors in the files."""
    operations = list(getattr(group.transform, "operations", ()))
    if len(group.shapes) > 1 or not isinstance(operations[0], MergeModulelist) or operations[0].dim != 0:
        return False
    (shape,) = group.shapes.values()
    patterns = Counter(pattern for _, pattern, _ in group.sources)
    return all(map(_preserves_rows, operations[1:])) and set(patterns.values()) == {shape[0]}


def _preserves_rows(operation: Any) -> bool:
    if isinstance(operation, Concatenate):
        return operation.dim > 0
    return isinstance(operation, Transpose) and min(operation.dim0, operation.dim1) > 0


def _select_experts(sources: Sequence[_Source], rows: slice) -> list[_Source]:
    """Return the tensors of the experts in the slice `rows`; `sources` lists experts in order within each pattern."""
    by_pattern: dict[str, list[_Source]] = {}
    for source in sources:
        by_pattern.setdefault(source[1], []).append(source)
    return [source for pattern_sources in by_pattern.values() for source in pattern_sources[rows]]


def _copy(name: str, tensor: Tensor, source: Any, first: int, is_dry_run: bool) -> None:
    """Copy this rank's shard of `source`, a tensor or a slice of a file that begins with row `first` of the whole
    weight, to `tensor`; with `is_dry_run`, compare them instead, because `tensor` is already filled."""
    where = shard_bounds(tensor)
    if first:
        where = (slice(where[0].start - first, where[0].stop - first), *where[1:])
    values, local_tensor = source[where or ...], local_shard(tensor).detach()
    if not is_dry_run:
        local_tensor.copy_(values)
        if problem := nonfinite_message(name, local_tensor):
            raise ModelError(problem)
    elif not torch.equal(local_tensor, values.to(local_tensor)):
        raise ModelError(
            f"config.json ties {name} to a tensor that has other values in the files; they do not belong together"
        )


@torch.no_grad()
def _materialise(model: PreTrainedModel, device: torch.device) -> dict[str, list[Tensor]]:
    """Allocate this rank's shard of every meta parameter; return parameters and buffers by their names in the files."""
    allocated: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and local_shard(parameter).is_meta:
                if parameter not in allocated:
                    allocated[parameter] = _allocate_parameter(parameter, device)
                module._parameters[name] = allocated[parameter]
    targets: dict[str, list[Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        targets.setdefault(_ADAPTER_COMPONENTS.sub("", name), []).append(tensor)
    return targets


def _allocate_parameter(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    local = torch.empty_like(local_shard(parameter).detach(), device=device, memory_format=torch.contiguous_format)
    if isinstance(parameter, DTensor):
        local = DTensor.from_local(
            local, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
            stride=parameter.stride(),
        )  # fmt: skip
    return nn.Parameter(local, requires_grad=parameter.requires_grad)


def _keeps_float32(network: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], object]:
    plan = network._get_dtype_plan(dtype)
    return build_glob_alternation(list(plan))[0].search if plan else lambda name: None


def _make_buffers(network: PreTrainedModel, device: torch.device) -> None:
    """Move buffers to `device`, and initialise buffers that no file contains, as `from_pretrained` does."""
    for tensor in network.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    network._move_missing_keys_from_meta_to_device([], {"": "cpu"}, None, None)
    network._initialize_missing_keys(is_quantized=False)
    for module in network.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                real_buffer = torch.empty_like(buffer, device="cpu") if buffer.is_meta else buffer
                module._buffers[name] = real_buffer.to(device)
