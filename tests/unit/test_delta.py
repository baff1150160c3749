"""Weights of which only the changed values are sent: engines have the whole ones, whatever happened before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from cosmos_core.errors import StageFailed
from cosmos_core.rollout.base import Bucket, LoadReceipt
from cosmos_core.rollout.delta import find_changed_words
from cosmos_core.rollout.fleet import EngineFleet
from cosmos_core.rollout.transfer import DeltaWeightTransfer
from tests.conftest import wait_until
from tests.unit.replicas import Threaded, all_open, fleet_of, is_back


class Policy:
    """Weights of which each step changes some."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(0)
        self.matrix = torch.randn(40, 50, generator=random).to(torch.bfloat16)
        self.vector = torch.randn(30, generator=random)
        self.count = torch.tensor(0, dtype=torch.int64)
        self._random = np.random.default_rng(0)

    def step(self, number: int = 20) -> None:
        chosen = self._random.choice(self.matrix.numel(), number, replace=False)
        self.matrix.flatten()[chosen] += 1.0
        self.count += 1

    def buckets(self) -> list[Bucket]:
        return [[("a", self.matrix), ("tied", self.matrix)], [("b", self.vector), ("c", self.count)]]

    @property
    def num_bytes(self) -> int:
        return self.matrix.nbytes + self.vector.nbytes + self.count.nbytes


def load(fleet: EngineFleet, version: int, policy: Policy, *handles: Threaded) -> int:
    """Load the weights, look at those that the engines have, and return the bytes that were sent."""
    assert fleet.load_weights(version, policy.buckets()) == LoadReceipt(version, 4)
    expected = {name: tensor for bucket in policy.buckets() for name, tensor in bucket}
    for handle in handles:
        found = handle.engine.weights
        assert handle.engine.version == version and found.keys() == expected.keys()
        assert all(found[name].dtype == t.dtype and torch.equal(found[name], t) for name, t in expected.items())
    sent = fleet.num_delta_bytes
    assert sent is not None
    return sent


def deltas(*handles: Threaded, **keywords: Any) -> Any:
    return fleet_of(*handles, patience=600.0, weight_transfer=DeltaWeightTransfer(), **keywords)


@pytest.mark.parametrize("mode", ["disabled", "inference"])
def test_after_the_first_load_only_changed_values_are_sent(mode: str) -> None:
    handles, policy = [Threaded(), Threaded()], Policy()
    with deltas(*handles, weight_sync_mode=mode) as fleet:
        all_open(fleet, 2)
        assert load(fleet, 1, policy, *handles) == policy.num_bytes
        assert load(fleet, 2, policy, *handles) == 0
        for version in range(3, 6):
            policy.step()
            assert load(fleet, version, policy, *handles) == 20 * 6 + 6  # positions and words, and the low word of `c`
        policy.step(1500)
        assert load(fleet, 6, policy, *handles) == policy.matrix.nbytes + 6


def test_an_engine_that_is_back_gets_all_values_and_then_changes_as_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    handles, policy = [Threaded(), Threaded()], Policy()
    with deltas(*handles) as fleet:
        all_open(fleet, 2)
        load(fleet, 1, policy, *handles)
        handles[1].kill()
        is_back(fleet)
        with fleet.loading_new_engines():
            assert load(fleet, 1, policy, *handles) == policy.num_bytes
        policy.step()
        assert load(fleet, 2, policy, *handles) == 126
        handles[0].kill()
        is_back(fleet)
        policy.step()
        assert load(fleet, 3, policy, *handles) == 126  # to the one that has the weights, and all to the other
        policy.step()
        assert load(fleet, 4, policy, *handles) == 126


def test_an_engine_whose_death_was_not_seen_yet_is_left_out_of_the_load() -> None:
    handles, policy = [Threaded(), Threaded()], Policy()
    with deltas(*handles) as fleet:
        all_open(fleet, 2)
        load(fleet, 1, policy, *handles)
        with fleet._pool.lock:  # its thread learns nothing meanwhile
            handles[0].kill()
            wait_until(lambda: handles[0].engine is not None, 60, "it is back")
            handles[0].call("begin_session", "another").result()
        policy.step()
        assert load(fleet, 2, policy, handles[1]) == 126
        wait_until(lambda: fleet.num_restarts == 1, 60, "the fleet's thread counts the death, which the load saw")


def test_new_engines_that_got_newer_weights_alone_leave_nobody_with_half_of_them() -> None:
    present, policy = [Threaded()], Policy()
    fleet = EngineFleet(lambda: present, max_groups=1, timeout_seconds=600.0, weight_transfer=DeltaWeightTransfer())
    with closing(fleet):
        all_open(fleet, 1)
        load(fleet, 1, policy, *present)
        present.append(Threaded())
        wait_until(lambda: len(fleet._pool.open_engines()) == 2, 60, "it is seen")
        policy.step()
        with fleet.loading_new_engines():
            load(fleet, 2, policy, present[1])
        policy.step()
        load(fleet, 3, policy, *present)
        policy.step()
        assert load(fleet, 4, policy, *present) == 126


def test_after_a_load_that_failed_half_way_all_values_are_sent() -> None:
    handle, policy = Threaded(), Policy()
    with deltas(handle) as fleet:
        all_open(fleet, 1)
        load(fleet, 1, policy, handle)
        policy.step()

        def cut() -> Iterator[Bucket]:
            yield policy.buckets()[0]
            raise StageFailed("the gather failed")

        with pytest.raises(StageFailed, match="the gather failed"):
            fleet.load_weights(2, cut())
        handle.kill()
        is_back(fleet)
        assert load(fleet, 3, policy, handle) == policy.num_bytes
        policy.step()
        assert load(fleet, 4, policy, handle) == 126


def test_changed_words_are_found_and_applied() -> None:
    random = np.random.default_rng(0)
    old = random.integers(0, 256, 2000, np.uint8)
    new = old.copy()
    new[[3, 100, 101, 1999]] ^= 1
    changes = find_changed_words(old, new)
    assert changes is not None and changes.positions.tolist() == [1, 50, 999] and changes.nbytes == 18
    changes.apply_changes(old)
    assert (old == new).all()
    assert find_changed_words(old[:-2], new) is None and find_changed_words(old[:-1], new[:-1]) is None
    assert find_changed_words(old, ~new) is None
