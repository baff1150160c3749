"""Names that are longer than a path can be, in every key that names a file: refused in one line."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from huggingface_hub import constants

from cosmos_core.errors import EXIT_USAGE, ConfigError, CosmosError
from cosmos_core.run.directory import create_run
from tests.unit.run_folder import load_recipe, make_inputs
from tests.unit.test_config_load import refused

LONG = "a" * 300
KEYS = (
    "policy.model_name_or_path", "policy.lora.lora_path", "train.resume", "train.train_policy.dataset.name",
    "custom.dataset.media_path", "custom.dataset.annotation_path", "validation.reward_function", "pipeline.output_dir",
    "pipeline.python",
)  # fmt: skip
HUB = {"policy.model_name_or_path": "the model ", "train.train_policy.dataset.name": "the data set "}
"""What the message calls what may be on the Hub."""
NO_PATHS = ("train.train_policy.dataset.split", "rollout.backend")
"""Names a part of the data, and a thing that fine-tuning does not use."""


FURTHER = [pytest.param(name, marks=pytest.mark.full) for name in (LONG, f"./{LONG}", f"{LONG}:f")]


@pytest.mark.parametrize("name", [f"org/{LONG}", f"{LONG}.py:f", *FURTHER])
def test_a_name_longer_than_a_path_can_be_is_refused_in_a_line_with_its_key(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    make_inputs(tmp_path)
    for key in KEYS:
        with pytest.raises(CosmosError) as caught:
            create_run(load_recipe(tmp_path, f"{key}={name}"))
        said = str(caught.value)
        assert key in said or HUB[key] in said, said
        assert said.isprintable() and len(said) < 1000 and caught.value.exit_code == EXIT_USAGE
    assert not list(tmp_path.glob("outputs/*/pipeline.toml")), "what is refused leaves no run"
    for key in NO_PATHS:
        with suppress(ConfigError):  # as a name that cannot be imported
            assert create_run(load_recipe(tmp_path, f"{key}={name}")).path.is_dir()


def test_a_name_that_leaves_no_room_for_that_of_its_prepare_stage_is_refused(tmp_path: Path) -> None:
    stage = 'kind = "sft"\noverrides.train.train_policy = { type = "sft", dataset.name = "org/rows" }\n'
    text = f'[policy]\nmodel_name_or_path = "org/model"\n[[pipeline.stages]]\nname = "{"a" * 60}"\n{stage}'
    assert "prepares its rows, NAME-data, may have 64 characters; shorten the name" in refused(tmp_path, text)
