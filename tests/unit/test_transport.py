"""How a bucket is made ready for engines on GPUs, with plain memory in the place of theirs."""

from __future__ import annotations

import pytest
import torch

from cosmos_core.rollout import transport
from cosmos_core.rollout.base import Bucket
from cosmos_core.rollout.link import BucketHeader, TransferFailed
from tests.unit.wire import MemoryTransport


def test_a_buffer_is_exported_again_only_if_a_bucket_is_larger_and_is_freed_after_the_load() -> None:
    made = MemoryTransport()
    buckets: list[Bucket] = [[("a", torch.ones(4))], [("b", torch.ones(2))], [("c", torch.ones(8))]]
    headers = [made.stage_bucket(bucket) for bucket in buckets]
    assert [header.transport_fields["ipc_handles"][made.uuid][0] for header in headers] == [0, 0, 1]
    assert [header.transport_fields["tensor_sizes"] for header in headers] == [[16], [8], [32]]
    made.end_weight_load()
    assert made.send_buffer is None
    assert made.stage_bucket(buckets[0]).transport_fields["ipc_handles"][made.uuid][0] == 2


def test_a_rank_that_cannot_export_its_buffer_fails_the_transfer_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "all_gather_object", lambda value: [value, ("no IPC on rank 1", {})])
    with pytest.raises(TransferFailed, match="no IPC on rank 1"):
        MemoryTransport().stage_bucket([("a", torch.ones(4))])


def test_the_handles_of_all_ranks_reach_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "all_gather_object", lambda value: [value, ("", {"GPU-2": (7,)})])
    header: BucketHeader = MemoryTransport().stage_bucket([("a", torch.ones(4))])
    assert set(header.transport_fields["ipc_handles"]) == {"GPU-1", "GPU-2"}
