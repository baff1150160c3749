"""Metric sink for trackio, one run per stage: it sends metrics and settings, no samples and no machine statistics."""

from typing import Any

from cosmos_core.environment import mask_settings
from cosmos_core.observe.sinks.base import name_tracking_run, select_numeric_metrics
from cosmos_core.run.stage import Stage


class TrackioSink:
    """Metric sink that writes to one run in a trackio project. `TRACKIO_SERVER_URL` or `TRACKIO_SPACE_ID` selects a
    server; otherwise `TRACKIO_DIR` selects the folder of a local database.

    A resumed stage continues its trackio run after the newest stored step. trackio continues runs by name, so the name
    of the run ends with letters that differ when the stage starts again from the beginning.
    """

    package = "trackio"

    def __init__(self, stage: Stage, first_step: int) -> None:
        import trackio

        project, group_name, name, run_identifier = name_tracking_run(stage, "trackio")
        self._run = trackio.init(
            project=project, name=f"{name}-{run_identifier[:6]}", group=group_name, resume="allow",
            config=mask_settings(stage.recipe.model_dump(mode="json")), embed=False, auto_log_gpu=False,
            auto_log_cpu=False,
        )  # fmt: skip
        self.starting_step = int(self._run._next_step)

    def log(self, line: dict[str, Any]) -> None:
        self._run.log(select_numeric_metrics(line), step=line["step"])

    def close(self, exit_code: int) -> None:
        self._run.finish()
