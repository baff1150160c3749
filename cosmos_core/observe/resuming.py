"""Describe interrupted runs: when a run died, its progress, the command that resumes it, and the step from which it
continues."""

import os
import shlex
from pathlib import Path

from cosmos_core.observe.formatting import format_time
from cosmos_core.observe.record import RunRecord, StageRecord
from cosmos_core.run.directory import read_start_info
from cosmos_core.run.liveness import find_dead_holder_start_time, has_lost_launcher, read_open_approval
from cosmos_core.run.state import ACTIVE_STATES

_command_folder_by_cwd: dict[str, str] = {}
"""Working directory in which the user started this command, by the folder to which `change_to_run_folder` changed."""


def describe_interruption(run: RunRecord) -> str:
    """Return a message if a run was killed, waits for approval or was declined by a person, or if its stages still run
    although its flow has ended; empty for any other run."""
    run_outcome = run.outcome
    if run_outcome == "declined":
        return "a person has declined: the model is not published"
    if run_outcome == "waiting" and (approval := read_open_approval(run.path)):
        return f"waits for approval in the UI of Prefect until {format_time(approval.until)}"
    if run_outcome == "running":
        return _describe_running_stages(run)
    return _describe_killed_run(run) if run_outcome == "died" else ""


def _describe_running_stages(run: RunRecord) -> str:
    """Return a message about the stages that still run after the flow of the run has ended; empty if no stage runs."""
    running_stages = [stage for stage in run.stages if stage.status in ACTIVE_STATES]
    orphaned_stages = [stage for stage in running_stages if has_lost_launcher(stage.state)]
    if not orphaned_stages and (not running_stages or find_dead_holder_start_time(run.path) is None):
        return ""
    live_stages = [stage.name for stage in running_stages if stage not in orphaned_stages]
    stage_messages = [f"{stage.name} saves a checkpoint and ends" for stage in orphaned_stages]
    stage_messages += [f"{', '.join(live_stages)} continues with a flow run of its own"] if live_stages else []
    resume_hint = f"resume with: {make_resume_command(run.path)}{_describe_resume_steps(orphaned_stages)}"
    return f"the flow has ended; {'; '.join(stage_messages)}; {resume_hint}"


def _describe_killed_run(run: RunRecord) -> str:
    resume_hint = f"resume with: {make_resume_command(run.path)}"
    dead_stages = [stage for stage in run.stages if stage.died_at is not None]
    if not dead_stages:
        # The process of the run died between two stages or before the first, so report the last known end of a stage.
        stage_end_times = [stage.state.ended for stage in run.stages if stage.state.ended]
        run_start_time = max(find_dead_holder_start_time(run.path) or 0.0, run.start_info.started)
        return f"died after {format_time(max(stage_end_times, default=run_start_time))}, {resume_hint}"
    last_dead_stage = max(dead_stages, key=lambda stage: stage.died_at or 0.0)
    stage_state, last_step = last_dead_stage.state, _get_last_step(last_dead_stage)
    on_host_text = f" on {stage_state.launcher_host}" if stage_state.launcher_host and not stage_state.is_local else ""
    progress_text = f" after step {last_step}" if last_step else f" in {last_dead_stage.name}"
    death_text = f"died at {format_time(last_dead_stage.died_at)}{on_host_text}{progress_text}"
    return f"{death_text}, {resume_hint}{_describe_resume_steps([last_dead_stage])}"


def change_to_run_folder(run_path: Path) -> list[str]:
    """Change to the working directory in which a run was created, so that relative paths in its settings are valid.
    Return a list with one notice for the user; empty if the directory was not changed."""
    run_working_directory = start_info.working_directory if (start_info := read_start_info(run_path)) else ""
    if run_working_directory == (command_folder := os.getcwd()) or not os.access(run_working_directory, os.X_OK):
        return []
    os.chdir(run_working_directory)
    _command_folder_by_cwd[os.getcwd()] = command_folder
    return [f"the run continues in {run_working_directory}, where it was started"]


def make_resume_command(run_path: Path) -> str:
    """Return the shell command with which the user continues a run."""
    return f"cosmos resume {quote_run_path(run_path)}"


def quote_run_path(run_path: Path) -> str:
    """Return the path of a run, quoted for the user's shell: relative to the folder of that shell if it contains the
    run, otherwise absolute."""
    shell_folder = _command_folder_by_cwd.get(os.getcwd(), os.getcwd())
    return shlex.quote(str(run_path.relative_to(shell_folder) if run_path.is_relative_to(shell_folder) else run_path))


def make_resume_instructions(run: RunRecord) -> str:
    """Return the command that continues a run, followed by the step at which each interrupted training continues."""
    interrupted_stages = [stage for stage in run.stages if stage.status in {"stopped", "died", "failed"}]
    return make_resume_command(run.path) + _describe_resume_steps(interrupted_stages)


def _describe_resume_steps(stages: list[StageRecord]) -> str:
    """Return a text with the step at which each training continues; empty if no training has completed a step."""
    resume_messages = []
    for stage in stages:
        if stage.kind.trains_model and _get_last_step(stage):
            unsaved_note = "" if stage.resumable_step else ": nothing was saved"
            is_last_step_saved = stage.resumable_step == stage.step_and_total[1]
            progress_message = (
                "has saved its last step" if is_last_step_saved else f"begins again at step {stage.resumable_step + 1}"
            )
            resume_messages.append(f"{stage.name} {progress_message}{unsaved_note}")
    return f" ({'; '.join(resume_messages)})" if resume_messages else ""


def _get_last_step(stage: StageRecord) -> int:
    return stage.step_and_total[0] or stage.resumable_step
