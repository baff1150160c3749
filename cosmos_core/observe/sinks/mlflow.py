"""Metric sink for MLflow, one MLflow run per stage: it sends metrics and settings, but neither samples nor code."""

from typing import Any

from cosmos_core.config.difference import flatten_tables
from cosmos_core.environment import mask_settings
from cosmos_core.errors import EXIT_OK
from cosmos_core.observe.sinks.base import name_tracking_run, select_numeric_metrics
from cosmos_core.run.mlflow import get_or_create_run, open_client, sanitize_metric_name
from cosmos_core.run.stage import Stage

_NEWEST_STEP_METRIC = "step"
"""Name of the metric whose value is the newest step that the MLflow server has."""
# Limits of the MLflow server: number of parameters in a request, and number of characters in their values.
_MAX_PARAMS_PER_REQUEST = 100
_MAX_VALUE_CHARACTERS = 6000


class MlflowSink:
    """Metric sink that writes to one MLflow run; `MLFLOW_TRACKING_URI` selects the server or the database. A step is
    sent in one request, and a resumed stage continues its run after the newest step that the server has."""

    package = "mlflow-skinny"

    def __init__(self, stage: Stage, first_step: int) -> None:
        self._client, (project, group_name, name, run_identifier) = open_client(), name_tracking_run(stage, "mlflow")
        from mlflow.entities import Param

        run_tags = {"cosmos.run": stage.run_path.name, "cosmos.stage": stage.name, "cosmos.kind": stage.kind.name}
        mlflow_run = get_or_create_run(
            self._client, project, run_identifier, name, {**run_tags, "cosmos.group": group_name}
        )
        self._run_id = mlflow_run.info.run_id
        self._client.update_run(self._run_id, status="RUNNING")
        settings = flatten_tables(mask_settings(stage.recipe.model_dump(mode="json")))
        # Send only new parameters, because MLflow refuses to change the parameters of a resumed run.
        setting_texts = [
            (sanitize_metric_name(name), str(value)[:_MAX_VALUE_CHARACTERS]) for name, value in settings.items()
        ]
        params = [Param(name, text) for name, text in setting_texts if name not in mlflow_run.data.params]
        for batch_start in range(0, len(params), _MAX_PARAMS_PER_REQUEST):
            self._client.log_batch(self._run_id, params=params[batch_start : batch_start + _MAX_PARAMS_PER_REQUEST])
        self.starting_step = int(mlflow_run.data.metrics.get(_NEWEST_STEP_METRIC, -1)) + 1

    def log(self, line: dict[str, Any]) -> None:
        from mlflow.entities import Metric

        step, timestamp_milliseconds = line["step"], int(line["time"] * 1000)
        value_by_metric = {sanitize_metric_name(name): value for name, value in select_numeric_metrics(line).items()}
        value_by_metric[_NEWEST_STEP_METRIC] = step
        metrics = [Metric(name, value, timestamp_milliseconds, step) for name, value in value_by_metric.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self, exit_code: int) -> None:
        self._client.set_terminated(self._run_id, "FINISHED" if exit_code == EXIT_OK else "FAILED")
