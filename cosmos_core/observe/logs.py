"""Configure the log output of the command line and the worker, and the environment variables that disable telemetry.

Each record is one line, `12:03:44 INFO cosmos_core.train message`. The log contains the most important metrics of a
step, at most once per second; `metrics.jsonl` contains all metrics of all steps.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from cosmos_core.environment import mask_text
from cosmos_core.observe.formatting import find_tokens_per_second, format_count, format_number, select_key_metrics

if TYPE_CHECKING:
    from cosmos_core.run.progress import ProgressWriter

logger = logging.getLogger(__name__)

NO_TELEMETRY_VARIABLES: dict[str, str] = {
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
"""Environment variables that disable the telemetry of the libraries that this package uses."""
_WARNING_FILTER_VARIABLES = {"TORCH_LOGS": "-torch.utils._pytree"}
"""Environment variables that silence repeated warnings of torch about enumerations that torchao registers twice."""

NOISY_LOGGERS = frozenset({
    "PIL", "accelerate", "asyncio", "datasets", "filelock", "fsspec", "httpcore", "httpcore2", "httpx", "httpx2",
    "huggingface_hub", "matplotlib", "numexpr", "openai", "prefect", "ray", "tensorboard", "torch", "transformers",
    "urllib3", "uvicorn", "wandb",
})  # fmt: skip
"""Names of top-level loggers whose records are shown only from level WARNING."""
_ERROR_ONLY_LOGGERS = frozenset({"torchao", "vllm"})
"""Names of top-level loggers whose records are shown only from level ERROR: they log many warnings at each start."""

_MIN_LOG_INTERVAL_SECONDS = 1.0

_SHORT_LEVEL_NAMES = {"WARNING": "WARN", "CRITICAL": "FATAL"}


def configure_logging(level: str | int = "INFO", stream: TextIO | None = None) -> None:
    """Write every log record of this process as one line to `stream` or, if it is None, to the current `sys.stderr`,
    which a live display can redirect. A later call replaces the configuration. Call this function before importing
    vLLM: it sets `VLLM_CONFIGURE_LOGGING=0`, without which vLLM adds its own handler."""
    if "VLLM_LOGGING_CONFIG_PATH" not in os.environ:
        os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    line_handler = LineHandler(stream)
    line_handler.setFormatter(_LineFormatter("%(asctime)s %(levelname)-5s %(name)s  %(message)s", datefmt="%H:%M:%S"))
    # A filter silences libraries, because Prefect and vLLM reset the levels of loggers when they are imported.
    line_handler.addFilter(_should_log_record)
    root_logger = logging.getLogger()
    for previous_handler in [each for each in root_logger.handlers if isinstance(each, LineHandler)]:
        root_logger.removeHandler(previous_handler)
    root_logger.addHandler(line_handler)
    root_logger.setLevel(level)


def add_log_silencing_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of `environment` with added variables that disable the telemetry and some warnings of libraries;
    variables that exist already keep their values."""
    return {**NO_TELEMETRY_VARIABLES, **_WARNING_FILTER_VARIABLES, **environment}


class StepLogger:
    """Logger for the metrics of a stage: one line per step, at most one per second, and always the last step."""

    def __init__(self, progress_writer: ProgressWriter) -> None:
        self._progress_writer = progress_writer
        self._unlogged_line: dict[str, Any] = {}
        self._last_log_time = -math.inf

    def log_metrics_line(self, metrics_line: dict[str, Any]) -> None:
        """Log one line of `metrics.jsonl`, or keep it for `flush` if another line was logged within the last second."""
        self._unlogged_line = metrics_line
        if time.monotonic() - self._last_log_time >= _MIN_LOG_INTERVAL_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Log the newest line of metrics unless it was already logged."""
        if not self._unlogged_line:
            return
        step_line, self._unlogged_line, self._last_log_time = self._unlogged_line, {}, time.monotonic()
        metrics = {key: value for key, value in step_line.items() if key not in {"step", "time"}}
        metric_texts = [f"{key} {format_number(value)}" for key, value in select_key_metrics(metrics).items()]
        if token_rate := find_tokens_per_second(metrics):
            metric_texts.append(f"{format_count(token_rate)} tok/s")
        num_steps = self._progress_writer.total
        logger.info("step %s%s  %s", step_line["step"], f"/{num_steps}" if num_steps else "", "  ".join(metric_texts))


class LineHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Log handler that writes to a stream or, if the stream is None, to the current `sys.stderr` at each record.

    The class name has no underscore: Prefect replaces the root handlers unless one has a formatter and a public name.
    """

    def __init__(self, stream: TextIO | None) -> None:
        logging.Handler.__init__(self)
        self._explicit_stream = stream

    @property
    def stream(self) -> TextIO:
        """Return the stream to which the next record is written."""
        return sys.stderr if self._explicit_stream is None else self._explicit_stream


class _LineFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return mask_text(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:
        level_name = _SHORT_LEVEL_NAMES.get(record.levelname, record.levelname)
        return self._style._fmt % {**record.__dict__, "levelname": level_name}


def _should_log_record(record: logging.LogRecord) -> bool:
    library_name = record.name.partition(".")[0]
    if library_name in _ERROR_ONLY_LOGGERS:
        return record.levelno >= logging.ERROR
    return library_name not in NOISY_LOGGERS or record.levelno >= logging.WARNING
