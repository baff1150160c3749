"""Machines that share no disk: what one made another reads, once and verified, and goes on with."""

from __future__ import annotations

import hashlib
import shutil
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cosmos_core.config.compose import Pipeline, load_pipeline
from cosmos_core.errors import ConfigError, DataError, DiskFull, StageFailed, UploadError
from cosmos_core.run.bucket import Bucket
from cosmos_core.run.directory import Run, claim_run, create_run, extend_run, open_run
from cosmos_core.run.files import read_json
from cosmos_core.run.manifest import find_output_damage, read_result
from cosmos_core.run.process import identify_machine
from cosmos_core.run.state import read_state, update_state
from cosmos_core.upload import lease
from cosmos_core.upload.artifact_store import ArtifactStore, check_store
from cosmos_core.upload.lease import LeaseHolder
from tasks import reuse, store_sync
from tasks.kinds import all_kinds
from tasks.stage import run_stage
from tasks.store_sync import OUTPUT_DIR_VARIABLE, StageSync, open_run_from_store
from tests.attempts import use, workers
from tests.conftest import PROGRAMS, wait_until
from tests.store import Proxy, Request
from tests.unit.run_folder import COUNTING, finish
from tests.unit.test_checkpoint_upload import checkpoint

__all__ = ["workers"]
GATE = '\n[[pipeline.stages]]\nname = "gate"\nkind = "gate"\nafter = "second"\nrequire = ["count >= 4"]\n'


