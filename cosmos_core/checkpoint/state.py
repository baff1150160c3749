"""Content of a checkpoint: weights, further named copies of the weights, optimizer state, and the states of the feed
(the source of training samples) and of the algorithm.

A further copy is for example a moving average or a reference policy. Hyper-parameters of the optimizer are left out:
they come from the recipe, which the fingerprint covers, and the learning rate is a pure function of the step. torch's
`get_optimizer_state_dict` is not used because it takes a step with zero gradients to create missing state, which would
count one step too many for weights without a gradient so far. `get_model_state_dict` is not used because it keeps both
names of tied weights.
"""

import base64
import hashlib
import importlib
import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from cosmos_core.errors import ModelError
from cosmos_core.parallel.mesh import all_gather_object
from cosmos_core.types import JsonValue

logger = logging.getLogger(__name__)

_MODEL_PREFIX = "model."
_OPTIMIZER_PREFIX = "optimizer."
_8BIT_FIELDS = ("codes", "scale", "qmap")
"""Names of the tensors of which an 8-bit optimizer state of torchao consists."""
_STATEFUL_FIELD_NAMES = ("feed", "algorithm")
POLICY_COPY_WEIGHT_SETS = ("ema", "old")
"""Names of two copies of the policy's weights ("ema": moving average, "old": old policy), which get the policy's
weights if a checkpoint lacks them. Other copies, such as "reference", keep the weights that the stage loaded."""
_TENSOR_NAME_KEY = "__tensor__"
"""Key that identifies a JSON object as the replacement of a tensor; the value is the name of the tensor."""


@dataclass
class TrainState:
    """State of a training that a checkpoint saves and loads."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loop_state: dict[str, Any] = field(default_factory=dict)
    """Step, data position, result of `capture_rng` and other JSON values that the training loop needs to resume."""
    weight_sets: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """Further copies of the weights, in addition to those in `model`: tensors by the name of the copy ("ema", "old",
    "reference") and of the parameter."""
    feed: dict[str, Any] = field(default_factory=dict)
    """State of the feed, the source of training samples: nested dictionaries and lists of JSON values and tensors. It
    is equal on all ranks except for the shards of DTensors."""
    algorithm: dict[str, Any] = field(default_factory=dict)
    """State of the training algorithm, in the same form as `feed`."""


def named_tensors(train_state: TrainState) -> dict[str, Tensor]:
    """Return every tensor of a training state by its name in a checkpoint, without copying it: `model.NAME`, `SET.NAME`
    (in a further copy of the weights, such as "ema"), `optimizer.SLOT.NAME`, `feed.KEY` and `algorithm.KEY`."""
    tensors = model_tensors(train_state.model) | _flatten_weight_sets(train_state)
    for name, parameter in train_state.model.named_parameters():
        for slot, state_value in train_state.optimizer.state.get(parameter, {}).items():
            is_8bit = hasattr(state_value, "qmap")
            tensor_by_suffix = (
                {f":{n}": getattr(state_value, n) for n in _8BIT_FIELDS} if is_8bit else {"": state_value}
            )
            tensors |= {f"{_OPTIMIZER_PREFIX}{slot}{suffix}.{name}": t for suffix, t in tensor_by_suffix.items()}
    for field_name in _STATEFUL_FIELD_NAMES:
        _extract_tensors(getattr(train_state, field_name), field_name, tensors)
    return tensors


def json_values(train_state: TrainState) -> dict[str, JsonValue]:
    """Return the JSON values of a training state: `loop_state`, and the states of the data feed and of the algorithm.
    Each tensor is replaced by a JSON object with the tensor's name."""
    stateful_field_values = {name: getattr(train_state, name) for name in _STATEFUL_FIELD_NAMES}
    return train_state.loop_state | {k: _extract_tensors(v, k, {}) for k, v in stateful_field_values.items() if v}


