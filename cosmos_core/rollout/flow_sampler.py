"""Rollout engine of diffusion models: samples images and videos of prompts with the trainer's denoiser.

Samples of all prompts and completions form one batch, which is distributed over the data-parallel ranks sample by
sample, so that each rank calls a sharded denoiser equally often. A completion depends only on the weights, its prompt
and its seed. Weight loads and sleep do nothing: the engine uses the trainer's weights, or a named set of weights.

Other modules: sampling steps (`flow_path`), noise levels and inputs of the network (`models/diffusion.py`).
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from cosmos_core.errors import ConfigError, DataError
from cosmos_core.rollout.base import Bucket, EngineSettings, FlowSource, LoadReceipt, WeightFormat, request_seed
from cosmos_core.rollout.flow_path import (
    SHARED_NOISE,
    ConditioningFrames,
    Path,
    apply_guidance,
    denoise,
    num_conditioning_frames,
    stochastic_steps,
    table_of,
)
from cosmos_core.types import Completion, DiffusionSample, Group, Prompt, Sampling


@dataclass(frozen=True, slots=True)
class _Row:
    """Completion to sample: number `k` of a prompt."""

    prompt: Prompt
    k: int


class FlowSamplerEngine:
    """Engine that samples from the denoiser that is being trained."""

    name = "flow_sampler"
    ranks_per_engine = 1
    weight_format: WeightFormat = "shared"

    def __init__(self, settings: EngineSettings) -> None:
        if settings.flow is None:
            raise ConfigError("rollout.backend = 'flow_sampler' draws images and videos; take 'vllm' for text")
        self._source: FlowSource = settings.flow
        self._max_samples_per_pass = settings.rollout.n_generation_mini_batch
        self._version = 0
        self._waiting: deque[tuple[Sequence[Prompt], Sampling, int]] = deque()

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> None:
        """Queue prompts, see `Engine.submit`; prompts that are submitted together form one batch."""
        if sampling.flow is None:
            raise ConfigError("rollout.backend = 'flow_sampler' cannot draw tokens")
        if sampling.flow.guidance_scale > 1 and self._source.null_text is None:
            raise ConfigError(
                f"policy.diffusers.sample.guidance_scale = {sampling.flow.guidance_scale}: the prepared prompts have "
                f"no embedding of the empty prompt; run the prepare stage again, or set it to 1"
            )
        if prompts:
            self._waiting.append((prompts, sampling, step))

    def completed(self) -> list[Group]:
        """Sample the oldest batch; see `Engine.completed`."""
        if not self._waiting:
            return []
        prompts, sampling, step = self._waiting.popleft()
        count = sampling.num_completions
        rows = [_Row(prompt, k) for prompt in prompts for k in range(count)]
        num_rows = len(prompts) * min(self._max_samples_per_pass or count, count) * self._num_ranks
        batches = (rows[start : start + num_rows] for start in range(0, len(rows), num_rows))
        samples = (each for batch in batches for each in self._sample_by_form(batch, sampling, step))
        completions = [Completion((), "stop", "", diffusion_sample=each) for each in samples]
        return [Group(each, tuple(completions[p * count : (p + 1) * count]), step) for p, each in enumerate(prompts)]

    def load_weights(self, version: int, buckets: Iterable[Bucket]) -> LoadReceipt:
        """Record the version of the weights, see `Engine.load_weights`; no tensors are sent, because the engine uses
        the trainer's modules."""
        self._version = version
        return LoadReceipt(version, 0)

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Raise an error: a diffusion model has no tokens. See `Engine.logprobs`."""
        raise AssertionError("a diffusion model has no tokens")

    def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Do nothing, because the trainer needs the weights; see `Engine.sleep`."""

    def wake(self) -> None:
        """Do nothing, because `sleep` released no memory; see `Engine.wake`."""

    def close(self) -> None:
        """Do nothing, because the modules belong to the trainer; see `Engine.close`."""

    @property
    def _num_ranks(self) -> int:
        return self._source.mesh.data.size() if self._source.mesh else 1

    def _sample_by_form(self, rows: Sequence[_Row], sampling: Sampling, step: int) -> list[DiffusionSample]:
        """Return the samples of `rows` on all ranks, in the order of the rows.

        Rows are grouped by the shapes of their embeddings, because embeddings from a dataset may differ in their number
        of tokens. All ranks have all rows, so all ranks form the same groups.
        """
        forms: dict[tuple[Any, ...], list[int]] = {}
        for i, row in enumerate(rows):
            text = row.prompt.embedding
            forms.setdefault(tuple((name, tuple(text[name].shape)) for name in sorted(text)), []).append(i)
        samples: dict[int, DiffusionSample] = {}
        for indices in forms.values():
            samples |= zip(indices, self._sample_on_ranks([rows[i] for i in indices], sampling, step), strict=True)
        return [samples[i] for i in range(len(rows))]

    def _sample_on_ranks(self, rows: Sequence[_Row], sampling: Sampling, step: int) -> list[DiffusionSample]:
        """Distribute rows with embeddings of equal shape over the ranks, and return all samples on all ranks, in order.

        A rank without an assigned row samples the first row, so that all ranks take part in each call of the denoiser.
        """
        mesh = self._source.mesh
        if mesh is None:
            return self._draw(rows, sampling, step)
        local_rows = mesh.select_local_items(rows)
        size = -(-len(rows) // self._num_ranks)
        samples = self._draw([*local_rows, *[rows[0]] * (size - len(local_rows))], sampling, step)[: len(local_rows)]
        rank_samples = mesh.all_gather_object(samples)
        return [rank_samples[i % self._num_ranks][i // self._num_ranks] for i in range(len(rows))]

    def _conditioning_frames(
        self, rows: Sequence[_Row], sampling: Sampling, step: int, shape: Sequence[int]
    ) -> ConditioningFrames | None:
        """Return the conditioning frames of the samples; None if the rows have no conditioning frames."""
        assert sampling.flow is not None
        max_frames = min(self._source.model.max_conditioning_frames, shape[1] - 1) if len(shape) == 4 else 0
        clips = [row.prompt.conditioning_clip for row in rows]
        if not max_frames or not sampling.flow.given_frame_range[1] or any(clip is None for clip in clips):
            return None
        if mismatched_clip := next((clip for clip in clips if tuple(clip.shape) != tuple(shape)), None):
            raise DataError(
                f"a clip has latents of shape {tuple(mismatched_clip.shape)} and what is drawn {tuple(shape)}: frames "
                f"can be given of clips of one size alone; set policy.diffusers.train_frames to inference_frames, or "
                f"policy.diffusers.flow_rl.max_conditional_frames to 0"
            )
        bounds = sampling.flow.given_frame_range
        counts = [num_conditioning_frames(bounds, max_frames, sampling.seed, step, row.prompt.id) for row in rows]
        device = self._source.device
        return ConditioningFrames(torch.stack(clips).to(device), torch.tensor(counts, device=device))

    def _draw(self, rows: Sequence[_Row], sampling: Sampling, step: int) -> list[DiffusionSample]:
        """Return the samples of `rows`, computed on this rank."""
        assert sampling.flow is not None
        settings, model = sampling.flow, self._source.model
        sigmas_N = table_of(model, settings)
        num_frames = settings.num_frames if model.is_video else 1
        shape = model.latent_shape(*settings.size, num_frames)
        generators = [_generator(sampling.seed, step, row.prompt.id, row.k) for row in rows]
        noise = torch.stack([torch.randn(shape, generator=generator) for generator in generators])
        if settings.same_noise:
            starts = [_generator(sampling.seed, step, row.prompt.id, SHARED_NOISE) for row in rows]
            noise = torch.stack([torch.randn(shape, generator=generator) for generator in starts])
        text = _stack_embeddings([row.prompt.embedding for row in rows], self._source.device)
        null_embedding = _stack_embeddings([self._source.null_text or {}] * len(rows), self._source.device)
        steps = stochastic_steps(settings, sampling.seed, step)
        frames = self._conditioning_frames(rows, sampling, step, shape)
        num_conditioning_B = frames.num_B if frames else None

        def sample(predict: Callable[..., Tensor]) -> Path:
            velocity = apply_guidance(
                lambda x, sigma_B: predict(x, sigma_B, text, num_conditioning_B),
                lambda x, sigma_B: predict(x, sigma_B, null_embedding, num_conditioning_B),
                model.apply_guidance,
                settings.guidance_scale,
            )
            return denoise(velocity, noise.to(self._source.device), sigmas_N, settings, generators, steps, frames)

        with self._source.weights(settings.weights), torch.no_grad():
            path = model.pipeline_with_logprob(sample, self._source.predict)
            pixels = decode_latents(model, path.latents)
        if num_frames == 1 and pixels.ndim == 5:
            pixels = pixels[:, 0]
        return [path.to_sample(b, pixels[b].clone(), sigmas_N, self._version) for b in range(len(rows))]


def decode_latents(model: Any, latents: Tensor) -> Tensor:
    """Return latents decoded to uint8 pixels (see `to_bytes`); a GPU decodes one sample at a time, because a VAE needs
    gigabytes of memory for each sample."""
    size = 1 if latents.is_cuda else len(latents)
    return torch.cat([to_bytes(model.decode(each)) for each in latents.split(size)])


def to_bytes(pixels: Tensor) -> Tensor:
    """Return pixels (B, 3, [F,] H, W) in [-1, 1] as uint8 (B, [F,] H, W, 3) on the CPU."""
    scaled = ((pixels.float() / 2 + 0.5).clamp(0, 1) * 255).round().to("cpu", torch.uint8)
    return scaled.movedim(1, -1).contiguous()


def _generator(seed: int, step: int, prompt_id: int, k: int) -> torch.Generator:
    return torch.Generator().manual_seed(request_seed(seed, step, prompt_id, k))


def _stack_embeddings(texts: Sequence[dict[str, Tensor]], device: torch.device) -> dict[str, Tensor]:
    return {name: torch.stack([text[name] for text in texts]).to(device) for name in texts[0]}
