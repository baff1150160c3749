"""`[train.train_policy]` with `type = "sft"` of a diffusion model: supervised flow matching."""

from collections.abc import Iterator
from typing import Annotated, ClassVar

from cosmos_core.config.schema.field_metadata import ReferenceKind, SupportedValues
from cosmos_core.config.schema.supervised import SupervisedConfig
from cosmos_core.config.schema.table import StageContext
from cosmos_core.config.schema.value_types import NameOrImportPath

_TRAINER_TYPES = SupportedValues(
    ("diffusion_sft",), "this version trains with 'diffusion_sft'", takes_import_paths=True
)
_TEXT_ROW_KEYS = ("conversation_column_name", "system_prompt", "data_packer", "enable_dp_load_balancing")


class DiffusionSftConfig(SupervisedConfig):
    """`type = "sft"` with `policy.is_diffusers`: train on images or clips with their prompts, at the noise levels that
    `[policy.diffusers]` defines."""

    algorithm: ClassVar[str] = "diffusion_sft"
    rows: ClassVar[str] = "media"
    modalities: ClassVar[tuple[str, ...]] = ("diffusion",)

    trainer_type: Annotated[NameOrImportPath, _TRAINER_TYPES, ReferenceKind.CODE] = "diffusion_sft"
    """Algorithm: `diffusion_sft`, also written `sft`, or a user class `path/file.py:Class`."""

    def unsupported_setting_errors(self, stage: StageContext) -> Iterator[str]:
        yield from super().unsupported_setting_errors(stage)
        for name in filter(self.is_set, _TEXT_ROW_KEYS):
            yield f"train.train_policy.{name} is for rows of text; leave it out for a diffusion model"
