"""Who we are to stores and Hubs: variables of the environment, or a Secret block of Prefect that has them.

The block `cosmos-credentials` holds an object of names and values. They become variables of the flow's process, whose
values no log shows; what is set there already wins.
"""

from __future__ import annotations

import json
import logging
import os

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.schema.table import set_fields

logger = logging.getLogger(__name__)

BLOCK = "cosmos-credentials"
_LENT = ("AWS_", "PROD_S3_CHECKPOINT_", "HF_TOKEN", "HF_ENDPOINT")


def lend_credentials(pipeline: Pipeline | None) -> None:
    """Set the variables that the block has, if the pipeline names anything elsewhere and there is a block. None: a
    pipeline that is itself elsewhere."""
    if pipeline is not None and not _names_elsewhere(pipeline):
        return
    from prefect.blocks.system import Secret

    try:
        value = Secret.load(BLOCK).get()  # type: ignore[union-attr]
    except ValueError:
        return  # there is none
    found = json.loads(value) if isinstance(value, str) else value
    if not isinstance(found, dict):
        logger.warning("the Secret block %s is no object of variables and their values: it is not used", BLOCK)
        return
    for name, text in found.items():
        if name.startswith(_LENT):
            os.environ.setdefault(name, str(text))
        else:
            logger.warning("the Secret block %s: %s is none of %s*: it is not used", BLOCK, name, "*, ".join(_LENT))


def _names_elsewhere(pipeline: Pipeline) -> bool:
    if pipeline.config.artifact_store:
        return True
    tables = [table for stage in pipeline.stages for table in (stage, pipeline.recipes[stage.name])]
    return any(isinstance(value, str) and "://" in value for table in tables for _, _, value, _ in set_fields(table))
