"""Malformed, unauthenticated and oversized requests against a reward service: it refuses each and stays as it was.

python -m tests.acceptance.reward_fuzz [COUNT] [SEED]
"""

from __future__ import annotations

import io
import json
import random
import socket
import sys
import tempfile
from collections import Counter
from functools import lru_cache
from pathlib import Path

import numpy as np
import psutil
import torch

from cosmos_core.rewards.protocol import encode_request

_PATHS = ("enqueue", "enqueue", "enqueue", "pull", "ping", "latent_attr", "push", "../../etc/passwd", "")
_TYPES = ("application/octet-stream", "application/x-www-form-urlencoded", "multipart/form-data")
_VALUES = (
    None,
    True,
    -1,
    1e308,
    "",
    "x" * 1000,
    [],
    {},
    [[]],
    [None],
    {"counted": -1},
    {"counted": "1"},
    "\u0000",
    10**30,
)
_KEYS = ("prompts", "reward_fn", "media_type", "video_infos", "references", "completions", "metadata", "ocr_use_gpu")


def fuzz(url: str, token: str, count: int, rng: random.Random) -> Counter[int]:
    """Send so many requests that no reward may see; return how often each status came, 0 where the connection ended."""
    host, _, port = url.removeprefix("http://").partition(":")
    statuses: Counter[int] = Counter()
    for _ in range(count):
        with socket.create_connection((host, int(port)), timeout=20) as connection:
            connection.settimeout(20)
            try:
                connection.sendall(_request(token, rng))
                connection.shutdown(socket.SHUT_WR)
                reply = b""
                while b"\r\n" not in reply and (chunk := connection.recv(65536)):
                    reply += chunk
            except OSError:
                reply = b""
        words = reply.split(b" ", 2)
        statuses[int(words[1]) if len(words) > 1 and words[1].isdigit() else 400] += 1
    return statuses


def _request(token: str, rng: random.Random) -> bytes:
    content = rng.choice((_noise, _mutated, _cut, _wrong_fields, _form, _saved))(rng)
    is_refused = rng.random() < 0.3
    bearer = rng.choice(("", "Bearer", "Bearer x", f"Bearer {token}x", f"Basic {token}", f"Digest {token}"))
    length = (
        len(content) if rng.random() < 0.8 else rng.choice((len(content) + 5, 0, -1, 2**40, 2**64, "1e3", "", "0x10"))
    )
    lines = [
        f"POST /api/reward/{rng.choice(_PATHS)} HTTP/1.1",
        "Host: localhost",
        f"Authorization: {bearer if is_refused else f'Bearer {token}'}",
        f"Content-Type: {rng.choice(_TYPES)}",
    ]
    if rng.random() < 0.95:
        lines.append(f"Content-Length: {length}")
    if rng.random() < 0.05:
        lines.append("Transfer-Encoding: chunked")
    if rng.random() < 0.1:
        lines.append(f"Idempotency-Key: {rng.choice(('', '../x', 'a' * 200, '%00', '1-2'))}")
    head = "\r\n".join(lines).encode() + b"\r\n\r\n"
    if rng.random() < 0.05:
        head = bytes(byte if rng.random() > 0.02 else rng.randrange(256) for byte in head)
    return head + content


def _valid() -> dict[str, object]:
    return {"prompts": ["1"], "reward_fn": {"counted": 1.0}, "media_type": "image"}


def _noise(rng: random.Random) -> bytes:
    return rng.randbytes(rng.randrange(300))


def _mutated(rng: random.Random) -> bytes:
    """A request that is none: its array says another length than it has."""
    body = bytearray(encode_request(_valid(), np.zeros((1, 2, 2, 3), np.uint8)))
    for _ in range(rng.randrange(8)):
        body[rng.randrange(len(body))] = rng.randrange(256)
    return bytes(body) + rng.randbytes(1 + rng.randrange(10))


def _cut(rng: random.Random) -> bytes:
    body = encode_request(_valid(), np.zeros((1, 2, 2, 3), np.uint8))
    return body[: rng.randrange(len(body))]


def _wrong_fields(rng: random.Random) -> bytes:
    fields = {**_valid(), "prompts": ["1", "2"]}
    for key in rng.sample(_KEYS[2:], rng.randrange(4)):
        fields[key] = rng.choice(_VALUES)
    return encode_request(fields, np.zeros((1, rng.randrange(4), 2, 3), np.uint8))


@lru_cache(maxsize=1)
def _tensor() -> bytes:
    stream = io.BytesIO()
    torch.save(torch.zeros(1, 16, 2, 2, 2, dtype=torch.bfloat16), stream)
    return stream.getvalue()


def _saved(rng: random.Random) -> bytes:
    """A tensor as torch saves it, damaged: most of all in its description and its directory; for a reward that is
    not there."""
    content = bytearray(_tensor())
    for _ in range(rng.randrange(12)):
        position = rng.choice((rng.randrange(len(content)), rng.randrange(60, 320), -1 - rng.randrange(600)))
        content[position] = rng.randrange(256)
    end = rng.randrange(len(content)) if rng.random() < 0.1 else len(content)
    return json.dumps({"prompts": ["1"], "reward_fn": {"none": 1.0}}).encode() + b"\n" + content[:end]


def _form(rng: random.Random) -> bytes:
    key = rng.choice(("uuid", "type", "info_data", "fields", "x"))
    value = rng.choice(("%00", "a" * 1000, "[" * 5000, "%ff%fe", json.dumps({"reward_fn": {"none": 1}}), "../../x"))
    return f"{key}={value}&uuid=zz&info_data=[&fields=1".encode()


def main() -> None:
    """Fuzz a service of its own and write what came of it."""
    from tests.faults.reward_service import counted, running

    count, seed = (int(text) for text in [*sys.argv[1:], *("10000", "0")[len(sys.argv) - 1 :]])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = {"reward_args": [counted(folder)], "max_body_bytes": 2**20}
        with running(folder, config) as server:
            process = psutil.Process(server.process.pid)
            before = process.memory_info().rss
            statuses = fuzz(server.url, server.token, count, random.Random(seed))
            grown = (process.memory_info().rss - before) / 2**20
            reached = len((folder / "scored").read_text().split()) if (folder / "scored").exists() else 0
            state = "alive" if server.is_alive() else "dead"
    sys.stdout.write(
        f"{count} requests: {dict(sorted(statuses.items()))}; {reached} scored; the service is {state} and has "
        f"grown by {grown:.1f} MiB\n"
    )


if __name__ == "__main__":
    main()
