"""What a server does that is started again, or forgets, to what is followed on other work pools."""

from __future__ import annotations

import json
import shutil
import uuid
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prefect.client.schemas.objects import StateType
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES

from cosmos_core.config.compose import load_pipeline
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.errors import ConfigError, Preempted, StageFailed
from cosmos_core.launch.service_health import ENQUEUE_URL_VARIABLE, TOKEN_VARIABLE
from cosmos_core.run.directory import Run, create_run, supersede_stage
from cosmos_core.run.files import read_json, write_json
from cosmos_core.run.plan import plan_stages, register_result
from cosmos_core.run.state import read_state, record_failure
from flows import reward_service
from flows.post_train import supersede_stages
from tasks import remote_stage, stage
from tasks import reward_service as stage_rewards
from tasks.kinds import all_kinds
from tasks.reuse import find_result_of_work_pool
from tasks.store_sync import StageSync
from tests import attempts
from tests.conftest import PROGRAMS
from tests.store import Proxy
from tests.unit.test_artifact_store import begun, on

STAGE = StageConfig(name="first", kind="custom", entry="x:y", work_pool="gpu")


class Server:
    """Raises what it is given for each request."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def read_flow_run(self, flow_run: uuid.UUID) -> Any:
        raise self.error

    def set_flow_run_state(self, flow_run: uuid.UUID, state: Any) -> Any:
        raise self.error


BUDGET: Any = SimpleNamespace(raise_if_spent=lambda: None, excess=lambda: "")


def test_a_flow_run_that_somebody_deleted_is_one_failed_attempt() -> None:
    server: Any = Server(ObjectNotFound(Exception()))
    with pytest.raises(StageFailed, match=r"stage 'first' on 'gpu': its flow run .* is gone from the server"):
        remote_stage._poll_child(server, STAGE, uuid.uuid4(), lambda: None, server, BUDGET)


@pytest.mark.parametrize("error", [ObjectNotFound(Exception()), httpx.ConnectError("away")])
def test_a_stage_that_is_stopped_is_stopped_whatever_the_server_says(error: Exception) -> None:
    server: Any = Server(error)
    remote_stage._cancel_child(server, remote_stage.ChildFlowRun(flow_run=str(uuid.uuid4()), attempt=1), 5.0)


def test_a_request_to_a_busy_server_is_not_repeated_for_minutes_in_which_a_stop_is_not_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_stage, "_POLL_SECONDS", 0.0)
    retries: list[int] = []

    def read_flow_run(_: uuid.UUID) -> Any:
        retries.append(PREFECT_CLIENT_MAX_RETRIES.value())
        if len(retries) < 3:
            raise httpx.ConnectError("away")
        return SimpleNamespace(state_type=StateType.COMPLETED)

    server: Any = SimpleNamespace(read_flow_run=read_flow_run)
    remote_stage._poll_child(server, STAGE, uuid.uuid4(), lambda: None, server, BUDGET)
    assert retries == [0, 0, 0] and PREFECT_CLIENT_MAX_RETRIES.value() > 0
    retries.clear()
    server.set_flow_run_state = lambda *_: None
    remote_stage._cancel_child(server, remote_stage.ChildFlowRun(flow_run=str(uuid.uuid4()), attempt=1), 5.0)
    assert retries == [0, 0, 0], "a stop waits for the checkpoint, and not longer than its grace period"


@pytest.mark.parametrize("state", [StateType.SCHEDULED, StateType.PENDING])
def test_what_a_flow_run_without_a_process_waits_for_is_told(state: StateType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that was lost after it took the flow run starts none."""
    monkeypatch.setattr(remote_stage, "_POLL_SECONDS", 0.0)
    flow_run = partial(SimpleNamespace, work_pool_name="big", work_queue_id="1")
    waiting, ended = (flow_run(state_type=each) for each in (state, StateType.CRASHED))
    found: list[Any] = [waiting, waiting, waiting, ended]
    server: Any = SimpleNamespace(read_flow_run=lambda _: found.pop(0))
    told: list[tuple[str, str, str]] = []
    report: Any = lambda *words: told.append(words) or "none is live"  # noqa: E731
    remote_stage._poll_child(server, STAGE, uuid.uuid4(), lambda: None, report, BUDGET)
    assert told == [("big", "1", "")], "once in ten seconds, of the pool that the deployment stage/gpu has"


