"""Where a model comes from: what its manifests name, and what became of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cosmos_core.cli import lineage as show_lineage
from cosmos_core.cli_models import rollback
from cosmos_core.config.compose import load_pipeline
from cosmos_core.errors import ConfigError, CosmosError
from cosmos_core.run.directory import create_run
from cosmos_core.run.files import sha256, write_json
from cosmos_core.run.lineage import collect_lineage, find_stage_path, strip_local_path
from cosmos_core.run.manifest import commit_manifest
from cosmos_core.types import Outcome
from cosmos_core.upload.file import FileTarget
from tasks.kinds import all_kinds
from tasks.layout import prepare_stage_folder
from tasks.reuse import compute_local_fingerprint
from tasks.stage import run_stage
from tasks.stages import upload
from tests.conftest import PROGRAMS
from tests.unit.run_folder import counting_run, finish
from tests.unit.test_upload import upload_stage


def notes(stage_path: Path) -> list[tuple[int, str, str]]:
    return [(link.depth, link.name, link.status) for link in collect_lineage(stage_path)]


def test_lineage_walks_back_and_says_what_is_altered_made_again_or_gone(tmp_path: Path) -> None:
    run = counting_run(tmp_path)
    first = finish(run, "first", "one")
    second = finish(run, "second", "two")
    assert notes(second) == [(0, "second", "verified"), (1, "first", "verified")]
    (second / "out" / "a.txt").write_text("own")
    assert notes(second)[0] == (0, "second", "out/a.txt was altered")
    finish(run, "first", "another")
    assert notes(second)[1] == (1, "first", "made again since: its content is another")
    shutil.rmtree(first)
    assert notes(second)[1] == (1, "first", "gone")
    with pytest.raises(ConfigError, match=r"first has no result.json: the stage did not finish$"):
        collect_lineage(first)


def test_lineage_shows_a_shared_stage_once_and_ends_with_an_error_over_an_altered_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beside = "\n[[pipeline.stages]]\nname = '{}'\nkind = 'custom'\nentry = '{}:count'\nafter = {}\n"
    counting_run(tmp_path)
    with open(tmp_path / "counting.toml", "a") as file:
        file.write(beside.format("beside", PROGRAMS / "counting.py", "['first']"))
        file.write(beside.format("last", PROGRAMS / "counting.py", "['second', 'beside']"))
    run = create_run(load_pipeline(tmp_path / "counting.toml", (), all_kinds()))
    stages = {name: finish(run, name) for name in ("first", "second", "beside", "last")}
    assert [name for _, name, _ in notes(stages["last"])] == ["last", "second", "first", "beside"]
    show_lineage(str(stages["last"]))
    assert len(capsys.readouterr().out.splitlines()) == 4
    (stages["first"] / "out" / "a.txt").write_text("own")
    with pytest.raises(
        CosmosError, match=r"does not come from what its manifests name: first: out/a.txt has 3 bytes instead of 6$"
    ):
        show_lineage(str(stages["last"]))
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_lineage_walks_back_over_a_thousand_stages_in_a_row(tmp_path: Path) -> None:
    stages = tmp_path / "run" / "stages"
    (stages / "s0").mkdir(parents=True)
    result = commit_manifest(stages / "s0", Outcome(), kind="sft", fingerprint="f", inputs={})
    record = {"fingerprint": "f", "digest": result["digest"]}  # the same, because no stage has outputs
    for number in range(1, 1200):
        (stages / f"s{number}").mkdir()
        made = result | {"name": f"s{number}", "inputs": {f"s{number - 1}": record}}
        write_json(stages / f"s{number}" / "result.json", made, fsync=False)
    assert [(link.depth, link.name) for link in collect_lineage(stages / "s1199")] == [
        (i, f"s{1199 - i}") for i in range(1200)
    ]


def test_lineage_ends_at_the_data_and_the_model_that_no_stage_made(tmp_path: Path) -> None:
    rows, model = tmp_path / "rows.jsonl", tmp_path / "model"
    rows.write_text("{}\n")
    model.mkdir()
    (model / "config.json").write_text("{}")
    run = counting_run(tmp_path, f"first.data={rows}", f"first.model={model}")
    run_stage(run, "first")
    _, *sources = collect_lineage(run.stage_path("first"))
    assert [(link.name, link.kind, link.location, link.status) for link in sources] == [
        ("model", "model", str(model), "recorded"), ("rows.jsonl", "data", str(rows), "verified"),
    ]  # fmt: skip
    rows.write_text("[]\n")
    assert collect_lineage(run.stage_path("first"))[2].status == "altered since"
    rows.unlink()
    assert collect_lineage(run.stage_path("first"))[2].status == "gone"


def test_each_of_several_prompt_sets_is_compared_with_its_own_digest(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model_index.json").write_text("{}")
    files = [tmp_path / "red.txt", tmp_path / "blue.txt"]
    for file in files:
        file.write_text(file.stem)
    (tmp_path / "p.toml").write_text(f"""
        [policy]
        is_diffusers = true
        model_name_or_path = "{tmp_path}/model"
        [evaluate]
        prompts = {json.dumps([str(file) for file in files])}
        rewards = ["jpeg_size"]
        [[pipeline.stages]]
        name = "measure"
        kind = "evaluate"
    """)
    pipeline = load_pipeline(tmp_path / "p.toml", [f"pipeline.output_dir={tmp_path}/outputs"], all_kinds())
    run = create_run(pipeline)
    stage = run.pipeline.stage("measure")
    sources = prepare_stage_folder(run, stage, compute_local_fingerprint(run, stage)).sources
    expected = [(str(file), sha256(file)) for file in files]
    assert [(each.name, each.digest) for each in sources if each.kind == "data"] == expected


def test_the_files_of_a_published_model_are_hashed_before_its_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = counting_run(tmp_path)
    first, model = finish(run, "first", "one"), tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_text("weights")
    record = {"metrics": {}, "stage": str(first), "files": {"model.safetensors": sha256(model / "model.safetensors")}}
    FileTarget(str(tmp_path / "published")).publish(model, "v1", record)
    latest = tmp_path / "published" / "latest"
    show_lineage(str(latest))
    delivered, stage = capsys.readouterr().out.splitlines()
    assert delivered.startswith("v1 (published) ") and delivered.endswith(f"  {latest}  verified")
    assert stage.startswith("  first (custom) ") and stage.endswith("  verified")
    (latest / "model.safetensors").write_text("altered")
    with pytest.raises(CosmosError, match=r"manifests name: v1: model.safetensors was altered$"):
        show_lineage(str(latest))
    (latest / "model.safetensors").unlink()
    with pytest.raises(CosmosError, match=r"manifests name: v1: model.safetensors is gone$") as caught:
        show_lineage(str(latest))
    assert caught.value.exit_code == 1


def test_lineage_starts_from_a_file_a_stage_a_run_or_a_published_model(tmp_path: Path) -> None:
    run = counting_run(tmp_path)
    with pytest.raises(ConfigError, match="no stage of this run has made a model yet"):
        find_stage_path(run.path)
    first, second = finish(run, "first"), finish(run, "second")
    assert find_stage_path(first / "out" / "a.txt") == first
    assert find_stage_path(first) == first
    assert find_stage_path(run.path) == second
    published = tmp_path / "published" / "v1"
    published.mkdir(parents=True)
    (published / "published.json").write_text(json.dumps({"stage": str(first)}))
    (tmp_path / "published" / "latest").symlink_to("v1")
    assert find_stage_path(tmp_path / "published" / "latest") == first
    with pytest.raises(ConfigError, match=r"belongs to no run; give a run, a stage, an exported or a published model$"):
        find_stage_path(tmp_path)


def test_a_run_of_a_flow_that_has_added_no_stage_yet_has_no_model(tmp_path: Path) -> None:
    (tmp_path / "pipeline.toml").write_text("[pipeline]\nname = 'empty'\n")
    with pytest.raises(ConfigError, match="no stage of this run has made a model yet"):
        find_stage_path(tmp_path)


def test_a_public_name_has_no_folder_of_this_machine() -> None:
    expected = {
        "Qwen/Qwen3-8B": "Qwen/Qwen3-8B", "/data/models/qwen3-8b": "qwen3-8b", "~/models/mine/": "mine", "": "",
        "/root/.cache/huggingface/hub/models--Qwen--Qwen3-8B/snapshots/c0ffee": "Qwen/Qwen3-8B",
        "../rows.jsonl": "rows.jsonl", "/home/me/mine.py:make": "mine.py:make",
        "s3://bucket/models/mine": "s3://bucket/models/mine",
    }  # fmt: skip
    assert {name: strip_local_path(name) for name in expected} == expected


def test_a_published_model_does_not_come_from_a_stage_that_was_made_again_since(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = upload_stage(tmp_path)
    export, target = Path(stage.model).parent, FileTarget(tmp_path / "published")
    for text in ("first", "second"):
        (Path(stage.model) / "model.safetensors").write_text(text)
        outcome = Outcome(outputs=("model",), info={"model": "model"})
        result = commit_manifest(export, outcome, kind="export", fingerprint="e" * 64, inputs={})
        stage.inputs["export"], stage.fingerprint = {**result, "path": str(export)}, text * 8
        stage.save()
        commit_manifest(stage.path, upload.run(stage), kind="upload", fingerprint="f", inputs=stage.inputs)
    show_lineage(str(target.folder / "latest"))
    assert capsys.readouterr().out.splitlines()[0].endswith("verified")
    rollback(str(target.folder))
    said = r"manifests name: 20250101000000-firstfir: stage 'export' has made another model since$"
    with pytest.raises(CosmosError, match=said):
        show_lineage(str(target.folder / "latest"))
