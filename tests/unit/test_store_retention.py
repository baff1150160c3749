"""Retention in an artifact store: what no run that stays needs may go, and nothing else does."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cosmos_core.cli import app
from cosmos_core.errors import ConfigError
from cosmos_core.run.bucket import Bucket
from cosmos_core.run.files import write_json
from cosmos_core.upload.artifact_store import ArtifactStore
from cosmos_core.upload.lease import LeaseHolder
from cosmos_core.upload.store_retention import StoreRetention
from tests.conftest import next_second
from tests.store import Proxy

STORE = "s3://models/retention"


@pytest.fixture(autouse=True)
def store(here: Proxy, tmp_path: Path) -> ArtifactStore:
    """Three runs of two pipelines; the first two have one content and one fingerprint in common, and the first has a
    checkpoint and a content that was sent and never named."""
    for each in list(Bucket("models").list_objects("retention/")):
        Bucket("models").remove(each.key)
    found = ArtifactStore(STORE)
    for run, pipeline in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        folder = tmp_path / run
        folder.mkdir()
        (folder / "pipeline.toml").write_text(f'[pipeline]\nname = "{pipeline}"\n')
        write_json(folder / "run.json", {"run_id": run})
        assert found.put_run(folder) == f"{STORE}/runs/{run}"
        result = made(folder, {"shared": "of a", "own": run} if pipeline == "a" else {"own": run}, f"f-{run}")
        found.put_outputs(folder, result)
        found.store_result(result)
        found.put_result(run, "train", result)
        if run == "a1":
            Bucket("models").write("retention/made/f-a1/checkpoints/content/00/0", b"checkpoint")
            found.put_outputs(folder, made(folder, {"forgotten": "never named"}, ""))
            next_second()  # as the clock of the store knows it
    return found


def made(folder: Path, files: dict[str, str], fingerprint: str) -> Any:
    records = []
    for name, text in files.items():
        (folder / name).write_text(text)
        records.append({"path": name, "size": len(text), "sha256": digest(text)})
    return {"outputs": records, "fingerprint": fingerprint}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def keys() -> set[str]:
    return {each.key.removeprefix("retention/") for each in Bucket("models").list_objects("retention/")}


def retention(keep: int, older_than_seconds: float = 0.0) -> StoreRetention:
    return StoreRetention(STORE, num_kept_runs=keep, older_than_seconds=older_than_seconds, min_age_seconds=0.0)


def test_what_no_run_that_stays_has_goes_and_the_rest_can_be_fetched(store: ArtifactStore, tmp_path: Path) -> None:
    before = keys()
    found = retention(keep=1)
    assert {run.name: (run.pipeline, run.reason_to_keep) for run in found.runs} == {
        "a1": ("a", ""), "a2": ("a", "one of the newest 1 of its pipeline"),
        "b1": ("b", "one of the newest 1 of its pipeline"),
    }  # fmt: skip
    assert keys() == before, "to look changes nothing"
    gone, freed = found.remove()
    lost = before - keys()
    contents = {f"objects/{sha[:2]}/{sha}" for sha in (digest("a1"), digest("never named"))}
    assert (gone, freed) == (1, found.removable_bytes) and freed > 0
    assert contents < lost and all(each.startswith(("runs/a1/", "made/f-a1/")) for each in lost - contents)
    assert not [each for each in keys() if each.startswith(("runs/a1/", "made/f-a1/"))]
    assert store.find_stored_result("f-a1") is None
    for run in ("a2", "b1"):
        result = store.read_result(run, "train")
        assert result is not None and store.find_stored_result(f"f-{run}") is not None
        store.fetch_outputs(result, tmp_path / "there" / run, {})
        assert (tmp_path / "there" / run / "own").read_text() == run
    assert retention(keep=1).remove() == (0, 0)


def test_the_checkpoints_and_the_runs_in_trackers_of_a_stopped_training_stay_with_its_run(
    store: ArtifactStore, tmp_path: Path
) -> None:
    """On another machine too, to which it moves."""
    stage, there = (tmp_path / machine / "stages" / "rl" for machine in ("b1", "there"))
    for sink in ("wandb", "mlflow", "trackio"):
        (stage / sink).mkdir(parents=True)
        (stage / sink / "id").write_text(f"of {sink}")
    store.open_record("b1", stage, "here").push()
    store.open_record("b1", there, "there").pull()
    assert {file.parent.name: file.read_text() for file in there.glob("*/id")} == {
        "wandb": "of wandb", "mlflow": "of mlflow", "trackio": "of trackio",
    }  # fmt: skip
    (policy := stage / "checkpoints" / "step_5" / "policy").mkdir(parents=True)
    write_json(policy / "manifest.json", {"files": {}})
    write_json(stage / "fingerprint.json", {"value": "f-rl"})
    assert store.open_checkpoints("f-rl", stage).push() == ["step_5"]
    store.open_record("b1", stage, "here").push()
    retention(keep=1).remove()
    assert store.open_checkpoints("f-rl", stage).list_names() == ["step_5"]
    retention(keep=0).remove()
    assert store.open_checkpoints("f-rl", stage).list_names() == []


def test_what_a_run_that_may_wait_for_an_approval_needs_stays(store: ArtifactStore, tmp_path: Path) -> None:
    (folder := tmp_path / "waits").mkdir()
    stages = '[[pipeline.stages]]\nname = "train"\n[[pipeline.stages]]\nname = "publish"\ntarget = "/published"\n'
    (folder / "pipeline.toml").write_text(f'[pipeline]\nname = "a"\n{stages}')
    write_json(folder / "run.json", {"run_id": "waits"})
    store.put_run(folder)
    result = made(folder, {"model": "trained"}, "f-waits")
    store.put_outputs(folder, result)
    store.store_result(result)
    store.put_result("waits", "train", result)
    assert retention(keep=0).remove()[0] == 3 and store.find_stored_result("f-waits") is not None
    store.put_result("waits", "publish", made(folder, {}, "f-publish"))
    assert retention(keep=0).remove()[0] == 1 and store.find_stored_result("f-waits") is None


def test_what_is_young_stays_as_the_command_says_and_a_stage_that_is_made_now_stops_it(store: ArtifactStore) -> None:
    def cosmos(*arguments: str) -> str:
        return CliRunner().invoke(app, ["clean", "--store", *arguments], catch_exceptions=False).output

    before = keys()
    listed = cosmos(STORE, "--keep", "1")
    assert "a1  a, " in listed and "stays: not old enough" in listed
    assert listed.splitlines()[-1] == "0 of 3 runs may be removed, 0 B"
    assert cosmos(STORE, "--keep", "1", "--yes").splitlines()[-1] == "removed 0 of 3 runs, 0 B"
    with pytest.raises(ConfigError, match="there is no such bucket"):
        cosmos("s3://nothing-here/x")
    assert retention(keep=0, older_than_seconds=3600).remove() == (0, 0)
    assert StoreRetention(STORE, num_kept_runs=0, older_than_seconds=0.0).remove() == (0, 0), "the last day is kept"
    lease = store.lease_result("f-new", LeaseHolder("trainer-7", 1, 1.0), lambda holder: False)
    lease.acquire(lambda holder: None)
    with pytest.raises(ConfigError, match=r"^s3://models/retention: a stage is made now on trainer-7; clean when no"):
        retention(keep=0)
    lease.release()
    assert keys() == before
    gone, _ = retention(keep=0).remove()
    assert gone == 3 and not keys(), "nobody keeps anything"
