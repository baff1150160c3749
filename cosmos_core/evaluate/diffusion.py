"""Evaluation of a diffusion model: images or videos of prompt sets, sampled with the pipeline of diffusers and scored.

Writes `evaluation.json` (metrics and settings), `items.parquet` (one row per prompt with the mean of each reward, so
that two models can be compared on the same prompts), `samples.jsonl` and a grid of the first prompts. Scores are kept
after each batch, so that a stage that was stopped or killed continues with the next batch.
"""

import shutil
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor

from cosmos_core.config.schema.evaluate import EvaluateConfig
from cosmos_core.errors import Preempted, RewardError, StageFailed
from cosmos_core.evaluate.prompt_sets import read_prompt_sets
from cosmos_core.evaluate.scored_prompts import ScoredPrompt, append_scores, average_scores, read_scores, to_item_table
from cosmos_core.models.diffusion import DiffusionModel
from cosmos_core.models.families import open_pipeline
from cosmos_core.observe import gallery
from cosmos_core.registry import is_import_path
from cosmos_core.rewards.base import invalid_scores_error, load_reward
from cosmos_core.rollout.base import request_seed
from cosmos_core.run.files import raise_disk_full, write_json
from cosmos_core.run.paired_items import ITEMS_FILE
from cosmos_core.run.stage import Stage
from cosmos_core.train.check_rewards import call_rewards, make_media_groups
from cosmos_core.train.measure import SAMPLES_FILE, add_samples, open_rewards
from cosmos_core.types import Completion, DiffusionSample, Group, Outcome, Prompt, Score, ScoredGroup

REPORT_FILE = "evaluation.json"
_UNFINISHED_FOLDER_PREFIX = "unfinished"
_NUM_CHECKED_PROMPTS = 2


def check(stage: Stage) -> Outcome:
    """Check the diffusers pipeline, the prompt sets and the rewards of an `evaluate` stage without reading weights."""
    stage.progress.phase("load")
    diffusion_model, evaluate_config = open_pipeline(stage.model, stage.recipe.policy), stage.recipe.evaluate
    _check_rewards(evaluate_config.rewards)
    num_frames = diffusion_model.config.inference_frames if diffusion_model.is_video else 1
    diffusion_model.latent_shape(*diffusion_model.config.inference_size, num_frames)
    prompt_sets = read_prompt_sets(evaluate_config)
    prompts = [prompt for prompt_list in prompt_sets.values() for prompt in prompt_list[:_NUM_CHECKED_PROMPTS]]
    media_groups = make_media_groups(prompts, num_frames, diffusion_model.config.inference_size)
    reward_weights = dict.fromkeys(evaluate_config.rewards, 1.0)
    checked_rewards_text = call_rewards(stage.recipe.reward_settings, reward_weights, media_groups, stage.progress.beat)
    prompt_counts_text = ", ".join(f"{name} ({len(prompt_list)} prompts)" for name, prompt_list in prompt_sets.items())
    return Outcome(info={"found": f"{diffusion_model.folder.class_name}; {prompt_counts_text}; {checked_rewards_text}"})


