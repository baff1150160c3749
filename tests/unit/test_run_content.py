"""What counts as the content of a stage's inputs: files as they will be read, and commits of names on the Hub."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from cosmos_core.config.compose import Pipeline
from cosmos_core.errors import ConfigError, CosmosError, DataError, ModelError
from cosmos_core.run.content import list_data_files, list_model_files
from cosmos_core.run.digests import DigestCache
from cosmos_core.run.directory import create_run, open_or_create_run, open_run
from cosmos_core.run.hub import pin_hub_revisions
from cosmos_core.run.inputs import check_inputs
from cosmos_core.run.plan import plan_stages
from tasks.kinds import all_kinds
from tests.conftest import wait_until
from tests.unit.run_folder import counting_run, fingerprint_of, finish, load_recipe, make_inputs

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "1" * 40, "2" * 40


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def settle(*files: Path) -> None:
    """Wait until the clock of the file system has gone on: a file that changed this instant is not remembered."""
    newest = max(file.stat().st_ctime for file in files)
    wait_until(lambda: time.time() > newest + 0.15, 60, "the clock has gone on")


def test_a_byte_that_changed_in_place_counts_although_the_time_was_set_back(tmp_path: Path) -> None:
    file, cache = tmp_path / "weights", tmp_path / "digests.jsonl"
    file.write_text("one")
    settle(file)
    assert DigestCache(cache).digest_file(file) == sha256("one")
    status = file.stat()
    with open(file, "r+") as opened:
        opened.write("two")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert DigestCache(cache).digest_file(file) == sha256("two")


def test_what_is_remembered_is_believed_unless_everything_is_to_be_hashed(tmp_path: Path) -> None:
    file, cache = tmp_path / "weights", tmp_path / "digests.jsonl"
    file.write_text("one")
    settle(file)
    digest = DigestCache(cache).digest_file(file)
    cache.write_text(cache.read_text().replace(digest, "0" * 64))  # as after a change that the file system hides
    assert DigestCache(cache).digest_file(file) == "0" * 64
    thorough = DigestCache(cache, ignores_cache=True)
    assert thorough.digest_file(file) == sha256("one")
    assert DigestCache(cache).digest_file(file) == sha256("one"), "what was found out is remembered"


@pytest.mark.parametrize("name", ["rows.jsonl", pytest.param("model/model.safetensors", marks=pytest.mark.full)])
def test_verify_hashes_the_inputs_of_a_stage_again(tmp_path: Path, name: str) -> None:
    make_inputs(tmp_path)
    run = create_run(load_recipe(tmp_path))
    for stage in ("prepare", "sft"):
        finish(run, stage)
    decisions = plan_stages(run.pipeline, run.pipeline.stage_kinds, run.output_dir)
    assert {decisions[stage].action for stage in ("prepare", "sft")} == {"adopt"}
    file = tmp_path / name
    status = file.stat()
    content = file.read_text()
    file.write_text(content[:-1] + "?")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    cache = run.output_dir / ".cosmos" / "digests.jsonl"
    settle(file)
    DigestCache(cache).digest_file(file)
    cache.write_text(cache.read_text().replace(sha256(content[:-1] + "?"), sha256(content)))
    quick = plan_stages(run.pipeline, run.pipeline.stage_kinds, run.output_dir)
    assert {quick[stage].action for stage in ("prepare", "sft")} == {"adopt"}, "the cache is believed"
    thorough = plan_stages(run.pipeline, run.pipeline.stage_kinds, run.output_dir, ignores_cache=True)
    assert "run" in {thorough[stage].action for stage in ("prepare", "sft")}
    again = replace(open_run(run.path, all_kinds()), should_verify_files=True)
    assert again.digest_cache.digest_file(file) == sha256(content[:-1] + "?")


def test_a_damaged_cache_of_digests_costs_time_only(tmp_path: Path) -> None:
    file, cache = tmp_path / "weights", tmp_path / "digests.jsonl"
    file.write_text("one")
    settle(file)
    for damage in ("", "[]\n", "{\n", '["FILE", 3]\n', '["FILE", [1], "x"', "\x00", '{"FILE": [1]}'):
        cache.write_text(damage.replace("FILE", str(file)))
        assert [DigestCache(cache).digest_file(file) for _ in range(3)] == [sha256("one")] * 3, damage


def test_stages_side_by_side_may_hash_at_once(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}" for number in range(40)]
    for file in files:
        file.write_text(file.name)
    settle(*files)
    cache = tmp_path / "cache" / "digests.jsonl"
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda file: DigestCache(cache).digest_file(file), files))
    assert found == [sha256(file.name) for file in files]
    assert {json.loads(line)[0] for line in cache.read_text().splitlines()} == {str(file) for file in files}


def test_a_cache_of_mostly_older_digests_is_written_anew(tmp_path: Path) -> None:
    file, cache = tmp_path / "weights", tmp_path / "digests.jsonl"
    cache.write_text("".join(json.dumps([str(file), [0, 0, 0, number], "x"]) + "\n" for number in range(3000)))
    DigestCache(cache)
    assert cache.read_text() == json.dumps([str(file), [0, 0, 0, 2999], "x"]) + "\n"


def names(files: list[Path], folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in files)


def write(folder: Path, *files: str) -> Path:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def write_index(folder: Path, *files: object, name: str = INDEX) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps({"weight_map": {f"tensor.{i}": file for i, file in enumerate(files)}}))


def test_links_to_files_and_folders_are_followed(tmp_path: Path) -> None:
    data = write(tmp_path / "data", "a.jsonl", "NOTES.md", ".hidden/x.jsonl", ".y.jsonl")
    write(tmp_path / "elsewhere", "b.jsonl", "deep/c.jsonl", "d.txt")
    (data / "more").symlink_to(tmp_path / "elsewhere")
    (data / "e.jsonl").symlink_to(tmp_path / "elsewhere" / "d.txt")
    (data / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    assert names(list_data_files(data, ("*.jsonl",)), data) == [
        "a.jsonl",
        "e.jsonl",
        "more/b.jsonl",
        "more/deep/c.jsonl",
    ]


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    data = write(tmp_path / "data", "deep/a.jsonl")
    (data / "deep" / "back").symlink_to(data)
    with pytest.raises(ConfigError, match=r"data/deep/back: links lead in a circle; remove the one that leads back$"):
        list_data_files(data)


def test_of_weights_with_an_index_those_count_that_it_names(tmp_path: Path) -> None:
    model = write(tmp_path / "model", "config.json", "a.safetensors", "b.safetensors", "left.safetensors", "old.bin",
                  "adapter_model.safetensors", "sub/c.safetensors", "sub/other.safetensors")  # fmt: skip
    write_index(model, "a.safetensors", "b.safetensors", "sub/c.safetensors")
    assert names(list_model_files(model), model) == [
        "a.safetensors", "adapter_model.safetensors", "b.safetensors", "config.json", INDEX, "sub/c.safetensors",
        "sub/other.safetensors",
    ]  # fmt: skip


def test_one_file_of_all_weights_counts_beside_an_index_because_it_is_read_first(tmp_path: Path) -> None:
    model = write(tmp_path / "model", "model.safetensors", "a.safetensors")
    write_index(model, "b.safetensors", 3)
    assert names(list_model_files(model), model) == ["model.safetensors", INDEX]


@pytest.mark.parametrize("name", ["../outside.safetensors", "/tmp/outside.safetensors", "sub/../../outside.bin"])
def test_an_index_that_leaves_its_folder_is_refused_before_anything_runs(tmp_path: Path, name: str) -> None:
    make_inputs(tmp_path)
    write_index(tmp_path / "model", name)
    with pytest.raises(ModelError) as caught:
        check_inputs(load_recipe(tmp_path))
    assert str(caught.value) == (
        f"{tmp_path}/recipe.toml: stage 'prepare': {tmp_path}/model/{INDEX} names {name!r}, which lies outside of its "
        "folder; a model is one folder: copy the file there"
    )


def test_a_damaged_index_is_left_to_the_worker(tmp_path: Path) -> None:
    model = write(tmp_path / "model", "a.safetensors")
    for content in ("{", "[]", '{"weight_map": []}', '{"weight_map": {"a": 3}}'):
        (model / INDEX).write_text(content)
        assert names(list_model_files(model), model) == [INDEX], content


def test_what_is_no_file_is_refused_instead_of_read_without_end(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for name in ("/dev/zero", f"{tmp_path}/pipe"):
        with pytest.raises(DataError, match=rf"'{name}' is neither a file nor a folder; rows cannot be read twice"):
            check_inputs(load_recipe(tmp_path, f"train.train_policy.dataset.name={name}"))
        with pytest.raises(DataError, match=rf"custom.dataset.media_path = '{name}': no such folder"):
            check_inputs(load_recipe(tmp_path, f"custom.dataset.media_path={name}"))
        with pytest.raises(ConfigError, match=rf"{name} is no regular file, .* may be read without end"):
            DigestCache(tmp_path / "digests.jsonl").digest_file(Path(name))
    os.mkfifo(tmp_path / "model/pipe.json")
    assert "pipe.json" not in names(list_model_files(tmp_path / "model"), tmp_path / "model")


def visual(folder: Path) -> tuple[str, ...]:
    """Settings of a recipe whose rows and images are named in `custom.dataset`."""
    return (
        "train.train_policy.dataset.name=''",
        f"custom.dataset={{annotation_path='{folder}/notes.json', media_path='{folder}/media'}}",
    )


def test_rows_and_images_of_custom_dataset_count_by_content(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    write(tmp_path, "notes.json", "media/a.png", "media/deep/b.jpg", "media/readme.txt")
    pipeline = load_recipe(tmp_path, *visual(tmp_path))
    stages = ("prepare", "sft", "validate")
    values = [{name: fingerprint_of(pipeline, name).value for name in stages}]
    for name in ("notes.json", "media/a.png", "media/deep/b.jpg"):
        (tmp_path / name).write_text("other")
        values.append({stage: fingerprint_of(pipeline, stage).value for stage in stages})
    assert len({found["prepare"] for found in values}) == 4
    assert {found["sft"] for found in values} == {values[0]["sft"]}, "training has the digest of what was prepared"
    (tmp_path / "media/readme.txt").write_text("other")
    assert fingerprint_of(pipeline, "prepare").value == values[-1]["prepare"]
    os.rename(tmp_path / "notes.json", tmp_path / "renamed.json")
    renamed = load_recipe(tmp_path, visual(tmp_path)[0], visual(tmp_path)[1].replace("notes.json", "renamed.json"))
    assert {name: fingerprint_of(renamed, name).value for name in stages} == values[-1]


def test_whatever_custom_dataset_names_counts_for_a_function_of_a_user(tmp_path: Path) -> None:
    write(tmp_path, "notes.json", "media/clip.mp4")
    settings = f"custom.dataset={{annotation_path='{tmp_path}/notes.json', media_path='{tmp_path}/media'}}"
    values = []
    for name in ("none", "notes.json", "media/clip.mp4"):
        (tmp_path / name).write_text("other")
        values.append(fingerprint_of(counting_run(tmp_path, settings).pipeline, "first").value)
    assert len(set(values)) == 3


def test_images_beside_rows_count_when_the_model_has_a_processor(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    write(tmp_path, "images/a.png")

    def change() -> bool:
        before = fingerprint_of(load_recipe(tmp_path), "prepare").value
        (tmp_path / "images/a.png").write_text(before)
        return fingerprint_of(load_recipe(tmp_path), "prepare").value != before

    assert not change()
    write(tmp_path, "model/preprocessor_config.json")
    assert change()


class Hub:
    """A Hub that knows one model and one data set; `commits` is what their branches point at."""

    def __init__(self) -> None:
        self.commits = {"/api/models/org/model/revision/main": FIRST, "/api/datasets/org/rows/revision/main": FIRST,
                        "/api/models/org/model/revision/v2": SECOND}  # fmt: skip
        self.asked: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if "/revision/" in self.path:
                    hub.asked.append(self.path)
                commit = hub.commits.get(self.path)
                self.send_response(200 if commit else 404)
                if not commit:
                    self.send_header("X-Error-Code", "RepoNotFound")
                self.end_headers()
                self.wfile.write(json.dumps({"id": "org/model", "sha": commit}).encode() if commit else b"{}")

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    found = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{found.server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield found
    found.server.shutdown()


def named_recipe(folder: Path, *settings: str) -> Pipeline:
    make_inputs(folder)
    return load_recipe(
        folder, "policy.model_name_or_path=org/model", "train.train_policy.dataset.name=org/rows", *settings
    )


def revisions(pipeline: Pipeline, stage: str) -> tuple[str | None, str]:
    recipe = pipeline.recipes[stage]
    return recipe.policy.model_revision, recipe.train.train_policy.dataset.revision


def test_names_on_the_hub_are_pinned_to_the_commits_that_they_mean_now(tmp_path: Path, hub: Hub) -> None:
    found = pin_hub_revisions(named_recipe(tmp_path))
    assert revisions(found, "prepare") == (FIRST, FIRST)
    assert revisions(found, "sft") == (FIRST, "")
    assert revisions(found, "export") == (None, ""), "it reads the model of a stage"
    assert len(hub.asked) == 2, "once for each name"
    tagged = pin_hub_revisions(named_recipe(tmp_path, "policy.model_revision=v2"))
    assert revisions(tagged, "sft") == (SECOND, "")
    hub.asked.clear()
    assert revisions(pin_hub_revisions(found), "prepare") == (FIRST, FIRST)
    assert hub.asked == [], "a commit needs nobody to ask"


def test_a_model_that_moved_on_the_hub_is_another_and_a_run_keeps_its_own(tmp_path: Path, hub: Hub) -> None:
    pipeline = named_recipe(tmp_path)
    run = open_or_create_run(pipeline, run_id="mine")
    assert revisions(run.pipeline, "prepare") == (FIRST, FIRST)
    hub.commits["/api/models/org/model/revision/main"] = SECOND
    again = open_or_create_run(pipeline, run_id="mine")
    assert (again.id, revisions(again.pipeline, "sft")) == ("mine", (FIRST, ""))
    other = create_run(pipeline)
    for stage in ("prepare", "sft"):
        assert fingerprint_of(other.pipeline, stage).value != fingerprint_of(run.pipeline, stage).value
        difference = fingerprint_of(other.pipeline, stage).describe_difference(fingerprint_of(run.pipeline, stage))
        assert "org/model changed" in difference
    with pytest.raises(ConfigError, match=r"run mine exists and was made with other settings .*model_revision"):
        open_or_create_run(named_recipe(tmp_path, "policy.model_revision=v2"), run_id="mine")


def test_without_a_network_the_cache_says_which_commit_it_has(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cache = tmp_path / "cache"
    write(cache, "models--org--model/refs/main").joinpath("models--org--model/refs/main").write_text(SECOND)
    (cache / "datasets--org--rows" / "snapshots" / FIRST).mkdir(parents=True)  # `datasets` writes no refs
    assert revisions(pin_hub_revisions(named_recipe(tmp_path)), "prepare") == (SECOND, FIRST)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub.server.shutdown()
    hub.server.server_close()
    assert revisions(pin_hub_revisions(named_recipe(tmp_path)), "prepare") == (SECOND, FIRST)
    assert hub.asked == []


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        (("policy.model_name_or_path=org/none",), ModelError, "the model 'org/none': no folder here, and which commit "
         "'main' is on the Hub cannot be found out: 404"),
        (("policy.model_revision=v3",), ModelError, "the model 'org/model': no folder here, and which commit 'v3'"),
        (("train.train_policy.dataset.name=org/none",), DataError, "the data set 'org/none': no folder here"),
    ],
)  # fmt: skip
def test_what_the_hub_does_not_have_is_one_line_before_anything_runs(
    tmp_path: Path, hub: Hub, settings: tuple[str, ...], error: type[CosmosError], said: str
) -> None:
    with pytest.raises(error) as caught:
        create_run(named_recipe(tmp_path, *settings))
    assert str(caught.value).startswith(f"{tmp_path}/recipe.toml: stage 'prepare': {said}")
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("; check the name, download it, or write the commit as its revision")
    assert not (tmp_path / "outputs").exists()


def test_what_nobody_can_tell_is_one_line(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError) as caught:
        pin_hub_revisions(named_recipe(tmp_path))
    assert str(caught.value) == (
        f"{tmp_path}/recipe.toml: stage 'prepare': the model 'org/model': no folder here, and which commit 'main' is "
        f"on the Hub cannot be found out: the Hub {constants.ENDPOINT} cannot be asked (HF_HUB_OFFLINE is set), and "
        f"{tmp_path}/cache/models--org--model does not say; check the name, download it, or write the commit as its "
        "revision"
    )
