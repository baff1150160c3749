"""Resume from the checkpoint of another run: `train.resume`.

`true` adopts the checkpoint of an interrupted stage with the same fingerprint, so that the result equals that of an
uninterrupted run. As a fallback, `true` adopts the checkpoint of a stage that differs only in the mesh or the engines:
the result is the same except for the order of floating-point sums. A path names a checkpoint of any settings to start
from; the digest of this checkpoint becomes part of the stage's fingerprint.
"""

import logging
import shutil
from pathlib import Path
from typing import Any

from cosmos_core.checkpoint.rank_files import FIRST_RANK_JSON_FILE
from cosmos_core.checkpoint.resume import (
    FINGERPRINT_MISMATCH_REASON,
    MANIFEST_FILE,
    newest_complete_step_on_ranks,
    read_manifest,
    resume_obstacle_on_ranks,
    saved_steps,
    step_folder,
)
from cosmos_core.config.inputs import referenced_stage
from cosmos_core.config.schema.table import flatten_nonempty_tables
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.errors import ModelError, StageFailed
from cosmos_core.models.disk import translate_disk_errors
from cosmos_core.observe import gallery
from cosmos_core.parallel.mesh import broadcast_object, is_first_rank
from cosmos_core.run.files import link_or_copy, parse_step, read_json_object, replace_folder, write_json
from cosmos_core.run.fingerprint import COPIED_FILES_KEY
from cosmos_core.run.plan import FINGERPRINT_FILE
from cosmos_core.run.workspace import Workspace
from cosmos_core.train.completions import COMPLETIONS_FOLDER
from cosmos_core.train.feeds import rows_per_step
from cosmos_core.train.measure import SAMPLES_FILE
from cosmos_core.types import is_key_within

logger = logging.getLogger(__name__)

_MESH_FINGERPRINT_KEYS = (COPIED_FILES_KEY, "world_size", "config.policy.parallelism", "config.rollout.parallelism")
"""Keys in the record of a stage's fingerprint whose values change the trained weights only through the order of
floating-point sums."""


def adopt_checkpoint(workspace: Workspace, stage_fingerprint: str) -> None:
    """Link into this stage the newest complete checkpoint of an earlier run of the stage, the best checkpoint of that
    run and its metrics. Do nothing if the stage has a checkpoint already. `stage_fingerprint`: fingerprint of the
    stage's checkpoints. Log a warning if no checkpoint can be adopted. All ranks call this function: the first rank
    links the files, and all ranks share the hashing."""
    own_checkpoint_folder, send_heartbeat = workspace.path / "checkpoints", workspace.progress.beat
    if newest_complete_step_on_ranks(own_checkpoint_folder, stage_fingerprint, send_heartbeat) is not None:
        return
    all_checkpoint_folders = workspace.run_path.parent.glob("*/stages/*/checkpoints") if is_first_rank() else ()
    other_folders = [folder for folder in all_checkpoint_folders if folder != own_checkpoint_folder]
    all_checkpoints = sorted(((step, folder) for folder in other_folders for step in saved_steps(folder)), reverse=True)
    log_level = logging.WARNING if is_first_rank() else logging.DEBUG  # one warning, not one from each rank
    warned_folders = set()
    checkpoint_candidates = [(step, str(folder), stage_fingerprint) for step, folder in all_checkpoints]
    stage_fingerprint_inputs = _fingerprint_inputs_without_mesh(read_json_object(workspace.path / FINGERPRINT_FILE))
    for step, folder in all_checkpoints if stage_fingerprint_inputs else ():
        fingerprint_record = read_json_object(folder.parent / FINGERPRINT_FILE)
        if _fingerprint_inputs_without_mesh(fingerprint_record) == stage_fingerprint_inputs:
            checkpoint_candidates.append(
                (step, str(folder), fingerprint_record.get("of_training", fingerprint_record["value"]))
            )
    for step, folder_name, fingerprint in broadcast_object(checkpoint_candidates):
        checkpoint = step_folder(folder := Path(folder_name), step)
        resume_problem = resume_obstacle_on_ranks(folder, step, fingerprint, send_heartbeat)
        resume_problem = resume_problem or _link_checkpoint(workspace, folder, step, fingerprint, stage_fingerprint)
        if resume_problem is None:
            logger.info("going on from %s", checkpoint)
            return
        should_log_reason = folder.parent.name == workspace.path.name and checkpoint not in warned_folders
        if should_log_reason and resume_problem != FINGERPRINT_MISMATCH_REASON:
            logger.log(log_level, "checkpoint %s is passed over: %s", checkpoint, resume_problem)
            warned_folders.add(checkpoint)
    stage_name = workspace.path.name
    step_folders = [step_folder(folder, step) for step, folder in all_checkpoints if folder.parent.name == stage_name]
    manifests = {path / "policy": read_manifest(path / "policy") for path in step_folders if path not in warned_folders}
    complete_checkpoints = [policy for policy, manifest in manifests.items() if manifest]
    newest_folder = max(complete_checkpoints, key=lambda policy: manifests[policy].get("created", 0.0), default=None)
    resume_hint = f"; to go on from other settings: train.resume = '{newest_folder}'" if newest_folder else ""
    message = "train.resume = true: no other run below %s has a checkpoint with these settings and inputs, so this one "
    logger.log(log_level, message + "starts at step 0%s", workspace.run_path.parent, resume_hint)


