"""`[train.train_policy.data_term]`: SFT rows that are trained on in addition to rollouts."""

from typing import Annotated

from cosmos_core.config.schema.dataset import DatasetConfig
from cosmos_core.config.schema.marks import NoResult, Where
from cosmos_core.config.schema.table import Table
from cosmos_core.config.schema.values import Fraction, NonNegativeFloat, Rows, Splits


class DataTermConfig(Table):
    """`[train.train_policy.data_term]`: conversations whose SFT loss is added to every optimizer step of RL, with any
    algorithm and variant. The rows depend only on the seed and the step, so a resumed run uses the same rows."""

    name: Annotated[str, NoResult, Where.PATH] = ""
    """Path, URL or Hub id of rows of conversations or text, as in `dataset.name`; empty: no data term."""
    subset: str = ""
    """Configuration name on the Hub; empty: the default one."""
    revision: str = ""
    """Commit, tag or branch on the Hub; empty: the newest."""
    split: Splits = ("train",)
    """Split or list of splits, concatenated in this order."""
    max_skipped_fraction: Fraction = 0.01
    """Most rows that may be left out because they cannot be read or the chat template refuses them."""
    conversation_column_name: str = "conversations"
    """Column of the conversation; rows without it may have `messages`, `conversation`, `text`, `prompt` + `response`,
    or `instruction` + `input` + `output`. `system_prompt` is added to conversations without a system turn."""
    weight: NonNegativeFloat = 0.0
    """Weight of the mean SFT loss per token relative to the loss of the rollouts; 0: no SFT loss."""
    batch_size: Rows = 8
    """Rows of each optimizer step; every row comes once before any comes again."""

    @property
    def dataset(self) -> DatasetConfig:
        """Return where the rows come from."""
        return DatasetConfig(
            name=self.name,
            subset=self.subset,
            revision=self.revision,
            split=self.split,
            max_skipped_fraction=self.max_skipped_fraction,
        )
