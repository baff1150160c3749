"""What every diffusion pipeline is to the rest: text and media to tensors and back, and how its denoiser is called.

A family is a subclass in a file of its own, with the names of the pipelines that it knows in `PIPELINES`; see
docs/how-to/adding-a-diffusion-model.md. The denoiser itself is not here: `denoiser.py` trains it. Text encoders and VAE
are loaded when they are first needed, so a training that finds everything prepared never loads them.

Shapes: B samples, C channels, F frames (videos alone), H height, W width of a latent; text has B first.
"""

from __future__ import annotations

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
from cosmos_core.models.offload import Residence
from cosmos_core.models.pipeline_folder import PipelineFolder

Text = dict[str, Tensor]
"""What a prompt is to a denoiser, by name; each tensor has the prompts first."""
Predict = Callable[..., Tensor]
"""The velocity of `DiffusionModel.predict` with a denoiser in it: `(latents, sigma_B, text, num_given_B)`."""

TIMESTEPS = 1000.0
"""What most networks take a noise level times; `DiffusionModel.num_timesteps` is that of a pipeline."""
_SAME_TABLE = 1e-5
"""Largest difference between two tables of noise levels that are the same but for rounding."""


class DiffusionModel:
    """A pipeline of diffusers without its denoiser: encoders, VAE, noise levels, and the denoiser's arguments."""

    denoiser_name: ClassVar[str] = "transformer"
    """The component that is trained."""
    is_video: ClassVar[bool] = False
    """Whether latents have frames."""
    lora_targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    """Ends of the names of modules that an adapter changes where the recipe names none."""
    pipeline_multiple: ClassVar[int] = 1
    """What the pipeline asks height and width to be multiples of, whatever its VAE is."""
    max_given: ClassVar[int] = 0
    """Most latent frames that the network can be given clean; 0: none."""

    def __init__(self, folder: PipelineFolder, config: DiffusersConfig, device: torch.device | str = "cpu") -> None:
        self.folder, self.config, self.device = folder, config, torch.device(device)
        self.residence = Residence(self.device, is_offloaded=config.offload)
        if config.min_given_frames > self.max_given:
            raise ConfigError(
                f"policy.diffusers.min_given_frames = {config.min_given_frames}: {type(self).__name__} can be given "
                f"{self.max_given or 'no'} latent frames"
            )

    # What a family has to say.

    def text_embedding(self, prompts: Sequence[str]) -> Text:
        """Return prompts as the denoiser takes them, on the CPU."""
        raise NotImplementedError(type(self).__name__)

    def nft_prepare_transformer_input(
        self, latents: Tensor, sigma_B: Tensor, text: Mapping[str, Tensor], num_given_B: Tensor | None = None
    ) -> dict[str, Any]:
        """Return the arguments of the denoiser for latents at their noise levels; all losses and samplers use it."""
        raise NotImplementedError(type(self).__name__)

    # What most families share.

    def visual_embedding(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return mean and log-variance of the normalised latents of media (B, C, [F,] H, W) in [-1, 1]; None for the
        latter: the VAE draws nothing."""
        with self._working("vae") as vae:
            posterior = vae.encode(pixels.to(self.device, torch.float32)).latent_dist
            scale, shift = self._scaling
            mean = (posterior.mean - shift) * scale
            return mean.cpu(), (posterior.logvar + 2 * torch.tensor(scale).log().item()).cpu()

    def decode(self, latents: Tensor) -> Tensor:
        """Return normalised latents as pixels (B, C, [F,] H, W), about in [-1, 1]."""
        with self._working("vae") as vae:
            scale, shift = self._scaling
            pixels: Tensor = vae.decode(latents.to(self.device, torch.float32) / scale + shift, return_dict=False)[0]
            return pixels

    def dropped_text(self, empty: Mapping[str, Tensor]) -> Text:
        """Return what stands for a dropped prompt, of the embedding of the empty prompt: that itself."""
        return dict(empty)

    def set_scheduler_timestep(self, num_steps: int) -> Tensor:
        """Return the noise levels of a sampler, `num_steps` + 1 of them from noise to 0, as the scheduler of the
        pipeline has them: float64, and never that scheduler's own integer timesteps. Its own table, in float32, is
        taken where its settings make another of it than ours.

        Raises:
            ConfigError: the scheduler is not that of a rectified flow, or its levels do not fall from at most 1 to 0.
        """
        if self.schedule == "karras":
            most, least = self.edm_levels
            ours_N = flow.karras_schedule(num_steps, most=most, least=least)
        else:
            ours_N = flow.SCHEDULES[self.schedule](num_steps, self.shift)
        scheduler, wrong = self.folder.load("scheduler"), f"policy.model_name_or_path = {self.folder.model!r}: "
        try:
            scheduler.set_timesteps(num_steps)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"{wrong}its scheduler has no table of noise levels here: {error}") from error
        theirs_N = scheduler.sigmas.double()
        if theirs_N.shape == ours_N.shape and (theirs_N - ours_N).abs().max() < _SAME_TABLE:
            return ours_N
        if not (
            theirs_N.shape == ours_N.shape and theirs_N[0] <= 1 and theirs_N[-1] == 0 and theirs_N.diff().max() < 0
        ):
            raise ConfigError(
                f"{wrong}the {len(theirs_N)} noise levels of its {type(scheduler).__name__} for {num_steps} steps go "
                f"from {theirs_N[0]:g} to {theirs_N[-1]:g}; they must fall from at most 1 to 0 at each step: mend "
                f"invert_sigmas, final_sigmas_type or the kind of sigmas in scheduler/scheduler_config.json"
            )
        return theirs_N

    def add_noise(self, latents: Tensor, noise: Tensor, sigma_B: Tensor, num_given_B: Tensor | None = None) -> Tensor:
        """Return clean latents at their noise levels; frames that are given stay clean."""
        noisy = flow.at_noise_level(latents, noise, sigma_B)
        mask = self.learned_mask(latents, num_given_B)
        return noisy if mask is None else mask * noisy + (1 - mask) * latents

    def learned_mask(self, latents: Tensor, num_given_B: Tensor | None) -> Tensor | None:
        """Return 1 for each frame that is learned and 0 for each that is given, (B, 1, F, 1, 1); None: all are."""
        if num_given_B is None or not num_given_B.any():
            return None
        frames_F = torch.arange(latents.shape[2], device=latents.device)
        is_learned_BF = frames_F[None] >= num_given_B.to(latents.device)[:, None]
        return is_learned_BF.to(latents.dtype)[:, None, :, None, None]

    def predict(
        self,
        denoiser: Callable[..., Any],
        latents: Tensor,
        sigma_B: Tensor,
        text: Mapping[str, Tensor],
        num_given_B: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return the velocity (noise minus clean latents) that the denoiser predicts, in the dtype of the latents.

        Given frames come clean in `latents` and have velocity 0. `dtype`: of the denoiser's weights; None: that of the
        latents.
        """
        sigma_B = sigma_B.to(latents.device, torch.float32)
        arguments = self.nft_prepare_transformer_input(latents, sigma_B, text, num_given_B)
        wanted = dtype or latents.dtype
        # Half precision has no 961.3: what a network is told of the noise level stays float32.
        cast = {name: value if name == "timestep" else _cast(value, wanted) for name, value in arguments.items()}
        velocity = self.velocity_of(denoiser(**cast, return_dict=False)[0], latents).to(latents.dtype)
        mask = self.learned_mask(latents, num_given_B)
        return velocity if mask is None else velocity * mask

    def velocity_of(self, output: Tensor, latents: Tensor) -> Tensor:
        """Return the velocity in the output of the denoiser, which may predict a variance beside it."""
        return output.chunk(2, dim=1)[0] if output.shape[1] == 2 * latents.shape[1] else output

    def latents_in(self, hidden_states: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return the latents, each of that shape, in what the network is given: it may take them in another form."""
        return hidden_states

    def guided(self, conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
        """Return the velocity of classifier-free guidance, by the rule of the pipeline: 1 is none."""
        return unconditional + scale * (conditional - unconditional)

    def check_context(self, size: int) -> None:
        """Say whether `shard_tokens` can share a clip among `size` ranks.

        Raises:
            ConfigError: it cannot.
        """
        raise ConfigError(
            f"policy.parallelism.cp_size = {size}: a {self.folder.class_name} has no tokens that ranks can share here, "
            f"only those of video families are; set it to 1"
        )

    def shard_tokens(self, denoiser: Any, mesh: DeviceMesh) -> None:
        """Make the ranks of a mesh share the tokens of each clip; every rank calls the denoiser with whole clips and
        gets whole velocities."""
        raise NotImplementedError(type(self).__name__)

    def pipeline_with_logprob(self, sample: Callable[..., Any], predict: Predict, *args: Any, **kwargs: Any) -> Any:
        """Draw samples with the log-probability of each step: a family changes here how `sample` is run."""
        return sample(predict, *args, **kwargs)

    # What its scheduler and its sizes say.

    @cached_property
    def scheduler(self) -> dict[str, Any]:
        """Return the settings of the pipeline's scheduler."""
        return self.folder.settings("scheduler")

    @property
    def schedule(self) -> str:
        """Return the name of the scheduler's table of noise levels, one of `flow.SCHEDULES`.

        Raises:
            ConfigError: it is not that of a rectified flow.
        """
        name, settings = str(self.scheduler.get("_class_name", "")), self.scheduler
        if name.startswith("FlowMatch"):
            return "euler"
        if settings.get("use_flow_sigmas") and settings.get("prediction_type") == "flow_prediction":
            if settings.get("use_karras_sigmas"):
                return "karras"
            return "unipc" if name.startswith("UniPC") else "dpm"
        raise ConfigError(
            f"policy.model_name_or_path = {self.folder.model!r}: its scheduler {name or 'of no name'} is not that of a "
            f"rectified flow, the only kind that is trained here; give a pipeline that is one"
        )

    @property
    def edm_levels(self) -> tuple[float, float]:
        """Return the largest and the smallest of Karras' noise levels, those of EDM: as the scheduler's settings have
        them, otherwise of the levels that it is made of."""
        most, least = self.scheduler.get("sigma_max"), self.scheduler.get("sigma_min")
        if most is None or least is None:
            alphas = self.folder.load("scheduler").alphas_cumprod.double()
            made_of = ((1 - alphas) / alphas).sqrt()
            most, least = most or made_of[-1].item(), least or made_of[0].item()
        return float(most), float(least)

    @property
    def shift(self) -> float:
        """Return how far the scheduler shifts noise levels towards noise."""
        return float(self.scheduler.get("shift") or self.scheduler.get("flow_shift") or 1.0)

    @property
    def num_timesteps(self) -> float:
        """Return what a noise level is multiplied by to be a timestep of the network, as the scheduler does."""
        return float(self.scheduler.get("num_train_timesteps") or TIMESTEPS)

    @property
    def train_shift(self) -> float:
        """Return how far training shifts them: as the recipe says, otherwise as the scheduler does."""
        return self.config.train_flow_shift or self.shift

    @property
    def pixels_per_latent(self) -> tuple[int, int]:
        """Return how many frames and how many pixels of a side one latent stands for."""
        settings = self.folder.settings("vae")
        channels = settings.get("block_out_channels") or settings.get("encoder_block_out_channels") or (1,)
        return 1, 2 ** (len(channels) - 1)

    @property
    def size_multiple(self) -> int:
        """Return what height and width in pixels have to be multiples of."""
        patch = self.folder.settings(self.denoiser_name).get("patch_size", 1)
        in_space = self.pixels_per_latent[1] * int(patch[-1] if isinstance(patch, list | tuple) else patch)
        return math.lcm(in_space, self.pipeline_multiple)

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Return the shape of the latents of one image or clip.

        Raises:
            ConfigError: the network cannot take such a size.
        """
        in_time, in_space = self.pixels_per_latent
        for name, size in (("height", height), ("width", width)):
            if size % self.size_multiple:
                raise ConfigError(
                    f"policy.diffusers.inference_size: {name} = {size} must be a multiple of {self.size_multiple}"
                )
        if (frames - 1) % in_time:
            raise ConfigError(
                f"policy.diffusers.inference_frames = {frames} must be 1 more than a multiple of {in_time}"
            )
        space = (height // in_space, width // in_space)
        settings = self.folder.settings(self.denoiser_name)
        limit, patch = settings.get("pos_embed_max_size"), settings.get("patch_size") or 1
        if limit and max(space) // patch > limit:
            raise ConfigError(
                f"policy.diffusers.inference_size = {[height, width]}: the model has position embeddings for at most "
                f"{limit * patch * in_space} pixels a side; lower it"
            )
        return (
            (self.num_channels, (frames - 1) // in_time + 1, *space) if self.is_video else (self.num_channels, *space)
        )

    @property
    def num_channels(self) -> int:
        """Return the channels of a latent."""
        return int(self.folder.settings(self.denoiser_name)["in_channels"])

    # Encoders: loaded when first needed.

    @cached_property
    def pipeline(self) -> Any:
        """Return the pipeline with everything but its denoiser; text encoders in `policy.diffusers.dtype`, the VAE in
        float32."""
        pipeline_class = self.folder.pipeline_class
        names = set(inspect.signature(pipeline_class.__init__).parameters) & set(self.folder.components)
        components = {name: self._load(name) for name in sorted(names - {self.denoiser_name, "vae"})}
        return self.make_pipeline(components | {"vae": self.vae, self.denoiser_name: None})

    @cached_property
    def vae(self) -> Any:
        """Return the VAE by itself: rollouts and validation decode with it, and need no text encoder."""
        return self._load("vae")

    def make_pipeline(self, components: Mapping[str, Any]) -> Any:
        """Return the pipeline made of components; those that it has not are None."""
        pipeline_class = self.folder.pipeline_class
        accepted = list(inspect.signature(pipeline_class.__init__).parameters.values())[1:]
        required = {each.name: None for each in accepted if each.default is inspect.Parameter.empty}
        pipeline = pipeline_class(**required | self.substitutes() | dict(components))
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def whole_pipeline(self, denoiser: Any) -> Any:
        """Return the pipeline with its encoders and a denoiser."""
        pipeline = self.pipeline
        pipeline.register_modules(**{self.denoiser_name: denoiser})
        return pipeline

    @classmethod
    def substitutes(cls) -> dict[str, Any]:
        """Return components that the pipeline cannot be made without, though nothing here uses them."""
        return {}

    def drop_encoders(self) -> None:
        """Free text encoders and VAE; they are loaded again when they are needed again."""
        for name in ("pipeline", "vae"):
            self.__dict__.pop(name, None)
        gc.collect()

    @classmethod
    def load_pipeline(cls, folder: PipelineFolder, dtype: torch.dtype) -> Any:
        """Return a whole pipeline as any user loads it, with nothing of ours but what it cannot do without."""
        absent = {name: None for name, entry in folder.index.items() if isinstance(entry, list) and not any(entry)}
        pipeline = folder.pipeline_class.from_pretrained(
            str(folder.path), dtype=dtype, local_files_only=True, **absent | cls.substitutes()
        )
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def probe(self) -> dict[str, Any]:
        """Return the arguments of a small and quick call of the pipeline, without those that say what to draw."""
        in_time = self.pixels_per_latent[0]
        side = self.size_multiple * 2
        frames = {"num_frames": in_time + 1} if self.is_video else {}
        return {"height": side, "width": side, "num_inference_steps": 2, "guidance_scale": 1.0,
                "max_sequence_length": self.config.max_prompt_length, **frames}  # fmt: skip

    def load_denoiser(self, dtype: torch.dtype) -> Any:
        """Return the denoiser with its weights on the CPU, all in one dtype, which FSDP wants: diffusers leaves some of
        a network in half precision in float32."""
        return torch.nn.Module.to(self.folder.load(self.denoiser_name, dtype), dtype)

    @property
    def _scaling(self) -> tuple[float, float]:
        settings = self.folder.settings("vae")
        return float(settings.get("scaling_factor") or 1.0), float(settings.get("shift_factor") or 0.0)

    def _load(self, name: str) -> Any:
        dtype = torch.float32 if name == "vae" else getattr(torch, self.config.dtype)
        component = self.folder.load(name, dtype)
        if isinstance(component, torch.nn.Module):
            component.requires_grad_(False)
            if not self.config.offload:
                component.to(self.device)
        return component

    @contextmanager
    def _working(self, *names: str) -> Iterator[Any]:
        """Have components of the pipeline on the device, without gradients, inside the block; the last of them is what
        the block gets. With `policy.diffusers.offload` they go back to the host's memory after it, or at the end of
        `residence.staying`."""
        found = [self.vae if name == "vae" else getattr(self.pipeline, name, None) for name in names]
        components = [each for each in found if each is not None]
        with torch.no_grad(), self.residence.working(components):
            yield components[-1] if components else None


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """A tensor of numbers in `dtype`; masks and whatever else as they are."""
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