def run(stage: Stage) -> Outcome:
    """Sample images or videos for all prompts, score them, and return the metrics `evaluation/PROMPT_SET/REWARD`. Raise
    `RewardError` or `StageFailed` if a prompt set has no valid reward, `Preempted` if a stop was requested (the scores
    of finished batches are kept), and the errors of `check`."""
    _check_rewards(stage.recipe.evaluate.rewards)
    prompt_sets = read_prompt_sets(stage.recipe.evaluate)
    unfinished_folder = stage.path / f"{_UNFINISHED_FOLDER_PREFIX}-{stage.fingerprint[:16]}"
    num_saved_prompts = max(1, gallery.MAX_SAVED_PROMPTS // len(prompt_sets))
    scored_prompts: list[ScoredPrompt] = []
    try:
        scored_prompts = _score_prompts(stage, prompt_sets, unfinished_folder, num_saved_prompts)
        metrics = average_scores(scored_prompts)
    except (RewardError, StageFailed) as error:
        if isinstance(error, StageFailed) and not scored_prompts:
            raise  # finished batches are kept
        shutil.rmtree(unfinished_folder, ignore_errors=True)  # delete the scores, so that a retry scores all prompts
        raise
    stage.metrics.log(0, metrics)
    saved_prompts = [(name, prompt) for name, prompts in prompt_sets.items() for prompt in prompts[:num_saved_prompts]]
    with raise_disk_full(stage.path):
        groups = [_read_saved_group(unfinished_folder, scored_prompts, name, prompt) for name, prompt in saved_prompts]
        add_samples(stage.path / SAMPLES_FILE, 0, groups)
        write_json(stage.path / REPORT_FILE, _build_report(stage, prompt_sets, metrics))
        pq.write_table(to_item_table(scored_prompts, prompt_sets), stage.path / ITEMS_FILE)
        shutil.rmtree(unfinished_folder)
    return Outcome(outputs=(REPORT_FILE, ITEMS_FILE, SAMPLES_FILE, gallery.SAMPLES_FOLDER), metrics=metrics)


def _check_rewards(reward_names: Sequence[str]) -> None:
    """Raise `RewardError` if a built-in reward can only score text: the samples of a diffusion model are images or
    videos."""
    for reward_name in reward_names:
        if not is_import_path(reward_name) and "media" not in load_reward(reward_name).binding.declared_parameters:
            problem = f"{reward_name!r} scores texts, and samples are images or videos"
            raise RewardError(f"evaluate.rewards: {problem}; leave it out")


def _score_prompts(
    stage: Stage, prompt_sets: dict[str, list[Prompt]], unfinished_folder: Path, num_saved_prompts: int
) -> list[ScoredPrompt]:
    """Return the scores of all prompts, and save images or videos of the first `num_saved_prompts` prompts of each set
    in `unfinished_folder`. Prompts that an earlier attempt of the stage scored there are not sampled again."""
    config, prompts = stage.recipe.evaluate, [(name, prompt) for name, item in prompt_sets.items() for prompt in item]
    unfinished_folder.mkdir(parents=True, exist_ok=True)
    scored_prompts = read_scores(unfinished_folder)
    if len(scored_prompts) == len(prompts):
        return scored_prompts
    stage.progress.phase("load")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    diffusion_model = open_pipeline(stage.model, stage.recipe.policy, device)
    dtype = getattr(torch, stage.recipe.train.param_dtype)
    pipeline = type(diffusion_model).load_pipeline(diffusion_model.folder, dtype).to(device)
    # Send a heartbeat per denoising step, because a pipeline call may take longer than a stage's heartbeat timeout.
    getattr(pipeline, diffusion_model.denoiser_name).register_forward_pre_hook(lambda *_: stage.progress.beat())
    batch_size, pipeline_arguments = config.batch_size or 1, _make_pipeline_arguments(diffusion_model)
    reward_weights = dict.fromkeys(config.rewards, 1.0 / len(config.rewards))
    with open_rewards(stage.recipe.reward_settings, reward_weights, stage.progress.beat) as score_groups:
        stage.progress.phase("evaluate")
        for batch_start in range(len(scored_prompts), len(prompts), batch_size):
            batch = prompts[batch_start : batch_start + batch_size]
            samples = _sample_media(pipeline, pipeline_arguments, [prompt for _, prompt in batch], config)
            groups = score_groups([_make_group(prompt, item) for (_, prompt), item in zip(batch, samples, strict=True)])
            new_scores = [ScoredPrompt.from_group(name, group) for (name, _), group in zip(batch, groups, strict=True)]
            if not scored_prompts and not any(reward_values for item in new_scores for reward_values in item.rewards):
                scores = [score for group in groups for score in group.scores]
                raise invalid_scores_error("no reward of the first batch is valid", scores)
            samples_to_save = [each for each in zip(batch, samples, strict=True) if each[0][1].id < num_saved_prompts]
            with raise_disk_full(stage.path):
                for (name, prompt), pixels in samples_to_save:
                    np.save(_make_sample_path(unfinished_folder, name, prompt), pixels.numpy())
                append_scores(unfinished_folder, new_scores)
            scored_prompts += new_scores
            stage.progress.step(len(scored_prompts), len(prompts))
            if stage.stop_requested and len(scored_prompts) < len(prompts):
                raise Preempted(f"stopped; the scores of {len(scored_prompts)} prompts are kept")
    return scored_prompts


def _make_pipeline_arguments(diffusion_model: DiffusionModel) -> dict[str, Any]:
    """Return the keyword arguments for a call of the diffusers pipeline, except prompts and seeds."""
    config, guidance_scale = diffusion_model.config, diffusion_model.config.sample.guidance_scale
    frame_size, num_steps = config.inference_size, config.sample.eval_num_steps
    return diffusion_model.call_settings(frame_size, config.inference_frames, num_steps, guidance_scale=guidance_scale)


@torch.no_grad()
def _sample_media(
    pipeline: Any, pipeline_arguments: dict[str, Any], prompts: Sequence[Prompt], evaluate_config: EvaluateConfig
) -> list[Tensor]:
    """Return the sampled images or videos of each prompt as uint8 (samples, [frames,] height, width, 3), on the CPU.
    The noise of a sample depends only on the seed, the position of the prompt in its prompt set, and the index of the
    sample among the samples of the prompt."""
    samples_per_prompt, base_seed = evaluate_config.samples_per_prompt or 1, evaluate_config.seed or 0
    sample_seeds = [request_seed(base_seed, 0, prompt.id, i) for prompt in prompts for i in range(samples_per_prompt)]
    pixels = pipeline(
        prompt=[prompt.text for prompt in prompts for _ in range(samples_per_prompt)],
        generator=[torch.Generator().manual_seed(sample_seed) for sample_seed in sample_seeds],
        output_type="pt", return_dict=False, **pipeline_arguments,
    )[0]  # fmt: skip
    uint8_pixels = (torch.as_tensor(pixels).float().clamp(0, 1) * 255).round().to("cpu", torch.uint8)
    if uint8_pixels.ndim == 5 and uint8_pixels.shape[1] == 1:  # a video of one frame is an image, as in training
        uint8_pixels = uint8_pixels[:, 0]
    return list(uint8_pixels.movedim(-3, -1).contiguous().split(samples_per_prompt))


def _make_group(prompt: Prompt, samples: Tensor) -> Group:
    completions = [Completion((), "stop", "", diffusion_sample=DiffusionSample(each, None, (), 0)) for each in samples]
    return Group(prompt, tuple(completions), 0)


def _make_sample_path(unfinished_folder: Path, set_name: str, prompt: Prompt) -> Path:
    return unfinished_folder / f"{set_name}-{prompt.id}.npy"


def _read_saved_group(
    unfinished_folder: Path, scored_prompts: Sequence[ScoredPrompt], set_name: str, prompt: Prompt
) -> ScoredGroup:
    """Return the images or videos of a prompt that were saved in `unfinished_folder`. The score of each image or video
    is the mean of its rewards in `scored_prompts`."""
    media_group = _make_group(prompt, torch.from_numpy(np.load(_make_sample_path(unfinished_folder, set_name, prompt))))
    rewards = next(each.rewards for each in scored_prompts if (each.set_name, each.id) == (set_name, prompt.id))
    mean_rewards = [float(np.mean(list(values.values()))) if values else None for values in rewards]
    return ScoredGroup(media_group, tuple(map(Score, mean_rewards)))


def _build_report(stage: Stage, prompt_sets: dict[str, list[Prompt]], metrics: dict[str, float]) -> dict[str, Any]:
    config = stage.recipe.evaluate
    diffusion_model = open_pipeline(stage.model, stage.recipe.policy)
    return {
        "diffusers": version("diffusers"),
        "pipeline": diffusion_model.folder.class_name,
        "settings": {
            **_make_pipeline_arguments(diffusion_model), "seed": config.seed or 0, "rewards": list(config.rewards),
            "samples_per_prompt": config.samples_per_prompt or 1, "dtype": stage.recipe.train.param_dtype,
        },
        "prompts": {name: len(prompts) for name, prompts in prompt_sets.items()},
        "metrics": metrics,
    }  # fmt: skip
