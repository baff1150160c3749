"""Go on where another run stopped: `train.resume`.

True takes over what an interrupted stage with the same fingerprint left, so that the result is that of a run that was
never interrupted; or, where there is none, of a stage that differs in its mesh or engines alone, whose result is the
same but for the order of sums. A path starts from that state whatever it was trained with; its digest is in the
fingerprint.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cosmos_core.checkpoint.parts import EXTRA
from cosmos_core.checkpoint.resume import (
    MANIFEST,
    OF_ANOTHER,
    newest_whole,
    problem,
    read_manifest,
    saved_steps,
    step_folder,
)
from cosmos_core.config.compose import source_of
from cosmos_core.config.schema.table import flat_keys
from cosmos_core.errors import ModelError
from cosmos_core.run.files import link_or_copy, read_json, replaced_folder, write_json
from cosmos_core.run.fingerprint import CARRIED
from cosmos_core.run.plan import FINGERPRINT
from cosmos_core.run.stage import Stage
from cosmos_core.train.measure import SAMPLES
from cosmos_core.types import is_below

logger = logging.getLogger(__name__)

_MESH = (CARRIED, "world_size", "config.policy.parallelism", "config.rollout.parallelism")
"""Ingredients that change no more of the trained weights than the order of sums."""


def take_over(stage: Stage) -> None:
    """Link the newest whole checkpoint that an earlier run made of this very stage, with its best one and its curves.

    Where the stage has a checkpoint of its own nothing is done; where there is none to take over, that is said.
    """
    own = stage.path / "checkpoints"
    if newest_whole(own, stage.checkpoint_fingerprint) is not None:
        return
    folders = [folder for folder in stage.run_path.parent.glob("*/stages/*/checkpoints") if folder != own]
    found = sorted(((step, folder) for folder in folders for step in saved_steps(folder)), reverse=True)
    same_mesh = [(step, folder, stage.checkpoint_fingerprint) for step, folder in found]
    passed_over = set()
    for step, folder, fingerprint in (*same_mesh, *_of_another_mesh(stage, found)):
        checkpoint, reason = step_folder(folder, step), problem(folder, step, fingerprint)
        if reason is None:
            _link(folder, step, fingerprint, stage)
            logger.info("going on from %s", checkpoint)
            return
        if reason != OF_ANOTHER and folder.parent.name == stage.name and checkpoint not in passed_over:
            logger.warning("checkpoint %s is passed over: %s", checkpoint, reason)
            passed_over.add(checkpoint)
    others = [step_folder(folder, step) / "policy" for step, folder in found if folder.parent.name == stage.name]
    complete = [policy for policy in others if policy.parent not in passed_over and read_manifest(policy)]
    newest = max(complete, key=lambda policy: (policy / MANIFEST).stat().st_mtime, default=None)
    hint = f"; to go on from other settings: train.resume = '{newest}'" if newest else ""
    logger.warning(
        "train.resume = true: no other run below %s has a checkpoint with these settings and inputs, so this one "
        "starts at step 0%s",
        stage.run_path.parent,
        hint,
    )


def named_checkpoint(stage: Stage) -> Path | None:
    """Return the `.../step_N/policy` folder that `train.resume` names.

    Raises:
        ModelError: it was trained from another model than this stage; what was frozen then is not in it.
    """
    if not isinstance(stage.recipe.train.resume, str):
        return None
    policy = Path(stage.recipe.train.resume)
    theirs, ours = (_base(read_json(path / FINGERPRINT), stage) for path in (policy.parents[2], stage.path))
    if theirs and ours and theirs != ours:
        raise ModelError(f"train.resume = '{policy}' began from another model than {stage.model}; start from that one")
    return policy


def _base(fingerprint: Any, stage: Stage) -> tuple[Any, ...]:
    """What stands for the model that a stage began from; empty: unknown."""
    if not isinstance(fingerprint, dict):
        return ()
    ingredients = fingerprint["ingredients"]
    return ingredients["model"], ingredients["inputs"].get(source_of(stage.config.model))


def _of_another_mesh(stage: Stage, found: list[tuple[int, Path]]) -> Iterator[tuple[int, Path, Any]]:
    """Those that are of this very training on another mesh, with their fingerprint."""
    ours = _without_mesh(read_json(stage.path / FINGERPRINT))
    for step, folder in found:
        theirs = read_json(folder.parent / FINGERPRINT)
        if isinstance(theirs, dict) and ours and _without_mesh(theirs) == ours:
            yield step, folder, theirs.get("of_training", theirs["value"])


def _without_mesh(fingerprint: Any) -> dict[str, Any]:
    """The ingredients but for the mesh of ranks and engines, as dotted keys; empty: unknown."""
    if not isinstance(fingerprint, dict):
        return {}
    return {key: value for key, value in flat_keys(fingerprint["ingredients"]).items() if not is_below(key, _MESH)}


def _link(folder: Path, step: int, fingerprint: str, stage: Stage) -> None:
    """Bring the checkpoint of a step, which is of `fingerprint`, into the stage as one of its own."""
    extra = read_json(step_folder(folder, step) / "policy" / EXTRA)
    assert isinstance(extra, dict)  # its digest was right
    best = (extra.get("best") or {}).get("step", step)
    steps = [best, step] if problem(folder, best, fingerprint) is None else [step]
    for each in dict.fromkeys(steps):
        with replaced_folder(step_folder(stage.path / "checkpoints", each)) as building:
            shutil.copytree(step_folder(folder, each), building, copy_function=link_or_copy, dirs_exist_ok=True)
            manifest = building / "policy" / MANIFEST
            content = read_manifest(manifest.parent)
            manifest.unlink()  # a link: theirs must not change
            write_json(manifest, {**content, "fingerprint": stage.checkpoint_fingerprint})
    for name in ("metrics.jsonl", SAMPLES):
        if (folder.parent / name).exists() and not (stage.path / name).exists():
            shutil.copy2(folder.parent / name, stage.path / name)
