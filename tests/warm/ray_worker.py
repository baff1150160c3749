"""Runs in place of Ray's `setup_worker.py`, which a raylet starts: lets the fork server fork a worker.

This process stands for the worker below the raylet, since the parent of the worker is the fork server: if one of them
ends, so does the other. It executes Ray's file if no fork server answers, or an actor has an environment of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2)


def main() -> None:
    """Fork the worker that the command line describes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    options, words = parser.parse_known_args()
    context = json.loads(options.serialized_runtime_env_context or "{}")
    name = os.environ.get("COSMOS_TEST_FORK_SERVER")
    is_plain = not any(context.get(key) for key in ("command_prefix", "env_vars", "override_worker_entrypoint"))
    if not (
        name and is_plain and context.get("py_executable", sys.executable) == sys.executable and _fork(name, words)
    ):
        original = os.path.join(os.path.dirname(words[0]), "setup_worker.py")
        os.execv(sys.executable, [sys.executable, original, *sys.argv[1:]])


def _fork(name: str, words: list[str]) -> bool:
    """Return True when the worker has been forked and has ended, False if it is not forked."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the worker would not see the end of the raylet
    ours, theirs = socket.socketpair()
    descriptors = [0, 1, 2, theirs.fileno()]
    request = {
        "argv": [sys.executable, *words], "cwd": os.getcwd(), "environment": dict(os.environ), "parent": 0,
        "targets": descriptors, "ignored": [n for n in range(1, 32) if signal.getsignal(n) is signal.SIG_IGN],
        "new_session": False, "process_group": 0, "umask": -1,
        "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))), "companion": theirs.fileno(),
    }  # fmt: skip
    text = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(f"\0{name}")
            socket.send_fds(server, [len(text).to_bytes(8, "little")], descriptors)
            server.sendall(text)
            is_forked = bool(server.recv(6))
        except OSError:
            return False
    theirs.close()
    if is_forked:
        ours.recv(1)
    return is_forked


main()
