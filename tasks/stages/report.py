"""Stage kind `report`: write the run as one HTML page, in the process of the flow."""

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
