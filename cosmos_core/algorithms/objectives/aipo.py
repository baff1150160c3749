"""Asynchronous importance-weighted policy optimization (LlamaRL, arXiv 2505.24034)."""

from torch import Tensor

from cosmos_core.algorithms.aggregate import Metrics
from cosmos_core.algorithms.objectives.base import ObjectiveInputs, PolicySettings, measure_capping, probability_ratio

SCALES_WITH_ADVANTAGE = True


def aipo(loss_inputs: ObjectiveInputs, policy_settings: PolicySettings) -> tuple[Tensor, Metrics]:
    """Return the AIPO loss per token, -sg[min(pi / mu, ratio_cap)] A log pi, where sg stops the gradient, mu is the
    distribution that the tokens were sampled from, and A the advantage."""
    assert loss_inputs.rollout_log_ratio_BT is not None, "AIPO needs the log-probabilities of the rollouts"
    ratio_BT = probability_ratio(loss_inputs.rollout_log_ratio_BT)
    loss_BT = -ratio_BT.clamp(max=policy_settings.ratio_cap) * loss_inputs.advantages_B1 * loss_inputs.logprobs_BT
    return loss_BT, measure_capping(ratio_BT, loss_inputs, policy_settings)
