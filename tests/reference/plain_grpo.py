"""GRPO in one file, with transformers and torch and nothing of ours: what the system has to arrive at.

The loop generates by itself. It shares no code with the system, only the rule that fixes random numbers: completion
k of prompt p at step s draws its tokens with one uniform number each, from a generator seeded with the first 63 bits of
sha256("seed/s/p/k"), by inverting the cumulative distribution. All is done in the plainest way: one sequence at a time,
no cache, no padding, no micro-batches. With an injected engine or recorded completions, sampling, the engine's weights
after an update and rewards would be outside of the comparison.

    advantage  (r - mean of its group) / (standard deviation of its group + 1e-6)            2402.03300 (arXiv)
    loss       - min(rho A, clip(rho, 1 - low, 1 + high) A), for A < 0 at most - 3 A         1912.09729, 2503.14476
               + beta (exp(ref - pi) - (ref - pi) - 1), mean over all tokens of the update   2402.03300

T tokens of a sequence, C of its completion, V vocabulary.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


@dataclass(frozen=True)
class Settings:
    """One training."""

    prompts_per_step: int
    completions: int  # of each prompt
    max_tokens: int
    updates_per_step: int
    passes: int
    learning_rate: float
    adam_epsilon: float
    weight_decay: float
    clip_norm: float
    epsilon_low: float
    epsilon_high: float
    kl_beta: float
    temperature: float
    seed: int


@dataclass
class Sample:
    """A completion behind its prompt."""

    ids_T: Tensor
    num_prompt: int
    reward: float
    advantage: float = 0.0


def train(
    folder: Path, prompts: Sequence[str], reward: Callable[[str], float], settings: Settings, steps: int
) -> tuple[PreTrainedModel, list[float]]:
    """Return the trained model and the mean reward of each step."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference = copy.deepcopy(model).requires_grad_(False)
    decays = [{"params": [weight], "weight_decay": settings.weight_decay * (weight.ndim > 1)} for weight in
              model.parameters()]  # fmt: skip
    optimizer = torch.optim.AdamW(decays, lr=settings.learning_rate, eps=settings.adam_epsilon)
    means: list[float] = []
    for step in range(steps):
        samples: list[Sample] = []
        for position in range(settings.prompts_per_step):
            row = (step * settings.prompts_per_step + position) % len(prompts)
            turn = [{"role": "user", "content": prompts[row]}]
            prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt")["input_ids"][
                0
            ]
            group = []
            for k in range(settings.completions):
                ids_T = generate(model, tokenizer.eos_token_id, prompt, settings, (step, row, k))
                text = tokenizer.decode(ids_T[len(prompt) :], skip_special_tokens=True)
                group.append(Sample(ids_T, len(prompt), reward(text)))
            samples += credited(group)
        means.append(sum(sample.reward for sample in samples) / len(samples))
        update(model, reference, optimizer, samples, settings)
    return model, means


@torch.no_grad()
def generate(
    model: PreTrainedModel, end: int, prompt: Tensor, settings: Settings, request: tuple[int, int, int]
) -> Tensor:
    """Return the prompt with a completion drawn behind it, its end token included."""
    digest = hashlib.sha256("/".join(map(str, (settings.seed, *request))).encode()).hexdigest()
    generator = torch.Generator().manual_seed(int(digest[:16], 16) // 2)
    uniforms = torch.rand(settings.max_tokens, generator=generator, dtype=torch.float64)
    ids_T = prompt
    for uniform in uniforms:
        logits_V = model(input_ids=ids_T[None]).logits[0, -1] / settings.temperature
        cumulative_V = logits_V.log_softmax(-1).double().exp().cumsum(-1)
        token = int((cumulative_V <= uniform * cumulative_V[-1]).sum())
        ids_T = torch.cat([ids_T, torch.tensor([token])])
        if token == end:
            break
    return ids_T


def credited(group: list[Sample]) -> list[Sample]:
    """Return the group with its advantages; none where all rewards are equal."""
    rewards = torch.tensor([sample.reward for sample in group], dtype=torch.float64)
    if rewards.min() < rewards.max():
        advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)
        for sample, advantage in zip(group, advantages.tolist(), strict=True):
            sample.advantage = advantage
    return group


def logprobs(model: PreTrainedModel, sample: Sample, temperature: float) -> Tensor:
    """Return the log-probability of each token of the completion: C."""
    logits_TV = model(input_ids=sample.ids_T[None]).logits[0, sample.num_prompt - 1 : -1] / temperature
    return logits_TV.log_softmax(-1).gather(-1, sample.ids_T[sample.num_prompt :, None])[:, 0]


def update(
    model: PreTrainedModel, reference: PreTrainedModel, optimizer: torch.optim.Optimizer, samples: list[Sample],
    settings: Settings,
) -> None:  # fmt: skip
    """Take the optimizer steps of one train step."""
    with torch.no_grad():
        old = [logprobs(model, sample, settings.temperature) for sample in samples]
        fixed = [logprobs(reference, sample, settings.temperature) for sample in samples]
    size = len(samples) // settings.updates_per_step
    for start in list(range(0, len(samples), size)) * settings.passes:
        losses = []
        for i in range(start, start + size):
            new_C, advantage = logprobs(model, samples[i], settings.temperature), samples[i].advantage
            ratio_C = (new_C - old[i]).exp()
            clipped_C = ratio_C.clamp(1 - settings.epsilon_low, 1 + settings.epsilon_high)
            loss_C = -torch.minimum(ratio_C * advantage, clipped_C * advantage)
            if advantage < 0:
                loss_C = loss_C.clamp(max=-3 * advantage)
            difference_C = fixed[i] - new_C
            losses.append(loss_C + settings.kl_beta * (difference_C.exp() - difference_C - 1))
        optimizer.zero_grad()
        torch.cat(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        optimizer.step()
