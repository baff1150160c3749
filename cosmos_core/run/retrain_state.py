"""State of scheduled retrainings, in one file per config and set of overrides: a digest over the content of all rows,
every setting that changes a result, and the conditions and target of publication.

The digest leaves out the model that training starts from: each publication changes it, and would start a retraining.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from cosmos_core.config.compose import Pipeline
from cosmos_core.run.digests import shared_digest_cache
from cosmos_core.run.directory import create_writable_folder
from cosmos_core.run.files import SHARED_FOLDER, JsonDocument, write_json
from cosmos_core.run.fingerprint import compute_fingerprint

_MODEL_REVISION_KEY = "policy.model_revision"
_PUBLICATION_KEYS = {"kind", "after", "model", "require", "confidence", "target"}
_CONTENT_INGREDIENTS = (
    "kind", "result_version", "config", "after", "data", "media", "code", "data_code", "entry", "chat_template",
    "template", "reward_service", "rewards", "checkpoint", "format", "sweep",
)  # fmt: skip


class RetrainState(JsonDocument):
    """Content of the state file of scheduled retrainings: digest, run and outcome of the newest retraining."""

    digest: str
    run_id: str
    outcome: Literal["", "published", "refused", "declined"] = ""
    """Outcome of the retraining; empty if it has not ended yet or has failed."""


def compute_retrain_digest(pipeline: Pipeline) -> str:
    """Return the digest of the training inputs and publication settings of a pinned pipeline; raise DataError or
    ConfigError if an input is missing."""
    digest_cache = shared_digest_cache(pipeline.output_dir.expanduser().absolute())
    content_by_stage: dict[str, Any] = {}
    for stage in pipeline.stages:
        if not pipeline.stage_kind(stage).is_reusable:  # a gate or upload: other stages make all of its inputs
            content_by_stage[stage.name] = stage.model_dump(mode="json", include=_PUBLICATION_KEYS)
            continue
        ingredients = compute_fingerprint(pipeline, stage, pipeline.stage_kind(stage), {}, digest_cache).ingredients
        ingredients["config"].pop(_MODEL_REVISION_KEY, None)
        content_by_stage[stage.name] = {name: ingredients[name] for name in _CONTENT_INGREDIENTS if name in ingredients}
    return hashlib.sha256(json.dumps(content_by_stage, sort_keys=True).encode()).hexdigest()


def locate_retrain_state(pipeline: Pipeline, overrides: Sequence[str], initial_model: str) -> Path:
    """Return the state file of the retrainings of a pipeline; `initial_model` is `published` or `base`. The path of the
    config is used as the user wrote it: a deployment may unpack its files into a new folder per trigger."""
    identity_values_json = json.dumps([pipeline.config.name, str(pipeline.source_path), list(overrides), initial_model])
    file_stem = hashlib.sha256(identity_values_json.encode()).hexdigest()[:16]
    return create_writable_folder(pipeline.output_dir) / SHARED_FOLDER / "retraining" / f"{file_stem}.json"


def save_retrain_state(state_file: Path, state: RetrainState) -> None:
    """Write the state of the newest retraining to the state file `state_file`."""
    state_file.parent.mkdir(parents=True, exist_ok=True)
    write_json(state_file, state.model_dump())
