"""`[profiler]`: traces of training steps."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from cosmos_core.config.schema.table import NonNegativeInt, PositiveInt, Table, Unit, planned, unsupported

_TRACE = planned("the profiler is not in this version; leave [profiler] out")


class SubProfilerConfig(Table):
    """`[profiler.sub_profiler_config]`: schedule of torch.profiler."""

    switch = "do_profile"

    do_profile: Annotated[bool, _TRACE] = False
    """Profile from the start."""
    active_steps: Annotated[PositiveInt, Unit("train steps"), _TRACE] = 1
    """Recorded."""
    warmup_steps: Annotated[NonNegativeInt, Unit("train steps"), _TRACE] = 1
    """Traced and thrown away."""
    wait_steps: Annotated[NonNegativeInt, Unit("train steps"), _TRACE] = 1
    """Not traced."""
    rank_filter: Annotated[tuple[NonNegativeInt, ...], Field(strict=False), _TRACE] = ()
    """Ranks that record; empty: rank 0."""
    record_shape: Annotated[bool, _TRACE] = False
    """Record shapes."""
    profile_memory: Annotated[bool, _TRACE] = False
    """Record memory."""
    with_stack: Annotated[bool, _TRACE] = False
    """Record the Python stack."""
    with_modules: Annotated[bool, _TRACE] = False
    """Record modules."""


class ProfilerConfig(Table):
    """`[profiler]`"""

    enable_profiler: Annotated[bool, _TRACE] = False
    """Allow profiling."""
    enable_nsys: Annotated[bool, unsupported("start the worker under nsys yourself, with [pipeline] python")] = False
    """Start workers under Nsight Systems."""
    sub_profiler_config: SubProfilerConfig = SubProfilerConfig()
    """Schedule."""
