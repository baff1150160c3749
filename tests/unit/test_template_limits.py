"""Limits of chat templates, of many in a row as well: each has its own time, and nothing of the limits stays."""

from __future__ import annotations

import math
import resource
import signal
import time

import numpy as np
import pytest

from cosmos_core.data import template_limits
from cosmos_core.data.template_limits import limit_resources, share_template_timer
from cosmos_core.errors import ModelError


def test_each_block_of_a_shared_timer_has_its_own_time_and_the_limits_end_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(template_limits, "MAX_TEMPLATE_SECONDS", 1.0)
    before = signal.getsignal(signal.SIGALRM), resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(ModelError, match=r"^the loop runs on beyond 1 s"), share_template_timer():
        deadlines = []
        for _ in range(3):
            with limit_resources("a row"):
                deadlines.append(template_limits._process_limits.deadline)
            assert template_limits._process_limits.deadline == math.inf  # between two blocks there is no limit
        assert deadlines == sorted({*deadlines})
        with limit_resources("the loop"):
            while True:
                pass
    assert (signal.getsignal(signal.SIGALRM), resource.getrlimit(resource.RLIMIT_AS)) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_memory_is_limited_beyond_what_the_process_has_by_then() -> None:
    with share_template_timer():
        with limit_resources("a row"):
            pass
        held = np.zeros(1 << 30, np.uint8)  # address space without memory, which the kernel gives quickly
        with pytest.raises(ModelError, match=r"^the row takes more than 2 GiB of memory"), limit_resources("the row"):
            np.zeros(3 << 30, np.uint8)
        time.sleep(0.05)  # the size of the process is measured again
        with limit_resources("another row"):
            assert np.zeros((3 << 30) // 2, np.uint8).size + held.size > 2 << 30
