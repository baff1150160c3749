"""`[train.train_policy.data_term]`: SFT rows that are trained on in addition to rollouts."""

from typing import Annotated

from pydantic import NonNegativeFloat

from cosmos_core.config.schema.dataset import DatasetConfig
from cosmos_core.config.schema.field_metadata import ReferenceKind, ResultNeutral
from cosmos_core.config.schema.table import Table
from cosmos_core.config.schema.value_types import Fraction, RowCount, SplitNames


class DataTermConfig(Table):
    """`[train.train_policy.data_term]`: conversations whose SFT loss is added to every optimizer step of RL, with any
    algorithm and variant. The seed and the step number determine the rows of a step, also if a run is resumed."""

    name: Annotated[str, ResultNeutral, ReferenceKind.PATH] = ""
    """Path, URL or Hub id of a data set of conversations or texts, as in `dataset.name`; empty: no supervised loss is
    added."""
    subset: str = ""
    """Configuration name of the data set on the Hub; empty: the default configuration."""
    revision: str = ""
    """Commit, tag or branch of the data set on the Hub; empty: the newest commit."""
    split: SplitNames = ("train",)
    """Split or list of splits of the data set, concatenated in this order."""
    max_skipped_fraction: Fraction = 0.01
    """Maximum fraction of rows that may be skipped because they cannot be read or the chat template refuses them."""
    conversation_column_name: str = "conversations"
    """Column of the conversation; rows without it may have columns of other known names, which
    docs/reference/columns.md lists. `system_prompt` is added to conversations without a system turn."""
    weight: NonNegativeFloat = 0.0
    """Weight of the mean SFT loss per token relative to the loss of the rollouts; 0: no SFT loss."""
    batch_size: RowCount = 8
    """Number of supervised rows per optimizer step; every row is used once before any row is used again."""

    @property
    def dataset(self) -> DatasetConfig:
        """Return the data set from which the supervised rows are read."""
        return DatasetConfig(**{name: value for name, value in self if name in DatasetConfig.model_fields})
