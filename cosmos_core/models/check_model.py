"""Program of `cosmos check-model`: check that a diffusion pipeline can be trained, and print a table of the checks.

    python -m cosmos_core.models.check_model MODEL [--class FILE.py:CLASS]

The program loads the whole pipeline on the CPU and calls it once with small inputs.
"""

import argparse
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import Tensor

from cosmos_core.config.schema.diffusers import DiffusersConfig
from cosmos_core.config.schema.lora import LoraConfig
from cosmos_core.config.schema.policy import PolicyConfig
from cosmos_core.errors import EXIT_OK, EXIT_REFUSED, CosmosError
from cosmos_core.models.diffusion import DiffusionModel
from cosmos_core.models.families import open_pipeline
from cosmos_core.models.lora import add_adapter
from cosmos_core.observe.console import make_console

_PROBE_PROMPTS = ["7 red apples on a table", "a cat"]
_VELOCITY_TOLERANCE = 1e-4
"""Maximum difference between the velocities of this package and the pipeline, as a fraction of the largest velocity."""
_FAILURE_PREFIX = "does not do what it should: "
"""Text with which the message of a failed check begins."""


class CheckResult(NamedTuple):
    """Result of one check of a pipeline, a row of the printed table."""

    name: str
    has_passed: bool
    message: str


def check_model(model: str, model_class: str | None = None) -> Iterator[CheckResult]:
    """Yield a result for each check of the diffusion pipeline `model`. A check that raises an error has failed. If no
    model family supports the pipeline, all further checks are skipped. `model_class` is the import path of a
    user-defined family."""
    config = DiffusersConfig(max_prompt_length=64)
    policy_config = PolicyConfig(is_diffusers=True, model_name_or_path=model, model_class=model_class, diffusers=config)
    try:
        family = open_pipeline(model, policy_config)
    except CosmosError as error:
        yield CheckResult("family", False, str(error))
        return
    yield CheckResult("family", True, f"{family.folder.class_name} is {type(family).__name__}")
    check_functions: dict[str, Callable[[DiffusionModel], str]] = {
        "noise levels": _check_noise_levels,
        "text": _check_text_embedding,
        "media": _check_media,
        "prediction": _check_prediction,
        "gradient": _check_gradient,
        "adapter": _check_adapter,
    }
    for check_name, run_check in check_functions.items():
        try:
            check_message = run_check(family)
        except Exception as error:  # noqa: BLE001 - a user's class may raise any error; it is the result of the check
            yield CheckResult(check_name, False, " ".join(f"{type(error).__name__}: {error}".split())[:300])
        else:
            yield CheckResult(check_name, not check_message.startswith(_FAILURE_PREFIX), check_message)


def _check_noise_levels(family: DiffusionModel) -> str:
    """Check that the noise levels of this package equal those of the pipeline's scheduler."""
    sigmas_N = family.set_scheduler_timestep(4)
    scheduler = family.folder.load("scheduler")
    scheduler.set_timesteps(4)
    max_sigma_difference = float((sigmas_N - scheduler.sigmas.double()).abs().max())
    schedule_description = f"{family.schedule!r}, shift {family.timestep_shift:g} ({family.train_shift:g} in training)"
    failure_message = (
        f"{_FAILURE_PREFIX}{schedule_description} is {max_sigma_difference:.2g} from {type(scheduler).__name__}"
    )
    return schedule_description if max_sigma_difference < 1e-3 else failure_message


def _check_text_embedding(family: DiffusionModel) -> str:
    """Check that the embedding of a prompt does not depend on the other prompts of the batch."""
    batch_embedding, single_embedding = family.text_embedding(_PROBE_PROMPTS), family.text_embedding(_PROBE_PROMPTS[1:])
    for name, value in batch_embedding.items():
        if len(value) != len(_PROBE_PROMPTS) or value.requires_grad:
            shape_text = f"{name!r} is {tuple(value.shape)}"
            return f"{_FAILURE_PREFIX}{shape_text}, for {len(_PROBE_PROMPTS)} prompts, without gradient"
        if not torch.allclose(value[1:].float(), single_embedding[name].float(), atol=1e-3):
            return f"{_FAILURE_PREFIX}{name!r} of a prompt depends on the prompts beside it"
    return ", ".join(f"{name} {tuple(value.shape[1:])}" for name, value in batch_embedding.items())


def _check_media(family: DiffusionModel) -> str:
    """Check that the VAE's latents have the shape `family.latent_shape`, and that decoded latents have the size of the
    original pixels."""
    pixels, latent_shape = _make_random_pixels(family)
    latent_mean, latent_logvar = family.visual_embedding(pixels)
    if tuple(latent_mean.shape[1:]) != latent_shape:
        shapes_text = f"{tuple(pixels.shape[1:])} are {tuple(latent_mean.shape[1:])}"
        return f"{_FAILURE_PREFIX}latents of {shapes_text}, latent_shape says {latent_shape}"
    if latent_logvar is not None and latent_logvar.shape != latent_mean.shape:
        return f"{_FAILURE_PREFIX}mean and log-variance are of different shapes"
    decoded_pixels = family.decode(latent_mean)
    if decoded_pixels.shape != pixels.shape:
        return f"{_FAILURE_PREFIX}{tuple(pixels.shape[1:])} comes back as {tuple(decoded_pixels.shape[1:])}"
    vae_description = "posterior" if latent_logvar is not None else "deterministic"
    latent_std = latent_mean.std().item()
    return f"{tuple(pixels.shape[1:])} to {latent_shape}, {vae_description}, standard deviation {latent_std:.2f}"


