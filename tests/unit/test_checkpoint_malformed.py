"""A manifest that does not say what was saved: its checkpoint is passed over, here and where another run looks."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from cosmos_core.checkpoint import resume
from cosmos_core.checkpoint.best import BestStep
from cosmos_core.checkpoint.load_checkpoint_model import find_checkpoint_step
from cosmos_core.checkpoint.resume import check_checkpoint, load_checkpoint, resume_obstacle
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import ModelError, StageFailed
from cosmos_core.run.stage import Stage
from cosmos_core.train import check, resume_from
from cosmos_core.train.resume_from import adopt_checkpoint
from tasks.kinds import all_kinds
from tests.effects.change import SFT, recipe, stage_of
from tests.unit.test_checkpoint import fill, is_filled_with, make_state, open_checkpoints, train_step

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # pytest drops our own filter

Damage = Callable[[Path], object]
MANIFEST_FILE = "manifest.json"
UNREADABLE = r"manifest\.json is missing or damaged"
SILENT = r"manifest\.json is damaged: it does not say"


def manifest(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Damage:
    """The manifest with what `change` makes of it."""

    def damage(policy: Path) -> None:
        found = json.loads((policy / MANIFEST_FILE).read_text())
        (policy / MANIFEST_FILE).write_text(json.dumps(found | change(found)))

    return damage


def without(key: str) -> Damage:
    """Each file without its size, for example."""

    def change(found: dict[str, Any]) -> dict[str, Any]:
        return {"files": {n: {k: v for k, v in r.items() if k != key} for n, r in found["files"].items()}}

    return manifest(change)


def text(content: str) -> Damage:
    return lambda policy: (policy / MANIFEST_FILE).write_text(content)


def folder_for(pattern: str) -> Damage:
    def damage(policy: Path) -> None:
        file = next(policy.glob(pattern))
        file.unlink()
        file.mkdir()

    return damage


def altered(pattern: str, change: Callable[[bytes], bytes]) -> Damage:
    def damage(policy: Path) -> None:
        file = next(policy.glob(pattern))
        file.write_bytes(change(file.read_bytes()))

    return damage


DAMAGES: dict[str, tuple[Damage, str]] = {
    "a bit": (altered("*.safetensors", lambda b: b[:-3] + bytes([b[-3] ^ 1]) + b[-2:]), r"rank_0.* was altered"),
    "a byte less": (altered("*.safetensors", lambda b: b[:-1]), "bytes instead of"),
    "no tensors": (lambda policy: next(policy.glob("*.safetensors")).unlink(), "is gone"),
    "no manifest": (lambda policy: (policy / MANIFEST_FILE).unlink(), "was not written to the end"),
    "another value": (altered("extra.json", lambda b: b.replace(b"2.0", b"2.1")), r"extra\.json was altered"),
    "nested without end": (text("[" * 100_000), UNREADABLE),
    "a number without end": (text('{"step": ' + "1" * 10_000 + "}"), UNREADABLE),
    "a list": (text("[]"), UNREADABLE),
    "a folder": (folder_for(MANIFEST_FILE), UNREADABLE),
    "a folder of tensors": (folder_for("*.safetensors"), r"rank_0\.safetensors is gone"),
    "no sizes": (without("size"), SILENT),
    "no digests": (without("sha256"), SILENT),
    "no files": (manifest(lambda found: {"files": {}}), SILENT),
    "a list of files": (manifest(lambda found: {"files": list(found["files"])}), SILENT),
    "words for files": (manifest(lambda found: {"files": dict.fromkeys(found["files"], "x")}), SILENT),
    "a name that no file can have": (
        manifest(lambda found: {"files": found["files"] | {"x" * 300: found["files"]["extra.json"]}}), "x{300} is gone",
    ),
    "a file left out": (
        manifest(lambda found: {"files": {n: r for n, r in found["files"].items() if n != "extra.json"}}), SILENT,
    ),
    "a word for ranks": (manifest(lambda found: {"ranks": "x"}), SILENT),
    "no ranks": (manifest(lambda found: {"ranks": 0}), SILENT),
}  # fmt: skip


def save(folder: Path, case: str, fingerprint: str = "f") -> Path:
    """Checkpoints of steps 1 and 2, the second damaged."""
    state = make_state()
    train_step(state)
    checkpoints = open_checkpoints(folder, fingerprint=fingerprint)
    for step in (1, 2):
        fill(state, float(step))
        checkpoints.save(step, state)
    damage, _ = DAMAGES[case]
    damage(folder / "step_2/policy")
    return folder


ALIKE = {"a number without end", "a folder", "no digests", "a list of files", "words for files", "a word for ranks"}


@pytest.mark.parametrize("case", [pytest.param(n, marks=[pytest.mark.full] * (n in ALIKE)) for n in DAMAGES])
def test_it_is_passed_over_with_a_warning_that_names_it_here_and_by_another_run_and_refused_where_it_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    later, reason = (
        stage_of(tmp_path / "out/second/stages/sft", recipe({**SFT, "train.resume": True})),
        DAMAGES[case][1],
    )
    stage = tmp_path / "out/first/stages/sft"
    folder, loaded = save(stage / "checkpoints", case, later.fingerprint), make_state()
    warning = rf"checkpoint {re.escape(str(folder))}/step_2 is passed over: .*{reason}"
    assert open_checkpoints(folder, fingerprint=later.fingerprint).load_latest(loaded) == 1
    assert is_filled_with(loaded, 1.0) and re.search(warning, caplog.text)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        adopt_checkpoint(later, later.fingerprint)
    assert [path.name for path in (later.path / "checkpoints").iterdir()] == ["step_1"]
    assert re.search(warning, caplog.text) and caplog.text.count("passed over") == 1
    assert caplog.messages[-1].startswith("going on from ")
    with pytest.raises(ModelError, match=reason):
        load_checkpoint(folder / "step_2/policy", make_state())
    if "altered" not in reason:  # a check hashes no files
        named = recipe({**SFT, "train.resume": str(folder / "step_2/policy")})
        with pytest.raises(ModelError, match=reason):
            check.run(stage_of(tmp_path / "check", named))
    config = StageConfig(name="export", kind="export", model="stage:sft", checkpoint="2")
    inputs: dict[str, Any] = {"sft": {"path": str(stage), "info": {}}}
    with pytest.raises(ModelError, match=reason):
        find_checkpoint_step(
            Stage(tmp_path / "export", config, Recipe(), "", None, inputs, "f", kind=all_kinds()[config.kind])
        )


def test_one_of_another_configuration_is_passed_over_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    later = stage_of(tmp_path / "out/second/stages/sft", recipe({**SFT, "train.resume": True}))
    save(tmp_path / "out/first/stages/sft/checkpoints", "no ranks", "another")
    adopt_checkpoint(later, later.fingerprint)
    assert "passed over" not in caplog.text and "so this one starts at step 0" in caplog.text


def test_a_worker_sends_heartbeats_while_it_hashes_the_checkpoint_of_another_run(tmp_path: Path) -> None:
    later = stage_of(tmp_path / "out/second/stages/sft", recipe({**SFT, "train.resume": True}))
    folder = save(tmp_path / "out/first/stages/sft/checkpoints", "a list", later.fingerprint)
    num_files = len(list((folder / "step_1/policy").iterdir())) - 1  # without the manifest
    beats: list[None] = []
    load_checkpoint(folder / "step_1/policy", make_state(), lambda: beats.append(None))
    assert len(beats) == num_files
    later.progress.beat = lambda: beats.append(None)  # type: ignore[method-assign]
    adopt_checkpoint(later, later.fingerprint)
    assert len(beats) == 2 * num_files


def test_a_checkpoint_that_its_own_run_deletes_meanwhile_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = stage_of(tmp_path / "out/second/stages/sft", recipe({**SFT, "train.resume": True}))
    folder = save(tmp_path / "out/first/stages/sft/checkpoints", "a list", later.fingerprint)
    shutil.rmtree(folder / "step_2")
    shutil.copytree(folder / "step_1", folder / "step_2")
    manifest(lambda _: {"step": 2})(folder / "step_2/policy")
    link = resume_from.link_or_copy

    def delete_first(source: Path, target: Path) -> None:
        shutil.rmtree(folder / "step_2", ignore_errors=True)
        link(source, target)

    monkeypatch.setattr(resume_from, "link_or_copy", delete_first)
    adopt_checkpoint(later, later.fingerprint)
    assert "step_2 is passed over: step_2 is gone" in caplog.text
    assert [path.name for path in (later.path / "checkpoints").iterdir()] == ["step_1"]
    monkeypatch.setattr(resume, "sha256", lambda file: file.with_name("deleted").read_bytes())
    assert "is gone" in str(resume_obstacle(folder, 1, None))


def test_a_best_step_whose_checkpoint_is_gone_is_not_named(tmp_path: Path) -> None:
    checkpoints = open_checkpoints(save(tmp_path / "checkpoints", "a list"))
    checkpoints.write_best_step(BestStep(1, "validation/loss", 0.5))
    assert json.loads((tmp_path / "best.json").read_text())["step"] == 1
    checkpoints.write_best_step(BestStep(9, "validation/loss", 0.4))  # pruned for a later one, which is damaged
    assert not (tmp_path / "best.json").exists()


def test_the_media_of_the_samples_come_along(tmp_path: Path) -> None:
    earlier = tmp_path / "out/first/stages/sft"
    later = stage_of(tmp_path / "out/second/stages/sft", recipe({**SFT, "train.resume": True}))
    save(earlier / "checkpoints", "a list", later.fingerprint)
    (earlier / "visual_output/step_1").mkdir(parents=True)
    (earlier / "visual_output/step_1/0-0.png").write_bytes(b"png")
    (earlier / "samples.jsonl").write_text('{"step": 1, "media": ["visual_output/step_1/0-0.png"]}\n')
    (later.path / "samples.jsonl").write_text('{"step": 0, "media": []}\n')  # of an attempt that saved no checkpoint
    (earlier / "completions").mkdir()
    (earlier / "completions/step_000001.jsonl").write_text("{}\n")
    (earlier / "completions/.step_000002.jsonl.7.tmp").write_text("{")  # of the other run, which still trains
    adopt_checkpoint(later, later.fingerprint)
    [media] = json.loads((later.path / "samples.jsonl").read_text())["media"]
    assert (later.path / media).read_bytes() == b"png"
    assert [path.name for path in (later.path / "completions").iterdir()] == ["step_000001.jsonl"]


def test_who_is_killed_while_a_checkpoint_is_adopted_adopts_the_metrics_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = tmp_path / "out/first/stages/sft"
    later = stage_of(tmp_path / "out/second/stages/sft", recipe({**SFT, "train.resume": True}))
    save(earlier / "checkpoints", "a list", later.fingerprint)
    (earlier / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')

    def kill(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    for is_killed in (True, False):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt) if is_killed else nullcontext():
            patched.setattr(resume_from.shutil, "copy2", kill if is_killed else shutil.copy2)
            adopt_checkpoint(later, later.fingerprint)
    assert (later.path / "metrics.jsonl").read_text() == (earlier / "metrics.jsonl").read_text()


def test_a_disk_that_is_full_while_a_checkpoint_is_copied_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = stage_of(tmp_path / "out/second/stages/sft", recipe({**SFT, "train.resume": True}))
    save(tmp_path / "out/first/stages/sft/checkpoints", "a list", later.fingerprint)

    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    monkeypatch.setattr(resume_from, "link_or_copy", refuse)
    with pytest.raises(StageFailed, match=r"^disk full while saving a copy of .*/step_1; the original is intact; free"):
        adopt_checkpoint(later, later.fingerprint)


@pytest.mark.parametrize("moment", ["load_state", "allocate_tensors", "_read_json_values"])
def test_a_named_checkpoint_that_its_own_run_deletes_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    folder = save(tmp_path / "checkpoints", "a list")
    function = getattr(resume, moment)

    def delete_first(*arguments: Any) -> Any:
        shutil.rmtree(folder / "step_1")
        return function(*arguments)

    monkeypatch.setattr(resume, moment, delete_first)
    with pytest.raises(ModelError, match=r"checkpoint .*step_1/policy: .* is gone; name another one, or none"):
        load_checkpoint(folder / "step_1/policy", make_state())


def test_a_checkpoint_that_its_own_run_deletes_is_no_error_where_it_is_only_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = stage_of(tmp_path / "out/second/stages/sft", recipe({**SFT, "train.resume": True}))
    save(tmp_path / "out/first/stages/sft/checkpoints", "a list", "another")
    read = resume_from.read_manifest

    def delete_after(policy: Path) -> dict[str, Any]:
        content = read(policy)
        shutil.rmtree(policy)
        return content

    monkeypatch.setattr(resume_from, "read_manifest", delete_after)
    adopt_checkpoint(later, later.fingerprint)
    assert "so this one starts at step 0" in caplog.text


def test_a_checkpoint_in_a_folder_without_a_step_is_refused(tmp_path: Path) -> None:
    state = make_state()
    open_checkpoints(tmp_path / "checkpoints", fingerprint="f").save(1, state)
    policy = (tmp_path / "checkpoints/step_1").rename(tmp_path / "final") / "policy"
    for read in (check_checkpoint, lambda folder: load_checkpoint(folder, state)):
        with pytest.raises(ModelError, match="final/policy: it is in no folder step_N"):
            read(policy)
