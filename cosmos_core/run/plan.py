"""Plan of a run: for each stage, whether to reuse it, adopt it from another run, or run it, and why."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.run.digests import shared_digest_cache
from cosmos_core.run.directory import RUNS_FILE, Run
from cosmos_core.run.files import SHARED_FOLDER, read_json, read_json_object, write_json
from cosmos_core.run.fingerprint import Fingerprint, compute_fingerprint
from cosmos_core.run.manifest import STORE_URL_KEY, Result, find_output_damage, read_result
from cosmos_core.run.state import read_state
from cosmos_core.types import StageKind

FINGERPRINT_FILE = "fingerprint.json"
_MAX_COMPARED_RUNS = 50  # maximum number of earlier runs with which a plan compares a fingerprint
_MACHINE_PROPERTIES = frozenset({"device", "versions", "kernels"})
"""Keys of `Fingerprint.ingredients` that are properties of the machine that runs the stage."""


@dataclass(frozen=True)
class StageDecision:
    """Decision about a stage: `reuse` its valid result in this run, `adopt` a copy of the result of another run, `run`
    the stage, or `depends` if the decision needs the results of earlier stages."""

    action: Literal["reuse", "adopt", "run", "depends"]
    reason: str
    source: Path | None = None
    """Stage directory whose result is reused or adopted; None for `run`, `depends` and one in an artifact store."""
    result: Result | None = None


def get_reuse_folder(output_dir: Path, fingerprint_value: str) -> Path:
    """Return the folder with an entry for each finished stage that has this fingerprint. A stage that makes such a
    result locks a file in the folder."""
    return output_dir / SHARED_FOLDER / "fingerprints" / fingerprint_value


def register_result(output_dir: Path, stage_path: Path, fingerprint_value: str) -> None:
    """Save an entry for a finished stage under its fingerprint. Other runs find the result by this entry; without it
    they would run the stage again."""
    relative_path = stage_path.relative_to(output_dir)
    reuse_entry = get_reuse_folder(output_dir, fingerprint_value) / f"{relative_path.parts[0]}.{stage_path.name}.json"
    reuse_entry.parent.mkdir(parents=True, exist_ok=True)
    write_json(reuse_entry, {"stage": str(relative_path)}, fsync=False)


def decide_reuse(
    output_dir: Path, stage_path: Path | None, expected_fingerprint: Fingerprint, *, ignores_cache: bool = False
) -> StageDecision | None:
    """Return the decision whether a stage reuses the result of a finished stage with the same fingerprint; None if no
    stage has finished with this fingerprint. `stage_path` is the directory of the stage in its run (None: the run does
    not exist yet)."""
    reuse_entries = sorted(get_reuse_folder(output_dir, expected_fingerprint.value).glob("*.json"), reverse=True)
    # Use generators, so that the entries of other runs, of which there may be hundreds, are read only if needed.
    stage_names = (entry.get("stage") for entry in map(read_json_object, reuse_entries))
    registered_stage_paths = (output_dir / name for name in stage_names if isinstance(name, str))
    stage_paths_in_run, damage_text = [] if stage_path is None else [stage_path], ""
    for path in chain(stage_paths_in_run, (path for path in registered_stage_paths if path != stage_path)):
        result, run_label = read_result(path), f"run {path.parent.parent.name}"
        if result is None or result["fingerprint"] != expected_fingerprint.value:
            continue
        output_damage = find_output_damage(path, result, ignores_cache=ignores_cache)
        if output_damage:
            damage_text = damage_text or (output_damage if path == stage_path else f"{run_label}: {output_damage}")
        elif path == stage_path:
            return StageDecision("reuse", "done in this run", path, result)
        else:
            return StageDecision("adopt", f"same fingerprint as {run_label}", path, result)
    return StageDecision("run", f"made before, but {damage_text}") if damage_text else None


def plan_stages(
    pipeline: Pipeline,
    stage_kinds: Mapping[str, StageKind],
    output_dir: Path,
    *,
    ignores_cache: bool = False,
    find_stored_result: Callable[[str], Result | None] = lambda fingerprint: None,
) -> dict[str, StageDecision]:
    """Return a decision for every stage, in topological order, without changing anything; `find_stored_result` looks up
    a result by its fingerprint in an artifact store. Raises `CosmosError` if an input of a stage is missing."""
    digest_cache = shared_digest_cache(output_dir, ignores_cache=ignores_cache)
    decisions: dict[str, StageDecision] = {}
    for stage in pipeline.stages:
        stage_kind = stage_kinds[stage.kind]
        undecided_stage_names = [name for name in stage.after if decisions[name].result is None]
        if undecided_stage_names:
            action: Literal["run", "depends"] = "depends" if stage_kind.is_reusable else "run"
            decisions[stage.name] = StageDecision(action, f"after {', '.join(undecided_stage_names)}")
            continue
        upstream_digests = {name: result["digest"] for name in stage.after if (result := decisions[name].result)}
        if not stage_kind.is_reusable:
            decisions[stage.name] = StageDecision("run", "looks at the outside world, so it runs each time")
            continue
        current_fingerprint = compute_fingerprint(pipeline, stage, stage_kind, upstream_digests, digest_cache)
        decision: StageDecision | None = None
        fingerprints = [current_fingerprint]
        if stage.work_pool:
            fingerprints = [*find_pool_fingerprints(output_dir, pipeline, stage, current_fingerprint), *fingerprints]
        for candidate in fingerprints:
            if decision is None or decision.action == "run":
                decision = decide_reuse(output_dir, None, candidate, ignores_cache=ignores_cache)
            if (decision is None or decision.action == "run") and (result := find_stored_result(candidate.value)):
                decision = StageDecision("adopt", f"same fingerprint in {result[STORE_URL_KEY]}", result=result)
        decisions[stage.name] = decision or StageDecision(
            "run", _explain_new_fingerprint(output_dir, pipeline.config.name, stage.name, current_fingerprint)
        )
    return decisions


def save_fingerprint(stage_path: Path, fingerprint: Fingerprint, work_pool: str = "") -> None:
    """Save the fingerprint of a stage with the hashed values, so that a later run can tell what changed, and the work
    pool of the stage."""
    saved_values = asdict(fingerprint) | {"of_training": fingerprint.training_hash}
    write_json(stage_path / FINGERPRINT_FILE, saved_values | ({"work_pool": work_pool} if work_pool else {}))


def read_fingerprint(stage_path: Path) -> Fingerprint | None:
    """Return the fingerprint that was saved in the folder of a stage; None if there is none or it is damaged."""
    return _parse_fingerprint(read_json(stage_path / FINGERPRINT_FILE))


def explain_rerun(run: Run, stage: StageConfig, current_fingerprint: Fingerprint) -> str:
    """Return why a stage runs again although it ran in this or an earlier run of its pipeline; empty if it never ran,
    if an attempt is retried, or if stages of its kind always run."""
    stage_path = run.stage_path(stage.name)
    if not run.pipeline.stage_kind(stage).is_reusable:
        return ""
    if saved_fingerprint := read_fingerprint(stage_path):
        # A retry, with the same fingerprint and no result, needs no reason: its list of differences is empty.
        if saved_fingerprint.value != current_fingerprint.value or read_result(stage_path) is None:
            return "; ".join(current_fingerprint.describe_difference(saved_fingerprint))
    elif read_state(stage_path).forced:
        return "requested by the user"
    decision = decide_reuse(run.output_dir, stage_path, current_fingerprint, ignores_cache=run.should_verify_files)
    if decision is not None and decision.action == "run":
        return decision.reason
    run_id, changes = _find_most_similar_run(run.output_dir, run.pipeline.config.name, stage.name, current_fingerprint)
    return f"{'; '.join(changes)} (since run {run_id})" if changes and saved_fingerprint is None else ""


def find_pool_fingerprints(
    output_dir: Path, pipeline: Pipeline, stage: StageConfig, local_fingerprint: Fingerprint
) -> list[Fingerprint]:
    """Return the fingerprints of `stage`, newest first, that machines of its work pool saved in runs of this pipeline
    and that differ from `local_fingerprint`, which is computed on this machine, in properties of the machine alone."""

    def drop_machine_properties(ingredients: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in ingredients.items() if name not in _MACHINE_PROPERTIES}

    pool_fingerprints = [
        fingerprint
        for fingerprint, work_pool in _read_saved_fingerprints(output_dir, pipeline.config.name, stage.name).values()
        if work_pool == stage.work_pool
        and drop_machine_properties(fingerprint.ingredients) == drop_machine_properties(local_fingerprint.ingredients)
    ]
    return list({fingerprint.value: fingerprint for fingerprint in pool_fingerprints}.values())


def _parse_fingerprint(saved_fields: Any) -> Fingerprint | None:
    if not isinstance(saved_fields, dict) or not isinstance(saved_fields.get("ingredients"), dict):
        return None
    saved_inputs = saved_fields.get("inputs")  # None for a run of an earlier version, which saved no list of inputs
    input_lists = [each for each in saved_inputs if isinstance(each, list)] if isinstance(saved_inputs, list) else []
    input_quadruples = [each for each in input_lists if len(each) == 4]
    input_entries = tuple((str(role), str(key), str(name), str(digest)) for role, key, name, digest in input_quadruples)
    return Fingerprint(str(saved_fields.get("value")), saved_fields["ingredients"], input_entries)


def _read_saved_fingerprints(output_dir: Path, pipeline_name: str, stage: str) -> dict[str, tuple[Fingerprint, str]]:
    """Return the fingerprint and the work pool of a stage in each of the newest runs of a pipeline that ran the stage,
    by run id, newest first."""
    run_list_entries = read_json(output_dir / RUNS_FILE)
    fingerprints: dict[str, tuple[Fingerprint, str]] = {}
    for run in reversed(run_list_entries if isinstance(run_list_entries, list) else []):
        if not isinstance(run, dict) or run.get("pipeline") != pipeline_name or len(fingerprints) == _MAX_COMPARED_RUNS:
            continue
        saved_values = read_json_object(output_dir / str(run.get("run_id")) / "stages" / stage / FINGERPRINT_FILE)
        if fingerprint := _parse_fingerprint(saved_values):
            fingerprints[str(run["run_id"])] = fingerprint, str(saved_values.get("work_pool", ""))
    return fingerprints


def _explain_new_fingerprint(output_dir: Path, pipeline_name: str, stage: str, current_fingerprint: Fingerprint) -> str:
    run_id, change_texts = _find_most_similar_run(output_dir, pipeline_name, stage, current_fingerprint)
    if not change_texts:
        return f"unfinished in run {run_id}" if run_id else "never made before"
    omitted_changes_note = f" and {len(change_texts) - 2} more" if len(change_texts) > 2 else ""
    return f"changed since run {run_id}: {'; '.join(change_texts[:2])}{omitted_changes_note}"


def _find_most_similar_run(
    output_dir: Path, pipeline_name: str, stage_name: str, current_fingerprint: Fingerprint
) -> tuple[str, list[str]]:
    """Return the id of the earlier run whose stage has the most similar fingerprint, and the differences between the
    fingerprints; empty values if no earlier run has the stage."""
    saved_fingerprints = _read_saved_fingerprints(output_dir, pipeline_name, stage_name).items()
    changes = [(run_id, current_fingerprint.describe_difference(saved)) for run_id, (saved, _) in saved_fingerprints]
    return min(changes, key=lambda run_and_differences: len(run_and_differences[1]), default=("", []))
