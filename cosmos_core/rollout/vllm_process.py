"""Context managers that undo what vLLM changes in the trainer's process and in /dev/shm.

vLLM's CPU ranks exchange tensors through shared memory, whose name vLLM derives from how the ranks were initialized,
which with an external launcher is always `env://`. Two runs on a machine would write into each other's memory, and
after a kill no engine could start ("create shm in SHMManager failed. errno: 17"), because only a process that exits
normally removes the name.
"""

import os
import random
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cosmos_core.parallel.mesh import broadcast_object


@contextmanager
def keep_process_group() -> Iterator[None]:
    """Return a context manager in which the shutdown of an engine does not destroy the trainer's process group."""
    original_destroy_process_group = torch.distributed.destroy_process_group
    torch.distributed.destroy_process_group = lambda group=None: group and original_destroy_process_group(group)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group = original_destroy_process_group


@contextmanager
def restore_process_state() -> Iterator[None]:
    """Return a context manager that restores random states, thread count, signal handlers and environment at its end.
    vLLM seeds every generator at the start and advances torch's global generator in each step. vLLM also replaces
    `torch.set_num_threads` by a function that refuses calls, and adds libraries to LD_PRELOAD for its child processes,
    which would affect the trainer's child processes. Variables named VLLM_* stay, because vLLM reads them again."""
    python_rng_state, numpy_rng_state = random.getstate(), np.random.get_state()
    original_set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    signal_handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    initial_environment = dict(os.environ)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python_rng_state)
        np.random.set_state(numpy_rng_state)
        torch.set_num_threads = original_set_num_threads
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        for signal_number, signal_handler in signal_handlers.items():
            if signal.getsignal(signal_number) is not signal_handler:
                signal.signal(signal_number, signal_handler)
        for name in set(os.environ) - set(initial_environment):
            if not name.startswith("VLLM_"):
                del os.environ[name]
        os.environ.update({name: value for name, value in initial_environment.items() if not name.startswith("VLLM_")})


@contextmanager
def unique_memory_names() -> Iterator[None]:
    """Return a context manager in which a starting engine gives the shared memory of its ranks a unique name."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    random_prefix = broadcast_object(secrets.token_hex(8))
    original_make_group_name = _CPUSHMDistributed.make_group_name

    def make_unique_group_name(communicator: Any) -> str:
        return f"{random_prefix}-{original_make_group_name(communicator).lstrip('/')}"

    _CPUSHMDistributed.make_group_name = staticmethod(make_unique_group_name)  # type: ignore[method-assign]
    try:
        yield
    finally:
        _CPUSHMDistributed.make_group_name = staticmethod(original_make_group_name)  # type: ignore[method-assign]


def unlink_shared_memory() -> None:
    """Unlink the name of this rank's shared memory after all ranks have opened it, so that the memory is freed with the
    last process that uses it, however the process ends."""
    from vllm.distributed.parallel_state import get_tp_group

    shared_memory_module = getattr(get_tp_group().device_communicator, "dist_module", None)
    if name := getattr(shared_memory_module, "group_name", None):
        Path("/dev/shm", f"{name}_{get_tp_group().rank_in_group}").unlink(missing_ok=True)
