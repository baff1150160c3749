"""Asks a reward service for the scores of completions, over the protocol of Cosmos-RL.

Completions are sent `batch_size` at a time, many requests in flight. A request that is refused for now, lost or cut off
is sent again with growing, jittered pauses, under the same uuid so that ours scores it once; of several replicas each
request stays with the one that took it. A score that is still missing at the deadline is invalid, never 0.

    reward = scale * clip(sum of weight * clip(score))

Not here: the wire format (protocol.py), local rewards (runner.py), the service itself (service/).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import numpy as np

from cosmos_core.config.schema.remote_reward import RemoteRewardConfig, RewardFunctionConfig
from cosmos_core.errors import RewardError, StageFailed
from cosmos_core.rewards.base import request_of
from cosmos_core.rewards.process import wait_for
from cosmos_core.rewards.protocol import IDEMPOTENCY_KEY, LATENT_ATTR, PIN, PING, STATE, encode_request
from cosmos_core.types import Group, Score, ScoredGroup

ENQUEUE_URL = "REMOTE_REWARD_ENQUEUE_URL"
FETCH_URL = "REMOTE_REWARD_FETCH_URL"
TOKEN = "REMOTE_REWARD_TOKEN"
NO_PINNING = "COSMOS_DISABLE_REMOTE_REWARD_USE_REPLICA"

_FPS = 16.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_MOST_MISSES = 5
"""Fetches in a row without a response, after which a request goes to another replica."""
_LEAST_SECONDS, _SECONDS_PER_MIB, _BOUNDS = 30.0, 3.0, (60.0, 600.0)
_FETCH_SECONDS = 30.0
_REFUSED = {400, 401, 403, 404, 405, 411, 413, 415, 422}
"""Statuses of an enqueue after which asking again cannot help."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Service:
    """Where replicas of a reward service are, and how they know us."""

    replicas: tuple[tuple[str, str], ...]
    """Of each the URLs to enqueue at and to fetch from."""
    token: str = ""
    pins: bool = True
    """Whether a request is fetched from the replica that said it has it."""


def service_of(environment: Mapping[str, str] = os.environ) -> Service:
    """Return the service that the environment names; both URLs may be lists, separated by commas.

    Raises:
        RewardError: it names none.
    """
    enqueue, fetch = (
        [url for each in environment.get(name, "").split(",") if (url := each.strip())]
        for name in (ENQUEUE_URL, FETCH_URL)
    )
    if not enqueue or not fetch:
        raise RewardError(
            f"train.train_policy.use_remote_reward = true: set {ENQUEUE_URL} and {FETCH_URL} in the environment, and "
            f"{TOKEN} where the service asks for one"
        )
    if len(enqueue) != len(fetch):
        raise RewardError(
            f"{ENQUEUE_URL} has {len(enqueue)} URLs and {FETCH_URL} {len(fetch)}; give one of each a replica"
        )
    if wrong := next((url for url in (*enqueue, *fetch) if not url.startswith(("http://", "https://"))), None):
        raise RewardError(f"{wrong!r} is no URL of a reward service; it begins with http:// or https://")
    return Service(
        tuple(zip(enqueue, fetch, strict=True)), environment.get(TOKEN, ""), environment.get(NO_PINNING, "0") != "1"
    )


def ping(service: Service, names: Sequence[str]) -> None:
    """Ask each replica whether it is there and knows us.

    Raises:
        RewardError: one is not, or does not.
    """
    _tell(service, PING, {"info_data": json.dumps({"reward_fn": dict.fromkeys(names, 1.0)})})


def set_latent_attr(service: Service, fields: Mapping[str, Any]) -> None:
    """Tell each replica how the latents are made that it will be sent.

    Raises:
        RewardError: one is not there, or refuses.
    """
    _tell(service, LATENT_ATTR, {"fields": json.dumps(dict(fields))})


