"""What tests of a store share: one for each file, and a process that talks to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.store import Proxy


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    """A store with the bucket `models`, behind a proxy that can do what networks do."""
    from tests import store

    with store.store() as found:
        yield found


@pytest.fixture
def here(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    """This process, and those that it starts, talk to the store; nothing goes wrong yet."""
    from tests import store

    proxy.reset()
    store.use(proxy.url, monkeypatch)
    return proxy
