"""A Hub that accepts connections and says nothing."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from huggingface_hub import constants

from cosmos_core.errors import CosmosError
from cosmos_core.run.hub import Repository, resolve_commit


@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_a_silent_hub_is_named_and_the_next_repository_does_not_wait_for_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    repositories: list[Repository] = [(kind, f"org/{name}", "main") for name in ("first", "second")]  # type: ignore[misc]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", url)
        said = rf"the Hub {url} cannot be asked \(no response within 0.2 s\)"
        with pytest.raises(CosmosError, match=said):
            resolve_commit(repositories[0], timeout_seconds=0.2)
        with pytest.raises(CosmosError, match=said):
            resolve_commit(repositories[1], timeout_seconds=3600.0)