class Deployments:
    """Begins one flow run for each idempotency key, as a server does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: dict[str, uuid.UUID] = {}
        self.loses_reply = False
        monkeypatch.setattr(remote_stage, "run_deployment", self.run_deployment)

    def run_deployment(self, name: str, *, idempotency_key: str, **parameters: Any) -> Any:
        found = self.begun.setdefault(idempotency_key, uuid.uuid4())
        if self.loses_reply:
            raise KeyboardInterrupt
        return SimpleNamespace(id=found)

    def begin(self, run: Run) -> str:
        return remote_stage._start_child(run, STAGE, StageSync(run, STAGE)).flow_run


def test_a_stage_that_is_made_again_is_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, server = begun(tmp_path, "", "here"), Deployments(monkeypatch)
    first = server.begin(run)
    supersede_stage(run.stage_path("first"))
    second = server.begin(run)
    shutil.rmtree(run.path)
    third = server.begin(begun(tmp_path, "", "here"))
    assert len({first, second, third, server.begin(run)}) == 4, "a retry is begun again too"


def test_a_machine_that_is_lost_does_not_fail_with_the_error_of_an_earlier_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, server = begun(tmp_path, "", "here"), Deployments(monkeypatch)
    record_failure(run.stage_path("first"), ConfigError("a wrong key, corrected since"))
    server.begin(run)
    lost: Any = SimpleNamespace(state_type=StateType.CRASHED, state_name="Crashed", state=None)
    error = remote_stage._make_child_error(STAGE, run.stage_path("first"), lost)
    assert isinstance(error, StageFailed) and "its flow run Crashed" in str(error)


def test_a_parent_that_dies_while_it_asks_follows_the_same_flow_run_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, server = begun(tmp_path, "", "here"), Deployments(monkeypatch)
    server.loses_reply = True
    with pytest.raises(KeyboardInterrupt):
        server.begin(run)
    nobody: Any = None
    assert remote_stage._find_running_child(nobody, run.stage_path("first"), 20.0) is None
    server.loses_reply = False
    assert [server.begin(run)] == [str(found) for found in server.begun.values()]


def test_whatever_goes_wrong_while_it_is_followed_is_noted_as_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun(tmp_path, "", "here")

    def odd(*arguments: Any) -> Any:
        raise ValueError("odd")

    monkeypatch.setattr(stage, "run_remote_stage", odd)
    with pytest.raises(StageFailed, match=r"^stage 'first': ValueError: odd$"):
        stage._run_on_work_pool(run, "first")
    state = stage.read_state(run.stage_path("first"))
    assert (state.state, state.error_type, state.failures) == ("failed", "StageFailed", 1)


def test_a_stop_before_a_worker_takes_it_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun(tmp_path, "", "here")

    def stopped(*arguments: Any) -> Any:
        raise Preempted("stopped")

    monkeypatch.setattr(stage, "run_remote_stage", stopped)
    for _ in range(4):
        with pytest.raises(Preempted):
            stage._run_on_work_pool(run, "first")
    state = stage.read_state(run.stage_path("first"))
    assert (state.state, state.failures) == ("stopped", 0)


def test_a_reward_service_waits_for_a_server_that_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_service, "_POLL_SECONDS", 0.01)
    said: list[Any] = [True, httpx.ConnectError("away"), httpx.ReadTimeout("busy"), True, False, Preempted("too long")]

    def is_wanted() -> bool:
        answer = said.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)

    reward_service._wait_until_service_unneeded(is_wanted)
    assert len(said) == 1
    monkeypatch.setattr(reward_service, "_MAX_UNREACHABLE_SECONDS", 0.05)
    said[:] = [httpx.ConnectError("gone for good")] * 100
    reward_service._wait_until_service_unneeded(is_wanted)
    assert said


def test_a_reward_service_whose_stage_was_killed_leaves_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: set[str] = set()
    block = SimpleNamespace(save=lambda name, overwrite: blocks.add(name))
    server = SimpleNamespace(read_flow_run=lambda flow_run: SimpleNamespace(state_type=StateType.CRASHED))
    variables = {ENQUEUE_URL_VARIABLE: "http://127.0.0.1:1/api/reward/enqueue", TOKEN_VARIABLE: "t"}
    monkeypatch.setattr(reward_service, "managed_reward_service", lambda *_, **__: nullcontext(variables))
    monkeypatch.setattr(reward_service, "get_client", lambda sync_client: nullcontext(server))
    monkeypatch.setattr(reward_service, "RewardService", lambda **_: block)
    monkeypatch.setattr(
        reward_service, "read_service_variables", lambda client, name: variables if name in blocks else None
    )
    monkeypatch.setattr(reward_service, "delete_service_block", lambda client, name: blocks.remove(name))
    reward_service.reward_service.fn("rewards.toml", "run-1", str(uuid.uuid4()))
    assert not blocks


class Services:
    """A server with one reward service, which is `RUNNING`, and with a block once it has loaded."""

    def __init__(self, block: dict[str, str] | None) -> None:
        self.block = block
        self.set: list[StateType] = []

    def __enter__(self) -> Services:
        return self

    def __exit__(self, *error: object) -> None: ...

    def read_flow_run(self, flow_run: uuid.UUID) -> Any:
        return SimpleNamespace(state_type=StateType.RUNNING, state=SimpleNamespace(type=StateType.RUNNING))

    def set_flow_run_state(self, flow_run: uuid.UUID, state: Any) -> None:
        self.set.append(state.type)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_reward_service_that_still_loads_when_its_stage_ends_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_loaded: bool
) -> None:
    """It has no block yet whose removal would end it, and would hold its GPUs until the end of the flow run."""
    server: Any = Services({} if is_loaded else None)
    monkeypatch.setattr(stage_rewards, "get_client", lambda sync_client: server)
    monkeypatch.setattr(stage_rewards, "_start_service_run", lambda *_: uuid.uuid4())
    monkeypatch.setattr(stage_rewards, "read_service_variables", lambda *_: server.block)
    monkeypatch.setattr(stage_rewards, "delete_service_block", lambda *_: None)
    monkeypatch.setattr(stage_rewards, "_SERVICE_LOAD_TIMEOUT_SECONDS", -1.0)
    with suppress(StageFailed), stage_rewards._run_remote_service(STAGE, tmp_path):
        pass
    assert server.set == ([] if is_loaded else [StateType.CANCELLING])


POOLED = f"""
[pipeline]
name = "pooled"
output_dir = "FOLDER/outputs"

