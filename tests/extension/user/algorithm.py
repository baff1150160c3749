"""A user's algorithm: GRPO whose groups count as much as their rewards vary, against the average of all groups so far.

The average is a state of its own: it is in the checkpoint, and a resumed run goes on from it.
"""

import numpy as np

from cosmos_core.algorithms.aggregate import token_metric
from cosmos_core.algorithms.base import Algorithm, Loss, Update
from cosmos_core.algorithms.grpo import make_sample
from cosmos_core.models.scorer import RequestedOutputs


class VarianceWeighted(Algorithm):
    """Policy gradient with advantages (r - mean) / std x variance / average variance."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.average, self.num_groups = 0.0, 0

    def credit(self, groups):
        samples = []
        for group in groups:
            rewards = np.array([score.value for score in group.scores], dtype=np.float64)
            self.num_groups += 1
            self.average += (rewards.var() - self.average) / self.num_groups
            weight = rewards.var() / self.average if self.average else 0.0
            values = (rewards - rewards.mean()) / (rewards.std() + self.custom["epsilon"]) * weight
            for completion, value, reward in zip(group.group.completions, values, rewards, strict=True):
                samples.append(make_sample(group.group.prompt, completion, float(value), float(reward)))
        return samples, {"variance/average": self.average, "variance/groups": float(self.num_groups)}

    def updates(self, samples, view):
        num_tokens = sum(sample.num_learned for sample in samples)

        def loss(micro):
            advantages_B1 = micro.logprobs_BS.new_tensor([[sample.advantage] for sample in micro.samples])
            weighted_BS = -micro.logprobs_BS * advantages_B1 * micro.mask_BS
            metrics = {"variance/surprise": token_metric(-micro.logprobs_BS, micro.mask_BS)}
            return Loss(weighted_BS.sum() / num_tokens, metrics)

        yield Update(samples, loss, RequestedOutputs(self.config.temperature))

    def state_dict(self):
        return {"average": self.average, "num_groups": self.num_groups}

    def load_state_dict(self, state):
        self.average, self.num_groups = state["average"], state["num_groups"]
