"""`[train.train_policy]` with `type = "sft"`: supervised fine-tuning."""

from typing import Annotated, ClassVar, Self

from pydantic import model_validator

from cosmos_core.config.schema.field_metadata import ReferenceKind, SupportedValues
from cosmos_core.config.schema.supervised import SupervisedConfig
from cosmos_core.config.schema.value_types import NameOrImportPath

_TRAINER_TYPES = SupportedValues(("sft",), "this version trains with 'sft', 'dpo' and 'kto'", takes_import_paths=True)


class SftConfig(SupervisedConfig):
    """`type = "sft"`: learn the assistant's turns of conversations, or all of plain text."""

    algorithm: ClassVar[str] = "sft"
    rows: ClassVar[str] = "sequences"
    reports_rewards: ClassVar[bool] = False

    trainer_type: Annotated[NameOrImportPath, _TRAINER_TYPES, ReferenceKind.CODE] = "sft"
    """Algorithm: `sft`, `dpo` (rows are a prompt with a chosen and a rejected response), `kto` (rows are a prompt, a
    response and a label), or a user class `path/file.py:Class`."""
    prompt_column_name: str = ""
    """Column of the prompt, a string or a conversation, in place of `conversation_column_name`; empty: the first column
    that has one of the default names."""
    response_column_name: str = ""
    """Column of the response to the prompt; set it together with `prompt_column_name`."""

    @model_validator(mode="after")
    def _check_column_pair(self) -> Self:
        if bool(self.prompt_column_name) != bool(self.response_column_name):
            columns_text = f"{self.prompt_column_name!r} and response_column_name = {self.response_column_name!r}"
            raise ValueError(f"prompt_column_name = {columns_text}: name both columns, or neither")
        return self
