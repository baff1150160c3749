"""What the tests of the run directory share: a small pipeline on disk, with models and data of a few bytes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from cosmos_core.config.compose import Pipeline, load_pipeline
from cosmos_core.run.digests import DigestCache
from cosmos_core.run.directory import Run, create_run
from cosmos_core.run.fingerprint import Fingerprint, compute_fingerprint
from cosmos_core.run.manifest import commit_manifest, read_result
from cosmos_core.run.plan import register_result, save_fingerprint
from cosmos_core.types import Outcome
from tasks.kinds import all_kinds
from tests.conftest import PROGRAMS

RECIPE = """
[pipeline]
threads = 1
output_dir = "{folder}/outputs"

[policy]
model_name_or_path = "{folder}/model"

[train]
epoch = 2

[train.train_policy]
type = "{type}"
dataset.name = "{folder}/rows.jsonl"

[validation]
enable = true
dataset.name = "{folder}/held_out"

[validation.reward_function]
"{folder}/mine.py:score" = 1.0

[rollout]
n_generation = 8
"""
COUNTING = """
[pipeline]
threads = 1
output_dir = "{folder}/outputs"
grace_seconds = 5

[[pipeline.stages]]
name = "first"
kind = "custom"
entry = "{programs}/counting.py:count"
arguments = {{ steps = 3, seconds = 0.01 }}

[[pipeline.stages]]
name = "second"
kind = "custom"
entry = "{programs}/counting.py:count"
after = "first"
arguments = {{ steps = 4, seconds = 0.01 }}
"""


def make_inputs(folder: Path) -> None:
    """A model folder, rows, held-out rows and a reward."""
    files = {
        "model/config.json": "{}", "model/tokenizer.json": "[]", "model/model.safetensors": "weights",
        "model/README.md": "a card", "rows.jsonl": "{}\n", "held_out/test.jsonl": "{}\n", "held_out/NOTES.txt": "notes",
        "mine.py": "def score(completion, reference): return 1.0\n",
    }  # fmt: skip
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def load_recipe(folder: Path, *overrides: str, kind: str = "sft") -> Pipeline:
    """A plain recipe that reads all that `make_inputs` made."""
    file = folder / "recipe.toml"
    file.write_text(RECIPE.format(folder=folder, type=kind))
    return load_pipeline(file, overrides, all_kinds())


def fingerprint_of(pipeline: Pipeline, stage: str, **upstream: str) -> Fingerprint:
    """The fingerprint of a stage, with nothing remembered."""
    config = pipeline.stage(stage)
    upstream = upstream or {name: f"digest of {name}" for name in config.after}
    with tempfile.TemporaryDirectory() as folder:
        digests = DigestCache(Path(folder, "digests.jsonl"))
        return compute_fingerprint(pipeline, config, all_kinds()[config.kind], upstream, digests)


def counting(folder: Path, *overrides: str) -> Pipeline:
    """Two stages that count."""
    file = folder / "counting.toml"
    file.write_text(COUNTING.format(folder=folder, programs=PROGRAMS))
    return load_pipeline(file, overrides, all_kinds())


def counting_run(folder: Path, *overrides: str) -> Run:
    """A new run of two stages that count."""
    return create_run(counting(folder, *overrides))


def finish(run: Run, name: str, content: str = "result", info: Any = (), **metrics: float) -> Path:
    """Finish a stage as its worker and launcher would, without either; its folder."""
    stage, path = run.pipeline.stage(name), run.stage_path(name)
    path.mkdir(parents=True, exist_ok=True)
    (path / "out").mkdir(exist_ok=True)
    (path / "out" / "a.txt").write_text(content)
    (path / "out" / "b.txt").write_text("the same")
    inputs = {}
    for upstream in stage.after:
        result = read_result(run.stage_path(upstream))
        assert result is not None
        inputs[upstream] = result
    digests = {upstream: result["digest"] for upstream, result in inputs.items()}
    expected = compute_fingerprint(run.pipeline, stage, run.pipeline.stage_kinds[stage.kind], digests, run.digest_cache)
    save_fingerprint(path, expected)
    outcome = Outcome(outputs=("out",), metrics=metrics, info={"model": "out", **dict(info)})
    commit_manifest(path, outcome, kind=stage.kind, fingerprint=expected.value, inputs=inputs)
    register_result(run.output_dir, path, expected.value)
    return path
