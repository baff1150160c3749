"""`[train.train_policy]` with `type = "sft"`: supervised fine-tuning."""

from typing import Annotated, ClassVar

from cosmos_core.config.schema.algorithm import RowKind
from cosmos_core.config.schema.marks import Only, Where
from cosmos_core.config.schema.supervised import SupervisedConfig
from cosmos_core.config.schema.values import Thing


class SftConfig(SupervisedConfig):
    """`type = "sft"`: learn the assistant's turns of conversations, or all of plain text."""

    algorithm: ClassVar[str] = "sft"
    rows: ClassVar[RowKind] = "sequences"

    trainer_type: Annotated[
        Thing, Only(("sft",), "this version trains with 'sft' and 'dpo'", takes_import_paths=True), Where.CODE
    ] = "sft"
    """The algorithm: `sft`, `dpo` (rows are a prompt with a chosen and a rejected response), or `path/file.py:Class` of
    your own."""
