"""FlowGRPO (arXiv 2505.05470): the stochastic steps of a sampler are actions, trained as GRPO trains tokens.

Rollouts record the latents before and after each trained step, in float32. The policy's velocity is computed for the
latents before the step, at the sampler's noise level. `compute_step_distribution`, which the sampler also uses, turns
the velocity into the distribution of the step. The loss is in `flow_objectives`, advantages are in `flow_credit`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cosmos_core.algorithms.base import Loss, Update
from cosmos_core.algorithms.flow_credit import FlowRollout
from cosmos_core.algorithms.flow_objectives import ADVANTAGE_TRANSFORMS, FlowGrpoInputs, flow_grpo_loss
from cosmos_core.algorithms.flow_rl import FlowRl, sum_metrics
from cosmos_core.config.schema.flow_grpo import FlowGrpoConfig
from cosmos_core.data.flow_sample import FlowSample
from cosmos_core.models.base import MicroBatch
from cosmos_core.models.denoiser import RequestedOutputs
from cosmos_core.models.flow_steps import NoiseLevels, StepDistribution, compute_step_distribution
from cosmos_core.types import DiffusionSample

_SAMPLER_STEP_KEY = "step"


@dataclass(frozen=True, slots=True)
class _SamplerStep:
    """One stochastic sampler step of the rollout of an image or video."""

    rollout: FlowRollout
    step_index: int
    """Index of this step in the list of the sampler steps whose latents the rollout recorded."""

    @property
    def sample(self) -> DiffusionSample:
        return self.rollout.diffusion_sample

    @property
    def noise_levels(self) -> tuple[float, float, float]:
        """Return three noise levels: before this sampler step, after it, and the second one in the schedule."""
        sigmas, i = self.sample.sigmas, self.sample.steps[self.step_index]
        return sigmas[i], sigmas[i + 1], sigmas[1]


class FlowGrpo(FlowRl):
    """FlowGRPO with the settings of `[train.train_policy]` and `[policy.diffusers.flow_rl]`."""

    config: FlowGrpoConfig

    def make_optimizer_update(self, rollouts: Sequence[FlowRollout]) -> Update | None:
        assert self.sampling is not None and self.sampling.flow is not None
        flow_sampling, config = self.sampling.flow, self.config
        trained_rollouts = [rollout for rollout in rollouts if rollout.advantage]
        steps = [_SamplerStep(each, i) for each in trained_rollouts for i in range(len(each.diffusion_sample.steps))]
        if not steps:
            return None
        uses_guidance = flow_sampling.guidance_scale > 1
        samples = [
            FlowSample(
                step.sample.latents_before[step.step_index], step.noise_levels[0], step.rollout.prompt.embedding,
                negative_text=self.null_text if uses_guidance else None,
                num_conditioning_frames=step.sample.num_conditioning_frames, algorithm_values={_SAMPLER_STEP_KEY: step},
            )
            for step in steps
        ]  # fmt: skip
        uses_guard, num_samples = self.diffusers.flow_rl.guard, float(len(samples))

        def loss(micro_batch: MicroBatch) -> Loss:
            inputs = self._make_step_inputs(micro_batch)
            loss_terms = flow_grpo_loss(inputs, config.epsilon_low, config.epsilon_high, uses_grpo_guard=uses_guard)
            loss_value = (loss_terms.policy_loss_B + config.kl_beta * loss_terms.kl_B).sum() / num_samples
            metrics = sum_metrics(
                policy_loss=loss_terms.policy_loss_B,
                ratio=loss_terms.ratio_B,
                clip_fraction=loss_terms.is_clipped_B.double(),
                ratio_deviation=(loss_terms.ratio_B - 1).abs(),
            )
            return Loss(loss_value, metrics | (sum_metrics(kl=loss_terms.kl_B) if self._reference_weight_names else {}))

        output_request = RequestedOutputs(flow_sampling.guidance_scale if uses_guidance else 1.0)
        return Update(samples, loss, output_request, extra_weights=self._reference_weight_names)

    def _make_step_inputs(self, micro_batch: MicroBatch) -> FlowGrpoInputs:
        steps: list[_SamplerStep] = [sample.algorithm_values[_SAMPLER_STEP_KEY] for sample in micro_batch.samples]
        latents, config = micro_batch.outputs["noisy"], self.config
        tensor_options: Any = {"dtype": torch.float64, "device": latents.device}
        noise_levels = NoiseLevels(*torch.tensor([step.noise_levels for step in steps], **tensor_options).T)
        reference_velocity = micro_batch.outputs.get("reference/velocity")
        advantages_B = torch.tensor([step.rollout.advantage for step in steps], **tensor_options)
        clipped_advantages_B = advantages_B.clamp(config.advantage_low, config.advantage_high)
        has_means = steps[0].sample.transition_means is not None

        def velocity_to_distribution(velocity: Tensor) -> StepDistribution:
            assert self.sampling is not None and self.sampling.flow is not None
            solver, noise_scale = self.sampling.flow.stochastic_solver, self.sampling.flow.noise_scale
            return compute_step_distribution(solver, latents, velocity, noise_levels, noise_scale)

        return FlowGrpoInputs(
            velocity_to_distribution(micro_batch.outputs["velocity"]),
            torch.stack([step.sample.latents_after[step.step_index] for step in steps]).to(latents),
            torch.tensor([s.sample.log_probs[s.step_index] for s in steps], dtype=latents.dtype, device=latents.device),
            ADVANTAGE_TRANSFORMS[config.advantage_mode](clipped_advantages_B),
            torch.stack([s.sample.transition_means[s.step_index] for s in steps]).to(latents) if has_means else None,
            velocity_to_distribution(reference_velocity) if reference_velocity is not None else None,
            noise_levels.sigma - noise_levels.next_sigma,
            micro_batch.mask,
        )


ALGORITHM = FlowGrpo
