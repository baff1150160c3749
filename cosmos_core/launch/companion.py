"""A reward service beside a stage: started before it on a free port, with a token of its own, and stopped after it.

One that dies is started again at the same address, and the stage's requests are sent again; it ends with its launcher
in any case. Or one that runs already, which a block of Prefect or the environment names. How it was is noted at the
end. Not here: the service (rewards/service).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from cosmos_core.config.load import read_toml
from cosmos_core.config.schema.pipeline import BLOCK
from cosmos_core.environment import mask_file, masked
from cosmos_core.errors import EXIT_USAGE, ConfigError, RewardError, StageFailed
from cosmos_core.launch.child import Child
from cosmos_core.launch.service_health import ENQUEUE_URL, FETCH_URL, TOKEN, note_health

logger = logging.getLogger(__name__)

_QUEUE = "COSMOS_REWARD_QUEUE"
_LOAD_SECONDS = 1800.0
_POLL_SECONDS = 0.1
_PAUSE_SECONDS = 1.0


@contextlib.contextmanager
def companion(
    config: str,
    folder: Path,
    python: str = "",
    check: Callable[[], None] = lambda: None,
    environment: Mapping[str, str] = {},
    host: str = "127.0.0.1",
) -> Iterator[dict[str, str]]:
    """Run the service of a configuration while the body runs; yield the variables by which its clients find it.

    `check` is called while it loads, and may raise. A configuration `block:NAME` is a service that runs already;
    without one there is none to find, and `environment` says which one the stage asks, if any. `host` is the address
    at which a service that is started listens.

    Raises:
        RewardError: it does not start.
        ConfigError: there is no such block.
    """
    if not config or config.startswith(BLOCK):
        found = service_named(config)
        try:
            yield found
        finally:
            note_health(folder, found or environment)
        return
    service = _Service(Path(config), folder, python or sys.executable, host)
    try:
        url = service.start(check)
        found = {ENQUEUE_URL: f"{url}/api/reward/enqueue", FETCH_URL: f"{url}/api/reward/pull", TOKEN: service.token}
        try:
            yield found
        finally:
            note_health(folder, found, service.restarts)
    finally:
        service.stop()


def service_named(config: str) -> dict[str, str]:
    """Return the variables of a service that a block of Prefect names; none for a service that is started.

    Raises:
        ConfigError: there is no such block.
    """
    if not config.startswith(BLOCK):
        return {}
    from cosmos_core.launch.blocks import service_in_block

    return service_in_block(config)


class _Service:
    """A service, watched by a thread."""

    def __init__(self, config: Path, folder: Path, python: str, host: str) -> None:
        self._config, self._python, self._host = config, python, host
        self._log, self._ready = folder / "logs" / "reward_service.log", folder / "reward_service.url"
        self.token = secrets.token_hex(32)
        self._queue = uuid.uuid4().hex  # its port is another after the first start
        self.restarts = 0
        self._port = "0"
        self._is_ending = threading.Event()
        self._child: Child | None = None
        self._thread = threading.Thread(target=self._watch, name="reward service", daemon=True)

    def start(self, check: Callable[[], None]) -> str:
        """Start it and wait until it takes requests; return its URL.

        Raises:
            RewardError: a reward cannot be loaded, or the configuration is wrong.
            StageFailed: it ended otherwise, or did not load in time.
        """
        self._ready.unlink(missing_ok=True)
        self._child = self._started()
        deadline = time.monotonic() + _LOAD_SECONDS
        while not self._ready.is_file():
            check()
            if (code := self._child.poll()) is not None:
                kind = RewardError if code == EXIT_USAGE else StageFailed
                raise kind(f"the reward service of {self._config} ended: {self._last_line()}")
            if time.monotonic() > deadline:
                raise StageFailed(
                    f"the reward service of {self._config} did not load in {_LOAD_SECONDS:g} s; see {self._log}"
                )
            time.sleep(_POLL_SECONDS)
        url = self._ready.read_text(encoding="utf-8")
        self._port = url.rpartition(":")[2]
        self._thread.start()
        return url

    def stop(self) -> None:
        """Stop it; what it had accepted nobody waits for any more."""
        self._is_ending.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._child is not None and self._child.poll() is None:
            self._child.kill()
        with contextlib.suppress(OSError):
            mask_file(self._log)  # what its rewards wrote past the service
        self._ready.unlink(missing_ok=True)

    def _watch(self) -> None:
        while not self._is_ending.wait(_POLL_SECONDS):
            assert self._child is not None
            if self._child.poll() is None:
                continue
            logger.warning("the reward service ended (%s); it is started again", self._last_line())
            if self._is_ending.wait(_PAUSE_SECONDS):
                return
            try:
                self._child = self._started()
            except OSError as error:  # a disk that is full, no process to be had: it may pass
                logger.warning("the reward service cannot be started: %s", error)
                continue
            self.restarts += 1

    def _started(self) -> Child:
        return Child(
            [
                self._python, "-m", "cosmos_core.rewards.service", "--config", str(self._config), "--host", self._host,
                "--port", self._port, "--ready", str(self._ready),
            ],
            log=self._log, grace_seconds=1.0, environment={self._token_name(): self.token, _QUEUE: self._queue},
            inherited=dict(os.environ),
        )  # fmt: skip

    def _token_name(self) -> str:
        """Return the variable in which the service looks for its token; of a file that is wrong it tells itself."""
        with contextlib.suppress(ConfigError):
            return str(read_toml(self._config).get("token_env", TOKEN))
        return TOKEN

    def _last_line(self) -> str:
        lines = (
            self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if self._log.is_file() else []
        )
        return masked(lines[-1]) if lines else f"it said nothing; see {self._log}"
