"""User-defined functions that are called at fixed points of a training: `[train.hooks]`."""

from typing import Any

from cosmos_core.error_handling import convert_errors
from cosmos_core.errors import ConfigError, CosmosError, StageFailed
from cosmos_core.registry import import_user_code, location_of
from cosmos_core.run.stage import Stage
from cosmos_core.transient import is_transient


class Hooks:
    """User-defined functions that a stage's recipe names as hooks.

    Raises:
        ConfigError: a hook does not exist, or it raised an error.
        StageFailed: a hook raised a transient error.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        function_names = {key: name for key, name in stage.recipe.train.hooks if name}
        self._functions = {key: import_user_code(name) for key, name in function_names.items()}

    def __call__(self, key: str, **data: Any) -> None:
        """Call the hook named `key`, if the recipe sets it."""
        if (function := self._functions.get(key)) is None:
            return

        def convert(error: Exception) -> CosmosError:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            kind = StageFailed if is_transient(error) else ConfigError
            return kind(f"train.hooks.{key}: {reason} ({location_of(error, function)})")

        with convert_errors(convert):
            function(self._stage, data)