@pytest.fixture(autouse=True)
def url(here: Proxy, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if "workers" not in request.fixturenames:
        use(monkeypatch)
    return f"s3://models/{request.node.name[:60]}"


@pytest.fixture
def run(tmp_path: Path, url: str) -> Run:
    return begun(tmp_path, url, "here")


def chain(folder: Path, url: str, steps: int = 3) -> Pipeline:
    folder.mkdir(exist_ok=True)
    text = COUNTING.format(folder=folder, programs=PROGRAMS).replace("steps = 3", f"steps = {steps}") + GATE
    (folder / "p.toml").write_text(text.replace("[pipeline]", f'[pipeline]\nartifact_store = "{url}"'))
    return load_pipeline(folder / "p.toml", (), all_kinds())


def begun(folder: Path, url: str, machine: str, steps: int = 3) -> Run:
    return create_run(chain(folder / machine, url, steps), run_id="one")


def made(run: Run, stage: str, **metrics: float) -> dict[str, Any]:
    """The result of a stage, which no worker made, sent to the store."""
    finish(run, stage, **metrics)
    return run_stage(run, stage)[0]


def on(run: Run, stage: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The run on another machine, which is given a stage of it."""
    monkeypatch.setenv(OUTPUT_DIR_VARIABLE, str(folder))
    return open_run_from_store(StageSync(run, run.pipeline.stage(stage)).send_run(), stage)


def written(proxy: Proxy) -> list[str]:
    return [request.key for request in proxy.requests if request.method == "PUT"]


def is_object(request: Request) -> bool:
    return "/objects/" in request.key


@pytest.mark.usefixtures("workers")
def test_each_machine_makes_its_stage_of_what_the_others_have_made(
    tmp_path: Path, run: Run, url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_stage(run, "first")
    assert written(proxy)[-1].endswith("/runs/one/stages/first/result.json"), "its manifest is written last"
    there = on(run, "second", tmp_path / "there", monkeypatch)
    assert there.path == tmp_path / "there" / "one" and there.output_dir == tmp_path / "there"
    StageSync(there, there.pipeline.stage("second")).receive_inputs()
    path = there.stage_path("first")
    assert find_output_damage(path, read_result(path) or {}, ignores_cache=True) is None
    assert (there.stage_path("first") / "out.txt").read_text() == (run.stage_path("first") / "out.txt").read_text()
    made, was_reused = run_stage(there, "second")
    assert not was_reused

    # Here the metrics and the state are known, and no weights.
    found = StageSync(run, run.pipeline.stage("second")).receive_result()
    path = run.stage_path("second")
    assert found is not None and found["digest"] == made["digest"]
    state = read_state(path)
    process_fields = (state.pid, state.pid_started, state.mark, state.launcher_pid, state.launcher_machine)
    assert state.state == "done" and process_fields == (None, None, "", None, ""), "processes are those of there"
    assert (path / "metrics.jsonl").read_text() == (there.stage_path("second") / "metrics.jsonl").read_text()
    assert not (path / "out.txt").exists() and find_output_damage(path, found) is None
    assert run_stage(run, "gate")[0]["metrics"] == {"count": 4.0}


def test_a_run_that_grows_stays_one_run_in_the_store_and_on_other_machines(
    tmp_path: Path, run: Run, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run.pipeline
    short = create_run(whole.with_stages(whole.stages[:1]), run_id="growing")
    there = on(short, "first", tmp_path / "there", monkeypatch)
    made(there, "first")
    grown = extend_run(short, whole)
    again = on(grown, "second", tmp_path / "there", monkeypatch)
    assert again.path == there.path and again.output_dir == tmp_path / "there"
    assert made(again, "second", count=4.0)["metrics"] == {"count": 4.0}
    StageSync(there, there.pipeline.stage("first")).send_run()  # it knows one stage, and the stored run keeps three
    assert len(tomllib.loads(ArtifactStore(url).read_run("growing")["pipeline.toml"])["pipeline"]["stages"]) == 3
    with claim_run(grown):
        (grown.path / "pipeline.toml").open("a").write("# newer\n")
        assert on(again, "gate", grown.output_dir, monkeypatch).path == grown.path
        assert (grown.path / "pipeline.toml").read_text().endswith("# newer\n"), "the flow has the newest definition"


def test_what_another_machine_has_made_is_reused_and_does_not_travel(
    tmp_path: Path, run: Run, url: str, proxy: Proxy
) -> None:
    first = made(run, "first")
    other = begun(tmp_path, url, "other")
    proxy.reset()
    result, was_reused = run_stage(other, "first")
    assert was_reused and result["digest"] == first["digest"]
    assert result["reused_from"] == f"{url}/made/{first['fingerprint']}"
    assert read_state(other.stage_path("first")).state == "reused"
    assert not [r for r in proxy.requests if is_object(r) and r.method != "HEAD"]
    # A content that the store has lost is made again.
    for each in list(Bucket("models").list_objects(f"{url.removeprefix('s3://models/')}/objects/")):
        Bucket("models").remove(each.key)
    assert not run_stage(begun(tmp_path, url, "third"), "first")[1]


def test_the_same_content_travels_and_is_kept_once(tmp_path: Path, url: str, proxy: Proxy) -> None:
    files = {"a/weights": b"w" * 5000, "b/weights": b"w" * 5000, "c": b"c"}
    here, there = tmp_path / "here" / "stage", tmp_path / "there" / "stage"
    records = []
    for path, data in files.items():
        (here / path).parent.mkdir(parents=True, exist_ok=True)
        (here / path).write_bytes(data)
        records.append({"path": path, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    found = ArtifactStore(url)
    found.put_outputs(here, {"outputs": records})
    assert len(written(proxy)) == 2
    proxy.reset()
    found.fetch_outputs({"outputs": records}, there, {records[2]["sha256"]: here / "c"})
    assert {path: (there / path).read_bytes() for path in files} == files
    assert len([request for request in proxy.requests if request.method == "GET"]) == 1


@pytest.mark.full
def test_what_a_bad_network_does_is_mended(
    tmp_path: Path, run: Run, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.once("flip", lambda request: is_object(request) and request.method == "PUT")
    made(run, "first")
    there = on(run, "second", tmp_path / "there", monkeypatch)
    proxy.once("truncate", lambda request: is_object(request) and request.method == "GET")
    StageSync(there, there.pipeline.stage("second")).receive_inputs()
    result = read_result(there.stage_path("first"))
    assert result is not None and find_output_damage(there.stage_path("first"), result, ignores_cache=True) is None


def test_a_stage_whose_outputs_do_not_arrive_is_not_complete(tmp_path: Path, run: Run, url: str, proxy: Proxy) -> None:
    proxy.reset(lambda request: "flip" if is_object(request) and request.method == "PUT" else "")
    with pytest.raises(UploadError, match="arrived altered 3 times"):
        run_stage(run, "first")
    proxy.reset()
    assert ArtifactStore(url).read_result("one", "first") is None
    assert read_state(run.stage_path("first")).state == "failed"
    made = (run.stage_path("first") / "visits.txt").read_text()
    assert run_stage(run, "first")[1], "it was made, and is sent now"
    assert (run.stage_path("first") / "visits.txt").read_text() == made
    assert ArtifactStore(url).read_result("one", "first") is not None


@pytest.mark.full
def test_an_object_that_was_altered_there_is_one_line(
    tmp_path: Path, run: Run, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = made(run, "first")
    there = on(run, "second", tmp_path / "there", monkeypatch)
    digest = result["outputs"][0]["sha256"]
    key = f"{url.removeprefix('s3://models/')}/objects/{digest[:2]}/{digest}"
    Bucket("models").write(key, b"x" * 64)
    with pytest.raises(UploadError, match=rf"^s3://models/{key} arrived altered 3 times$"):
        run_stage(there, "second")
    Bucket("models").remove(key)
    with pytest.raises(UploadError, match=r"a\.txt, is gone; make its stage again"):
        run_stage(there, "second")


def test_too_little_disk_for_a_checkpoint_is_an_error_and_no_damage(
    tmp_path: Path, run: Run, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = run.stage_path("first")
    checkpoint(here, 2)
    store = ArtifactStore(url)
    assert store.open_checkpoints("f", here).push() == ["step_2"]
    there = store.open_checkpoints("f", tmp_path / "there" / "stage")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1))
        with pytest.raises(DiskFull, match=r"more than are free in .*; make room"):
            there.pull()
    assert there.pull() == "step_2"


def test_an_empty_machine_goes_on_from_the_newest_whole_checkpoint(
    tmp_path: Path, run: Run, url: str, proxy: Proxy
) -> None:
    there, found = tmp_path / "there" / "stage", ArtifactStore(url)
    here = run.stage_path("first")
    for step in (2, 4, 6):
        checkpoint(here, step)
    (here / "metrics.jsonl").write_text('{"step": 6}\n')
    assert found.open_checkpoints("f", here).push() == ["step_2", "step_4", "step_6"]
    assert [key.rpartition("/")[2] for key in written(proxy) if key.endswith(".json")] == [
        "step_2.json", "step_4.json", "step_6.json",
    ]  # fmt: skip
    assert found.open_checkpoints("f", here).push() == []
    content = hashlib.sha256(bytes([6]) * 1000).hexdigest()
    Bucket("models").remove(f"{url.removeprefix('s3://models/')}/made/f/checkpoints/content/{content[:2]}/{content}")
    assert found.open_checkpoints("f", there).pull() == "step_4", "that of step 6 is not whole"
    policy = there / "checkpoints/step_4/policy"
    assert (policy / "rank_0.safetensors").read_bytes() == bytes([4]) * 1000
    assert read_json(policy / "manifest.json") == read_json(here / "checkpoints/step_4/policy/manifest.json")
    assert (there / "metrics.jsonl").read_text() == '{"step": 6}\n'
    assert found.open_checkpoints("other", there).pull() == ""

    # What could not be read there is sent again by who comes as far.
    third, again = tmp_path / "third" / "stage", found.open_checkpoints("f", tmp_path / "third" / "stage")
    assert again.pull() == "step_4"
    shutil.rmtree(third / "checkpoints/step_6")  # as much of it as came
    checkpoint(third, 6)
    assert again.push() == ["step_6"] and found.open_checkpoints("f", tmp_path / "fourth" / "stage").pull() == "step_6"

    # As many are kept as the machine keeps, and nothing of the others.
    shutil.rmtree(here / "checkpoints/step_2")
    shutil.rmtree(here / "checkpoints/step_4")
    checkpoint(here, 8)
    found.open_checkpoints("f", here).push()
    keys = [each.key for each in Bucket("models").list_objects(f"{url.removeprefix('s3://models/')}/made/f/")]
    assert sorted(key.rpartition("/")[2] for key in keys if key.endswith(".json")) == ["step_6.json", "step_8.json"]
    assert not [key for key in keys if key.endswith(hashlib.sha256(bytes([2]) * 1000).hexdigest())]
    found.open_checkpoints("f", here).clear()
    assert not list(Bucket("models").list_objects(f"{url.removeprefix('s3://models/')}/made/f/"))


def test_the_state_goes_with_the_stage_and_a_stage_that_is_forced_is_made_again_elsewhere(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(on(run, "first", tmp_path / "there", monkeypatch), "first")
    path = run.stage_path("first")
    assert StageSync(run, run.pipeline.stage("first")).receive_result() is not None
    shutil.rmtree(path)
    update_state(path, forced=True, forced_by="a person")
    again = on(run, "first", tmp_path / "there", monkeypatch)
    assert read_state(again.stage_path("first")).forced and not read_result(again.stage_path("first"))
    assert not run_stage(again, "first")[1]
    assert read_state(again.stage_path("first")).forced is False
    # Another machine, which has nothing, reuses it.
    assert run_stage(on(run, "first", tmp_path / "third", monkeypatch), "first")[1]


@pytest.mark.usefixtures("workers")
def test_a_failure_elsewhere_is_told_here(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    there = on(run, "first", tmp_path / "there", monkeypatch)
    pipeline = there.path / "pipeline.toml"
    pipeline.write_text(pipeline.read_text().replace("steps = 3", "steps = 3\nrefuse = true"))
    with pytest.raises(DataError, match="refused on purpose"):
        run_stage(open_run(there.path, all_kinds()), "first")
    assert StageSync(run, run.pipeline.stage("first")).receive_result() is None
    state = read_state(run.stage_path("first"))
    assert (state.state, state.error_type) == ("failed", "DataError") and "refused on purpose" in state.error
    [log] = (run.stage_path("first") / "logs").iterdir()
    assert log.name == "attempt_1.log"


def holder(pid: int = 1, machine: str = "other") -> LeaseHolder:
    return LeaseHolder(machine, pid, 1.0)


def take(url: str, who: LeaseHolder, gone: tuple[int, ...] = ()) -> Any:
    return ArtifactStore(url).lease_result("f", who, lambda other: other.pid in gone)


class Waits(Exception):
    """What a test gives up waiting with."""


def give_up(found: LeaseHolder) -> None:
    raise Waits(found.pid)


def test_one_of_all_machines_makes_a_thing_at_a_time(url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(lease, "RENEW_INTERVAL_SECONDS", 0.1)
    first, second = take(url, holder(1)), take(url, holder(2))
    assert first.acquire(give_up) is False
    with pytest.raises(Waits, match="1"):
        second.acquire(give_up)
    first.release()
    # A response that was lost: it was written.
    proxy.once("lost", lambda request: request.method == "PUT")
    assert second.acquire(give_up) is False
    # Who renews keeps it, for longer than a lease lasts.
    monkeypatch.setattr(lease, "EXPIRY_SECONDS", 0.5)
    tries: list[LeaseHolder] = []

    def patient(found: LeaseHolder) -> None:
        tries.append(found)
        if len(tries) == 20:
            raise Waits

    third = take(url, holder(3))
    with pytest.raises(Waits):
        third.acquire(patient)
    # Who is gone on the same machine loses it at once, who is silent after a time; and notices.
    successor = take(url, holder(4), gone=(2,))
    successor.acquire(lambda found: None)  # who is said to be gone renews yet, perhaps between its look and its write
    second._renewal_thread.join()
    assert "another machine has taken the work over" in second.takeover_message and not successor.takeover_message
    with pytest.raises(Exception, match="another machine has taken the work over"):
        second.check()
    successor._stop_event.set()
    assert third.acquire(lambda found: None) is True
    third.check()
    third.release()


def test_who_was_suspended_notices_that_it_lost_the_work_and_leaves_it_to_the_other(url: str) -> None:
    first, second = take(url, holder(1)), take(url, holder(2), gone=(1,))
    first.acquire(give_up)
    first._stop_event.set()  # it is suspended: nothing is renewed, and nothing noticed
    second.acquire(give_up)
    with pytest.raises(StageFailed, match="another machine has taken the work over"):
        first.check()
    first.release()
    second.check()
    second.release()
    with pytest.raises(StageFailed):
        second.check()


def test_a_process_of_another_container_of_this_name_is_not_taken_for_gone() -> None:
    host, boot, pids = identify_machine().split("/")
    assert store_sync._is_holder_dead(LeaseHolder(f"{host}/{boot}/{pids}", 1 << 22, 1.0))
    assert not store_sync._is_holder_dead(LeaseHolder(f"{host}/{boot}/pid:[1]", 1 << 22, 1.0))


def test_runs_that_have_one_name_on_two_machines_do_not_mix(
    tmp_path: Path, run: Run, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [run, begun(tmp_path, url, "other", steps=5), begun(tmp_path, f"{url}-b", "third", steps=6)]
    first = [made(each, "first", count=count) for each, count in zip(runs, (3.0, 5.0, 6.0), strict=True)]
    there = [on(each, "second", tmp_path / "there", monkeypatch) for each in (*runs, run)]
    assert [each.path.name for each in there] == ["one", "one-2", "one-3", "one"], "the third of another store"
    for each, result in zip(there[:2], first[:2], strict=True):
        StageSync(each, each.pipeline.stage("second")).receive_inputs()
        assert (read_result(each.stage_path("first")) or {})["digest"] == result["digest"]
    counts = [(ArtifactStore(url).read_result(name, "first") or {})["metrics"]["count"] for name in ("one", "one-2")]
    assert counts == [3.0, 5.0]


def test_what_sends_beside_a_stage_goes_on_whatever_goes_wrong(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_sync, "_CHECKPOINT_POLL_SECONDS", 0.02)
    damaged = run.stage_path("first") / "checkpoints/step_1/policy/manifest.json"
    damaged.parent.mkdir(parents=True)
    damaged.write_text('{"files": {"model": {}}}')
    (damaged.parent / "model").write_text("")
    expected = reuse.compute_local_fingerprint(run, run.pipeline.stage("first"))
    with StageSync(run, run.pipeline.stage("first")).sync_checkpoints(expected):
        wait_until(lambda: "the artifact store has not everything" in caplog.text, 20, "it fails")
        shutil.rmtree(damaged.parent.parent)
        checkpoint(run.stage_path("first"), 2)
        events = run.stage_path("first") / "events.jsonl"
        wait_until(lambda: events.is_file() and "step_2" in events.read_text(), 20, "the next is sent")


def test_what_is_wrong_with_the_store_is_found_before_anything_runs(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match=r"artifact_store = 's3://nowhere-at-all/x': .* there is no such bucket"):
        check_store(chain(tmp_path, "s3://nowhere-at-all/x"))
    with pytest.raises(ConfigError, match="artifact_store"):
        chain(tmp_path, "/a/folder")
    with pytest.raises(ConfigError, match="there is no such run"):
        open_run_from_store(f"{url}/runs/none", "first")
