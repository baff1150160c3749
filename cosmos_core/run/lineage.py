"""Walk from a model back to the data: every manifest names its inputs by digest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmos_core.config.load import read_toml
from cosmos_core.errors import ConfigError
from cosmos_core.run.files import read_object
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


def stage_of(path: Path) -> Path:
    """Return the stage directory that a path lies in: a stage, a model of one, or a run (its last model).

    Raises:
        ConfigError: the path belongs to no run.
    """
    path = path.resolve()
    published = read_object(path / "published.json")
    if "stage" in published:
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
