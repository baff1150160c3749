"""Ranks as one call: answers, errors, stopping; and a training that changes its number of ranks half-way."""

from __future__ import annotations

import importlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from cosmos_core.cluster.actors import ActorGroup, _ObjectActor
from cosmos_core.cluster.group import (
    WorkerGroup,
    _make_socket_folder,
    create_tcp_store,
    find_network_interface,
    split_threads,
)
from cosmos_core.cluster.join import join_cluster
from cosmos_core.cluster.placement import list_resource_bundles, reserve_bundles
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import ConfigError, Preempted, StageFailed
from cosmos_core.job_signals import JOB_SIGNALS
from cosmos_core.launch.processes import remove_orphans, remove_scratch_folder
from cosmos_core.machine_properties import measure_machine, measure_worker_machine
from cosmos_core.run.lock import create_locked_folder
from cosmos_core.run.process import locate_socket_folder
from cosmos_core.run.progress import read_metrics
from cosmos_core.run.stage import Stage
from cosmos_core.train.setup import run
from tests.conftest import wait_until
from tests.distributed import members
from tests.distributed.stages import make_task, stage_of
from tests.local_ranks import LocalGroup


def recipe(**mesh: int | str) -> Recipe:
    policy = {"type": "sft", "mini_batch": 3, "conversation_column_name": "messages"}
    train = {
        "param_dtype": "float32", "compile": False, "optm_lr": 1e-3, "train_batch_per_replica": 9, "max_num_steps": 5,
        "ema_enable": True, "train_policy": policy,
        "ckpt": {"enable_checkpoint": True, "save_freq": 2, "save_mode": "async"},
    }  # fmt: skip
    return Recipe.model_validate({"policy": {"model_max_length": 32, "parallelism": mesh}, "train": train})


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("task"), recipe(), layers=3)


def sft(task: Path, path: Path, **mesh: int | str) -> Stage:
    return stage_of(path, "sft", recipe(**mesh), task / "task/model", task / "rows/data")


