"""What tests share: a store for each file and a process that talks to it, and an interpreter that reads exports."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest
from pebble import ProcessPool

from cosmos_core.models.new_interpreter import open_interpreter_pool

if TYPE_CHECKING:
    from tests.store import Proxy


@pytest.fixture(scope="session")
def interpreter() -> Iterator[ProcessPool]:
    """One interpreter, which reads the exports of many tests: to start one takes longer than what it does."""
    with open_interpreter_pool() as pool:
        pool.schedule(gc.enable)
        yield pool


@pytest.fixture
def own_interpreter() -> None:
    """For a test whose exports are read by an interpreter that has read no other, as those of a stage are."""


@pytest.fixture(autouse=True)
def _exports_share_an_interpreter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "own_interpreter" in request.fixturenames:
        return
    for name in ("cosmos_core.models.verify_export", "cosmos_core.models.verify_pipeline_export"):
        if name in sys.modules:
            shared = lambda: nullcontext(request.getfixturevalue("interpreter"))  # noqa: E731 - started when asked for
            monkeypatch.setattr(sys.modules[name], "open_interpreter_pool", shared)
    for name in ("cosmos_core.models.causal_lm", "cosmos_core.models.denoiser"):
        if name in sys.modules:
            monkeypatch.setattr(sys.modules[name], "prestart_interpreter", lambda module_name: None)


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
