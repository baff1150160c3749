"""What counts as something new to retrain on."""

from __future__ import annotations

from pathlib import Path

import pytest

from cosmos_core.config.compose import Pipeline, load_pipeline
from cosmos_core.run.retrain_state import compute_retrain_digest
from tasks.kinds import all_kinds
from tests.unit.run_folder import load_recipe, make_inputs

STAGES = """
[export]
formats = ["bf16", "int8"]
[[pipeline.stages]]
name = "sft"
kind = "sft"
[[pipeline.stages]]
name = "export"
kind = "export"
model = "stage:sft"
after = "sft"
[[pipeline.stages]]
name = "publish"
kind = "upload"
model = "stage:export"
after = "export"
target = "TARGET"
"""


def publishing(folder: Path, *overrides: str, target: str = "published") -> Pipeline:
    """A training whose export is published in a folder."""
    load_recipe(folder)
    text = (folder / "recipe.toml").read_text() + STAGES.replace("TARGET", str(folder / target))
    (folder / "c.toml").write_text(text)
    return load_pipeline(folder / "c.toml", overrides, all_kinds())


@pytest.mark.parametrize(
    ("start", "target", "is_new"),
    [("base", "published", True), ("published", "published", False), ("base", "model", False)],
)
def test_another_base_model_is_something_new_where_trainings_start_from_it(
    tmp_path: Path, start: str, target: str, is_new: bool
) -> None:
    """Not where it is what the pipeline itself publishes."""
    make_inputs(tmp_path)
    digests = set()
    for weights in ("weights", "others"):
        (tmp_path / "model" / "model.safetensors").write_text(weights)
        digests.add(compute_retrain_digest(publishing(tmp_path, target=target), start))
    assert len(digests) == 1 + is_new


def test_the_weights_of_an_adapter_are_something_new_and_so_is_the_format_that_is_published(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    adapter = f"sft.policy.lora.lora_path='{tmp_path}/adapter'"
    digests = [
        compute_retrain_digest(publishing(tmp_path, *each)) for each in ((), (adapter,), ("publish.format=int8",))
    ]
    (tmp_path / "adapter" / "adapter_model.safetensors").write_text("weights")
    digests.append(compute_retrain_digest(publishing(tmp_path, adapter)))
    assert len(set(digests)) == 4
