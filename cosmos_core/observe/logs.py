"""Log lines of the command line and the worker, and the switches that keep libraries from phoning home.

One line a record, `12:03:44 INFO  cosmos_core.train  message`. Of what a stage measures a line a step, if there is time
for it, has the few metrics that a table has; all of them are in `metrics.jsonl`.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from cosmos_core.environment import masked
from cosmos_core.observe import wording
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
}
"""Environment variables under which nothing that we start reports to its makers."""
_LESS_NOISE = {"TORCH_LOGS": "-torch.utils._pytree"}
"""torch has a handler of its own, which tells of each enumeration that torchao registers twice."""

NOISY = frozenset({
    "PIL", "accelerate", "asyncio", "datasets", "filelock", "fsspec", "httpcore", "httpx", "huggingface_hub",
    "matplotlib", "numexpr", "prefect", "ray", "tensorboard", "torch", "transformers", "urllib3", "uvicorn",
    "wandb",
})  # fmt: skip
"""Top-level loggers of which only warnings and errors are shown."""
_ALARMED = frozenset({"torchao", "vllm"})
"""Of these only errors: vLLM warns a dozen times at each start, of servers and kernels, and at each weight sync, and
torchao of each kernel that it could not load here."""

_STEP_SECONDS = 1.0

_SHORT = {"WARNING": "WARN", "CRITICAL": "FATAL"}


def configure(level: str | int = "INFO", stream: TextIO | None = None) -> None:
    """Send every log record of this process to `stream` as one line; calling it again replaces the last set-up.

    None: whatever `sys.stderr` is at that moment, so that a live display may stand below the lines.
    Call it before vLLM is imported: it sets `VLLM_CONFIGURE_LOGGING=0`, without which vLLM adds a handler of its own.
    """
    if "VLLM_LOGGING_CONFIG_PATH" not in os.environ:
        os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    handler = LineHandler(stream)
    handler.setFormatter(_LineFormatter("%(asctime)s %(levelname)-5s %(name)s  %(message)s", datefmt="%H:%M:%S"))
    # A filter here and not levels on the loggers: Prefect and vLLM reset those when they are imported.
    handler.addFilter(_is_worth_a_line)
    root = logging.getLogger()
    for old in [each for each in root.handlers if isinstance(each, LineHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)


def quiet_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of `env` with what keeps libraries quiet added; what the user has set stays."""
    return {**NO_PHONE_HOME, **_LESS_NOISE, **env}


class StepLog:
    """Logs the metrics of a stage: a line a step, at most one a second, and the last."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._waiting: dict[str, Any] = {}
        self._logged = -math.inf

    def tell(self, line: dict[str, Any]) -> None:
        """Take a line of `metrics.jsonl`."""
        self._waiting = line
        if time.monotonic() - self._logged >= _STEP_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Log the newest line unless it is logged."""
        if not self._waiting:
            return
        line, self._waiting, self._logged = self._waiting, {}, time.monotonic()
        metrics = {key: value for key, value in line.items() if key not in {"step", "time"}}
        words = [f"{key} {wording.number(value)}" for key, value in wording.key_metrics(metrics).items()]
        if speed := wording.tokens_per_second(metrics):
            words.append(f"{wording.count(speed)} tok/s")
        total = self._progress.total
        logger.info("step %s%s  %s", line["step"], f"/{total}" if total else "", "  ".join(words))


class LineHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the given stream, or to `sys.stderr` as it is at the time of each record.

    Public by name: Prefect replaces the root's handlers unless one has a formatter and a name without underscore.
    """

    def __init__(self, stream: TextIO | None) -> None:
        logging.Handler.__init__(self)
        self._given = stream

    @property
    def stream(self) -> TextIO:
        """Return where the next record goes."""
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
