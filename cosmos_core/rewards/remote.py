"""Client that requests the scores of completions from a reward service, over the protocol of Cosmos-RL.

Completions are sent in batches of `batch_size`, with many concurrent requests. A request that fails with a transient
error or is lost is retried with exponential backoff, under the same uuid so that `service/` scores it once; a request
stays at the replica that accepted it. A score that is still missing at the deadline is invalid, never 0.

    reward = scale * clip(sum of weight * clip(score))

Videos are sent as pixels, or as latents of the VAE in `video_vae`, which Cosmos-RL's service expects. Single requests
are in `exchange.py`, the wire format in `protocol.py`, local rewards in `runner.py`, the service in `service/`.
"""

import asyncio
import itertools
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import numpy as np
from anyio.from_thread import start_blocking_portal

from cosmos_core.config.schema.remote_reward import RemoteRewardConfig, RewardFunctionConfig
from cosmos_core.environment import make_tls_verify
from cosmos_core.errors import RewardError, StageFailed
from cosmos_core.rewards.base import make_reward_request, to_json_value
from cosmos_core.rewards.exchange import MissingScoresError, ReplicaState, ServiceEndpoints, ServiceRequest
from cosmos_core.rewards.images import DEFAULT_FPS
from cosmos_core.rewards.process import wait_for_futures
from cosmos_core.rewards.protocol import encode_request
from cosmos_core.rewards.wan_latents import WanVae
from cosmos_core.types import Group, Score, ScoredGroup

logger = logging.getLogger(__name__)


