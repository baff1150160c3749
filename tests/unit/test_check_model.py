"""`cosmos check-model`: every family passes, and a class that does something wrong is told what."""

from __future__ import annotations

from pathlib import Path

import pytest

from cosmos_core.models.check_model import check_model
from tests import tiny_pipelines
from tests.cells import cells

NAMES = ["family", "noise levels", "text", "media", "prediction", "gradient", "adapter"]
WRONG = '''
from cosmos_core.models.sd3 import SD3


class HalfTime(SD3):
    """Tells the network half of the noise level of every other sample."""

    def nft_prepare_transformer_input(self, latents, sigma_B, text, num_conditioning_B=None):
        found = super().nft_prepare_transformer_input(latents, sigma_B, text, num_conditioning_B)
        return found | {"timestep": found["timestep"] ** 2 / 1000}

    def text_embedding(self, prompts):
        return {name: value[:1] for name, value in super().text_embedding(prompts).items()}
'''


@pytest.mark.parametrize("name", cells(tiny_pipelines.FAMILIES, {"sana", "sana_video"}))
def test_every_family_passes(name: str, tmp_path: Path) -> None:
    checks = list(check_model(str(tiny_pipelines.save(name, tmp_path / name))))
    assert [check for check in checks if not check.has_passed] == []
    assert [check.name for check in checks] == NAMES


@pytest.mark.full
def test_a_pipeline_without_a_t5_passes(tmp_path: Path) -> None:
    folder = tiny_pipelines.save("sd3", tmp_path / "sd3", has_t5=False)
    assert [check for check in check_model(str(folder)) if not check.has_passed] == []


def test_a_class_that_is_wrong_is_told_what(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    folder = tiny_pipelines.save("sd3", tmp_path / "sd3")
    found = {check.name: check for check in check_model(str(folder), f"{tmp_path / 'wrong.py'}:HalfTime")}
    assert not found["prediction"].has_passed and not found["text"].has_passed
    assert found["media"].has_passed
    [only] = check_model(str(tmp_path))
    assert not only.has_passed and "names a pipeline" in only.message