def check_base_model(folder: Path, stage_folder: Path, model: str) -> None:
    """Raise ModelError if the checkpoint in `folder` (`.../step_N/policy`), which has only the trained weights, is of
    another base model than `model`, the model of the stage in `stage_folder`. Log a warning if this cannot be known."""
    fingerprint_records = [read_json_object(path / FINGERPRINT_FILE) for path in (folder.parents[2], stage_folder)]
    model_identities = [_identify_model(each["ingredients"]) for each in fingerprint_records if each.get("ingredients")]
    if len(model_identities) < 2 or model_identities[0] == model_identities[1]:
        return
    if model_identities[0][0] == model_identities[1][0]:
        raise ModelError(f"train.resume = '{folder}' began from another model than {model}; start from that one")
    message = "train.resume = '%s': it is not known whether it began from %s, of which the untrained weights are taken"
    logger.warning(message, folder, model)


def _identify_model(fingerprint_inputs: dict[str, Any]) -> tuple[str, str]:
    """Return the form in which the record of a stage's fingerprint identifies the model (`stage`, `hub:`, `remote:`, or
    empty for the digest of a folder), and the identifier. Identifiers of different forms cannot be compared."""
    model = str(fingerprint_inputs["model"])
    if stage_digest := fingerprint_inputs["inputs"].get(referenced_stage(model) or ""):
        return "stage", stage_digest
    return model[: model.find(":") + 1], model


