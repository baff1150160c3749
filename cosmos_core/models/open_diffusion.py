"""Load the diffusion model of a stage of a run: model family, denoiser on the mesh, and choice of trained weights."""

import logging

import torch

from cosmos_core.models.compilation import compile_blocks, report_compilations
from cosmos_core.models.denoiser import Denoiser
from cosmos_core.models.families import open_pipeline
from cosmos_core.models.freeze import mark_trained_weights
from cosmos_core.models.recompute import recompute_activations
from cosmos_core.parallel.fsdp import move_buffers
from cosmos_core.parallel.mesh import open_mesh
from cosmos_core.run.stage import Stage

logger = logging.getLogger(__name__)


def open_model(stage: Stage) -> Denoiser:
    """Seed torch and load the denoiser of the diffusion pipeline that a stage of a run uses, sharded over the mesh,
    without text encoders and VAE. Raise ModelError if no model family supports the pipeline, ConfigError if the model
    does not support a setting of the recipe."""
    train_config, policy_config = stage.recipe.train, stage.recipe.policy
    stage.progress.phase("load")
    torch.manual_seed(stage.seed)
    torch.use_deterministic_algorithms(train_config.deterministic)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    family = open_pipeline(stage.model, policy_config, device)
    mesh = open_mesh(policy_config.parallelism, device.type)
    if mesh and mesh.cp:
        family.check_context_parallel_size(mesh.cp.size())
    if mesh:
        logger.info("every rank loads the whole denoiser before it is split")
    model = family.load_denoiser(getattr(torch, train_config.master_dtype))
    model.to(torch.device("cpu") if train_config.fsdp_offload else device)
    move_buffers(model, device)
    recompute_activations(model, policy_config.model_gradient_checkpointing)
    if stage.kind.trains_model:
        mark_trained_weights(model, policy_config, family.lora_targets)
    if stage.recipe.should_compile_blocks(device.type):
        report_compilations(stage.progress)
        compile_blocks(model)
    return Denoiser(model, family, train_config, mesh, policy_config.model_class)
