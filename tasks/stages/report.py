"""Kind `report`: write the run as one HTML page, in the flow's process, from the files of the run."""

from cosmos_core.types import StageKind

KIND = StageKind(
    name="report",
    entry="cosmos_core.observe.report:run",
    result_version=1,
    makes="page",
    reports=(),
    in_worker=False,
    is_reusable=False,
)
