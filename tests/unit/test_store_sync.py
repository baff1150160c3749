"""What a machine without the files of the others fetches before it makes a stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from cosmos_core.config.compose import load_pipeline
from cosmos_core.errors import ConfigError
from cosmos_core.run.directory import create_run
from cosmos_core.run.manifest import commit_manifest
from cosmos_core.types import Outcome
from tasks.kinds import all_kinds
from tasks.stage import run_stage
from tasks.store_sync import OUTPUT_DIR_VARIABLE, StageSync, open_run_from_store
from tests.conftest import PROGRAMS
from tests.store import Proxy
from tests.unit.test_artifact_store import begun

LAST_STAGES = {
    "select": 'sweep = { metric = "size", branches = [{ stages = ["first"] }, { stages = ["second"] }] }',
    "merge": "",
    "gate": 'require = ["size > 0"]',
}


@pytest.mark.parametrize("kind", ["select", "gate", pytest.param("merge", marks=pytest.mark.full)])
def test_models_that_a_stage_names_only_in_after_are_fetched(
    tmp_path: Path, here: Proxy, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A gate reads only metrics, and needs no weights."""
    stages = [f'name = "{name}"\nkind = "custom"\nentry = "{PROGRAMS}/growing.py:grow"' for name in ("first", "second")]
    stages += [f'name = "last"\nkind = "{kind}"\nafter = ["first", "second"]\n{LAST_STAGES[kind]}']
    text = "".join(f"[[pipeline.stages]]\n{stage}\n" for stage in stages)
    config = f'[pipeline]\noutput_dir = "{tmp_path}/here"\nartifact_store = "s3://models/{tmp_path.name}"\n'
    (tmp_path / "base").mkdir()
    (tmp_path / "p.toml").write_text(f'{config}{text}[policy]\nmodel_name_or_path = "{tmp_path}/base"\n')
    run = create_run(load_pipeline(tmp_path / "p.toml", (), all_kinds()), run_id="one")
    for size, name in enumerate(("first", "second")):
        path = run.stage_path(name)
        (path / "model").mkdir(parents=True)
        (path / "model" / "size.txt").write_text(str(size))
        outcome = Outcome(outputs=("model",), metrics={"size": float(size)}, info={"model": "model"})
        result = commit_manifest(path, outcome, kind="custom", fingerprint=name, inputs={})
        StageSync(run, run.pipeline.stage(name)).send_result(result)
    monkeypatch.setenv(OUTPUT_DIR_VARIABLE, str(tmp_path / "there"))
    there = open_run_from_store(StageSync(run, run.pipeline.stage("last")).send_run(), "last")
    StageSync(there, there.pipeline.stage("last")).receive_inputs()
    files = [there.stage_path(name) / "model" / "size.txt" for name in ("first", "second")]
    assert [file.is_file() for file in files] == [kind != "gate"] * 2
    if kind == "select":
        result, _ = run_stage(there, "last")
        assert result["info"]["chosen"] == "second"
        assert (there.stage_path("last") / "model" / "size.txt").read_text() == "1"


def test_a_store_without_conditional_writes_is_told_at_once(tmp_path: Path, here: Proxy) -> None:
    """Leases need them, and no attempt would pass."""
    run = begun(tmp_path, f"s3://models/{tmp_path.name}", "here")
    here.reset(lambda request: "501" if request.method == "PUT" else "")
    with pytest.raises(
        ConfigError, match=r": the store lacks a kind of PutObject, such as a write on a condition; take"
    ):
        StageSync(run, run.pipeline.stage("first")).send_run()
