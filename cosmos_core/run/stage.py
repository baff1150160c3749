"""One stage as its program sees it: where it works, what it was asked, what it may read."""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli_w

from cosmos_core.config.load import without_none
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.run.files import read_json, write_text
from cosmos_core.run.manifest import Source
from cosmos_core.run.progress import Metrics, Progress
from cosmos_core.types import StageKind

PROFILES = "profile"
"""Folder of traces."""
PROFILE_ASKED = "profile_asked"
"""Written anew when `cosmos profile` asks for one."""
ENGINES = "engines.json"
"""A number, which `cosmos scale` writes."""
CHECKED_PROMPTS = "prompts.json"
"""In the folder of a check: the first prompts of each split of the rows that another stage prepares."""
CONDITIONS = "conditions.json"
"""In the folder of a gate: its conditions with what was measured, also where it refuses and has no result."""
_OF_AN_INPUT = ("path", "kind", "fingerprint", "digest", "metrics", "info", "inputs")


@dataclass
class Stage:
    """Handed to the program of a stage, in the worker or, for light kinds, in the flow's process."""

    path: Path
    """`<run>/stages/<name>`; everything that the stage writes lies below it."""
    config: StageConfig
    """Its entry in the pipeline."""
    recipe: Recipe
    """Its recipe, resolved."""
    model: str
    """Folder or Hub id of the model to start from."""
    data: Path | None
    """Folder or file of a `data = "stage:NAME"` stage; None: the recipe's dataset."""
    inputs: dict[str, dict[str, Any]]
    """`result.json` of each stage in `after`, by name, with `path` added."""
    fingerprint: str
    """Of everything that can change the result."""
    kind: StageKind
    """What is declared of its kind."""
    of_training: str = ""
    """Fingerprint of what the training depends on, which its checkpoints have; empty: `fingerprint`."""
    sources: tuple[Source, ...] = ()
    """The model and the data that it reads and no other stage made."""
    origin: dict[str, Any] = field(default_factory=dict)
    """What it descends from and no stage has made; see `run.lineage.origin`."""
    engines: list[Any] = field(default_factory=list)
    """Rollout engines in processes of their own, as `rollout.fleet.Handle`s; there may be more or fewer later."""
    stop_requested: bool = field(default=False)
    """A signal asked to stop: save at the next safe point and raise `Preempted`."""

    @property
    def name(self) -> str:
        """Return the name in the pipeline."""
        return self.config.name

    @property
    def entry(self) -> str:
        """Return the import path of the program: that of the kind, or the user's own."""
        return self.kind.entry or self.config.entry

    @property
    def checkpoint_fingerprint(self) -> str:
        """Return the fingerprint that its checkpoints have: any stage with the same one may continue from them."""
        return self.of_training or self.fingerprint

    @property
    def run_path(self) -> Path:
        """Return `<output_dir>/<run_id>`."""
        return self.path.parent.parent

    @property
    def seed(self) -> int:
        """Return the seed of initialisation, order and sampling."""
        seed = self.recipe.train.seed
        assert seed is not None  # the schema fills in the default
        return seed

    @cached_property
    def progress(self) -> Progress:
        """Return what takes the heartbeat and the progress line."""
        return Progress(self.path / "progress.json")

    @cached_property
    def metrics(self) -> Metrics:
        """Return what takes the metrics of each step."""
        return Metrics(self.path / "metrics.jsonl")

    def save(self) -> None:
        """Write `stage.toml`, from which `load_stage` makes the same in another process."""
        spec = {
            "model": self.model,
            "data": str(self.data or ""),
            "fingerprint": self.fingerprint,
            "of_training": self.of_training,
            "kind": asdict(self.kind),
            "stage": self.config.model_dump(),
            "recipe": self.recipe.model_dump(),
            "sources": [source.model_dump() for source in self.sources],
            "origin": self.origin,
            "inputs": {name: {key: result[key] for key in _OF_AN_INPUT} for name, result in self.inputs.items()},
        }
        write_text(self.path / "stage.toml", tomli_w.dumps(without_none(spec)))


def load_stage(path: Path) -> Stage:
    """Read `stage.toml` of a stage directory, as `Stage.save` wrote it."""
    spec = tomllib.loads((path / "stage.toml").read_text(encoding="utf-8"))
    return Stage(
        path=path,
        config=StageConfig.model_validate(spec["stage"]),
        recipe=Recipe.model_validate(spec.get("recipe", {})),
        model=spec.get("model", ""),
        data=Path(spec["data"]) if spec.get("data") else None,
        inputs=spec.get("inputs", {}),
        fingerprint=spec["fingerprint"],
        of_training=spec.get("of_training", ""),
        origin=spec.get("origin", {}),
        kind=read_kind(spec["kind"]),
        sources=tuple(map(Source.model_validate, spec.get("sources", ()))),
    )


def wanted_engines(path: Path, configured: int) -> int:
    """Return how many rollout engines the training in a stage directory is to have now: what `cosmos scale` has asked
    for, otherwise what is configured."""
    asked = read_json(path / ENGINES)
    return asked if isinstance(asked, int) and not isinstance(asked, bool) and asked > 0 else configured


def read_kind(table: dict[str, Any]) -> StageKind:
    """Return the kind that `dataclasses.asdict` wrote as a table; its arrays are tuples again.

    Raises:
        TypeError: the table is of another version, whose kinds have other fields.
    """
    values: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in table.items()}
    return StageKind(**values)
