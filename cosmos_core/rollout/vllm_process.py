"""Context managers that undo what vLLM changes in the process that it shares with the trainer."""

import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def keep_process_group() -> Iterator[None]:
    """Keep the trainer's process group, which an engine would destroy together with its own when it shuts down."""
    original_destroy = torch.distributed.destroy_process_group
    torch.distributed.destroy_process_group = lambda group=None: group and original_destroy(group)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group = original_destroy


@contextmanager
def restore_process_state() -> Iterator[None]:
    """Undo what vLLM changes in its process: random states, threads, signal handlers, environment.

    vLLM seeds every generator at the start and advances torch's global generator in each step. vLLM also replaces
    `torch.set_num_threads` by a function that refuses calls, and adds libraries to LD_PRELOAD for its child processes,
    which would affect the trainer's child processes. Variables named VLLM_* stay, because vLLM reads them again.
    """
    python_rng_state, numpy_rng_state = random.getstate(), np.random.get_state()
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    signal_handlers = {
        signal_number: signal.getsignal(signal_number) for signal_number in (signal.SIGTERM, signal.SIGINT)
    }
    environment = dict(os.environ)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python_rng_state)
        np.random.set_state(numpy_rng_state)
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        for signal_number, signal_handler in signal_handlers.items():
            if signal.getsignal(signal_number) is not signal_handler:
                signal.signal(signal_number, signal_handler)
        for name in set(os.environ) - set(environment):
            if not name.startswith("VLLM_"):
                del os.environ[name]
        os.environ.update({name: value for name, value in environment.items() if not name.startswith("VLLM_")})
