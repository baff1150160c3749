"""Exchange of one request with a reward service: enqueue it at a replica, again if it is lost, and fetch the scores.

The content of requests and the use of scores are in `remote.py`, the wire format is in `protocol.py`.
"""

import asyncio
import json
import os
import random
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx

from cosmos_core.environment import make_tls_verify
from cosmos_core.errors import RewardError
from cosmos_core.rewards.protocol import IDEMPOTENCY_HEADER, PING_PATH, REPLICA_HEADER, REQUEST_STATE_HEADER

ENQUEUE_URL_VARIABLE = "REMOTE_REWARD_ENQUEUE_URL"
FETCH_URL_VARIABLE = "REMOTE_REWARD_FETCH_URL"
TOKEN_VARIABLE = "REMOTE_REWARD_TOKEN"
DISABLE_REPLICA_PINNING_VARIABLE = "COSMOS_DISABLE_REMOTE_REWARD_USE_REPLICA"

_MIN_RETRY_PAUSE_SECONDS, _MAX_RETRY_PAUSE_SECONDS = 0.05, 1.0
_MAX_FAILED_FETCHES = 5
"""Maximum number of consecutive fetches without a response, after which a request moves to another replica."""
_ENQUEUE_BASE_TIMEOUT_SECONDS, _ENQUEUE_SECONDS_PER_MIB, _ENQUEUE_TIMEOUT_BOUNDS = 30.0, 3.0, (60.0, 600.0)
_FETCH_TIMEOUT_SECONDS = 30.0
_ENQUEUE_REFUSAL_CODES = {400, 401, 403, 404, 405, 411, 413, 415, 422}
"""HTTP status codes with which a service refuses an enqueue permanently, so that a retry cannot help."""
_FETCH_REFUSAL_CODES = _ENQUEUE_REFUSAL_CODES - {400}
"""HTTP status codes with which a service refuses a fetch permanently. They do not include 400, which means that the
scores are not ready yet."""
_REPLICA_COOLDOWN_SECONDS = 5.0
"""Seconds for which a failed replica gets no new requests, unless the `Retry-After` header of its response has another
number."""