[[pipeline.stages]]
name = "first"
kind = "custom"
entry = "{PROGRAMS}/counting.py:count"
work_pool = "gpu"
arguments = {{ steps = 2, seconds = 0.01 }}
"""


def pooled(folder: Path, run_id: str, old: str = "", new: str = "") -> Run:
    (folder / "p.toml").write_text(POOLED.replace("FOLDER", str(folder)).replace(old, new))
    return create_run(load_pipeline(folder / "p.toml", (), all_kinds()), run_id=run_id)


def test_what_the_pool_has_made_is_reused_before_the_pool_is_asked_whatever_machine_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts.use(monkeypatch)
    run = pooled(tmp_path, "one")
    assert find_result_of_work_pool(run, run.pipeline.stage("first")) is None, "only the pool can make it"
    path = run.stage_path("first")
    stage.run_stage(run, "first")
    made = json.loads((path / "fingerprint.json").read_text())
    made["ingredients"] |= {"device": "NVIDIA H100", "versions": {"torch": "0"}}
    result = (path / "result.json").read_text().replace(made["value"], "f" * 64)
    (path / "result.json").write_text(result)
    (path / "fingerprint.json").write_text(json.dumps(made | {"value": "f" * 64}))
    register_result(run.output_dir, path, "f" * 64)
    found, was_reused = remote_stage.run_remote_stage(run, run.pipeline.stage("first"))  # no server
    assert was_reused and found["fingerprint"] == "f" * 64
    again = pooled(tmp_path, "two")
    assert plan_stages(again.pipeline, again.pipeline.stage_kinds, again.output_dir)["first"].action == "adopt"
    found, was_reused = remote_stage.run_remote_stage(again, again.pipeline.stage("first"))
    assert was_reused and found["metrics"] == {"count": 2.0}
    assert read_state(again.stage_path("first")).state == "reused"
    for number, changed in enumerate((("steps = 2", "steps = 3"), ('"gpu"', '"cpu"'))):
        other = pooled(tmp_path, f"changed-{number}", *changed)
        assert find_result_of_work_pool(other, other.pipeline.stage("first")) is None, changed
    (path / "out.txt").write_text("altered")
    (again.stage_path("first") / "out.txt").write_text("altered")
    assert find_result_of_work_pool(again, again.pipeline.stage("first")) is None


def test_a_stage_that_its_pool_still_runs_is_not_begun_again_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two flow runs would write to one folder; one that is being cancelled saves a checkpoint and ends."""
    caplog.set_level("INFO")
    run = pooled(tmp_path, "one", "[pipeline]", "[pipeline]\ngrace_seconds = 0.2")
    states: list[Any] = [StateType.RUNNING]

    retries: list[int] = []

    def read_flow_run(_: uuid.UUID) -> Any:
        retries.append(PREFECT_CLIENT_MAX_RETRIES.value())
        state = states.pop(0) if len(states) > 1 else states[0]
        if isinstance(state, Exception):
            raise state
        return SimpleNamespace(state_type=state)

    server = SimpleNamespace(read_flow_run=read_flow_run)
    monkeypatch.setattr(remote_stage, "get_client", lambda sync_client: nullcontext(server))
    monkeypatch.setattr(remote_stage, "_POLL_SECONDS", 0.0)
    note, child = run.stage_path("first") / "pool.json", str(uuid.uuid4())
    note.parent.mkdir(parents=True)
    write_json(note, {"flow_run": child, "attempt": 1})
    with pytest.raises(ConfigError, match=f"'first' still runs on its work pool; .*: prefect flow-run cancel {child}"):
        supersede_stages(run, "first", "parent")
    assert note.is_file() and not read_state(note.parent).forced
    states[:] = [StateType.CANCELLING]
    with monkeypatch.context() as patch, pytest.raises(StageFailed, match=f"flow run {child} is .*: cosmos worker$"):
        patch.setattr(remote_stage, "_MAX_UNREACHABLE_SECONDS", -1.0)
        supersede_stages(run, "first", "parent")
    caplog.clear()
    retries.clear()
    states[:] = [StateType.CANCELLING, httpx.ConnectError("away"), StateType.CANCELLING, StateType.CANCELLED]
    supersede_stages(run, "first", "parent")
    assert not note.is_file() and read_state(note.parent).forced and states == [StateType.CANCELLED]
    assert retries[0] > 0 and retries[1:] == [0, 0, 0], "a stop is seen while the server is away"
    assert caplog.text.count(f"'first': waits until its flow run {child} is cancelled") == 1


