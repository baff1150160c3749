"""`[train.train_policy]` with `trainer_type = "diffusion_nft"`: DiffusionNFT (arXiv 2509.16117)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal

from cosmos_core.config.schema.diffusers import DiffusersConfig
from cosmos_core.config.schema.flow_rl import FlowPolicyConfig
from cosmos_core.config.schema.table import StageContext
from cosmos_core.types import FlowSampling

OLD_POLICY_WEIGHTS = "old"
"""Name of the weights of the old policy, which generates rollouts of DiffusionNFT and follows the trained policy."""


class DiffusionNftConfig(FlowPolicyConfig):
    """`trainer_type = "diffusion_nft"`: train on samples along the forward process, positively on good samples and
    inversely on bad ones (arXiv 2509.16117); further settings are in `[policy.diffusers]`."""

    algorithm: ClassVar[str] = "diffusion_nft"
    ineffective_keys: ClassVar[tuple[str, ...]] = (
        "flow_rl.train_on", "flow_rl.window_size", "flow_rl.guard", "flow_rl.use_same_seed",
    )  # fmt: skip

    trainer_type: Literal["diffusion_nft"] = "diffusion_nft"
    """Algorithm: DiffusionNFT."""

    @property
    def auxiliary_model_names(self) -> tuple[str, ...]:
        return (OLD_POLICY_WEIGHTS, *super().auxiliary_model_names)

    def flow_sampling_settings(self, diffusers_config: DiffusersConfig) -> FlowSampling:
        return replace(super().flow_sampling_settings(diffusers_config), weights_name=OLD_POLICY_WEIGHTS)

    def unsupported_setting_errors(self, stage: StageContext) -> Iterator[str]:
        yield from super().unsupported_setting_errors(stage)
        diffusers_config = stage.recipe.policy.diffusers
        if diffusers_config.flow_rl.exp_reward:
            reason = "makes all advantages negative, of which DiffusionNFT would learn that every sample is bad"
            yield f"policy.diffusers.flow_rl.exp_reward = true {reason}; leave it out"
        if self.advantage_high <= 0:
            yield f"train.train_policy.advantage_high = {self.advantage_high} is a scale; make it positive"
        if int(diffusers_config.timesteps_fraction * diffusers_config.sample.num_steps) < 1:
            yield (
                f"policy.diffusers.timesteps_fraction = {diffusers_config.timesteps_fraction} of "
                f"policy.diffusers.sample.num_steps = {diffusers_config.sample.num_steps} is no step; raise one of them"
            )
