"""The interface of a kind of rows: how rows of a data set are prepared, and how prepared rows are read.

Each kind is one file of this folder, and an algorithm declares its kind by name (`rows`). Code outside this folder does
not depend on the kind of the rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import pyarrow as pa

from cosmos_core.config.schema.algorithm import AlgorithmConfig
from cosmos_core.config.schema.policy import PolicyConfig
from cosmos_core.config.schema.supervised import SupervisedConfig
from cosmos_core.data.messages import ColumnTrackingRow, Row
from cosmos_core.data.order import Mixture
from cosmos_core.types import Outcome, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from cosmos_core.data.records import Record, RecordSpec
    from cosmos_core.run.stage import Stage

TRAIN_SPLIT, VALIDATION_SPLIT = "train", "validation"
"""Names of the splits with the training rows and with the held-out rows."""
LOCATION_COLUMN = "place"
"""Name of the column of prepared rows with the location that a row was read from: file and line, or row number."""
REFERENCE_BATCH_ROWS = 256
"""Number of rows per batch when log-probabilities are compared with a reference policy. The number is fixed, because
the results depend on the batch: padding changes rounding, and KTO pairs prompts with responses of the same batch."""
StepSeed = tuple[int, int] | None
"""Seed of the data order and number of the train step, from which the random values of samples, such as noise, are
derived. None: the rows are held out, and the random values are the same in each call."""
IDS_TYPE, MASK_TYPE = pa.list_(pa.int32()), pa.list_(pa.uint8())
_IMAGE_TYPE = pa.struct({"path": pa.string(), "content": pa.large_binary(), "sha256": pa.string()})
IMAGE_ROOT_KEY = b"images below"
"""Key in the metadata of a prepared file's Arrow schema; the value is the folder that image paths are relative to."""


class PreparedRows(ABC):
    """Prepared rows of a split, for training or validation; a row is read from its file on access."""

    has_sample_pairs: ClassVar[bool] = False
    """Whether `samples` returns two samples for each held-out row (DPO: chosen and rejected, KTO: matched and
    mismatched), whose log-probabilities are also computed with the reference policy."""
    is_prefetched: ClassVar[bool] = False
    """Whether reading a row takes so long that the rows of the next step are read in advance."""
    reference_logprobs: np.ndarray | None = None
    """Log-probabilities under the reference policy of the two samples of each row, (rows, 2); None: there is no
    reference policy."""
    path: Path
    """Path of the file with the prepared rows."""
    mixture: Mixture | None = None
    """Mixture of data sets that the rows come from; None: all rows are from one data set."""

    def get_source_label(self, row: int) -> str:
        """Return the name of the data set in the mixture from which row number `row` comes; empty if all rows are from
        one data set."""
        return self.mixture.get_source_label(row) if self.mixture else ""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of rows."""

    @abstractmethod
    def samples(self, row_ids: Sequence[int], seed: StepSeed = None, micro_batch: int | None = None) -> list[Any]:
        """Return the samples of the rows with numbers `row_ids`, with random values that are derived from `seed`.
        `micro_batch` is the number of the samples' micro-batch; None: the trainer divides them into micro-batches."""

    def token_counts(self, *, is_packed: bool) -> np.ndarray:
        """Return the number of tokens that each row takes in a packed or padded micro-batch, int64."""
        raise NotImplementedError(type(self).__name__)

    def micro_batches(self, row_ids: np.ndarray, max_rows: int) -> list[list[int]] | None:
        """Divide the rows of an optimizer step into micro-batches of at most `max_rows` rows. Return None if any rows
        can share a micro-batch: the trainer divides such rows."""
        return None


class HeldOutSet(NamedTuple):
    """Held-out rows for validation: rows whose loss is computed, prompts whose completions are scored, or both."""

    rows: PreparedRows | None
    prompts: Sequence[Prompt] | None


