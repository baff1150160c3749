"""`[train.train_policy]` with `trainer_type = "flow_grpo"`: FlowGRPO (arXiv 2505.05470)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal

from cosmos_core.config.schema.diffusers import DiffusersConfig
from cosmos_core.config.schema.flow_rl import FlowPolicyConfig
from cosmos_core.config.schema.flow_sampling import stochastic_step_window
from cosmos_core.config.schema.table import StageContext
from cosmos_core.types import FlowSampling


class FlowGrpoConfig(FlowPolicyConfig):
    """`trainer_type = "flow_grpo"`: the steps of a stochastic sampler are the actions of a policy (arXiv 2505.05470);
    further settings are in `[policy.diffusers.flow_rl]`."""

    algorithm: ClassVar[str] = "flow_grpo"
    used_keys: ClassVar[tuple[str, ...]] = (*FlowPolicyConfig.used_keys, "epsilon_low", "epsilon_high")
    ineffective_keys: ClassVar[tuple[str, ...]] = ("timesteps_fraction", "nft_beta", "weight_copy_decay_type")

    trainer_type: Literal["flow_grpo"] = "flow_grpo"
    """Algorithm: FlowGRPO."""
    epsilon_low: float = 1e-4
    """Lower clip range: probability ratios are clipped below at 1 - `epsilon_low`; negative: no lower clip. A ratio is
    the exponential of a mean over all elements of a latent and therefore stays close to 1."""
    epsilon_high: float = 1e-4
    """Upper clip range: probability ratios are clipped above at 1 + `epsilon_high`; negative: no upper clip."""

    def flow_sampling_settings(self, diffusers_config: DiffusersConfig) -> FlowSampling:
        flow_sampling, flow_rl = super().flow_sampling_settings(diffusers_config), diffusers_config.flow_rl
        steps = range(flow_sampling.num_steps - 1)
        return replace(
            flow_sampling,
            stochastic_solver=flow_sampling.stochastic_solver or "flow",
            window=stochastic_step_window(flow_rl, flow_sampling.num_steps),
            trained_steps=tuple(steps) if flow_rl.window_size else tuple(i for i in flow_rl.train_on if i in steps),
            keeps_transition_means=flow_rl.guard,
            has_common_initial_noise=flow_rl.use_same_seed,
        )

    def unsupported_setting_errors(self, stage: StageContext) -> Iterator[str]:
        yield from super().unsupported_setting_errors(stage)
        diffusers_config = stage.recipe.policy.diffusers
        if diffusers_config.sample.deterministic_sampling:
            setting_text = "policy.diffusers.sample.deterministic_sampling = true"
            yield f"{setting_text} leaves FlowGRPO nothing to learn from; set it to false"
        if not diffusers_config.sample.noise_level:
            yield "policy.diffusers.sample.noise_level = 0 leaves FlowGRPO nothing to learn from; raise it"
        step_window = stochastic_step_window(diffusers_config.flow_rl, diffusers_config.sample.num_steps)
        if step_window and (num_window_steps := step_window.end_step - step_window.first_step) < step_window.size:
            yield (
                f"policy.diffusers.flow_rl.window_size = {step_window.size}: there are {max(0, num_window_steps)} "
                f"such steps in window_range below the last of policy.diffusers.sample.num_steps = "
                f"{diffusers_config.sample.num_steps}; lower it, or move the range"
            )
        if not diffusers_config.flow_rl.window_size and not self.flow_sampling_settings(diffusers_config).trained_steps:
            last_step = f"the last of policy.diffusers.sample.num_steps = {diffusers_config.sample.num_steps}"
            yield f"policy.diffusers.flow_rl.train_on has no step below {last_step}; name one"