def warn_of_other_step_size(folder: Path, train: TrainConfig, group_size: int) -> None:
    """Log a warning if the checkpoint in `folder` (`.../step_N/policy`) is of a training whose train steps read another
    number of rows than the steps of this training. This training continues after the rows that N of its own steps would
    have read, so it repeats or skips rows. `group_size`: number of samples per row."""
    run_inputs = read_json_object(folder.parents[2] / FINGERPRINT_FILE).get("ingredients", {})
    resumed_settings, algorithm_config = flatten_nonempty_tables(run_inputs.get("config", {})), train.train_policy
    batch_size = resumed_settings.get("train.train_batch_per_replica")
    has_row_position = "drawn" in read_json_object(folder / FIRST_RANK_JSON_FILE).get("feed", {}).get("source", {})
    if not batch_size or has_row_position or resumed_settings.get("train.train_policy.type") != algorithm_config.type:
        return
    resumed_group_size = resumed_settings.get("rollout.n_generation", 1) if algorithm_config.has_rollouts else 1
    resumed_rows_per_step, new_rows_per_step = -(-batch_size // resumed_group_size), rows_per_step(train, group_size)
    if resumed_rows_per_step != new_rows_per_step and not algorithm_config.has_token_based_batches:
        step = parse_step(folder.parent.name)
        logger.warning(
            "train.resume = '%s': its %d steps took %d rows each, those of this training take %d, so that it goes on "
            "at row %d instead of %d; keep train.train_batch_per_replica%s",
            folder, step, resumed_rows_per_step, new_rows_per_step,
            step * new_rows_per_step, step * resumed_rows_per_step,
            " and rollout.n_generation" if algorithm_config.has_rollouts else "",
        )  # fmt: skip


def _fingerprint_inputs_without_mesh(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that a fingerprint hashes, except those of the mesh and the engines, by dotted key; empty if
    the record of the fingerprint is missing."""
    fingerprint_inputs = flatten_nonempty_tables(fingerprint.get("ingredients", {}))
    return {key: value for key, value in fingerprint_inputs.items() if not is_key_within(key, _MESH_FINGERPRINT_KEYS)}


def _link_checkpoint(
    workspace: Workspace, folder: Path, step: int, fingerprint: str, stage_fingerprint: str
) -> str | None:
    """Link the checkpoint of step `step` and the best checkpoint of another run, which have `fingerprint`, into the
    stage, and write `stage_fingerprint` to their manifests. Return an error message if the other run, which is perhaps
    still running, has deleted a checkpoint meanwhile; else None. All ranks call this function."""
    saved_json_values = read_json_object(step_folder(folder, step) / "policy" / FIRST_RANK_JSON_FILE)
    best_step = broadcast_object((saved_json_values.get("best") or {}).get("step", step))
    linked_steps = [step]
    if best_step != step and not resume_obstacle_on_ranks(folder, best_step, fingerprint, workspace.progress.beat):
        linked_steps = [best_step, step]
    link_error = None
    if is_first_rank():
        link_error = _link_step_folders(folder, linked_steps, workspace.path, stage_fingerprint)
    return broadcast_object(link_error)


def _link_step_folders(folder: Path, steps: list[int], stage_folder: Path, stage_fingerprint: str) -> str | None:
    # Link the checkpoints last, because an interrupted adoption is repeated only if the stage has no checkpoint yet.
    with translate_disk_errors(f"a copy of the metrics in {folder.parent}", lambda: "the original is intact"):
        for file_name in ("metrics.jsonl", SAMPLES_FILE, gallery.SAMPLES_FOLDER, COMPLETIONS_FOLDER):
            source_path, target_path = folder.parent / file_name, stage_folder / file_name
            if source_path.is_dir():  # copy a folder of images and videos
                with replace_folder(target_path) as copied_folder:
                    ignore_tmp = shutil.ignore_patterns(".*.tmp")  # skip unfinished files of the other run
                    shutil.copytree(source_path, copied_folder, False, ignore_tmp, link_or_copy, dirs_exist_ok=True)
            elif source_path.is_file():
                shutil.copy2(source_path, target_path)
    for step in steps:
        source_folder = step_folder(folder, step)
        try:
            with (
                translate_disk_errors(f"a copy of {source_folder}", lambda: "the original is intact"),
                replace_folder(step_folder(stage_folder / "checkpoints", step)) as copied_folder,
            ):
                shutil.copytree(source_folder, copied_folder, copy_function=link_or_copy, dirs_exist_ok=True)
                manifest_file = copied_folder / "policy" / MANIFEST_FILE
                manifest = read_manifest(manifest_file.parent)
                manifest_file.unlink()  # remove the hard link before writing: the other run's file must not change
                write_json(manifest_file, {**manifest, "fingerprint": stage_fingerprint})
        except (OSError, StageFailed):
            if source_folder.exists():
                raise
            return f"{source_folder.name} is gone"
    return None
