"""Token sequences with a label that says whether the response is desirable (KTO)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from cosmos_core.config.schema.policy import PolicyConfig
from cosmos_core.data.kinds.base import RowKind, StepSeed
from cosmos_core.data.kinds.sequences import Sequences, SequencesKind
from cosmos_core.data.messages import Row
from cosmos_core.data.preferences import read_label, read_labelled_conversation
from cosmos_core.data.prepared import get_split_path, open_table
from cosmos_core.data.records import Record, RecordSpec
from cosmos_core.data.sample import Sample, swap_responses


class LabelledSequences(Sequences):
    """Token sequences to learn, each with a label that says whether its response is desirable."""

    has_sample_pairs = True

    def __init__(self, table: pa.Table, path: Path, max_tokens: int) -> None:
        super().__init__(table, path)
        self.labels: np.ndarray = table["label"].to_numpy()
        """Label of each row: True if its completion is desirable."""
        self._max_tokens = max_tokens

    def samples(self, row_ids: Sequence[int], seed: StepSeed = None, micro_batch: int | None = None) -> list[Sample]:
        """Return a sample for each row number in `row_ids`; the reward of a sample is the row's label. For held-out
        rows (`seed` is None), each sample is followed by a mismatched sample: the same prompt with the response of
        another row of `row_ids`."""
        indexed_samples = zip(row_ids, super().samples(row_ids, seed, micro_batch), strict=True)
        labelled_samples = [replace(sample, reward=float(self.labels[i])) for i, sample in indexed_samples]
        if seed is not None:
            return labelled_samples
        mismatched_samples = swap_responses(labelled_samples, self._max_tokens)
        pairs = [sample for pair in zip(labelled_samples, mismatched_samples, strict=True) for sample in pair]
        logprobs = np.zeros(len(pairs))
        if self.reference_logprobs is not None:
            logprobs = self.reference_logprobs[list(row_ids)].ravel()
        return [replace(sample, reference_logprob=float(value)) for sample, value in zip(pairs, logprobs, strict=True)]


class LabelledKind(SequencesKind):
    """Kind of rows that are token sequences to learn, each with a label that says whether its response is desirable."""

    name = "labelled"
    rows_purpose = "with a label (KTO)"
    columns: ClassVar[dict[str, pa.DataType]] = {"label": pa.bool_(), **SequencesKind.columns}
    read_row_fn = staticmethod(read_labelled_conversation)
    held_out_row_kinds = RowKind.held_out_row_kinds

    def open(self, folder: Path, split: str, model: PolicyConfig, adapter: Any = None) -> LabelledSequences:
        return LabelledSequences(open_table(folder, split, self), get_split_path(folder, split), model.model_max_length)

    def make_record(self, tokenizer: PreTrainedTokenizerBase, row_spec: RecordSpec, row: Row, location: str) -> Record:
        label, record = read_label(row, location), super().make_record(tokenizer, row_spec, row, location)
        return record._replace(values=(label, *record.values))
