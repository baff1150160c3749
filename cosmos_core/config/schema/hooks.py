"""`[train.hooks]`: user functions that are called at points of a training."""

from typing import Annotated, Literal

from cosmos_core.config.schema.field_metadata import ReferenceKind, ResultNeutral
from cosmos_core.config.schema.table import Table
from cosmos_core.config.schema.value_types import NameOrImportPath

HookFunction = Annotated[NameOrImportPath | Literal[""], ResultNeutral, ReferenceKind.CODE]


class HooksConfig(Table):
    """`[train.hooks]`: user functions, each `path/file.py:function`, that are called on every rank as `f(stage,
    report_data)`; empty: no call. An exception ends the training. Hooks are assumed not to change results: a changed
    hook does not cause a new training."""

    pre_training_hook: HookFunction = ""
    """Called before the first step of an attempt of the stage, with `start_step` and `total_steps` (None: unknown)."""
    pre_training_step_hook: HookFunction = ""
    """Called before each train step, when its samples are loaded, with `current_step` (from 1) and `total_steps`."""
    post_training_step_hook: HookFunction = ""
    """Called after each train step, with `current_step`, counted from 1, `total_steps` and the metrics of the step."""
    post_training_hook: HookFunction = ""
    """Called after the last step, with `final_step`, `total_steps` and the last metrics."""
    pre_validation_hook: HookFunction = ""
    """Called before each validation, with `current_step`."""
    post_validation_hook: HookFunction = ""
    """Called after each validation, with `current_step` and the metrics of the validation."""
    load_checkpoint_hook: HookFunction = ""
    """Called when a training continues from a checkpoint, with `step`, the train step of the checkpoint."""
    save_checkpoint_hook: HookFunction = ""
    """Called when a checkpoint is taken, before it is on disk, with `step`, the train step of the checkpoint."""
