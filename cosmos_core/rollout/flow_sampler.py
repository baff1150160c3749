"""Rollout engine of diffusion models: samples images and videos of prompts with the trainer's denoiser.

Samples of all prompts and completions form one batch, which is distributed over the data-parallel ranks sample by
sample, so that each rank calls a sharded denoiser equally often. A completion depends only on the weights, its prompt
and its seed.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from cosmos_core.errors import ConfigError, DataError
from cosmos_core.rollout.base import Bucket, EngineSettings, LoadReceipt, ModuleEngine, WeightFormat, request_seed
from cosmos_core.rollout.flow_path import (
    SHARED_NOISE_INDEX,
    ConditioningFrames,
    SamplingPath,
    choose_stochastic_steps,
    denoise,
    draw_num_conditioning_frames,
    get_noise_levels,
)
from cosmos_core.types import Completion, DiffusionSample, Group, Prompt, Sampling

_SampleRequest = tuple[Prompt, int]
"""Completion to sample: a prompt, and the number of the completion."""


class FlowSamplerEngine(ModuleEngine):
    """Engine that samples images and videos with the trainer's denoiser."""

    name = "flow_sampler"
    weight_format: WeightFormat = "shared"

    def __init__(self, engine_settings: EngineSettings) -> None:
        if engine_settings.flow is None:
            raise ConfigError("rollout.backend = 'flow_sampler' draws images and videos; take 'vllm' for text")
        super().__init__(engine_settings)
        self._denoiser = engine_settings.flow

    def _generate(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> list[Group]:
        group_size = sampling.num_completions
        requests = [(prompt, k) for prompt in prompts for k in range(group_size)]
        prompts_per_rank = -(-len(prompts) // self._num_ranks)
        requests_per_batch = (
            prompts_per_rank * min(self._max_samples_per_pass or group_size, group_size) * self._num_ranks
        )
        request_batches = (
            requests[start : start + requests_per_batch] for start in range(0, len(requests), requests_per_batch)
        )
        samples = (sample for batch in request_batches for sample in self._sample_by_shape(batch, sampling, step))
        completions = [Completion((), "stop", "", diffusion_sample=sample) for sample in samples]
        completion_sets = [
            tuple(completions[start : start + group_size]) for start in range(0, len(requests), group_size)
        ]
        return [Group(prompt, group, step) for prompt, group in zip(prompts, completion_sets, strict=True)]

    def load_weights(self, version: int, buckets: Iterable[Bucket]) -> LoadReceipt:
        """Record the version of the weights, which are those of the trainer's denoiser."""
        self._version = version
        return LoadReceipt(version, 0)

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        raise AssertionError("a diffusion model has no tokens")

    @property
    def _num_ranks(self) -> int:
        return self._denoiser.mesh.dp.size() if self._denoiser.mesh else 1

    def _sample_by_shape(
        self, requests: Sequence[_SampleRequest], sampling: Sampling, step: int
    ) -> list[DiffusionSample]:
        """Return the samples of `requests`, in order, on all ranks. A batch of requests with text embeddings of equal
        shapes is distributed over the ranks; a rank without a request samples the first one, because all ranks call
        the denoiser."""
        mesh, num_ranks = self._denoiser.mesh, self._num_ranks
        indices_by_shape: dict[tuple[Any, ...], list[int]] = {}
        for i, (prompt, _) in enumerate(requests):
            embedding_shapes = tuple((name, tuple(tensor.shape)) for name, tensor in sorted(prompt.embedding.items()))
            indices_by_shape.setdefault(embedding_shapes, []).append(i)
        samples: dict[int, DiffusionSample] = {}
        for indices in indices_by_shape.values():
            batch = [requests[i] for i in indices]
            local_requests = mesh.select_local_items(batch) if mesh else batch
            padding_requests = [batch[0]] * (-(-len(batch) // num_ranks) - len(local_requests))
            local_samples = self._sample_locally([*local_requests, *padding_requests], sampling, step)
            local_samples = local_samples[: len(local_requests)]
            samples_by_rank = mesh.all_gather_object(local_samples) if mesh else [local_samples]
            samples |= {i: samples_by_rank[k % num_ranks][k // num_ranks] for k, i in enumerate(indices)}
        return [samples[i] for i in range(len(requests))]

    def _make_conditioning_frames(
        self, requests: Sequence[_SampleRequest], sampling: Sampling, step: int, latent_shape: Sequence[int]
    ) -> ConditioningFrames | None:
        """Return the conditioning frames (clean first frames) of the samples; None if the requests have no conditioning
        frames."""
        assert sampling.flow is not None
        if len(latent_shape) != 4:
            return None
        max_frames = min(self._denoiser.model.max_conditioning_frames, latent_shape[1] - 1)
        conditioning_clips = [p.conditioning_clip for p, _ in requests]
        frame_count_range = sampling.flow.conditioning_frame_range
        if not max_frames or not frame_count_range[1] or any(clip is None for clip in conditioning_clips):
            return None
        if other_shapes := {tuple(clip.shape) for clip in conditioning_clips} - {tuple(latent_shape)}:
            raise DataError(
                f"a clip has latents of shape {min(other_shapes)} and what is drawn {tuple(latent_shape)}: frames "
                f"can be given of clips of one size alone; set policy.diffusers.train_frames to inference_frames, or "
                f"policy.diffusers.flow_rl.max_conditional_frames to 0"
            )
        frame_counts = [
            draw_num_conditioning_frames(frame_count_range, max_frames, sampling.seed, step, p.id) for p, _ in requests
        ]
        device = self._denoiser.device
        return ConditioningFrames(torch.stack(conditioning_clips).to(device), torch.tensor(frame_counts, device=device))

    def _sample_locally(
        self, requests: Sequence[_SampleRequest], sampling: Sampling, step: int
    ) -> list[DiffusionSample]:
        """Generate a sample for each of `requests` on this rank, without distributing them over other ranks."""
        assert sampling.flow is not None
        flow_sampling, diffusion_model = sampling.flow, self._denoiser.model
        sigmas_N = get_noise_levels(diffusion_model, flow_sampling)
        num_frames = flow_sampling.num_frames if diffusion_model.is_video else 1
        latent_shape = diffusion_model.latent_shape(*flow_sampling.size, num_frames)
        generators = [_make_generator(sampling.seed, step, prompt.id, k) for prompt, k in requests]
        noise = torch.stack([torch.randn(latent_shape, generator=generator) for generator in generators])
        if flow_sampling.has_common_initial_noise:
            group_generators = [_make_generator(sampling.seed, step, p.id, SHARED_NOISE_INDEX) for p, _ in requests]
            noise = torch.stack([torch.randn(latent_shape, generator=generator) for generator in group_generators])
        device, is_guided = self._denoiser.device, flow_sampling.guidance_scale > 1
        text_embedding = _stack_embeddings([prompt.embedding for prompt, _ in requests], device)
        null_embedding = _stack_embeddings([self._denoiser.null_text] * len(requests), device) if is_guided else {}
        steps = choose_stochastic_steps(flow_sampling, sampling.seed, step)
        conditioning_frames = self._make_conditioning_frames(requests, sampling, step, latent_shape)
        num_conditioning_B = conditioning_frames.num_frames_B if conditioning_frames else None

        def sample_denoising_path(predict_velocity: Callable[..., Tensor]) -> SamplingPath:
            def velocity(x: Tensor, sigma_B: Tensor) -> Tensor:
                self._send_heartbeat()
                text_velocity = predict_velocity(x, sigma_B, text_embedding, num_conditioning_B)
                if not is_guided:
                    return text_velocity
                null_velocity = predict_velocity(x, sigma_B, null_embedding, num_conditioning_B)
                return diffusion_model.apply_guidance(text_velocity, null_velocity, flow_sampling.guidance_scale)

            return denoise(velocity, noise.to(device), sigmas_N, flow_sampling, generators, steps, conditioning_frames)

        with self._denoiser.use_weights(flow_sampling.weights_name), torch.no_grad():
            sampling_path = diffusion_model.pipeline_with_logprob(
                sample_denoising_path, self._denoiser.predict_velocity
            )
            pixels = decode_latents(diffusion_model, sampling_path.latents, device)
        if num_frames == 1 and pixels.ndim == 5:
            pixels = pixels[:, 0]
        sample_indices, version = range(len(requests)), self._version
        return [sampling_path.to_diffusion_sample(i, pixels[i].clone(), sigmas_N, version) for i in sample_indices]


def decode_latents(model: Any, latents: Tensor, device: torch.device) -> Tensor:
    """Decode latents on `device`, and return the pixels as uint8 (B, [frames,] H, W, 3) on the CPU. A GPU decodes one
    sample at a time, because a VAE needs gigabytes of memory for each sample."""
    decode_batch_size = len(latents) if device.type == "cpu" else 1
    with model.component_offload.keep_on_device():
        return torch.cat([to_uint8_pixels(model.decode(batch)) for batch in latents.split(decode_batch_size)])


def to_uint8_pixels(pixels: Tensor) -> Tensor:
    """Return pixels (B, 3, [F,] H, W) in [-1, 1] as uint8 (B, [F,] H, W, 3) on the CPU."""
    scaled_pixels = ((pixels.float() / 2 + 0.5).clamp(0, 1) * 255).round().to("cpu", torch.uint8)
    return scaled_pixels.movedim(1, -1).contiguous()


def _make_generator(seed: int, step: int, prompt_id: int, completion_index: int) -> torch.Generator:
    return torch.Generator().manual_seed(request_seed(seed, step, prompt_id, completion_index))


def _stack_embeddings(embeddings: Sequence[dict[str, Tensor]], device: torch.device) -> dict[str, Tensor]:
    return {name: torch.stack([embedding[name] for embedding in embeddings]).to(device) for name in embeddings[0]}
