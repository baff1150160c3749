"""Look up a verified result with the same fingerprint in this run and other runs, to reuse it instead of running the
stage. A stage with a work pool requests a flow run, which may start a machine, only if the look-up finds no result.
"""

import time
from contextlib import suppress

from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.errors import CosmosError
from cosmos_core.run import manifest, plan
from cosmos_core.run.directory import Run
from cosmos_core.run.fingerprint import Fingerprint, compute_fingerprint
from cosmos_core.run.lock import open_stage_lock
from cosmos_core.run.manifest import Result, read_result
from cosmos_core.run.state import FINISHED_STATES, read_state, record_event, update_state
from tasks.layout import read_upstream_results, supersede_outdated_stage
from tasks.store_sync import StageSync


def compute_local_fingerprint(run: Run, stage: StageConfig) -> Fingerprint:
    """Return the fingerprint of a stage with complete inputs, for the hardware and libraries of this machine."""
    upstream_digests = {name: result["digest"] for name, result in read_upstream_results(run, stage).items()}
    return compute_fingerprint(run.pipeline, stage, run.pipeline.stage_kind(stage), upstream_digests, run.digest_cache)


def find_result(run: Run, stage: StageConfig, expected_fingerprint: Fingerprint) -> Result | None:
    """Return a verified result with the expected fingerprint, of this run or of another run; None if there is none."""
    path = run.stage_path(stage.name)
    stage_state = read_state(path)
    if not run.pipeline.stage_kind(stage).is_reusable or (stage_state.forced and read_result(path) is None):
        return None
    reuse_choice = plan.decide_reuse(run.output_dir, path, expected_fingerprint, ignores_cache=run.should_verify_files)
    if reuse_choice is None or reuse_choice.action == "run":
        if (result := StageSync(run, stage).find_result(expected_fingerprint)) is None:
            return None
        reuse_choice = plan.StageDecision("adopt", result["reused_from"])
    elif reuse_choice.action == "adopt":
        assert reuse_choice.result is not None and reuse_choice.source is not None
        supersede_outdated_stage(path, expected_fingerprint)
        result = manifest.adopt_result(reuse_choice.source, path, reuse_choice.result)
    elif (result := reuse_choice.result) is None:
        return None
    if stage_state.state not in FINISHED_STATES or reuse_choice.action == "adopt":
        plan.register_result(run.output_dir, path, expected_fingerprint.value)
        plan.save_fingerprint(path, expected_fingerprint, stage.work_pool)
        record_event(path, "reused", reuse_choice.reason)
        update_state(path, state="reused", ended=time.time(), error="")
    return result


def find_result_of_work_pool(run: Run, stage: StageConfig) -> Result | None:
    """Return a verified result that any machine of the stage's work pool has made from the same inputs and settings;
    None if no such result exists, or if an input can be read only on the machines of the pool."""
    # Ignore errors: this machine may lack inputs that only the machines of the work pool can read.
    with open_stage_lock(run.path, stage.name) as stage_lock, suppress(CosmosError):
        if stage_lock.try_acquire():
            local_fingerprint = compute_local_fingerprint(run, stage)
            for pool_fingerprint in plan.find_pool_fingerprints(run.output_dir, run.pipeline, stage, local_fingerprint):
                if result := find_result(run, stage, pool_fingerprint):
                    return result
    return None
