"""Reward service that is started for one stage, on a free port with a random token, and stopped after the stage.

A service that dies is restarted at the same address, and the stage retries its requests. The service always ends with
its launcher. Instead, a Prefect block or the environment can name a service that is already running. The health of the
service is recorded at the end of the stage. The service itself is in `rewards/service`.
"""

import contextlib
import logging
import secrets
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from cosmos_core.config.load import read_toml
from cosmos_core.config.schema.pipeline import BLOCK_PREFIX
from cosmos_core.environment import mask_file, mask_text
from cosmos_core.errors import EXIT_USAGE, ConfigError, RewardError, StageFailed
from cosmos_core.launch.child import SupervisedProcess
from cosmos_core.launch.service_health import ENQUEUE_URL_VARIABLE, FETCH_URL_VARIABLE, TOKEN_VARIABLE, write_health

logger = logging.getLogger(__name__)

_LOAD_TIMEOUT_SECONDS = 1800.0
_POLL_SECONDS = 0.1
_RESTART_DELAY_SECONDS = 1.0


@contextlib.contextmanager
def managed_reward_service(
    service_config: str,
    stage_folder: Path,
    python_path: str = "",
    check_stop: Callable[[], None] = lambda: None,
    environment: Mapping[str, str] = {},
    host: str = "127.0.0.1",
) -> Iterator[dict[str, str]]:
    """Run the reward service of the configuration file `service_config` during the `with` block; yield the environment
    variables that tell clients the address and token of the service. If `service_config` is `block:NAME`, the Prefect
    block names a service that is already running. If `service_config` is empty, `environment` can name the service that
    the stage uses. `check_stop` is called while the service loads, and can raise an error to give up. `host` is the
    address on which a started service listens. Raises `RewardError` if the service does not start, `ConfigError` if the
    block does not exist."""
    if not service_config or service_config.startswith(BLOCK_PREFIX):
        service_variables = load_named_service(service_config)
        try:
            yield service_variables
        finally:
            write_health(stage_folder, service_variables or environment)
        return
    service_process = _ServiceProcess(Path(service_config), stage_folder, python_path or sys.executable, host)
    try:
        service_url = f"{service_process.start(check_stop)}/api/reward"
        service_variables = {ENQUEUE_URL_VARIABLE: f"{service_url}/enqueue", FETCH_URL_VARIABLE: f"{service_url}/pull"}
        service_variables[TOKEN_VARIABLE] = service_process.token
        try:
            yield service_variables
        finally:
            write_health(stage_folder, service_variables, service_process.num_restarts)
    finally:
        service_process.stop()


def load_named_service(block_reference: str) -> dict[str, str]:
    """Return the environment variables for clients of the reward service in a Prefect block; empty if `block_reference`
    does not have the form `block:NAME`. Raises `ConfigError` if the block does not exist."""
    if not block_reference.startswith(BLOCK_PREFIX):
        return {}
    from cosmos_core.launch.blocks import load_service_variables

    return load_service_variables(block_reference)


class _ServiceProcess:
    """Reward service in a child process, with a thread that restarts the process when it ends."""

    def __init__(self, config_path: Path, work_dir: Path, python_path: str, host: str) -> None:
        self._config_path, self._python_path, self._host = config_path, python_path, host
        self._log_path, self._url_file = work_dir / "logs" / "reward_service.log", work_dir / "reward_service.url"
        self.token = secrets.token_hex(32)
        self._queue_id = uuid.uuid4().hex  # a restarted service finds its queued requests by this id
        self.num_restarts = 0
        self._port = "0"
        self._stop_event = threading.Event()
        self._child: SupervisedProcess | None = None
        self._watcher_thread = threading.Thread(target=self._restart_ended_child, name="reward service", daemon=True)

    def start(self, check_stop: Callable[[], None]) -> str:
        """Start the service and wait until it accepts requests; return its URL. Raises `RewardError` if a reward or
        the configuration cannot be loaded, and `StageFailed` if the service ended otherwise or did not load in time."""
        self._url_file.unlink(missing_ok=True)
        self._child = self._start_child()
        load_deadline = time.monotonic() + _LOAD_TIMEOUT_SECONDS
        while not self._url_file.is_file():
            check_stop()
            if (exit_code := self._child.poll()) is not None:
                error_class = RewardError if exit_code == EXIT_USAGE else StageFailed
                raise error_class(f"the reward service of {self._config_path} ended: {self._read_last_log_line()}")
            if time.monotonic() > load_deadline:
                load_failure_text = f"did not load in {_LOAD_TIMEOUT_SECONDS:g} s; see {self._log_path}"
                raise StageFailed(f"the reward service of {self._config_path} {load_failure_text}")
            time.sleep(_POLL_SECONDS)
        service_url = self._url_file.read_text(encoding="utf-8")
        self._port = service_url.rpartition(":")[2]
        self._watcher_thread.start()
        return service_url

    def stop(self) -> None:
        """Stop the service; pending requests are dropped."""
        self._stop_event.set()
        if self._watcher_thread.is_alive():
            self._watcher_thread.join()
        if self._child is not None and self._child.poll() is None:
            self._child.kill()
        with contextlib.suppress(OSError):
            mask_file(self._log_path)  # reward functions may have written secrets to the log
        self._url_file.unlink(missing_ok=True)

    def _restart_ended_child(self) -> None:
        while not self._stop_event.wait(_POLL_SECONDS):
            assert self._child is not None
            if self._child.poll() is None:
                continue
            logger.warning("the reward service ended (%s); it is started again", self._read_last_log_line())
            if self._stop_event.wait(_RESTART_DELAY_SECONDS):
                return
            try:
                self._child = self._start_child()
            except OSError as error:  # try again: a full disk or a limit on processes may be transient
                logger.warning("the reward service cannot be started: %s", error)
                continue
            self.num_restarts += 1

    def _start_child(self) -> SupervisedProcess:
        token_variable = TOKEN_VARIABLE
        with contextlib.suppress(ConfigError):  # the service itself reports an invalid configuration file
            token_variable = str(read_toml(self._config_path).get("token_env", TOKEN_VARIABLE))
        command = [self._python_path, "-m", "cosmos_core.rewards.service", "--config", str(self._config_path)]
        command += ["--host", self._host, "--port", self._port, "--ready", str(self._url_file)]
        added_environment = {token_variable: self.token, "COSMOS_REWARD_QUEUE": self._queue_id}
        return SupervisedProcess(command, log_path=self._log_path, grace_seconds=1.0, environment=added_environment)

    def _read_last_log_line(self) -> str:
        has_log_file = self._log_path.is_file()
        log_text = self._log_path.read_text(encoding="utf-8", errors="replace").strip() if has_log_file else ""
        return mask_text(log_text.splitlines()[-1]) if log_text else f"it said nothing; see {self._log_path}"
