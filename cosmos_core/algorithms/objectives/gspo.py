"""Group sequence policy optimization (arXiv 2507.18071): one probability ratio for each sequence."""

from torch import Tensor

from cosmos_core.algorithms.aggregate import Metrics
from cosmos_core.algorithms.objectives.base import ObjectiveInputs, PolicySettings, probability_ratio
from cosmos_core.algorithms.objectives.clip import clipped_loss

SCALES_WITH_ADVANTAGE = True


def gspo(inputs: ObjectiveInputs, policy_settings: PolicySettings) -> tuple[Tensor, Metrics]:
    """Return the GSPO loss per token, -min(s A, clip(s, 1 - epsilon_low, 1 + epsilon_high) A), where s is exp of the
    mean log-ratio of the sequence and A the advantage. The mean over the tokens of each sequence and then over
    sequences (`loss_type = "seq-mean-token-mean"`) is the loss of the paper. Usual epsilons are about 3e-4 and 4e-4.
    There is no dual clip."""
    mean_log_ratio_B1 = inputs.log_ratio_BT.sum(-1, keepdim=True) / inputs.mask_BT.sum(-1, keepdim=True).clamp(min=1)
    return clipped_loss(probability_ratio(mean_log_ratio_B1).expand_as(inputs.log_ratio_BT), inputs, policy_settings)
