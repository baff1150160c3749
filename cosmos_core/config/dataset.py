"""`[train.train_policy.dataset]` and `[validation.dataset]`: where rows come from."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from cosmos_core.config.table import Names, NoResult, Table


class DatasetConfig(Table):
    """A local file or folder, or the name of a data set on the Hugging Face Hub."""

    name: Annotated[str, NoResult] = ""
    """Path of a .jsonl, .json, .parquet, .arrow or .csv file, a folder of them, a `save_to_disk` folder, or a Hub id;
    the fingerprint takes its content."""
    subset: str = ""
    """Configuration name on the Hub; empty: the default one."""
    revision: str = ""
    """Commit, tag or branch on the Hub; empty: the newest."""
    split: Names = ("train",)
    """Split or list of splits, concatenated in this order; a single local file has only `train`."""
    test_size: int | float | None = Field(default=None)
    """Rows split off for validation when `validation.dataset.name` is empty: a count, or a fraction below 1. None: no
    split."""

    @model_validator(mode="after")
    def _test_size_in_range(self) -> DatasetConfig:
        size = self.test_size
        if (
            isinstance(size, bool)
            or (isinstance(size, float) and not 0 < size < 1)
            or (isinstance(size, int) and size < 1)
        ):
            raise ValueError(f"test_size = {size} must be a count of at least 1 or a fraction between 0 and 1")
        return self
