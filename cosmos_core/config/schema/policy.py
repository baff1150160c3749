"""`[policy]`: the model, its trained parameters, and its parallelism."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, NonNegativeFloat, model_validator

from cosmos_core.config.schema.diffusers import DiffusersConfig
from cosmos_core.config.schema.field_metadata import EnabledBy, ReferenceKind, ResultNeutral
from cosmos_core.config.schema.lora import LoraConfig
from cosmos_core.config.schema.modality import CAUSAL_LM, DIFFUSION, Modality
from cosmos_core.config.schema.parallelism import PolicyParallelismConfig
from cosmos_core.config.schema.table import StageContext, Table, short_toml
from cosmos_core.config.schema.value_types import ModelName, NameOrImportPath, StringList, TokenCount, check_regexes


class PolicyConfig(Table):
    """`[policy]`: the model, its trained parameters, and its parallelism."""

    parallelism: PolicyParallelismConfig = PolicyParallelismConfig()
    """Sizes of the trainer's device mesh."""
    diffusers: Annotated[DiffusersConfig, EnabledBy("is_diffusers")] = DiffusersConfig()
    """Settings of diffusion models; they have an effect only with `is_diffusers`."""
    is_diffusers: bool = False
    """Whether the model is a pipeline of the library diffusers."""
    model_class: Annotated[NameOrImportPath | None, ReferenceKind.CODE] = None
    """User class of a family of diffusion models, `path/file.py:Class`; None: the family of the pipeline's class."""
    model_name_or_path: ModelName = "Qwen/Qwen2.5-VL-7B-Instruct"
    """Model that is trained: a folder in Hugging Face format, its URL in a store (`s3://BUCKET/PREFIX`; `/latest` at
    the end selects the published version), or a Hub id (the fingerprint includes the content, not the name); in a
    pipeline `model = "stage:NAME"` replaces it."""
    model_safetensor_path: Annotated[str | None, ResultNeutral, ReferenceKind.PATH] = None
    """Folder or .safetensors file with the weights, if they are not in the folder of config.json (the fingerprint takes
    its content); None: the folder of config.json."""
    model_revision: str | None = None
    """Revision of the model on the Hub; None: the newest."""
    chat_template: Annotated[str | None, ResultNeutral, ReferenceKind.PATH] = None
    """Chat template that replaces the tokenizer's own, also in exports: a Jinja file, `chatml`, or `plain`, with turns
    `User: ...` and `Assistant: ...` and the end token (the fingerprint includes the content). None: the tokenizer's
    template."""
    model_max_length: TokenCount = 4096
    """Maximum number of tokens of a sequence: longer SFT rows are truncated on the right, and prompt and completion
    together never exceed it."""
    model_gradient_checkpointing: bool | Literal["selective"] = True
    """Recompute activations in the backward pass: less memory, about a third more compute. `selective` (not in
    Cosmos-RL): recompute only norms, activation functions and wide matrices, with memory and compute between the other
    two. For a family without support all activations are kept, with a warning."""
    lora: LoraConfig | None = None
    """Settings of low-rank adapters; None: all weights are trained."""
    trainable_map: dict[str, bool] | None = None
    """Map from the name of a module or parameter to whether it is trained; an inner name takes precedence over an outer
    name. The map applies after `freeze_pattern` and `trainable_pattern`. None: what is trained depends on these
    patterns only."""
    freeze_pattern: Annotated[StringList | None, AfterValidator(check_regexes)] = None
    """Regular expressions, matched anywhere in a name, of parameters that are not trained; None: no such parameters."""
    trainable_pattern: Annotated[StringList | None, AfterValidator(check_regexes)] = None
    """Regular expressions of the only parameters that are trained; None: all."""
    enable_liger_kernel: bool = False
    """Use Liger's kernels for norms, rotary embedding and activation, on an NVIDIA GPU; not yet measured on a GPU."""
    aux_loss_coeff: NonNegativeFloat = 0.0
    """Weight of the load-balancing loss of mixture-of-experts models (arXiv 2101.03961), which is added to the loss of
    any algorithm. The loss of each sequence is averaged over the tokens of an optimizer step, so that it does not
    depend on micro-batches; it is the metric `model_loss`. 0: off."""

    @property
    def modality(self) -> Modality:
        """Return the modality of the model, text or diffusion; algorithms declare which modalities they train."""
        return DIFFUSION if self.is_diffusers else CAUSAL_LM

    def unsupported_setting_errors(self, stage: StageContext) -> Iterator[str]:
        algorithm = stage.recipe.train.train_policy
        if stage.kind.trains_model and self.modality.name not in algorithm.modalities:
            reason = f"train.train_policy.trainer_type = {algorithm.trainer_type!r} does not train such models"
            remedy = "give one that does" if self.is_diffusers else "set it to true"
            yield f"policy.is_diffusers = {short_toml(self.is_diffusers)}: {reason}; {remedy}"
        yield from self._diffusion_errors(stage) if self.is_diffusers else ()
        if self.enable_liger_kernel and stage.kind.has_mesh:
            yield from self.parallelism.unsupported_axis_errors("policy.enable_liger_kernel = true")
        for axis in ("tp_size", "cp_size", "pp_size") if self.aux_loss_coeff and stage.kind.trains_model else ():
            if (size := getattr(self.parallelism, axis)) > 1:
                setting_text = f"policy.aux_loss_coeff = {self.aux_loss_coeff}"
                reason = "routers must see whole sequences on one rank"
                yield f"{setting_text} excludes policy.parallelism.{axis} = {size} here: {reason}; set it to 1"

    def _diffusion_errors(self, stage: StageContext) -> Iterator[str]:
        for axis in ("tp_size", "pp_size", "ep_size") if stage.kind.has_mesh else ():
            if (size := getattr(self.parallelism, axis)) > 1:
                yield (
                    f"policy.parallelism.{axis} = {size}: this version spreads diffusion models by dp_shard_size and "
                    f"dp_replicate_size, SANA-Video by cp_size too; set it to 1"
                )
        if stage.kind.has_mesh and stage.recipe.train.compile and self.parallelism.cp_size > 1:
            cp_setting = f"policy.parallelism.cp_size = {self.parallelism.cp_size}"
            yield f"train.compile = true excludes {cp_setting} for diffusion models in this version; set it to false"
        if self.enable_liger_kernel:
            yield "policy.enable_liger_kernel = true: Liger has no kernels for diffusion models; leave it out"
        for name in filter(self.is_set, ("model_safetensor_path", "chat_template")):
            yield f"policy.{name} is for language models; leave it out with policy.is_diffusers = true"
        language_model_settings = {
            "logging.report_mfu": stage.recipe.logging.report_mfu,
            "rollout.multi_turn_config.enable": stage.recipe.rollout.multi_turn_config.enable,
            "train.sequence_packing": stage.recipe.train.sequence_packing,
        }
        for key in filter(language_model_settings.get, language_model_settings if stage.kind.trains_model else ()):
            yield f"{key} = true is for language models; leave it out with policy.is_diffusers = true"
        if stage.kind.trains_model and stage.recipe.train.fp8.enable_fp8:
            yield "train.fp8.enable_fp8 = true: this version trains diffusion models without fp8; leave it out"
        if self.lora and str(self.lora.init_lora_weights).startswith(("pissa", "olora")):
            problem = "moves a part of the base weights, onto which diffusers could not load the adapter"
            yield f"policy.lora.init_lora_weights = {self.lora.init_lora_weights!r} {problem}; use 'gaussian' or true"
        if self.lora and self.lora.modules_to_save:
            yield "policy.lora.modules_to_save: diffusers loads adapters alone; leave it out, or train all weights"

    @model_validator(mode="after")
    def _check_freeze_patterns(self) -> Self:
        if self.freeze_pattern and self.trainable_pattern:
            raise ValueError("freeze_pattern and trainable_pattern exclude each other; keep one of them")
        return self
