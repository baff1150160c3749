"""Divergence of a quantised model from the exported one: KL(exported || quantised) of the next token, in nats.

Each model is loaded in a fresh interpreter, by vLLM or by transformers, and computes the log-probabilities of the whole
vocabulary at each position of some rows. Those of the exported model are kept in files in between.

Shape legend: T positions of a row that predict a token, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from cosmos_core.data.kinds.base import TRAIN, VALIDATION
from cosmos_core.data.prepared import RowImages, has_split, open_table
from cosmos_core.errors import DataError, StageFailed
from cosmos_core.models.verify_export import auto_class
from cosmos_core.rollout.vllm_logits import prompt_logits

Row = list[int]

MOST_ROWS, MOST_TOKENS = 32, 128
"""Maximum number of compared rows, and of tokens of a row."""


class Divergence(NamedTuple):
    """Result of a comparison over rows."""

    kl: float
    """Mean over tokens, in nats."""
    stderr: float
    """Standard error of `kl`, by the differences between rows."""
    same_top: float
    """Fraction of tokens for which both models have the same most likely token."""
    kl_uniform: float
    """Divergence of the uniform distribution from the exported model, which any working model is below."""
    num_tokens: int


def text_rows(folder: Path, max_length: int) -> tuple[str, list[Row]]:
    """Return the compared split of prepared rows, held-out rows if there are any, and token ids of its first rows.

    Rows that show images are left out, and rows are cut to fewer than `max_length` tokens, of which the model supports
    no more.

    Raises:
        DataError: the folder has no prepared rows of text.
    """
    split = VALIDATION if has_split(folder, VALIDATION) else TRAIN
    table = open_table(folder, split)
    names = [name for name in table.column_names if name.endswith("_ids")]
    counts = RowImages(table).counts
    rows = (ids.as_py() for ids, count in zip(table[names[0]] if names else (), counts, strict=False) if not count)
    texts = (row[: min(MOST_TOKENS, max_length - 1)] for row in rows if len(row) > 1)
    first = [text for _, text in zip(range(MOST_ROWS), texts, strict=False)]
    if not first:
        raise DataError(f"{folder} has no rows of text with which exports could be compared; set data of the export")
    return split, first


def save_logprobs(folder: Path, in_vllm: bool, rows: Sequence[Row], target: Path) -> None:
    """Write the log-probabilities TV of the model in `folder` for each row to the folder `target`.

    `in_vllm`: whether vLLM computes them, rather than transformers.
    """
    target.mkdir()
    for number, logprobs_TV in enumerate(_logprobs(folder, in_vllm, rows)):
        np.save(target / f"{number}.npy", logprobs_TV.numpy())


def compare(folder: Path, in_vllm: bool, rows: Sequence[Row], reference: Path) -> Divergence:
    """Return the divergence of the model in `folder` from that whose log-probabilities are in the folder `reference`.

    Raises:
        StageFailed: the models are no nearer to each other than the exported one is to the uniform distribution.
    """
    sums, counts, uniform, same = [], [], 0.0, 0
    for number, logprobs_TV in enumerate(_logprobs(folder, in_vllm, rows)):
        expected_TV = torch.from_numpy(np.load(reference / f"{number}.npy")).double()
        kl_T = (expected_TV.exp() * (expected_TV - logprobs_TV.double())).sum(-1)
        entropy_T = -(expected_TV.exp() * expected_TV).sum(-1)
        sums.append(float(kl_T.sum()))
        counts.append(len(kl_T))
        uniform += float((math.log(expected_TV.shape[-1]) - entropy_T).sum())
        same += int((expected_TV.argmax(-1) == logprobs_TV.argmax(-1)).sum())
    total = sum(counts)
    means = np.array(sums) / np.array(counts)
    stderr = float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else 0.0
    found = Divergence(sum(sums) / total, stderr, same / total, uniform / total, total)
    if not found.kl < found.kl_uniform:  # `not <`, so that NaN fails too
        raise StageFailed(
            f"its divergence from the exported model is {found.kl:.3g} nats per token, that of the uniform "
            f"distribution {found.kl_uniform:.3g}: it is another model"
        )
    return found


def _logprobs(folder: Path, in_vllm: bool, rows: Sequence[Row]) -> Iterator[Tensor]:
    """Yield the log-probabilities TV, float32, of the next token at all positions of a row but the last."""
    logits = prompt_logits(folder, rows) if in_vllm else _plain_logits(folder, rows)
    return (logits_TV.float().log_softmax(-1) for logits_TV in logits)


@torch.no_grad()
def _plain_logits(folder: Path, rows: Sequence[Row]) -> Iterator[Tensor]:
    cls: Any = auto_class(AutoConfig.from_pretrained(folder))
    model = cls.from_pretrained(folder, dtype="auto").eval()
    for row in rows:
        yield model(input_ids=torch.tensor([row]), use_cache=False).logits[0, :-1]
