"""How a signal that asks to stop reaches the loop from wherever a step is."""

from __future__ import annotations

from cosmos_core.parallel.mesh import any_on_ranks
from cosmos_core.run.stage import Stage


class StopAsked(Exception):
    """A signal asked to stop, and nothing of the present step has changed a weight."""


def check_stop(stage: Stage) -> None:
    """Look at a safe point whether a signal came to any rank; all ranks call it together.

    Raises:
        StopAsked: one did.
    """
    if any_on_ranks(stage.stop_requested):
        raise StopAsked
