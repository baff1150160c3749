"""Log lines and the environment that keeps libraries quiet."""

from __future__ import annotations

import io
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cosmos_core.observe.logs import NO_TELEMETRY_VARIABLES, add_log_silencing_variables, configure_logging


@pytest.fixture(autouse=True)
def root_logger_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("VLLM_CONFIGURE_LOGGING", "0")
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_a_record_is_one_line_with_time_level_logger_and_message() -> None:
    stream = io.StringIO()
    configure_logging("INFO", stream)
    logging.getLogger("cosmos_core.x").info("step %d", 3)
    logging.getLogger("cosmos_core.x").warning("careful")
    logging.getLogger("cosmos_core.x").debug("too much")
    lines = stream.getvalue().splitlines()
    assert [re.sub(r"^\d\d:\d\d:\d\d", "HH:MM:SS", line) for line in lines] == [
        "HH:MM:SS INFO  cosmos_core.x  step 3",
        "HH:MM:SS WARN  cosmos_core.x  careful",
    ]


def test_noisy_libraries_are_heard_from_warning_on_even_when_they_reset_their_levels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = io.StringIO()
    configure_logging("DEBUG", stream)
    for name in (
        "httpx",
        "httpx2",
        "openai._base_client",
        "prefect.flow_runs",
        "vllm.engine",
        "transformers.trainer",
        "matplotlib.font_manager",
    ):
        logger = logging.getLogger(name)
        # Another test may have imported the library, which then keeps its lines to itself.
        monkeypatch.setattr(logging.getLogger(name.partition(".")[0]), "propagate", True)
        before = logger.level
        logger.setLevel(logging.DEBUG)
        logger.info("noise from %s", name)
        logger.error("trouble in %s", name)
        logger.setLevel(before)
    assert "noise" not in stream.getvalue() and stream.getvalue().count("trouble in") == 7


def test_configuring_twice_does_not_say_things_twice() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure_logging("INFO", first)
    configure_logging("INFO", second)
    logging.getLogger("cosmos_core.x").info("once")
    assert first.getvalue() == "" and second.getvalue().count("once") == 1


def test_without_a_stream_lines_follow_sys_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    configure_logging()
    late = io.StringIO()
    monkeypatch.setattr(sys, "stderr", late)
    logging.getLogger("cosmos_core.x").info("here")
    assert late.getvalue().endswith("cosmos_core.x  here\n")


def test_the_quiet_environment_yields_to_what_the_user_set() -> None:
    env = {"DO_NOT_TRACK": "0", "HOME": "/home/me"}
    quiet = add_log_silencing_variables(env)
    assert quiet["DO_NOT_TRACK"] == "0" and quiet["HOME"] == "/home/me"
    assert quiet["VLLM_NO_USAGE_STATS"] == "1" and quiet["HF_HUB_DISABLE_TELEMETRY"] == "1"
    assert NO_TELEMETRY_VARIABLES.keys() <= quiet.keys() and env.keys() == {"DO_NOT_TRACK", "HOME"}


@pytest.mark.usefixtures("executed")
def test_the_lines_survive_the_import_of_prefect_which_reads_the_switches_as_off() -> None:
    code = (
        "import logging\n"
        "from cosmos_core.observe.logs import configure_logging\n"
        "configure_logging()\n"
        "from prefect.settings import get_current_settings\n"
        "logging.getLogger('prefect.flow_runs').info('noise')\n"
        "logging.getLogger('cosmos_core.x').info('still here')\n"
        "s = get_current_settings()\n"
        "print(s.server.analytics_enabled, s.cloud.enable_orchestration_telemetry,"
        " s.server.ui.show_promotional_content, s.telemetry.enable_resource_metrics)\n"
    )
    env = {**add_log_silencing_variables({}), "PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/tmp")}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=env)
    assert done.stdout.split() == ["False"] * 4
    assert "cosmos_core.x  still here" in done.stderr and "noise" not in done.stderr + done.stdout
