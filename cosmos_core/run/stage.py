"""`Stage`: the settings, inputs and directory of one stage, as the program of the stage receives them."""

import shlex
import tomllib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from cosmos_core.config.load import without_none
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.environment import find_secrets, mask_secrets
from cosmos_core.errors import ConfigError, DataError, first_line
from cosmos_core.run.files import read_json, write_text
from cosmos_core.run.manifest import ExternalSource, read_result
from cosmos_core.run.workspace import Workspace
from cosmos_core.types import StageKind

PROFILES_FOLDER = "profile"
"""Name of the folder in a stage's directory with profiler traces."""
PROFILE_REQUEST_FILE = "profile_asked"
"""Name of the file that `cosmos profile` writes to request a trace."""
ENGINES_FILE = "engines.json"
"""Name of the file into which `cosmos scale` writes the requested number of rollout engines."""
CHECKED_PROMPTS_FILE = "prompts.json"
"""Name of the file with which `cosmos check` passes the first prepared prompts to the check of another stage."""
CONDITIONS_FILE = "conditions.json"
"""Name of the file in which a gate saves its conditions and the measured values, even if it refuses."""
_STAGE_FILE = "stage.toml"
_SAVED_INPUT_KEYS = ("path", "kind", "fingerprint", "digest", "metrics", "info", "inputs")


@dataclass
class Stage(Workspace):
    """Settings, inputs and directory of a stage, which the program of the stage receives as its argument."""

    config: StageConfig
    """Entry of the stage in `[[pipeline.stages]]`."""
    recipe: Recipe
    """Recipe of the stage, with overrides applied and defaults filled in."""
    model: str
    """Folder or Hub id of the model to start from."""
    data: Path | None
    """Folder or file of rows from another stage, for `data = "stage:NAME"`; None: the data set of the recipe."""
    inputs: dict[str, dict[str, Any]]
    """Content of `result.json` of each stage that the stage names in `after`, by name, with the key `path` added."""
    fingerprint: str
    """Fingerprint of everything that can change the result of the stage."""
    kind: StageKind
    """Properties of the kind of the stage."""
    training_fingerprint: str = ""
    """Fingerprint of everything that the training depends on, saved with checkpoints; empty: the same as
    `fingerprint`."""
    sources: tuple[ExternalSource, ...] = ()
    """External model and data that the stage reads, which no other stage made."""
    origin: dict[str, Any] = field(default_factory=dict)
    """External model and data from which the stage and its inputs descend; see `run.lineage.find_model_origin`."""
    engines: list[Any] = field(default_factory=list)
    """Rollout engines in separate processes, as `rollout.engine_pool.EngineHandle`; their number may change."""

    @property
    def name(self) -> str:
        """Return the name of the stage in the pipeline."""
        return self.config.name

    @property
    def entry(self) -> str:
        """Return the import path of the stage's program: the program of its kind, or the user's function."""
        return self.kind.entry or self.config.entry

    @property
    def checkpoint_fingerprint(self) -> str:
        """Return the fingerprint that is saved with checkpoints; a stage may resume from any checkpoint that has it."""
        return self.training_fingerprint or self.fingerprint

    @property
    def prepared_folder(self) -> Path:
        """Return the folder of the stage's prepared rows; raise DataError if the stage names no prepare stage."""
        if self.data is None:
            raise DataError(f'stage {self.name!r} has no prepared data; name a prepare stage with data = "stage:NAME"')
        return self.data

    @property
    def seed(self) -> int:
        """Return the seed of initialisation, data order and sampling."""
        seed = self.recipe.train.seed
        assert seed is not None  # the schema replaces a missing seed by its default
        return seed

    def save(self) -> None:
        """Write `stage.toml`, from which `load_stage` restores the stage in another process."""
        stage_table = {
            "model": self.model,
            "data": str(self.data or ""),
            "fingerprint": self.fingerprint,
            "of_training": self.training_fingerprint,
            "kind": asdict(self.kind),
            "stage": self.config.model_dump(),
            "recipe": self.recipe.model_dump(),
            "sources": [source.model_dump() for source in self.sources],
            "origin": self.origin,
            "inputs": {name: {key: result[key] for key in _SAVED_INPUT_KEYS} for name, result in self.inputs.items()},
        }
        write_text(self.path / _STAGE_FILE, tomli_w.dumps(without_none(stage_table)))


