"""Names that are longer than a path can be, in every key that names a file: refused in one line, or no path at all."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from huggingface_hub import constants

from cosmos_core.errors import CosmosError
from cosmos_core.run.directory import create_run
from tests.unit.run_folder import load_recipe, make_inputs

LONG = "a" * 300
KEYS = (
    "policy.model_name_or_path", "policy.lora.lora_path", "train.resume", "train.train_policy.dataset.name",
    "train.train_policy.dataset.split", "custom.dataset.media_path", "custom.dataset.annotation_path",
    "validation.reward_function", "rollout.backend", "logging.logger", "pipeline.output_dir", "pipeline.python",
)  # fmt: skip


@pytest.mark.parametrize("name", [LONG, f"org/{LONG}", f"./{LONG}", f"{LONG}.py:f", f"{LONG}:f"])
def test_a_name_longer_than_a_path_can_be_is_no_crash(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    make_inputs(tmp_path)
    for key in KEYS:
        with suppress(CosmosError):
            create_run(load_recipe(tmp_path, f"{key}={name}"))