@dataclass
class _CompletionScores:
    """Scores of one completion: the clipped score of each reward function, or the reason why a score is missing."""

    scores: dict[RewardFunctionConfig, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    error: str = ""
    is_service_error: bool = False
    """Whether the service responded with an error for the completion; False if the service did not respond in time."""

    def record_missing_score(self, function: RewardFunctionConfig, error_text: str, *, is_service_error: bool) -> None:
        """Record that a function returned no score; ignore functions of weight 0, which are only logged."""
        if function.weight:
            self.error, self.is_service_error = self.error or f"{function.name}: {error_text}", is_service_error


_RequestAndScores = tuple[Mapping[str, Any], _CompletionScores]


class RemoteRewards:
    """Client that scores completions by the functions of a reward service; `on_wait` is called while it waits."""

    def __init__(
        self, config: RemoteRewardConfig, endpoints: ServiceEndpoints, *, on_wait: Callable[[], None] = lambda: None
    ) -> None:
        self._config, self._endpoints, self._on_wait = config, endpoints, on_wait
        self._replica_state = ReplicaState([0] * len(endpoints.replica_urls))
        self._video_vae: WanVae | None = None
        self._vae_lock = threading.Lock()

    def score_groups(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        """Return the groups, in order, each with one score per completion; see `score` for errors."""
        requests = [make_reward_request(group, k) for group in groups for k in range(len(group.completions))]
        score_iterator = iter(self.score(requests))
        group_scores = [tuple(itertools.islice(score_iterator, len(group.completions))) for group in groups]
        return [ScoredGroup(*each) for each in zip(groups, map(_invalidate_partial_group, group_scores), strict=True)]

    def score(self, requests: Sequence[Mapping[str, Any]]) -> list[Score]:
        """Return one score per request, in order; a request has the fields of `make_reward_request`. The service scores
        `media` or, in a request without media, the text `to_be_evaluated`. Raise `RewardError` if the service refuses
        requests or lacks a configured score, and `StageFailed` if a score is missing and `missing_score` is "fail"."""
        config, unscored_indices = self._config, list(range(len(requests)))
        scores = [_CompletionScores() for _ in requests]
        for attempt in range(1 + (config.retries if config.missing_score == "retry" else 0)):
            if not unscored_indices:
                break
            if attempt:
                log_message = "%d completions have no score (%s); they are sent again"
                logger.warning(log_message, len(unscored_indices), scores[unscored_indices[0]].error)
            for i in unscored_indices:
                scores[i] = _CompletionScores()
            # Score in the event loop of another thread, so that this thread can call `on_wait`.
            with start_blocking_portal() as portal:
                requests_and_scores = [(requests[i], scores[i]) for i in unscored_indices]
                scoring_future = portal.start_task_soon(self._score_batches, requests_and_scores)
                wait_for_futures([scoring_future], math.inf, self._on_wait)
                try:
                    scoring_future.result()
                except BaseExceptionGroup as error_group:
                    raise error_group.exceptions[0] from error_group
            unscored_indices = [i for i in unscored_indices if scores[i].error]
        if unscored_indices and config.missing_score == "fail":
            raise StageFailed(f"{len(unscored_indices)} completions have no score: {scores[unscored_indices[0]].error}")
        return [self._compute_total_score(request_scores) for request_scores in scores]

    def _compute_total_score(self, completion_scores: _CompletionScores) -> Score:
        if completion_scores.error:
            return Score(None, completion_scores.metrics, completion_scores.error, completion_scores.is_service_error)
        weighted_score = sum(function.weight * score for function, score in completion_scores.scores.items())
        weighted_score = min(max(weighted_score, self._config.reward_clip_min), self._config.reward_clip_max)
        return Score(self._config.scale * weighted_score, completion_scores.metrics)

    async def _score_batches(self, requests_and_scores: Sequence[_RequestAndScores]) -> None:
        items_by_shape: dict[Any, list[_RequestAndScores]] = {}  # media of one shape are sent as one array
        for request, scores in requests_and_scores:
            media = request.get("media")
            is_video = isinstance(media, np.ndarray)
            media_shape = None if media is None else ("video", media.shape) if is_video else ("image", media.size)
            items_by_shape.setdefault(media_shape, []).append((request, scores))
        request_semaphore, batch_size = asyncio.Semaphore(self._config.max_in_flight), self._config.batch_size
        connection_limits = httpx.Limits(max_connections=self._config.max_in_flight)
        async with (
            httpx.AsyncClient(
                headers=self._endpoints.auth_headers, limits=connection_limits, verify=make_tls_verify()
            ) as http_client,
            asyncio.TaskGroup() as task_group,
        ):
            for items in items_by_shape.values():
                for start in range(0, len(items), batch_size):
                    batch = items[start : start + batch_size]
                    task_group.create_task(self._score_batch(http_client, request_semaphore, batch))

    async def _score_batch(
        self, http_client: httpx.AsyncClient, request_semaphore: asyncio.Semaphore, batch: Sequence[_RequestAndScores]
    ) -> None:
        async with request_semaphore:
            service_request = ServiceRequest(
                self._endpoints, http_client, self._config.timeout_seconds, self._replica_state
            )
            batch_scores = [scores for _, scores in batch]
            try:
                request_body = await asyncio.to_thread(self._encode_body, [request for request, _ in batch])
                # Fetch the rewards of weight 0 last, because they are only metrics.
                reward_functions = sorted(self._config.reward_fns, key=lambda item: not item.weight)
                reward_names = dict.fromkeys(item.name for item in reward_functions)
                result_by_function = await service_request.fetch_results(request_body, list(reward_names))
            except MissingScoresError as error:
                for scores in batch_scores:
                    scores.error = str(error)
                return
            for reward_function in self._config.reward_fns:
                _record_metrics(reward_function, result_by_function[reward_function.name], batch_scores)
            for reward_function, metric_name in self._config.metric_names.items():
                _record_scores(reward_function, metric_name, result_by_function[reward_function.name], batch_scores)

    def _encode_body(self, requests: Sequence[Mapping[str, Any]]) -> bytes:
        """Return the HTTP body that requests the scores of a batch: images of shape B, H, W, C, videos or latents of
        shape B, C, T, H, W, or texts."""
        media: list[Any] = [request.get("media") for request in requests]
        # Send positive weights, because the service skips functions whose weight is not above 0.
        sent_reward_weights = {item.name: item.weight if item.weight > 0 else 1.0 for item in self._config.reward_fns}
        request_fields: dict[str, Any] = {"prompts": [request.get("prompt") or "" for request in requests]}
        request_fields["reward_fn"] = sent_reward_weights
        if media[0] is None:
            media_array = np.zeros((len(media), 0), np.uint8)
            request_fields["media_type"] = "text"
            request_fields["completions"] = [request["to_be_evaluated"] for request in requests]
            for name in ("num_tokens", "finish_reason", "turns"):
                if any(name in request for request in requests):
                    request_fields[name] = [request.get(name) for request in requests]
        elif isinstance(media[0], np.ndarray):
            request_fields["media_type"], media_array = self._encode_videos(media)
            frame_rates = [(request.get("metadata") or {}).get("video_fps") or DEFAULT_FPS for request in requests]
            request_fields["video_infos"] = [{"video_fps": frame_rate} for frame_rate in frame_rates]
        else:
            request_fields["media_type"] = "image"
            media_array = np.stack([np.asarray(item.convert("RGB")) for item in media])
        if any(request.get("reference") for request in requests):
            request_fields["references"] = [request.get("reference") or "" for request in requests]
        # Send the columns of the rows as `metadata`, and those of the reward `gen_eval` in its own fields.
        metadata_rows = [
            {k: v for k, v in (request.get("metadata") or {}).items() if k != "video_fps"} for request in requests
        ]
        if all("include" in row and "tag" in row for row in metadata_rows):
            request_fields |= {
                f"geneval_{name}s": [row.pop(name) for row in metadata_rows] for name in ("tag", "include")
            }
            if any("exclude" in row for row in metadata_rows):
                request_fields["geneval_excludes"] = [row.pop("exclude", []) for row in metadata_rows]
        if any(metadata_rows):
            request_fields["metadata"] = metadata_rows
        return encode_request(to_json_value(request_fields), media_array)

    def _encode_videos(self, videos: Sequence[np.ndarray]) -> tuple[str, np.ndarray]:
        if not self._config.video_vae:
            return "video", np.stack([np.moveaxis(video, -1, 0) for video in videos])
        with self._vae_lock:
            self._video_vae = self._video_vae or WanVae("remote_reward.video_vae", self._config.video_vae, "cuda")
            return "latent", self._video_vae.encode(videos)


def _record_metrics(
    reward_function: RewardFunctionConfig, response: Mapping[str, Any], batch_scores: Sequence[_CompletionScores]
) -> None:
    """Add the numbers in a response of the service, other than the reward itself, to the metrics of each completion of
    a batch, without clipping."""
    score_columns = response.get("scores")
    for score_key, score_column in score_columns.items() if isinstance(score_columns, dict) else ():
        for i, completion_scores in enumerate(batch_scores):
            metric = _read_finite_number(score_column, i, len(batch_scores))
            if metric is not None and score_key != reward_function.name:
                completion_scores.metrics[f"{reward_function.name}/{score_key}"] = metric


def _record_scores(
    reward: RewardFunctionConfig, metric_name: str, response: Mapping[str, Any], batch: Sequence[_CompletionScores]
) -> None:
    """Record the score of a reward function, or the error, for each completion of a batch. Raise `RewardError` if the
    response of the service lacks the configured score key of `reward`."""
    score_columns, errors = response.get("scores"), response.get("errors")
    if not isinstance(score_columns, dict) or not score_columns:
        error = response.get("error")
        # An error is not the service's fault if the request was lost, because a retry may succeed.
        is_service_error = bool(error) and not response.get("is_lost")
        for each in batch:
            each.record_missing_score(reward, error or "the response has no scores", is_service_error=is_service_error)
        return
    score_key = reward.score_key or reward.name
    score_keys = [score_key] if score_key in score_columns else [k.strip() for k in score_key.split("+") if k.strip()]
    missing_keys = [k for k in score_keys if k not in score_columns]
    if missing_keys or not score_keys:
        missing_keys_text = ", ".join(map(repr, missing_keys or [score_key]))
        raise RewardError(
            f"remote_reward.reward_fns: {reward.name!r} returns no {missing_keys_text}; set score_key to one of "
            f"{', '.join(sorted(score_columns))}, or to several with +"
        )
    for i, completion_scores in enumerate(batch):
        is_item_failed = _has_item_failed(score_columns, i)
        score_values = [
            None if is_item_failed else _read_finite_number(score_columns[k], i, len(batch)) for k in score_keys
        ]
        if None in score_values:
            item_error = errors[i] if isinstance(errors, list) and len(errors) == len(batch) and errors[i] else ""
            item_error = item_error or "the response has no number for it"
            completion_scores.record_missing_score(reward, item_error, is_service_error=True)
            continue
        total_score = math.fsum(v for v in score_values if v is not None)
        completion_scores.scores[reward] = reward.clip_score(total_score)
        # A function of weight 0 is only logged, so its score is not clipped.
        metric = completion_scores.scores[reward] if reward.weight else total_score
        completion_scores.metrics[metric_name] = metric


def _has_item_failed(score_columns: Mapping[str, Any], i: int) -> bool:
    """Return True if item `i` failed in Cosmos-RL's service: its prediction is `Error`, or its video scores are -1."""
    column = score_columns.get("prediction")
    if isinstance(column, list) and i < len(column) and column[i] == "Error":
        return True
    video_score_columns = [score_columns.get(f"{name}_reward") for name in ("vq", "mq", "ta", "overall")]
    return all(isinstance(column, list) and i < len(column) and column[i] == -1.0 for column in video_score_columns)


def _read_finite_number(score_column: Any, i: int, num_items: int) -> float | None:
    """Return entry `i` of a score column as a float. None: the entry is not a finite number, or the column does not
    have `num_items` entries."""
    raw_number = score_column[i] if isinstance(score_column, list) and len(score_column) == num_items else None
    if not isinstance(raw_number, int | float) or isinstance(raw_number, bool):
        return None
    try:
        number = float(raw_number)
    except OverflowError:  # raised for an integer that exceeds the range of a float
        return None
    return number if math.isfinite(number) else None


def _invalidate_partial_group(scores: tuple[Score, ...]) -> tuple[Score, ...]:
    """Return the scores of a group, all marked invalid if one is invalid, because only whole groups are compared."""
    if (first_invalid_score := next((score for score in scores if score.value is None), None)) is None:
        return scores
    group_error = f"its group is dropped: {first_invalid_score.error}"
    return tuple(score if score.value is None else replace(score, value=None, error=group_error) for score in scores)
