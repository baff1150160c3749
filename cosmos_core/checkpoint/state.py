"""What a checkpoint holds: weights, optimizer state, and a JSON value for everything else.

Hyper-parameters of the optimizer are left out on purpose: they come from the recipe, which the fingerprint covers,
and the learning rate is a pure function of the step.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cosmos_core.errors import ModelError
from cosmos_core.types import JsonValue

_MODEL = "model."
_OPTIMIZER = "optimizer."


@dataclass
class TrainState:
    """The live objects that a checkpoint is taken of and loaded into."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    extra: dict[str, JsonValue] = field(default_factory=dict)
    """Step, data position, `capture_rng()` and whatever else the loop needs to go on; JSON values only."""


def named_tensors(state: TrainState) -> dict[str, torch.Tensor]:
    """Every tensor of the state by name: `model.NAME`, `optimizer.SLOT.NAME`. They share storage with the live ones."""
    tensors = _model_tensors(state.model)
    for name, parameter in state.model.named_parameters():
        for slot, value in state.optimizer.state.get(parameter, {}).items():
            tensors[f"{_OPTIMIZER}{slot}.{name}"] = value
    return tensors


def empty_tensors(state: TrainState, saved: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, torch.Tensor]:
    """Where a checkpoint with the tensors `saved` is read into: the live weights, and new optimizer tensors.

    Raises:
        ModelError: the checkpoint and the model do not have the same tensors.
    """
    targets = _model_tensors(state.model)
    parameters = dict(state.model.named_parameters())
    wanted = {name: tensor.shape for name, tensor in targets.items()}
    found = {name: shape for name, (shape, _) in saved.items() if name.startswith(_MODEL)}
    if wanted != found:
        differing = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        raise ModelError(
            f"the checkpoint is of another model: {len(differing)} tensors differ in name or shape, "
            f"first {differing[0].removeprefix(_MODEL)!r}; delete it to start again"
        )
    for name, (shape, dtype) in saved.items():
        if name not in targets:
            parameter = parameters[name.removeprefix(_OPTIMIZER).partition(".")[2]]
            like = parameter if parameter.shape == shape else torch.empty(shape)
            targets[name] = torch.empty_like(like, dtype=dtype, requires_grad=False)
    return targets


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
    state.optimizer.load_state_dict({"state": slots, "param_groups": live["param_groups"]})


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


def _model_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Weights and persistent buffers by name; one that is tied to another appears once, under its first name."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[_MODEL + name] = tensor.detach()
    return tensors


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
