"""A rank whose reply is lost with its connection: it is asked whether it has ended, and the run goes on."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, ObjectLostError, OutOfMemoryError, RayTaskError

from cosmos_core.cluster import group
from cosmos_core.cluster.actors import ActorHandle
from cosmos_core.errors import ConfigError, ProgramError


class GetTimeoutError(Exception):
    """As Ray's, where no reply has come in time."""


class Ray:
    """No call of it ever returns by itself; a rank tells its outcome at the second question."""

    exceptions = SimpleNamespace(
        GetTimeoutError=GetTimeoutError, RayActorError=ConnectionError, OutOfMemoryError=OutOfMemoryError
    )

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.has_died = False

    def nodes(self) -> list[dict[str, bool]]:
        return [{"Alive": False}, {"Alive": not self.has_died}]

    def wait(self, calls: list[object], timeout: float) -> tuple[list[object], list[object]]:
        return [], calls

    def get(self, reply: Any, timeout: float) -> Any:
        self.asked.append(reply)
        if self.asked.count(reply) < 2:
            raise GetTimeoutError
        return reply


def test_a_rank_whose_reply_is_lost_is_asked_for_its_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_REPLY_TIMEOUT_SECONDS", 0.0)
    outcomes: list[tuple[bool, Any]] = [(True, "of the first"), (True, "of the second")]
    members = [
        SimpleNamespace(read_run_result=SimpleNamespace(remote=lambda outcome=outcome: outcome)) for outcome in outcomes
    ]
    ray = Ray()
    assert (
        group._wait_for_ranks(ray, members, ["call 0", "call 1"], lambda: False, None, owns_cluster=True)
        == "of the first"
    )
    assert sorted(ray.asked) == sorted(outcomes * 2)


def test_its_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_REPLY_TIMEOUT_SECONDS", 0.0)
    outcome = (False, group.StageFailed("no room"))
    member = SimpleNamespace(read_run_result=SimpleNamespace(remote=lambda: outcome))
    with pytest.raises(group.StageFailed, match="no room"):
        group._wait_for_ranks(Ray(), [member], ["call"], lambda: False, None, owns_cluster=True)


def test_a_rank_that_is_ended_for_lack_of_memory_has_died_and_the_ranks_may_start_again() -> None:
    class Full(Ray):
        def wait(self, calls: list[object], timeout: float) -> tuple[list[object], list[object]]:
            return calls, []

        def get(self, reply: Any, timeout: float = 0) -> Any:
            raise OutOfMemoryError("1 worker(s) were killed due to the node running low on memory.\nUse less")

    died = r"^rank 0 died: 1 worker\(s\) were killed due to the node running low on memory$"
    with pytest.raises(group.RankFailed, match=died):
        group._wait_for_ranks(Full(), [None], ["call"], lambda: False, None, owns_cluster=True)
    assert "rank 0 died" in str(group._find_dead_rank(Full(), ["call"]))


def test_a_dead_rank_is_named_though_another_one_tells_before_that_its_connection_broke(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stage whose rank was killed is tried again, one whose program raised the same error twice is not."""

    class Broken(Ray):
        def wait(self, calls: list[object], timeout: float) -> tuple[list[object], list[object]]:
            return calls[:1], calls[1:]

        def get(self, reply: Any, timeout: float = 0) -> Any:
            if reply == "call 1":
                raise ConnectionError("it was killed")
            return False, group.RankRaised("rank 0: RuntimeError: Connection closed by peer")

        def cluster_resources(self) -> dict[str, float]:
            return {}

    calls = [SimpleNamespace(), SimpleNamespace()], ["call 0", "call 1"]
    monkeypatch.setattr(group, "_connect_to_cluster", lambda *_: nullcontext((Broken(), True, 0)))
    monkeypatch.setattr(group, "list_resource_bundles", lambda *_, **__: [])
    monkeypatch.setattr(group, "reserve_bundles", lambda *_: [None, None])
    monkeypatch.setattr(group, "_make_rank_starter", lambda *_: lambda program: calls)
    with pytest.raises(group.RankFailed, match=r"^rank 1 died: it was killed$") as caught:
        group.WorkerGroup(2).run(lambda told: None)
    assert not isinstance(caught.value, ProgramError)


@pytest.mark.parametrize("is_embedded", [True, False])
def test_a_cluster_of_the_stages_own_that_has_died_ends_it_and_another_is_waited_for(
    is_embedded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that are asked of a cluster without a machine would be waited for without end."""
    monkeypatch.setattr(group, "_REPLY_TIMEOUT_SECONDS", 1.0 if is_embedded else 0.0)
    ray = Ray()
    ray.has_died = True
    member = SimpleNamespace(read_run_result=SimpleNamespace(remote=lambda: (True, "done")))
    if is_embedded:
        with pytest.raises(group.StageFailed, match="a retry starts another one"):
            group._wait_for_ranks(ray, [member], ["call"], lambda: False, None, owns_cluster=True)
    else:
        assert group._wait_for_ranks(ray, [member], ["call"], lambda: False, None, owns_cluster=False) == "done"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OutOfMemoryError("the node is running low on memory"), ConnectionError),
        (ObjectLostError("00", None, ""), ConnectionError),
        (ActorUnavailableError("it restarts", b"0" * 16), ConnectionRefusedError),
        (RayTaskError("call", "in engine.py", ValueError("no prompt")).as_instanceof_cause(), ValueError),
        (RayTaskError("call", "in engine.py", ConfigError("no head")).as_instanceof_cause(), ConfigError),
    ],
)
def test_an_engine_that_lost_its_memory_or_its_reply_has_died_and_one_that_refuses_has_not(
    error: Exception, told: type[Exception]
) -> None:
    reply: Future[Any] = Future()
    reply.set_exception(error)
    call = SimpleNamespace(remote=lambda *asked: SimpleNamespace(future=lambda: reply))
    found = ActorHandle(SimpleNamespace(call=call)).call("completed").exception(1)
    assert type(found) is told
    if isinstance(error, RayTaskError):
        assert "in engine.py" in found.__notes__[0], "where in the other process it was raised"