def _tell(service: Service, path: str, form: Mapping[str, str]) -> None:
    last = path.rpartition("/")[2]
    for enqueue, _ in service.replicas:
        url = f"{enqueue.rstrip('/').rpartition('/')[0]}/{last}"
        try:
            response = httpx.post(
                url, data=dict(form), timeout=_FETCH_SECONDS, headers={"Authorization": f"Bearer {service.token}"}
            )
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise RewardError(f"the reward service at {url} is not there: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise RewardError(f"the reward service at {url} refuses us: {_reason(response)}")


@dataclass
class _Found:
    """What is known of one completion: of each function its score, or why there is none."""

    scores: dict[RewardFunctionConfig, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    error: str = ""
    is_told: bool = False
    """The service said that it cannot be scored, rather than nothing."""


class _Missing(Exception):
    """A request has no scores, and the reason."""


class RemoteRewards:
    """Score completions by the functions of a reward service.

    `beat` is called while it waits. `counts` has what happened so far: requests, those that were sent again
    (`resent`), pauses because the service was full (`throttled`), completions without a score (`missing`).
    """

    def __init__(
        self, config: RemoteRewardConfig, service: Service, *, beat: Callable[[], None] = lambda: None
    ) -> None:
        self._config, self._service, self._beat = config, service, beat
        self._busy = [0] * len(service.replicas)
        self.counts = dict.fromkeys(("requests", "resent", "throttled", "missing"), 0)

    def score_groups(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        """Return the groups, in order, each with one score per completion.

        Raises:
            RewardError: the service refuses us, or does not have what is asked for.
            StageFailed: a score is missing, and `missing_score` says that the stage fails then.
        """
        requests = [request_of(group, k) for group in groups for k in range(len(group.completions))]
        scores = iter(self.score(requests))
        by_group = [tuple(itertools.islice(scores, len(group.completions))) for group in groups]
        return [ScoredGroup(group, _all_or_none(each)) for group, each in zip(groups, by_group, strict=True)]

    def score(self, requests: Sequence[Mapping[str, Any]]) -> list[Score]:
        """Return one score per request, in order; a request has `prompt` and `media`, or `to_be_evaluated`.

        Raises:
            RewardError, StageFailed: see `score_groups`.
        """
        config, found = self._config, [_Found() for _ in requests]
        waiting, attempts = list(range(len(requests))), 1
        while waiting and attempts <= 1 + (config.retries if config.missing_score == "retry" else 0):
            if attempts > 1:
                self.counts["resent"] += len(waiting)
                log.warning(
                    "%d completions have no score (%s); they are sent again", len(waiting), found[waiting[0]].error
                )
            for i in waiting:
                found[i] = _Found()
            self._run(self._score_all([(requests[i], found[i]) for i in waiting]))
            waiting = [i for i in waiting if found[i].error]
            attempts += 1
        self.counts["missing"] += len(waiting)
        if waiting and config.missing_score == "fail":
            raise StageFailed(f"{len(waiting)} completions have no score: {found[waiting[0]].error}")
        return [self._total(each) for each in found]

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine in a thread of its own and say meanwhile that we are alive."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="remote rewards", daemon=True)
        thread.start()
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
        try:
            wait_for([future], math.inf, self._beat)
            future.result()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group
        finally:
            asyncio.run_coroutine_threadsafe(_cancelled(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def _total(self, found: _Found) -> Score:
        if found.error:
            return Score(None, found.metrics, found.error, found.is_told)
        total = sum(each.weight * min(max(score, each.clip_min), each.clip_max) for each, score in found.scores.items())
        total = min(max(total, self._config.reward_clip_min), self._config.reward_clip_max)
        return Score(self._config.scale * total, found.metrics)

    async def _score_all(self, items: Sequence[tuple[Mapping[str, Any], _Found]]) -> None:
        slots = asyncio.Semaphore(self._config.max_in_flight)
        headers = {"Authorization": f"Bearer {self._service.token}"}
        limits = httpx.Limits(max_connections=self._config.max_in_flight)
        async with (
            httpx.AsyncClient(headers=headers, limits=limits) as client,
            asyncio.TaskGroup() as tasks,
        ):
            for batch in _batches(items, self._config.batch_size):
                tasks.create_task(self._score_batch(client, slots, batch))

    async def _score_batch(
        self, client: httpx.AsyncClient, slots: asyncio.Semaphore, batch: Sequence[tuple[Mapping[str, Any], _Found]]
    ) -> None:
        async with slots:
            self.counts["requests"] += 1
            asked = _Asked(self, client, time.monotonic() + self._config.timeout_seconds)
            found = [found for _, found in batch]
            try:
                body = await asyncio.to_thread(_body, [request for request, _ in batch], self._config.reward_fns)
                results = await asked.results(body, list(dict.fromkeys(each.name for each in self._config.reward_fns)))
            except _Missing as error:
                for each in found:
                    each.error = str(error)
                return
            for function in self._config.reward_fns:
                _read(function, results[function.name], found)


class _Asked:
    """One request: enqueued at a replica, then fetched from it; anew elsewhere when that one has lost it."""

    def __init__(self, owner: RemoteRewards, client: httpx.AsyncClient, deadline: float) -> None:
        self._owner, self._client, self._deadline = owner, client, deadline
        self._service = owner._service
        self._replica = -1
        self._pin = ""
        self._pause = _FIRST_PAUSE

    async def results(self, body: bytes, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return what the service said for each function.

        Raises:
            _Missing: it did not by the deadline.
            RewardError: it never will.
        """
        key, results = str(uuid.uuid4()), dict[str, dict[str, Any]]()
        try:
            while len(results) < len(names):
                request_id = await self._enqueue(body, key)
                for name in names:
                    if name not in results and (said := await self._fetch(request_id, name)) is not None:
                        results[name] = said
        finally:
            self._leave()
        return results

    async def _enqueue(self, body: bytes, key: str) -> str:
        seconds = min(max(_LEAST_SECONDS + _SECONDS_PER_MIB * len(body) / 2**20, _BOUNDS[0]), _BOUNDS[1])
        headers = {"Content-Type": "application/octet-stream", IDEMPOTENCY_KEY: key}
        while True:
            url = self._choose()
            response = await self._post(url, seconds, content=body, headers=headers)
            if response is None:
                self._leave()
                continue
            if response.status_code == 200:
                said = _object(response)
                self._pin, self._pause = str(said.get("replica_id") or ""), _FIRST_PAUSE
                if isinstance(said.get("uuid"), str):
                    return str(said["uuid"])
            if response.status_code in _REFUSED:
                raise RewardError(f"the reward service at {url} refuses a request: {_reason(response)}")
            await self._wait(response, f"the reward service at {url} does not take the request: {_reason(response)}")

    async def _fetch(self, request_id: str, name: str) -> dict[str, Any] | None:
        """Return what the service says of one function; None: it has lost the request."""
        headers = {PIN: self._pin} if self._pin and self._service.pins else {}
        url = self._service.replicas[self._replica][1]
        self._pause, misses = _FIRST_PAUSE, 0
        while True:
            response = await self._post(url, _FETCH_SECONDS, data={"uuid": request_id, "type": name}, headers=headers)
            if response is None:
                misses += 1
                if misses >= _MOST_MISSES and len(self._service.replicas) > 1:
                    self._leave()
                    return None
                continue
            if response.status_code == 200:
                return _object(response)
            if response.status_code in {401, 403}:
                raise RewardError(f"the reward service at {url} refuses us: {_reason(response)}; set {TOKEN}")
            if response.headers.get(STATE) == "unknown":
                self._leave()
                return None
            await self._wait(response, f"no score of {name!r} after {self._owner._config.timeout_seconds:g} s")

    async def _post(self, url: str, seconds: float, **content: Any) -> httpx.Response | None:
        """Return a response; None: there was none, and time has passed."""
        try:
            return await self._client.post(url, timeout=max(0.1, min(seconds, self._left())), **content)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            await self._wait(
                None, f"the reward service at {url} is not there: {type(error).__name__}: {error}".rstrip(": ")
            )
            return None

    def _choose(self) -> str:
        """Take the replica with the fewest requests of ours, any of those."""
        busy = self._owner._busy
        if self._replica < 0:
            self._replica = min(range(len(busy)), key=lambda i: (busy[i], random.random()))
            busy[self._replica] += 1
        return self._service.replicas[self._replica][0]

    def _leave(self) -> None:
        """Be free to choose another replica for the next enqueue."""
        if self._replica >= 0 and len(self._service.replicas) > 1:
            self._owner._busy[self._replica] -= 1
            self._replica = -1

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    async def _wait(self, response: httpx.Response | None, reason: str) -> None:
        """Pause, longer each time and never for the same time as others.

        Raises:
            _Missing: the deadline has passed.
        """
        pause = self._pause * random.uniform(0.5, 1.5)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        if response is not None and response.status_code == 429:
            self._owner.counts["throttled"] += 1
        after = response.headers.get("Retry-After", "") if response is not None else ""
        if after.isascii() and after.isdigit():
            pause = max(pause, min(float(after), 30.0) * random.uniform(1.0, 1.25))
        if self._left() <= pause:
            raise _Missing(reason)
        await asyncio.sleep(pause)


async def _cancelled() -> None:
    """End what else runs in this loop."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _batches(items: Sequence[Any], size: int) -> list[list[Any]]:
    """Return the items, those of one shape together, at most `size` each."""
    by_shape: dict[Any, list[Any]] = {}
    for item in items:
        media = item[0].get("media")
        is_video = isinstance(media, np.ndarray)
        shape = None if media is None else ("video", media.shape) if is_video else ("image", media.size)
        by_shape.setdefault(shape, []).append(item)
    return [same[i : i + size] for same in by_shape.values() for i in range(0, len(same), size)]


def _body(requests: Sequence[Mapping[str, Any]], functions: Sequence[RewardFunctionConfig]) -> bytes:
    """Return the body of an enqueue: images as uint8 of B, H, W, C, videos of B, C, T, H, W, texts within the JSON."""
    media = [request.get("media") for request in requests]
    # A weight that is not above 0 would mean to the service that the function is not asked for.
    weights = {each.name: each.weight if each.weight > 0 else 1.0 for each in functions}
    fields: dict[str, Any] = {"prompts": [request.get("prompt") or "" for request in requests], "reward_fn": weights}
    if media[0] is None:
        array = np.zeros((len(media), 0), np.uint8)
        fields |= {"media_type": "text", "completions": [request["to_be_evaluated"] for request in requests]}
        for name in ("num_tokens", "finish_reason", "turns"):
            if any(name in request for request in requests):
                fields[name] = [request.get(name) for request in requests]
    elif isinstance(media[0], np.ndarray):
        array = np.stack([np.moveaxis(each, -1, 0) for each in media])  # type: ignore[arg-type]
        rates = [(request.get("metadata") or {}).get("video_fps", _FPS) for request in requests]
        fields |= {"video_infos": [{"video_fps": rate} for rate in rates], "media_type": "video"}
    else:
        array = np.stack([np.asarray(each.convert("RGB")) for each in media])  # type: ignore[union-attr]
        fields["media_type"] = "image"
    if any(request.get("reference") for request in requests):
        fields["references"] = [request.get("reference") or "" for request in requests]
    return encode_request(fields | _geneval(requests), array)


def _geneval(requests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what rows of GenEval say of the objects in their images, as its reward wants it."""
    rows = [request.get("metadata") or {} for request in requests]
    if not all("include" in row and "tag" in row for row in rows):
        return {"metadata": rows} if any(rows) else {}
    fields = {"geneval_tags": [row["tag"] for row in rows], "geneval_includes": [row["include"] for row in rows]}
    if any("exclude" in row for row in rows):
        fields["geneval_excludes"] = [row.get("exclude", []) for row in rows]
    return fields


def _read(function: RewardFunctionConfig, said: Mapping[str, Any], found: Sequence[_Found]) -> None:
    """Note what a response says of each completion.

    Raises:
        RewardError: it has no score of the key that is asked for.
    """
    scores, errors = said.get("scores"), said.get("errors")
    if not isinstance(scores, dict):
        reason = f"{function.name}: {said.get('error') or 'the response has no scores'}"
        for each in found:
            each.error, each.is_told = each.error or reason, bool(said.get("error"))
        return
    key = function.score_key or function.name
    keys = [key] if key in scores else [part.strip() for part in key.split("+") if part.strip()]
    if not keys or (unknown := [part for part in keys if part not in scores]):
        raise RewardError(
            f"remote_reward.reward_fns: {function.name!r} returns no {', '.join(map(repr, unknown or [key]))}; set "
            f"score_key to one of {', '.join(sorted(scores))}, or to several with +"
        )
    for i, each in enumerate(found):
        values = [_number(scores[part], i, len(found)) for part in keys]
        for name, value in ((name, _number(scores[name], i, len(found))) for name in scores):
            if value is not None and (name != function.name):
                each.metrics[f"{function.name}/{name}"] = value
        if None in values:
            reason = errors[i] if isinstance(errors, list) and len(errors) == len(found) and errors[i] else ""
            each.error = each.error or f"{function.name}: {reason or 'the response has no number for it'}"
            each.is_told = True
            continue
        each.scores[function] = each.metrics[function.name] = math.fsum(v for v in values if v is not None)


def _number(column: Any, i: int, count: int) -> float | None:
    """Return a finite number of a list with one for each completion; None: it is no such."""
    value = column[i] if isinstance(column, list) and len(column) == count else None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]


def _all_or_none(scores: tuple[Score, ...]) -> tuple[Score, ...]:
    """Return the scores of a group, all invalid where one is: what is left would be compared with too few."""
    first = next((score for score in scores if score.value is None), None)
    if first is None:
        return scores
    return tuple(
        score if score.value is None else replace(score, value=None, error=f"its group is dropped: {first.error}")
        for score in scores
    )


def _object(response: httpx.Response) -> dict[str, Any]:
    try:
        said = response.json()
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _reason(response: httpx.Response) -> str:
    said = _object(response)
    text = str(said.get("message") or said.get("detail") or response.text)
    return " ".join(f"status {response.status_code}: {text}".split())[:300]
