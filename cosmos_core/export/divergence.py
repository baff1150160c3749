"""Divergence of a quantised model from the exported model: KL(exported || quantised) of the next token, in nats.

Each model is loaded in a separate Python process, by vLLM or by transformers, and computes the log-probabilities of the
whole vocabulary at each position of some rows. Temporary files hold the log-probabilities of the exported model.

Shape legend: T positions of a row that predict a token, V vocabulary.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from cosmos_core.data.kinds.base import TRAIN_SPLIT, VALIDATION_SPLIT
from cosmos_core.data.prepared import RowImages, has_split, open_table
from cosmos_core.errors import DataError, StageFailed
from cosmos_core.export.gguf import GGUF_FILE
from cosmos_core.models.verify_export import select_auto_class
from cosmos_core.rollout.vllm_logits import compute_prompt_logits

TokenIds = list[int]

MAX_COMPARED_ROWS, MAX_COMPARED_TOKENS = 32, 128
"""Maximum number of rows on which a quantised model is compared, and maximum number of tokens of such a row."""


class Divergence(NamedTuple):
    """Result of comparing a quantised model with the exported model on rows of text."""

    kl: float
    """KL(exported || quantised), mean over tokens, in nats."""
    standard_error: float
    """Standard error of `kl` in nats, estimated from the mean divergence of each row."""
    top_token_agreement: float
    """Fraction of positions at which the quantised and the exported model predict the same most likely token."""
    uniform_kl: float
    """KL(exported || uniform distribution) in nats per token, an upper bound for `kl` of a working model."""
    num_tokens: int


def load_text_rows(folder: Path, max_length: int) -> tuple[str, list[TokenIds]]:
    """Return the name of the held-out split, or of the training split if no rows are held out, and the token ids of the
    split's first rows without images. Rows are truncated to fewer tokens than `max_length`, the model's maximum. Raise
    `DataError` if the folder has no prepared rows of text."""
    split_name = VALIDATION_SPLIT if has_split(folder, VALIDATION_SPLIT) else TRAIN_SPLIT
    rows_table = open_table(folder, split_name)
    id_columns = [name for name in rows_table.column_names if name.endswith("_ids")]
    id_rows = rows_table[id_columns[0]] if id_columns else ()
    ids_and_image_counts = zip(id_rows, RowImages(rows_table).num_images, strict=False)
    token_id_rows = (ids.as_py() for ids, num_images in ids_and_image_counts if not num_images)
    truncated_token_ids = (row[: min(MAX_COMPARED_TOKENS, max_length - 1)] for row in token_id_rows if len(row) > 1)
    compared_token_ids = list(islice(truncated_token_ids, MAX_COMPARED_ROWS))
    if not compared_token_ids:
        raise DataError(f"{folder} has no rows of text with which exports could be compared; set data of the export")
    return split_name, compared_token_ids


def save_logprobs(model_folder: Path, use_vllm: bool, rows: Sequence[TokenIds], target_folder: Path) -> None:
    """Compute a model's log-probabilities (tokens, vocabulary) for each row with vLLM or transformers, and write them
    to `target_folder`."""
    target_folder.mkdir()
    for row_index, logprobs_TV in enumerate(_compute_logprobs(model_folder, use_vllm, rows)):
        np.save(target_folder / f"{row_index}.npy", logprobs_TV.numpy())


def measure_divergence(folder: Path, use_vllm: bool, rows: Sequence[TokenIds], reference_folder: Path) -> Divergence:
    """Return the divergence of the quantised model in `folder` from the exported model, whose log-probabilities are in
    `reference_folder`. Raise `StageFailed` if the divergence is not less than that of a uniform distribution: the
    quantised model is broken."""
    kl_sum_by_row, token_counts, sum_of_uniform_kl, num_same_top_tokens = [], [], 0.0, 0
    for row_index, logprobs_TV in enumerate(_compute_logprobs(folder, use_vllm, rows)):
        reference_logprobs_TV = torch.from_numpy(np.load(reference_folder / f"{row_index}.npy")).double()
        kl_per_token_T = (reference_logprobs_TV.exp() * (reference_logprobs_TV - logprobs_TV.double())).sum(-1)
        entropy_T = -(reference_logprobs_TV.exp() * reference_logprobs_TV).sum(-1)
        kl_sum_by_row.append(float(kl_per_token_T.sum()))
        token_counts.append(len(kl_per_token_T))
        sum_of_uniform_kl += float((math.log(reference_logprobs_TV.shape[-1]) - entropy_T).sum())
        num_same_top_tokens += int((reference_logprobs_TV.argmax(-1) == logprobs_TV.argmax(-1)).sum())
    num_tokens = sum(token_counts)
    row_mean_kls = np.array(kl_sum_by_row) / np.array(token_counts)
    standard_error = float(row_mean_kls.std(ddof=1) / math.sqrt(len(row_mean_kls))) if len(row_mean_kls) > 1 else 0.0
    kl, uniform_kl = sum(kl_sum_by_row) / num_tokens, sum_of_uniform_kl / num_tokens
    divergence = Divergence(kl, standard_error, num_same_top_tokens / num_tokens, uniform_kl, num_tokens)
    if not divergence.kl < divergence.uniform_kl:  # unlike `>=`, `not <` is also True for NaN
        divergence_text = f"its divergence from the exported model is {divergence.kl:.3g} nats per token"
        uniform_kl_text = f"that of the uniform distribution {divergence.uniform_kl:.3g}: it is another model"
        raise StageFailed(f"{divergence_text}, {uniform_kl_text}")
    return divergence


def _compute_logprobs(model_folder: Path, use_vllm: bool, rows: Sequence[TokenIds]) -> Iterator[Tensor]:
    """Yield for each row the log-probabilities of the next token at all positions but the last, float32 (positions,
    vocabulary)."""
    logits_by_row = (
        compute_prompt_logits(model_folder, rows) if use_vllm else _compute_transformers_logits(model_folder, rows)
    )
    return (logits_TV.float().log_softmax(-1) for logits_TV in logits_by_row)


@torch.no_grad()
def _compute_transformers_logits(model_folder: Path, rows: Sequence[TokenIds]) -> Iterator[Tensor]:
    gguf_options = {"gguf_file": GGUF_FILE} if (model_folder / GGUF_FILE).exists() else {}
    model_class: Any = select_auto_class(AutoConfig.from_pretrained(model_folder, **gguf_options))
    model = model_class.from_pretrained(model_folder, dtype="auto", **gguf_options).eval()
    for row in rows:
        yield model(input_ids=torch.tensor([row]), use_cache=False).logits[0, :-1]
