"""State of scheduled retrainings, in one file per config and set of overrides: a digest over the content of all rows,
every setting that changes a result, and the conditions and target of publication.

Where trainings start from the published model, the digest leaves out the model that the pipeline names, because each
publication would start a retraining. Otherwise it leaves out only a model at a publication target of the pipeline.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.run.digests import shared_digest_cache
from cosmos_core.run.directory import create_writable_folder
from cosmos_core.run.files import SHARED_FOLDER, JsonDocument, write_json
from cosmos_core.run.fingerprint import compute_fingerprint

_MODEL_REVISION_KEY = "policy.model_revision"
_PUBLICATION_KEYS = {"kind", "after", "model", "require", "confidence", "target"}
_CONTENT_INGREDIENT_NAMES = (
    "kind", "result_version", "config", "after", "data", "media", "code", "data_code", "entry", "chat_template",
    "template", "reward_service", "rewards", "checkpoint", "format", "sweep", "teacher", "adapter", "weights", "resume",
)  # fmt: skip
_MODEL_INPUT_NAMES = ("model", "end_tokens", "carried")


class RetrainState(JsonDocument):
    """State file of scheduled retrainings: input digest, run id and outcome of the newest retraining."""

    digest: str
    run_id: str
    outcome: Literal["", "published", "refused", "declined"] = ""
    """Outcome of the retraining; empty if it has not ended yet or has failed."""


def compute_retrain_digest(pipeline: Pipeline, initial_model: str = "published") -> str:
    """Return the digest of the training inputs and publication settings of a pipeline whose inputs are pinned. With
    `initial_model = "base"` it covers the models that the pipeline names too. Raise DataError or ConfigError if an
    input is missing."""
    digest_cache = shared_digest_cache(pipeline.output_dir.expanduser().absolute())
    hash_input_by_stage: dict[str, Any] = {}
    for stage in pipeline.stages:
        if not pipeline.stage_kind(stage).is_reusable:
            # Gates and uploads have no fingerprint, so hash their settings instead.
            format_keys = {"format"} if stage.format else set()
            hash_input_by_stage[stage.name] = stage.model_dump(mode="json", include=_PUBLICATION_KEYS | format_keys)
            continue
        ingredients = compute_fingerprint(pipeline, stage, pipeline.stage_kind(stage), {}, digest_cache).ingredients
        ingredients["config"].pop(_MODEL_REVISION_KEY, None)
        ingredient_names: tuple[str, ...] = _CONTENT_INGREDIENT_NAMES
        if initial_model == "base" and not _starts_from_target(pipeline, stage):
            ingredient_names += _MODEL_INPUT_NAMES
        hash_input_by_stage[stage.name] = {name: ingredients[name] for name in ingredient_names if name in ingredients}
    return hashlib.sha256(json.dumps(hash_input_by_stage, sort_keys=True).encode()).hexdigest()


def _starts_from_target(pipeline: Pipeline, stage: StageConfig) -> bool:
    """Return True if the model of a stage lies at a publication target of the pipeline."""
    target_urls = [each.target for each in pipeline.stages if each.target]
    target_urls = [target.partition("@")[0] if target.startswith("hub://") else target for target in target_urls]
    model_inputs = [each for each in pipeline.inputs(stage) if each.role == "model"]
    model_urls = [f"hub://{each.location}" if each.location_type == "hub" else each.location for each in model_inputs]
    return any(f"{each}/".startswith(f"{target.rstrip('/')}/") for each in model_urls for target in target_urls)


def locate_retrain_state(pipeline: Pipeline, overrides: Sequence[str], initial_model: str) -> Path:
    """Return the state file of the retrainings of a pipeline; `initial_model` is `published` or `base`. The name of the
    file depends on the path of the config as the user wrote it, not as an absolute path: a deployment may unpack its
    files into a new folder for each flow run."""
    state_identity_json = json.dumps([pipeline.config.name, str(pipeline.source_path), list(overrides), initial_model])
    file_name_hash = hashlib.sha256(state_identity_json.encode()).hexdigest()[:16]
    return create_writable_folder(pipeline.output_dir) / SHARED_FOLDER / "retraining" / f"{file_name_hash}.json"


def save_retrain_state(state_file: Path, retrain_state: RetrainState) -> None:
    """Write the state of the newest retraining to the state file `state_file`."""
    state_file.parent.mkdir(parents=True, exist_ok=True)
    write_json(state_file, retrain_state.model_dump())
