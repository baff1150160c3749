"""A user's engine: the plainest sampling loop on the trainer's own module. Killed once where the recipe asks for it."""

import os
import signal
from pathlib import Path

import torch

from cosmos_core.rollout.base import LoadReceipt, completion, request_seed, stop_token_ids
from cosmos_core.types import Group


class Plain:
    """One token after the other, without a cache."""

    name = "plain"
    weight_format = "shared"
    ranks_per_engine = 1

    def __init__(self, settings):
        self.settings, self.model = settings, settings.model
        self.ends = stop_token_ids(settings.model, settings.tokenizer)
        self.version, self.groups = 0, []

    def submit(self, prompts, sampling, step):
        mark = Path(self.settings.custom.get("kill_mark") or os.devnull)
        if step == self.settings.custom.get("kill_at_step") and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        was_training = self.model.training
        self.model.eval()
        for prompt in prompts:
            seeds = [request_seed(sampling.seed, step, prompt.id, k) for k in range(sampling.num_completions)]
            self.groups.append(Group(prompt, tuple(self.completion(prompt, sampling, seed) for seed in seeds), step))
        self.model.train(was_training)

    def completion(self, prompt, sampling, seed):
        generator = torch.Generator().manual_seed(seed)
        ids, logprobs = list(prompt.token_ids), []
        while len(logprobs) < sampling.max_tokens and (not logprobs or ids[-1] not in self.ends):
            logprobs_V = self.distributions(ids, sampling.temperature)[-1]
            token = int(torch.multinomial(logprobs_V.exp(), 1, generator=generator))
            ids.append(token)
            logprobs.append(float(logprobs_V[token]))
        new = ids[len(prompt.token_ids) :]
        return completion(
            self.settings.tokenizer, new, logprobs, version=self.version, ends_with_stop=new[-1] in self.ends
        )

    def completed(self):
        done, self.groups = self.groups, []
        return done

    def load_weights(self, version, buckets):
        self.version = version
        return LoadReceipt(version, sum(len(bucket) for bucket in buckets))

    def logprobs(self, token_ids):
        found_TV = self.distributions(list(token_ids))
        return [float(found_TV[t, token]) for t, token in enumerate(token_ids[1:])]

    @torch.no_grad()
    def distributions(self, ids, temperature=1.0):
        return (self.model(input_ids=torch.tensor([ids])).logits[0].float() / temperature).log_softmax(-1)

    def sleep(self, level=1):
        pass

    def wake(self):
        pass

    def close(self):
        pass
