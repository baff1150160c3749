"""Which way weights take to engines in other processes, and what becomes of a transfer that fails."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cosmos_core.rollout import transfer, vllm_ranks
from cosmos_core.rollout.base import Bucket, LoadReceipt
from cosmos_core.rollout.fleet import EngineFleet
from cosmos_core.rollout.transfer import NativeWeightTransfer
from tests.conftest import wait_until
from tests.unit.replicas import Drawing, Threaded, all_open, fleet_of, is_back, weights
from tests.unit.wire import Linked, QueueTransport, Wire

NAMES = [["a"], ["b"], ["c"]]


def three(version: int) -> list[Bucket]:
    return [*weights(version), [("c", torch.full((2, 2), version / 4, dtype=torch.bfloat16))]]


def assert_same(version: int, *handles: Threaded) -> None:
    """The engines have exactly the weights that were sent."""
    sent = {name: tensor for bucket in three(version) for name, tensor in bucket}
    for handle in handles:
        found = handle.engine.weights
        assert found.keys() == sent.keys() and handle.engine.version == version
        assert all(found[name].dtype == t.dtype and torch.equal(found[name], t) for name, t in sent.items())


def linked(number: int) -> tuple[Wire, list[Threaded]]:
    wire = Wire()
    return wire, [Threaded(lambda: Linked(wire)) for _ in range(number)]


def fleet_on(wire: Wire, *handles: Threaded, ranks: int = 1, **keywords: Any) -> Any:
    native = NativeWeightTransfer(QueueTransport(wire), ranks)
    return fleet_of(*handles, patience=600.0, weight_transfer=native, **keywords)


def test_weights_take_the_native_way_and_the_communicator_is_kept() -> None:
    wire, handles = linked(2)
    with fleet_on(wire, *handles, ranks=2) as fleet:
        all_open(fleet, 2)
        for version in (1, 2):
            assert fleet.load_weights(version, three(version)) == LoadReceipt(version, 3)
            assert_same(version, *handles)
        assert [(size, sorted(ranks)) for size, ranks in wire.worlds] == [(5, [0, 1, 3])]
        assert [handle.engine.link.received for handle in handles] == [NAMES * 2] * 2
        assert wire.num_bytes == 2 * sum(tensor.nbytes for [(_, tensor)] in three(1))


def test_an_engine_more_or_less_makes_a_new_communicator() -> None:
    wire, handles = linked(3)
    present = handles[:1]
    native = NativeWeightTransfer(QueueTransport(wire), 1)
    with closing(EngineFleet(lambda: present, max_groups=1, timeout_seconds=600.0, weight_transfer=native)) as fleet:
        for version, number in enumerate((1, 3, 2), start=1):
            present = handles[:number]
            wait_until(lambda: len(fleet._pool.engines) == number, 60, "they are seen")  # noqa: B023 - called in the loop
            all_open(fleet, number)
            fleet.load_weights(version, three(version))
            assert_same(version, *present)
    assert [(size, sorted(ranks)) for size, ranks in wire.worlds] == [(2, [0, 1]), (4, [0, 1, 2, 3]), (3, [0, 1, 2])]


def test_a_transfer_that_is_cut_off_continues_through_host_memory_and_the_next_is_native_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wire, handles = linked(2)
    with fleet_on(wire, *handles) as fleet:
        all_open(fleet, 2)

        def cut() -> Iterator[Bucket]:
            for i, bucket in enumerate(three(1)):
                with monkeypatch.context() as patch:
                    if i == 1:
                        wire.is_cut = True
                        patch.setattr(transfer, "_BUCKET_TIMEOUT_SECONDS", 0.2)
                    yield bucket

        with caplog.at_level(logging.WARNING):
            assert fleet.load_weights(1, cut()) == LoadReceipt(1, 3)
        assert_same(1, *handles)
        [record] = caplog.records
        assert record.message.startswith("native weight transfer: ")
        assert record.message.endswith("these weights travel through host memory")
        fleet.load_weights(2, three(2))
        assert_same(2, *handles)
        assert [handle.engine.link.received for handle in handles] == [[["a"], *NAMES]] * 2
        assert len(wire.worlds) == 2 and fleet.num_restarts == 0


def test_an_engine_that_dies_between_header_and_data_is_left_out_and_the_next_version_is_native_again() -> None:
    wire, handles = linked(2)
    with fleet_on(wire, *handles) as fleet:
        all_open(fleet, 2)
        fleet.load_weights(1, three(1))
        handles[1].engine.link.on_header = handles[1].kill
        survivor = handles[0].engine
        assert fleet.load_weights(2, three(2)) == LoadReceipt(2, 3)  # within the limit of a minute for a bucket
        assert_same(2, handles[0])
        is_back(fleet)
        with fleet.loading_new_engines():
            fleet.load_weights(2, three(2))  # by host memory, which needs no other engine
        assert handles[1].engine.link.received == [] and len(wire.worlds) == 1
        fleet.load_weights(3, three(3))
        assert_same(3, *handles)
        assert handles[1].engine.link.received == NAMES and survivor.link.received[-3:] == NAMES
        assert [(size, sorted(ranks)) for size, ranks in wire.worlds] == [(3, [0, 1, 2])] * 2


def test_an_engine_that_has_a_bucket_does_not_get_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine of two refuses the header, so the other may have the data; a load counts each tensor once."""
    wire, handles = linked(2)
    loaded: list[list[str]] = []

    def load_weights(self: Linked, version: int, buckets: Any) -> LoadReceipt:
        def noted() -> Iterator[Bucket]:
            for bucket in buckets:
                loaded.append([name for name, _ in bucket])
                yield bucket

        return original(self, version, noted())

    original = Linked.load_weights
    monkeypatch.setattr(Linked, "load_weights", load_weights)
    with fleet_on(wire, *handles) as fleet:
        all_open(fleet, 2)

        def refuse() -> None:
            wait_until(lambda: handles[0].engine.link.received, 60, "the other one has it")
            handles[1].engine.link._end._chunks.task_done()
            raise RuntimeError("out of memory")

        handles[1].engine.link.on_header = refuse
        fleet.load_weights(1, three(1))
        assert_same(1, *handles)
        assert sorted(loaded) == sorted(NAMES * 2)


