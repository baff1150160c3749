"""`cosmos doctor --cluster`: what is wrong is found, and what is well is not said to be wrong."""

from __future__ import annotations

import socket
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prefect
import psutil
import pytest
from prefect.client.schemas.objects import WorkerStatus

from cosmos_core.launch.doctor import Diagnosis, run_checks
from cosmos_core.launch.worker_report import read_recent_reports, read_versions
from tests.unit.reward_server import serving

STEP = "prefect.deployments.steps.set_working_directory"


class Server:
    """What a client of Prefect's server is told."""

    def __init__(self, **given: Any) -> None:
        self.version, self.ahead, self.refuses = prefect.__version__, 0.0, False
        self.pools = {"gpu": [("w1", WorkerStatus.ONLINE)], "cpu": []}
        self.paused: set[str] = set()
        self.deployments: list[Any] = [("gpu", "/clone"), ("gpu", "/home/ada", "search")]
        self.cancelling: list[float] = []
        self.reports: list[dict[str, Any]] = [{}]
        vars(self).update(given)

    def hello(self) -> Any:
        return SimpleNamespace(headers={"Date": format_datetime(datetime.now(UTC) + timedelta(seconds=self.ahead))})

    def api_version(self) -> str:
        if self.refuses:
            raise ConnectionError("401 Unauthorized for http://user:s3cret-pw@server/api")
        return str(self.version)

    def read_flow_runs(self, *, limit: int, flow_run_filter: Any = None) -> list[Any]:
        if flow_run_filter is None:
            return []
        assert [each.value for each in flow_run_filter.state.type.any_] == ["CANCELLING"]
        at = [datetime.now(UTC) - timedelta(seconds=seconds) for seconds in self.cancelling]
        return [SimpleNamespace(name="sft", work_pool_name="gpu", state=SimpleNamespace(timestamp=each)) for each in at]

    def read_work_pools(self) -> list[Any]:
        return [SimpleNamespace(name=name, is_paused=name in self.paused, type="process") for name in self.pools]

    def request(self, method: str, path: str, json: dict[str, Any]) -> Any:
        """The variables with a name, in pages of at most 200."""
        assert (method, path) == ("POST", "/variables/filter") and json["variables"]["name"]["like_"]
        now = datetime.now(UTC)
        found = [{"name": "my-cosmos-worker-count", "value": 3, "updated": now.isoformat()}]
        for changes in self.reports:
            value = {
                **read_versions(), "pool": "gpu", "host": "node-3", "output_dir": "/runs", "free_bytes": 2**40,
                "missing_folders": [], "time": now.timestamp(), **changes,
            }  # fmt: skip
            updated = now - timedelta(seconds=value.pop("age", 0.0))
            name = f"cosmos-worker-{value['pool']}-node-3"
            found.append({"name": name, "value": value, "updated": updated.isoformat().replace("+00:00", "Z")})
        return SimpleNamespace(json=lambda: found[json["offset"] : json["offset"] + 200])

    def read_workers_for_work_pool(self, name: str) -> list[Any]:
        return [SimpleNamespace(name=each, status=status) for each, status in self.pools[name]]

    def read_deployments(self) -> list[Any]:
        return [
            SimpleNamespace(work_pool_name=pool, pull_steps=[{STEP: {"directory": folder}}], entrypoint=f"{file}.py:f")
            for pool, folder, file in (each if len(each) == 3 else (*each, "flows/stage") for each in self.deployments)
        ]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "REMOTE_REWARD_ENQUEUE_URL"):
        monkeypatch.delenv(name, raising=False)


def wrong(server: Server, folder: Path) -> dict[str, str]:
    found: list[Diagnosis] = list(run_checks(folder / "not" / "made", server))
    return {each.name: each.message for each in found if not each.is_healthy and each.name != "disk"}


def test_a_cluster_that_is_well_has_nothing_wrong(tmp_path: Path) -> None:
    assert wrong(Server(cancelling=[5.0]), tmp_path) == {}


@pytest.mark.parametrize(
    ("given", "what", "told"),
    [
        ({"version": "3.1.0"}, "server", "Prefect 3.1.0 there"),
        ({"ahead": -90.0}, "clock", "this machine is +"),
        ({"refuses": True}, "server", "401 Unauthorized for http://user:***@server"),
        ({"pools": {"gpu": [("w1", WorkerStatus.OFFLINE)]}}, "pool gpu", "no live worker, and its deployments wait"),
        ({"paused": {"gpu"}}, "pool gpu", "the pool is paused"),
        ({"pools": {}}, "pool gpu", "it is not there; cosmos bootstrap"),
        ({"cancelling": [5.0, 300.0]}, "cancellation", "sft has been Cancelling for 300 s: no worker of gpu looks"),
        ({"deployments": [("gpu", "/a"), ("cpu", "/a"), ("gpu", "/b")], "pools": {"gpu": [("w", "ONLINE")],
          "cpu": [("v", "ONLINE")]}, "reports": [{}, {"pool": "cpu"}]}, "deployments", "/a in cpu, gpu; /b in gpu"),
        ({"deployments": []}, "deployments", "none is deployed"),
        ({"reports": [{"commit": "0dc3f4f"}]}, "worker of gpu on node-3", "; commit 0dc3f4f there, "),
        ({"reports": [{"prefect": "3.1.0"}]}, "worker of gpu on node-3", "; prefect 3.1.0 there, "),
        ({"reports": [{"free_bytes": 2**30}]}, "worker of gpu on node-3", "1 GiB are free in /runs, clock +0 s; its"),
        ({"reports": [{"time": 0.0}]}, "worker of gpu on node-3", "; its clock differs from the server's"),
        ({"reports": [{"missing_folders": ["/clone"]}]}, "worker of gpu on node-3", "; /clone of its deployments is"),
        ({"reports": [{}, {"host": "node-4", "free_bytes": 1}]}, "worker of gpu on node-4", "its disk is full soon"),
        ({"reports": [{"age": 900.0}]}, "workers of gpu", "none was started by cosmos worker"),
        ({"reports": []}, "workers of gpu", "after an outage of the server they stop no cancelled flow run"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(given: dict[str, Any], what: str, told: str, tmp_path: Path) -> None:
    found = wrong(Server(**given), tmp_path)
    assert list(found) == [what] and told in found[what], found


def test_every_worker_of_a_large_cluster_is_looked_at() -> None:
    reports = list(read_recent_reports(Server(reports=[{"host": f"node-{number}"} for number in range(450)])))
    assert [worker_report["host"] for worker_report, _ in reports] == [f"node-{number}" for number in range(450)]


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("[::1]", socket.AF_INET6)])
def test_ray_and_rewards_are_looked_for_where_the_environment_names_them(
    host: str, family: socket.AddressFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if all(each.address != host.strip("[]") for found in psutil.net_if_addrs().values() for each in found):
        pytest.skip(f"this machine has no {host}")
    with socket.create_server((host.strip("[]"), 0), family=family) as listener, serving() as rewards:
        monkeypatch.setenv("RAY_ADDRESS", f"{host}:{listener.getsockname()[1]}")
        monkeypatch.setenv("REMOTE_REWARD_ENQUEUE_URL", f"{rewards.url}/enqueue")
        assert "without RAY_AUTH_MODE=token" in wrong(Server(), tmp_path)["Ray"]
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef")
        assert "Ray" not in wrong(Server(), tmp_path)
    found = wrong(Server(), tmp_path)
    assert "is not reached" in found["Ray"] and "does not respond" in found["rewards"]
