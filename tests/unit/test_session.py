"""A command that is asked to stop."""

from __future__ import annotations

import logging
import os
import signal

import pytest

from cosmos_core import session


def test_a_termination_is_not_swallowed_by_a_library_that_logs_any_error_of_its_plugins() -> None:
    before = signal.signal(signal.SIGTERM, session._terminate)
    try:
        with pytest.raises(KeyboardInterrupt):
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            except Exception:  # as prefect/__init__.py does around what it imports
                logging.getLogger("library").exception("plugins failed")
    finally:
        signal.signal(signal.SIGTERM, before)
