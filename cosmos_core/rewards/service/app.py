"""HTTP interface of the reward service: Cosmos-RL's protocol, health, metrics and a status page.

Checks run in a fixed order to limit the load: authentication, size, capacity, and only then the body.
"""

import asyncio
import base64
import binascii
import hmac
import json
import logging
import re
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from cosmos_core.error_handling import convert_errors
from cosmos_core.rewards import protocol
from cosmos_core.rewards.protocol import IDEMPOTENCY_HEADER, REQUEST_STATE_HEADER, ProtocolError
from cosmos_core.rewards.service import page
from cosmos_core.rewards.service.connection import RefusalResponse
from cosmos_core.rewards.service.engine import CapacityExceededError, Engine, ShutdownError

_MAX_FORM_BYTES = 2**20
_BODY_TIMEOUT_SECONDS = 120.0
_BODY_READ_SCOPE_KEY = "cosmos.is_read"
"""Key that the reward service sets in the ASGI scope of a request after it has read the body to the end."""
_UUID_PATTERN = re.compile(r"[0-9a-fA-F-]{1,64}")
_REWARD_NAME_PATTERN = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_METRIC_DESCRIPTIONS: dict[Any, dict[str, str]] = {
    GaugeMetricFamily: {
        "queue": "Requests that wait", "in_flight": "Requests being scored", "ready": "Processes that are ready",
    },
    CounterMetricFamily: {
        "items": "Items scored", "errors": "Items without a score", "batches": "Batches scored",
        "restarts": "Processes replaced", "retried": "Requests whose process was lost", "seconds": "Seconds of scoring",
    },
}  # fmt: skip
log = logging.getLogger(__name__)

RouteHandler = Callable[[Request], Awaitable[Response]]


