"""Rollout with transformers modules, for models and machines that vLLM does not support.

The engine has its own sampling loop instead of transformers' `generate`, because each completion needs a separate
random generator and the log-probabilities of its sampling distribution. The engine has no paged cache and no continuous
batching: a batch runs until its last completion ends, and shrinks whenever half of its rows have ended.

Shape legend: P prompts, K completions of each, R = P * K rows, B rows still in progress, T tokens, V vocabulary.
"""

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, TopKLogitsWarper, TopPLogitsWarper
from transformers.cache_utils import DynamicLayer

from cosmos_core.data.sample import Sample
from cosmos_core.errors import ConfigError, StageFailed, first_line
from cosmos_core.models.hf import load_model
from cosmos_core.models.lora import add_adapter_like, trains_only_linear_factors
from cosmos_core.models.packing import is_close
from cosmos_core.models.scorer import NUM_PROBE_TOKENS, LogprobScorer
from cosmos_core.parallel.mesh import is_single_rank
from cosmos_core.rollout.base import (
    Bucket,
    EngineSettings,
    LoadReceipt,
    ModuleEngine,
    WeightFormat,
    WeightReceiver,
    check_prompts,
    completion,
    request_seed,
    stop_token_ids,
)
from cosmos_core.rollout.sample_tokens import sample_tokens
from cosmos_core.transient import is_machine_error
from cosmos_core.types import Completion, Group, Prompt, Sampling

_MIN_CACHE_GROWTH_TOKENS = 64
_MAX_HALF_PRECISION_DIFFERENCE = 0.5
"""Difference between half-precision logits with and without a key-value cache, as a fraction of the largest logit, that
rounding cannot explain."""


