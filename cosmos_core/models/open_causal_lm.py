"""Load the causal language model of a stage of a run: tokenizer, processor, sharded and trained weights."""

import logging

import torch

from cosmos_core.config.media import image_settings
from cosmos_core.config.schema.table import StageContext
from cosmos_core.data.prepared import has_images
from cosmos_core.errors import ConfigError, ModelError
from cosmos_core.models.balance import load_balancing_settings
from cosmos_core.models.causal_lm import CausalLM, make_input_processing
from cosmos_core.models.compilation import compile_blocks, report_compilations
from cosmos_core.models.freeze import mark_trained_weights
from cosmos_core.models.hf import check_row_length, check_rows, load_model, load_tokenizer
from cosmos_core.models.kernels import enable_flash_attention_3, enable_fp8_if_supported, patch_with_liger
from cosmos_core.models.lora import needs_base_weights
from cosmos_core.models.processor import ImageReader, load_processor, processor_files
from cosmos_core.models.sharded_load import init_on_meta
from cosmos_core.parallel.fsdp import move_buffers
from cosmos_core.parallel.mesh import open_mesh
from cosmos_core.run.stage import Stage

logger = logging.getLogger(__name__)


def open_model(stage: Stage) -> CausalLM:
    """Seed torch and load the language model of a stage of a run, sharded over the mesh, with a tokenizer that has a
    pad token. Raise ModelError if a file of the model cannot be loaded, ConfigError if the model does not support a
    setting of the recipe."""
    train_config, policy_config = stage.recipe.train, stage.recipe.policy
    stage.progress.phase("load")
    torch.manual_seed(stage.seed)
    torch.use_deterministic_algorithms(train_config.deterministic)
    tokenizer = load_tokenizer(stage.model, policy_config.model_revision, policy_config.chat_template)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # any token can pad, because masks are built from positions
    image_reader = open_image_reader(stage)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    mesh = open_mesh(policy_config.parallelism, device.type)
    load_model_function = init_on_meta if mesh and not needs_base_weights(policy_config.lora) else load_model
    if mesh and load_model_function is load_model:
        logger.info("every rank loads the whole model before it is split: policy.lora starts from its weights")
    model = load_model_function(
        stage.model,
        revision=policy_config.model_revision,
        dtype=getattr(torch, train_config.master_dtype),
        device=torch.device("cpu") if train_config.fsdp_offload else device,
        gradient_checkpointing=policy_config.model_gradient_checkpointing,
    )
    move_buffers(model, device)
    check_row_length(model.config, policy_config.model_max_length)
    prepared_folder = stage.data if stage.kind.reads_data == "prepared" else None
    stage_context = StageContext(stage.recipe, stage.kind)
    has_validation_completions = stage_context.measures_held_out_rows and stage.recipe.has_validation_completions
    completed_splits = ("train",) * (stage.kind.feed == "rollouts") + ("validation",) * has_validation_completions
    if prepared_folder is not None and (
        rows_warning := check_rows(model.config, prepared_folder, lambda: model, completed_splits=completed_splits)
    ):
        logger.warning("%s", rows_warning)
    enable_flash_attention_3()
    if policy_config.enable_liger_kernel:
        patch_with_liger(model)
    if stage.kind.trains_model:  # other stages load a model into which the adapter of `policy.lora` is already merged
        mark_trained_weights(model, policy_config)
        if train_config.fp8.enable_fp8:
            enable_fp8_if_supported(model, train_config.fp8)
    train_config = train_config.copy_with(
        compile=stage.recipe.should_compile_blocks(device.type) and policy_config.parallelism.tp_size == 1
    )
    if train_config.compile:
        report_compilations(stage.progress)
        compile_blocks(model)
    pixel_limits = image_settings(stage.recipe).pixels if image_reader else ()
    processor_file_contents = processor_files(
        stage.model, policy_config.model_revision, policy_config.chat_template, pixel_limits
    )
    load_balancing = load_balancing_settings(model, policy_config.aux_loss_coeff) if stage.kind.trains_model else None
    input_processing = make_input_processing(tokenizer, model, image_reader, processor_file_contents)
    return CausalLM(model, train_config, input_processing, mesh, load_balancing)


def open_image_reader(stage: Stage) -> ImageReader | None:
    """Return the reader of the images in the prepared rows that a stage of a run reads; None: the rows have no images.
    Raise ConfigError if the recipe has load balancing or a parallelism that does not support images, ModelError if the
    model has no processor."""
    if stage.data is None or not has_images(stage.data):
        return None
    if unsupported_setting := stage.recipe.explain_missing_image_support(stage.kind):
        raise ConfigError(unsupported_setting)
    processor = load_processor(stage.model, stage.recipe.policy.model_revision, image_settings(stage.recipe).pixels)
    if processor is None:
        raise ModelError(f"{stage.model}: the prepared rows show images, and the model has no processor to read them")
    return ImageReader(processor)
