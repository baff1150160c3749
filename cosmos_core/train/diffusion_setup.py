"""Setup of RL on images or videos: the denoiser that the rollout engine samples with, and the supervised loss on real
images or clips that is added to the RL loss."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from cosmos_core.algorithms.base import Loss, Update
from cosmos_core.algorithms.diffusion_sft import compute_flow_loss
from cosmos_core.algorithms.flow_credit import make_noise
from cosmos_core.config.schema.diffusers import DiffusersConfig
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.data.flow_sample import FlowSample, derive_seed
from cosmos_core.data.kinds.media import make_noise_sampler
from cosmos_core.data.media_rows import MediaRows, open_media_prompts
from cosmos_core.data.order import rows_at_positions
from cosmos_core.models.base import MicroBatch
from cosmos_core.rollout.base import EngineDenoiser, request_seed
from cosmos_core.rollout.flow_path import SHARED_NOISE_INDEX, choose_stochastic_steps, get_noise_levels
from cosmos_core.train.feeds import DATA_TERM_SEED_OFFSET, rows_per_step
from cosmos_core.train.trainer import Trainer
from cosmos_core.types import FlowSampling, Sampling


def make_evaluation_sampling(diffusers_config: DiffusersConfig) -> FlowSampling:
    """Return the sampling settings for held-out prompts: a solver that adds no noise, and the image or video size of
    `inference_size`."""
    sample_config = diffusers_config.sample
    return FlowSampling(
        num_steps=sample_config.eval_num_steps,
        guidance_scale=sample_config.guidance_scale,
        solver="dpm2" if sample_config.solver == "dpm2" else "euler",
        schedule=sample_config.sigma_schedule,
        size=diffusers_config.inference_size,
        num_frames=diffusers_config.inference_frames,
    )


def make_engine_denoiser(prepared_folder: Path, trainer: Trainer) -> EngineDenoiser:
    """Return the `EngineDenoiser` with which a rollout engine samples images or videos from the trainer's denoiser."""
    adapter: Any = trainer.adapter
    empty_text_embedding = open_media_prompts(prepared_folder, "train").null_text

    @contextmanager
    def use_weights(weights_name: str) -> Iterator[None]:
        adapter.runner.train(False)
        with trainer.use_weights(weights_name):
            yield

    return EngineDenoiser(
        adapter.family, adapter.predict, use_weights, adapter.device, adapter.mesh, empty_text_embedding
    )


def make_data_term(
    rows: MediaRows, diffusers: DiffusersConfig, train: TrainConfig, sampling: Sampling, trainer: Trainer
) -> Callable[[int, Sequence[int], int], Update]:
    """Return a function that builds the SFT diffusion loss with weight `data_beta`, from the number of the train step,
    the ids of its prompts, and the number of the optimizer step.

    With `use_rl_sigma_and_noise`, the loss is computed on the rows of the prompts, with the initial noise of the
    rollouts and at the noise levels at which the rollouts are trained. Otherwise rows, noise and noise levels are
    sampled as in SFT for each optimizer step: as many rows as a full train step has prompts.
    """
    noise_sampler, flow_rl_config = make_noise_sampler(rows, diffusers, trainer.adapter), diffusers.flow_rl
    num_rows, order_seed = min(len(rows), rows_per_step(train, sampling.num_completions)), train.order_seed

    def make_noised_samples(step: int, prompt_ids: Sequence[int], update_index: int) -> list[FlowSample]:
        if not flow_rl_config.use_rl_sigma_and_noise:
            row_positions = range(update_index * num_rows, (update_index + 1) * num_rows)
            row_numbers = rows_at_positions(order_seed + DATA_TERM_SEED_OFFSET, row_positions, len(rows), shuffle=True)
            noise_seeds = [derive_seed(order_seed, update_index, i, DATA_TERM_SEED_OFFSET) for i in row_numbers]
            return [noise_sampler.sample(rows[i], s) for i, s in zip(row_numbers, noise_seeds, strict=True)]
        adapter: Any = trainer.adapter
        assert sampling.flow is not None
        completion_index = SHARED_NOISE_INDEX if sampling.flow.has_common_initial_noise else 0
        all_noise_levels = get_noise_levels(adapter.family, sampling.flow).tolist()
        stochastic_step_indices = choose_stochastic_steps(sampling.flow, sampling.seed, step)
        noise_levels = [all_noise_levels[i] for i in stochastic_step_indices if i in sampling.flow.trained_steps]
        # If the recipe selects no steps, train at all noise levels except the last, which is 0.
        noise_levels = (noise_levels or all_noise_levels[:-1])[: 1 if flow_rl_config.data_on_first_only else None]
        noised_samples = []
        for i in prompt_ids:  # the id of a prompt is also the index of its row in `rows`
            sample = noise_sampler.sample(rows[i], derive_seed(order_seed, step, i, DATA_TERM_SEED_OFFSET))
            noise = make_noise(sample.latents.shape, request_seed(sampling.seed, step, rows[i].row, completion_index))
            noised_samples += [replace(sample, sigma=sigma, noise=noise, weight=1.0) for sigma in noise_levels]
        return noised_samples

    def make_update(step: int, prompt_ids: Sequence[int], update_index: int) -> Update:
        samples = make_noised_samples(step, prompt_ids, update_index)

        def compute_loss(micro_batch: MicroBatch) -> Loss:
            sft_loss = compute_flow_loss(micro_batch, len(samples))
            metrics = {f"data/{name}": value for name, value in sft_loss.metrics.items()}
            return Loss(flow_rl_config.data_beta * sft_loss.value, metrics)

        return Update(samples, compute_loss)

    return make_update
