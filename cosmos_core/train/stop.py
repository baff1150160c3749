"""Stop a training after a signal to any rank, at points where no weight of the current step has changed."""

from cosmos_core.parallel.mesh import all_reduce_any
from cosmos_core.run.workspace import Workspace


class StopRequested(Exception):
    """Raised when a signal requested a stop and the current step has not changed a weight yet."""


def check_stop(workspace: Workspace) -> None:
    """Raise StopRequested if any rank has received a stop signal; all ranks call this function together."""
    if all_reduce_any(workspace.stop_requested):
        raise StopRequested
