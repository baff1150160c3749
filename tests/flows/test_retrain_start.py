"""Which trainings of a retraining start from what is published."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cosmos_core.config.compose import load_pipeline
from cosmos_core.errors import ConfigError, UploadError
from cosmos_core.run.directory import create_run
from cosmos_core.run.files import write_json
from cosmos_core.run.retrain_state import compute_retrain_digest
from cosmos_core.upload.base import PUBLICATION_FILE
from cosmos_core.upload.file import FileTarget
from flows.retrain import make_start_overrides
from tasks.kinds import all_kinds
from tests.unit.tiny_model import save_tiny_model

LAST = """\
[[pipeline.stages]]
name = "again"
kind = "sft"
after = "PREVIOUS"
model = "stage:PREVIOUS"
[[pipeline.stages]]
name = "publish"
kind = "upload"
after = "again"
model = "stage:again"
target = "FOLDER/published"
"""
CHAIN = """
[train.train_policy]
type = "sft"
dataset.name = "FOLDER/rows.jsonl"
[[pipeline.stages]]
name = "sft"
kind = "sft"
"""
CHAIN += LAST.replace("PREVIOUS", "sft")


UNRELATED = """
[[pipeline.stages]]
name = "teacher"
kind = "sft"
[[pipeline.stages]]
name = "export"
kind = "export"
after = "again"
model = "stage:again"
[export]
formats = ["bf16", "int8"]
[[pipeline.stages]]
name = "small"
kind = "upload"
after = "export"
model = "stage:export"
format = "int8"
target = "FOLDER/small"
"""


def test_neither_a_training_of_another_model_nor_quantised_weights_start_from_what_is_published(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "1 + 1 = 2"}\n')
    (tmp_path / "c.toml").write_text((CHAIN + UNRELATED).replace("FOLDER", str(tmp_path)))
    pipeline = load_pipeline(tmp_path / "c.toml", (), all_kinds())
    model = save_tiny_model(tmp_path / "model")
    for name in ("published", "small"):
        FileTarget(str(tmp_path / name)).publish(model, "v1", {"version": "v1", "metrics": {}, "files": {}})
    assert make_start_overrides(pipeline) == [f"sft.policy.model_name_or_path={tmp_path}/published/v1"]
    (tmp_path / "c.toml").write_text(
        (CHAIN.partition('[[pipeline.stages]]\nname = "publish"')[0] + UNRELATED).replace("FOLDER", str(tmp_path))
    )
    with pytest.raises(ConfigError, match=r"no training reads .*/small; publish .* without quantising"):
        make_start_overrides(load_pipeline(tmp_path / "c.toml", (), all_kinds()))


def test_only_the_first_training_starts_from_what_is_published(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "1 + 1 = 2"}\n')
    (tmp_path / "c.toml").write_text(CHAIN.replace("FOLDER", str(tmp_path)))
    pipeline = load_pipeline(tmp_path / "c.toml", (), all_kinds())
    assert make_start_overrides(pipeline) == [], "nothing is"
    model = save_tiny_model(tmp_path / "model")
    FileTarget(str(tmp_path / "published")).publish(model, "v1", {"version": "v1", "metrics": {}, "files": {}})
    settings = make_start_overrides(pipeline)
    assert settings == [f"sft.policy.model_name_or_path={tmp_path}/published/v1"]
    started = load_pipeline(tmp_path / "c.toml", settings, all_kinds())
    assert started.recipes["sft"].policy.model_name_or_path == f"{tmp_path}/published/v1"
    begun = create_run(replace(started, config=started.config.model_copy(update={"output_dir": str(tmp_path)})))
    assert compute_retrain_digest(begun.pipeline) == compute_retrain_digest(pipeline), (
        "the content of the run that begins so is the same"
    )


def test_no_training_starts_from_the_base_because_the_disk_of_the_target_is_away(tmp_path: Path) -> None:
    """The gate would let anything pass, too."""
    (tmp_path / "rows.jsonl").write_text('{"text": "1 + 1 = 2"}\n')
    (tmp_path / "c.toml").write_text(CHAIN.replace("FOLDER", str(tmp_path)))
    settings = [f"pipeline.output_dir={tmp_path}/outputs"]
    model, target = save_tiny_model(tmp_path / "model"), tmp_path / "published"
    FileTarget(str(target)).publish(model, "v1", {"version": "v1", "metrics": {}, "files": {}})
    pipeline = load_pipeline(tmp_path / "c.toml", settings, all_kinds())
    settings += make_start_overrides(pipeline)
    run = create_run(load_pipeline(tmp_path / "c.toml", settings, all_kinds()), run_id="first")
    target.rename(tmp_path / "elsewhere")
    assert make_start_overrides(pipeline) == [], "no run has published there"
    run.stage_path("publish").mkdir()
    write_json(run.stage_path("publish") / PUBLICATION_FILE, {"version": "v1"})
    with pytest.raises(UploadError, match=r"^start = 'published': .*/published has no .*, but run first has published"):
        make_start_overrides(pipeline)
    (tmp_path / "elsewhere").rename(target)
    assert make_start_overrides(pipeline) == settings[1:]


@pytest.mark.parametrize("key", ["policy.lora.lora_path", "policy.model_safetensor_path", "train.resume"])
def test_nothing_changes_the_weights_of_the_published_model_that_a_training_starts_from(
    tmp_path: Path, key: str
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "1 + 1 = 2"}\n')
    (tmp_path / "c.toml").write_text(CHAIN.replace("FOLDER", str(tmp_path)))
    pipeline = load_pipeline(tmp_path / "c.toml", [f"sft.{key}={tmp_path}/old"], all_kinds())
    said = f"^stage 'sft': start = 'published': {key} = .*/old' would change the weights of .*/published"
    with pytest.raises(ConfigError, match=said):  # before the first training, since each later one would be refused
        make_start_overrides(pipeline)
    own = tmp_path / "own.py"
    own.write_text("class Target:\n    def __init__(self, _): ...\n    def published(self): ...\n")
    overrides = [f"sft.{key}={tmp_path}/old", f"publish.target={own}:Target"]
    assert make_start_overrides(load_pipeline(tmp_path / "c.toml", overrides, all_kinds())) == [], "trains on the base"


MERGED = """
[policy]
model_name_or_path = "FOLDER/model"
[train.train_policy]
type = "sft"
dataset.name = "FOLDER/rows.jsonl"
[[pipeline.stages]]
name = "first"
kind = "sft"
[[pipeline.stages]]
name = "second"
kind = "sft"
[[pipeline.stages]]
name = "merge"
kind = "merge"
after = ["first", "second"]
merge
"""
MERGED += LAST.replace("PREVIOUS", "merge")


@pytest.mark.parametrize("merge", ['method = "linear"', 'method = "ties"', 'method = "ties"\nmodel = "FOLDER/model"'])
def test_the_models_of_a_merge_and_its_base_start_from_what_is_published_and_no_training_after_it(
    tmp_path: Path, merge: str
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "1 + 1 = 2"}\n')
    text = MERGED.replace("\nmerge\n", f"\noverrides.merge.{merge}\n").replace("FOLDER", str(tmp_path))
    (tmp_path / "c.toml").write_text(text)
    model = save_tiny_model(tmp_path / "model")
    FileTarget(str(tmp_path / "published")).publish(model, "v1", {"version": "v1", "metrics": {}, "files": {}})
    overrides = make_start_overrides(load_pipeline(tmp_path / "c.toml", (), all_kinds()))
    started = load_pipeline(tmp_path / "c.toml", overrides, all_kinds())
    names = ("first", "second", "merge", "again")
    models = [started.stage(name).model or started.recipes[name].policy.model_name_or_path for name in names]
    assert models == [f"{tmp_path}/published/v1"] * 3 + ["stage:merge"]