class HttpInterface:
    """HTTP routes of the reward service; with an empty `token`, requests need no authentication."""

    def __init__(self, engine: Engine, token: str) -> None:
        self.engine, self._token = engine, token.encode()
        self.response_counts: Counter[tuple[str, int]] = Counter()
        self.metric_registry = CollectorRegistry()
        self.metric_registry.register(self)

    def build_app(self) -> FastAPI:
        """Return the FastAPI application with all routes of the service."""
        fastapi_app = FastAPI(title="Reward service", docs_url=None, redoc_url=None, openapi_url=None)
        for method, path, handler in (
            ("POST", protocol.ENQUEUE_PATH, self.enqueue), ("POST", protocol.PULL_PATH, self.pull),
            ("POST", protocol.PING_PATH, self.ping), ("POST", protocol.LATENT_ATTRIBUTES_PATH, self.latent_attr),
            ("GET", "/metrics", self.metrics), ("GET", "/", self.status_page),
        ):  # fmt: skip
            fastapi_app.add_route(path, self._wrap_handler(handler), methods=[method])
        fastapi_app.add_route("/health", self.health, methods=["GET"])
        return fastapi_app

    async def enqueue(self, request: Request) -> Response:
        """Accept a request to score a batch, and return the uuid under which its scores can be fetched."""
        idempotency_key = request.headers.get(IDEMPOTENCY_HEADER, "")
        if idempotency_key and not _is_uuid(idempotency_key):
            raise ProtocolError(
                f"{IDEMPOTENCY_HEADER} must be a uuid, drawn for each request: clients share the service"
            )
        if not self.engine.is_ready:
            return _refuse(503, "the rewards are loading", retry_after=2)
        num_body_bytes = _parse_content_length(request, self.engine.config.max_body_bytes)
        request_id = idempotency_key.lower() or str(uuid.uuid4())
        with self.engine.reserve_capacity(num_body_bytes):
            await self.engine.accept_request(request_id, await _read_body(request, num_body_bytes))
        replica_field = {"replica_id": self.engine.replica_id} if self.engine.replica_id else {}
        return JSONResponse({"uuid": request_id} | replica_field)

    async def pull(self, request: Request) -> Response:
        """Return the scores of one reward for an accepted request, or status 400 if they are not ready."""
        form_fields = await _read_form(request)
        key, reward_name = form_fields.get("uuid", ""), form_fields.get("type", "")
        if reward_name and not _REWARD_NAME_PATTERN.fullmatch(reward_name):
            return _refuse(422, "type must be the name of a reward")
        if not _UUID_PATTERN.fullmatch(key):
            return JSONResponse(
                {"message": f"Not found scores for {key[:64]}"}, 400, headers={REQUEST_STATE_HEADER: "unknown"}
            )
        key = key.lower()
        if not reward_name and (pending_request := self.engine.pending_requests.get(key)):
            reward_name = pending_request.reward_names[0]
        scores_json = await self.engine.store.get(key, reward_name) if reward_name else None
        if scores_json is not None:
            return Response(scores_json, media_type="application/json")
        is_known_request = key in self.engine.pending_requests or await self.engine.store.has_request(key)
        request_state = "pending" if is_known_request else "unknown"
        return JSONResponse(
            {"message": f"Not found scores for {key}"}, 400, headers={REQUEST_STATE_HEADER: request_state}
        )

    async def ping(self, request: Request) -> Response:
        """Return status 200 if the service serves the rewards that the field `info_data` names, otherwise 422."""
        form_fields = await _read_form(request)
        try:
            ping_fields = json.loads(form_fields.get("info_data") or "{}")
        except (ValueError, RecursionError):
            return _refuse(422, "info_data must be JSON")
        weights = ping_fields.get("reward_fn") if isinstance(ping_fields, dict) else None
        unknown_names = [name for name in weights if name not in self.engine.pools] if isinstance(weights, dict) else []
        if unknown_names:
            served_rewards = ", ".join(self.engine.pools)
            return _refuse(422, f"not served here: {', '.join(unknown_names)[:200]}; there is {served_rewards}")
        return JSONResponse({"message": "Ping request received"})

    async def latent_attr(self, request: Request) -> Response:
        """Return status 200 if the service can decode latents with the attributes in the request, otherwise 400; 422 if
        the attributes are no JSON object."""
        form_fields, latent_attributes = await _read_form(request), None
        with suppress(ValueError, RecursionError):
            latent_attributes = json.loads(form_fields.get("fields", ""))
        if not isinstance(latent_attributes, dict):
            return _refuse(422, "fields must be a JSON object")
        self.engine.check_latent_attributes(latent_attributes)
        return JSONResponse({"message": "Latent attributes set successfully"})

    async def health(self, request: Request) -> Response:
        """Return the state of the service for probes, without authentication and without details."""
        num_ready_by_reward = {name: pool.num_ready_processes for name, pool in self.engine.pools.items()}
        serving_state = "ok" if all(num_ready_by_reward.values()) else "degraded"
        service_state = "draining" if self.engine.is_draining else serving_state if self.engine.is_ready else "loading"
        num_pending_requests = len(self.engine.pending_requests)
        health_report = {"status": service_state, "rewards": num_ready_by_reward, "pending": num_pending_requests}
        return JSONResponse(health_report, 200 if service_state in {"ok", "degraded"} else 503)

    async def metrics(self, request: Request) -> Response:
        """Return the metrics of the reward service in Prometheus' text format."""
        return PlainTextResponse(generate_latest(self.metric_registry), media_type="text/plain; version=0.0.4")

    async def status_page(self, request: Request) -> Response:
        """Return an HTML page with the state of the service."""
        return HTMLResponse(page.render_page(self.engine, self.response_counts), headers=page.RESPONSE_HEADERS)

    def collect(self) -> Any:
        """Yield the metrics of the reward service; prometheus_client calls this method."""
        engine = self.engine
        metric_values_by_reward = {
            reward: {"queue": len(pool.queue), "in_flight": pool.num_jobs_in_flight, "ready": pool.num_ready_processes}
            | vars(pool.counters)
            for reward, pool in engine.pools.items()
        }
        for family, metric_descriptions in _METRIC_DESCRIPTIONS.items():
            for name, description in metric_descriptions.items():
                metric_family = family(f"reward_{name}", description, labels=["reward"])
                for reward, metric_values in metric_values_by_reward.items():
                    metric_family.add_metric([reward], metric_values[name])
                yield metric_family
        num_waiting_bytes = engine.pending_bytes + engine.decoded_bytes
        yield GaugeMetricFamily("reward_pending_bytes", "Bytes of requests that wait", num_waiting_bytes)
        yield CounterMetricFamily("reward_accepted", "Requests accepted", engine.num_accepted_requests)
        response_metric = CounterMetricFamily("reward_responses", "Responses", labels=["path", "status"])
        for (path, http_status), count in self.response_counts.items():
            response_metric.add_metric([path, str(http_status)], count)
        yield response_metric

    def _wrap_handler(self, handler: RouteHandler) -> RouteHandler:
        """Return a handler of an HTTP route that first authenticates the request, then calls `handler`, and turns
        errors into a response of one line."""

        async def authenticated_handler(request: Request) -> Response:
            try:
                response = await handler(request) if self._is_authenticated(request) else _respond_unauthorized(request)
            except ProtocolError as error:
                response = _refuse(400, str(error))
            except HTTPException as error:
                response = _refuse(error.status_code, str(error.detail))
            except CapacityExceededError as error:
                response = _refuse(429, str(error), retry_after=error.retry_seconds)
            except ShutdownError:
                response = _refuse(503, "the service ends; ask another", retry_after=5)
            except ClientDisconnect:
                response = _refuse(400, "the body ended early")
            except Exception as error:
                log.exception("a request failed")
                response = _refuse(503, f"{type(error).__name__}; it is in the log", retry_after=2)
            self.response_counts[request.url.path, response.status_code] += 1
            has_unread_body = response.status_code >= 400 and not request.scope.get(_BODY_READ_SCOPE_KEY)
            return RefusalResponse(response) if has_unread_body else response

        return authenticated_handler

    def _is_authenticated(self, request: Request) -> bool:
        """Return True if the request has the token of the service, or the service needs none; the comparison takes
        constant time."""
        if not self._token:
            return True
        auth_scheme, _, auth_credentials = request.headers.get("Authorization", "").partition(" ")
        token_bytes = auth_credentials.strip().encode("utf-8", "replace")
        if auth_scheme.lower() == "basic" and request.method == "GET":  # browsers send HTTP Basic for the status page
            try:
                token_bytes = base64.b64decode(token_bytes, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif auth_scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(token_bytes, self._token)


def _respond_unauthorized(request: Request) -> Response:
    auth_scheme = "Basic" if request.method == "GET" else "Bearer"
    response = _refuse(401, "a bearer token is needed")
    response.headers["WWW-Authenticate"] = f'{auth_scheme} realm="rewards"'
    return response


def _refuse(http_status: int, message: str, retry_after: int = 0) -> Response:
    headers = {"Retry-After": str(retry_after)} if retry_after else {}
    if http_status not in {429, 503}:
        headers["Connection"] = "close"  # close the connection, so that the unread body is not parsed as a new request
    return JSONResponse({"message": message}, http_status, headers=headers)


def _is_uuid(uuid_text: str) -> bool:
    """Return True if a text is a uuid of the variant in RFC 9562; simple patterns such as all zeros are not."""
    try:
        return str(parsed_uuid := uuid.UUID(uuid_text)) == uuid_text.lower() and parsed_uuid.variant == uuid.RFC_4122
    except ValueError:
        return False


def _parse_content_length(request: Request, max_bytes: int) -> int:
    """Return the `Content-Length` of a request; raise `HTTPException` if it is missing or above `max_bytes`."""
    length_text = request.headers.get("Content-Length", "")
    if not (length_text.isascii() and length_text.isdigit()) or len(length_text) > 18:
        raise HTTPException(411, "a Content-Length is needed")
    if (num_bytes := int(length_text)) > max_bytes:
        raise HTTPException(413, f"the body has {num_bytes} bytes; at most {max_bytes} are read (max_body_bytes)")
    return num_bytes


async def _read_body(request: Request, content_length: int) -> bytearray:
    """Return the body of a request. Raise `ClientDisconnect` if it is incomplete, and `HTTPException` if it is longer
    than `content_length` or arrives too late."""
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_SECONDS + content_length / 2**20):
            async for body_chunk in request.stream():
                body += body_chunk
                if len(body) > content_length:
                    raise HTTPException(400, "the body is longer than its Content-Length")
    except TimeoutError as error:
        raise HTTPException(408, "the body does not come") from error
    request.scope[_BODY_READ_SCOPE_KEY] = True
    if len(body) != content_length:
        raise ClientDisconnect
    return body


async def _read_form(request: Request) -> dict[str, str]:
    """Return the text fields of the form in a request's body; raise `HTTPException` if the body is no form, or is too
    large."""
    form_body = await _read_body(request, _parse_content_length(request, _MAX_FORM_BYTES))

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": bytes(form_body), "more_body": False}

    with convert_errors(lambda error: HTTPException(400, f"no form: {type(error).__name__}"), HTTPException):
        form = await Request(request.scope, receive).form(max_files=0, max_fields=16, max_part_size=_MAX_FORM_BYTES)
    return {key: value for key, value in form.items() if isinstance(value, str)}
