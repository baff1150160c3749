"""The order in which stages can run."""

from __future__ import annotations

from collections.abc import Sequence

from cosmos_core.config.schema.pipeline import StageConfig


def in_order(stages: Sequence[StageConfig]) -> list[StageConfig]:
    """Each stage behind those in its `after`, otherwise as they are given.

    Raises:
        ValueError: they form a cycle; the message shows it.
    """
    done: list[StageConfig] = []
    waiting = list(stages)
    while waiting:
        names = {stage.name for stage in done}
        ready = [stage for stage in waiting if set(stage.after) <= names]
        if not ready:
            raise ValueError(f"the stages form a cycle: {' -> '.join(_cycle(waiting))}")
        done.append(ready[0])
        waiting.remove(ready[0])
    return done


def _cycle(stages: Sequence[StageConfig]) -> list[str]:
    after = {stage.name: stage.after for stage in stages}
    path = [stages[0].name]
    while True:
        following = next(name for name in after[path[-1]] if name in after)
        if following in path:
            return [*path[path.index(following) :], following][::-1]
        path.append(following)
