"""Model card of a published model: the card of the exported model with metrics and origin, added at publication."""

from pathlib import Path
from typing import Any


def with_metrics(card: Path, record: dict[str, Any]) -> str:
    """Return the text of a model card with the version of the model, its metrics and the digests of its inputs."""
    text = card.read_text(encoding="utf-8").rstrip() if card.is_file() else "---\nlibrary_name: transformers\n---"
    lines = [text, "", f"## Published as `{record.get('version', '')}`", ""]
    lines += [f"- from stage `{name}`: `{digest}`" for name, digest in sorted(record.get("inputs", {}).items())]
    if metrics := record["metrics"]:
        lines += ["", "| metric | value |", "|---|---|"]
        lines += [f"| {key} | {value:.4g} |" for key, value in sorted(metrics.items())]
    return "\n".join(lines) + "\n"
