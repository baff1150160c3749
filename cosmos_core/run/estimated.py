"""Saved estimates of `cosmos plan --estimate`, which a later run with the same settings shows next to its cost."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.schema.pipeline import BUDGET_KEYS
from cosmos_core.run.files import SHARED_FOLDER, Document, read_document, write_json


class Estimate(Document):
    """Content of an estimate file: GPU seconds of each stage of a run, None if unknown."""

    gpu_seconds: dict[str, float | None] = {}


def save_estimate(pipeline: Pipeline, output_dir: Path, gpu_seconds: Mapping[str, float | None]) -> None:
    """Save the estimated GPU seconds of each stage of a pipeline; this replaces an earlier estimate."""
    file = _locate_estimate_file(pipeline, output_dir)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, Estimate(gpu_seconds=dict(gpu_seconds)).model_dump(), durable=False)


def saved_estimate(pipeline: Pipeline, output_dir: Path) -> dict[str, float | None]:
    """Return the last estimate of a pipeline with the same settings; empty if there is none."""
    return (read_document(_locate_estimate_file(pipeline, output_dir), Estimate) or Estimate()).gpu_seconds


def _locate_estimate_file(pipeline: Pipeline, output_dir: Path) -> Path:
    config_tables = pipeline.as_toml()
    config_tables["pipeline"] = {
        key: value for key, value in config_tables["pipeline"].items() if key not in BUDGET_KEYS
    }
    digest = hashlib.sha256(json.dumps(config_tables, sort_keys=True, default=str).encode()).hexdigest()
    return output_dir / SHARED_FOLDER / "estimates" / f"{digest}.json"
