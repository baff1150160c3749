"""Prepared rows as readable lines that show which tokens are learned and which are masked."""

from itertools import groupby
from operator import itemgetter
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from cosmos_core.data.kinds.base import LOCATION_COLUMN, TRAIN
from cosmos_core.data.prepared import open_table


def preview_rows(folder: Path, tokenizer: PreTrainedTokenizerBase, num_rows: int) -> list[str]:
    """Return lines that show the first training rows, one line per run of learned or masked tokens.

    Raises:
        DataError: the file of the training split is missing or damaged.
    """
    table = open_table(folder, TRAIN)
    columns = [name for name in table.column_names if name not in {"images", "prompt_text"}]
    lines = []
    for row in table.select(columns).slice(0, num_rows).to_pylist():
        lines.append(f"{row[LOCATION_COLUMN]}:")
        for name in [name for name in columns if name.endswith("_ids")]:
            ids, sequence_name = row[name], name.removesuffix("_ids")
            mask = row.get("loss_mask" if sequence_name == "input" else f"{sequence_name}_mask") or [0] * len(ids)
            for is_learned, token_run in groupby(zip(mask, ids, strict=True), key=itemgetter(0)):
                text = str(tokenizer.decode([token_id for _, token_id in token_run]))
                prefix = "" if sequence_name == "input" else f"{sequence_name} "
                lines.append(f"  {prefix}{'learned' if is_learned else 'masked'}: {text!r}")
        lines += [f"  {name}: {row[name]!r}" for name in ("label", "reference") if name in row]
    return lines
