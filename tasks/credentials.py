"""Credentials for object stores and Hubs, from environment variables or from a Secret block of Prefect.

The value of the block `cosmos-credentials` is a JSON object of names and values. The variables are set in the
process of the flow unless they are already set, and logs show none of their values.
"""

import json
import logging
import os
from contextlib import suppress

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.schema.table import active_fields
from cosmos_core.environment import mask_log_records
from cosmos_core.errors import ConfigError

logger = logging.getLogger(__name__)

SECRET_BLOCK = "cosmos-credentials"
_CREDENTIAL_PREFIXES = ("AWS_", "PROD_S3_CHECKPOINT_", "HF_TOKEN", "HF_ENDPOINT", "MLFLOW_")


def set_credentials(pipeline: Pipeline | None) -> None:
    """Set the environment variables that the Secret block `cosmos-credentials` of Prefect contains, if the block exists
    and the pipeline refers to an S3 store or the Hub. `pipeline` is None if its config file is in a store and was not
    downloaded yet."""
    mask_log_records()
    if pipeline is not None and not _uses_remote_storage(pipeline):
        return
    from prefect.blocks.system import Secret

    try:
        secret_variables = Secret.load(SECRET_BLOCK).get()  # type: ignore[union-attr]
    except ValueError:
        return  # no credentials to set: the server has no Secret block of this name
    try:
        environment_variables = json.loads(secret_variables) if isinstance(secret_variables, str) else secret_variables
    except ValueError:  # do not log the error, because its message may show the value
        environment_variables = None
    if not isinstance(environment_variables, dict):
        logger.warning("the Secret block %s is no object of variables and their values: it is not used", SECRET_BLOCK)
        return
    credential_prefixes_text = "*, ".join(_CREDENTIAL_PREFIXES)
    if os.environ.keys() >= {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}:
        # A session token belongs to the keys of the block: with other keys, a store refuses it.
        environment_variables = {k: v for k, v in environment_variables.items() if k != "AWS_SESSION_TOKEN"}
    for name, variable_value in environment_variables.items():
        if name.startswith(_CREDENTIAL_PREFIXES):
            os.environ.setdefault(name, str(variable_value))
        else:
            logger.warning(
                "the Secret block %s: %s is none of %s*: it is not used", SECRET_BLOCK, name, credential_prefixes_text
            )


def set_command_credentials(pipeline: Pipeline | None) -> None:
    """Set the environment variables of the Secret block `cosmos-credentials` before a command accesses stores and Hubs,
    if a Prefect server is configured. If the server does not respond, only warn: the environment may contain all
    credentials already."""
    if not os.environ.get("PREFECT_API_URL"):
        return
    import httpx

    try:
        set_credentials(pipeline)
    except httpx.HTTPError as error:
        warning_template = "the Prefect server does not respond, and the Secret block %s is not used: %s"
        logger.warning(warning_template, SECRET_BLOCK, error)


def _uses_remote_storage(pipeline: Pipeline) -> bool:
    stage_tables = [table for stage in pipeline.stages for table in (stage, pipeline.recipes[stage.name])]
    string_settings = [
        value for table in stage_tables for _, _, value, _ in active_fields(table) if isinstance(value, str)
    ]
    if pipeline.config.artifact_store or any("://" in value for value in string_settings):
        return True
    with suppress(ConfigError):  # ignore an invalid setting, which the start of the run reports
        return any(each.location_type == "hub" for stage in pipeline.stages for each in pipeline.inputs(stage))
    return False