def restore_json_values(train_state: TrainState, saved_values: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Set `loop_state`, `feed` and `algorithm` of `train_state` from a result of `json_values` and loaded tensors."""
    for name in _STATEFUL_FIELD_NAMES:
        setattr(train_state, name, _restore_tensors(saved_values.pop(name, {}), tensors))
    train_state.loop_state = saved_values


def allocate_tensors(
    train_state: TrainState, metadata: Mapping[str, tuple[torch.Size, torch.dtype]]
) -> dict[str, Tensor]:
    """Return the tensors into which this rank loads a checkpoint, by name: the existing ones of the model and of
    further copies of its weights, and new ones for the states of optimizer, feed and algorithm. `metadata` has the
    shape and dtype of each saved tensor. All ranks call the function. Raise `ModelError` if the saved tensors of the
    model and those of `train_state.model` differ in name or shape."""
    allocated_tensors = model_tensors(train_state.model)
    parameters = dict(train_state.model.named_parameters())
    shapes_by_rank = all_gather_object({name: tensor.shape for name, tensor in allocated_tensors.items()})
    expected_shapes = {name: shape for shapes in shapes_by_rank for name, shape in shapes.items()}
    saved_shapes = {name: shape for name, (shape, _) in metadata.items() if name.startswith(_MODEL_PREFIX)}
    if expected_shapes != saved_shapes:
        tensor_names = expected_shapes.keys() | saved_shapes.keys()
        differing_names = sorted(name for name in tensor_names if expected_shapes.get(name) != saved_shapes.get(name))
        raise ModelError(
            f"the checkpoint is of another model: {len(differing_names)} tensors differ in name or shape, "
            f"first {differing_names[0].removeprefix(_MODEL_PREFIX)!r}; start from one of this model, or from none"
        )
    stateful_tensors: dict[str, Tensor] = {}
    for field_name in _STATEFUL_FIELD_NAMES:
        _extract_tensors(getattr(train_state, field_name), field_name, stateful_tensors)
    weight_set_tensors = _flatten_weight_sets(train_state)
    for name, (shape, dtype) in metadata.items():
        parameter = parameters.get(name.removeprefix(_OPTIMIZER_PREFIX).partition(".")[2])
        if name in weight_set_tensors:
            allocated_tensors[name] = weight_set_tensors[name]
        elif name.startswith(_OPTIMIZER_PREFIX) and parameter is not None:
            template_tensor = parameter if parameter.shape == shape else torch.empty(shape)
            allocated_tensors[name] = torch.empty_like(template_tensor, dtype=dtype, requires_grad=False)
        elif name.partition(".")[0] in _STATEFUL_FIELD_NAMES:
            is_sharded = isinstance(stateful_tensors.get(name), DTensor)
            allocated_tensors[name] = stateful_tensors[name] if is_sharded else torch.empty(shape, dtype=dtype)
    return allocated_tensors


def load_tensors(train_state: TrainState, tensors: Mapping[str, Tensor]) -> None:
    """Complete `train_state` after a checkpoint has filled `tensors`, the result of `allocate_tensors`: set the state
    of the optimizer, except for moments that another kind of optimizer saved, and copy the policy's weights into each
    of the copies `POLICY_COPY_WEIGHT_SETS` that the checkpoint lacks."""
    parameter_groups = train_state.optimizer.state_dict()["param_groups"]
    parameters = [parameter for group in train_state.optimizer.param_groups for parameter in group["params"]]
    index_by_parameter = {parameter: index for index, parameter in enumerate(parameters)}
    parameters_by_name = dict(train_state.model.named_parameters())
    slots_by_parameter_index: dict[int, dict[str, Tensor]] = {}
    for tensor_name, tensor in tensors.items():
        if tensor_name.startswith(_OPTIMIZER_PREFIX):
            slot, _, name = tensor_name.removeprefix(_OPTIMIZER_PREFIX).partition(".")
            slots_by_parameter_index.setdefault(index_by_parameter[parameters_by_name[name]], {})[slot] = tensor
    is_8bit = type(train_state.optimizer).__name__.endswith("8bit")
    is_muon_by_index = {index: group.get("is_matrix", False) for group in parameter_groups for index in group["params"]}
    optimizer_state = {
        index: _merge_optimizer_slots(slots)
        for index, slots in slots_by_parameter_index.items()
        if ("momentum_buffer" in slots) == is_muon_by_index[index]
        and (is_8bit or not any(":" in slot for slot in slots))
    }
    if num_dropped := len(slots_by_parameter_index) - len(optimizer_state):
        logger.warning("the checkpoint has moments of another optm_name: those of %d weights begin anew", num_dropped)
    train_state.optimizer.load_state_dict({"state": optimizer_state, "param_groups": parameter_groups})
    for weight_set in POLICY_COPY_WEIGHT_SETS:
        for name, tensor in train_state.weight_sets.get(weight_set, {}).items():
            if f"{weight_set}.{name}" not in tensors:
                tensor.copy_(parameters_by_name[name].detach())


def capture_rng() -> dict[str, JsonValue]:
    """Return the states of the random generators of Python, NumPy and torch (CPU and each GPU)."""
    python_version, python_state, next_gauss = random.getstate()
    _, generator_keys, generator_position, has_gauss, cached_gaussian = np.random.get_state(legacy=True)
    return {
        "python": [python_version, list(python_state), next_gauss],
        "numpy": [np.asarray(generator_keys).tolist(), int(generator_position), int(has_gauss), float(cached_gaussian)],
        "torch": _encode_rng_state(torch.get_rng_state()),
        "cuda": [_encode_rng_state(rng_state) for rng_state in torch.cuda.get_rng_state_all()],
    }


def restore_rng(rng_states: Mapping[str, Any]) -> None:
    """Restore the random generators from a result of `capture_rng`; GPUs that were absent at capture are unchanged."""
    python_version, python_state, next_gauss = rng_states["python"]
    random.setstate((python_version, tuple(python_state), next_gauss))
    generator_keys, *position_and_gauss = rng_states["numpy"]
    np.random.set_state(("MT19937", np.array(generator_keys, dtype=np.uint32), *position_and_gauss))
    torch.set_rng_state(_decode_rng_state(rng_states["torch"]))
    for device, encoded_state in enumerate(rng_states["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(_decode_rng_state(encoded_state), device)


def seed_rng(seed: int, step: int, rank: int, *, keeps_torch_rng: bool = False) -> None:
    """Seed the random generators of Python and NumPy with a digest of `seed` and `step`, and, unless `keeps_torch_rng`,
    those of torch with a digest of `seed`, `step` and `rank`. Python and NumPy have equal generators on all ranks,
    because all ranks call the algorithm, which can be user code, on the same samples and need equal results."""
    seed_tuples = (seed, step), (seed, step, rank)
    shared_seed, rank_seed = (hashlib.sha256(repr(seed_tuple).encode()).digest() for seed_tuple in seed_tuples)
    random.seed(shared_seed)
    np.random.seed(int.from_bytes(shared_seed[:4]))
    if not keeps_torch_rng:
        torch.manual_seed(int.from_bytes(rank_seed[:7]))


def model_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the trained weights and persistent buffers of a model by name; a tied weight has only the first of its
    names. Weights that are not trained are left out, because a resumed stage loads them with its initial model."""
    tensors: dict[str, Tensor] = {}
    seen_tensor_ids: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        is_frozen = isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad
        if id(tensor) not in seen_tensor_ids and not is_frozen:
            seen_tensor_ids.add(id(tensor))
            tensors[_MODEL_PREFIX + name] = tensor.detach()
    return tensors


def _flatten_weight_sets(train_state: TrainState) -> dict[str, Tensor]:
    # A weight set named "model" or "optimizer" would overwrite the tensors of the model or optimizer in the checkpoint.
    assert not train_state.weight_sets.keys() & {"model", "optimizer", *_STATEFUL_FIELD_NAMES}
    weight_sets = train_state.weight_sets.items()
    return {f"{weight_set}.{name}": tensor for weight_set, weights in weight_sets for name, tensor in weights.items()}


def _extract_tensors(value: Any, name: str, tensors: dict[str, Tensor]) -> JsonValue:
    """Return `value` as JSON, with each tensor replaced by an object that has a name for the tensor: `name`, followed
    by the keys that lead to the tensor. Add the tensors to `tensors` under these names."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach()
        return {_TENSOR_NAME_KEY: name}
    if isinstance(value, dict):
        assert all(isinstance(key, str) for key in value), f"{name}: JSON has no other keys than strings"
        return {key: _extract_tensors(child_value, f"{name}.{key}", tensors) for key, child_value in value.items()}
    if isinstance(value, (list, tuple)):
        return [_extract_tensors(child_value, f"{name}.{index}", tensors) for index, child_value in enumerate(value)]
    return value.item() if isinstance(value, np.generic) else value


def _restore_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return JSON in which each object that names a tensor is replaced by the tensor; inverse of `_extract_tensors`."""
    if isinstance(value, dict):
        if value.keys() == {_TENSOR_NAME_KEY}:
            return tensors[value[_TENSOR_NAME_KEY]]
        return {key: _restore_tensors(child, tensors) for key, child in value.items()}
    return [_restore_tensors(child, tensors) for child in value] if isinstance(value, list) else value


def _merge_optimizer_slots(slot_tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the optimizer state of one parameter: a tensor, such as a moment, for each slot, by name. An 8-bit state
    is assembled from the tensors `_8BIT_FIELDS`."""
    merged_slots = {slot: tensor for slot, tensor in slot_tensors.items() if ":" not in slot}
    for slot in [name.removesuffix(":codes") for name in slot_tensors if name.endswith(":codes")]:
        optimizer_state_class = importlib.import_module("torchao.optim.subclass_8bit").OptimState8bit
        codes, code_scales, qmap = (slot_tensors[f"{slot}:{name}"] for name in _8BIT_FIELDS)
        # Move the other tensors to the device of `codes`, which is that of the parameter: torchao does not move them.
        code_scales, is_signed = code_scales.to(codes.device), bool(qmap.min() < 0)
        merged_slots[slot] = optimizer_state_class(codes, code_scales, qmap.to(codes.device), is_signed, torch.float32)
    return merged_slots


def _encode_rng_state(rng_state: Tensor) -> str:
    return base64.b64encode(rng_state.numpy().tobytes()).decode("ascii")


def _decode_rng_state(encoded_rng_state: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(encoded_rng_state)), dtype=torch.uint8)
