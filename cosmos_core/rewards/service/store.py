"""Storage of accepted requests and scores: in memory, or in Redis, where they survive a restart of the service.

Scores are also kept after a client fetched them, because a response can be lost in transit.
"""

import time
from collections import OrderedDict
from typing import Any


class MemoryStore:
    """In-memory store of at most `max_scores` scores with at most `max_bytes` bytes in total; a score expires after
    `retention_seconds`."""

    def __init__(self, retention_seconds: float, max_scores: int, max_bytes: int) -> None:
        self._retention_seconds, self._max_scores, self._max_bytes = retention_seconds, max_scores, max_bytes
        self._unfinished_uuids: set[str] = set()
        self._unfetched_score_keys: set[tuple[str, str]] = set()
        self._num_score_bytes = 0
        self._scores: OrderedDict[tuple[str, str], tuple[float, str]] = OrderedDict()
        self._num_scores_by_uuid: dict[str, int] = {}

    async def accept_request(self, uuid: str, body: bytes) -> None:
        """Record that the service accepted the request `uuid`, which counts as unfinished until `finish_request` is
        called."""
        self._unfinished_uuids.add(uuid)

    async def has_request(self, uuid: str) -> bool:
        """Return True if a request was accepted and has not expired."""
        return uuid in self._unfinished_uuids or uuid in self._num_scores_by_uuid

    async def has_unfinished_request(self, uuid: str) -> bool:
        """Return True if this service accepted a request and has not finished it."""
        return uuid in self._unfinished_uuids

    async def put(self, uuid: str, reward_name: str, scores_json: str) -> None:
        """Store the scores of one reward for the request `uuid` as JSON text; do nothing if it already has them."""
        if (uuid, reward_name) in self._scores:
            return
        self._scores[uuid, reward_name] = time.monotonic() + self._retention_seconds, scores_json
        self._num_scores_by_uuid[uuid] = self._num_scores_by_uuid.get(uuid, 0) + 1
        self._unfetched_score_keys.add((uuid, reward_name))
        self._num_score_bytes += len(scores_json)
        self._remove_expired_scores()

    async def get(self, uuid: str, reward_name: str) -> str | None:
        """Return the scores of one reward for the request `uuid` as JSON text; None if they are missing."""
        self._remove_expired_scores()
        self._unfetched_score_keys.discard((uuid, reward_name))
        expiry_and_scores = self._scores.get((uuid, reward_name))
        return expiry_and_scores[1] if expiry_and_scores else None

    async def finish_request(self, uuid: str) -> None:
        """Record that the request `uuid` is finished, because the scores of all its rewards are stored."""
        self._unfinished_uuids.discard(uuid)

    async def unfinished_requests(self) -> list[tuple[str, bytes]]:
        """Return uuid and body of each request that an earlier process of this service accepted but did not finish."""
        return []

    def has_unfetched_scores(self) -> bool:
        """Return True if the store has scores that no client has fetched and that would be lost with this process."""
        self._remove_expired_scores()
        return bool(self._unfetched_score_keys)

    async def close(self) -> None:
        """Close the connections to the storage."""

    def _remove_expired_scores(self) -> None:
        current_time = time.monotonic()
        while self._scores:
            (uuid, reward_name), (expiry_time, scores_json) = next(iter(self._scores.items()))
            fits_in_byte_limit = self._num_score_bytes <= self._max_bytes or len(self._scores) == 1
            if expiry_time > current_time and fits_in_byte_limit and len(self._scores) <= self._max_scores:
                return
            del self._scores[uuid, reward_name]
            self._unfetched_score_keys.discard((uuid, reward_name))
            self._num_score_bytes -= len(scores_json)
            self._num_scores_by_uuid[uuid] -= 1
            if not self._num_scores_by_uuid[uuid]:
                del self._num_scores_by_uuid[uuid]


_BODY_KEY_TEMPLATE, _ACCEPTED_KEY_TEMPLATE = "cosmos:reward:body:{}", "cosmos:reward:known:{}"
"""Templates of the Redis keys for the body of a request and for its acceptance; `{}` is the uuid of the request."""


class RedisStore:
    """Redis store with scores under `<uuid>_<type>` (uuid of the request, name of the reward), as in Cosmos-RL, and
    further keys for unfinished requests."""

    def __init__(self, host: str, port: int, retention_seconds: float, owner_name: str) -> None:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import ExponentialWithJitterBackoff

        retry_policy = Retry(ExponentialWithJitterBackoff(base=0.05, cap=1.0), 6)
        self._redis: Any = Redis(host=host, port=port, retry=retry_policy, socket_timeout=20, socket_connect_timeout=5)
        self._retention_seconds = max(1, int(retention_seconds))
        self._unfinished_set_key = f"cosmos:reward:pending:{owner_name}"

    async def accept_request(self, uuid: str, body: bytes) -> None:
        redis_pipeline = self._redis.pipeline(transaction=True)
        redis_pipeline.set(_BODY_KEY_TEMPLATE.format(uuid), body, ex=self._retention_seconds)
        redis_pipeline.set(_ACCEPTED_KEY_TEMPLATE.format(uuid), b"1", ex=self._retention_seconds)
        redis_pipeline.sadd(self._unfinished_set_key, uuid)
        redis_pipeline.expire(self._unfinished_set_key, self._retention_seconds)
        await redis_pipeline.execute()

    async def has_request(self, uuid: str) -> bool:
        return bool(await self._redis.exists(_ACCEPTED_KEY_TEMPLATE.format(uuid)))

    async def has_unfinished_request(self, uuid: str) -> bool:
        return bool(await self._redis.sismember(self._unfinished_set_key, uuid))

    async def put(self, uuid: str, reward_name: str, scores_json: str) -> None:
        await self._redis.set(f"{uuid}_{reward_name}", scores_json, ex=self._retention_seconds, nx=True)

    async def get(self, uuid: str, reward_name: str) -> str | None:
        scores_json = await self._redis.get(f"{uuid}_{reward_name}")
        return scores_json.decode() if scores_json is not None else None

    async def finish_request(self, uuid: str) -> None:
        redis_pipeline = self._redis.pipeline(transaction=True)
        redis_pipeline.delete(_BODY_KEY_TEMPLATE.format(uuid))
        redis_pipeline.srem(self._unfinished_set_key, uuid)
        await redis_pipeline.execute()

    async def unfinished_requests(self) -> list[tuple[str, bytes]]:
        uuids_and_bodies = []
        for uuid in sorted(await self._redis.smembers(self._unfinished_set_key)):
            body = await self._redis.get(_BODY_KEY_TEMPLATE.format(uuid.decode()))
            if body is None:
                await self._redis.srem(self._unfinished_set_key, uuid)
            else:
                uuids_and_bodies.append((uuid.decode(), body))
        return uuids_and_bodies

    def has_unfetched_scores(self) -> bool:
        """Return False: scores in Redis survive this process."""
        return False

    async def close(self) -> None:
        await self._redis.aclose()


Store = MemoryStore | RedisStore
"""Storage of requests and scores, with the methods of `MemoryStore`."""
