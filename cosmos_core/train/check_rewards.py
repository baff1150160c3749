"""Test calls of local rewards on made-up completions, so that `cosmos check` reports errors before training.

A reward that scores no completion is an error; a reward that scores only some completions is reported. `check.py`
queries remote reward services.
"""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch

from cosmos_core.config.schema.algorithm import AlgorithmConfig
from cosmos_core.config.schema.recipe import RewardSettings
from cosmos_core.config.source_weights import RewardWeightsBySource, reward_weights_of_source
from cosmos_core.data.kinds.prompts import find_prompts
from cosmos_core.data.media_rows import find_reference_response
from cosmos_core.errors import RewardError
from cosmos_core.rewards.base import metric_names
from cosmos_core.run.stage import CHECKED_PROMPTS_FILE
from cosmos_core.train.measure import open_rewards
from cosmos_core.types import Completion, DiffusionSample, Group, ImageRef, JsonValue, Prompt, ScoredGroup, Segment

SPLIT_NAMES = ("train", "validation")
_CHECKED_PROMPTS_PER_DATASET = 2
_EXAMPLE_COMPLETION = "2 + 2 = 4, so it is \\boxed{4}."


def read_first_prompts(data_folder: Path) -> dict[str, JsonValue]:
    """Return the first prompts of each split of the prepared rows in `data_folder`, as JSON objects by split name."""
    prompts_by_split: dict[str, JsonValue] = {}
    for split_name in SPLIT_NAMES:
        if (prompts := find_prompts(data_folder, split_name)) is not None:
            dataset_starts = accumulate((0, *(prompts.mixture.sizes[:-1] if prompts.mixture else ())))
            row_ranges = [
                range(start, min(start + _CHECKED_PROMPTS_PER_DATASET, len(prompts))) for start in dataset_starts
            ]
            prompts_by_split[split_name] = [
                {
                    "text": p.text,
                    "reference": p.reference,
                    "metadata": p.metadata,
                    "source": p.source,
                    "images": [_image_ref_to_json(image_ref) for image_ref in p.images],
                }
                for p in [prompts[i] for i in chain(*row_ranges)]
            ]
    return prompts_by_split


def call_rewards(
    reward_settings: RewardSettings,
    rewards: Mapping[str, float],
    test_groups: Sequence[Group],
    send_heartbeat: Callable[[], None],
) -> str:
    """Call rewards on made-up completions. Return the names of the rewards, with messages about completions without a
    score; raise `RewardError` if a reward fails on all completions. `send_heartbeat` is called during waits."""
    unit_reward_weights: dict[str, float] = dict.fromkeys(rewards, 1.0)
    if isinstance(rewards, RewardWeightsBySource):
        unit_reward_weights = RewardWeightsBySource(
            {source: dict.fromkeys(weight_by_reward, 1.0) for source, weight_by_reward in rewards.by_source.items()}
        )
    with open_rewards(reward_settings, unit_reward_weights, send_heartbeat) as score:
        scored_groups = score(test_groups) if test_groups else []
    score_messages = []
    for reward, metric_name in metric_names(rewards).items():
        reward_groups = [g for g in scored_groups if reward in reward_weights_of_source(rewards, g.group.prompt.source)]
        score_messages.append(_describe_missing_scores(reward, metric_name, reward_groups) if reward_groups else "")
    return "; ".join([f"rewards {', '.join(rewards)}", *filter(None, score_messages)])


def _describe_missing_scores(reward: str, metric_name: str, scored_groups: Sequence[ScoredGroup]) -> str:
    """Return a message if a reward did not score all made-up completions, else an empty string. Raise `RewardError` if
    the reward failed on all of them."""
    scores = [score for group in scored_groups for score in group.scores]
    scores_without_metric = [score for score in scores if metric_name not in score.metrics]
    first_error = next((score.error for score in scores_without_metric if f"{metric_name}: " in score.error), "")
    num_missing_scores = len(scores_without_metric)
    if not num_missing_scores:
        return ""
    if not first_error:
        return f"{reward} returned None for {num_missing_scores} of {len(scores)} completions, where it adds nothing"
    if num_missing_scores < len(scores):
        return f"{reward} has no score for {num_missing_scores} of {len(scores)} made-up completions ({first_error})"
    raise RewardError(
        f"the reward {reward!r} has no score for any of {len(scores)} made-up completions of rows: {first_error}"
    )