@pytest.fixture(scope="module")
def alone(task: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same training on one rank, in this process."""
    one = sft(task, tmp_path_factory.mktemp("alone") / "sft")
    run(one)
    return {"weights": weights(one), "losses": losses(one)}


def weights(done: Stage) -> dict[str, Tensor]:
    return load_file(done.path / "safetensors/step_5/model.safetensors")


def losses(done: Stage) -> list[float]:
    return [line["loss"] for line in read_metrics(done.path / "metrics.jsonl")]


def assert_like(done: Stage, alone: dict[str, Any]) -> None:
    assert losses(done) == pytest.approx(alone["losses"], rel=1e-5)
    found = weights(done)
    assert found.keys() == alone["weights"].keys()
    for name, weight in alone["weights"].items():
        # Adam turns the rounding of a tiny gradient into a share of the rate of 1e-3.
        assert (found[name] - weight).abs().max() <= 2e-5, name


def test_what_computes_beside_the_ranks_has_half_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cases = ((2, 1, 1), (8, 1, 1), (16, 2, 4), (2, 2, 2), (4, 1, 0))
    assert [split_threads(*case, is_parallel=True) for case in cases] == [(2, 1), (8, 4), (4, 2), (1, 1), (4, 4)]
    assert [split_threads(*case, is_parallel=False) for case in cases] == [(2, 2), (8, 8), (4, 4), (1, 1), (4, 4)]
    before, handlers = torch.get_num_threads(), {number: signal.getsignal(number) for number in JOB_SIGNALS}
    try:
        assert _ObjectActor(torch.get_num_threads, 3).call("__int__", (), {}) == 3
        assert os.environ["OMP_NUM_THREADS"] == "3"
    finally:
        torch.set_num_threads(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("folder", ["/scratch/someone/jobs/1234567/cosmos-0123456789ab", "/tmp/cosmos-0123456789ab"])
def test_a_long_tmpdir_leaves_room_for_the_names_of_sockets(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", folder)
    with _make_socket_folder() as short_folder:
        session = "session_2026-11-29_21-19-20_974837_4194304/sockets/plasma_store"
        assert len(f"{short_folder or f'{folder}/ray'}/{session}") <= 107, "a longer path is no address of a socket"
        assert (short_folder is None) is folder.startswith("/tmp")
        remove_orphans()  # of another run
        assert short_folder is None or os.path.isdir(short_folder)
    assert short_folder is None or not os.path.exists(short_folder)


def test_sockets_of_a_killed_worker_are_removed_by_its_supervisor_or_by_the_next_run() -> None:
    for remove in (remove_scratch_folder, lambda attempt: remove_orphans()):
        attempt = uuid.uuid4().hex
        os.close(create_locked_folder(locate_socket_folder(attempt)))
        (locate_socket_folder(attempt) / "ray").mkdir()
        remove(attempt)
        assert not locate_socket_folder(attempt).exists()


@pytest.mark.parametrize("launcher", [LocalGroup, pytest.param(WorkerGroup, marks=pytest.mark.full)])
def test_the_answer_is_that_of_the_first_rank(launcher: Any) -> None:
    assert launcher(2).run(members.total) == 3.0


def test_ranks_wait_for_each_other_in_their_store_as_long_as_in_a_collective() -> None:
    assert LocalGroup(1).run(members.patience) == dist.default_pg_timeout.total_seconds() == 1800


@pytest.mark.parametrize("launcher", [LocalGroup, pytest.param(WorkerGroup, marks=pytest.mark.full)])
def test_an_error_of_one_rank_ends_all_and_keeps_its_class(launcher: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        launcher(3).run(members.refuse)  # a barrier waits half an hour, longer than a test may take
    assert str(caught.value) == "train.optm_lr = -1 must be positive"


@pytest.mark.parametrize("launcher", [LocalGroup, pytest.param(WorkerGroup, marks=pytest.mark.full)])
def test_all_ranks_stop_at_the_same_step(launcher: Any, tmp_path: Path) -> None:
    started = tmp_path / "started"
    first, second = launcher(2).run(partial(members.stop_together, started), started.exists)
    assert first == second >= 3


@pytest.mark.full
def test_a_signal_to_every_process_of_a_job_stops_ranks_after_their_step(tmp_path: Path) -> None:
    """As of a service manager, or of a machine that shuts down; their checkpoint is still to be saved."""
    started, others = tmp_path / "started", set(psutil.Process().children(recursive=True))

    def is_asked() -> bool:
        if started.exists():
            for process in set(psutil.Process().children(recursive=True)) - others:
                process.send_signal(signal.SIGTERM)
        return started.exists()

    first, second = WorkerGroup(2).run(partial(members.stop_together, started), is_asked)
    assert first == second >= 3


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Ray cluster that says it has two GPUs, which this machine has not; its address is in `RAY_ADDRESS`."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # of this cluster alone
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray, log = str(Path(sys.executable).with_name("ray")), tmp_path / "head.log"
    command = [ray, "start", "--head", f"--port={port}", "--num-cpus=4", "--num-gpus=2", "--include-dashboard=false",
               "--disable-usage-stats", "--object-store-memory=100000000", "--block"]  # fmt: skip
    with log.open("w") as output:
        head = subprocess.Popen(command, stdout=output, stderr=output)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    try:
        wait_until(lambda: "Ray runtime started" in log.read_text(), 300, log.read_text)  # its node has registered
        yield
    finally:
        head.terminate()
        head.wait(30)


def started(*what: str) -> str:
    """What two ranks say, started by a process of its own, as by a stage: Ray reads its token once in a process."""
    command = [sys.executable, "-m", "tests.distributed.members", "2", *what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ranks_get_the_gpus_of_the_cluster_not_of_the_machine_that_starts_them(cluster: None) -> None:
    assert measure_machine().gpus == (), "this machine has none"
    found = measure_worker_machine(["torch"], may_use_ray=True)
    assert len(found.gpus) == 2 and found.versions == measure_machine(["torch"]).versions
    *ranks, first, second = started("shared", "1").split()
    assert [first, second] == ranks and sorted(ranks) == ["0", "1"], "each engine has the GPU of one rank"


@pytest.mark.full
def test_one_engine_has_the_gpus_of_two_ranks_of_a_cluster_and_one_that_dies_ends_all(cluster: None) -> None:
    gpus, _, died = started("shared", "2", "die").partition("\n")
    *ranks, engine = gpus.split()
    assert sorted(engine.split(",")) == sorted(ranks) == ["0", "1"]
    assert re.search("rank [01]", died)


@pytest.mark.full
def test_a_machine_outside_of_the_cluster_joins_it_with_its_token_and_leaves_it(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, ray = os.environ["RAY_ADDRESS"], str(Path(sys.executable).with_name("ray"))

    def num_nodes() -> int:
        said = subprocess.run([ray, "status", f"--address={address}"], capture_output=True, text=True).stdout
        return said.partition("Active:")[2].partition("Pending:")[0].count("node_")

    with join_cluster():
        wait_until(lambda: num_nodes() == 1, 60, "the head is here")
    with join_cluster(lambda address: False):
        wait_until(lambda: num_nodes() == 2, 60, "it is a node")
        assert measure_worker_machine(["torch"], may_use_ray=True).gpus == ("GPU", "GPU"), "it has none to offer"
    wait_until(lambda: num_nodes() == 1, 60, "it has left")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    with (
        pytest.raises(StageFailed, match=r"cannot join the cluster: .*RAY_AUTH_TOKEN must be"),
        join_cluster(lambda a: False),
    ):
        pass


@pytest.mark.parametrize(
    ("size", "beside", "there", "found"),
    [
        (2, {}, {"CPU": 2, "GPU": 2}, [{"CPU": 1, "GPU": 1}] * 2),
        (2, {"processes": 2}, {"CPU": 4, "GPU": 4}, [{"CPU": 1, "GPU": 1}] * 2 + [{"CPU": 2, "GPU": 2}]),
        (2, {"shares_gpus": True}, {"CPU": 4, "GPU": 2}, [{"CPU": 2, "GPU": 1}] * 2),
        (2, {"shares_gpus": True}, {"CPU": 2}, [{"CPU": 1}] * 2),
        (4, {"shares_gpus": True, "processes": 2}, {"CPU": 8, "GPU": 4}, [{"CPU": 4, "GPU": 2}] * 2),
        (4, {"shares_gpus": True, "processes": 2}, {"CPU": 4}, [{"CPU": 1}] * 4),
        (3, {}, {"CPU": 4, "GPU": 2}, "the mesh takes 3 GPUs, of 2 that the Ray cluster has"),
        (2, {"processes": 1}, {"CPU": 4, "GPU": 2}, "the mesh takes 2 GPUs, and a rollout engine 1, of 2 that"),
        (2, {"processes": 1}, {"CPU": 2}, "2 ranks and what is beside them take 3 CPUs, of 2 that the Ray cluster has"),
        (4, {"processes": 4}, {"CPU": 16, "GPU": 16}, [{"CPU": 1, "GPU": 1}] * 4 + [{"CPU": 4, "GPU": 4}]),
        (4, {"processes": 9}, {"CPU": 16, "GPU": 16}, "tp_size = 9: an engine takes 9 CPUs and 9 GPUs of one machine"),
    ],
)
def test_ranks_and_an_engine_have_room_or_are_refused(size: int, beside: Any, there: Any, found: Any) -> None:
    machines = 2 if there["CPU"] == 16 else 1
    node = {"Alive": True, "Resources": {name: count / machines for name, count in there.items()}}
    ray = SimpleNamespace(cluster_resources=lambda: there, nodes=lambda: [node] * machines)
    shares_gpus, processes = beside.get("shares_gpus", False), beside.get("processes", 1)
    actors = ActorGroup(dict, lambda: 1, shares_gpus=shares_gpus, processes_per_actor=processes)
    if isinstance(found, str):
        with pytest.raises(ConfigError, match=found):
            list_resource_bundles(ray, size, actors if beside else None, owns_cluster=False)
    else:
        assert list_resource_bundles(ray, size, actors if beside else None, owns_cluster=False) == found


def test_neighbouring_ranks_are_on_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: Any = importlib.import_module("ray.util.placement_group")
    monkeypatch.setattr(groups, "placement_group", lambda bundles, strategy: SimpleNamespace(ready=lambda: None))
    monkeypatch.setattr(groups, "placement_group_table", lambda group: {"bundles_to_node_id": dict(enumerate("babaa"))})
    ray = SimpleNamespace(wait=lambda refs, timeout: (refs, []), get=lambda ref: None)
    found = reserve_bundles(ray, [{"GPU": 1}] * 4 + [{"GPU": 2}], lambda: False, lambda: None)
    assert [each.placement_group_bundle_index for each in found] == [1, 3, 0, 2, 4], "the engine's is the last"


@pytest.mark.parametrize("launcher", [LocalGroup, pytest.param(WorkerGroup, marks=pytest.mark.full)])
def test_ranks_of_one_machine_listen_on_loopback_alone(launcher: Any) -> None:
    of_others = members.listeners(os.getpid())  # of the tests before
    found = launcher(2).run(partial(members.listening, os.getpid())) - of_others
    assert len(found) >= 2
    assert {ip for ip, _ in found if not ip_address(ip.removeprefix("::ffff:")).is_loopback} == set()


@pytest.mark.full
@pytest.mark.parametrize(
    "meshes",
    [
        [{"dp_shard_size": 2}, {"dp_shard_size": 2, "dp_replicate_size": 2}, {}],
        [{"pp_size": 2}, {"pp_size": 2, "pp_schedule": "1F1B", "dp_shard_size": 2}, {}],
        [{}, {"dp_shard_size": 2}],
        [{}, {"pp_size": 3, "pp_schedule": "GPipe"}],
    ],
    ids=["two, four, one", "pipelines, one", "one, two", "one, pipeline"],
)
def test_a_training_goes_on_with_another_number_of_ranks(
    meshes: list[dict[str, Any]], task: Path, tmp_path: Path, alone: dict[str, Any]
) -> None:
    *stopped, last = [sft(task, tmp_path / "sft", **mesh) for mesh in meshes]
    for step, part in enumerate(stopped, start=4 - len(stopped)):
        with pytest.raises(Preempted, match=f"stopped after step {step} of 5; checkpoint saved"):
            ranks(part).run(partial(members.train, part, step, tmp_path))
    outcome = ranks(last).run(partial(members.train, last, None, tmp_path))
    assert outcome.outputs == ("safetensors/step_5",)
    assert any(check.startswith("reload") for check in outcome.info["checks"])
    assert_like(last, alone)
    assert [line["step"] for line in read_metrics(last.path / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def ranks(part: Stage) -> LocalGroup:
    return LocalGroup(part.recipe.policy.parallelism.world_size)


def test_the_interface_is_the_one_that_has_the_way_to_the_first_rank() -> None:
    assert find_network_interface("127.0.0.1") == "lo"
    others = [
        (name, each.address) for name, found in psutil.net_if_addrs().items() for each in found
        if name != "lo" and each.family == socket.AF_INET
    ]  # fmt: skip
    assert all(find_network_interface(address) == name for name, address in others)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_store_of_a_group_listens_on_the_address_of_its_version(address: str) -> None:
    if all(each.address != address for found in psutil.net_if_addrs().values() for each in found):
        pytest.skip(f"this machine has no {address}")
    store = create_tcp_store(address, 1)
    store.set("key", "value")
    assert torch.distributed.TCPStore(address, store.port, 1, is_master=False).get("key") == b"value"
