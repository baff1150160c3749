"""DiffusionNFT (arXiv 2509.16117): trains on samples of the old policy along the forward process.

Fresh noise is added to each sample at some of the noise levels of its sampler. The policy's velocity is trained on good
samples; on bad samples, its mirror image with respect to the old policy's velocity is trained. Groups of equal rewards
are trained with an optimality of 1/2, as in the reference implementation. After each train step the weights of the old
policy move towards those of the policy. The loss is in `flow_objectives`, advantages are in `flow_credit`.
"""

from collections.abc import Sequence

import numpy as np
import torch

from cosmos_core.algorithms.base import Loss, TrainerView, Update
from cosmos_core.algorithms.flow_credit import FlowRollout
from cosmos_core.algorithms.flow_objectives import NftInputs, nft_loss, optimality_probability
from cosmos_core.algorithms.flow_rl import FlowRl, SeededSample, sum_metrics
from cosmos_core.config.schema.diffusion_nft import OLD_POLICY_WEIGHTS
from cosmos_core.models.base import MicroBatch

_MAX_NOISE_SEED = (1 << 63) - 1


class DiffusionNft(FlowRl):
    """DiffusionNFT with the settings of `[train.train_policy]` and `[policy.diffusers]`."""

    keeps_equal_reward_groups = True

    def make_optimizer_update(self, rollouts: Sequence[FlowRollout]) -> Update | None:
        if not rollouts:
            return None
        samples = []
        for rollout in rollouts:
            sample, text = rollout.diffusion_sample, rollout.prompt.embedding
            sigmas, num_clean_frames = sample.sigmas[:-1], sample.num_conditioning_frames
            num_noise_levels = int(self.diffusers.timesteps_fraction * len(sigmas))
            shuffled_indices = np.argsort(np.random.PCG64(rollout.seed).random_raw(len(sigmas)), kind="stable").tolist()
            for i in shuffled_indices[:num_noise_levels]:
                noise_seed = (rollout.seed + 1 + i) & _MAX_NOISE_SEED
                samples.append(SeededSample(sample.latents, sigmas[i], text, rollout, noise_seed, num_clean_frames))
        config, nft_beta, num_samples = self.config, self.diffusers.nft_beta, float(len(samples))
        min_advantage, max_advantage = config.advantage_low, config.advantage_high

        def loss(batch: MicroBatch) -> Loss:
            outputs = batch.outputs
            advantages_B = torch.tensor([sample.rollout.advantage for sample in batch.samples], dtype=torch.float64)
            sigma_B = torch.tensor([sample.sigma for sample in batch.samples], dtype=torch.float64)
            optimality_B = optimality_probability(advantages_B, min_advantage, max_advantage, config.advantage_mode)
            nft_inputs = NftInputs(
                outputs["velocity"], outputs[f"{OLD_POLICY_WEIGHTS}/velocity"], outputs.get("reference/velocity"),
                outputs["noisy"], outputs["latents"], sigma_B, optimality_B, batch.mask,
            )  # fmt: skip
            loss_terms = nft_loss(nft_inputs, nft_beta, max_advantage)
            loss_value = (loss_terms.policy_loss_B + config.kl_beta * loss_terms.kl_B).sum() / num_samples
            metrics = sum_metrics(
                policy_loss=loss_terms.policy_loss_B,
                unweighted_policy_loss=loss_terms.unscaled_policy_loss_B,
                old_deviation=loss_terms.old_policy_distance_B,
                optimality=optimality_B,
                x0_norm=outputs["latents"].flatten(1).square().mean(1),
            )
            return Loss(loss_value, metrics | (sum_metrics(kl=loss_terms.kl_B) if self._reference_weight_names else {}))

        return Update(samples, loss, extra_weights=(OLD_POLICY_WEIGHTS, *self._reference_weight_names))

    def after_train_step(self, step: int, view: TrainerView) -> None:
        old_policy_decay_rate = old_policy_decay(self.diffusers.weight_copy_decay_type, self._num_updates)
        view.move_towards_policy(OLD_POLICY_WEIGHTS, 1 - old_policy_decay_rate)
        super().after_train_step(step, view)


def old_policy_decay(decay_type: int, num_updates: int) -> float:
    """Return the decay d of the moving average that updates the old policy: d * old weights + (1 - d) * policy weights.

    `decay_type` 0: d is 0. `decay_type` 1: d grows to 0.5 with `num_updates`, the number of optimizer steps so far.
    `decay_type` 2: d is 0 for 75 optimizer steps, then grows to 0.999."""
    if decay_type == 1:
        return min(0.001 * num_updates, 0.5)
    return 0.0 if decay_type == 0 or num_updates < 75 else min(0.0075 * (num_updates - 75), 0.999)


ALGORITHM = DiffusionNft
