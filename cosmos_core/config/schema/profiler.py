"""`[profiler]`: traces of train steps by torch.profiler."""

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from cosmos_core.config.schema.field_metadata import EnabledBy, FieldUnit, ResultNeutral
from cosmos_core.config.schema.table import Table


class SubProfilerConfig(Table):
    """`[profiler.sub_profiler_config]`: settings that select which steps and ranks are traced, and what is recorded."""

    do_profile: Annotated[bool, ResultNeutral] = False
    """Record from the beginning of an attempt of the stage; False: only after `cosmos profile RUN`."""
    active_steps: Annotated[PositiveInt, FieldUnit("train steps"), ResultNeutral] = 1
    """Number of train steps that are recorded."""
    warmup_steps: Annotated[NonNegativeInt, FieldUnit("train steps"), ResultNeutral] = 1
    """Number of train steps that are traced before the recorded steps and discarded, because the first events take
    longer."""
    wait_steps: Annotated[NonNegativeInt, FieldUnit("train steps"), ResultNeutral] = 1
    """Number of steps before the warm-up that are not traced."""
    rank_filter: Annotated[tuple[NonNegativeInt, ...], Field(strict=False), ResultNeutral] = ()
    """Ranks that record a trace; empty: rank 0."""
    record_shape: Annotated[bool, ResultNeutral] = False
    """Record the input shapes of each operator."""
    profile_memory: Annotated[bool, ResultNeutral] = False
    """Record the memory that each operator allocates."""
    with_stack: Annotated[bool, ResultNeutral] = False
    """Record the Python stack of each operator."""


class ProfilerConfig(Table):
    """`[profiler]`: traces of train steps by torch.profiler."""

    enable_profiler: Annotated[bool, ResultNeutral] = False
    """Record `profile/steps_A-B_rank_R.json.gz` in the stage, which Perfetto (ui.perfetto.dev) opens, and the operators
    that took longest, which the report shows."""
    sub_profiler_config: Annotated[SubProfilerConfig, EnabledBy("enable_profiler")] = SubProfilerConfig()
    """Settings that select the train steps and ranks that the profiler records."""
