"""Who we are to stores and Hubs: variables of the environment, or a Secret block of Prefect that has them.

The block `cosmos-credentials` holds an object of names and values. They become variables of the flow's process, whose
values no log shows; what is set there already wins.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress

from cosmos_core.config.compose import Pipeline, source_of
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.table import set_fields
from cosmos_core.environment import hide_in_records
from cosmos_core.errors import CosmosError
from cosmos_core.run.inputs import data_sources, model_source, teacher_source

logger = logging.getLogger(__name__)

BLOCK = "cosmos-credentials"
_LENT = ("AWS_", "PROD_S3_CHECKPOINT_", "HF_TOKEN", "HF_ENDPOINT")


def lend_credentials(pipeline: Pipeline | None) -> None:
    """Set the variables that the block has, if the pipeline names anything elsewhere and there is a block. None: a
    pipeline that is itself elsewhere."""
    hide_in_records()
    if pipeline is not None and not _names_elsewhere(pipeline):
        return
    from prefect.blocks.system import Secret

    try:
        value = Secret.load(BLOCK).get()  # type: ignore[union-attr]
    except ValueError:
        return  # there is none
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:  # its message may show the value
        found = None
    if not isinstance(found, dict):
        logger.warning("the Secret block %s is no object of variables and their values: it is not used", BLOCK)
        return
    for name, text in found.items():
        if name.startswith(_LENT):
            os.environ.setdefault(name, str(text))
        else:
            logger.warning("the Secret block %s: %s is none of %s*: it is not used", BLOCK, name, "*, ".join(_LENT))


def lend_to_command(pipeline: Pipeline | None) -> None:
    """Set them for a command that works with a Prefect server, before it asks stores and Hubs; one that starts a server
    of its own has no block. The environment may have all that is needed where the server does not respond."""
    if not os.environ.get("PREFECT_API_URL"):
        return
    import httpx

    try:
        lend_credentials(pipeline)
    except httpx.HTTPError as error:
        logger.warning("the Prefect server does not respond, and the Secret block %s is not used: %s", BLOCK, error)


def _names_elsewhere(pipeline: Pipeline) -> bool:
    if pipeline.config.artifact_store:
        return True
    tables = [table for stage in pipeline.stages for table in (stage, pipeline.recipes[stage.name])]
    if any(isinstance(value, str) and "://" in value for table in tables for _, _, value, _ in set_fields(table)):
        return True
    return any(_reads_hub(pipeline, stage) for stage in pipeline.stages)


def _reads_hub(pipeline: Pipeline, stage: StageConfig) -> bool:
    """Whether a stage reads a model or rows that are no folder here: those of the Hub may be private."""
    recipe, kind = pipeline.recipes[stage.name], pipeline.kind_of(stage)
    with suppress(CosmosError):  # what is missing is told where the run begins
        read = (model_source(stage, recipe, kind), teacher_source(recipe, kind), *data_sources(stage, recipe, kind))
        return any(isinstance(name, str) and source_of(name) is None for name in read)
    return False
