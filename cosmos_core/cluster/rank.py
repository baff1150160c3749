"""A rank as Ray's process holds it. It imports nothing heavy, so that what it is to run is imported, when that comes,
without garbage collection."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from cosmos_core.imports import without_collection


class Told(threading.Event):
    """What a rank is told while it runs: it is set when the rank is asked to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.actors: list[Any] = []
        """Handles of the actors that there are beside the ranks (`actors.ActorHandle`); their number may change."""


Program = Callable[[Told], Any]
"""What every rank runs, picklable."""


@dataclass(frozen=True)
class Rendezvous:
    """Where one rank meets the others, and as which."""

    rank: int
    size: int
    address: str
    """Of the machine of the process that started the ranks, which keeps the store where they meet."""
    port: int
    device: int
    """Number of its GPU among those that its process sees."""


class Rank:
    """A rank as an actor; two threads, so that it hears what it is told while it runs."""

    def __init__(self) -> None:
        self._imports = ExitStack()
        self._imports.enter_context(without_collection())
        self._told = Told()
        self._outcome: tuple[bool, Any] | None = None

    def run(self, program: Program, rendezvous: Rendezvous) -> tuple[bool, Any]:
        """Return what the program returned or raised on this rank."""
        from cosmos_core.cluster.group import outcome_of

        self._imports.close()
        self._outcome = outcome_of(program, self._told, rendezvous)
        return self._outcome

    def ended(self) -> tuple[bool, Any] | None:
        """Return what `run` returned, whose reply may be lost on its way; None: it still runs."""
        return self._outcome

    def stop(self) -> None:
        """Ask the program to stop."""
        self._told.set()

    def have(self, actors: list[Any]) -> None:
        """Let the program know the actors that there are beside the ranks."""
        self._told.actors[:] = actors