def _check_prediction(family: DiffusionModel) -> str:
    """Check that this package's call of the denoiser predicts the same velocity as the pipeline's call."""
    denoiser = family.load_denoiser(torch.float32)
    recorded_calls: list[tuple[dict[str, Any], Tensor]] = []
    original_forward = denoiser.forward
    denoiser_argument_names = list(inspect.signature(original_forward).parameters)

    def record_call(*args: Tensor, **kwargs: Any) -> Any:
        denoiser_output = original_forward(*args, **kwargs)
        recorded_calls.append((dict(zip(denoiser_argument_names, args, strict=False)) | kwargs, denoiser_output[0]))
        return denoiser_output

    denoiser.forward = record_call
    probe_settings, generator, max_difference = family.probe_settings(), torch.Generator().manual_seed(0), 0.0
    with torch.no_grad():
        family.pipeline.register_modules(**{family.denoiser_name: denoiser})
        family.pipeline(prompt=_PROBE_PROMPTS[:1], **probe_settings, generator=generator, output_type="pt")
        denoiser.forward = original_forward
        text_inputs = family.text_embedding(_PROBE_PROMPTS[:1])
        num_frames = probe_settings.get("frames", probe_settings.get("num_frames", 1))
        latent_shape = family.latent_shape(probe_settings["height"], probe_settings["width"], num_frames)
        for arguments, expected_output in recorded_calls:
            latents = family.latents_in(arguments[denoiser_argument_names[0]], latent_shape)
            denoiser_arguments = family.nft_prepare_transformer_input(latents, torch.ones(len(latents)), text_inputs)
            timestep_scale = denoiser_arguments["timestep"].flatten()[0]
            sigma_B = (arguments["timestep"].flatten()[0] / timestep_scale).expand(len(latents))
            velocity = family.predict(denoiser, latents, sigma_B, text_inputs)
            velocity_difference = (velocity - family.velocity_of(expected_output, latents)).abs().max()
            max_difference = max(max_difference, float(velocity_difference / expected_output.abs().max()))
    comparison_text = f"{len(recorded_calls)} calls, largest difference {max_difference:.1g}"
    is_within_tolerance = bool(recorded_calls) and max_difference <= _VELOCITY_TOLERANCE
    return (
        comparison_text
        if is_within_tolerance
        else f"{_FAILURE_PREFIX}{comparison_text}, more than {_VELOCITY_TOLERANCE:g}"
    )


def _check_gradient(family: DiffusionModel) -> str:
    """Check that the backward pass of a loss computes gradients of the denoiser's weights."""
    denoiser = family.load_denoiser(torch.float32)
    _, latent_shape = _make_random_pixels(family)
    text_inputs = family.text_embedding(_PROBE_PROMPTS)
    velocity = family.predict(denoiser, torch.randn(2, *latent_shape), torch.tensor([0.2, 0.8]), text_inputs)
    velocity.square().mean().backward()  # type: ignore[no-untyped-call]
    denoiser_weights = list(denoiser.parameters())
    num_trained_weights = sum(weight.grad is not None for weight in denoiser_weights)
    if not num_trained_weights or not torch.isfinite(velocity).all():
        return f"{_FAILURE_PREFIX}no weight has a gradient, or a prediction is not finite"
    num_elements = sum(weight.numel() for weight in denoiser_weights)
    return f"{num_trained_weights} of {len(denoiser_weights)} weights, {num_elements / 1e6:.3g} M numbers"


def _check_adapter(family: DiffusionModel) -> str:
    """Check that the denoiser has the family's LoRA target modules, and that the pipeline's class can load an
    adapter."""
    denoiser = family.load_denoiser(torch.float32)
    add_adapter(denoiser, LoraConfig(r=2), family.lora_targets)
    num_lora_factors = sum(parameter.requires_grad for parameter in denoiser.parameters())
    if not hasattr(family.folder.pipeline_class, "load_lora_weights"):
        return f"{_FAILURE_PREFIX}{family.folder.class_name} has no load_lora_weights; train all weights"
    return f"{num_lora_factors // 2} modules: {', '.join(family.lora_targets)}"


def _make_random_pixels(family: DiffusionModel) -> tuple[Tensor, tuple[int, ...]]:
    """Return a small image or clip with values in [-1, 1], and the shape of its latents."""
    image_size, num_frames = family.size_multiple * 2, family.pixels_per_latent[0] + 1 if family.is_video else 1
    pixels_shape = (1, 3, *[num_frames] * family.is_video, image_size, image_size)
    pixels = torch.rand(pixels_shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return pixels, family.latent_shape(image_size, image_size, num_frames)


def main() -> int:
    """Check the diffusion pipeline that the command line names, print a table of checks, and return the exit code."""
    argument_parser = argparse.ArgumentParser()
    argument_parser.add_argument("model")
    argument_parser.add_argument("--class", dest="model_class")
    parsed_arguments = argument_parser.parse_args()
    result_table = Table("check", "", "found", title=parsed_arguments.model)
    check_results = list(check_model(parsed_arguments.model, parsed_arguments.model_class))
    for name, has_passed, message in check_results:
        result_table.add_row(name, "ok" if has_passed else "FAILED", message)
    make_console().print(result_table)
    return EXIT_OK if all(result.has_passed for result in check_results) else EXIT_REFUSED


if __name__ == "__main__":
    sys.exit(main())
