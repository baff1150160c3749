"""`[pipeline.stages.sweep]`: a stage once for each point of a grid of settings, and the choice of the best."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from cosmos_core.config.schema.marks import NoResult
from cosmos_core.config.schema.table import Table, flat_keys
from cosmos_core.config.schema.values import Names, PositiveInt

_MOST_BRANCHES = 256


class Branch(Table):
    """`[[pipeline.stages.sweep.branches]]`"""

    stages: Names
    """Its stages, in order: it is judged by the metrics of all, and hands on the model of the last that makes one."""
    settings: Annotated[dict[str, Any], NoResult] = {}
    """Values of the grid for this branch; set automatically."""


class SweepConfig(Table):
    """`[pipeline.stages.sweep]`"""

    grid: dict[str, Any] = {}
    """Lists of values by key, such as `"train.optm_lr" = [1e-5, 3e-5]`; there is a branch for each combination. A key
    is one of the recipe, or `arguments.NAME` of a custom stage, optionally prefixed by the name of a stage in
    `through`."""
    metric: str
    """What the branches are compared by, such as `validation/accuracy`; the last stage of a branch that reports it
    counts."""
    mode: Literal["max", "min"] = "max"
    """Whether the largest or the smallest value is the best; of equal ones the first branch is."""
    through: Names = ()
    """Stages after this one that each branch also has, with all stages in between, such as a `validate` stage."""
    max_parallel: Annotated[PositiveInt | None, NoResult] = None
    """Number of branch stages that run concurrently; None: one, or with a `work_pool` the limit of the pool."""
    branches: Annotated[tuple[Branch, ...], Field(strict=False)] = ()
    """Kind select: the branches to choose from; empty: each stage in its `after` is a branch. Set automatically for a
    grid."""

    @field_validator("grid")
    @classmethod
    def _lists_by_dotted_key(cls, grid: dict[str, Any]) -> dict[str, Any]:
        flat = flat_keys(grid)
        number = 1
        for key, values in flat.items():
            if not isinstance(values, list) or not values:
                raise ValueError(f'grid: "{key}" = {values!r} must be a list of values')
            if any(values.count(value) > 1 for value in values):
                raise ValueError(f'grid: "{key}" = {values!r} names a value twice')
            number *= len(values)
        if number > _MOST_BRANCHES:
            raise ValueError(f"grid: {number} combinations; at most {_MOST_BRANCHES} make a sweep")
        return flat
