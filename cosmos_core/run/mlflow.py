"""MLflow runs that have a key: a call that is repeated after a kill continues the run instead of creating another.

The environment of MLflow selects server and account, such as `MLFLOW_TRACKING_URI` and `MLFLOW_TRACKING_TOKEN`.
"""

import os
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from cosmos_core.errors import ConfigError

RUN_KEY_TAG = "cosmos.key"
"""Name of the tag with our identifier of an MLflow run or model version, by which a later attempt finds it again."""
_ENVIRONMENT_DEFAULTS = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false"}
_INVALID_METRIC_CHARACTERS = re.compile(r"[^\w/. :-]")


def open_client() -> Any:
    """Return a client of MLflow; raise ConfigError if MLflow is not installed."""
    for name, value in _ENVIRONMENT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        from mlflow import MlflowClient
    except ImportError as error:
        raise ConfigError("MLflow is not installed; pip install 'cosmos-posttrain[mlflow]'") from error
    return MlflowClient()


def get_or_create_run(client: Any, experiment_name: str, run_key: str, run_name: str, tags: Mapping[str, str]) -> Any:
    """Return the MLflow run with a key in an experiment; create the run, and the experiment, if it does not exist."""
    from mlflow.exceptions import MlflowException

    if (mlflow_experiment := client.get_experiment_by_name(experiment_name)) is None:
        try:
            client.create_experiment(experiment_name)
        except MlflowException:
            # Continue if another process has created the experiment in the meantime.
            if client.get_experiment_by_name(experiment_name) is None:
                raise
        mlflow_experiment = client.get_experiment_by_name(experiment_name)
    experiment_id, run_key_filter = mlflow_experiment.experiment_id, f"tags.`{RUN_KEY_TAG}` = '{run_key}'"
    find_runs = partial(client.search_runs, [experiment_id], run_key_filter, order_by=["attributes.start_time ASC"])
    if not find_runs():
        client.create_run(experiment_id, tags={**tags, RUN_KEY_TAG: run_key}, run_name=run_name)
    return find_runs()[0]  # take the oldest: a repeated request may have created a second run


def sanitize_metric_name(name: str) -> str:
    """Return the name of a metric without the letters that MLflow refuses, such as the `@` of `pass@4`."""
    return _INVALID_METRIC_CHARACTERS.sub("_", name)
