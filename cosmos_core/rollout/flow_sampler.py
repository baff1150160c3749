"""Rollout engine of diffusion models: samples images and videos of prompts with the trainer's denoiser.

Samples of all prompts and completions form one batch, which is distributed over the data-parallel ranks sample by
sample, so that each rank calls a sharded denoiser equally often. A completion depends only on the weights, its prompt
and its seed. Weight loads and sleep do nothing: the engine uses the trainer's weights, or a named set of weights.

Other modules: sampling steps (`flow_path`), noise levels and inputs of the network (`models/diffusion.py`).
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from cosmos_core.errors import ConfigError, DataError
from cosmos_core.rollout.base import Bucket, EngineSettings, FlowSource, LoadReceipt, WeightFormat, request_seed
from cosmos_core.rollout.flow_path import (
    SHARED_NOISE,
    ConditioningFrames,
    Path,
    denoise,
    num_conditioning_frames,
    stochastic_steps,
    table_of,
)
from cosmos_core.types import Completion, DiffusionSample, Group, Prompt, Sampling

_CompletionRow = tuple[Prompt, int]
"""Completion to sample: a prompt, and the number of the completion."""


class FlowSamplerEngine:
    """Engine that samples from the denoiser that is being trained."""

    name = "flow_sampler"
    ranks_per_engine = 1
    weight_format: WeightFormat = "shared"

    def __init__(self, settings: EngineSettings) -> None:
        if settings.flow is None:
            raise ConfigError("rollout.backend = 'flow_sampler' draws images and videos; take 'vllm' for text")
        self._source: FlowSource = settings.flow
        self._beat = settings.beat
        self._max_samples_per_pass = settings.rollout.n_generation_mini_batch
        self._version = 0
        self._waiting_batches: deque[tuple[Sequence[Prompt], Sampling, int]] = deque()

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> None:
        """Queue prompts, see `Engine.submit`; prompts that are submitted together form one batch."""
        if prompts:
            self._waiting_batches.append((prompts, sampling, step))

    def completed(self) -> list[Group]:
        """Sample the oldest batch; see `Engine.completed`."""
        if not self._waiting_batches:
            return []
        prompts, sampling, step = self._waiting_batches.popleft()
        count = sampling.num_completions
        rows = [(prompt, k) for prompt in prompts for k in range(count)]
        prompts_per_rank = -(-len(prompts) // self._num_ranks)
        num_rows = prompts_per_rank * min(self._max_samples_per_pass or count, count) * self._num_ranks
        batches = (rows[start : start + num_rows] for start in range(0, len(rows), num_rows))
        samples = (each for batch in batches for each in self._sample_by_shape(batch, sampling, step))
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

    def _sample_by_shape(self, rows: Sequence[_CompletionRow], sampling: Sampling, step: int) -> list[DiffusionSample]:
        """Return the samples of `rows` on all ranks, in order. All ranks form the same groups of rows by the shapes of
        their embeddings, because embeddings from a dataset may differ in their number of tokens."""
        indices_by_shape: dict[tuple[Any, ...], list[int]] = {}
        for i, (prompt, _) in enumerate(rows):
            shapes = tuple((name, tuple(tensor.shape)) for name, tensor in sorted(prompt.embedding.items()))
            indices_by_shape.setdefault(shapes, []).append(i)
        samples: dict[int, DiffusionSample] = {}
        for indices in indices_by_shape.values():
            samples |= zip(indices, self._sample_on_ranks([rows[i] for i in indices], sampling, step), strict=True)
        return [samples[i] for i in range(len(rows))]

    def _sample_on_ranks(self, rows: Sequence[_CompletionRow], sampling: Sampling, step: int) -> list[DiffusionSample]:
        """Distribute rows with embeddings of equal shape over the ranks, and return all samples on all ranks, in order.
        A rank without an assigned row samples the first row, because all ranks take part in each call of the denoiser.
        """
        mesh = self._source.mesh
        if mesh is None:
            return self._sample_locally(rows, sampling, step)
        local_rows = mesh.select_local_items(rows)
        num_missing = -(-len(rows) // self._num_ranks) - len(local_rows)
        samples = self._sample_locally([*local_rows, *[rows[0]] * num_missing], sampling, step)
        rank_samples = mesh.all_gather_object(samples[: len(local_rows)])
        return [rank_samples[i % self._num_ranks][i // self._num_ranks] for i in range(len(rows))]

    def _conditioning_frames(
        self, rows: Sequence[_CompletionRow], sampling: Sampling, step: int, latent_shape: Sequence[int]
    ) -> ConditioningFrames | None:
        """Return the conditioning frames of the samples; None if the rows have no conditioning frames."""
        assert sampling.flow is not None
        if len(latent_shape) != 4:
            return None
        max_frames = min(self._source.model.max_conditioning_frames, latent_shape[1] - 1)
        clips, frame_range = [prompt.conditioning_clip for prompt, _ in rows], sampling.flow.given_frame_range
        if not max_frames or not frame_range[1] or any(clip is None for clip in clips):
            return None
        if other_shapes := {tuple(clip.shape) for clip in clips} - {tuple(latent_shape)}:
            raise DataError(
                f"a clip has latents of shape {min(other_shapes)} and what is drawn {tuple(latent_shape)}: frames "
                f"can be given of clips of one size alone; set policy.diffusers.train_frames to inference_frames, or "
                f"policy.diffusers.flow_rl.max_conditional_frames to 0"
            )
        counts = [num_conditioning_frames(frame_range, max_frames, sampling.seed, step, p.id) for p, _ in rows]
        device = self._source.device
        return ConditioningFrames(torch.stack(clips).to(device), torch.tensor(counts, device=device))

    def _sample_locally(self, rows: Sequence[_CompletionRow], sampling: Sampling, step: int) -> list[DiffusionSample]:
        """Return the samples of `rows`, computed on this rank."""
        assert sampling.flow is not None
        settings, model = sampling.flow, self._source.model
        sigmas_N = table_of(model, settings)
        num_frames = settings.num_frames if model.is_video else 1
        latent_shape = model.latent_shape(*settings.size, num_frames)
        generators = [_make_generator(sampling.seed, step, prompt.id, k) for prompt, k in rows]
        noise = torch.stack([torch.randn(latent_shape, generator=generator) for generator in generators])
        if settings.same_noise:
            shared = [_make_generator(sampling.seed, step, prompt.id, SHARED_NOISE) for prompt, _ in rows]
            noise = torch.stack([torch.randn(latent_shape, generator=generator) for generator in shared])
        device, is_guided = self._source.device, settings.guidance_scale > 1
        text_embedding = _stack_embeddings([prompt.embedding for prompt, _ in rows], device)
        null_embedding = _stack_embeddings([self._source.null_text] * len(rows), device) if is_guided else {}
        steps = stochastic_steps(settings, sampling.seed, step)
        conditioning_frames = self._conditioning_frames(rows, sampling, step, latent_shape)
        num_conditioning_B = conditioning_frames.num_B if conditioning_frames else None

        def sample(predict: Callable[..., Tensor]) -> Path:
            def velocity(x: Tensor, sigma_B: Tensor) -> Tensor:
                self._beat()
                conditional = predict(x, sigma_B, text_embedding, num_conditioning_B)
                if not is_guided:
                    return conditional
                unconditional = predict(x, sigma_B, null_embedding, num_conditioning_B)
                return model.apply_guidance(conditional, unconditional, settings.guidance_scale)

            return denoise(velocity, noise.to(device), sigmas_N, settings, generators, steps, conditioning_frames)

        with self._source.weights(settings.weights), torch.no_grad():
            sampling_path = model.pipeline_with_logprob(sample, self._source.predict)
            pixels = decode_latents(model, sampling_path.latents, device)
        if num_frames == 1 and pixels.ndim == 5:
            pixels = pixels[:, 0]
        return [sampling_path.to_sample(b, pixels[b].clone(), sigmas_N, self._version) for b in range(len(rows))]


def decode_latents(model: Any, latents: Tensor, device: torch.device) -> Tensor:
    """Return latents on the CPU, decoded on `device` to uint8 pixels (see `to_bytes`); a GPU decodes one sample at a
    time, because a VAE needs gigabytes of memory for each sample."""
    decode_batch_size = len(latents) if device.type == "cpu" else 1
    with model.residency.keep_on_device():
        return torch.cat([to_bytes(model.decode(latent_batch)) for latent_batch in latents.split(decode_batch_size)])


def to_bytes(pixels: Tensor) -> Tensor:
    """Return pixels (B, 3, [F,] H, W) in [-1, 1] as uint8 (B, [F,] H, W, 3) on the CPU."""
    scaled_pixels = ((pixels.float() / 2 + 0.5).clamp(0, 1) * 255).round().to("cpu", torch.uint8)
    return scaled_pixels.movedim(1, -1).contiguous()


def _make_generator(seed: int, step: int, prompt_id: int, k: int) -> torch.Generator:
    return torch.Generator().manual_seed(request_seed(seed, step, prompt_id, k))


def _stack_embeddings(embeddings: Sequence[dict[str, Tensor]], device: torch.device) -> dict[str, Tensor]:
    return {name: torch.stack([embedding[name] for embedding in embeddings]).to(device) for name in embeddings[0]}
