"""Stage kind `export` for a diffusion model: write the pipeline with its denoiser in `train.param_dtype`, verify the
pipeline, and add a model card."""

from functools import partial
from typing import Any

import torch

from cosmos_core.checkpoint import export
from cosmos_core.checkpoint.load_checkpoint_model import find_checkpoint_step, find_train_stage, load_checkpoint_model
from cosmos_core.models.export_pipeline import ADAPTER_FILE, export_pipeline
from cosmos_core.models.families import open_pipeline
from cosmos_core.models.lora import ADAPTER_FOLDER, has_lora_adapter
from cosmos_core.models.verify_pipeline_export import verify_pipeline
from cosmos_core.run.loading import render_extra_packages, render_pipeline_arguments
from cosmos_core.run.stage import Stage
from cosmos_core.types import Outcome


def run(stage: Stage) -> Outcome:
    """Export a diffusion pipeline as `export.run` exports a language model: the pipeline that the upstream stage wrote
    or, with the setting `checkpoint`, the pipeline with the weights of a checkpoint of that stage."""
    stage.progress.phase("load")
    policy = stage.recipe.policy
    if stage.config.checkpoint:
        step, training_stage = find_checkpoint_step(stage), find_train_stage(stage)
        model_family = open_pipeline(training_stage.model, policy)
        model: Any = load_checkpoint_model(stage, step, model_family)
    else:
        step = export.num_trained_steps(stage)
        model_family = open_pipeline(stage.model, policy)
        model = model_family.load_denoiser(torch.float32)
    export_path, dtype = stage.path / export.export_folder(step), getattr(torch, stage.recipe.train.param_dtype)
    stage.progress.phase("export")
    copied_files = {} if stage.config.checkpoint else export.adapter_files(stage)
    model_index = model_family.folder.model_index
    load_code = f"DiffusionPipeline.from_pretrained(path{render_pipeline_arguments(model_index)})"
    loading_instructions = export.LoadingInstructions(
        "diffusers",
        ("from diffusers import DiffusionPipeline", "", f"pipeline = {load_code}{render_extra_packages(model_index)}"),
        f"The adapter is merged into these weights; `{ADAPTER_FOLDER}/{ADAPTER_FILE}` has it alone: load it onto the "
        f"base model with `pipeline.load_lora_weights`.",
    )
    readme_content = export.model_card(stage, loading_instructions).encode()
    extra_files = {"README.md": readme_content} | export.license_files(stage) | copied_files
    export_pipeline(model_family, model, export_path, dtype=dtype, extra_files=extra_files)
    run_checks = partial(verify_pipeline, model_family, model, export_path, dtype=dtype, model_class=policy.model_class)
    has_adapter = bool(copied_files) or has_lora_adapter(model)
    weight_files = export_path.rglob("*.safetensors")
    return export.make_verified_outcome(stage, step, run_checks, copied_files, weight_files, has_adapter=has_adapter)
