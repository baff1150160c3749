"""One Prefect server for the flows that run in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL, temporary_settings

from tests.commands.orchestra import Orchestra


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of its API."""
    server = Orchestra(tmp_path_factory.mktemp("prefect"))
    try:
        server.start_server()
        yield server.url
    finally:
        server.close()


@pytest.fixture(scope="module")
def harness(address: str) -> Iterator[None]:
    """Settings of this process that name the server."""
    with temporary_settings({PREFECT_API_URL: address}):
        yield
        EventsWorker.drain_all(timeout=5)  # before what follows talks to another server
