"""`[train.train_policy]` with `type = "sft"` of a diffusion model: supervised flow matching."""

from typing import Annotated, ClassVar

from cosmos_core.config.schema.marks import NamedThing, SupportedValues
from cosmos_core.config.schema.supervised import SupervisedConfig
from cosmos_core.config.schema.value_types import NameOrImportPath


class DiffusionSftConfig(SupervisedConfig):
    """`type = "sft"` with `policy.is_diffusers`: train on images or clips with their prompts, at the noise levels that
    `[policy.diffusers]` defines."""

    algorithm: ClassVar[str] = "diffusion_sft"
    rows: ClassVar[str] = "media"
    modalities: ClassVar[tuple[str, ...]] = ("diffusion",)

    trainer_type: Annotated[
        NameOrImportPath,
        SupportedValues(("diffusion_sft",), "this version trains with 'diffusion_sft'", takes_import_paths=True),
        NamedThing.CODE,
    ] = "diffusion_sft"
    """Algorithm: `diffusion_sft`, also written `sft`, or a user class `path/file.py:Class`."""
