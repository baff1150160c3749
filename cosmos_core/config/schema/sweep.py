"""`[pipeline.stages.sweep]`: run a stage once for each point of a grid of settings, and select the best model."""

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, field_validator

from cosmos_core.config.schema.field_metadata import ResultNeutral
from cosmos_core.config.schema.table import Table, flatten_nonempty_tables
from cosmos_core.config.schema.value_types import StringOrList

_MAX_BRANCHES = 256


class SweepBranch(Table):
    """`[[pipeline.stages.sweep.branches]]`: stages and settings of one branch of a sweep."""

    stages: Annotated[StringOrList, Field(min_length=1)]
    """Stages of the branch, in order: the branch is judged by the metrics of all its stages, and its model is that of
    the last stage which makes one."""
    settings: Annotated[dict[str, Any], ResultNeutral] = {}
    """Values of the grid in this branch; set automatically."""


class SweepConfig(Table):
    """`[pipeline.stages.sweep]`: the grid of settings, and the metric that selects the best branch."""

    grid: dict[str, Any] = {}
    """Lists of values by key, such as `"train.optm_lr" = [1e-5, 3e-5]`; each combination is a branch. A key is a key of
    the recipe, or `arguments.NAME` of a custom stage, optionally with the name of a stage in `through` as a prefix."""
    metric: str
    """Metric by which the branches are compared, such as `validation/accuracy`, from the last stage of a branch that
    reports it."""
    mode: Literal["max", "min"] = "max"
    """Whether the largest or the smallest value is the best; among equal values the first branch wins."""
    through: StringOrList = ()
    """Later stages that are copied into each branch, with all stages in between, such as a `validate` stage."""
    max_parallel: Annotated[PositiveInt | None, ResultNeutral] = None
    """Maximum number of branch stages that run concurrently; None: one, or with a `work_pool` the limit of the pool."""
    branches: Annotated[tuple[SweepBranch, ...], Field(strict=False)] = ()
    """Kind select: the branches to choose from; empty: each stage in its `after` is a branch. A grid sets this key."""

    @field_validator("grid")
    @classmethod
    def _flatten_grid(cls, grid: dict[str, Any]) -> dict[str, Any]:
        flat_grid = flatten_nonempty_tables(grid)
        num_grid_points = 1
        for key, grid_values in flat_grid.items():
            if not isinstance(grid_values, list) or not grid_values:
                raise ValueError(f'grid: "{key}" = {grid_values!r} must be a list of values')
            if any(grid_values.count(value) > 1 for value in grid_values):
                raise ValueError(f'grid: "{key}" = {grid_values!r} names a value twice')
            num_grid_points *= len(grid_values)
        if num_grid_points > _MAX_BRANCHES:
            raise ValueError(f"grid: {num_grid_points} combinations; at most {_MAX_BRANCHES} make a sweep")
        return flat_grid
