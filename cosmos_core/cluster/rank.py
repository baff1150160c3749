"""Ray actor that runs the program of one rank.

This module imports no large packages: `Rank.run` imports them with the program, without garbage collection, which is
faster.
"""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from cosmos_core.imports import without_garbage_collection
from cosmos_core.job_signals import ignore_job_signals, unblock_job_signals


class RankMessages(threading.Event):
    """Messages to the program of a rank from the process that started the rank: handles of the Ray actors that run
    alongside the ranks, and a request to stop, for which this event is set."""

    def __init__(self) -> None:
        super().__init__()
        self.actors: list[Any] = []
        """Handles (`actors.ActorHandle`) of the actors that run alongside the ranks; their number may change."""


RankProgram = Callable[[RankMessages], Any]
"""Type of the picklable function that every rank runs."""


@dataclass(frozen=True)
class Rendezvous:
    """Number and GPU of one rank, and the address of the TCP store through which all ranks form a process group."""

    rank: int
    num_ranks: int
    address: str
    """Address of the machine that started the ranks and runs the TCP store."""
    port: int
    device: int
    """Index of the rank's GPU among the GPUs visible to its process."""


class Rank:
    """Ray actor of one rank, with two threads, so that it can receive messages while its program runs."""

    def __init__(self) -> None:
        ignore_job_signals()  # end only when the launcher calls `stop`, so that the rank can save a checkpoint
        self._garbage_collection_pause = ExitStack()
        self._garbage_collection_pause.enter_context(without_garbage_collection())
        self._rank_messages = RankMessages()
        self._run_result: tuple[bool, Any] | None = None

    def run(self, program: RankProgram, rendezvous: Rendezvous) -> tuple[bool, Any]:
        """Run `program` as this rank. Return True and the value of `program` (None except on rank 0), or, after an
        error, False and the error."""
        from cosmos_core.cluster.group import run_as_rank

        unblock_job_signals()
        self._garbage_collection_pause.close()
        self._run_result = run_as_rank(program, self._rank_messages, rendezvous)
        return self._run_result

    def read_run_result(self) -> tuple[bool, Any] | None:
        """Return the result of `run`, in case Ray has lost the reply of `run`; None: the program is still running."""
        return self._run_result

    def stop(self) -> None:
        """Request the program of this rank to stop."""
        self._rank_messages.set()

    def set_actors(self, actors: list[Any]) -> None:
        """Pass the handles of the actors that run alongside the ranks to the program of this rank."""
        self._rank_messages.actors[:] = actors
