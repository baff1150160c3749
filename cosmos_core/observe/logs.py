"""Configure the log output of the command line and the worker, and the environment variables that disable telemetry of
libraries.

Each record is one line, `12:03:44 INFO cosmos_core.train message`. The metrics of a stage are logged with one line per
step, at most one per second, and with the few metrics of a table; all metrics are in `metrics.jsonl`.
"""

import logging
import math
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from cosmos_core.environment import masked
from cosmos_core.observe import formatting
from cosmos_core.run.progress import Progress

logger = logging.getLogger(__name__)

NO_PHONE_HOME: dict[str, str] = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Environment variables that disable the telemetry of every library used here."""
_LESS_NOISE = {"TORCH_LOGS": "-torch.utils._pytree"}
"""Environment variables against repeated warnings: torch has a separate log handler, which reports each enumeration
that torchao registers twice."""

NOISY = frozenset({
    "PIL", "accelerate", "asyncio", "datasets", "filelock", "fsspec", "httpcore", "httpx", "huggingface_hub",
    "matplotlib", "numexpr", "prefect", "ray", "tensorboard", "torch", "transformers", "urllib3", "uvicorn",
    "wandb",
})  # fmt: skip
"""Names of the top-level loggers of which only warnings and errors are shown."""
_ALARMED = frozenset({"torchao", "vllm"})
"""Names of the loggers of which only errors are shown: vLLM warns a dozen times at each start and at each weight sync,
and torchao for each kernel that it cannot load."""

_STEP_SECONDS = 1.0

_SHORT = {"WARNING": "WARN", "CRITICAL": "FATAL"}


def configure(level: str | int = "INFO", stream: TextIO | None = None) -> None:
    """Send every log record of this process to `stream` as one line; a second call replaces the first configuration.

    With `stream=None` the handler uses the current `sys.stderr` for each record, so that a live display can redirect
    it. Call this before importing vLLM: it sets `VLLM_CONFIGURE_LOGGING=0`, without which vLLM adds its own handler.
    """
    if "VLLM_LOGGING_CONFIG_PATH" not in os.environ:
        os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    handler = LineHandler(stream)
    handler.setFormatter(_LineFormatter("%(asctime)s %(levelname)-5s %(name)s  %(message)s", datefmt="%H:%M:%S"))
    # Libraries are silenced by a filter, because Prefect and vLLM reset logger levels when they are imported.
    handler.addFilter(_is_worth_a_line)
    root = logging.getLogger()
    for previous in [each for each in root.handlers if isinstance(each, LineHandler)]:
        root.removeHandler(previous)
    root.addHandler(handler)
    root.setLevel(level)


def quiet_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of `env` with variables that make libraries quiet; variables that the user has set are kept."""
    return {**NO_PHONE_HOME, **_LESS_NOISE, **env}


class StepLog:
    """Logger for the metrics of a stage: one line per step, at most one per second, and the last line."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._waiting: dict[str, Any] = {}
        self._logged = -math.inf

    def tell(self, line: dict[str, Any]) -> None:
        """Log a line of `metrics.jsonl`, unless another line was logged within the last second."""
        self._waiting = line
        if time.monotonic() - self._logged >= _STEP_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Log the newest line of metrics unless it was already logged."""
        if not self._waiting:
            return
        line, self._waiting, self._logged = self._waiting, {}, time.monotonic()
        metrics = {key: value for key, value in line.items() if key not in {"step", "time"}}
        words = [f"{key} {formatting.number(value)}" for key, value in formatting.key_metrics(metrics).items()]
        if speed := formatting.tokens_per_second(metrics):
            words.append(f"{formatting.count(speed)} tok/s")
        total = self._progress.total
        logger.info("step %s%s  %s", line["step"], f"/{total}" if total else "", "  ".join(words))


class LineHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Log handler that writes to the given stream or, by default, to the current `sys.stderr` of each record.

    The class name has no underscore: Prefect replaces the root handlers unless one has a formatter and a public name.
    """

    def __init__(self, stream: TextIO | None) -> None:
        logging.Handler.__init__(self)
        self._given = stream

    @property
    def stream(self) -> TextIO:
        """Return the stream to which the next record is written."""
        return sys.stderr if self._given is None else self._given


class _LineFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return masked(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:
        level = _SHORT.get(record.levelname, record.levelname)
        return self._style._fmt % {**record.__dict__, "levelname": level}


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    library = record.name.partition(".")[0]
    least = logging.ERROR if library in _ALARMED else logging.WARNING if library in NOISY else logging.NOTSET
    return record.levelno >= least
