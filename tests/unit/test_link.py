"""The header of a bucket, and calls that may hang."""

from __future__ import annotations

import threading

import pytest
import torch

from cosmos_core.rollout.link import TransferFailed, call_with_timeout, copy_tensors_to_buffer, split_bucket

TIED = torch.randn(4, 3)
BUCKET = [
    ("small", torch.arange(5, dtype=torch.int8)), ("a", torch.randn(3, 5, dtype=torch.bfloat16)), ("embed", TIED),
    ("scale", torch.tensor(1.5)), ("turned", torch.randn(2, 3, dtype=torch.float64).T), ("head", TIED),
    ("none", torch.empty(0, 4)),
]  # fmt: skip


def test_a_bucket_is_consecutive_bytes_each_tensor_aligned_and_tied_weights_once() -> None:
    header, tensors = split_bucket(BUCKET)
    assert header.names == ["turned", "embed", "scale", "none", "a", "small"]
    assert header.name_by_alias == {"head": "embed"}
    buffer = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8)
    copy_tensors_to_buffer(buffer, tensors)
    info = header.make_update_info()
    sizes = [tensor.nbytes for tensor in tensors]
    # As vLLM's `unpack_tensor` does.
    parts = zip(info["names"], info["dtype_names"], info["shapes"], buffer.split(sizes), strict=True)
    unpacked = {name: part.contiguous().view(getattr(torch, dtype)).view(*shape) for name, dtype, shape, part in parts}
    found = dict(header.make_bucket(unpacked))
    assert found.keys() == dict(BUCKET).keys()
    for name, tensor in BUCKET:
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_a_placeholder_has_names_shapes_and_dtypes_without_data() -> None:
    found = dict(split_bucket(BUCKET)[0].make_meta_bucket())
    assert {name: (t.shape, t.dtype, t.is_meta) for name, t in found.items()} == {
        name: (t.shape, t.dtype, True) for name, t in BUCKET
    }


def test_a_call_gives_its_result_or_its_error() -> None:
    def refuse() -> None:
        raise TimeoutError("own error")

    assert call_with_timeout(60, lambda: 3) == 3
    with pytest.raises(TimeoutError, match="own error"):
        call_with_timeout(60, refuse)


@pytest.mark.parametrize(("seconds", "has_failed", "reason"), [(0.05, False, "0.05 s"), (60, True, "an engine")])
def test_a_call_that_hangs_is_aborted_and_what_it_then_returns_is_ignored(
    seconds: float, has_failed: bool, reason: str
) -> None:
    aborted, returned = threading.Event(), threading.Event()

    def hang() -> str:
        aborted.wait()
        returned.set()
        return "arbitrary bytes"

    with pytest.raises(TransferFailed, match=reason):
        call_with_timeout(seconds, hang, abort=aborted.set, has_peer_failed=lambda: has_failed)
    assert aborted.is_set() and returned.wait(60)
