"""Optimizers, learning-rate schedule and gradient clipping.

The learning rate is a pure function of the step, so checkpoints need no scheduler.
"""

import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.errors import ConfigError
from cosmos_core.parallel.fsdp import group_by_mesh, scale_gradients, total_norm
from cosmos_core.registry import suggest_names

GLOBAL_LR_KEY = "global"
"""Key of `optm_lr` with the learning rate of all modules that no other key names."""


class MuonWithAdamW(Optimizer):
    """Muon (kellerjordan.github.io/posts/muon) and AdamW as one optimizer with common groups and state. Muon updates
    the groups with `is_matrix`, scaled to the size of AdamW's updates (arXiv 2502.16982), with the same learning
    rates."""

    def __init__(self, parameter_groups: list[dict[str, Any]], *, lr: float, **adamw_args: Any) -> None:
        """Build Muon and AdamW over the groups of `parameter_groups`; AdamW also gets `adamw_args`."""
        optimizer_kinds: list[tuple[bool, Callable[..., Optimizer], dict[str, Any]]] = [
            (True, torch.optim.Muon, {"adjust_lr_fn": "match_rms_adamw"}),
            (False, torch.optim.AdamW, adamw_args),
        ]
        self._optimizers: dict[bool, Optimizer] = {}
        for is_matrix, optimizer_class, optimizer_settings in optimizer_kinds:
            if optimizer_groups := [group for group in parameter_groups if group["is_matrix"] == is_matrix]:
                self._optimizers[is_matrix] = optimizer_class(optimizer_groups, lr=lr, **optimizer_settings)
        super().__init__([group for optimizer in self._optimizers.values() for group in optimizer.param_groups], {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step of Muon and one step of AdamW. Both optimizers first get the current parameter groups and
        state, because loading a checkpoint replaces these."""
        for is_matrix, optimizer in self._optimizers.items():
            optimizer.param_groups = [group for group in self.param_groups if group["is_matrix"] == is_matrix]
            optimizer.state = self.state
            optimizer.step()


def _find_hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Return the two-dimensional parameters of a model except embeddings and the output head."""
    output_head = getattr(model, "get_output_embeddings", lambda: None)()
    excluded_modules = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    excluded_modules += [output_head] if output_head else []
    excluded_parameters = {parameter for module in excluded_modules for parameter in module.parameters()}
    return {parameter for parameter in model.parameters() if parameter.ndim == 2} - excluded_parameters


def build_optimizer(model: nn.Module, train: TrainConfig, *, full_model: nn.Module | None = None) -> Optimizer:
    """Build the optimizer of `[train]` over the parameters that require a gradient, at the peak learning rates.

    Each module path of `optm_lr` has its own parameter groups. One-dimensional parameters (biases, norms) have separate
    groups without weight decay. `full_model` is the complete model if `model` is a pipeline stage; else None. Raise
    `ConfigError` if a module path or the model has no trained parameters.
    """
    learning_rates = _get_learning_rates(train)
    check_module_paths(full_model or model, train)
    parameter_groups: list[dict[str, Any]] = []
    for path, trained_parameters in _group_parameters_by_path(model, learning_rates).items():
        lr_settings = {"lr": learning_rates[path], "initial_lr": learning_rates[path], "path": path}
        for params in group_by_mesh(trained_parameters):
            parameter_groups += [
                {**lr_settings, "params": [p for p in params if p.ndim > 1], "weight_decay": train.optm_weight_decay},
                {**lr_settings, "params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
            ]
    if train.optm_name == "Muon":
        matrices = _find_hidden_matrices(full_model or model)
        parameter_groups = [
            {**group, "params": [p for p in group["params"] if (p in matrices) == is_matrix], "is_matrix": is_matrix}
            for group in parameter_groups
            for is_matrix in (True, False)
        ]
    if not any(group["params"] for group in parameter_groups):
        raise ConfigError(f"nothing is trained of {type(model).__name__} on this rank; train more, or on one rank")
    is_8bit = train.optm_name.endswith("8bit")
    optimizer_args = {} if is_8bit else {"fused": train.optm_impl == "fused", "foreach": train.optm_impl == "foreach"}
    optimizer_library = importlib.import_module("torchao.optim" if is_8bit else "torch.optim")
    optimizer_class = MuonWithAdamW if train.optm_name == "Muon" else getattr(optimizer_library, train.optm_name)
    optimizer: Optimizer = optimizer_class(
        [group for group in parameter_groups if group["params"]],
        lr=learning_rates[GLOBAL_LR_KEY],
        betas=train.optm_betas,
        eps=train.epsilon,
        **optimizer_args,
    )
    return optimizer


def learning_rate_factor(step: int, total_steps: int, train_config: TrainConfig) -> float:
    """Return the factor of the peak learning rate at optimizer step `step` (0-based) of `total_steps`.

    The phases warm-up, stable and decay are those of Cosmos-RL (`optm/__init__.py`), with two corrections. Step k of W
    warm-up steps has the factor start + (1 - start) * (k + 1) / W; in Cosmos-RL, step 0 has the start factor, so with
    the default of 0 it changes no weight. A decay that would begin inside the warm-up is shortened to begin after it.
    """
    num_warmup_steps = train_config.optm_warmup_steps
    num_warmup_steps = int(num_warmup_steps * total_steps) if isinstance(num_warmup_steps, float) else num_warmup_steps
    num_warmup_steps = min(num_warmup_steps, total_steps)
    if step < num_warmup_steps:
        warmup_start_factor = train_config.optm_warmup_start_factor
        return warmup_start_factor + (1 - warmup_start_factor) * (step + 1) / num_warmup_steps

    num_decay_steps = total_steps - num_warmup_steps
    if train_config.optm_decay_ratio is not None:
        num_decay_steps = min(num_decay_steps, round(total_steps * train_config.optm_decay_ratio))
    num_steps_since_decay_start = step - (total_steps - num_decay_steps)
    if num_steps_since_decay_start <= 0:
        return 1.0
    decay_progress = min(1.0, num_steps_since_decay_start / max(1, num_decay_steps))
    decay_factor = {
        "none": 1.0,
        "linear": 1 - decay_progress,
        "sqrt": 1 - math.sqrt(decay_progress),
        "cosine": (1 + math.cos(math.pi * decay_progress)) / 2,
    }[train_config.optm_decay_type or "none"]
    return train_config.optm_min_lr_factor + (1 - train_config.optm_min_lr_factor) * decay_factor


def set_learning_rate(optimizer: Optimizer, step: int, total_steps: int, train_config: TrainConfig) -> dict[str, float]:
    """Set the learning rate of every parameter group for optimizer step `step` (0-based). Return the learning rates as
    metrics: `lr`, and `lr/PATH` for each module path of `optm_lr`."""
    learning_rate_scale = learning_rate_factor(step, total_steps, train_config)
    for group in optimizer.param_groups:
        learning_rate = group["initial_lr"] * learning_rate_scale
        if isinstance(group["lr"], torch.Tensor):  # fill the tensor in place, because torchao's compiled step reads it
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate
    learning_rates = {path: lr * learning_rate_scale for path, lr in _get_learning_rates(train_config).items()}
    return {"lr" if path == GLOBAL_LR_KEY else f"lr/{path}": lr for path, lr in learning_rates.items()}


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> float:
    """Scale all gradients so that their global 2-norm is at most `max_norm`; return the norm before scaling.

    With `max_norm` <= 0 the norm is only measured. If the norm is not finite, the gradients stay unchanged: scaling
    would turn one bad value into NaN everywhere, and only the caller can skip the step.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    gradient_norm = total_norm(p.grad for p in parameters if p.grad is not None)
    scale_gradients(parameters, gradient_norm, max_norm)
    return float(gradient_norm)


def _get_learning_rates(train_config: TrainConfig) -> dict[str, float]:
    assert not isinstance(train_config.optm_lr, tuple)  # the capability check rejects a list of learning rates
    return train_config.optm_lr if isinstance(train_config.optm_lr, dict) else {GLOBAL_LR_KEY: train_config.optm_lr}


def _group_parameters_by_path(model: nn.Module, module_paths: Mapping[str, float]) -> dict[str, list[nn.Parameter]]:
    """Return the trained parameters by the deepest of the module paths `module_paths` that contains them."""
    names_by_parameter: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names_by_parameter.setdefault(parameter, []).append(name)
    parameters_by_path: dict[str, list[nn.Parameter]] = {GLOBAL_LR_KEY: []}
    for parameter, parameter_names in names_by_parameter.items():
        matching_paths = [path for path in module_paths if any(f"{n}.".startswith(f"{path}.") for n in parameter_names)]
        path = max(matching_paths, key=lambda path: path.count("."), default=GLOBAL_LR_KEY)
        parameters_by_path.setdefault(path, []).append(parameter)
    return parameters_by_path


def check_module_paths(model: nn.Module, train_config: TrainConfig) -> None:
    """Check that each module path of `optm_lr` has trained parameters; raise ConfigError if one has none."""
    module_paths = _get_learning_rates(train_config)
    parameters_by_path = _group_parameters_by_path(model, module_paths)
    for path in [path for path in module_paths if path not in parameters_by_path]:
        module_names = [name for name, _ in model.named_modules() if name]
        raise ConfigError(
            f"train.optm_lr: no weight is trained with the rate of {path!r}; give the path of a module that is trained"
            + ("" if path in module_names else suggest_names(path, module_names))
        )
