"""The process that rewards run in: `python -m cosmos_core.rewards.child PARENT_PID`; started by runner.py only.

One JSON line each way per message. First comes `{"rewards": [names], "custom": {...}}`, answered by `{}` or
`{"error": text}`. Then each request is answered, reward by reward, by `[value, metrics, error]`, in order and at
once: the parent tells from the silence which reward hangs. No torch here: a child has to start in a blink.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO

from cosmos_core.errors import RewardError
from cosmos_core.rewards.base import Reward, load_reward, one_line

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve requests until the parent closes our standard input or dies."""
    _die_with(parent_pid=int(sys.argv[1]))
    requests, answers = _private_pipes()
    hello = json.loads(requests.readline())
    try:
        rewards = [load_reward(name) for name in hello["rewards"]]
    except RewardError as error:
        return _send(answers, {"error": str(error)})
    _send(answers, {})
    for line in requests:
        fields = {**json.loads(line), "custom": hello["custom"]}
        for reward in rewards:
            _send(answers, _score(reward, fields))


def _score(reward: Reward, fields: Mapping[str, Any]) -> list[Any]:
    try:
        value, metrics = reward(fields)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's code may raise anything; the text goes to the user
        return [None, {}, one_line(error)]
    return [value, metrics, ""]


def _send(answers: int, message: Any) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(answers, data) :]


def _private_pipes() -> tuple[BinaryIO, int]:
    """Move the protocol away from descriptors 0 and 1: what a reward prints goes to stderr, what it reads is empty."""
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return open(requests, "rb"), answers


def _die_with(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when the parent ends: a hanging reward would never see the end of its input."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it ended before we asked
        sys.exit(1)


if __name__ == "__main__":
    main()
