"""What a checkpoint holds: weights, optimizer state, and a JSON value for everything else.

Hyper-parameters of the optimizer are left out on purpose: they come from the recipe, which the fingerprint covers,
and the learning rate is a pure function of the step.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cosmos_core.errors import ModelError
from cosmos_core.parallel.mesh import all_gather_object
from cosmos_core.types import JsonValue

_MODEL = "model."
_AVERAGE = "ema."
_OPTIMIZER = "optimizer."


@dataclass
class TrainState:
    """The live objects that a checkpoint is taken of and loaded into."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    extra: dict[str, JsonValue] = field(default_factory=dict)
    """Step, data position, `capture_rng()` and whatever else the loop needs to go on; JSON values only."""
    averages: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Moving average of each trained weight, by its name; empty: none is kept."""


def named_tensors(state: TrainState) -> dict[str, torch.Tensor]:
    """Every tensor of the state by name: `model.NAME`, `ema.NAME`, `optimizer.SLOT.NAME`; storage is shared."""
    tensors = _model_tensors(state.model) | _averages(state)
    for name, parameter in state.model.named_parameters():
        for slot, value in state.optimizer.state.get(parameter, {}).items():
            tensors |= {f"{_OPTIMIZER}{slot}{part}.{name}": tensor for part, tensor in _parts(value).items()}
    return tensors


def empty_tensors(state: TrainState, saved: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, torch.Tensor]:
    """Where what this rank has of a checkpoint with the tensors `saved` is read into: live weights and averages, new
    optimizer tensors. All ranks must call this.

    Raises:
        ModelError: the checkpoint and the model do not have the same tensors.
    """
    targets = _model_tensors(state.model)
    parameters = dict(state.model.named_parameters())
    stages = all_gather_object({name: tensor.shape for name, tensor in targets.items()})
    wanted = {name: shape for stage in stages for name, shape in stage.items()}
    found = {name: shape for name, (shape, _) in saved.items() if name.startswith(_MODEL)}
    if wanted != found:
        differing = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        raise ModelError(
            f"the checkpoint is of another model: {len(differing)} tensors differ in name or shape, "
            f"first {differing[0].removeprefix(_MODEL)!r}; start from one of this model, or from none"
        )
    for name, (shape, dtype) in saved.items():
        parameter = parameters.get(name.removeprefix(_OPTIMIZER).partition(".")[2])
        if name.startswith(_OPTIMIZER) and parameter is not None:
            like = parameter if parameter.shape == shape else torch.empty(shape)
            targets[name] = torch.empty_like(like, dtype=dtype, requires_grad=False)
    return targets | {name: average for name, average in _averages(state).items() if name in saved}


def adopt_optimizer_tensors(state: TrainState, tensors: Mapping[str, torch.Tensor]) -> None:
    """Make the optimizer go on from `tensors`, as `empty_tensors` made and a reader filled them."""
    live = state.optimizer.state_dict()
    parameters = [parameter for group in state.optimizer.param_groups for parameter in group["params"]]
    indices = {id(parameter): index for index, parameter in enumerate(parameters)}
    named = dict(state.model.named_parameters())
    slots: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        if key.startswith(_OPTIMIZER):
            slot, _, name = key.removeprefix(_OPTIMIZER).partition(".")
            slots.setdefault(indices[id(named[name])], {})[slot] = tensor
    joined = {index: _joined(parts) for index, parts in slots.items()}
    state.optimizer.load_state_dict({"state": joined, "param_groups": live["param_groups"]})


def begin_averages(state: TrainState, tensors: Mapping[str, torch.Tensor]) -> None:
    """Let averages that a checkpoint did not have begin at its weights."""
    named = dict(state.model.named_parameters())
    for name, average in state.averages.items():
        if _AVERAGE + name not in tensors:
            average.copy_(named[name].detach())


def capture_rng() -> dict[str, JsonValue]:
    """The state of the random generators of Python, NumPy and torch (CPU and each GPU)."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached_gauss = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached_gauss)],
        "torch": _text(torch.get_rng_state()),
        "cuda": [_text(each) for each in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
    }


def restore_rng(captured: Mapping[str, Any]) -> None:
    """Continue the random generators from what `capture_rng` returned.

    GPUs beyond those that were captured, and captured ones that are not there, are left alone.
    """
    version, words, gauss = captured["python"]
    random.setstate((version, tuple(words), gauss))
    keys, position, has_gauss, cached_gauss = captured["numpy"]
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached_gauss))
    torch.set_rng_state(_tensor(captured["torch"]))
    if torch.cuda.is_available():
        for device, text in enumerate(captured["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_tensor(text), device)


def seed_rng(*numbers: int) -> None:
    """Begin the random generators anew, at a place that these numbers choose."""
    digest = hashlib.sha256(repr(numbers).encode()).digest()
    random.seed(digest)
    np.random.seed(int.from_bytes(digest[:4]))
    torch.manual_seed(int.from_bytes(digest[:7]))


def _model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Trained weights and persistent buffers by name; one that is tied to another appears once, under its first name.

    Frozen weights are those that the stage started from: whoever resumes has loaded them.
    """
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        is_frozen = isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad
        if id(tensor) not in seen and not is_frozen:
            seen.add(id(tensor))
            tensors[_MODEL + name] = tensor.detach()
    return tensors


def _averages(state: TrainState) -> dict[str, torch.Tensor]:
    return {_AVERAGE + name: average for name, average in state.averages.items()}


def _parts(value: torch.Tensor) -> dict[str, torch.Tensor]:
    """A moment in eight bits as the plain tensors that torchao makes it of; any other tensor as it is."""
    if not hasattr(value, "qmap"):
        return {"": value}
    return {f":{part}": getattr(value, part) for part in ("codes", "scale", "qmap")}


def _joined(parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The slots of one parameter, which `_parts` took apart."""
    slots = {slot: tensor for slot, tensor in parts.items() if ":" not in slot}
    for slot in [slot.removesuffix(":codes") for slot in parts if slot.endswith(":codes")]:
        eight_bit = importlib.import_module("torchao.optim.subclass_8bit").OptimState8bit
        codes, scale, qmap = (parts[f"{slot}:{part}"] for part in ("codes", "scale", "qmap"))
        slots[slot] = eight_bit(codes, scale, qmap, bool(qmap.min() < 0), torch.float32)
    return slots


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
