"""DiffusionNFT of Stable Diffusion 3 in one file, with diffusers and torch and nothing of ours: what the system has to
arrive at, and what its step has to be as fast as. B samples of a forward pass.

It shares no code with the system, only the rule that fixes random numbers: completion k of prompt p at step s starts
from noise of a generator seeded with r(k), the first 63 bits of sha256("seed/s/p/k"). What is learned of it is fixed by
t = r(k + 2^20): its noise levels are the first of those that the raw draws of PCG64(t) sort, and level i gets its noise
from a generator seeded with t + 1 + i, in 63 bits.

    sampler    DPM-Solver++(2M) of the old policy on the table of the pipeline's scheduler       2211.01095 (arXiv)
    advantage  A = (reward - mean of its prompt) / (standard deviation of all + 1e-4)           2509.16117
    weight     r = 1/2 + clip(A, -5, 5) / 10
    policies   v+ = b v + (1 - b) old, v- = (1 + b) old - b v; x0(v) = x - sigma v
    loss       5 (r L(v+) + (1 - r) L(v-)) / b + beta mean (v - reference)^2, a mean over samples and their levels;
               L(v) = mean (x0(v) - x0)^2 / max(mean |x0(v) - x0|, 1e-5), whose divisor has no gradient
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import diffusers
import numpy as np
import torch
from torch import Tensor

LEAST, EPSILON, MOST = 1e-5, 1e-4, 5.0


@dataclass(frozen=True)
class Settings:
    """One training."""

    prompts_per_step: int
    completions: int  # of each prompt
    num_steps: int  # of the sampler
    num_levels: int  # of them that are learned
    size: int  # pixels of a side
    batch: int  # samples of a forward pass
    per_update: int  # completions of an optimizer step
    beta: float
    kl_beta: float
    learning_rate: float
    adam_epsilon: float
    clip_norm: float
    max_tokens: int  # of the T5
    seed: int


class Training:
    """`step(n)` takes train step n; prompts are in the order of the data set, of which those that fill no step are left
    out."""

    def __init__(
        self, folder: Path, prompts: Sequence[str], reward: Callable[[str, Tensor], float], settings: Settings
    ) -> None:
        pipeline = diffusers.StableDiffusion3Pipeline.from_pretrained(folder, dtype=torch.float32)
        self.vae, self.model, self.settings = pipeline.vae, pipeline.transformer, settings
        self.prompts, self.reward = prompts, reward
        said = {"do_classifier_free_guidance": False, "max_sequence_length": settings.max_tokens}
        with torch.no_grad():
            self.tokens, _, self.pooled, _ = pipeline.encode_prompt(*[list(prompts)] * 3, **said)
        pipeline.scheduler.set_timesteps(settings.num_steps)
        self.sigmas = pipeline.scheduler.sigmas.tolist()
        self.shape = (self.model.config.in_channels, *[settings.size // pipeline.vae_scale_factor] * 2)
        self.old, self.reference = (copy.deepcopy(self.model).requires_grad_(False) for _ in range(2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=settings.learning_rate, eps=settings.adam_epsilon)

    def step(self, step: int) -> float:
        """Draw, learn, and let the old policy follow at once; return the mean reward."""
        count = self.settings.prompts_per_step
        rows = [step % (len(self.prompts) // count) * count + position for position in range(count)]
        drawn = [self.draw(row, step) for row in rows]
        scores = [
            [self.reward(self.prompts[i], each) for each in self.pixels(x)] for i, x in zip(rows, drawn, strict=True)
        ]
        rewards = torch.tensor(scores, dtype=torch.float64)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(correction=0) + EPSILON)
        learned = [
            (row, drawn[g][k], 0.5 + advantages[g, k].clamp(-MOST, MOST).item() / (2 * MOST), k)
            for g, row in enumerate(rows)
            for k in range(self.settings.completions)
        ]  # fmt: skip
        for start in range(0, len(learned), self.settings.per_update):
            self.update(step, learned[start : start + self.settings.per_update])
        self.old.load_state_dict(self.model.state_dict())
        return rewards.mean().item()

    def update(self, step: int, completions: Sequence[tuple[int, Tensor, float, int]]) -> None:
        """Take an optimizer step on some completions."""
        samples = [
            (row, x0, weight, i, seed)
            for row, x0, weight, k in completions
            for seed in [_seed(self.settings.seed, step, row, k + 2**20)]
            for i in np.argsort(np.random.PCG64(seed).random_raw(self.settings.num_steps), kind="stable").tolist()
            [: self.settings.num_levels]
        ]  # fmt: skip
        self.optimizer.zero_grad()
        for start in range(0, len(samples), self.settings.batch):
            (self.loss(samples[start : start + self.settings.batch]) / len(samples)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
        self.optimizer.step()

    @torch.no_grad()
    def draw(self, row: int, step: int) -> Tensor:
        """Return the latents of the completions of a prompt, with two orders wherever log(1 / sigma - 1) is finite."""
        seeds = [_seed(self.settings.seed, step, row, k) for k in range(self.settings.completions)]
        x = torch.stack([_noise(self.shape, seed) for seed in seeds])
        clean = previous = torch.empty(0)
        for i, (sigma, later) in enumerate(zip(self.sigmas[:-1], self.sigmas[1:], strict=True)):
            v = self.velocity(self.old, x, torch.full((len(x),), sigma), [row] * len(x))
            previous, clean = clean, x - sigma * v
            if i == 0 or later == 0 or self.sigmas[i - 1] == 1:
                x = x + (later - sigma) * v
                continue
            before, now, then = (math.log((1 - s) / s) for s in (self.sigmas[i - 1], sigma, later))
            slope = (clean - previous) * (then - now) / (now - before)
            x = later / sigma * x - (1 - later) * math.expm1(now - then) * (clean + slope / 2)
        return x

    @torch.no_grad()
    def pixels(self, latents: Tensor) -> Tensor:
        """Return images as bytes: K, height, width, 3."""
        decoded = self.vae.decode(latents / self.vae.config.scaling_factor + self.vae.config.shift_factor).sample
        return ((decoded / 2 + 0.5).clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1)

    def loss(self, samples: Sequence[tuple[int, Tensor, float, int, int]]) -> Tensor:
        """Return the sum of the losses of some samples."""
        rows, x0s, weights, levels, seeds = zip(*samples, strict=True)
        noise = torch.stack([_noise(self.shape, (seed + 1 + i) % 2**63) for seed, i in zip(seeds, levels, strict=True)])
        x0, r_B, sigma_B = torch.stack(x0s), torch.tensor(weights), torch.tensor([self.sigmas[i] for i in levels])
        wide = sigma_B.view(-1, 1, 1, 1)
        x = (1 - wide) * x0 + wide * noise
        with torch.no_grad():
            old, reference = (self.velocity(model, x, sigma_B, rows) for model in (self.old, self.reference))
        v, b = self.velocity(self.model, x, sigma_B, rows), self.settings.beta

        def regression(velocity: Tensor) -> Tensor:
            error = (x - wide * velocity - x0).flatten(1)
            return (error**2).mean(1) / error.detach().double().abs().mean(1).clamp(min=LEAST).float()

        learned_B = r_B * regression(b * v + (1 - b) * old) + (1 - r_B) * regression((1 + b) * old - b * v)
        return (MOST / b * learned_B + self.settings.kl_beta * (v - reference).square().flatten(1).mean(1)).sum()

    def velocity(self, model: torch.nn.Module, x: Tensor, sigma_B: Tensor, rows: Sequence[int]) -> Tensor:
        """Return what a policy predicts."""
        tokens, pooled = self.tokens[list(rows)], self.pooled[list(rows)]
        return model(x, tokens, pooled, 1000 * sigma_B, return_dict=False)[0]  # type: ignore[no-any-return]


def _noise(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def _seed(seed: int, step: int, row: int, k: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{row}/{k}".encode()).digest()[:8], "big") // 2
