"""`[train.hooks]`: functions of the user's own at points of a training."""

from typing import Annotated, Literal

from cosmos_core.config.schema.marks import NoResult, Where
from cosmos_core.config.schema.table import Table
from cosmos_core.config.schema.values import Thing

Hook = Annotated[Thing | Literal[""], NoResult, Where.CODE]


class HooksConfig(Table):
    """Each `path/file.py:function`, called on every rank as `f(stage, report_data)`; empty: none. One that raises ends
    the training. They change no result that is looked at: a changed hook does not train again."""

    pre_training_hook: Hook = ""
    """Before the first step of an attempt; `start_step` and `total_steps` (None: not known beforehand)."""
    pre_training_step_hook: Hook = ""
    """Before each train step, its samples at hand; `current_step`, counted from 1, and `total_steps`."""
    post_training_step_hook: Hook = ""
    """Behind each; with its metrics beside."""
    post_training_hook: Hook = ""
    """Behind the last step; `final_step`, `total_steps` and the last metrics."""
    pre_validation_hook: Hook = ""
    """Before each validation; `current_step`."""
    post_validation_hook: Hook = ""
    """Behind each; with its metrics beside."""
    load_checkpoint_hook: Hook = ""
    """When a training goes on from a checkpoint; `step`."""
    save_checkpoint_hook: Hook = ""
    """When one is taken, before it is on disk; `step`."""
