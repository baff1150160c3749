"""`[train.train_policy]` of diffusion models: keys of the algorithms that learn from scored images and videos."""

from collections.abc import Iterator
from functools import reduce
from typing import ClassVar, Literal

from pydantic import field_validator

from cosmos_core.config.schema.diffusers import DiffusersConfig
from cosmos_core.config.schema.flow_sampling import STOCHASTIC_SOLVERS
from cosmos_core.config.schema.grpo import GrpoConfig
from cosmos_core.config.schema.table import StageContext, Table
from cosmos_core.config.schema.value_types import Fraction
from cosmos_core.types import FlowSampling

_TEXT_ROW_KEYS = ("prompt_column_name", "system_prompt", "data_packer")
"""Keys of `train.train_policy`, outside of `GrpoConfig`, that determine how rows of text are read."""


class FlowPolicyConfig(GrpoConfig):
    """Keys of the algorithms that score and compare the images or videos of a prompt: DiffusionNFT and FlowGRPO."""

    modalities: ClassVar[tuple[str, ...]] = ("diffusion",)
    used_keys: ClassVar[tuple[str, ...]] = (
        "advantage_low", "advantage_high", "kl_beta", "unbiased_advantage", "reference_reset_interval",
        "reset_optimizer_with_reference",
    )  # fmt: skip
    """Keys of `GrpoConfig` that have an effect on diffusion models."""
    ineffective_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of `[policy.diffusers]` that have no effect with this algorithm."""

    advantage_mode: Literal["all", "positive_only", "negative_only", "one_only", "binary"] = "all"
    """Transformation of clipped advantages. `all`: none. `positive_only` and `negative_only`: 0 in place of advantages
    of the other sign. `one_only`: 1 for a positive advantage, otherwise 0. `binary`: the sign."""
    normalise_each_reward: bool = False
    """Normalise the values of each reward function before they are weighted and summed, for rewards of different
    scales; False: normalise only the weighted sum."""
    least_diversity: Fraction = 0.5
    """Smallest diversity of samples, as a fraction of the diversity in the first train steps, below which `watch/alarm`
    is set to 1 and a warning is logged. The same happens if a reward function of weight 0 falls below this fraction of
    its initial value while the total reward is above its initial value."""

    learns_data: bool = False
    """Learn also from real images or clips: rows are media with their prompts, and the diffusion loss on them is added
    to the loss of the rollouts with the weight `policy.diffusers.flow_rl.data_beta` (arXiv 2512.04332). False: rows are
    prompts."""

    @property
    def rows(self) -> str:  # type: ignore[override]
        """Return the kind of rows: `media` with `learns_data`, otherwise `media_prompts`."""
        return "media" if self.learns_data else "media_prompts"

    @field_validator("mu_iterations")
    @classmethod
    def _require_one_mu_iteration(cls, mu_iterations: int) -> int:
        if mu_iterations != 1:
            reason = "rollouts of diffusion models are learned once"
            raise ValueError(f"mu_iterations = {mu_iterations}: {reason}; set it to 1")
        return mu_iterations

    def flow_sampling_settings(self, diffusers_config: DiffusersConfig) -> FlowSampling:
        """Return the sampler settings with which rollouts of images and videos are generated."""
        sampler_config, flow_rl = diffusers_config.sample, diffusers_config.flow_rl
        has_stochastic_steps = sampler_config.solver in STOCHASTIC_SOLVERS and not sampler_config.deterministic_sampling
        return FlowSampling(
            num_steps=sampler_config.num_steps,
            guidance_scale=sampler_config.guidance_scale,
            solver="dpm2" if sampler_config.solver == "dpm2" else "euler",
            stochastic_solver=sampler_config.solver if has_stochastic_steps else "",
            noise_scale=sampler_config.noise_level,
            schedule=sampler_config.sigma_schedule,
            size=diffusers_config.inference_size,
            num_frames=diffusers_config.inference_frames,
            conditioning_frame_range=(flow_rl.min_conditional_frames, flow_rl.max_conditional_frames),
        )

    def notices(self, stage: StageContext) -> Iterator[str]:
        yield from super().notices(stage)
        for key in self.ineffective_keys:
            *table_names, name = key.split(".")
            settings_table: Table = reduce(getattr, table_names, stage.recipe.policy.diffusers)
            if settings_table.is_set(name):
                yield f"policy.diffusers.{key} has no effect with trainer_type = {self.trainer_type!r}"
        max_conditioning_frames = stage.recipe.policy.diffusers.flow_rl.max_conditional_frames
        if max_conditioning_frames and self.rows != "media" and stage.kind.trains_model:
            reason = "rollouts start from text alone, because rows are prompts"
            remedy = "train.train_policy.learns_data = true makes them clips"
            yield f"policy.diffusers.flow_rl.max_conditional_frames = {max_conditioning_frames}: {reason}; {remedy}"

    def unsupported_setting_errors(self, stage: StageContext) -> Iterator[str]:
        yield from super().unsupported_setting_errors(stage)
        diffusers_config = stage.recipe.policy.diffusers
        data_beta, max_frames = diffusers_config.flow_rl.data_beta, diffusers_config.flow_rl.max_conditional_frames
        if self.rows == "media" and max_frames:
            start_text = f"rollouts start from policy.diffusers.flow_rl.max_conditional_frames = {max_frames}"
            if diffusers_config.train_frames != diffusers_config.inference_frames:
                reason = f"{start_text} frames of clips, which must be as long as theirs"
                remedy = f"set it to inference_frames = {diffusers_config.inference_frames}"
                yield f"policy.diffusers.train_frames = {diffusers_config.train_frames}: {reason}; {remedy}"
            if self.dataset.aspect_ratio_buckets:
                reason = f"{start_text} frames of clips, which must have the size of theirs"
                yield f"train.train_policy.dataset.aspect_ratio_buckets = true: {reason}; set it to false"
        if self.rows == "media" and not data_beta:
            yield "policy.diffusers.flow_rl.data_beta = 0 leaves out the real images or clips; set it to about 0.01"
        if self.rows != "media" and data_beta:
            reason = "without train.train_policy.learns_data = true the rows are prompts alone"
            remedy = "set it, and give images or clips with their prompts"
            yield f"policy.diffusers.flow_rl.data_beta = {data_beta}: {reason}; {remedy}"
        if stage.recipe.mode != "colocated":
            remedy = "set it to 'colocated'"
            yield f"mode = {stage.recipe.mode!r}: images and videos are drawn by the ranks that train; {remedy}"
        if self.bypass_reward and stage.kind.trains_model and not stage.recipe.distillation.enable:
            reason = f"makes all rewards equal, of which {self.trainer_type} learns nothing"
            yield f"train.train_policy.bypass_reward = true {reason}; leave it out"
        unused_keys = {*GrpoConfig.__annotations__, *_TEXT_ROW_KEYS} - {*self.used_keys, "trainer_type"}
        unused_keys |= set() if self.variant in {"grpo", "dapo"} else {"variant"}
        for name in sorted(filter(self.is_set, unused_keys & set(GrpoConfig.model_fields))):
            key = f"train.train_policy.{name}"
            yield f"{key} has no meaning with trainer_type = {self.trainer_type!r}; leave it out"
