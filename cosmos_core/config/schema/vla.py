"""`[vla]`: vision-language-action training, which this project does not do."""

from __future__ import annotations

from typing import Annotated, Literal

from cosmos_core.config.schema.table import LATER, PositiveInt, Table, unsupported

_NEVER = unsupported("vision-language-action training is not what this project is for; leave [vla] out")


class VLAConfig(Table):
    """`[vla]`"""

    vla_type: Annotated[Literal["openvla-oft", "openvla", "cosmos-policy", "pi05"], _NEVER, LATER] = "openvla-oft"
    """Model family."""
    num_envs: Annotated[PositiveInt, _NEVER, LATER] = 1
    """Simulators per rollout worker."""
    use_proprio: Annotated[bool, _NEVER, LATER] = False
    """Feed proprioception."""
    proprio_dim: Annotated[PositiveInt, _NEVER, LATER] = 7
    """Its size."""
    num_images_in_input: Annotated[PositiveInt, _NEVER, LATER] = 1
    """Camera views."""
    training_chunk_size: Annotated[PositiveInt, _NEVER, LATER] = 16
    """Actions per micro-batch."""
    save_video: Annotated[bool, _NEVER, LATER] = False
    """Keep episodes."""
    continuous: Annotated[bool, _NEVER, LATER] = False
    """Continuous actions."""
    trace_verbosity: Annotated[int, _NEVER, LATER] = 1
    """Tracing."""
    unnorm_key: Annotated[str, _NEVER, LATER] = "libero_10_no_noops"
    """Statistics to de-normalise actions."""
    max_steps: Annotated[PositiveInt | None, _NEVER, LATER] = None
    """Episode length; None: the simulator's."""
    use_subprocess: Annotated[bool | None, _NEVER, LATER] = None
    """Simulators in processes of their own; None: the simulator decides."""
