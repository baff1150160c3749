"""Loading of the model from one checkpoint of a training, for a stage with the setting `checkpoint`.

The model is identical to the one that the training would have exported at that step.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp

from cosmos_core.checkpoint.resume import resume_obstacle, saved_steps, step_folder
from cosmos_core.checkpoint.state import TrainState, named_tensors
from cosmos_core.config.inputs import referenced_stage
from cosmos_core.errors import ModelError
from cosmos_core.models.disk import unwrap_checkpoint_errors
from cosmos_core.models.freeze import mark_trained_weights
from cosmos_core.models.hf import load_model
from cosmos_core.run.stage import Stage, find_source_stage, load_stage

if TYPE_CHECKING:
    from cosmos_core.models.diffusion import DiffusionModel


def find_checkpoint_step(stage: Stage) -> int:
    """Return the step of the upstream checkpoint that a stage's setting `checkpoint` (a number or `best`) selects.
    Raise `ModelError` if this checkpoint is not complete, or if `best` is set and the training was not validated."""
    step_or_best, stage_name = stage.config.checkpoint, referenced_stage(stage.config.model)
    error_prefix = f"checkpoint = {step_or_best!r} of stage {stage_name!r}"
    upstream_result = stage.inputs[str(stage_name)]
    if step_or_best == "best":
        if not (best_step_record := upstream_result["info"].get("best")):
            raise ModelError(
                f"{error_prefix}: it was not validated, so no step is the best; set validation.enable = true"
            )
        step_or_best = best_step_record["step"]
    step, checkpoints_folder = int(step_or_best), find_source_stage(Path(upstream_result["path"])) / "checkpoints"
    if step not in saved_steps(checkpoints_folder):
        saved_steps_text = ", ".join(map(str, saved_steps(checkpoints_folder))) or "none"
        raise ModelError(
            f"{error_prefix}: there is no checkpoint of step {step_or_best}, only {saved_steps_text}; train with "
            f"train.ckpt.enable_checkpoint = true, and raise train.ckpt.max_keep to keep more; a finished training is "
            f"made again with --from-stage {stage_name}"
        )
    if obstacle := resume_obstacle(checkpoints_folder, step, None):
        raise ModelError(f"{error_prefix}: {step_folder(checkpoints_folder, step)}: {obstacle}; choose another step")
    return step


def load_checkpoint_model(stage: Stage, step: int, diffusion_model: "DiffusionModel | None" = None) -> Any:
    """Return the model of the upstream training after `step` steps, on the CPU in its training dtype: the denoiser of
    `diffusion_model` or, if that is None, a causal language model. If the training kept a moving average of the
    weights, the weights are this average. Raise a `ModelError` if the initial model cannot be loaded, or the checkpoint
    lacks a trained parameter of the model."""
    training_stage = find_train_stage(stage)
    train_config, policy = training_stage.recipe.train, training_stage.recipe.policy
    dtype = getattr(torch, train_config.master_dtype)
    torch.manual_seed(training_stage.seed)  # the training's seed gives LoRA adapters the same initial weights
    if diffusion_model is None:
        model: Any = load_model(training_stage.model, revision=policy.model_revision, dtype=dtype)
    else:
        model = diffusion_model.load_denoiser(dtype)
    mark_trained_weights(model, policy, diffusion_model.lora_targets if diffusion_model else ())
    policy_folder = step_folder(training_stage.path / "checkpoints", step) / "policy"
    storage_reader = dcp.HuggingFaceStorageReader(str(policy_folder))
    saved_tensor_names = storage_reader.read_metadata().state_dict_metadata.keys()
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    ema_weights = {
        name: torch.empty_like(p, dtype=torch.float32) for name, p in parameters.items() if train_config.ema_enable
    }
    # An SGD optimizer without momentum has no state, so only weights are read from the checkpoint.
    tensors = named_tensors(TrainState(model, torch.optim.SGD(parameters.values()), weight_sets={"ema": ema_weights}))
    if missing_names := sorted(tensors.keys() - saved_tensor_names):
        raise ModelError(
            f"checkpoint {policy_folder} has no {missing_names[0]!r}: it is of another model than "
            f"{training_stage.model}"
        )
    with unwrap_checkpoint_errors():
        dcp.load(tensors, storage_reader=storage_reader, no_dist=True)
    with torch.no_grad():
        for name, ema_weight in ema_weights.items():
            parameters[name].copy_(ema_weight)
    return model


def find_train_stage(stage: Stage) -> Stage:
    """Return the upstream stage that trained the model whose checkpoint `stage` selects."""
    return load_stage(find_source_stage(Path(stage.inputs[str(referenced_stage(stage.config.model))]["path"])))
