"""Trace the lineage of a model back to its data: every manifest names its inputs by digest."""

import hashlib
import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.inputs import referenced_stage
from cosmos_core.config.load import read_toml
from cosmos_core.config.schema.clean import BENCHMARKS_KEY
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.errors import ConfigError
from cosmos_core.run.files import parse_documents, read_json_object, sha256
from cosmos_core.run.manifest import ExternalSource, Result, find_output_damage, read_result
from cosmos_core.run.stage import Stage, load_stage

PUBLICATION_RECORD_FILE = "published.json"
"""Name of the file in a published version that records where the version comes from."""


@dataclass(frozen=True)
class LineageEntry:
    """Entry of a lineage: a stage, or a model or data set that no stage made, `depth` steps above the queried path."""

    depth: int
    name: str
    kind: str
    digest: str
    location: str
    """Origin of the entry: the run of a stage, or the path or Hub id of an external model or data set."""
    status: str
    """`verified`, `recorded` for content that cannot be hashed again as a whole, or a description of the damage."""
    gpu_seconds: float = 0.0
    """GPU seconds that the attempts of a stage held."""

    @property
    def is_broken(self) -> bool:
        """Return True if the content of this lineage entry is missing, or was changed after a stage read it."""
        return self.status not in {"verified", "recorded"}


def trace_lineage(path: Path) -> list[LineageEntry]:
    """Return the lineage of a run, stage or model; the first entry of a published model describes its files. Raise
    ConfigError if the path belongs to no run, or if the stage has not finished."""
    publication_record = read_json_object(path.resolve() / PUBLICATION_RECORD_FILE)
    if not isinstance(publication_record.get("files"), dict):
        return collect_lineage(find_stage_path(path))
    files, stage_path = publication_record["files"], find_stage_path(path)
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    content_status = _find_changed_file(path, files) or _find_replaced_model(stage_path, files) or "verified"
    published_entry = LineageEntry(0, path.resolve().name, "published", digest, str(path), content_status)
    return [published_entry, *(replace(entry, depth=entry.depth + 1) for entry in collect_lineage(stage_path))]


def _find_changed_file(folder: Path, digest_by_file: dict[str, str]) -> str:
    """Return a description of the first changed file of a published model; empty if no file changed. The model card is
    not compared, because the card on the Hub also has the metrics."""
    for name, digest in digest_by_file.items():
        file = folder / name
        if name != "README.md" and not (file.is_file() and sha256(file) == digest):
            return f"{name} was altered" if file.is_file() else f"{name} is gone"
    return ""


def _find_replaced_model(stage_path: Path, digest_by_file: dict[str, str]) -> str:
    """Return a description if the stage whose model was published has made a model with other weights since; otherwise
    an empty string."""
    with suppress(ConfigError):
        model_stage_name = referenced_stage(load_stage(stage_path).config.model)
        result = read_result(stage_path.parent / model_stage_name) if model_stage_name else None
        weight_digests = {digest for name, digest in digest_by_file.items() if name.endswith(".safetensors")}
        if result and not weight_digests <= {output["sha256"] for output in result["outputs"]}:
            return f"stage {model_stage_name!r} has made another model since"
    return ""


def collect_lineage(stage_path: Path) -> list[LineageEntry]:
    """Return the lineage entries of a stage and all its inputs, each once; raise ConfigError if the stage has not
    finished."""
    result = read_result(stage_path)
    if result is None:
        raise ConfigError(f"{stage_path} has no result.json: the stage did not finish")
    lineage, run_label, visited_paths = list[LineageEntry](), f"run {stage_path.parent.parent.name}", set[Path]()
    # A stack instead of recursion: the loop of a Python flow may add a thousand stages that depend on each other.
    pending_entries: list[LineageEntry | tuple[int, Path, Result]] = [(0, stage_path, result)]
    while pending_entries:
        pending_entry = pending_entries.pop()
        if isinstance(pending_entry, LineageEntry):
            lineage.append(pending_entry)
            continue
        depth, path, result = pending_entry
        if path in visited_paths:
            continue
        visited_paths.add(path)
        content_status = find_output_damage(path, result) or "verified"
        gpu_seconds = float(result.get("gpu_seconds", 0.0))
        name, kind_name = result["name"], result["kind"]
        lineage.append(LineageEntry(depth, name, kind_name, result["digest"], run_label, content_status, gpu_seconds))
        for source in parse_documents(result.get("sources"), ExternalSource):
            name, source_status = Path(source.name).name, _get_source_status(source)
            lineage.append(LineageEntry(depth + 1, name, source.kind, source.digest, source.name, source_status))
        for name, input_record in reversed(result["inputs"].items()):
            upstream_result = read_result(path.parent / name)
            if upstream_result is None or upstream_result["digest"] != input_record["digest"]:
                content_status = "gone" if upstream_result is None else "made again since: its content is another"
                digest = input_record["digest"]
                pending_entries.append(LineageEntry(depth + 1, name, "", digest, run_label, content_status))
            else:
                pending_entries.append((depth + 1, path.parent / name, upstream_result))
    return lineage


