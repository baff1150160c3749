"""What trainings that draw images and videos are put together from: prompts, what the engine draws with, real data
beside rollouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from cosmos_core.algorithms.base import Algorithm, Loss, Update
from cosmos_core.algorithms.diffusion_sft import flow_loss
from cosmos_core.algorithms.flow_credit import noise_of
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.flow_sample import FlowSample, seed_of
from cosmos_core.data.lazy import LazySequence
from cosmos_core.data.media_rows import MediaPrompts, MediaRows, open_media, open_media_prompts
from cosmos_core.data.order import batch_positions
from cosmos_core.models.base import MicroBatch
from cosmos_core.rollout.base import request_seed
from cosmos_core.rollout.flow_path import SHARED_NOISE, stochastic_steps, table_of
from cosmos_core.rollout.flow_source import FlowSource
from cosmos_core.run.stage import Stage
from cosmos_core.train.feeds import draws_of, rows_per_step
from cosmos_core.train.rollout_feed import training_sampling
from cosmos_core.train.trainer import Trainer
from cosmos_core.types import FlowSampling, Prompt, Sampling

REFERENCE_KEYS = ("reference", "answer", "label")
"""Where the metadata of a prompt may have what its rewards compare with, if the recipe names no column."""
_DATA = 0x64617461
"""Keeps the draws of a data term apart from others of the same seed."""


class DrawnPrompts(LazySequence[Prompt]):
    """Prepared prompts for images or videos, as rollouts take them."""

    def __init__(self, prompts: MediaPrompts, column: str = "", clips: MediaRows | None = None) -> None:
        """`column`: of the metadata, what rewards compare with; empty: the first found of `REFERENCE_KEYS`. `clips`: of
        the same rows, whose first frames rollouts may be given."""
        self.media, self._columns, self._clips = prompts, (column,) if column else REFERENCE_KEYS, clips

    def __len__(self) -> int:
        return len(self.media)

    def item(self, index: int) -> Prompt:
        """See `LazySequence.item`."""
        found = self.media[index]
        reference = next((str(found.metadata[name]) for name in self._columns if name in found.metadata), "")
        return Prompt(
            found.row,
            (),
            found.prompt,
            reference,
            embedding=dict(found.text),
            metadata=dict(found.metadata),
            given=self._clips[index].mean.float() if self._clips is not None else None,
        )


def open_drawn(folder: Path, split: str, recipe: Recipe) -> DrawnPrompts:
    """Return the prompts of a split of a prepare stage's data folder.

    Raises:
        DataError: there is no such split, or it is damaged.
    """
    policy = recipe.train.train_policy
    asks = policy.has_rollouts and policy.rows == "media" and recipe.policy.diffusers.flow_rl.max_conditional_frames
    clips = open_media(folder, split) if asks else None
    return DrawnPrompts(open_media_prompts(folder, split), getattr(policy, "response_column_name", ""), clips)


def evaluation_sampling(recipe: Recipe) -> FlowSampling:
    """Return how images and videos of held-out prompts are drawn: without noise, by the policy or its average."""
    diffusers, sample = recipe.policy.diffusers, recipe.policy.diffusers.sample
    return FlowSampling(
        num_steps=sample.eval_num_steps,
        guidance_scale=sample.guidance_scale,
        solver="dpm2" if sample.solver == "dpm2" else "euler",
        schedule=sample.sigma_schedule,
        size=diffusers.inference_size,
        num_frames=diffusers.inference_frames,
    )


def flow_source(stage: Stage, trainer: Trainer) -> FlowSource:
    """Return what the engine of a diffusion model draws with: the trainer's own denoiser."""
    adapter: Any = trainer.adapter
    null_text = None
    if stage.data is not None:
        null_text = open_media_prompts(stage.data, "train").null_text

    @contextmanager
    def weights(name: str) -> Iterator[None]:
        adapter.runner.train(False)
        with trainer.weights(name):
            yield

    return FlowSource(adapter.family, adapter.predict, weights, adapter.device, adapter.mesh, null_text)


def prepare_algorithm(stage: Stage, trainer: Trainer, algorithm: Algorithm) -> None:
    """Give an algorithm what it needs of the prepared data beside its prompts.

    Raises:
        DataError: there are no images or clips for a data term.
    """
    assert stage.data is not None
    flow_rl, policy = stage.recipe.policy.diffusers.flow_rl, stage.recipe.train.train_policy
    algorithm.null_text = open_media_prompts(stage.data, "train").null_text
    if flow_rl.data_beta and policy.rows == "media":
        algorithm.data_term = data_term(open_media(stage.data, "train"), stage.recipe, trainer)


def data_term(rows: MediaRows, recipe: Recipe, trainer: Trainer) -> Callable[[int, int], Update]:
    """Return what gives the diffusion loss on as many real images or clips as a train step has prompts, times
    `data_beta`: the loss of SFT.

    With `use_rl_sigma_and_noise` they are those of the prompts, at the noise levels that their rollouts are learned at
    and with the noise that these start from; otherwise all is drawn as in SFT, other rows for each optimizer step.
    What is returned takes the numbers of the train step and of the optimizer step, counted from 0.
    """
    draws, flow_rl = draws_of(rows, recipe, trainer.adapter), recipe.policy.diffusers.flow_rl
    size, seed = min(len(rows), rows_per_step(recipe)), recipe.train.order_seed
    shuffles = recipe.train.train_policy.dataloader_shuffle

    def samples_of(step: int, number: int) -> list[FlowSample]:
        if not flow_rl.use_rl_sigma_and_noise:
            positions = batch_positions(seed + _DATA, number, size, len(rows), True).tolist()
            return [draws.sample(rows[i], seed_of(seed, number, i, _DATA)) for i in positions]
        sampling = training_sampling(recipe)
        assert sampling.flow is not None
        start = SHARED_NOISE if sampling.flow.same_noise else 0
        levels = _learned_levels(trainer, sampling, step)[: 1 if flow_rl.data_on_first_only else None]
        found = []
        for i in batch_positions(seed, step, size, len(rows), shuffles).tolist():
            sample = draws.sample(rows[i], seed_of(seed, step, i, _DATA))
            noise = noise_of(sample.latents.shape, request_seed(sampling.seed, step, rows[i].row, start))
            found += [replace(sample, sigma=level, noise=noise, weight=1.0) for level in levels]
        return found

    def update(step: int, number: int) -> Update:
        samples = samples_of(step, number)

        def loss(micro: MicroBatch) -> Loss:
            found = flow_loss(micro, len(samples))
            metrics = {f"data/{name}": value for name, value in found.metrics.items()}
            return Loss(flow_rl.data_beta * found.value, metrics)

        return Update(samples, loss)

    return update


def _learned_levels(trainer: Trainer, sampling: Sampling, step: int) -> list[float]:
    """Return the noise levels at which the rollouts of a train step are learned, all but 0 where none is named."""
    assert sampling.flow is not None
    adapter: Any = trainer.adapter
    table = table_of(adapter.family, sampling.flow).tolist()
    stochastic = stochastic_steps(sampling.flow, sampling.seed, step)
    return [table[i] for i in stochastic if i in sampling.flow.trained_on] or table[:-1]
