"""Load the diffusion model of a stage: model family, denoiser on the mesh, and choice of trained weights."""

import logging
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cosmos_core.models.compiled import compile_blocks, watch_compiling
from cosmos_core.models.denoiser import Denoiser
from cosmos_core.models.families import open_family
from cosmos_core.models.freeze import mark_trained_weights
from cosmos_core.models.recompute import Recompute, selective
from cosmos_core.parallel.fsdp import move_buffers
from cosmos_core.parallel.mesh import open_mesh
from cosmos_core.run.stage import Stage

logger = logging.getLogger(__name__)


def open_model(stage: Stage) -> Denoiser:
    """Seed torch and load the denoiser of a stage's pipeline, sharded over the mesh, without text encoders and VAE.

    Raises:
        ModelError: the model is not a pipeline of a supported family, or cannot be loaded.
        ConfigError: the model does not support a setting of the recipe.
    """
    train, policy = stage.recipe.train, stage.recipe.policy
    stage.progress.phase("load")
    torch.manual_seed(stage.seed)
    torch.use_deterministic_algorithms(train.deterministic)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    family = open_family(stage.model, policy, device)
    mesh = open_mesh(policy.parallelism, device.type)
    if mesh and mesh.context:
        family.check_context(mesh.context.size())
    if mesh:
        logger.info("every rank loads the whole denoiser before it is split")
    model = family.load_denoiser(getattr(torch, train.master_dtype))
    model.to(torch.device("cpu") if train.fsdp_offload else device)
    move_buffers(model, device)
    recompute_blocks(model, policy.model_gradient_checkpointing)
    if stage.kind.trains_model:
        mark_trained_weights(model, policy, family.lora_targets)
    if stage.recipe.should_compile_blocks(device.type):
        watch_compiling(stage.progress)
        compile_blocks(model)
    adapter = Denoiser(model, family, train, mesh)
    adapter.model_class = policy.model_class
    return adapter


def recompute_blocks(model: Any, how: Recompute) -> None:
    """Make the blocks of a denoiser recompute activations in the backward pass. If the denoiser does not support
    recomputation, log a warning and keep all activations. `how` is a setting of the type `recompute.Recompute`."""
    if not how:
        return
    settings: dict[str, Any] = {"context_fn": selective} if how == "selective" else {}

    def run(module: nn.Module, *args: Any) -> Any:
        return checkpoint(module.__call__, *args, use_reentrant=False, **settings)

    try:
        model.enable_gradient_checkpointing(run)
    except ValueError as error:
        logger.warning("policy.model_gradient_checkpointing has no effect, every activation is kept: %s", error)
