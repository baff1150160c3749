"""`[logging]`: who is told about the metrics. `metrics.jsonl` in the run directory is always written."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from cosmos_core.config.table import NoResult, Table


class LoggingConfig(Table):
    """`[logging]`"""

    logger: Annotated[tuple[str, ...], Field(strict=False), NoResult] = ("console",)
    """Sinks beside the run directory. This version has `console` alone."""

    @field_validator("logger")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        lowered = tuple(name.lower() for name in names)
        for name in lowered:
            if name != "console":
                raise ValueError(f"logger {name!r} is not in this version; known: console")
        return lowered
