"""What the tests of this folder share: tiny models, prepared rows, and a state of torch that each leaves as it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch

from cosmos_core.data import prepare
from tests.effects.change import SMALL, recipe, stage_of
from tests.unit.tiny_model import save_tiny_model


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    """Restore the random state and the choice of deterministic algorithms."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    with torch.random.fork_rng():
        yield
    torch.use_deterministic_algorithms(was_deterministic)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in the folder of the test."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, which no test changes."""
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and prepared rows: eight to learn, two held out."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": f"{i} is a number"}) + "\n" for i in range(10)))
    dataset = {"train.train_policy.dataset.name": str(folder / "rows.jsonl"), "train.train_policy.dataset.test_size": 2}
    save_tiny_model(folder / "model")
    prepare.run(stage_of(folder / "rows", recipe({**SMALL, **dataset}), kind="prepare", model=folder / "model"))
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hub with `org/tiny`, whose embeddings are tied in `main` alone, not in `v2`, and `org/other` without ties."""
    for name, branch in (("tiny", "main"), ("tiny", "v2"), ("other", "main")):
        cache, commit = tmp_path / f"models--org--{name}", branch.ljust(40, "0")
        (cache / "refs").mkdir(parents=True, exist_ok=True)
        (cache / "refs" / branch).write_text(commit)
        save_tiny_model(cache / "snapshots" / commit, tied=(name, branch) == ("tiny", "main"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
