"""Base class of diffusion model families: conversion of text and media to tensors and back, and calls of the denoiser.

A model family is a subclass in its own file, with the names of its pipeline classes in `PIPELINES`; see
docs/how-to/adding-a-diffusion-model.md. `denoiser.py` trains the denoiser. Text encoders and VAE are loaded on first
use, so training on prepared rows never loads them.

Shapes: B samples, C channels, F frames (videos only), H height, W width of a latent; the first dimension of text is B.
"""

import gc
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cosmos_core.config.schema.diffusers import DiffusersConfig
from cosmos_core.errors import ConfigError
from cosmos_core.models import flow
from cosmos_core.models.offload import ComponentOffload
from cosmos_core.models.pipeline_folder import PipelineFolder

TextInputs = dict[str, Tensor]
"""Text inputs of a denoiser by name; the first dimension of each tensor is the number of prompts."""
VelocityFn = Callable[..., Tensor]
"""Function from `(latents, sigma_B, text, num_conditioning_B)` to the velocity that a denoiser predicts."""

_MAX_SIGMA_DIFFERENCE = 1e-5
"""Maximum difference between computed noise levels and those of a scheduler that is attributed to rounding."""


class DiffusionModel:
    """Pipeline of diffusers without its denoiser: encoders, VAE, noise levels, and the arguments of the denoiser."""

    denoiser_name: ClassVar[str] = "transformer"
    """Name of the pipeline component that is trained."""
    is_video: ClassVar[bool] = False
    """Whether latents have a dimension of frames."""
    prompt_tokenizer: ClassVar[tuple[str, int]] = ("tokenizer", 0)
    """Name of the tokenizer of prompts, and number of tokens that the pipeline's template adds to a prompt."""
    text_components: ClassVar[tuple[str, ...]] = ()
    """Names of the components that encode prompts and that every pipeline of the family must have."""
    lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    """Suffixes of the names of modules that LoRA adapts if the recipe names no modules."""
    pipeline_multiple: ClassVar[int] = 1
    """Number by which height and width in pixels must be divisible, in addition to the requirement of the VAE."""
    max_conditioning_frames: ClassVar[int] = 0
    """Maximum number of clean conditioning frames that the network accepts, in latent frames; 0: it accepts none."""

    def __init__(self, folder: PipelineFolder, config: DiffusersConfig, device: torch.device | str = "cpu") -> None:
        self.folder, self.config, self.device = folder, config, torch.device(device)
        self.component_offload = ComponentOffload(self.device, should_offload=config.offload)
        if config.min_given_frames > self.max_conditioning_frames:
            raise ConfigError(
                f"policy.diffusers.min_given_frames = {config.min_given_frames}: {type(self).__name__} can be given "
                f"{self.max_conditioning_frames or 'no'} latent frames"
            )

    def text_embedding(self, prompts: Sequence[str]) -> TextInputs:
        """Return the text inputs of the denoiser for prompts, as tensors on the CPU by name."""
        raise NotImplementedError(type(self).__name__)

    def nft_prepare_transformer_input(
        self, latents: Tensor, sigma_B: Tensor, text: Mapping[str, Tensor], num_conditioning_B: Tensor | None = None
    ) -> dict[str, Any]:
        """Return the arguments, by name, with which losses and samplers call the denoiser for `latents` at the noise
        levels `sigma_B`. `text` has the text inputs; `num_conditioning_B` is the number of clean conditioning frames of
        each sample."""
        raise NotImplementedError(type(self).__name__)

    def visual_embedding(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return mean and log-variance of the normalised latents of images or videos (B, C, [F,] H, W) with values in
        [-1, 1]. The log-variance is None for a deterministic VAE."""
        with self._working("vae") as vae:
            posterior = vae.encode(pixels.to(self.device, torch.float32)).latent_dist
            latent_scale, latent_shift = self._vae_scaling
            latent_mean = (posterior.mean - latent_shift) * latent_scale
            return latent_mean.cpu(), (posterior.logvar + 2 * torch.tensor(latent_scale).log().item()).cpu()

    def decode(self, latents: Tensor) -> Tensor:
        """Decode normalised latents to pixels (B, C, [F,] H, W) with values of approximately [-1, 1]."""
        with self._working("vae") as vae:
            latent_scale, latent_shift = self._vae_scaling
            scaled_latents = latents.to(self.device, torch.float32) / latent_scale + latent_shift
            return vae.decode(scaled_latents, return_dict=False)[0]

    def dropped_text(self, empty_text: Mapping[str, Tensor]) -> TextInputs:
        """Return the text inputs for a prompt that prompt dropout removed; default: those of the empty prompt."""
        return dict(empty_text)

    def set_scheduler_timestep(self, num_steps: int) -> Tensor:
        """Return the `num_steps` + 1 noise levels of the pipeline's scheduler, from noise to 0, in float64; raise
        ConfigError if the scheduler is not that of a rectified flow, or its levels do not fall from at most 1 to 0.

        The levels are computed with the formula of the scheduler, without its rounding to integer timesteps. If the
        float32 levels of the scheduler itself differ from the computed ones by more than rounding, they are returned
        instead.
        """
        if self.schedule == "karras":
            # Use 1 if the scheduler has no sigma range: the computed levels then differ, so its own table is returned.
            max_sigma, min_sigma = (float(self.scheduler.get(name) or 1) for name in ("sigma_max", "sigma_min"))
            computed_sigmas_N = flow.karras_schedule(num_steps, max_sigma=max_sigma, min_sigma=min_sigma)
        else:
            computed_sigmas_N = flow.SIGMA_SCHEDULES[self.schedule](num_steps, self.timestep_shift)
        scheduler = self.folder.load("scheduler")
        try:
            scheduler.set_timesteps(num_steps)
        except (ValueError, ImportError) as error:
            remedy = "name another in policy.diffusers.sample.sigma_schedule"
            raise self._config_error(f"its scheduler has no table of noise levels here: {error}; {remedy}") from error
        sigmas_N = scheduler.sigmas.double()
        are_sigma_shapes_equal = sigmas_N.shape == computed_sigmas_N.shape
        if are_sigma_shapes_equal and (sigmas_N - computed_sigmas_N).abs().max() < _MAX_SIGMA_DIFFERENCE:
            return computed_sigmas_N
        if not (are_sigma_shapes_equal and sigmas_N[0] <= 1 and sigmas_N[-1] == 0 and sigmas_N.diff().max() < 0):
            raise self._config_error(
                f"the {len(sigmas_N)} noise levels of its {type(scheduler).__name__} for {num_steps} "
                f"steps go from {sigmas_N[0]:g} to {sigmas_N[-1]:g}; they must fall from at most 1 to 0 at each step: "
                f"mend invert_sigmas, final_sigmas_type or the kind of sigmas in scheduler/scheduler_config.json"
            )
        return sigmas_N

    def add_noise(
        self, latents: Tensor, noise: Tensor, sigma_B: Tensor, num_conditioning_B: Tensor | None = None
    ) -> Tensor:
        """Add noise to clean latents up to the noise level of each sample; conditioning frames stay clean."""
        noisy_latents = flow.add_noise(latents, noise, sigma_B)
        trained_mask = self.trained_frames_mask(latents, num_conditioning_B)
        return noisy_latents if trained_mask is None else trained_mask * noisy_latents + (1 - trained_mask) * latents

    def trained_frames_mask(self, latents: Tensor, num_conditioning_B: Tensor | None) -> Tensor | None:
        """Return a mask (B, 1, F, 1, 1) with 1 for trained frames and 0 for the first `num_conditioning_B` frames of
        each sample; None: all frames are trained."""
        if num_conditioning_B is None or not num_conditioning_B.any():
            return None
        return flow.trained_frames_mask(latents, num_conditioning_B).to(latents.dtype)

    def predict(
        self,
        denoiser: Callable[..., Any],
        latents: Tensor,
        sigma_B: Tensor,
        text: Mapping[str, Tensor],
        num_conditioning_B: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return the velocity (noise minus clean latents) that the denoiser predicts, in the dtype of the latents.

        Conditioning frames are clean in `latents` and have velocity 0. `dtype` is the dtype of the denoiser's weights;
        None: the dtype of the latents.
        """
        sigma_B = sigma_B.to(latents.device, torch.float32)
        denoiser_arguments = self.nft_prepare_transformer_input(latents, sigma_B, text, num_conditioning_B)
        dtype = dtype or latents.dtype
        # Half precision cannot represent a timestep such as 961.3, so `timestep` stays float32.
        for name, value in denoiser_arguments.items():
            if name != "timestep" and isinstance(value, Tensor) and value.is_floating_point():
                denoiser_arguments[name] = value.to(dtype)
        velocity = self.velocity_of(denoiser(**denoiser_arguments, return_dict=False)[0], latents).to(latents.dtype)
        trained_frames_mask = self.trained_frames_mask(latents, num_conditioning_B)
        return velocity if trained_frames_mask is None else velocity * trained_frames_mask

    def velocity_of(self, output: Tensor, latents: Tensor) -> Tensor:
        """Return the velocity that `output`, the output of the denoiser for `latents`, contains. The denoisers of some
        models also predict a variance, in further channels of the output."""
        return output.chunk(2, dim=1)[0] if output.shape[1] == 2 * latents.shape[1] else output

    def latents_in(self, hidden_states: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Convert `hidden_states`, an input or output of the denoiser (tokens in some families), to latents with the
        shape `shape` of one sample."""
        return hidden_states

    def apply_guidance(self, conditional: Tensor, unconditional: Tensor, guidance_scale: float) -> Tensor:
        """Return the velocity with classifier-free guidance by the pipeline's formula; scale 1 disables guidance."""
        return unconditional + guidance_scale * (conditional - unconditional)

    def check_context_parallel_size(self, size: int) -> None:
        """Raise ConfigError if `shard_tokens` cannot divide the tokens of a clip among `size` ranks."""
        raise ConfigError(
            f"policy.parallelism.cp_size = {size}: a {self.folder.class_name} has no tokens that ranks can share here, "
            f"only those of video families are; set it to 1"
        )

    def shard_tokens(self, denoiser: Any, mesh: DeviceMesh) -> None:
        """Divide the tokens of each clip among the ranks of a mesh inside the denoiser. Every rank calls the denoiser
        with whole clips, and gets the velocities of whole clips."""
        raise NotImplementedError(type(self).__name__)

    def pipeline_with_logprob(self, sample: Callable[..., Any], predict: VelocityFn, *args: Any, **kwargs: Any) -> Any:
        """Return the result of `sample(predict, *args, **kwargs)`. `sample` is a sampler that also returns the
        log-probabilities of its steps, and `predict` computes the velocity. A subclass can override this method to
        change the sampling."""
        return sample(predict, *args, **kwargs)

    @cached_property
    def scheduler(self) -> dict[str, Any]:
        """Configuration of the pipeline's scheduler."""
        return self.folder.settings("scheduler")

    @property
    def schedule(self) -> str:
        """Return the name of the scheduler's formula for noise levels, a key of `flow.SIGMA_SCHEDULES`; raise
        ConfigError if the scheduler is not that of a rectified flow."""
        scheduler_class_name, scheduler_config = str(self.scheduler.get("_class_name", "")), self.scheduler
        if scheduler_class_name.startswith("FlowMatch"):
            return "euler"
        if scheduler_config.get("use_flow_sigmas") and scheduler_config.get("prediction_type") == "flow_prediction":
            if scheduler_config.get("use_karras_sigmas"):
                return "karras"
            return "unipc" if scheduler_class_name.startswith("UniPC") else "dpm"
        raise self._config_error(
            f"its scheduler {scheduler_class_name or 'of no name'} is not that of a rectified flow, the only kind that "
            f"is trained here; give a pipeline that is one"
        )

    @property
    def timestep_shift(self) -> float:
        """Return the timestep shift of the scheduler, which moves noise levels towards pure noise."""
        return float(self.scheduler.get("shift") or self.scheduler.get("flow_shift") or 1.0)

    @property
    def num_timesteps(self) -> float:
        """Return the factor by which the scheduler converts a noise level to the network's timestep."""
        return float(self.scheduler.get("num_train_timesteps") or 1000.0)

    @property
    def train_shift(self) -> float:
        """Return the timestep shift of training, from the recipe or, if the recipe sets none, from the scheduler."""
        return self.config.train_flow_shift or self.timestep_shift

    @property
    def pixels_per_latent(self) -> tuple[int, int]:
        """Return the VAE's compression factors: frames per latent frame, and pixels per latent position along each
        side."""
        vae_config = self.folder.settings("vae")
        block_channels = vae_config.get("block_out_channels") or vae_config.get("encoder_block_out_channels") or (1,)
        return 1, 2 ** (len(block_channels) - 1)

    @property
    def size_multiple(self) -> int:
        """Return the number by which height and width in pixels must be divisible."""
        patch_size = self.folder.settings(self.denoiser_name).get("patch_size", 1)
        patch_length = int(patch_size[-1] if isinstance(patch_size, list | tuple) else patch_size)
        return math.lcm(self.pixels_per_latent[1] * patch_length, self.pipeline_multiple)

    def latent_shape(self, height: int, width: int, num_frames: int = 1) -> tuple[int, ...]:
        """Return the shape of the latents of one image or clip from its size in pixels and frames; raise ConfigError if
        the network does not support the size."""
        temporal_factor, pixels_per_position = self.pixels_per_latent
        for name, pixel_size in (("height", height), ("width", width)):
            if pixel_size % self.size_multiple:
                raise ConfigError(
                    f"policy.diffusers.inference_size: {name} = {pixel_size} must be a multiple of {self.size_multiple}"
                )
        if (num_frames - 1) % temporal_factor:
            raise ConfigError(
                f"policy.diffusers.inference_frames = {num_frames} must be 1 more than a multiple of {temporal_factor}"
            )
        latent_size = (height // pixels_per_position, width // pixels_per_position)
        denoiser_config = self.folder.settings(self.denoiser_name)
        max_positions, patch_size = denoiser_config.get("pos_embed_max_size"), denoiser_config.get("patch_size") or 1
        if max_positions and max(latent_size) // patch_size > max_positions:
            raise ConfigError(
                f"policy.diffusers.inference_size = {[height, width]}: the model has position embeddings for at most "
                f"{max_positions * patch_size * pixels_per_position} pixels a side; lower it"
            )
        latent_frame_dims = [(num_frames - 1) // temporal_factor + 1] * self.is_video
        return (self.num_channels, *latent_frame_dims, *latent_size)

    @property
    def num_channels(self) -> int:
        """Number of channels of the latents that the denoiser takes."""
        return int(self.folder.settings(self.denoiser_name)["in_channels"])

    @cached_property
    def pipeline(self) -> Any:
        """Return the pipeline without its denoiser; text encoders in `policy.diffusers.dtype`, the VAE in float32."""
        component_names = set(inspect.signature(self.folder.pipeline_class).parameters) & set(self.folder.components)
        unloaded_component_names = {self.denoiser_name, "vae", *self.component_placeholders()}
        components = {name: self._load_component(name) for name in sorted(component_names - unloaded_component_names)}
        return self.make_pipeline(components | {"vae": self.vae, self.denoiser_name: None})

    @cached_property
    def vae(self) -> Any:
        """Return the VAE without loading the pipeline, for rollouts and validation, which need no text encoder."""
        return self._load_component("vae")

    def make_pipeline(self, components: Mapping[str, Any]) -> Any:
        """Build the diffusers pipeline from `components`, by name. Other components that the constructor of the
        pipeline requires are those of `component_placeholders` or None."""
        pipeline_class = self.folder.pipeline_class
        constructor_parameters = inspect.signature(pipeline_class).parameters.values()
        unset_components = {p.name: None for p in constructor_parameters if p.default is inspect.Parameter.empty}
        pipeline = pipeline_class(**unset_components | self.component_placeholders() | dict(components))
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    @classmethod
    def component_placeholders(cls) -> dict[str, Any]:
        """Return placeholders, by name, for pipeline components that the constructor requires but training never
        uses."""
        return {}

    def drop_encoders(self) -> None:
        """Free the memory of the text encoders and of the VAE; the next use of one of them loads it again."""
        for attribute_name in ("pipeline", "vae"):
            self.__dict__.pop(attribute_name, None)
        gc.collect()

    @classmethod
    def load_pipeline(cls, folder: PipelineFolder, dtype: torch.dtype) -> Any:
        """Load the whole diffusers pipeline in `folder` with `from_pretrained`, as a user would, except for components
        that training never uses, which `component_placeholders` replace."""
        index_items = folder.model_index.items()
        disabled_components = {name: None for name, entry in index_items if isinstance(entry, list) and not any(entry)}
        pipeline = folder.pipeline_class.from_pretrained(
            str(folder.path), dtype=dtype, local_files_only=True, **disabled_components | cls.component_placeholders()
        )
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def probe_settings(self) -> dict[str, Any]:
        """Return the arguments of a small call of the diffusers pipeline, with which an export is tested; the caller
        adds prompt and seed."""
        image_size = self.size_multiple * 2
        return self.call_settings((image_size, image_size), self.pixels_per_latent[0] + 1, 2, guidance_scale=1.0)

    def call_settings(
        self, size: tuple[int, int], num_frames: int, num_steps: int, *, guidance_scale: float
    ) -> dict[str, Any]:
        """Return the keyword arguments of a call of the diffusers pipeline, without prompt and seed. `size`: height and
        width in pixels; `num_frames`: ignored by families of image models."""
        frame_settings = {"num_frames": num_frames} if self.is_video else {}
        return {"height": size[0], "width": size[1], "num_inference_steps": num_steps, "guidance_scale": guidance_scale,
                "max_sequence_length": self.config.max_prompt_length, **frame_settings}  # fmt: skip

    def load_denoiser(self, dtype: torch.dtype) -> Any:
        """Return the denoiser with all weights on the CPU in `dtype`."""
        # In half precision, diffusers leaves some weights in float32, but FSDP needs weights of one dtype.
        return torch.nn.Module.to(self.folder.load(self.denoiser_name, dtype), dtype)

    def _config_error(self, problem: str) -> ConfigError:
        return ConfigError(f"policy.model_name_or_path = {self.folder.model!r}: {problem}")

    @property
    def _vae_scaling(self) -> tuple[float, float]:
        vae_config = self.folder.settings("vae")
        return float(vae_config.get("scaling_factor") or 1.0), float(vae_config.get("shift_factor") or 0.0)

    def _load_component(self, name: str) -> Any:
        component = self.folder.load(name, torch.float32 if name == "vae" else getattr(torch, self.config.dtype))
        if isinstance(component, torch.nn.Module):
            component.requires_grad_(False)
            if not self.config.offload:
                component.to(self.device)
        return component

    @contextmanager
    def _working(self, *names: str) -> Iterator[Any]:
        """Move the pipeline components `names` to the device during the `with` block, disable gradients, and yield the
        last of these components. With `policy.diffusers.offload` the components return to host memory after the `with`
        block or, inside `component_offload.keep_on_device`, at the end of that context."""
        optional_components = [self.vae if name == "vae" else getattr(self.pipeline, name, None) for name in names]
        components = [component for component in optional_components if component is not None]
        with torch.no_grad(), self.component_offload.use_on_device(components):
            yield components[-1] if components else None