def test_an_error_of_this_machine_replaces_the_one_that_an_earlier_attempt_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun(tmp_path, "", "here")

    def refuse(*arguments: Any) -> Any:
        raise ConfigError("work_pool = 'gpu' runs one flow run at a time")

    monkeypatch.setattr(stage, "run_remote_stage", refuse)
    monkeypatch.setattr(stage.events, "emit_stage_failed", lambda *_: None)
    for earlier in (StageFailed("crashed"), Preempted("stopped")):
        record_failure(run.stage_path("first"), earlier)
        assert stage._run_on_work_pool(run, "first").is_failed()
        state = read_state(run.stage_path("first"))
        assert (state.state, state.exit_code, state.error_type) == ("failed", 64, "ConfigError")


def test_a_mirror_reads_again_only_what_has_changed(
    tmp_path: Path, here: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun(tmp_path, f"s3://models/{tmp_path.name}", "here")
    there = on(run, "first", tmp_path / "there", monkeypatch)
    path = there.stage_path("first")
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "progress.json", {"step": 1})
    StageSync(there, there.pipeline.stage("first")).send_run()
    mirror = StageSync(run, run.pipeline.stage("first")).make_progress_mirror()
    mirror()
    assert read_json(run.stage_path("first") / "progress.json") == {"step": 1}
    (run.stage_path("first") / "progress.json").unlink()
    here.reset()
    mirror()
    assert not (run.stage_path("first") / "progress.json").exists(), "nothing has changed there"
    assert len(here.requests) <= 2
