"""Names in /dev/shm of the shared memory with which vLLM's CPU ranks exchange tensors.

vLLM derives the name from how the ranks were initialized, which with an external launcher is always `env://`. Two runs
on a machine would write into each other's memory, and after a kill no engine could start ("create shm in SHMManager
failed. errno: 17"), because only a process that exits normally removes the name.
"""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cosmos_core.parallel.mesh import broadcast_object


@contextmanager
def unique_names() -> Iterator[None]:
    """Return a context manager in which an engine that starts gives its ranks' shared memory a unique name."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    name_prefix = broadcast_object(secrets.token_hex(8))
    original_name_fn = _CPUSHMDistributed.make_group_name

    def unique_name(communicator: Any) -> str:
        return f"{name_prefix}-{original_name_fn(communicator).lstrip('/')}"

    _CPUSHMDistributed.make_group_name = staticmethod(unique_name)  # type: ignore[method-assign]
    try:
        yield
    finally:
        _CPUSHMDistributed.make_group_name = staticmethod(original_name_fn)  # type: ignore[method-assign]


def unlink_shared_memory() -> None:
    """Unlink the name of this rank's shared memory once an engine has started and all ranks have opened it.

    The memory is then freed with the last process that uses it, however that process ends.
    """
    from vllm.distributed.parallel_state import get_tp_group

    shared_memory_module = getattr(get_tp_group().device_communicator, "dist_module", None)
    if shared_memory_name := getattr(shared_memory_module, "group_name", None):
        Path("/dev/shm", f"{shared_memory_name}_{get_tp_group().rank_in_group}").unlink(missing_ok=True)
