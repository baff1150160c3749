"""`[rollout]`: how completions are generated."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import ValidationInfo, field_validator, model_validator

from cosmos_core.config.schema.marks import Needs, NoResult, Unit, Where, registered
from cosmos_core.config.schema.multi_turn import MultiTurnRolloutConfig
from cosmos_core.config.schema.parallelism import RolloutParallelismConfig
from cosmos_core.config.schema.table import InStage, Table, say
from cosmos_core.config.schema.values import (
    Completions,
    Fraction,
    NonNegativeFloat,
    Nucleus,
    PositiveFloat,
    PositiveInt,
    Thing,
    Tokens,
    TopK,
)

VLLM_TEMPERATURES = (0.01, 2.0)
"""Below, vLLM samples at 0.01 without an error; above, it raises one of its own."""
_VLLM_MESH = {"n_init_replicas", "tp_size", "pp_size", "dp_shard_size"}


class SamplingConfig(Table):
    """`[rollout.sampling_config]`"""

    temperature: NonNegativeFloat = 1.0
    """Softmax temperature; 0: greedy. Should equal `train.train_policy.temperature`."""
    top_p: Nucleus = 1.0
    """Nucleus mass; below 1 tokens are sampled from another distribution than the policy's, and the loss has importance
    weights for it (`cosmos_core/algorithms/correction.py`)."""
    top_k: TopK = -1
    """Keep the k most likely tokens, with the same weights in the loss; -1: all."""
    repetition_penalty: PositiveFloat = 1.0
    """Above 1 repeats become less likely, with the same weights in the loss; 1: off."""


class RolloutAsyncConfig(Table):
    """`[rollout.async_config]`: read with `rollout.mode = "async"`."""

    max_concurrent_requests: Annotated[PositiveInt, Unit("prompts")] = 10
    """Most prompts that one engine has at a time."""


class RolloutConfig(Table):
    """`[rollout]`"""

    parallelism: RolloutParallelismConfig = RolloutParallelismConfig()
    """Device mesh of one engine."""
    backend: Annotated[Thing, registered("cosmos_core.rollout", "Engine"), Where.CODE] = "vllm"
    """`vllm`, which Cosmos-RL's `trtllm` and `vllm_async` become; `hf`, a sampling loop on the trainer's own modules,
    which also stands in for a vLLM that cannot be imported, with a warning; `flow_sampler`, with the trainer's own
    denoiser, which Cosmos-RL's `diffusion_nft_rollout` becomes and every diffusion model has; or a class of your own,
    `path/file.py:Class`."""
    mode: Literal["sync", "async"] = "sync"
    """Number of prompts that an engine in a separate process has at a time: `batch_size`, or with `async`
    `async_config.max_concurrent_requests`. An engine in the trainer's processes always has `batch_size`."""
    max_response_length: Tokens = 2048
    """Maximum number of tokens of a completion; a prompt that leaves less room in `policy.model_max_length` gets a
    shorter completion, and a prompt that leaves no room is skipped."""
    n_generation: Completions = 16
    """Completions per prompt: the group size."""
    n_generation_mini_batch: Completions | None = None
    """Most completions of one prompt that are generated at once, which bounds memory and changes no token; None: all.
    vLLM has `batch_size` times as many sequences at a time."""
    batch_size: Annotated[PositiveInt, Unit("prompts")] = 1
    """Prompts per generation call; changes speed, not results."""
    quantization: Literal["none", "fp8", "mxfp4"] = "none"
    """Weights that vLLM computes with on a GPU: those of the trainer, or these rounded at each sync, to 8 bits or in
    experts to the MXFP4 that the checkpoint has them in (gpt-oss). On CPU those of the trainer, with a warning."""
    seed: int | None = None
    """Sampling seed; None: `train.seed`."""
    sampling_config: SamplingConfig = SamplingConfig()
    """How tokens are drawn in training."""
    enforce_eager: Annotated[bool, NoResult] = False
    """vLLM without CUDA graphs, which saves their memory and the time to capture them (Cosmos-RL: true when left out);
    no meaning on CPU."""
    gpu_memory_utilization: Annotated[Fraction, NoResult] = 0.8
    """Share of a GPU's memory that vLLM may take; no meaning on CPU."""
    probe_interval: Annotated[PositiveInt, Unit("train steps"), NoResult] = 50
    """Every so many steps, when an engine gets its first weights, and at its first load after each level of sleep,
    log-probabilities of engine and trainer are compared; a difference beyond rounding ends the stage."""
    stop_on_alarm: Annotated[bool, NoResult] = False
    """End the stage where the completions of a step show that engines do not compute what the trainer computes
    (`watch/alarm`); its next attempt starts them anew, from the last checkpoint."""
    engine_timeout_seconds: Annotated[PositiveFloat, Unit("seconds"), NoResult] = 600.0
    """Engines in separate processes: time without a forward pass, while there is work, after which an engine is killed
    and restarted; other engines get its prompts."""
    multi_turn_config: MultiTurnRolloutConfig = MultiTurnRolloutConfig()
    """Turns and tools."""
    async_config: RolloutAsyncConfig = RolloutAsyncConfig()
    """Read with `mode = "async"`."""
    async_r2r_sync: Literal["disabled", "generation", "inference"] = "disabled"
    """How weights reach engines apart from the trainer. `disabled`: bucket by bucket between two forward passes, and
    completions go on with them. `inference`: all are received while the engine generates, then loaded between two
    passes. `generation`: likewise, once what is in flight has ended, so that each completion is of one version."""
    prefetch_rollout: bool = False
    """Fetch the next prompts while generating."""
    prefetch_queue_maxsize: Annotated[PositiveInt, Unit("batches"), Needs("prefetch_rollout")] = 2
    """How many."""

    @property
    def groups_in_flight(self) -> int:
        """Return how many prompts an engine in a process of its own has at a time."""
        return self.async_config.max_concurrent_requests if self.mode == "async" else self.batch_size

    @property
    def changes_distribution(self) -> bool:
        """Return True if training tokens are sampled from another distribution than softmax(logits / temperature)."""
        sampling = self.sampling_config
        return sampling.top_p < 1 or sampling.top_k > 0 or sampling.repetition_penalty != 1

    def _notices_inside(self, stage: InStage) -> Iterator[str]:
        """Yield notices about settings of engines in separate processes if there are no such engines."""
        if stage.kind.feed != "rollouts" or stage.recipe.mode != "colocated":
            return
        given = [f"rollout.{name}" for name in ("mode", "async_r2r_sync") if self.is_given(name)]
        if self.parallelism.is_given("n_init_replicas"):
            given.append("rollout.parallelism.n_init_replicas")
        algorithm = stage.recipe.train.train_policy
        if algorithm.dynamic_sampling is None and algorithm.is_given("outdated_rollout_fetch_batch_size"):
            given.append("train.train_policy.outdated_rollout_fetch_batch_size")
        for key in given:
            yield f"{key} has no effect here: with mode = 'colocated' each rank has an engine inside"

    def refusals(self, stage: InStage) -> Iterator[str]:
        yield from self._refused_temperatures(stage)
        train = stage.recipe.train
        if stage.kind.feed == "rollouts":
            if self.n_generation < 2 and train.train_policy.compares_groups:
                yield "rollout.n_generation = 1: advantages compare completions of one group; make it at least 2"
            elif self.n_generation < 2 and train.train_policy.dynamic_sampling is not None:
                yield "rollout.n_generation = 1: variant = 'dapo' trains on groups that differ; make it at least 2"
            if stage.recipe.spreads_groups and stage.recipe.policy.is_diffusers:
                yield (
                    f"train.train_batch_per_replica = {train.train_batch_per_replica}: a train step of a diffusion "
                    f"model has whole groups; make it a multiple of rollout.n_generation = {self.n_generation}"
                )
            yield from self._refused_greed(stage)
        if stage.kind.feed == "rollouts" and stage.recipe.mode != "colocated":
            yield from self._refusals_apart(stage)
        if self.quantization != "none" and self.backend != "vllm":
            yield (
                f"rollout.quantization = {self.quantization!r}: backend {self.backend!r} computes with the trainer's "
                f"weights; set it to 'none', or take backend = 'vllm'"
            )
        if not stage.kind.has_mesh or (stage.kind.feed == "dataset" and not stage.recipe.validation.reward_function):
            return
        ranks = stage.recipe.policy.parallelism.world_size
        key = f"rollout.parallelism.tp_size = {self.parallelism.tp_size}"
        is_apart = stage.kind.feed == "rollouts" and stage.recipe.mode == "disaggregated"
        if ranks % self.parallelism.tp_size and not is_apart:
            yield f"{key}: engines share the ranks of policy.parallelism, which are {ranks}; take a divisor of that"
        elif self.parallelism.tp_size > 1 and self.backend == "hf":
            yield f"{key}: backend 'hf' has the whole model on each rank; set it to 1"

    def _refused_temperatures(self, stage: InStage) -> Iterator[str]:
        """Yield temperatures that vLLM does not sample at."""
        if self.backend != "vllm" or stage.recipe.policy.is_diffusers:
            return
        asked = {}
        has_server = stage.kind.table == "sample" and bool(stage.recipe.sample.endpoint)
        if stage.kind.completes_prompts and not has_server:
            asked["rollout.sampling_config.temperature"] = self.sampling_config.temperature
        if stage.measures and stage.recipe.completes_held_out:
            asked["validation.temperature"] = stage.recipe.validation.temperature
        low, high = VLLM_TEMPERATURES
        for key, temperature in asked.items():
            if temperature != 0 and not low <= temperature <= high:
                yield (
                    f"{key} = {temperature}: vLLM samples between {low} and {high}, and takes 0 for greedy; or set "
                    f"rollout.backend = 'hf'"
                )

    def _refusals_apart(self, stage: InStage) -> Iterator[str]:
        """Yield what engines in processes of their own cannot do."""
        mode, train = f"mode = {stage.recipe.mode!r}", stage.recipe.train
        if train.ema_enable and stage.recipe.validation.enable:
            yield (
                f"{mode}: validation measures the moving average of train.ema_enable, whose weights would reach "
                f'completions in flight; set validation.enable = false and add a stage of kind "validate", or take '
                f"mode = 'colocated'"
            )

    def _refused_greed(self, stage: InStage) -> Iterator[str]:
        """Yield errors for sampling settings with which all completions of a prompt are equal, which gives no learning
        signal."""
        sampling = self.sampling_config
        if stage.recipe.policy.is_diffusers or not stage.recipe.train.train_policy.compares_groups:
            return
        for name, value, greedy in (("temperature", sampling.temperature, 0.0), ("top_k", sampling.top_k, 1)):
            if value == greedy:
                yield (
                    f"rollout.sampling_config.{name} = {value} takes the likeliest token: the completions of a prompt "
                    f"are the same, and nothing is learned of their differences; raise it"
                )

    def notices(self, stage: InStage) -> Iterator[str]:
        """See `Table.notices`; what rollouts are that are not drawn from the policy, for one."""
        yield from self._notices_inside(stage)
        policy = stage.recipe.policy
        length, has_text = policy.model_max_length, stage.kind.feed == "rollouts" and not policy.is_diffusers
        if has_text and stage.recipe.spreads_groups:
            yield (
                f"train.train_batch_per_replica = {stage.recipe.train.train_batch_per_replica}: groups of "
                f"rollout.n_generation = {self.n_generation} completions are compared as a whole and spread over train "
                f"steps"
            )
        if has_text and self.max_response_length >= length:
            yield (
                f"rollout.max_response_length = {self.max_response_length}: a completion gets the tokens that its "
                f"prompt leaves of policy.model_max_length = {length}"
            )
        if not stage.recipe.train.train_policy.has_rollouts or not self.changes_distribution:
            return
        fields, sampling = SamplingConfig.model_fields, dict(self.sampling_config)
        names = ("top_p", "top_k", "repetition_penalty")
        what = ", ".join(f"{name} = {sampling[name]}" for name in names if sampling[name] != fields[name].default)
        yield (
            f"rollout.sampling_config: {what}: training completions are not drawn from the policy; the loss weights "
            f"their tokens by policy / sampled distribution, and never sees the tokens that are cut off"
        )

    @property
    def checks_generation_config(self) -> bool:
        """Return whether the engine refuses a model whose generation_config.json transformers would not save."""
        return self.backend == "vllm"

    @field_validator("backend")
    @classmethod
    def _vllm_for_others(cls, name: str, info: ValidationInfo) -> str:
        if name == "diffusion_nft_rollout":
            return "flow_sampler"
        if name not in {"vllm_async", "trtllm"}:
            return name
        say(info, f"rollout.backend = {name!r}: 'vllm', which generates instead")
        return "vllm"

    @model_validator(mode="after")
    def _mesh_of_an_engine(self) -> Self:
        if self.backend != "vllm":
            return self
        for name, field in type(self.parallelism).model_fields.items():
            value = getattr(self.parallelism, name)
            if name not in _VLLM_MESH and value != field.default:
                raise ValueError(
                    f"parallelism.{name} = {value!r}: backend {self.backend!r} takes only "
                    f"{', '.join(sorted(_VLLM_MESH))}; leave it out"
                )
        return self
