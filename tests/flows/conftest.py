"""Prefect's own test server, one for each file that asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prefect.events.worker import EventsWorker


@pytest.fixture(scope="module")
def harness() -> Iterator[None]:
    """Settings of this process that name the server."""
    from prefect.testing.utilities import prefect_test_harness  # imported here: it imports the server

    EventsWorker.drain_all(timeout=5)  # one of an earlier test of this process would send to the server of that test
    with prefect_test_harness(server_startup_timeout=120):
        yield