def test_engines_without_a_link_get_weights_through_host_memory_and_one_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wire, handles = linked(1)
    handles.append(Threaded(Drawing))
    with fleet_on(wire, *handles) as fleet, caplog.at_level(logging.WARNING):
        all_open(fleet, 2)
        for version in (1, 2, 3):
            fleet.load_weights(version, three(version))
            assert_same(version, *handles)
    [record] = caplog.records
    assert record.message == (
        "native weight transfer: an engine has no native link; these weights travel through host memory, as all later "
        "ones until an engine is replaced"
    )
    assert wire.worlds == []


def test_without_nccl_weights_travel_through_host_memory_after_two_attempts_until_an_engine_is_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Missing(QueueTransport):
        num_attempts = 0

        def prepare_connection(self, num_engines: int, ranks_per_engine: int) -> list[dict[str, Any]]:
            self.num_attempts += 1
            raise OSError("libnccl.so.2: cannot open shared object file")

    wire, [handle] = linked(1)
    transport = Missing(wire)
    native = NativeWeightTransfer(transport, 1)
    with fleet_of(handle, weight_transfer=native) as fleet, caplog.at_level(logging.WARNING):
        all_open(fleet, 1)
        for version in (1, 2, 3):
            fleet.load_weights(version, three(version))
            assert_same(version, handle)
        assert transport.num_attempts == 2 and len(caplog.records) == 2
        handle.kill()  # the next process has the same number, and so an equal description
        is_back(fleet)
        fleet.load_weights(4, three(4))
        assert_same(4, handle)
    assert transport.num_attempts == 3


def test_a_bucket_that_has_no_room_on_the_gpu_goes_through_host_memory() -> None:
    class Full(QueueTransport):
        def fill_buffer(self, tensors: Any) -> torch.Tensor:
            if tensors[0].dtype == torch.int8:
                raise torch.OutOfMemoryError("out of memory")
            return super().fill_buffer(tensors)

    wire, [handle] = linked(1)
    with fleet_of(handle, weight_transfer=NativeWeightTransfer(Full(wire), 1)) as fleet:
        all_open(fleet, 1)
        fleet.load_weights(1, three(1))
        assert_same(1, handle)
        assert handle.engine.link.received == [["a"]]


def test_ranks_of_vllm_begin_a_load_take_each_bucket_and_end_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def load_weights(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        calls.append({name: tensor.tolist() for name, tensor in tensors})

    reload = SimpleNamespace(
        initialize_layerwise_reload=lambda model: calls.append(("begin", model)),
        finalize_layerwise_reload=lambda model, config: calls.append(("end", model)),
    )
    monkeypatch.setitem(sys.modules, "vllm.config", SimpleNamespace(set_current_vllm_config=nullcontext))
    monkeypatch.setitem(sys.modules, "vllm.model_executor.model_loader.reload", reload)
    model = SimpleNamespace(load_weights=load_weights)
    runner = SimpleNamespace(get_model=lambda: model, model_config=None)
    worker = SimpleNamespace(vllm_config=None, model_runner=runner)
    llm = SimpleNamespace(collective_rpc=lambda call, args=(): call(worker, *args))
    vllm_ranks.load_on_ranks(llm, [[("a", torch.ones(2))], [("b", torch.zeros(1)), ("c", torch.ones(1))]])
    assert calls == [("begin", model), {"a": [1.0, 1.0]}, {"b": [0.0], "c": [1.0]}, ("end", model)]