def read_checked_prompts(stage_folder: Path, data_folder: Path | None) -> dict[str, Any]:
    """Return the first prompts of each split, by split name. They are read from a file in `stage_folder`, which
    `cosmos check` wrote when it checked the stage that prepares the rows, or else from rows in `data_folder`."""
    if (prompts_file := stage_folder / CHECKED_PROMPTS_FILE).exists():
        prompts_by_split: dict[str, Any] = json.loads(prompts_file.read_text(encoding="utf-8"))
        return prompts_by_split
    return read_first_prompts(data_folder) if data_folder is not None else {}


def make_test_groups(
    prompts_by_split: Mapping[str, Any], split_names: Sequence[str], algorithm_config: AlgorithmConfig,
    media_shape: tuple[int, int, int] | None,
) -> list[Group]:  # fmt: skip
    """Return groups of made-up completions, with which rewards are tested, for the first prompts of the splits
    `split_names`. `media_shape`: frames (1 for an image), height and width of made-up media; None if completions are
    text."""
    response_column_name = getattr(algorithm_config, "response_column_name", "")
    test_groups = []
    for split_name in split_names:
        for i, row in enumerate(prompts_by_split.get(split_name) or prompts_by_split.get(SPLIT_NAMES[0]) or []):
            row_metadata, reference_response = row["metadata"], row["reference"]
            prompt_fields = {"metadata": row_metadata, "source": row.get("source", "")}
            prompt_fields["images"] = tuple(map(_image_ref_from_json, row.get("images", ())))
            if media_shape is None:
                completions = (_make_text_completion(_EXAMPLE_COMPLETION), _make_text_completion(reference_response))
            else:
                reference_response = find_reference_response(row_metadata, response_column_name)
                completions = _make_media_completions(*media_shape)
            test_groups.append(Group(Prompt(i, (0,), row["text"], reference_response, **prompt_fields), completions, 0))
    return test_groups


def _image_ref_to_json(image_ref: ImageRef) -> dict[str, JsonValue]:
    base64_content = None if image_ref.content is None else base64.b64encode(image_ref.content).decode()
    return {"path": image_ref.path, "content": base64_content, "sha256": image_ref.sha256}


def _image_ref_from_json(image_ref_fields: Mapping[str, Any]) -> ImageRef:
    image_bytes = None if image_ref_fields["content"] is None else base64.b64decode(image_ref_fields["content"])
    return ImageRef(image_ref_fields["path"], image_bytes, image_ref_fields["sha256"])


def _make_text_completion(text: str) -> Completion:
    num_tokens = len(text.split()) + 1
    return Completion((Segment((0,) * num_tokens, True, (-1.0,) * num_tokens, 0),), "stop", text)


def make_media_groups(prompts: Sequence[Prompt], num_frames: int, frame_size: tuple[int, int]) -> list[Group]:
    """Return a group of made-up images for each prompt or, if `num_frames` is larger than 1, of made-up videos.
    `frame_size`: height and width in pixels."""
    return [Group(prompt, _make_media_completions(num_frames, *frame_size), 0) for prompt in prompts]


def _make_media_completions(num_frames: int, height: int, width: int) -> tuple[Completion, Completion]:
    pixel_shape = (*((num_frames,) if num_frames > 1 else ()), height, width, 3)
    pixels = torch.randint(0, 256, pixel_shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    completion = Completion((), "stop", "", diffusion_sample=DiffusionSample(pixels, None, (), 0))
    return completion, completion
