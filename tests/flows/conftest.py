"""One Prefect server for the flows that run in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_SSL_CERT_FILE, PREFECT_API_URL, temporary_settings

from tests.commands.orchestra import Orchestra


@pytest.fixture(scope="session")
def prefect_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The settings of its clients."""
    server = Orchestra(tmp_path_factory.mktemp("prefect"))
    try:
        server.start_server()
        yield {name: server.settings[name] for name in ("PREFECT_API_URL", "PREFECT_API_SSL_CERT_FILE")}
    finally:
        server.close()


@pytest.fixture(scope="module")
def harness(prefect_settings: dict[str, str]) -> Iterator[None]:
    """Settings of this process that name the server."""
    settings = {each: prefect_settings[each.name] for each in (PREFECT_API_URL, PREFECT_API_SSL_CERT_FILE)}
    with temporary_settings(settings):
        yield
        EventsWorker.drain_all(timeout=5)  # before what follows talks to another server
