"""Metric sink for Weights & Biases, one run per stage: it sends metrics, settings, and the images and videos that a
diffusion model generated from held-out prompts, but neither code nor machine statistics."""

from typing import Any

from cosmos_core.environment import mask_settings
from cosmos_core.observe import gallery
from cosmos_core.observe.sinks.base import name_tracking_run, select_numeric_metrics
from cosmos_core.run.stage import Stage

_INIT_TIMEOUT_SECONDS = 30.0


class WandbSink:
    """Metric sink that writes to one run on Weights & Biases; `WANDB_API_KEY`, `WANDB_BASE_URL` and `WANDB_MODE` select
    the account, the server and the mode.

    A resumed stage continues its run from the step that the server has. In offline mode each attempt leaves a folder
    with all steps so far; upload the newest folder with `wandb sync`.
    """

    package = "wandb"

    def __init__(self, stage: Stage, first_step: int) -> None:
        import wandb

        self._stage_path, self._media_log_interval = stage.path, stage.recipe.logging.multi_modal_log_interval
        project, group_name, name, run_identifier = name_tracking_run(stage, "wandb")
        self._run = wandb.init(
            project=project, group=group_name, job_type=stage.kind.name, name=name, id=run_identifier,
            resume="allow", config=mask_settings(stage.recipe.model_dump()), dir=str(stage.path),
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, disable_code=True, save_code=False, x_disable_stats=True,
                x_disable_machine_info=True, x_save_requirements=False, init_timeout=_INIT_TIMEOUT_SECONDS,
            ),
        )  # fmt: skip
        self.starting_step = self._newest_step = int(self._run.starting_step)

    def log(self, line: dict[str, Any]) -> None:
        """Send one line of `metrics.jsonl`. wandb accepts no step below the newest step, so metrics of a late
        validation are sent with the newest step, and their own step as `validation/step`."""
        step = line["step"]
        validation_step_metric = {"validation/step": step} if step < self._newest_step else {}
        self._newest_step = max(self._newest_step, step)
        metrics = {**select_numeric_metrics(line), **validation_step_metric, **self._load_validation_media(step)}
        self._run.log(metrics, step=self._newest_step)

    def _load_validation_media(self, step: int) -> dict[str, Any]:
        """Return the images and videos that were generated from held-out prompts after a train step. Empty if none were
        generated, or if `logging.multi_modal_log_interval` is set and the step is not a multiple of it."""
        import wandb

        folder = gallery.get_step_folder(self._stage_path, step)
        if (self._media_log_interval and step % self._media_log_interval) or not (folder / gallery.GRID_FILE).is_file():
            return {}
        logged_media: dict[str, Any] = {"validation/drawings": wandb.Image(str(folder / gallery.GRID_FILE))}
        if videos := sorted(folder.glob(f"*{gallery.VIDEO_SUFFIX}")):
            logged_media["validation/videos"] = [wandb.Video(str(path), format="mp4") for path in videos]
        return logged_media

    def close(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)
