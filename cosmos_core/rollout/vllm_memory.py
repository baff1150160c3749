"""The shared memory in which vLLM's ranks on CPU exchange tensors, and its names in /dev/shm.

vLLM names it after how the ranks met. With a launcher other than its own that is `env://` for everyone: two runs on a
machine would write into each other's memory, and after a kill nothing starts any more ("create shm in SHMManager
failed. errno: 17"), because only a process that ends by itself takes its name away.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist


@contextmanager
def own_names() -> Iterator[None]:
    """While the ranks of the trainer's process group start an engine over themselves: names that no other has."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    token = [secrets.token_hex(8)]
    dist.broadcast_object_list(token)
    original = _CPUSHMDistributed.make_group_name

    def own_name(communicator: Any) -> str:
        return f"{token[0]}-{original(communicator).lstrip('/')}"

    _CPUSHMDistributed.make_group_name = staticmethod(own_name)  # type: ignore[method-assign]
    try:
        yield
    finally:
        _CPUSHMDistributed.make_group_name = staticmethod(original)  # type: ignore[method-assign]


def drop_name() -> None:
    """Take away the name of what this rank shares, once an engine has started and every rank has opened it: the
    memory then ends with the last process that uses it, however that ends."""
    from vllm.distributed.parallel_state import get_tp_group

    module = getattr(get_tp_group().device_communicator, "dist_module", None)
    if name := getattr(module, "group_name", None):
        Path("/dev/shm", f"{name}_{get_tp_group().rank_in_group}").unlink(missing_ok=True)
