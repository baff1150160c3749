"""What a check finds out about rows, refused for the stages behind them that could not begin."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from cosmos_core.config.compose import load_pipeline
from cosmos_core.errors import DataError, StageFailed
from cosmos_core.launch.check import check_downstream_stages, run_check
from cosmos_core.launch.processes import CHECK_FOLDER_PREFIX, remove_orphans
from cosmos_core.launch.worker import AttemptSettings
from tasks.kinds import all_kinds

RECIPE = '[policy]\nmodel_name_or_path = "model"\n[train.train_policy]\ntype = "sft"\ndataset.name = "rows.jsonl"\n'


def test_a_stage_that_measures_is_refused_rows_of_which_none_are_held_out(tmp_path: Path) -> None:
    for name, more in (("plain", ""), ("measured", "[validation]\nenable = true\n")):
        (tmp_path / f"{name}.toml").write_text(RECIPE + more)
    plain, measured = (load_pipeline(tmp_path / f"{name}.toml", [], all_kinds()) for name in ("plain", "measured"))
    check_downstream_stages(plain, "prepare", {"no_held_out": "no row is held out"})
    check_downstream_stages(measured, "prepare", {})
    with pytest.raises(DataError, match=r"measured\.toml: stage 'sft': no row is held out"):
        check_downstream_stages(measured, "prepare", {"no_held_out": "no row is held out"})
    with pytest.raises(DataError, match=r"plain\.toml: stage 'sft': the data set has 1 rows"):
        check_downstream_stages(plain, "prepare", {"too_few": "the data set has 1 rows"})


def test_a_stage_that_cannot_read_images_is_refused_rows_that_have_some(tmp_path: Path) -> None:
    (tmp_path / "tp.toml").write_text(RECIPE.replace("[policy]\n", "[policy]\nparallelism.tp_size = 2\n"))
    pipeline = load_pipeline(tmp_path / "tp.toml", [], all_kinds())
    check_downstream_stages(pipeline, "prepare", {})
    message = r"tp\.toml: stage 'sft': policy\.parallelism\.tp_size = 2: this version shards"
    with pytest.raises(DataError, match=message):
        check_downstream_stages(pipeline, "prepare", {"has_images": True})


@pytest.mark.parametrize(("images", "is_refused"), [([], False), ([{"path": "a.png"}], True)])
def test_prompts_with_images_are_refused_where_rows_of_text_are_made_of_them(
    tmp_path: Path, images: list[Any], is_refused: bool
) -> None:
    stages = '[[pipeline.stages]]\nname = "sample"\nkind = "sample"\n'
    (tmp_path / "sample.toml").write_text(stages + RECIPE.replace('"sft"', '"grpo"\nreward_function = "gsm8k"'))
    pipeline = load_pipeline(tmp_path / "sample.toml", [], all_kinds())
    found: Any = {"has_images": True, "prompts": {"train": [{"images": []}, {"images": images}]}}
    message = r"stage 'sample': its prompts have images, and kind sample writes rows of text only"
    with pytest.raises(DataError, match=message) if is_refused else nullcontext():
        check_downstream_stages(pipeline, "sample-data", found)


def test_a_stage_is_refused_images_that_were_prepared_with_other_limits_than_its_model_has(tmp_path: Path) -> None:
    """The export of a training has its limits; the next rows are prepared with the processor of the base model."""
    limits = "[custom.vision]\nmax_pixels = 65536\n"
    (tmp_path / "sft.toml").write_text(RECIPE + limits)
    stages = """
[[pipeline.stages]]
name = "sft"
kind = "sft"
recipe = "sft.toml"
[[pipeline.stages]]
name = "dpo"
kind = "sft"
model = "stage:sft"
after = ["sft"]
recipe = "dpo.toml"
"""
    (tmp_path / "flow.toml").write_text(stages)
    for more in ("", limits):
        (tmp_path / "dpo.toml").write_text(RECIPE + 'trainer_type = "dpo"\n' + more)
        pipeline = load_pipeline(tmp_path / "flow.toml", [], all_kinds())
        check_downstream_stages(pipeline, "sft-data", {"has_images": True})
        check_downstream_stages(pipeline, "dpo-data", {})
        if not more:
            with pytest.raises(
                DataError, match=r"stage 'dpo': custom\.vision .* gives {'max_pixels': 65536}, and .* rows {}"
            ):
                check_downstream_stages(pipeline, "dpo-data", {"has_images": True})
    check_downstream_stages(pipeline, "dpo-data", {"has_images": True})


def test_a_check_has_its_compiled_kernels_in_its_own_folder_and_not_where_other_users_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    (tmp_path / "plain.toml").write_text(RECIPE)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $TORCHINDUCTOR_CACHE_DIR > {tmp_path}/cache\necho no room >&2\nexit 3\n")
    python.chmod(0o700)
    pipeline = load_pipeline(tmp_path / "plain.toml", [f"pipeline.python={python}", "pipeline.threads=1"], all_kinds())
    with pytest.raises(StageFailed, match=r"crashed \(exit code 3\); its log ends with: no room$"):
        run_check(pipeline, pipeline.stage("prepare"), "no.module:run")
    folder, *below = Path((tmp_path / "cache").read_text().strip()).relative_to(tempfile.gettempdir()).parts
    assert folder.startswith(CHECK_FOLDER_PREFIX) and below == [".cosmos", "compiled"]


def test_the_folder_of_a_check_outlives_a_command_in_another_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container that shares the folder of temporary files sees no processes of others."""

    def find_folder(settings: AttemptSettings) -> Any:
        remove_orphans()
        return settings.stage_path.is_dir()

    monkeypatch.setattr("psutil.pid_exists", lambda pid: False)
    monkeypatch.setattr("cosmos_core.launch.check.run_attempt", find_folder)
    (tmp_path / "plain.toml").write_text(RECIPE)
    pipeline = load_pipeline(tmp_path / "plain.toml", ["pipeline.threads=1"], all_kinds())
    assert run_check(pipeline, pipeline.stage("prepare"), "no.module:run")
