"""`[rollout]`: how completions are generated."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from cosmos_core.config.schema.field_metadata import EnabledBy, FieldUnit, ReferenceKind, ResultNeutral, class_choices
from cosmos_core.config.schema.multi_turn import MultiTurnRolloutConfig
from cosmos_core.config.schema.parallelism import RolloutParallelismConfig
from cosmos_core.config.schema.table import StageContext, Table, add_notice
from cosmos_core.config.schema.value_types import CompletionCount, Fraction, NameOrImportPath, TokenCount, TopK, TopP

VLLM_TEMPERATURES = (0.01, 2.0)
"""Range of temperatures at which vLLM samples: it silently raises a lower temperature and refuses a higher one."""
_VLLM_MESH_KEYS = {"n_init_replicas", "tp_size", "pp_size", "dp_shard_size"}


class SamplingConfig(Table):
    """`[rollout.sampling_config]`: settings of token sampling in training."""

    temperature: NonNegativeFloat = 1.0
    """Softmax temperature; 0: greedy. Should equal `train.train_policy.temperature`."""
    top_p: TopP = 1.0
    """Probability mass of nucleus sampling; below 1 tokens are sampled from another distribution than the policy's, and
    the loss corrects this by importance weights (`cosmos_core/algorithms/correction.py`)."""
    top_k: TopK = -1
    """Number of most likely tokens from which a token is sampled, with the same importance weights in the loss as
    `top_p`; -1: all."""
    repetition_penalty: PositiveFloat = 1.0
    """Penalty on the logits of repeated tokens, which above 1 become less likely, with the same importance weights in
    the loss as `top_p`; 1: off."""


class RolloutAsyncConfig(Table):
    """`[rollout.async_config]`: settings that have an effect with `rollout.mode = "async"`."""

    max_concurrent_requests: Annotated[PositiveInt, FieldUnit("prompts")] = 10
    """Maximum number of prompts that one engine generates for at a time."""


class RolloutConfig(Table):
    """`[rollout]`: settings of the rollout engines, and of the generation of completions."""

    parallelism: RolloutParallelismConfig = RolloutParallelismConfig()
    """Settings of the number and the device meshes of the rollout engines."""
    backend: Annotated[NameOrImportPath, class_choices("cosmos_core.rollout", "Engine"), ReferenceKind.CODE] = "vllm"
    """Engine that generates completions: `vllm`; `hf`, a sampling loop on the trainer's modules, which also replaces a
    vLLM that cannot be imported, with a warning; `flow_sampler`, the denoiser of the trainer, for diffusion models; or
    a user class `path/file.py:Class`. Of Cosmos-RL's values, `trtllm` and `vllm_async` mean `vllm`, and
    `diffusion_nft_rollout` means `flow_sampler`."""
    mode: Literal["sync", "async"] = "sync"
    """Rule for the number of prompts that an engine in a separate process generates for at a time: `batch_size`, or
    with `async` `async_config.max_concurrent_requests`. An engine in the trainer's processes always has
    `batch_size`."""
    max_response_length: TokenCount = 2048
    """Maximum number of tokens of a completion. A completion is shorter if its prompt leaves fewer tokens of
    `policy.model_max_length`; a prompt that leaves none is skipped."""
    n_generation: CompletionCount = 16
    """Number of completions per prompt: the group size."""
    n_generation_mini_batch: CompletionCount | None = None
    """Maximum number of completions of one prompt that are generated at once, which bounds memory and changes no token;
    None: all. vLLM generates `batch_size` times as many sequences at a time."""
    batch_size: Annotated[PositiveInt, FieldUnit("prompts")] = 1
    """Number of prompts per generation call; changes speed, not results."""
    quantization: Literal["none", "fp8", "mxfp4"] = "none"
    """Number format of the weights that vLLM computes with on a GPU. `none`: that of the trainer's weights. `fp8`: the
    trainer's weights are rounded to 8 bits at each sync. `mxfp4`: the weights of experts are rounded at each sync to
    the MXFP4 format of the checkpoint (gpt-oss). On CPU always that of the trainer's weights, with a warning."""
    seed: int | None = None
    """Seed of sampling; None: `train.seed`."""
    sampling_config: SamplingConfig = SamplingConfig()
    """Settings of token sampling in training."""
    enforce_eager: Annotated[bool, ResultNeutral] = False
    """Run vLLM without CUDA graphs, which saves their memory and the time to capture them (Cosmos-RL: true by default);
    no effect on CPU."""
    gpu_memory_utilization: Annotated[Fraction, Field(gt=0), ResultNeutral] = 0.8
    """Fraction of a GPU's memory that vLLM may use; no effect on CPU."""
    probe_interval: Annotated[PositiveInt, FieldUnit("train steps"), ResultNeutral] = 50
    """Number of train steps between two comparisons of the log-probabilities of engine and trainer. They are also
    compared when an engine receives its first weights, and when it first receives weights after each level of vLLM's
    sleep mode; a difference beyond rounding ends the stage."""
    stop_on_alarm: Annotated[bool, ResultNeutral] = False
    """End the stage if the completions of a step show that an engine does not compute the same as the trainer
    (`watch/alarm`); the next attempt of the stage restarts the engines, and continues from the last checkpoint."""
    engine_timeout_seconds: Annotated[PositiveFloat, FieldUnit("seconds"), ResultNeutral] = 600.0
    """Time without a forward pass, while there are prompts, after which an engine in a separate process is killed and
    restarted; other engines take over its prompts."""
    multi_turn_config: MultiTurnRolloutConfig = MultiTurnRolloutConfig()
    """Settings of conversations of several turns, with tools."""
    async_config: RolloutAsyncConfig = RolloutAsyncConfig()
    """Settings that have an effect with `mode = "async"`."""
    async_r2r_sync: Literal["disabled", "generation", "inference"] = "disabled"
    """How engines in separate processes receive new weights. `disabled`: bucket by bucket between two forward passes;
    completions continue with the new weights. `inference`: all buckets are received while the engine generates, then
    loaded between two passes. `generation`: as `inference`, but loaded after all completions in flight have ended, so
    that each completion is sampled from one version of the weights."""
    weight_transfer: Annotated[Literal["host", "native", "delta"], ResultNeutral] = "host"
    """How weights reach engines in separate processes. `host`: through host memory. `delta`: through host memory, but
    only the values that changed, which are few in half precision at a small learning rate; the first rank and each
    engine keep a copy of the weights in host memory. `native`: by vLLM's own weight transfer, which is an NCCL
    broadcast with `mode = "disaggregated"` and CUDA IPC with `colocated_separated`; it has never run on a GPU. If an
    engine does not support it (on CPU, without NCCL, of another backend), or a load fails, weights are transferred
    through host memory, with a line in the log."""
    prefetch_rollout: bool = False
    """Prefetch the next prompts during generation."""
    prefetch_queue_maxsize: Annotated[PositiveInt, FieldUnit("batches"), EnabledBy("prefetch_rollout")] = 2
    """Maximum number of prefetched batches of prompts."""

    @property
    def max_prompts_in_flight(self) -> int:
        """Return the number of prompts that an engine in a separate process generates for at a time."""
        return self.async_config.max_concurrent_requests if self.mode == "async" else self.batch_size

    @property
    def native_transfer_conflicts(self) -> list[str]:
        """Return the settings, as text, with which `weight_transfer = "native"` has no effect."""
        conflict_by_setting = {
            f"backend = {self.backend!r}": self.backend != "vllm",
            f"quantization = {self.quantization!r}": self.quantization == "mxfp4",
            f"async_r2r_sync = {self.async_r2r_sync!r}": self.async_r2r_sync != "disabled",
        }
        return [f"rollout.{setting}" for setting, is_conflict in conflict_by_setting.items() if is_conflict]

    def _engine_notices(self, stage: StageContext) -> Iterator[str]:
        """Yield notices about settings of engines in separate processes if the recipe has no such engines."""
        if stage.kind.feed != "rollouts" or stage.recipe.mode != "colocated":
            return
        engine_keys = [f"rollout.{name}" for name in ("mode", "async_r2r_sync", "weight_transfer") if self.is_set(name)]
        if self.parallelism.is_set("n_init_replicas"):
            engine_keys.append("rollout.parallelism.n_init_replicas")
        train_policy = stage.recipe.train.train_policy
        if train_policy.dynamic_sampling is None and train_policy.is_set("outdated_rollout_fetch_batch_size"):
            engine_keys.append("train.train_policy.outdated_rollout_fetch_batch_size")
        for key in engine_keys:
            yield f"{key} has no effect here: with mode = 'colocated' each rank has an engine inside"

    def _native_transfer_notices(self, stage: StageContext) -> Iterator[str]:
        """Yield a notice if weights cannot be sent by vLLM's weight transfer (`weight_transfer = "native"`)."""
        if self.weight_transfer != "native" or stage.kind.feed != "rollouts" or stage.recipe.mode == "colocated":
            return
        conflicting_settings = self.native_transfer_conflicts + ["policy.lora"] * (stage.recipe.policy.lora is not None)
        if conflicting_settings:
            reason = "weights travel through host memory"
            yield f"rollout.weight_transfer = 'native' has no effect with {conflicting_settings[0]}: {reason}"
        else:
            fallback_text = "without a GPU or NCCL, weights travel through host memory"
            yield f"rollout.weight_transfer = 'native' has never run on a GPU; {fallback_text}"

    def unsupported_setting_errors(self, stage: StageContext) -> Iterator[str]:
        yield from self._temperature_errors(stage)
        train_config = stage.recipe.train
        if stage.kind.feed == "rollouts":
            if self.n_generation < 2 and train_config.train_policy.has_group_relative_advantages:
                yield "rollout.n_generation = 1: advantages compare completions of one group; make it at least 2"
            elif self.n_generation < 2 and train_config.train_policy.dynamic_sampling is not None:
                yield "rollout.n_generation = 1: variant = 'dapo' trains on groups that differ; make it at least 2"
            if stage.recipe.may_split_groups and stage.recipe.policy.is_diffusers:
                reason = "a train step of a diffusion model has whole groups"
                remedy = f"make it a multiple of rollout.n_generation = {self.n_generation}"
                yield f"train.train_batch_per_replica = {train_config.train_batch_per_replica}: {reason}; {remedy}"
            yield from self._greedy_sampling_errors(stage)
        has_separate_engines = stage.kind.feed == "rollouts" and stage.recipe.mode != "colocated"
        if has_separate_engines and train_config.ema_enable and stage.recipe.validation.enable:
            yield (
                f"mode = {stage.recipe.mode!r}: validation measures the moving average of train.ema_enable, whose "
                f"weights would reach completions in flight; set validation.enable = false and add a stage of kind "
                f"\"validate\", or take mode = 'colocated'"
            )
        if self.quantization != "none" and self.backend != "vllm":
            reason = f"backend {self.backend!r} computes with the trainer's weights"
            yield f"rollout.quantization = {self.quantization!r}: {reason}; set it to 'none', or take backend = 'vllm'"
        if not stage.kind.has_mesh or (stage.kind.feed == "dataset" and not stage.recipe.validation.reward_function):
            return
        num_ranks = stage.recipe.policy.parallelism.world_size
        key = f"rollout.parallelism.tp_size = {self.parallelism.tp_size}"
        is_disaggregated = stage.kind.feed == "rollouts" and stage.recipe.mode == "disaggregated"
        if num_ranks % self.parallelism.tp_size and not is_disaggregated:
            yield f"{key}: engines share the ranks of policy.parallelism, which are {num_ranks}; take a divisor of that"
        elif self.parallelism.tp_size > 1 and self.backend == "hf":
            yield f"{key}: backend 'hf' has the whole model on each rank; set it to 1"

    def _temperature_errors(self, stage: StageContext) -> Iterator[str]:
        if self.backend != "vllm" or stage.recipe.policy.is_diffusers:
            return
        temperature_by_key = {}
        has_endpoint = stage.kind.table == "sample" and bool(stage.recipe.sample.endpoint)
        if stage.kind.completes_prompts and not has_endpoint:
            temperature_by_key["rollout.sampling_config.temperature"] = self.sampling_config.temperature
        if stage.measures_held_out_rows and stage.recipe.has_validation_completions:
            temperature_by_key["validation.temperature"] = stage.recipe.validation.temperature
        min_temperature, max_temperature = VLLM_TEMPERATURES
        for key, temperature in temperature_by_key.items():
            if temperature != 0 and not min_temperature <= temperature <= max_temperature:
                reason = f"vLLM samples between {min_temperature} and {max_temperature}, and takes 0 for greedy"
                yield f"{key} = {temperature}: {reason}; or set rollout.backend = 'hf'"

    def _greedy_sampling_errors(self, stage: StageContext) -> Iterator[str]:
        """Yield errors for sampling settings with which all completions of a prompt are equal: nothing is learned."""
        sampling = self.sampling_config
        if stage.recipe.policy.is_diffusers or not stage.recipe.train.train_policy.has_group_relative_advantages:
            return
        for name, value, greedy_value in (("temperature", sampling.temperature, 0.0), ("top_k", sampling.top_k, 1)):
            if value == greedy_value:
                reason = "the completions of a prompt are the same, and nothing is learned of their differences"
                yield f"rollout.sampling_config.{name} = {value} takes the likeliest token: {reason}; raise it"

    def notices(self, stage: StageContext) -> Iterator[str]:
        yield from self._engine_notices(stage)
        yield from self._native_transfer_notices(stage)
        model_max_length = stage.recipe.policy.model_max_length
        has_text_rollouts = stage.kind.feed == "rollouts" and not stage.recipe.policy.is_diffusers
        if has_text_rollouts and stage.recipe.may_split_groups:
            groups_text = f"groups of rollout.n_generation = {self.n_generation} completions"
            setting_text = f"train.train_batch_per_replica = {stage.recipe.train.train_batch_per_replica}"
            yield f"{setting_text}: {groups_text} are compared as a whole and spread over train steps"
        if has_text_rollouts and self.max_response_length >= model_max_length:
            limit_text = f"the tokens that its prompt leaves of policy.model_max_length = {model_max_length}"
            yield f"rollout.max_response_length = {self.max_response_length}: a completion gets {limit_text}"
        changed_keys = filter(self.sampling_config.is_set, ("top_p", "top_k", "repetition_penalty"))
        changed_settings = [f"{name} = {getattr(self.sampling_config, name)}" for name in changed_keys]
        if changed_settings and stage.kind.trains_model and stage.recipe.train.train_policy.has_rollouts:
            yield (
                f"rollout.sampling_config: {', '.join(changed_settings)}: training completions are not drawn from the "
                f"policy; the loss weights their tokens by policy / sampled distribution, and never sees the tokens "
                f"that are cut off"
            )

    @property
    def checks_generation_config(self) -> bool:
        """Return whether the engine refuses a model with a generation_config.json that transformers refuses to save."""
        return self.backend == "vllm"

    @field_validator("backend")
    @classmethod
    def _replace_unknown_backend(cls, backend_name: str, info: ValidationInfo) -> str:
        if backend_name == "diffusion_nft_rollout":
            return "flow_sampler"
        if backend_name not in {"vllm_async", "trtllm"}:
            return backend_name
        add_notice(info, f"rollout.backend = {backend_name!r}: 'vllm', which generates instead")
        return "vllm"

    @model_validator(mode="after")
    def _check_engine_mesh(self) -> Self:
        for name in filter(self.parallelism.is_set, type(self.parallelism).model_fields):
            if self.backend == "vllm" and name not in _VLLM_MESH_KEYS:
                reason = f"backend {self.backend!r} takes only {', '.join(sorted(_VLLM_MESH_KEYS))}"
                raise ValueError(f"parallelism.{name} = {getattr(self.parallelism, name)!r}: {reason}; leave it out")
        return self
