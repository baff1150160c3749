"""Flow-matching SFT of Stable Diffusion 3 in one file, with diffusers and torch and nothing of ours: what the system
has to arrive at, and what its step has to be as fast as.

It shares no code with the system, only the rule that fixes random numbers: row i of step s draws all of its own from a
generator seeded with the first 7 bytes of sha256("(seed, s, i)"), in this order: z of the noise level (float64),
whether its prompt is dropped, the noise of the VAE's posterior, the noise e.

    sigma      k u / (1 + (k - 1) u), u = 1 / (1 + exp(-z)), k the shift of the scheduler       2403.03206 (arXiv)
    latents    x = (1 - sigma) x0 + sigma e
    loss       mean of (v(x, 1000 sigma, text) - (e - x0))^2 over all elements and samples      2210.02747, 2403.03206

B samples of a step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import diffusers
import numpy as np
import torch
from PIL import Image
from torch import Tensor


@dataclass(frozen=True)
class Settings:
    """One training."""

    batch: int
    learning_rate: float
    adam_epsilon: float
    weight_decay: float
    clip_norm: float
    prompt_dropout: float
    max_tokens: int  # of the T5
    seed: int


@dataclass
class Encoded:
    """An image and its prompt as the transformer knows them."""

    mean: Tensor
    logvar: Tensor
    tokens: Tensor
    pooled: Tensor


class Training:
    """`step(n)` takes train step n; rows are in the order of the data set."""

    def __init__(self, folder: Path, rows: Sequence[tuple[str, Path]], settings: Settings) -> None:
        self.pipeline = diffusers.StableDiffusion3Pipeline.from_pretrained(folder, dtype=torch.float32)
        self.pipeline.set_progress_bar_config(disable=True)
        self.model = self.pipeline.transformer.train()
        self.rows, self.settings = rows, settings
        [self.empty] = self.encode_texts([""])
        self.known: list[Encoded] = []
        decays = [{"params": [weight], "weight_decay": settings.weight_decay * (weight.ndim > 1)} for weight in
                  self.model.parameters()]  # fmt: skip
        self.optimizer = torch.optim.AdamW(decays, lr=settings.learning_rate, eps=settings.adam_epsilon)

    def prepare(self) -> None:
        """Encode every row, once."""
        size = self.settings.batch
        starts = range(0, len(self.rows), size)
        self.known = [row for start in starts for row in self.encode(self.rows[start : start + size])]

    def encode(self, rows: Sequence[tuple[str, Path]]) -> list[Encoded]:
        """Return images and their prompts as the transformer knows them."""
        texts = self.encode_texts([prompt for prompt, _ in rows])
        pixels = torch.stack([_pixels(path) for _, path in rows])
        with torch.no_grad():
            posterior = self.pipeline.vae.encode(pixels).latent_dist
        shift, scale = (self.pipeline.vae.config[f"{name}_factor"] for name in ("shift", "scaling"))
        means, logvars = (posterior.mean - shift) * scale, posterior.logvar + 2 * np.log(scale)
        return [Encoded(*image, *text) for *image, text in zip(means, logvars, texts, strict=True)]

    @torch.no_grad()
    def encode_texts(self, prompts: list[str]) -> list[tuple[Tensor, Tensor]]:
        """Return the tokens of each prompt, and what the CLIPs say of the whole."""
        tokens, _, pooled, _ = self.pipeline.encode_prompt(
            prompts, prompts, prompts, do_classifier_free_guidance=False, max_sequence_length=self.settings.max_tokens
        )
        return list(zip(tokens, pooled, strict=True))

    def step(self, step: int) -> float:
        """Take a train step and return its loss; rows that `prepare` has not encoded are encoded here."""
        size = self.settings.batch
        start = step * size % len(self.rows)
        chosen = range(start, start + size)
        encoded = self.known[start : start + size] or self.encode([self.rows[i] for i in chosen])
        drawn = [self.draw(row, step, i) for i, row in zip(chosen, encoded, strict=True)]
        names = ("x0", "noise", "sigma", "tokens", "pooled")
        x0, noise, sigma_B, tokens, pooled = (torch.stack([row[name] for row in drawn]) for name in names)
        wide = sigma_B.float().view(-1, 1, 1, 1)
        velocity = self.model(
            hidden_states=(1 - wide) * x0 + wide * noise, timestep=sigma_B.float() * 1000,
            encoder_hidden_states=tokens, pooled_projections=pooled, return_dict=False,
        )[0]  # fmt: skip
        loss = (velocity - (noise - x0)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
        self.optimizer.step()
        return loss.item()

    def draw(self, row: Encoded, step: int, i: int) -> Mapping[str, Tensor]:
        """Return what is learned of a row."""
        digest = hashlib.sha256(repr((self.settings.seed, step, i)).encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        u = torch.sigmoid(torch.randn(1, generator=generator, dtype=torch.float64))[0]
        shift = self.pipeline.scheduler.config.shift
        is_dropped = torch.rand((), generator=generator) < self.settings.prompt_dropout
        tokens, pooled = self.empty if is_dropped else (row.tokens, row.pooled)
        posterior = torch.randn(row.mean.shape, generator=generator)
        return {
            "sigma": shift * u / (1 + (shift - 1) * u),
            "tokens": tokens, "pooled": pooled,
            "x0": row.mean + (row.logvar / 2).exp() * posterior,
            "noise": torch.randn(row.mean.shape, generator=generator),
        }  # fmt: skip


def train(
    folder: Path, rows: Sequence[tuple[str, Path]], settings: Settings, steps: int
) -> tuple[Training, list[float]]:
    """Return the training after so many steps, and the loss of each."""
    training = Training(folder, rows, settings)
    training.prepare()
    return training, [training.step(step) for step in range(steps)]


def _pixels(path: Path) -> Tensor:
    return torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 0, 1).float() / 127.5 - 1