@dataclass(frozen=True)
class ServiceEndpoints:
    """URLs of the replicas of a reward service, and the credentials for the replicas."""

    replica_urls: tuple[tuple[str, str], ...]
    """Pairs of the enqueue URL and the fetch URL of each replica."""
    token: str = ""
    pins_replica: bool = True
    """Whether each fetch of scores names, in an HTTP header, the replica that accepted the request and therefore has
    the scores."""

    @property
    def auth_headers(self) -> dict[str, str]:
        """Return the HTTP headers that authenticate requests at the reward service; empty without a token."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}


def read_service_endpoints(environment_variables: Mapping[str, str] = os.environ) -> ServiceEndpoints:
    """Return the endpoints of the reward service, read from environment variables with comma-separated URLs. Raise
    `RewardError` if a URL is missing or invalid, if the token is invalid, or if the numbers of enqueue URLs and fetch
    URLs differ."""
    enqueue_urls, fetch_urls = (
        [url for url_entry in environment_variables.get(name, "").split(",") if (url := url_entry.strip())]
        for name in (ENQUEUE_URL_VARIABLE, FETCH_URL_VARIABLE)
    )
    if not enqueue_urls or not fetch_urls:
        raise RewardError(
            f"train.train_policy.use_remote_reward = true: set {ENQUEUE_URL_VARIABLE} and {FETCH_URL_VARIABLE} in the "
            f"environment, and {TOKEN_VARIABLE} where the service asks for one"
        )
    if len(enqueue_urls) != len(fetch_urls):
        raise RewardError(
            f"{ENQUEUE_URL_VARIABLE} has {len(enqueue_urls)} URLs and {FETCH_URL_VARIABLE} {len(fetch_urls)}; give one "
            f"of each a replica"
        )
    replica_urls = tuple(
        (_normalise_url(ENQUEUE_URL_VARIABLE, enqueue_url), _normalise_url(FETCH_URL_VARIABLE, fetch_url))
        for enqueue_url, fetch_url in zip(enqueue_urls, fetch_urls, strict=True)
    )
    pins_replica = environment_variables.get(DISABLE_REPLICA_PINNING_VARIABLE, "0") != "1"
    bearer_token = environment_variables.get(TOKEN_VARIABLE, "").strip()  # a token from a file may end with a newline
    if not (bearer_token.isascii() and bearer_token.isprintable()):
        raise RewardError(f"the token in {TOKEN_VARIABLE} must be printable ASCII")
    return ServiceEndpoints(replica_urls, bearer_token, pins_replica)


def _normalise_url(variable_name: str, url: str) -> str:
    """Return a URL without trailing slashes. Raise `RewardError` if the URL, which is in the environment variable
    `variable_name`, is invalid or has no path."""
    try:
        url_parts = urlsplit(url)
        is_valid_url = url_parts.scheme in {"http", "https"} and bool(url_parts.hostname) and url_parts.port != 0
    except ValueError:
        is_valid_url = False
    if not is_valid_url:
        raise RewardError(f"{url!r} is no URL of a reward service; it begins with http:// or https:// and a host")
    if not (path := url_parts.path.rstrip("/")):
        raise RewardError(f"{variable_name} = {url!r} has no path; the rule is http://HOST:PORT/api/reward/...")
    return urlunsplit(url_parts._replace(path=path, fragment=""))


def ping(endpoints: ServiceEndpoints, reward_names: Sequence[str]) -> None:
    """Raise `RewardError` if a replica of the reward service does not respond, refuses the token, or does not serve a
    reward of `reward_names`."""
    form_data = {"info_data": json.dumps({"reward_fn": dict.fromkeys(reward_names, 1.0)})}
    ping_route, tls_context = PING_PATH.rpartition("/")[2], make_tls_verify()
    for enqueue_url, _ in endpoints.replica_urls:
        url_parts = urlsplit(enqueue_url)
        url = urlunsplit(url_parts._replace(path=f"{url_parts.path.rpartition('/')[0]}/{ping_route}"))
        try:
            response = httpx.post(
                url, data=form_data, timeout=_FETCH_TIMEOUT_SECONDS, headers=endpoints.auth_headers, verify=tls_context
            )
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise RewardError(f"the reward service at {url} is not there: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise RewardError(f"the reward service at {url} refuses us: {_describe_response(response)}")


@dataclass
class ReplicaState:
    """State of the replicas of a reward service, shared by the concurrent requests of one client."""

    pending_request_counts: list[int]
    """Number of pending requests at each replica."""
    cooldown_end_by_replica: dict[int, float] = field(default_factory=dict)
    """Monotonic time in seconds until which a failed replica is avoided, by the index of the replica."""

    def get_cooldown_seconds(self, replica_index: int) -> float:
        """Return the seconds for which a failed replica is still avoided; 0 if the replica is not avoided."""
        return max(0.0, self.cooldown_end_by_replica.get(replica_index, 0.0) - time.monotonic())


class MissingScoresError(Exception):
    """Error for a request without scores at its deadline; the message is the reason."""


class ServiceRequest:
    """Request to a reward service, enqueued again whenever the service has lost it, until its scores are fetched."""

    def __init__(
        self, endpoints: ServiceEndpoints, client: httpx.AsyncClient, timeout_seconds: float, replicas: ReplicaState
    ) -> None:
        self._endpoints, self._http_client, self._replica_state = endpoints, client, replicas
        self._timeout_seconds, self._deadline = timeout_seconds, time.monotonic() + timeout_seconds
        self._last_failure_reason = ""
        self._replica_index, self._pinned_replica_id = -1, ""
        self._retry_pause_seconds = _MIN_RETRY_PAUSE_SECONDS

    async def fetch_results(self, request_body: bytes, reward_names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Send the request and return the service's response for each reward of `reward_names`. A response that is
        missing at the deadline is replaced by a dict with the key `error`. Raise `MissingScoresError` if all responses
        are missing, and `RewardError` if the service refuses a request."""
        idempotency_key, result_by_reward = str(uuid.uuid4()), dict[str, dict[str, Any]]()
        enqueue_pause_seconds = _MIN_RETRY_PAUSE_SECONDS
        try:
            while True:
                request_id = await self._enqueue(request_body, idempotency_key)
                for reward_name in (reward_name for reward_name in reward_names if reward_name not in result_by_reward):
                    if (response := await self._fetch_score(request_id, reward_name)) is None:
                        break  # the service lost the request: enqueue it again
                    result_by_reward[reward_name] = response
                if len(result_by_reward) == len(reward_names):
                    return result_by_reward
                self._retry_pause_seconds, enqueue_pause_seconds = enqueue_pause_seconds, 2 * enqueue_pause_seconds
                await self._pause_before_retry(None, "the reward service forgets each request that it takes")
        except MissingScoresError as error:
            if not result_by_reward:
                raise
            return {name: {"error": str(error), "is_lost": True} for name in reward_names} | result_by_reward
        finally:
            self._release_replica()

    async def _enqueue(self, request_body: bytes, idempotency_key: str) -> str:
        timeout_seconds = _ENQUEUE_BASE_TIMEOUT_SECONDS + _ENQUEUE_SECONDS_PER_MIB * len(request_body) / 2**20
        timeout_seconds = min(max(timeout_seconds, _ENQUEUE_TIMEOUT_BOUNDS[0]), _ENQUEUE_TIMEOUT_BOUNDS[1])
        request_headers = {"Content-Type": "application/octet-stream", IDEMPOTENCY_HEADER: idempotency_key}
        while True:
            if self._replica_index < 0:  # choose a working replica with few requests
                replica_state = self._replica_state
                replica_sort_keys = [
                    (replica_state.get_cooldown_seconds(i), num_pending, random.random(), i)
                    for i, num_pending in enumerate(replica_state.pending_request_counts)
                ]
                self._replica_index = min(replica_sort_keys)[-1]
                replica_state.pending_request_counts[self._replica_index] += 1
            url = self._endpoints.replica_urls[self._replica_index][0]
            response = await self._try_post(url, timeout_seconds, content=request_body, headers=request_headers)
            if response is None:
                continue
            if response.status_code == 200:
                response_fields = _parse_json_object(response)
                replica_id = str(response_fields.get("replica_id") or "")
                self._pinned_replica_id = replica_id if replica_id.isascii() and replica_id.isprintable() else ""
                if isinstance(response_fields.get("uuid"), str):
                    return str(response_fields["uuid"])
            if response.status_code in _ENQUEUE_REFUSAL_CODES or response.is_redirect:
                raise RewardError(f"the reward service at {url} refuses a request: {_describe_response(response)}")
            self._mark_replica_failed(_retry_after_seconds(response))
            if all(self._replica_state.get_cooldown_seconds(i) for i in range(len(self._endpoints.replica_urls))):
                failure_text = f"the reward service at {url} does not take the request: {_describe_response(response)}"
                await self._pause_before_retry(response, failure_text)

    async def _fetch_score(self, request_id: str, reward: str) -> dict[str, Any] | None:
        """Return the response of the service for one reward function. None: the request must be enqueued again, because
        the service has lost it or its replica does not respond."""
        uses_pinned_replica = self._pinned_replica_id and self._endpoints.pins_replica
        request_headers = {REPLICA_HEADER: self._pinned_replica_id} if uses_pinned_replica else {}
        url = self._endpoints.replica_urls[self._replica_index][1]
        self._retry_pause_seconds, num_failed_fetches = _MIN_RETRY_PAUSE_SECONDS, 0
        form_data = {"uuid": request_id, "type": reward}
        while True:
            response = await self._try_post(url, _FETCH_TIMEOUT_SECONDS, data=form_data, headers=request_headers)
            if response is None:
                num_failed_fetches += 1
                if num_failed_fetches >= _MAX_FAILED_FETCHES and len(self._endpoints.replica_urls) > 1:
                    self._mark_replica_failed()
                    return None
                continue
            response_fields = _parse_json_object(response) if response.status_code == 200 else {}
            if {"scores", "error"} & response_fields.keys():  # otherwise, a proxy may have responded
                self._replica_state.cooldown_end_by_replica.pop(self._replica_index, None)
                self._last_failure_reason = ""
                return response_fields
            response_text = _describe_response(response)
            if response.status_code in {401, 403}:
                raise RewardError(f"the reward service at {url} refuses us: {response_text}")
            if response.status_code in _FETCH_REFUSAL_CODES or response.is_redirect:
                raise RewardError(f"{url} is no URL to fetch scores from: {response_text}; set {FETCH_URL_VARIABLE}")
            if response.headers.get(REQUEST_STATE_HEADER) == "unknown":
                self._release_replica()
                return None
            failure_reason = f"no score of {reward!r} after {self._timeout_seconds:g} s"
            failure_reason += "" if response.status_code == 400 else f"; the last response: {response_text}"
            await self._pause_before_retry(response, failure_reason)

    async def _try_post(self, url: str, timeout_seconds: float, **post_arguments: Any) -> httpx.Response | None:
        """Post a request and return the response. If the service does not respond, pause and return None, so that the
        caller retries."""
        seconds_left = max(0.1, self._deadline - time.monotonic())
        try:
            # The timeout of httpx restarts with each received byte, so asyncio limits the whole exchange.
            async with asyncio.timeout(seconds_left):
                return await self._http_client.post(url, timeout=min(timeout_seconds, seconds_left), **post_arguments)
        except (httpx.RequestError, httpx.InvalidURL) as error:
            failure_reason = f"the reward service at {url} is not there: {type(error).__name__}: {error}".rstrip(": ")
        except TimeoutError:
            failure_reason = f"gives no whole response within {seconds_left:.3g} s"
            # Also name the failure before, because the deadline may have left this attempt little time.
            previous_failure_text = f"{self._last_failure_reason}; then it" if self._last_failure_reason else ""
            failure_reason = f"{previous_failure_text or f'the reward service at {url}'} {failure_reason}"
        if "content" in post_arguments:
            self._mark_replica_failed()
        await self._pause_before_retry(None, failure_reason)
        return None

    def _mark_replica_failed(self, cooldown_seconds: float = 0.0) -> None:
        cooldown_end_time = time.monotonic() + (cooldown_seconds or _REPLICA_COOLDOWN_SECONDS)
        self._replica_state.cooldown_end_by_replica[self._replica_index] = cooldown_end_time
        self._release_replica()

    def _release_replica(self) -> None:
        if self._replica_index >= 0 and len(self._endpoints.replica_urls) > 1:
            self._replica_state.pending_request_counts[self._replica_index] -= 1
            self._replica_index = -1

    async def _pause_before_retry(self, response: httpx.Response | None, failure_reason: str) -> None:
        """Pause with exponential backoff and jitter, at least for the `Retry-After` of the response. Raise
        `MissingScoresError` with the message `failure_reason` if the deadline is before the end of the pause."""
        pause_seconds = self._retry_pause_seconds * random.uniform(0.5, 1.5)
        self._retry_pause_seconds = min(2 * self._retry_pause_seconds, _MAX_RETRY_PAUSE_SECONDS)
        if response is not None:
            pause_seconds = max(pause_seconds, _retry_after_seconds(response) * random.uniform(1.0, 1.25))
        if self._deadline - time.monotonic() <= pause_seconds:
            raise MissingScoresError(failure_reason)
        self._last_failure_reason = failure_reason
        await asyncio.sleep(pause_seconds)


def _retry_after_seconds(response: httpx.Response) -> float:
    """Return the seconds in the `Retry-After` header of a response, at most 30; 0 without the header."""
    retry_after = response.headers.get("Retry-After", "")
    return min(float(retry_after), 30.0) if retry_after.isascii() and retry_after.isdigit() else 0.0


def _parse_json_object(response: httpx.Response) -> dict[str, Any]:
    try:
        json_content = response.json()
    except (ValueError, RecursionError):
        return {}
    return json_content if isinstance(json_content, dict) else {}


def _describe_response(response: httpx.Response) -> str:
    response_fields = _parse_json_object(response)
    message_text = str(response_fields.get("message") or response_fields.get("detail") or response.text)
    if response.is_redirect:
        message_text = f"it redirects to {response.headers.get('Location', 'nowhere')}, where no token is sent"
    remedy_text = f"; set {TOKEN_VARIABLE} to its token" if response.status_code in {401, 403} else ""
    return " ".join(f"status {response.status_code}: {message_text}".split())[:300] + remedy_text
