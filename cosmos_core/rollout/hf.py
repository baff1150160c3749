"""Rollout on the trainer's own transformers module: for models and machines that vLLM does not serve.

A small sampling loop of our own rather than `generate`, because each completion needs a random generator of its own
and the log-probabilities of the distribution that it was drawn from. No paged cache, no continuous batching: a batch
runs until its last answer ends.

Shape legend: P prompts, K completions of each, B = P * K rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from cosmos_core.rollout.base import check_prompts, completion, request_seed, stop_token_ids
from cosmos_core.rollout.weights import checksum
from cosmos_core.types import Group, Prompt, Sampling


class HfEngine:
    """Samples from the module that is being trained, so there is nothing to load and nothing to put to sleep."""

    name = "hf"

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, max_model_len: int, dtype: torch.dtype
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._dtype = dtype
        self._stop_ids = stop_token_ids(model, tokenizer)
        self._version = 0

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> list[Group]:
        """See `Engine.generate`."""
        check_prompts(prompts, self._max_model_len)
        if not prompts:
            return []
        model, was_training = self._model, self._model.training
        nn.Module.to(model, "cuda" if torch.cuda.is_available() else "cpu")  # a copy of what ranks share is on the CPU
        model.eval()  # dropout off, and the recomputation of gradient checkpointing, which forbids a cache
        try:
            with torch.no_grad(), torch.autocast(model.device.type, self._dtype, enabled=self._dtype != model.dtype):
                tokens_BT, logprobs_BT, lengths_B = self._sample(prompts, sampling, step)
        finally:
            model.train(was_training)
        rows = []
        for tokens, logprobs, length in zip(tokens_BT.tolist(), logprobs_BT.tolist(), lengths_B.tolist(), strict=True):
            stopped = tokens[length - 1] in self._stop_ids
            rows.append(completion(self._tokenizer, tokens[:length], logprobs[:length], stopped=stopped))
        k = sampling.num_completions
        return [Group(p, tuple(rows[i * k : (i + 1) * k]), self._version) for i, p in enumerate(prompts)]

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> str:
        """See `Engine.load_weights`; the module is shared, so only version and checksum are taken."""
        self._version = version
        return checksum(weights)

    def sleep(self) -> None:
        """Nothing: the module belongs to the trainer."""

    def wake(self) -> None:
        """Nothing: see `sleep`."""

    def close(self) -> None:
        """Nothing: see `sleep`."""

    def _sample(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens and log-probabilities BT, zeros behind each row's length B."""
        device, k = self._model.device, sampling.num_completions
        input_ids_PT, mask_PT = self._left_padded(prompts)
        budget_B = (self._max_model_len - mask_PT.sum(-1)).clamp(max=sampling.max_tokens).repeat_interleave(k)
        uniforms_BT = _uniforms(prompts, sampling, step).to(device)
        positions_PT = (mask_PT.cumsum(-1) - 1).clamp(min=0)
        cache = DynamicCache(config=self._model.config)
        logits_PV = self._forward(input_ids_PT, mask_PT, positions_PT, cache)
        cache.batch_repeat_interleave(k)  # a group's prompt is read once
        logits_BV, mask_BT = logits_PV.repeat_interleave(k, 0), mask_PT.repeat_interleave(k, 0)
        positions_B = positions_PT[:, -1].repeat_interleave(k)
        seen_BV = _seen(input_ids_PT, mask_PT, logits_PV.shape[-1]).repeat_interleave(k, 0)
        stop_ids = torch.tensor(self._stop_ids, dtype=torch.long, device=device)

        alive_B, lengths_B = torch.ones_like(budget_B, dtype=torch.bool), torch.zeros_like(budget_B)
        tokens, logprobs = [], []
        for t in range(int(budget_B.max())):
            logprobs_BV = processed_logprobs(logits_BV, seen_BV, sampling)
            tokens_B = logprobs_BV.argmax(-1) if sampling.temperature == 0 else draw(logprobs_BV, uniforms_BT[:, t])
            tokens.append(tokens_B)
            logprobs.append(logprobs_BV.gather(-1, tokens_B.unsqueeze(-1)).squeeze(-1))
            lengths_B += alive_B
            alive_B = alive_B & ~torch.isin(tokens_B, stop_ids) & (lengths_B < budget_B)
            if not alive_B.any():
                break
            seen_BV.scatter_(-1, tokens_B.unsqueeze(-1), True)
            mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(mask_BT), 1)], dim=-1)
            positions_B = positions_B + alive_B  # an ended row stays where it is: a table of positions may be full
            logits_BV = self._forward(tokens_B.unsqueeze(-1), mask_BT, positions_B.unsqueeze(-1), cache)
        return torch.stack(tokens, -1), torch.stack(logprobs, -1), lengths_B

    def _left_padded(self, prompts: Sequence[Prompt]) -> tuple[Tensor, Tensor]:
        width = max(len(prompt.token_ids) for prompt in prompts)
        pad = self._tokenizer.pad_token_id or 0
        rows = [[pad] * (width - len(p.token_ids)) + list(p.token_ids) for p in prompts]
        mask = [[0] * (width - len(p.token_ids)) + [1] * len(p.token_ids) for p in prompts]
        device = self._model.device
        return torch.tensor(rows, device=device), torch.tensor(mask, device=device)

    def _forward(self, input_ids: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        """Logits of the last position of each row."""
        output = self._model(
            input_ids=input_ids, attention_mask=mask, position_ids=positions, past_key_values=cache,
            use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        return output.logits[:, -1]


def processed_logprobs(logits_BV: Tensor, seen_BV: Tensor, sampling: Sampling) -> Tensor:
    """Log-probabilities after repetition penalty, temperature, top-k and top-p, in the order of vLLM: BV, float32.

    `seen_BV` marks the tokens of prompt and answer so far; positive logits of these are divided by the penalty,
    negative ones multiplied (CTRL, arXiv 1909.05858). At temperature 0 only the penalty applies.
    """
    logits_BV = logits_BV.float()
    if sampling.repetition_penalty != 1.0:
        penalty = sampling.repetition_penalty
        penalised_BV = torch.where(logits_BV < 0, logits_BV * penalty, logits_BV / penalty)
        logits_BV = torch.where(seen_BV, penalised_BV, logits_BV)
    if sampling.temperature == 0:
        return logits_BV.log_softmax(-1)
    logits_BV = logits_BV / sampling.temperature
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        weakest_kept_B1 = logits_BV.topk(sampling.top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < weakest_kept_B1, -torch.inf)
    if sampling.top_p < 1.0:
        ascending_BV, order_BV = logits_BV.sort(-1)
        dropped_BV = ascending_BV.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        dropped_BV[:, -1] = False  # the most likely token always stays
        logits_BV = logits_BV.masked_fill(dropped_BV.scatter(-1, order_BV, dropped_BV), -torch.inf)
    return logits_BV.log_softmax(-1)


def draw(logprobs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Invert the cumulative distribution at one uniform number a row, in float64: token ids B."""
    cumulative_BV = logprobs_BV.double().exp().cumsum(-1)
    targets_B1 = uniforms_B.unsqueeze(-1) * cumulative_BV[:, -1:]
    return torch.searchsorted(cumulative_BV, targets_B1, right=True).squeeze(-1)


def _uniforms(prompts: Sequence[Prompt], sampling: Sampling, step: int) -> Tensor:
    """One uniform number a token, from a generator of each completion's own: BT, float64."""
    rows = []
    for prompt in prompts:
        for k in range(sampling.num_completions):
            generator = torch.Generator().manual_seed(request_seed(sampling.seed, step, prompt.id, k))
            rows.append(torch.rand(sampling.max_tokens, generator=generator, dtype=torch.float64))
    return torch.stack(rows)


def _seen(input_ids_PT: Tensor, mask_PT: Tensor, vocab_size: int) -> Tensor:
    """Which tokens a prompt holds, padding left out: PV."""
    counts_PV = torch.zeros(len(input_ids_PT), vocab_size, dtype=mask_PT.dtype, device=input_ids_PT.device)
    return counts_PV.scatter_add_(-1, input_ids_PT, mask_PT) > 0
