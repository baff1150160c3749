"""Loading of the model from one checkpoint of a training, for a stage with the setting `checkpoint`.

The model is identical to the one that the training would have exported at that step.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from transformers import PreTrainedModel

from cosmos_core.checkpoint.resume import resume_obstacle, saved_steps, step_folder
from cosmos_core.checkpoint.state import TrainState, named_tensors
from cosmos_core.config.inputs import source_of
from cosmos_core.errors import ModelError
from cosmos_core.models.disk import unwrap_checkpoint_errors
from cosmos_core.models.freeze import mark_trained_weights
from cosmos_core.models.hf import load_model
from cosmos_core.run.stage import Stage, load_stage


def pinned_step(stage: Stage) -> int:
    """Return the step of the upstream checkpoint that a stage's setting `checkpoint` (a number or `best`) selects.

    Raises:
        ModelError: the upstream training has no complete checkpoint of the step, or, without validation, no best step.
    """
    choice, name = stage.config.checkpoint, source_of(stage.config.model)
    key = f"checkpoint = {choice!r} of stage {name!r}"
    upstream = stage.inputs[str(name)]
    if choice == "best":
        best = upstream["info"].get("best")
        if not best:
            raise ModelError(f"{key}: it was not validated, so no step is the best; set validation.enable = true")
        choice = best["step"]
    folder = Path(upstream["path"]) / "checkpoints"
    if int(choice) not in saved_steps(folder):
        steps = ", ".join(map(str, saved_steps(folder))) or "none"
        raise ModelError(
            f"{key}: there is no checkpoint of step {choice}, only {steps}; train with train.ckpt.enable_checkpoint = "
            f"true, and raise train.ckpt.max_keep to keep more"
        )
    if reason := resume_obstacle(folder, int(choice), None):
        raise ModelError(f"{key}: {step_folder(folder, int(choice))}: {reason}; choose another step")
    return int(choice)


def pinned_model(stage: Stage, step: int, start: Callable[[Stage], Any] | None = None) -> Any:
    """Return the model of the upstream training after `step` steps, on the CPU in its training dtype.

    If the training kept a moving average of the weights, the model has the average instead of the weights.

    Args:
        stage: stage whose setting `checkpoint` selects the checkpoint.
        step: training step of the checkpoint.
        start: function that loads the initial model of the training stage; None: load a causal language model.

    Raises:
        ModelError: the initial model of the training cannot be loaded, or has changed.
    """
    training = training_of(stage)
    train = training.recipe.train
    torch.manual_seed(training.seed)  # so that LoRA adapters have the same initial weights as in the training
    model = (start or _causal_lm)(training)
    folder = step_folder(training.path / "checkpoints", step) / "policy"
    reader = dcp.HuggingFaceStorageReader(str(folder))
    saved = reader.read_metadata().state_dict_metadata.keys()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    averages = {name: torch.empty_like(p, dtype=torch.float32) for name, p in trained.items() if train.ema_enable}
    # An SGD optimizer without momentum has no state, so only weights are read from the checkpoint.
    tensors = named_tensors(TrainState(model, torch.optim.SGD(trained.values()), named_weights={"ema": averages}))
    if missing := sorted(tensors.keys() - saved):
        raise ModelError(f"checkpoint {folder} has no {missing[0]!r}: it is of another model than {training.model}")
    with unwrap_checkpoint_errors():
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    with torch.no_grad():
        for name, average in averages.items():
            trained[name].copy_(average)
    return model


def training_of(stage: Stage) -> Stage:
    """Return the upstream training stage of the model whose checkpoint `stage` names."""
    return load_stage(Path(stage.inputs[str(source_of(stage.config.model))]["path"]))


def _causal_lm(training: Stage) -> PreTrainedModel:
    """Return the initial causal language model of a training stage, with its trainable parameters marked."""
    train, policy = training.recipe.train, training.recipe.policy
    model = load_model(training.model, revision=policy.model_revision, dtype=getattr(torch, train.master_dtype))
    mark_trained_weights(model, policy)
    return model
