"""Benchmarks of `train.train_policy.clean` as inputs of a `prepare` stage: files, and rows of another stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from cosmos_core.config.capabilities import check_capabilities
from cosmos_core.config.compose import Pipeline, load_pipeline
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.run.directory import create_run
from cosmos_core.run.hub import pin_hub_revisions
from cosmos_core.run.lineage import find_model_origin
from cosmos_core.run.manifest import commit_manifest
from cosmos_core.types import Outcome
from tasks.kinds import all_kinds
from tasks.layout import prepare_stage_folder
from tests.unit.run_folder import fingerprint_of, load_recipe, make_inputs
from tests.unit.test_run_content import FIRST, Hub, hub, named_recipe  # noqa: F401 - a fixture

AGAINST = "train.train_policy.clean.decontaminate_against"


def with_benchmark(folder: Path, name: str, *overrides: str) -> Pipeline:
    make_inputs(folder)
    return load_recipe(folder, f'{AGAINST}=["{name}"]', "train.train_policy.clean.near_duplicates=0.0", *overrides)


def test_the_content_of_a_benchmark_is_in_the_fingerprint_and_its_path_is_not(tmp_path: Path) -> None:
    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        (tmp_path / f"{name}.jsonl").write_text(text)
    values = {name: fingerprint_of(with_benchmark(tmp_path, f"{tmp_path}/{name}.jsonl"), "prepare") for name in "abc"}
    assert values["a"].value == values["b"].value != values["c"].value
    assert values["c"].describe_difference(values["a"]) == [f"{AGAINST}.0.name a.jsonl -> c.jsonl"]
    plain, pipeline = load_recipe(tmp_path), with_benchmark(tmp_path, f"{tmp_path}/a.jsonl")
    assert fingerprint_of(plain, "prepare").value != values["a"].value
    assert fingerprint_of(plain, "sft", prepare="x").value == fingerprint_of(pipeline, "sft", prepare="x").value
    assert (
        find_model_origin(pipeline, pipeline.stage("prepare"))["data"]
        == find_model_origin(plain, plain.stage("prepare"))["data"]
    )


def test_a_missing_benchmark_is_named_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"{AGAINST}\.0\.name = .*none\.jsonl': no such file or folder"):
        fingerprint_of(with_benchmark(tmp_path, "none.jsonl"), "prepare")


def test_a_diffusion_model_has_no_texts_to_compare(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("one")
    pipeline = with_benchmark(tmp_path, f"{tmp_path}/a.jsonl", "policy.is_diffusers=true", "validation.enable=false")
    with pytest.raises(ConfigError, match=r"train_policy\.clean: only rows of text are compared"):
        check_capabilities(pipeline)


def test_rows_of_another_stage_are_read_once_it_is_done(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    (tmp_path / "make.py").write_text("def make(stage): ...")
    (tmp_path / "p.toml").write_text(
        f"""
[pipeline]
threads = 1
output_dir = "{tmp_path}/outputs"

[[pipeline.stages]]
name = "items"
kind = "custom"
entry = "{tmp_path}/make.py:make"

[[pipeline.stages]]
name = "sft"
kind = "sft"
overrides.policy.model_name_or_path = "{tmp_path}/model"
overrides.train.train_policy.type = "sft"
overrides.train.train_policy.dataset.name = "{tmp_path}/rows.jsonl"
overrides.train.train_policy.clean.decontaminate_against = ["stage:items"]
overrides.train.train_policy.clean.near_duplicates = 0.0
"""
    )
    pipeline = load_pipeline(tmp_path / "p.toml", [], all_kinds())
    assert pipeline.stage("sft-data").after == ("items",)
    run = create_run(pipeline)
    path = run.stage_path("items")
    (path / "rows").mkdir(parents=True)
    (path / "rows/train.jsonl").write_text('{"text": "a"}\n')
    commit_manifest(path, Outcome(outputs=("rows",), info={"data": "rows"}), kind="custom", fingerprint="f", inputs={})
    stage = pipeline.stage("sft-data")
    laid_out = prepare_stage_folder(run, stage, fingerprint_of(pipeline, "sft-data"))
    clean = laid_out.recipe.train.train_policy.clean
    assert clean is not None and clean.decontaminate_against[0].name == str(path / "rows")
    data = run.stage_path("sft-data")
    data.mkdir(parents=True, exist_ok=True)
    commit_manifest(data, Outcome(info={"data": "data"}), kind="prepare", fingerprint="f", inputs={})
    assert prepare_stage_folder(run, pipeline.stage("sft"), fingerprint_of(pipeline, "sft")).data == data / "data"
    with pytest.raises(ConfigError, match=r"decontaminate_against\.0\.name = 'stage:none' is no stage"):
        load_pipeline(tmp_path / "p.toml", [f'sft.{AGAINST}=["stage:none"]'], all_kinds())


def test_a_benchmark_on_the_hub_is_pinned_in_the_stage_that_compares_rows_with_it(
    tmp_path: Path,
    hub: Hub,  # noqa: F811 - the fixture
) -> None:
    found = pin_hub_revisions(named_recipe(tmp_path, f'{AGAINST}=["{tmp_path}/rows.jsonl", {{name="org/rows"}}]'))
    for name, revision in (("prepare", FIRST), ("sft", "")):
        clean = found.recipes[name].train.train_policy.clean
        assert clean is not None and [each.revision for each in clean.decontaminate_against] == ["", revision]