def _get_source_status(source: ExternalSource) -> str:
    """Return the status of an external model or data set, as in `LineageEntry.status`. A folder is not hashed again,
    because the stage read only some of its files."""
    path = Path(source.name)
    if path.is_file():
        return "verified" if sha256(path) == source.digest else "altered since"
    return "gone" if path.is_absolute() and not path.exists() else "recorded"


def find_model_origin(pipeline: Pipeline, stage: StageConfig) -> dict[str, Any]:
    """Return the fields of the model card that tell the origin of a stage's model: `data`, the names of the external
    data sets, with `base_model` and `revision` of the external model, or with `made_by`, the user function that created
    the first model."""
    dataset_names: dict[str, None] = {}
    pending_stages, seen_stages = [stage], set()
    while pending_stages:
        current_stage = pending_stages.pop(0)
        seen_stages.add(current_stage.name)
        dataset_names |= dict.fromkeys(_list_dataset_names(pipeline, current_stage))
        input_names = [*map(referenced_stage, (pipeline.initial_model(current_stage), current_stage.data))]
        if pipeline.stage_kind(current_stage).merges_models:
            # A merged model has learned from the rows of all models in `after`, so visit the stages of all of them.
            merged_stages = map(pipeline.stage, current_stage.after)
            input_names += [each.name for each in merged_stages if pipeline.stage_kind(each).makes in {"", "model"}]
        pending_stages += [pipeline.stage(name) for name in input_names if name is not None and name not in seen_stages]
    while (name := referenced_stage(pipeline.initial_model(stage))) is not None:
        stage = pipeline.stage(name)
    model_input = next((stage_input for stage_input in pipeline.inputs(stage) if stage_input.role == "model"), None)
    if model_input is None:
        return {"made_by": stage.entry, "data": list(dataset_names)}
    has_model_revision = model_input.revision and model_input.location_type != "folder"
    model_origin = {"base_model": model_input.location, "data": list(dataset_names)}
    return model_origin | ({"revision": model_input.revision} if has_model_revision else {})


def strip_local_path(name: str) -> str:
    """Return the name of a model or data set without local folders: a Hub id, or the last part of a path."""
    if hub_cache_match := re.search(r"models--(.+?)--([^/]+)/snapshots/", name):
        return f"{hub_cache_match[1]}/{hub_cache_match[2]}"
    is_local_path = name.startswith(("/", "~", ".")) or os.path.exists(name)
    return Path(name).name if is_local_path else name


def describe_base_model(stage: Stage) -> str:
    """Return a name of a training's base model without local paths: a Hub id, `RUN/STAGE`, or the name of a folder with
    the digest of its files."""
    initial_model = stage.config.model or stage.recipe.policy.model_name_or_path
    if (upstream_name := referenced_stage(initial_model)) is not None:
        return f"{stage.run_path.name}/{upstream_name}"
    # If the stage read several models, take the digest of the first one.
    digest = {source.kind: source.digest for source in reversed(stage.sources)}.get("model", "")
    name = strip_local_path(initial_model)
    return name if name in {initial_model, ""} or not digest or "/" in name else f"{name} (sha256 {digest[:12]})"


def _list_dataset_names(pipeline: Pipeline, stage: StageConfig) -> list[str]:
    """Return the names of a stage's data sets outside the run, or `made by FUNCTION` if user code makes its rows."""
    inputs = [each for each in pipeline.inputs(stage) if each.role == "data" and each.location_type != "stage"]
    inputs = [each for each in inputs if not (each.key.startswith(BENCHMARKS_KEY) or each.key.endswith(".pass_rates"))]
    dataset_names = [f"{each.location}@{each.revision}" if each.revision else each.location for each in inputs]
    dataset_names = [os.path.relpath(name) if Path(name).is_relative_to(Path.cwd()) else name for name in dataset_names]
    return dataset_names or ([f"made by {stage.entry}"] if stage.entry else [])


def find_stage_path(path: Path) -> Path:
    """Return the directory of a stage: the one that contains `path`, the one from which the model in `path` was
    published or, if `path` is a run, its last stage with a model. Raise ConfigError if there is no such stage."""
    path = path.resolve()
    publication_record = read_json_object(path / PUBLICATION_RECORD_FILE)
    if "stage" in publication_record:
        return Path(publication_record["stage"])
    for folder in (path, *path.parents):
        if folder.parent.name == "stages" and (folder.parent.parent / "pipeline.toml").is_file():
            return folder
    if not (path / "pipeline.toml").is_file():
        raise ConfigError(f"{path} belongs to no run; give a run, a stage, an exported or a published model")
    for stage_entry in reversed(read_toml(path / "pipeline.toml")["pipeline"].get("stages", [])):
        result = read_result(path / "stages" / stage_entry["name"])
        if result is not None and "model" in result["info"]:
            return path / "stages" / str(stage_entry["name"])
    raise ConfigError(f"{path}: no stage of this run has made a model yet")
