"""Ranks as local processes without Ray, for tests of what ranks compute."""

from __future__ import annotations

import multiprocessing as mp
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from cosmos_core.cluster.group import RankFailed, create_tcp_store, run_as_rank
from cosmos_core.cluster.placement import POLL_SECONDS
from cosmos_core.cluster.rank import RankMessages, RankProgram, Rendezvous

_PRELOADED_MODULES = ["torch.distributed.fsdp", "torch.distributed.pipelining", "cosmos_core.train.setup"]
"""Modules that the fork server imports in advance, so that ranks start faster."""


@dataclass(frozen=True)
class LocalGroup:
    """Counterpart of `WorkerGroup` whose ranks are processes of this machine, which a fork server starts."""

    size: int

    def run(self, program: RankProgram, should_stop: Callable[[], bool] = lambda: False) -> Any:
        """Run `program` on all ranks and return its value on the first rank; raise the first error of a rank."""
        size = self.size
        context, store = mp.get_context("forkserver"), create_tcp_store("127.0.0.1", size)
        context.set_forkserver_preload(_PRELOADED_MODULES)
        pipes, processes = [], []
        for rank in range(size):
            parent_end, child_end = context.Pipe()
            rendezvous = Rendezvous(rank, size, "127.0.0.1", store.port, rank)
            process = context.Process(target=_local_main, args=(child_end, program, rendezvous, dict(os.environ)))
            process.start()
            child_end.close()
            pipes.append(parent_end)
            processes.append(process)
        outcomes: dict[int, Any] = {}
        is_stop_sent = False
        try:
            while len(outcomes) < size:
                if should_stop() and not is_stop_sent:
                    is_stop_sent = True
                    for pipe in pipes:
                        pipe.send("stop")
                ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in outcomes], POLL_SECONDS)
                for rank in [rank for rank, pipe in enumerate(pipes) if pipe in ready]:
                    is_done, value = _receive(pipes[rank], rank)
                    if not is_done:
                        raise value
                    outcomes[rank] = value
            return outcomes[0]
        finally:
            for process in processes:
                process.join(5 if len(outcomes) == size else 0)
                process.kill()
                process.join()


def _local_main(pipe: Connection, program: RankProgram, rendezvous: Rendezvous, environment: Mapping[str, str]) -> None:
    os.environ.clear()  # the environment of the fork server may be outdated
    os.environ |= environment
    messages = RankMessages()
    threading.Thread(target=_listen, args=(pipe, messages), daemon=True).start()
    pipe.send(run_as_rank(program, messages, rendezvous))


def _listen(pipe: Connection, messages: RankMessages) -> None:
    try:
        pipe.recv()
    except EOFError:  # the parent process has ended
        os._exit(1)
    messages.set()


def _receive(pipe: Connection, rank: int) -> tuple[bool, Any]:
    try:
        outcome: tuple[bool, Any] = pipe.recv()
    except (EOFError, ConnectionResetError):
        return False, RankFailed(f"rank {rank} died")
    return outcome
