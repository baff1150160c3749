"""Core of the reward service: acceptance, decoding and scoring of requests, and storage of their results.

A request is accepted when it is in the store. From then on, exactly one result is stored for each of its rewards, even
if processes die, and with Redis even if the service dies. HTTP is in `app.py`, processes are in `pool.py`.
"""

import asyncio
import contextlib
import json
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

from cosmos_core.error_handling import cleanup_on_error
from cosmos_core.errors import RewardError, StageFailed
from cosmos_core.rewards.base import error_on_one_line
from cosmos_core.rewards.protocol import ProtocolError
from cosmos_core.rewards.service.config import RewardArgs, ServiceConfig
from cosmos_core.rewards.service.pool import ProcessError, ProcessSettings, RewardJob, RewardPool
from cosmos_core.rewards.service.request import ScoreRequest, parse_request
from cosmos_core.rewards.service.store import MemoryStore, RedisStore, Store

log = logging.getLogger(__name__)
QUEUE_OWNER_VARIABLE = "COSMOS_REWARD_QUEUE"
"""Environment variable with the name under which a service without `replica_id` finds its requests in Redis."""
_THROUGHPUT_WINDOW_SECONDS = 60.0


class CapacityExceededError(Exception):
    """Error if there is no capacity for a request; `retry_seconds` is the suggested time until a retry."""

    def __init__(self, retry_seconds: int) -> None:
        super().__init__(f"too much waits already; come back in {retry_seconds} s")
        self.retry_seconds = retry_seconds


class ShutdownError(Exception):
    """Error if the service is shutting down and accepts no requests."""


