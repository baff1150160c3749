"""User-defined functions that are called at fixed points of a training: `[train.hooks]`."""

from typing import Any

from cosmos_core.data.user_dataset import convert_user_code_errors
from cosmos_core.errors import ConfigError, CosmosError
from cosmos_core.registry import import_user_code
from cosmos_core.run.stage import Stage


class Hooks:
    """User-defined functions that a stage's recipe names as hooks. Raise `ConfigError` if a hook does not exist or
    raised an error, and `StageFailed` if the error is transient."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._function_by_hook_name = {hook: import_user_code(path) for hook, path in stage.recipe.train.hooks if path}

    def __call__(self, hook_name: str, **hook_data: Any) -> None:
        """Call the hook named `hook_name`, if the recipe sets it."""
        if (function := self._function_by_hook_name.get(hook_name)) is not None:
            with convert_user_code_errors(f"train.hooks.{hook_name}", function, ConfigError, CosmosError):
                function(self._stage, hook_data)
