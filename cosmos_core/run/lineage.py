"""Walk from a model back to the data: every manifest names its inputs by digest."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmos_core.config.compose import Pipeline, source_of
from cosmos_core.config.load import read_toml
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.errors import ConfigError
from cosmos_core.run.files import read_json
from cosmos_core.run.inputs import data_sources, model_source
from cosmos_core.run.manifest import Result, problem, read_result


@dataclass(frozen=True)
class Link:
    """One stage on the way back, `depth` steps behind what was asked for."""

    depth: int
    run_id: str
    name: str
    kind: str
    digest: str
    stage_path: Path
    note: str
    """`verified`, or what is wrong with it."""


def lineage(stage_path: Path, depth: int = 0) -> list[Link]:
    """Return the stage and everything that it was made from, inputs after their user.

    Raises:
        ConfigError: the stage has no result.
    """
    result = read_result(stage_path)
    if result is None:
        raise ConfigError(f"{stage_path} has no result.json: the stage did not finish")
    trouble = problem(stage_path, result)
    links = [
        Link(
            depth,
            stage_path.parent.parent.name,
            result["name"],
            result["kind"],
            result["digest"],
            stage_path,
            trouble or "verified",
        )
    ]
    for name, recorded in result["inputs"].items():
        upstream = stage_path.parent / name
        found = read_result(upstream)
        if found is None or found["digest"] != recorded["digest"]:
            note = "gone" if found is None else "made again since: its content is another"
            links.append(Link(depth + 1, upstream.parent.parent.name, name, "", recorded["digest"], upstream, note))
        else:
            links += lineage(upstream, depth + 1)
    return links


def origin(pipeline: Pipeline, stage: StageConfig) -> dict[str, Any]:
    """Return what a stage descends from and no stage of the run has made: the text of a model card.

    `base_model` and `revision` of the model, or `made_by`, the function whose stage made it; `data`, the names of rows.
    """
    data: dict[str, None] = {}
    waiting, seen = [stage], set()
    while waiting:
        one = waiting.pop(0)
        seen.add(one.name)
        data |= dict.fromkeys(_named_data(pipeline, one))
        made = [name for name in map(source_of, (one.model, one.data)) if name is not None and name not in seen]
        waiting += map(pipeline.stage, made)
    while (name := source_of(stage.model)) is not None:
        stage = pipeline.stage(name)
    recipe, kind = pipeline.recipes[stage.name], pipeline.kind_of(stage)
    source = model_source(stage, recipe, kind)
    if source is None:
        return {"made_by": stage.entry, "data": list(data)}
    base = {"base_model": stage.model or recipe.policy.model_name_or_path, "data": list(data)}
    revision = recipe.policy.model_revision if isinstance(source, str) else None
    return base | ({"revision": revision} if revision else {})


def _named_data(pipeline: Pipeline, stage: StageConfig) -> list[str]:
    """The rows that a stage reads from outside of the run, or makes itself."""
    recipe, kind = pipeline.recipes[stage.name], pipeline.kind_of(stage)
    tables = (recipe.train.train_policy.dataset, recipe.validation.dataset)
    revisions = {table.name: table.revision for table in tables if table.revision}
    found = []
    for source in data_sources(stage, recipe, kind):
        text = (
            os.path.relpath(source) if isinstance(source, Path) and source.is_relative_to(Path.cwd()) else str(source)
        )
        found.append(f"{text}@{revisions[text]}" if isinstance(source, str) and text in revisions else text)
    return found or ([f"made by {stage.entry}"] if stage.entry else [])


def stage_of(path: Path) -> Path:
    """Return the stage directory that a path lies in: a stage, a model of one, or a run (its last model).

    Raises:
        ConfigError: the path belongs to no run.
    """
    path = path.resolve()
    published = read_json(path / "published.json")
    if isinstance(published, dict) and "stage" in published:
        return Path(published["stage"])
    for folder in (path, *path.parents):
        if folder.parent.name == "stages" and (folder.parent.parent / "pipeline.toml").is_file():
            return folder
    if (path / "pipeline.toml").is_file():
        return path / "stages" / _last_with_model(path)
    raise ConfigError(f"{path} belongs to no run; give a run, a stage, an exported or a published model")


def _last_with_model(run_path: Path) -> str:
    stages: list[dict[str, Any]] = read_toml(run_path / "pipeline.toml")["pipeline"]["stages"]
    for stage in reversed(stages):
        result: Result | None = read_result(run_path / "stages" / stage["name"])
        if result is not None and "model" in result["info"]:
            return str(stage["name"])
    raise ConfigError(f"{run_path}: no stage of this run has made a model yet")
