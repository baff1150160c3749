"""Read the first prepared row of a training for the report, as text with its loss mask.

Only text rows whose tokenizer has a `tokenizer.json` are shown. Neither torch nor transformers is imported.
"""

from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

_MAX_SHOWN_TOKENS = 400


def sample_row(data: Path, models: Iterable[str | Path]) -> list[tuple[str, bool]]:
    """Return the first training row in the folder `data` as texts, each with whether the loss includes its tokens.

    Args:
        data: Folder of prepared rows.
        models: Model folders; the first folder with a `tokenizer.json` decodes the row.

    The result is empty if no folder has a tokenizer, or if the row cannot be read or has no text.
    """
    tokenizer = next((file for name in models if (file := Path(name) / "tokenizer.json").is_file()), None)
    if tokenizer is None or not (row := _read_first_row(data / "train.arrow")):
        return []
    from tokenizers import Tokenizer

    try:
        decode = Tokenizer.from_file(str(tokenizer)).decode
    except Exception:  # noqa: BLE001 - for a damaged file, tokenizers raises the class Exception itself
        return []
    text_segments: list[tuple[str, bool]] = []
    for name in [name for name in row if name.endswith("_ids") and row[name]]:
        column = name.removesuffix("_ids")
        mask = row.get("loss_mask" if column == "input" else f"{column}_mask") or [0] * len(row[name])
        text_segments += [(f"\n{column}: " if text_segments else f"{column}: ", False)] if column != "input" else []
        masked_tokens = list(zip(mask, row[name], strict=False))[:_MAX_SHOWN_TOKENS]
        for is_learned, token_group in groupby(masked_tokens, key=itemgetter(0)):
            text_segments.append(
                (decode([token for _, token in token_group], skip_special_tokens=False), bool(is_learned))
            )
        text_segments += [("…", False)] if len(row[name]) > _MAX_SHOWN_TOKENS else []
    return text_segments


def _read_first_row(file: Path) -> dict[str, Any]:
    """Return token ids and masks in the first row of an Arrow file by column name; empty if it cannot be read."""
    import pyarrow as pa

    try:
        with pa.memory_map(str(file)) as source:
            table = pa.ipc.open_file(source).get_batch(0).slice(0, 1)
            names = [name for name in table.schema.names if name.endswith(("_ids", "_mask"))]
            rows: list[dict[str, Any]] = table.select(names).to_pylist()
    except (OSError, pa.ArrowException, IndexError):
        return {}
    return rows[0] if rows else {}
