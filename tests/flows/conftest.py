"""One Prefect server for the flows that run in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_SSL_CERT_FILE, PREFECT_API_URL, temporary_settings

from tests.commands.orchestra import Orchestra
from tests.conftest import SharedServer


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    """The server, which stands still between the files that need it."""
    server = Orchestra(tmp_path_factory.mktemp("prefect"))
    loop = "PREFECT_SERVER_SERVICES_SCHEDULER_RECENT_DEPLOYMENTS_LOOP_SECONDS"
    server.environment[loop] = "60"  # nothing is scheduled
    try:
        server.start_server()
        yield SharedServer(server.folder, server.settings)
    finally:
        server.close()


@pytest.fixture(scope="module")
def harness(shared_server: SharedServer) -> Iterator[None]:
    """Settings of this process that name the server."""
    found = shared_server.wake()
    settings = {each: found[each.name] for each in (PREFECT_API_URL, PREFECT_API_SSL_CERT_FILE)}
    with temporary_settings(settings):
        yield
        EventsWorker.drain_all(timeout=5)  # before what follows talks to another server
    shared_server.pause()
