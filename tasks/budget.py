"""Stop the stages of a run, with a checkpoint, when its GPU hours have used up the budget."""

import time

from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.errors import OverBudget, Preempted
from cosmos_core.launch.gpus import count_reserved_gpus
from cosmos_core.observe.resuming import make_resume_command
from cosmos_core.run.directory import Run, read_start_info
from cosmos_core.run.gpu_time import compute_run_gpu_seconds

_BUDGET_CHECK_PERIOD_SECONDS = 2.0  # interval in seconds between two computations of the GPU hours of the run


class BudgetCheck:
    """Check of the run's budget for one stage. A stage that holds no GPUs costs nothing and is never stopped."""

    def __init__(self, run: Run, stage: StageConfig) -> None:
        self._run = run
        pipeline_config, recipe = run.pipeline.config, run.pipeline.recipes[stage.name]
        has_budget = pipeline_config.budget is not None and count_reserved_gpus(run.pipeline.stage_kind(stage), recipe)
        self._budget_limit = pipeline_config.budget if has_budget else None
        self._price_per_gpu_hour = pipeline_config.price_per_gpu_hour or 0.0
        self._next_check_time = 0.0

    def find_budget_error(self) -> Preempted | None:
        """Return the error that stops the stage, or None if the budget is not spent. The GPU hours are computed at most
        every two seconds; a call in between returns None."""
        if self._budget_limit is None or time.monotonic() < self._next_check_time:
            return None
        self._next_check_time = time.monotonic() + _BUDGET_CHECK_PERIOD_SECONDS
        gpu_hours = compute_run_gpu_seconds(self._run.path) / 3600
        if (run_cost := gpu_hours * self._price_per_gpu_hour) < self._budget_limit:
            return None
        start_info = read_start_info(self._run.path)
        continue_hint = f"{make_resume_command(self._run.path)} --budget AMOUNT"
        if start_info and start_info.entrypoint:
            continue_hint = "raise it in configure_run, and run the flow again"
        return OverBudget(
            f"run {self._run.id}: budget = {self._budget_limit:g} is spent: {gpu_hours:.4g} GPU hours at "
            f"{self._price_per_gpu_hour:g} cost {run_cost:.4g}; to continue: {continue_hint}"
        )

    def raise_if_spent(self) -> None:
        """Raise `OverBudget` if the budget is spent, so that the stage does not start or does not continue."""
        if error := self.find_budget_error():
            raise error