class HfEngine(ModuleEngine):
    """Engine that samples from the trainer's module or, if ranks have shards of the module, from a replica of it."""

    name = "hf"

    def __init__(self, engine_settings: EngineSettings) -> None:
        super().__init__(engine_settings)
        uses_trainer_model = is_single_rank() and not engine_settings.is_separate
        sends_adapter = trains_only_linear_factors(engine_settings.complete_model)
        self.weight_format: WeightFormat = "shared" if uses_trainer_model else "adapter" if sends_adapter else "module"
        self._model = engine_settings.model
        if not uses_trainer_model:
            # Load a replica: with an adapter it receives only the LoRA factors, otherwise all weights, merged.
            trainer_model, revision = engine_settings.complete_model, getattr(self._model.config, "_commit_hash", None)
            self._model = load_model(engine_settings.folder, revision=revision, dtype=trainer_model.dtype)
            if sends_adapter:
                add_adapter_like(self._model, trainer_model)
            nn.Module.to(self._model, "cuda" if torch.cuda.is_available() else "cpu")
            self._model.requires_grad_(False)
        self._tokenizer = engine_settings.tokenizer
        self._max_model_len = engine_settings.max_model_len
        self._dtype = engine_settings.dtype
        self._stop_token_ids = stop_token_ids(engine_settings.model, engine_settings.tokenizer)
        self._image_reader = engine_settings.vision
        self._weight_receiver = WeightReceiver()
        self._cache_argument_name = find_cache_argument(type(self._model))
        self._prompt_batching = self._choose_batching()

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> None:
        check_prompts(prompts, self._max_model_len)
        super().submit(prompts, sampling, step)

    def _generate(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> list[Group]:
        indices_by_batch_key: dict[tuple[int, int], list[int]] = {}
        for i, prompt in enumerate(prompts):
            # Prompts with images must have equally many images and tokens, because with padding the model could not
            # compute the positions of images; prompts of text must have equally many tokens unless they are padded.
            padded_length = 0 if self._prompt_batching.has_padding and not prompt.images else len(prompt.token_ids)
            indices_by_batch_key.setdefault((len(prompt.images), padded_length), []).append(i)
        groups_by_index: dict[int, Group] = {}
        for indices in indices_by_batch_key.values():
            batch_groups = self._generate_batch([prompts[i] for i in indices], sampling, step)
            groups_by_index |= zip(indices, batch_groups, strict=True)
        return [groups_by_index[i] for i in range(len(prompts))]

    def _generate_batch(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> list[Group]:
        """Generate the groups of `prompts`, at most `_max_samples_per_pass` completions of each group at a time."""
        sample_indices = range(sampling.num_completions)
        completions_per_pass = self._max_samples_per_pass or len(sample_indices)
        completions: list[list[Completion]] = [[] for _ in prompts]
        for ks in (sample_indices[k : k + completions_per_pass] for k in sample_indices[::completions_per_pass]):
            with self._inference_mode():
                sampled_lists = [tensor.tolist() for tensor in self._sample(prompts, sampling, step, ks)]
            for row_index, (tokens, logprobs, length) in enumerate(zip(*sampled_lists, strict=True)):
                new_completion = completion(
                    self._tokenizer, tokens[:length], logprobs[:length], version=self._version,
                    ends_with_stop=tokens[length - 1] in self._stop_token_ids, vision=self._image_reader,
                )  # fmt: skip
                completions[row_index // len(ks)].append(new_completion)
        return [Group(*group, step) for group in zip(prompts, map(tuple, completions), strict=True)]

    def abort(self) -> None:
        """Discard all queued prompts."""
        self._submissions.clear()

    def load_weights(self, version: int, buckets: Iterable[Bucket]) -> LoadReceipt:
        """Copy weights into this engine's replica of the module; without a replica, the engine has the trainer's
        weights already."""
        self._version = version
        if self.weight_format == "shared":
            return LoadReceipt(version, 0)
        state_dict = self._model.state_dict()
        with torch.no_grad():
            for name, tensor in chain.from_iterable(self._weight_receiver.buckets(buckets)):
                if name not in state_dict or state_dict[name].shape != tensor.shape:
                    raise StageFailed(f"weight sync: {name} of shape {tuple(tensor.shape)} is not in the replica")
                state_dict[name].copy_(tensor)
        return self._weight_receiver.acknowledge(version)

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        input_ids = torch.tensor([list(token_ids)], device=self._model.device)
        model_inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        with self._inference_mode():
            return LogprobScorer(self._model)(model_inputs, torch.arange(len(token_ids) - 1))["logprobs"].tolist()

    @contextmanager
    def _inference_mode(self) -> Iterator[None]:
        """Return a context manager without dropout and gradients, in which the model can use a key-value cache."""
        model, was_training = self._model, self._model.training
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        model.eval()
        # Only warn, because `cumsum` on a GPU raises an error in deterministic mode, although its order is fixed.
        torch.use_deterministic_algorithms(is_deterministic, warn_only=True)
        try:
            with torch.no_grad(), torch.autocast(model.device.type, self._dtype, enabled=self._dtype != model.dtype):
                yield
        finally:
            torch.use_deterministic_algorithms(is_deterministic)
            model.train(was_training)

    def _sample(self, prompts: Sequence[Prompt], sampling: Sampling, step: int, ks: range) -> tuple[Tensor, ...]:
        """Sample the completions with the numbers `ks` for each prompt. Return their tokens (shape RT),
        log-probabilities (RT) and lengths (R); values beyond the length of a row are undefined."""
        device, k = self._model.device, len(ks)
        token_ids = [torch.tensor(prompt.token_ids) for prompt in prompts]
        pad_token_id = self._tokenizer.pad_token_id or 0
        input_ids_PT = pad_sequence(token_ids, True, pad_token_id, padding_side="left").to(device)
        mask_PT = pad_sequence([torch.ones_like(ids) for ids in token_ids], True, padding_side="left").to(device)
        max_new_tokens_B = (self._max_model_len - mask_PT.sum(-1)).clamp(max=sampling.max_tokens).repeat_interleave(k)
        uniforms_RT = _draw_uniform_numbers(prompts, sampling, step, ks).to(device)
        positions_PT = (mask_PT.cumsum(-1) - 1).clamp(min=0)
        image_inputs = self._make_image_inputs(prompts, input_ids_PT)
        cache = self._make_cache()
        inputs = {"attention_mask": mask_PT, **image_inputs}
        if not image_inputs:
            inputs = self._prompt_batching.make_inputs(mask_PT, positions_PT)
        logits_PV = self._forward(input_ids_PT, cache, inputs)
        # One forward pass over the prompt serves all completions of a group, so the rows of the cache are repeated.
        # Unlike the cache's other methods, `reorder_cache` also repeats the states of recurrent layers.
        cache.reorder_cache(torch.arange(len(prompts)).repeat_interleave(k))  # type: ignore[arg-type]
        # New tokens attend to the same image tiles as the last token of the prompt.
        image_tile_masks = {n: mask for n, mask in image_inputs.items() if n == "cross_attention_mask"}
        new_token_image_inputs = {n: mask[:, -1:].repeat_interleave(k, 0) for n, mask in image_tile_masks.items()}
        logits_BV, mask_BT = logits_PV.repeat_interleave(k, 0), mask_PT.repeat_interleave(k, 0)
        positions_B = positions_PT[:, -1].repeat_interleave(k)
        is_used_token_BV = _make_used_token_mask(input_ids_PT, mask_PT, logits_PV.shape[-1]).repeat_interleave(k, 0)
        stop_ids = torch.tensor(self._stop_token_ids, dtype=torch.long, device=device)

        rows_B = torch.arange(len(max_new_tokens_B), device=device)
        tokens_RT = torch.zeros(len(rows_B), int(max_new_tokens_B.max()), dtype=torch.long, device=device)
        logprobs_RT, lengths_R = torch.zeros_like(tokens_RT, dtype=torch.float32), max_new_tokens_B.clone()
        is_active_B = torch.ones_like(max_new_tokens_B, dtype=torch.bool)
        # Finished rows stay in a batch with images, because the model keeps image positions for each row.
        can_drop_rows = not image_inputs and all(type(layer) is _PreallocatedCacheLayer for layer in cache.layers)
        for t in range(tokens_RT.shape[1]):
            logprobs_BV = process_logits(logits_BV, is_used_token_BV, sampling)
            uniforms_B = uniforms_RT[rows_B, t] if sampling.temperature else None
            tokens_B = sample_tokens(logprobs_BV, uniforms_B, is_active_B)
            tokens_RT[rows_B, t] = tokens_B
            logprobs_RT[rows_B, t] = logprobs_BV.gather(-1, tokens_B.unsqueeze(-1)).squeeze(-1)
            has_ended_B = is_active_B & (torch.isin(tokens_B, stop_ids) | (t + 1 >= max_new_tokens_B))
            lengths_R[rows_B[has_ended_B]] = t + 1
            is_active_B = is_active_B & ~has_ended_B
            if not is_active_B.any():
                break
            is_used_token_BV.scatter_(-1, tokens_B.unsqueeze(-1), True)
            mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(mask_BT), 1)], dim=-1)
            # The position of a finished row no longer grows, because it must not exceed the model's position table.
            positions_B = positions_B + is_active_B
            if can_drop_rows and 2 * is_active_B.sum() <= len(is_active_B):
                kept_rows_B = is_active_B.nonzero().squeeze(-1)
                cache.batch_select_indices(kept_rows_B)
                rows_B, tokens_B, is_active_B = rows_B[kept_rows_B], tokens_B[kept_rows_B], is_active_B[kept_rows_B]
                is_used_token_BV, mask_BT = is_used_token_BV[kept_rows_B], mask_BT[kept_rows_B]
                positions_B, max_new_tokens_B = positions_B[kept_rows_B], max_new_tokens_B[kept_rows_B]
            # With images, pass no positions and no mask: the model computes positions, and there is no padding.
            inputs = self._prompt_batching.make_inputs(mask_BT, positions_B.unsqueeze(-1))
            logits_BV = self._forward(tokens_B.unsqueeze(-1), cache, new_token_image_inputs if image_inputs else inputs)
        return tokens_RT, logprobs_RT, lengths_R

    def _make_image_inputs(self, prompts: Sequence[Prompt], input_ids_PT: Tensor) -> dict[str, Tensor]:
        """Return the images of prompts as model inputs; the model computes the positions of rows with images itself.
        Empty if the prompts have no images."""
        if not prompts[0].images:
            return {}
        assert self._image_reader is not None, "opened without a processor"
        samples = [
            Sample(np.array(p.token_ids, dtype=np.int64), np.zeros(len(p.token_ids), dtype=np.uint8), images=p.images)
            for p in prompts
        ]
        image_inputs, dtype = self._image_reader.make_image_inputs(samples, input_ids_PT.cpu()), self._model.dtype
        return {
            name: tensor.to(self._model.device, dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in image_inputs.items()
        }

    def _forward(self, input_ids: Tensor, cache: DynamicCache, inputs: Mapping[str, Tensor]) -> Tensor:
        """Make a forward pass with a key-value cache, and return the logits at the last position of each row; `inputs`
        holds masks, positions and images."""
        self._send_heartbeat()
        cache_kwargs = {self._cache_argument_name: cache}
        model_output = self._model(input_ids=input_ids, **cache_kwargs, use_cache=True, logits_to_keep=1, **inputs)
        return model_output.logits[:, -1]

    def _choose_batching(self) -> "_PromptBatching":
        """Return the fastest of `_PROMPT_BATCHINGS` whose logits with a key-value cache equal those without. In half
        precision, where rounding changes logits, return the one with the smallest difference, if it is small. Raise
        `ConfigError` if there is none."""
        logit_differences: dict[_PromptBatching, float] = {}
        problem = "computes other logits with a cache than without"
        with self._inference_mode(), torch.autocast(self._model.device.type, enabled=False):
            for prompt_batching in _PROMPT_BATCHINGS:
                try:
                    logits_with_cache, expected_logits = self._compute_probe_logits(prompt_batching)
                except (IndexError, RuntimeError, ValueError) as error:  # a cache whose rows cannot be repeated
                    if is_machine_error(error):
                        raise
                    logit_differences[prompt_batching] = math.inf
                    problem = f"fails with a cache of repeated rows ({first_line(error)})"
                    continue
                if is_close(logits_with_cache, expected_logits, self._model.dtype):
                    return prompt_batching
                logit_gap = (
                    (logits_with_cache.float() - expected_logits.float()).abs().max().nan_to_num(math.inf).item()
                )
                logit_differences[prompt_batching] = logit_gap / max(expected_logits.abs().max().item(), 1e-9)
        best_batching = min(logit_differences, key=logit_differences.__getitem__)
        if self._model.dtype == torch.float32 or not logit_differences[best_batching] < _MAX_HALF_PRECISION_DIFFERENCE:
            error_text = f"{type(self._model).__name__} {problem}"
            raise ConfigError(f"rollout.backend = 'hf': {error_text}; use a model of another family")
        return best_batching

    def _compute_probe_logits(self, prompt_batching: "_PromptBatching") -> tuple[Tensor, Tensor]:
        """Compute the logits after a probe prompt in two ways. Return those with a cache whose rows are repeated, as in
        `_sample` (shape 2V, for two copies of the prompt), and those of one forward pass without a cache (shape V)."""
        model, num_padding_tokens = self._model, NUM_PROBE_TOKENS // 2 if prompt_batching.has_padding else 0
        # Avoid the lowest token ids, because many models use one of them as the pad token.
        probe_ids_T = torch.arange(NUM_PROBE_TOKENS, 3 * NUM_PROBE_TOKENS, device=model.device)
        input_ids_BT = (probe_ids_T % model.config.get_text_config().vocab_size).view(2, -1)
        mask_BT = torch.ones_like(input_ids_BT)
        mask_BT[0, :num_padding_tokens] = 0
        positions_BT, cache = (mask_BT.cumsum(-1) - 1).clamp(min=0), self._make_cache()
        self._forward(input_ids_BT[:, :-1], cache, prompt_batching.make_inputs(mask_BT[:, :-1], positions_BT[:, :-1]))
        repeated_rows_B = torch.tensor([0, 0, 1, 1])
        cache.reorder_cache(repeated_rows_B)  # type: ignore[arg-type]
        model_inputs = prompt_batching.make_inputs(mask_BT[repeated_rows_B], positions_BT[repeated_rows_B, -1:])
        logits_BV = self._forward(input_ids_BT[repeated_rows_B, -1:], cache, model_inputs)
        return logits_BV[:2], model(input_ids=input_ids_BT[:1, num_padding_tokens:], use_cache=False).logits[0, -1]

    def _make_cache(self) -> DynamicCache:
        # Preallocate only the caches of full attention: those of sliding-window and linear attention do not grow.
        cache = DynamicCache(config=self._model.config)
        cache.layers = [_PreallocatedCacheLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
        return cache


class _PromptBatching(NamedTuple):
    """Way to batch prompts of different lengths: with or without padding, and with or without token positions as model
    input."""

    has_padding: bool
    """Whether shorter prompts are padded on the left; otherwise all prompts of a batch have equally many tokens."""
    takes_position_ids: bool
    """Whether the model gets the positions of tokens as input; otherwise it computes them itself."""

    def make_inputs(self, mask_BT: Tensor, positions_BT: Tensor) -> dict[str, Tensor]:
        attention_mask_input = {"attention_mask": mask_BT} if self.has_padding else {}
        return attention_mask_input | ({"position_ids": positions_BT} if self.takes_position_ids else {})


_PROMPT_BATCHINGS = (_PromptBatching(True, True), _PromptBatching(False, True), _PromptBatching(False, False))
"""Ways to batch prompts, the fastest first."""


class _PreallocatedCacheLayer(DynamicLayer):
    """Cache layer with preallocated memory, so that appending a token does not copy the earlier keys and values."""

    _cache_buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        num_cached_tokens, num_new_tokens = self.get_seq_length(), key_states.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self._cache_buffers is None or self._cache_buffers[0].shape[-2] < num_cached_tokens + num_new_tokens:
            buffer_length = num_cached_tokens + num_new_tokens + max(_MIN_CACHE_GROWTH_TOKENS, num_cached_tokens // 4)
            key_buffer = _allocate_cache(self.keys, key_states, buffer_length)
            self._cache_buffers = key_buffer, _allocate_cache(self.values, value_states, buffer_length)
        keys, values = (buffer[..., : num_cached_tokens + num_new_tokens, :] for buffer in self._cache_buffers)
        keys[..., num_cached_tokens:, :], values[..., num_cached_tokens:, :] = key_states, value_states
        self.keys, self.values = keys, values
        return keys, values

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self._cache_buffers = None

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._cache_buffers = None


def _allocate_cache(cached_states: Tensor | None, new_states: Tensor, num_allocated_tokens: int) -> Tensor:
    """Return a cache tensor for `num_allocated_tokens` tokens, which begins with a copy of `cached_states`, if any."""
    cache_buffer = new_states.new_empty(*new_states.shape[:-2], num_allocated_tokens, new_states.shape[-1])
    if cached_states is not None and cached_states.numel():
        cache_buffer[..., : cached_states.shape[-2], :] = cached_states
    return cache_buffer


def find_cache_argument(model_class: Any) -> str:
    """Return the name of the argument by which a model class takes a key-value cache; raise `ConfigError` if it takes
    none of transformers' caches."""
    argument_names = inspect.signature(model_class.forward).parameters.keys() & {"past_key_values", "cache_params"}
    if not argument_names or not model_class._supports_default_dynamic_cache():
        raise ConfigError(
            f"rollout.backend = 'hf': {model_class.__name__} takes no DynamicCache of transformers; use another family"
        )
    return argument_names.pop()


def process_logits(logits_BV: Tensor, is_used_token_BV: Tensor, sampling: Sampling) -> Tensor:
    """Return log-probabilities after repetition penalty, temperature, top-k and top-p, in vLLM's order: BV, float32.

    `is_used_token_BV` marks the tokens of the prompt and the completion so far, whose positive logits are divided and
    negative logits multiplied by the penalty (CTRL, arXiv 1909.05858). At temperature 0 only the penalty applies."""
    logits_BV = logits_BV.float()
    if sampling.repetition_penalty != 1.0:
        repetition_penalty = sampling.repetition_penalty
        penalised_logits_BV = torch.where(logits_BV < 0, logits_BV * repetition_penalty, logits_BV / repetition_penalty)
        logits_BV = torch.where(is_used_token_BV, penalised_logits_BV, logits_BV)
    if sampling.temperature == 0:
        return logits_BV.log_softmax(-1)
    logits_BV = logits_BV / sampling.temperature
    if sampling.top_k > 0:
        logits_BV = TopKLogitsWarper(sampling.top_k)(None, logits_BV)  # type: ignore[arg-type] # ids are not used
    if sampling.top_p < 1.0:
        logits_BV = TopPLogitsWarper(sampling.top_p)(None, logits_BV)  # type: ignore[arg-type]
    return logits_BV.log_softmax(-1)


def _draw_uniform_numbers(prompts: Sequence[Prompt], sampling: Sampling, step: int, ks: range) -> Tensor:
    """Return one uniform random number per token to sample (shape RT, float64), from one generator per completion."""
    completion_seeds = [request_seed(sampling.seed, step, prompt.id, k) for prompt in prompts for k in ks]
    generators = [torch.Generator().manual_seed(seed) for seed in completion_seeds]
    return torch.stack([torch.rand(sampling.max_tokens, generator=g, dtype=torch.float64) for g in generators])


def _make_used_token_mask(input_ids_PT: Tensor, mask_PT: Tensor, vocab_size: int) -> Tensor:
    """Return a mask (shape PV) of the vocabulary entries that each prompt contains, without padding."""
    # A prompt may contain ids above the last logit, because Llama 3.2 Vision has no logits of image tokens.
    padded_vocab_size = max(vocab_size, int(input_ids_PT.max()) + 1)
    token_counts_PV = torch.zeros(len(input_ids_PT), padded_vocab_size, dtype=mask_PT.dtype, device=input_ids_PT.device)
    return token_counts_PV.scatter_add_(-1, input_ids_PT, mask_PT)[:, :vocab_size] > 0