def load_stage(path: Path) -> Stage:
    """Read the `stage.toml` that `Stage.save` wrote to a stage directory; raise `ConfigError` if another machine or
    another version of this package made the stage."""
    try:
        stage_table = tomllib.loads((path / _STAGE_FILE).read_text(encoding="utf-8"))
        for name, result in stage_table.get("inputs", {}).items():
            # Use the folder beside this stage: the recorded path is outdated if the run was moved or copied.
            if not (sibling_folder := path.parent / name).is_dir():
                continue
            saved_folder_prefix, result["path"] = f"{result['path']}/", str(sibling_folder)
            for key in ("model", "data"):
                if stage_table.get(key, "").startswith(saved_folder_prefix):
                    stage_table[key] = str(sibling_folder / stage_table[key].removeprefix(saved_folder_prefix))
        return Stage(
            path=path,
            config=StageConfig.model_validate(stage_table["stage"]),
            recipe=Recipe.model_validate(stage_table.get("recipe", {})),
            model=stage_table.get("model", ""),
            data=Path(stage_table["data"]) if stage_table.get("data") else None,
            inputs=stage_table.get("inputs", {}),
            fingerprint=stage_table["fingerprint"],
            training_fingerprint=stage_table.get("of_training", ""),
            origin=stage_table.get("origin", {}),
            kind=parse_stage_kind(stage_table["kind"]),
            sources=tuple(map(ExternalSource.model_validate, stage_table.get("sources", ()))),
        )
    except (FileNotFoundError, KeyError, TypeError, ValueError) as error:
        remedy = f"cosmos resume {shlex.quote(str(path.parent.parent))} --from-stage {path.name}"
        problem_text = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(f"another machine or version made stage {path.name!r} ({problem_text}): {remedy}") from error


def mask_stage_secrets(stage: Stage) -> None:
    """Mask the secrets that the settings of a stage name or contain in everything that this process prints and logs."""
    mask_secrets(stage.config.env, find_secrets([stage.recipe.custom, stage.config.arguments]))


def find_source_stage(path: Path) -> Path:
    """Return the directory of the stage that made a result, with its settings and checkpoints: the stage at `path`, or
    a stage of another run from which the result was reused. Return `path` if that run is gone."""
    source_folders = [path]
    while result := read_result(source_folders[-1]):
        source_path = Path(result["reused_from"] or path)
        if source_path in source_folders:
            break
        if (read_result(source_path) or {}).get("digest") != result["digest"]:
            break  # the other run has replaced the result that was reused
        source_folders.append(source_path)
    return next((each for each in reversed(source_folders) if (each / _STAGE_FILE).is_file()), path)


def read_input_metrics(path: Path) -> dict[str, dict[str, Any]]:
    """Return the metrics of the input stages of the stage at `path`, by name, as they were when this stage ran: for a
    training, the metrics of the exported checkpoint, such as the best one. Empty if they are not known."""
    try:
        saved_inputs = tomllib.loads((find_source_stage(path) / _STAGE_FILE).read_text(encoding="utf-8"))["inputs"]
        return {name: dict(result["metrics"]) for name, result in saved_inputs.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def read_requested_num_engines(path: Path, default_num_engines: int) -> int:
    """Return the number of rollout engines that `cosmos scale` requested for a training, or the configured number."""
    num_engines = read_json(path / ENGINES_FILE)
    return num_engines if type(num_engines) is int and num_engines > 0 else default_num_engines


def parse_stage_kind(stage_kind_table: dict[str, Any]) -> StageKind:
    """Return the stage kind that was saved as a table; raise TypeError if another version of the package saved it."""
    return StageKind(**_convert_lists_to_tuples(stage_kind_table))


def _convert_lists_to_tuples(toml_value: Any) -> Any:
    if isinstance(toml_value, dict):
        return {key: _convert_lists_to_tuples(element) for key, element in toml_value.items()}
    return tuple(toml_value) if isinstance(toml_value, list) else toml_value
