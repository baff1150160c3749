"""Fingerprints of every stage of every shipped recipe over small stand-ins for models and data, as they were recorded.

A change of the code that is no change of results leaves them as they are, so that finished stages stay reusable. One
that is meant raises the `result_version` of its kinds of stages, and records them anew:
`python -m tests.unit.test_golden_fingerprints`.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from cosmos_core.config.compose import Pipeline, load_pipeline
from tasks.kinds import all_kinds
from tests.unit.run_folder import fingerprint_of, load_recipe, make_inputs

CONFIGS = Path(__file__).parents[2] / "configs"
RECORDED = Path(__file__).with_name("golden_fingerprints.json")
OF_MACHINE = ("versions", "threads", "device", "kernels")
"""Ingredients that differ between machines."""
WITH_CODE = ("code", "entry", "data_code")
"""Ingredients with digests of source text, some of it ours: the names are compared alone."""
MODEL_FILES = ("config.json", "tokenizer.json", "model.safetensors", "generation_config.json", "README.md")


def make_stand_ins(pipeline: Pipeline) -> None:
    """Write, in the working folder, what the recipes of a pipeline name: models, rows and media of a few bytes."""
    for recipe in pipeline.recipes.values():
        media = recipe.custom.get("dataset", {})
        folders = [*(table.local_dir or table.name for table in recipe.datasets.values()), media.get("media_path", "")]
        for folder in filter(None, folders):
            make_file(Path(folder, "rows.jsonl"))
            make_file(Path(folder, "a.png"))
        if rows := media.get("annotation_path", ""):
            make_file(Path(rows))
        for model in filter(None, (recipe.policy.model_name_or_path, recipe.distillation.model_name_or_path)):
            if not model.startswith("stage:"):
                for name in MODEL_FILES:
                    make_file(Path(model, name))


def make_file(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('{"eos_token_id": 2}' if path.suffix == ".json" else path.name)


def digests_of(pipeline: Pipeline, folder: Path) -> dict[str, str]:
    """A short digest of each ingredient of each stage's fingerprint, on one line per stage."""
    return {stage.name: " ".join(
        f"{name}:{short_digest(list(value) if name in WITH_CODE and value else value, folder)}"
        for name, value in sorted(fingerprint_of(pipeline, stage.name).ingredients.items()) if name not in OF_MACHINE
    ) for stage in pipeline.stages}  # fmt: skip


def short_digest(value: Any, folder: Path) -> str:
    text = json.dumps(value, sort_keys=True).replace(str(folder), "")
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def fingerprints(folder: Path) -> dict[str, dict[str, str]]:
    """The digests of all shipped pipelines, and of a recipe with rewards and held-out rows in files of a user's own."""
    found = {}
    for file in sorted(path for path in CONFIGS.rglob("*.toml") if path.parent.name != "base"):
        pipeline = load_pipeline(file, [], all_kinds())
        make_stand_ins(pipeline)
        found[str(file.relative_to(CONFIGS))] = digests_of(pipeline, folder)
    make_inputs(folder / "own")
    for kind in ("sft", "grpo"):
        found[f"own {kind}"] = digests_of(load_recipe(folder / "own", kind=kind), folder)
    return found


def test_the_fingerprints_of_shipped_recipes_are_those_that_were_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert fingerprints(tmp_path) == json.loads(RECORDED.read_text(encoding="utf-8"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as here:
        os.chdir(here)
        RECORDED.write_text(json.dumps(fingerprints(Path(here).resolve()), indent=1) + "\n", encoding="utf-8")
