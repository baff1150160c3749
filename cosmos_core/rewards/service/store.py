"""Storage of accepted requests and scores: in memory, or in Redis, where they survive a restart of the service.

Scores are also kept after a client fetched them, because a response can be lost in transit.
"""

import time
from collections import OrderedDict
from typing import Any


class MemoryStore:
    """In-memory store of at most `max_entries` scores and `max_bytes` bytes; each score expires after `seconds`."""

    def __init__(self, seconds: float, max_entries: int, max_bytes: int) -> None:
        self._seconds, self._max_entries, self._max_bytes = seconds, max_entries, max_bytes
        self._pending: set[str] = set()
        self._unfetched_keys: set[tuple[str, str]] = set()
        self._num_bytes = 0
        self._scores: OrderedDict[tuple[str, str], tuple[float, str]] = OrderedDict()
        self._counts: dict[str, int] = {}

    async def accept_request(self, uuid: str, body: bytes) -> None:
        """Store an accepted request until `finish_request` is called for it."""
        self._pending.add(uuid)

    async def has_request(self, uuid: str) -> bool:
        """Return True if a request was accepted and has not expired."""
        return uuid in self._pending or uuid in self._counts

    async def has_unfinished_request(self, uuid: str) -> bool:
        """Return True if this service accepted a request and has not finished it."""
        return uuid in self._pending

    async def put(self, uuid: str, name: str, scores: str) -> None:
        """Store the scores of one reward as JSON text; existing scores are kept."""
        if (uuid, name) in self._scores:
            return
        self._scores[uuid, name] = time.monotonic() + self._seconds, scores
        self._counts[uuid] = self._counts.get(uuid, 0) + 1
        self._unfetched_keys.add((uuid, name))
        self._num_bytes += len(scores)
        self._remove_expired()

    async def get(self, uuid: str, name: str) -> str | None:
        """Return the scores of one reward; None if they are missing."""
        self._remove_expired()
        self._unfetched_keys.discard((uuid, name))
        expiry_and_scores = self._scores.get((uuid, name))
        return expiry_and_scores[1] if expiry_and_scores else None

    async def finish_request(self, uuid: str) -> None:
        """Remove an accepted request whose scores are all stored."""
        self._pending.discard(uuid)

    async def unfinished_requests(self) -> list[tuple[str, bytes]]:
        """Return the unfinished requests of an earlier service with the same name."""
        return []

    def has_unfetched_scores(self) -> bool:
        """Return True if the store has scores that no client has fetched and that would be lost with this process."""
        self._remove_expired()
        return bool(self._unfetched_keys)

    async def close(self) -> None:
        """Close the connections to the storage."""

    def _remove_expired(self) -> None:
        now = time.monotonic()
        while self._scores:
            (uuid, name), (expires_at, scores) = next(iter(self._scores.items()))
            fits_in_memory = self._num_bytes <= self._max_bytes or len(self._scores) == 1
            if expires_at > now and fits_in_memory and len(self._scores) <= self._max_entries:
                return
            del self._scores[uuid, name]
            self._unfetched_keys.discard((uuid, name))
            self._num_bytes -= len(scores)
            self._counts[uuid] -= 1
            if not self._counts[uuid]:
                del self._counts[uuid]


_BODY_KEY_TEMPLATE, _ACCEPTED_KEY_TEMPLATE = "cosmos:reward:body:{}", "cosmos:reward:known:{}"
"""Keys in Redis of a request's body and of its acceptance, with a field for its uuid."""


class RedisStore:
    """Redis store with scores under `<uuid>_<type>`, as in Cosmos-RL, and further keys for unfinished requests."""

    def __init__(self, host: str, port: int, seconds: float, replica: str) -> None:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import ExponentialWithJitterBackoff

        retry = Retry(ExponentialWithJitterBackoff(base=0.05, cap=1.0), 6)
        self._redis: Any = Redis(host=host, port=port, retry=retry, socket_timeout=20, socket_connect_timeout=5)
        self._seconds = max(1, int(seconds))
        self._pending = f"cosmos:reward:pending:{replica}"

    async def accept_request(self, uuid: str, body: bytes) -> None:
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.set(_BODY_KEY_TEMPLATE.format(uuid), body, ex=self._seconds)
        pipeline.set(_ACCEPTED_KEY_TEMPLATE.format(uuid), b"1", ex=self._seconds)
        pipeline.sadd(self._pending, uuid)
        pipeline.expire(self._pending, self._seconds)
        await pipeline.execute()

    async def has_request(self, uuid: str) -> bool:
        return bool(await self._redis.exists(_ACCEPTED_KEY_TEMPLATE.format(uuid)))

    async def has_unfinished_request(self, uuid: str) -> bool:
        return bool(await self._redis.sismember(self._pending, uuid))

    async def put(self, uuid: str, name: str, scores: str) -> None:
        await self._redis.set(f"{uuid}_{name}", scores, ex=self._seconds, nx=True)

    async def get(self, uuid: str, name: str) -> str | None:
        scores = await self._redis.get(f"{uuid}_{name}")
        return scores.decode() if scores is not None else None

    async def finish_request(self, uuid: str) -> None:
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.delete(_BODY_KEY_TEMPLATE.format(uuid))
        pipeline.srem(self._pending, uuid)
        await pipeline.execute()

    async def unfinished_requests(self) -> list[tuple[str, bytes]]:
        requests = []
        for uuid in sorted(await self._redis.smembers(self._pending)):
            body = await self._redis.get(_BODY_KEY_TEMPLATE.format(uuid.decode()))
            if body is None:
                await self._redis.srem(self._pending, uuid)
            else:
                requests.append((uuid.decode(), body))
        return requests

    def has_unfetched_scores(self) -> bool:
        """Return False: scores in Redis survive this process."""
        return False

    async def close(self) -> None:
        await self._redis.aclose()


Store = MemoryStore | RedisStore
"""Storage of requests and scores, with the methods of `MemoryStore`."""