class RowKind(ABC):
    """Kind of rows: how rows of a data set are prepared, and how the prepared rows are read."""

    name: ClassVar[str]
    """Name of the kind of rows, which is also the name of its file."""
    rows_purpose: ClassVar[str]
    """What rows of this kind are for, as text for error messages, such as "to learn (SFT)"."""
    columns: ClassVar[dict[str, pa.DataType]]
    """Columns of the prepared file of this kind of rows, without the column with the location of the row."""
    has_media: ClassVar[bool] = False
    """Whether `prepare` encodes images or clips in addition to their prompts."""

    @cached_property
    def schema(self) -> pa.Schema:
        """Arrow schema of the prepared file."""
        return pa.schema({**self.columns, LOCATION_COLUMN: pa.string()}, metadata={b"rows": self.name.encode()})

    @property
    def schema_with_images(self) -> pa.Schema:
        """Arrow schema of prepared rows with the column of images, for rows that can show images."""
        return self.schema.insert(len(self.schema) - 1, pa.field("images", pa.list_(_IMAGE_TYPE)))

    def make_schema(self, image_root: Path | None) -> pa.Schema:
        """Return the Arrow schema of prepared rows whose image paths are relative to `image_root`; `image_root` is None
        if no row shows an image."""
        if image_root is None:
            return self.schema
        return self.schema_with_images.with_metadata({**self.schema.metadata, IMAGE_ROOT_KEY: str(image_root).encode()})

    def held_out_row_kinds(self, *, has_rewards: bool) -> dict[str, str]:
        """Return the name of the kind of rows of each held-out split, by the name of the split. `has_rewards`: whether
        validation scores completions with reward functions."""
        return {VALIDATION_SPLIT: self.name}

    @abstractmethod
    def prepare(self, stage: Stage) -> Outcome:
        """Run a `prepare` stage: convert the rows of its data sets to prepared files."""

    def open(self, folder: Path, split: str, model: PolicyConfig, adapter: Any = None) -> PreparedRows:
        """Open the prepared rows of a split for training. `folder` is the data folder of a `prepare` stage. `adapter`
        is the model's adapter, which only rows of diffusion models need. Raise DataError if the file of the split is
        missing, is damaged or has rows of another kind."""
        raise NotImplementedError(f"{self.name} are not learned")

    def open_prompts(
        self, folder: Path, split: str, algorithm: AlgorithmConfig, model: PolicyConfig
    ) -> Sequence[Prompt]:
        """Open the prepared rows of a split as prompts to complete. Raise DataError if the file of the split is
        missing, is damaged or has rows of another kind."""
        raise NotImplementedError(f"{self.name} are not completed")

    def open_held_out(self, folder: Path, algorithm: AlgorithmConfig, model: PolicyConfig, adapter: Any) -> HeldOutSet:
        """Open the prepared held-out rows. Raise DataError if their file is missing, is damaged or has rows of another
        kind."""
        return HeldOutSet(self.open(folder, VALIDATION_SPLIT, model, adapter), None)


class TokenisedKind(RowKind):
    """A kind of rows of text, which `prepare` tokenises one by one."""

    is_prompt: ClassVar[bool] = False
    """Whether an engine generates completions of the rows, so that rows must be shorter than the maximum length."""
    packer_method_name: ClassVar[str | None] = "sft_process_sample"
    """Method of a user's data packer that converts rows of this kind; None: packers do not apply to the kind."""
    has_one_response: ClassVar[bool] = True
    """Whether a row is one prompt with one response, so that two columns of text can be read as prompt and response."""
    read_row_fn: ClassVar[Callable[..., Any]]
    """Function that reads the conversation, or the prompt with its completions, of one row of a data set; its arguments
    are row, location, column, system prompt and `with_images`."""

    @property
    def token_id_columns(self) -> list[str]:
        """Return the names of the columns with token ids."""
        return [name for name in self.columns if name.endswith("_ids")]

    @property
    def mask_columns(self) -> list[str]:
        """Return the names of the columns with loss masks, in the order of `token_id_columns`."""
        return [name for name in self.columns if name.endswith("_mask")]

    def read(self, row: Row, location: str, algorithm: AlgorithmConfig) -> Any:
        """Read the content of a row as `prepare` does, but without opening images or tokenising, to check a data set
        quickly. Raise DataError if the row lacks a column, or a column has the wrong form, and SkippedRow if the row
        has no content to learn."""
        assert isinstance(algorithm, SupervisedConfig)
        column, system_prompt = algorithm.conversation_column_name, algorithm.system_prompt
        tracked_row = ColumnTrackingRow(row, algorithm.column_names, location)
        return self.read_row_fn(tracked_row, location, column, system_prompt, with_images=True)

    @abstractmethod
    def make_record(self, tokenizer: PreTrainedTokenizerBase, row_spec: RecordSpec, row: Row, location: str) -> Record:
        """Tokenise a row of a data set; return the record to store in the prepared file. Raise DataError for a row that
        cannot be read, and SkippedRow for a row without content to learn or complete."""

    def omits_response(self, row: Row, column: str) -> bool:
        """Return whether training on the text in `column` leaves out a response in another column."""
        return False

    def prepare(self, stage: Stage) -> Outcome:
        """Run a `prepare` stage: tokenise its rows."""
        # Import `prepare` here, because it imports this module: an import at the top of the file would be circular.
        return import_module("cosmos_core.data.prepare").tokenise(stage)
