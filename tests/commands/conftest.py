"""What the tests with a real Prefect server share: one server for each file, with the workers that it asks for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.conftest import Workspace, processes_below

if TYPE_CHECKING:
    from tests.commands.orchestra import Orchestra
    from tests.store import Proxy


@pytest.fixture(scope="module")
def s3() -> Iterator[Proxy]:
    """A store that this process, and those that it starts, talk to."""
    from tests import store

    with store.store() as proxy, pytest.MonkeyPatch.context() as patch:
        store.use(proxy.url, patch)
        yield proxy


@pytest.fixture(scope="module")
def orchestra(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Orchestra]:
    """A server; with `POOLS` in the file a worker for each of them, which has a folder of runs of its own, and a store
    that all can reach."""
    from tests.commands.orchestra import Orchestra

    pools = getattr(request.module, "POOLS", ())
    if pools:
        request.getfixturevalue("s3")
    folder = tmp_path_factory.mktemp("orchestra")
    found = Orchestra(folder)
    try:
        found.open()
        for pool in pools:
            found.start_worker(pool)
        yield found
    finally:
        found.close()
    assert not processes_below(folder)


@pytest.fixture
def place(workspace: Workspace, orchestra: Orchestra) -> Workspace:
    """A workspace whose commands talk to the server, and to the store if there is one."""
    workspace.environment |= orchestra.settings
    return workspace