class Engine:
    """Core of the reward service, which accepts requests and scores them."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        self.pools: dict[str, RewardPool] = {}
        self.decoder: RewardPool | None = None
        self.is_ready = self.is_draining = self._has_drained = False
        self.pending_requests: dict[str, ScoreRequest] = {}
        self.pending_bytes = self.decoded_bytes = self._num_reserved_requests = 0
        self.num_accepted_requests = 0
        self._item_counts: deque[tuple[float, int]] = deque()
        self.replica_id = config.replica_id or os.environ.get("LEPTON_REPLICA_ID", "")
        if config.queue == "memory":
            self.store: Store = MemoryStore(config.result_seconds, config.max_results, config.max_pending_bytes)
        else:
            default_owner_name = f"{socket.gethostname()}:{config.host}:{config.port}"
            owner_name = self.replica_id or os.environ.get(QUEUE_OWNER_VARIABLE) or default_owner_name
            self.store = RedisStore(config.redis_host, config.redis_port, config.result_seconds, owner_name)

    async def start(self) -> None:
        """Load every reward, then resume unfinished requests of an earlier process of the service. Raise `RewardError`
        if a reward cannot be loaded. Raise `StageFailed` if a worker process is killed or times out while it loads, or
        the store of requests cannot be reached."""
        for reward in self.config.rewards:
            self.pools[reward.reward_type] = RewardPool(self.process_settings(reward), self._store_result)
        if self.config.vae_path:
            decode_args = self.config.decode_args
            decoder_args = RewardArgs(reward_type="decoder", device=decode_args.device, batch_size=1)
            vae_settings = {"model_path": self.config.vae_path, "dtype": decode_args.dtype}
            start_message = {"name": "", "entry": "", "settings": vae_settings}
            media_decoder_settings = ProcessSettings(start_message, decoder_args, 0.0, self.config.attempts)
            self.decoder = RewardPool(media_decoder_settings, self._handle_decoded_video)
        pools_to_load = self.pools if self.decoder is None else {**self.pools, "decode_args": self.decoder}
        for reward_name, pool in pools_to_load.items():
            try:
                await pool.loaded_future
            except ProcessError as error:
                await self.close()
                error_class = StageFailed if error.is_transient else RewardError
                raise error_class(f"the reward {reward_name!r} cannot be loaded: {error}") from error
        try:
            unfinished_requests = await self.store.unfinished_requests()
        except Exception as error:
            await self.close()
            raise StageFailed(f"the queue cannot be reached: {error_on_one_line(error)}") from error
        for uuid, body in unfinished_requests:
            await self._resume_request(uuid, body)
        self.is_ready = True

    async def close(self) -> None:
        """Kill the worker processes of all rewards, and close the store of requests and scores."""
        for pool in (*self.pools.values(), *filter(None, [self.decoder])):
            if not pool.loaded_future.cancel() and not pool.loaded_future.cancelled():
                # Retrieve the exception, because otherwise asyncio logs that it was never retrieved.
                pool.loaded_future.exception()
            await pool.close()
        await self.store.close()

    async def drain(self) -> None:
        """Refuse new requests. For up to `drain_seconds`, finish the accepted ones and let clients fetch scores that
        are only in memory."""
        self.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_seconds):
                while self.pending_requests or self._num_reserved_requests or self.store.has_unfetched_scores():
                    await asyncio.sleep(0.05)
        self._has_drained = True

    @contextlib.contextmanager
    def reserve_capacity(self, num_body_bytes: int) -> Iterator[None]:
        """Reserve capacity for a request during the `with` block. Raise `CapacityExceededError` if too many requests or
        bytes are pending, and `ShutdownError` if the service is shutting down."""
        if self.is_draining:
            raise ShutdownError
        is_only_request = not self.pending_bytes  # accept a request above the size limit if no other request is pending
        if len(self.pending_requests) + self._num_reserved_requests >= self.config.max_pending or (
            self.pending_bytes + num_body_bytes > self.config.max_pending_bytes and not is_only_request
        ):
            items_per_second = self.items_per_second()
            num_waiting_items = sum(request.num_items for request in self.pending_requests.values())
            retry_seconds = round(num_waiting_items / items_per_second / 4) if items_per_second else 1
            raise CapacityExceededError(min(30, max(1, retry_seconds)))
        self.pending_bytes += num_body_bytes
        self._num_reserved_requests += 1
        try:
            yield
        finally:
            self.pending_bytes -= num_body_bytes
            self._num_reserved_requests -= 1

    async def accept_request(self, uuid: str, request_body: bytes | bytearray) -> None:
        """Store a request and queue it for scoring. A stored request with the same uuid is not scored again, unless it
        was stored but never queued. Raise `ProtocolError` if the body is not a valid request, and `ShutdownError` if
        the service has finished its accepted requests."""
        if uuid in self.pending_requests:
            return
        if await self.store.has_request(uuid) and not await self.store.has_unfinished_request(uuid):
            return
        request = await asyncio.to_thread(parse_request, uuid, request_body, self.pools)
        self._check_latents(request)
        if uuid in self.pending_requests:  # another copy of the request was accepted in the meantime
            return
        if self._has_drained:
            raise ShutdownError
        self._add_pending_request(request)
        with cleanup_on_error(partial(self._remove_pending_request, request)):
            await self.store.accept_request(uuid, bytes(request_body))
        self.num_accepted_requests += 1
        self._submit_request(request)

    def _check_latents(self, request: ScoreRequest) -> None:
        if request.media_type != "latent":
            return
        if self.decoder is None:
            raise ProtocolError("no decoder of latents is configured here (decode_args.model_path); send pixels")
        num_channels = self.decoder.model_properties.get("latent_channels", request.array.shape[1])
        if request.array.shape[1] != num_channels:
            raise ProtocolError(
                f"latents of {request.array.shape[1]} channels; the VAE here (decode_args.model_path) has "
                f"{num_channels}: Wan2.1 has 16, Wan2.2 48, and pixels of a video are batch, 3, frames, height, width"
            )

    def check_latent_attributes(self, latent_attributes: dict[str, Any]) -> None:
        """Raise `ProtocolError` if the service decodes no latents, or if `latent_attributes` name another VAE."""
        if self.decoder is None:
            raise ProtocolError("no decoder of latents is configured here (decode_args.model_path)")
        vae_path = latent_attributes.get("vae_pth", "")
        if vae_path and vae_path != self.config.vae_path:
            raise ProtocolError("the VAE is that of decode_args.model_path; vae_pth cannot change it from outside")

    def items_per_second(self) -> float:
        """Return the number of items scored per second, over the last minute."""
        current_time = time.monotonic()
        recent_item_counts = [(t, n) for t, n in self._item_counts if t >= current_time - _THROUGHPUT_WINDOW_SECONDS]
        elapsed_seconds = max(1.0, current_time - recent_item_counts[0][0]) if recent_item_counts else 1.0
        return sum(num_items for _, num_items in recent_item_counts) / elapsed_seconds

    def _add_pending_request(self, request: ScoreRequest) -> None:
        self.pending_requests[request.uuid] = request
        self.pending_bytes += request.num_bytes

    def _remove_pending_request(self, request: ScoreRequest) -> None:
        if self.pending_requests.pop(request.uuid, None):
            self.pending_bytes -= request.num_bytes
            self.decoded_bytes -= request.decoded_bytes

    def _submit_request(self, request: ScoreRequest) -> None:
        if request.media_type == "latent":
            assert self.decoder is not None
            self.decoder.submit(RewardJob(request))
            return
        for name in sorted(request.remaining_rewards, key=request.reward_names.index):
            self.pools[name].submit(RewardJob(request, name))

    async def _resume_request(self, uuid: str, request_body: bytes) -> None:
        try:
            request = await asyncio.to_thread(parse_request, uuid, request_body, self.pools)
        except ProtocolError as error:  # drop a request for a reward that is no longer served
            log.warning("request %s is dropped: %s", uuid, error)
            await self.store.finish_request(uuid)
            return
        request.remaining_rewards = {name for name in request.reward_names if await self.store.get(uuid, name) is None}
        if not request.remaining_rewards or (request.media_type == "latent" and self.decoder is None):
            await self.store.finish_request(uuid)
            return
        self._add_pending_request(request)
        self._submit_request(request)

    async def _handle_decoded_video(self, job: RewardJob, result: dict[str, Any], decoding_seconds: float) -> None:
        request = job.request
        request.decoding_seconds = decoding_seconds
        if result.get("error"):
            for name in list(request.remaining_rewards):
                error_result = {**result, "error": f"[decoder] {result['error']}"}
                await self._store_result(RewardJob(request, name), error_result, 0.0)
            return
        num_decoded_bytes = result["array"].nbytes
        while self.decoded_bytes and self.decoded_bytes + num_decoded_bytes > self.config.max_pending_bytes:
            await asyncio.sleep(0.05)  # backpressure: decoded videos wait until rewards have scored earlier ones
        self.decoded_bytes += num_decoded_bytes
        request.array, request.media_type, request.decoded_bytes = result["array"], "video", num_decoded_bytes
        self._submit_request(request)

    async def _store_result(self, job: RewardJob, result: dict[str, Any], scoring_seconds: float) -> None:
        """Store the result of one reward for a request; while the store is not reachable, retry instead of dropping the
        result."""
        request, name = job.request, job.name
        response: dict[str, Any] = {
            "scores": result.get("scores"), "input_info": request.input_info, "duration": f"{scoring_seconds:.2f}",
            "decoded_duration": f"{request.decoding_seconds:.2f}", "type": name,
        }  # fmt: skip
        if result.get("error"):
            response = {"error": result["error"], "is_lost": bool(result.get("is_lost")), **response, "scores": None}
        elif any(result.get("errors", [])):
            response["errors"] = result["errors"]
        self._item_counts.append((time.monotonic(), request.num_items))
        while self._item_counts[0][0] < time.monotonic() - _THROUGHPUT_WINDOW_SECONDS:
            self._item_counts.popleft()
        request.remaining_rewards.discard(name)
        response_json = json.dumps(response, separators=(",", ":"), ensure_ascii=False)
        # Replace an unpaired surrogate in the JSON, which cannot be encoded as UTF-8.
        response_json = response_json.encode(errors="replace").decode()
        await self._call_store_with_retries(self.store.put, request.uuid, name, response_json)
        if not request.remaining_rewards and request.uuid in self.pending_requests:
            await self._call_store_with_retries(self.store.finish_request, request.uuid)
            self._remove_pending_request(request)

    async def _call_store_with_retries(self, store_method: Any, *method_arguments: Any) -> None:
        retry_pause_seconds = 0.1
        while True:
            try:
                await store_method(*method_arguments)
                return
            except Exception as error:
                if not isinstance(error, OSError) and type(error).__module__.partition(".")[0] != "redis":
                    raise
                log.warning("the queue cannot be reached (%s); trying again", error)
            await asyncio.sleep(retry_pause_seconds)
            retry_pause_seconds = min(2 * retry_pause_seconds, 5.0)

    def process_settings(self, reward: RewardArgs) -> ProcessSettings:
        """Return the settings with which the worker processes of `reward` are started."""
        api_key = reward.endpoint_api_key
        settings = reward.model_dump(include={"model_path", "download_path", "dtype", "endpoint_url", "options"})
        settings["endpoint_api_key"] = os.environ.get(api_key[1:], "") if api_key.startswith("$") else api_key
        start_message = {"name": reward.reward_type, "entry": reward.entry, "settings": settings, "path": [os.getcwd()]}
        return ProcessSettings(start_message, reward, self.config.batch_seconds, self.config.attempts)
