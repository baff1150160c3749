"""Rows of plain English for tests of pretrained models, and what transformers says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from cosmos_core.data.kinds.sequences import Sequences

CAPITALS = {
    "France": "Paris", "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima", "Norway": "Oslo", "Kenya": "Nairobi",
    "Italy": "Rome", "Cuba": "Havana", "Spain": "Madrid", "Ghana": "Accra", "Chile": "Santiago", "Greece": "Athens",
}  # fmt: skip


def question(country: str) -> str:
    return f"What is the capital of {country}?"


def write_rows(file: Path, kind: str, count: int = 12) -> Path:
    """Write rows: `chat`, `text` (which needs no chat template) or `pairs`."""
    rows: list[dict[str, Any]] = []
    for country, capital in list(CAPITALS.items())[:count]:
        asked = {"role": "user", "content": question(country)}
        good, bad = f"The capital of {country} is {capital}.", f"{capital} lies in {country}, I believe."
        replies = [[{"role": "assistant", "content": text}] for text in (good, bad)]
        rows.append(
            {
                "chat": {"messages": [asked, *replies[0]]},
                "text": {"text": f"{question(country)} {good}"},
                "pairs": {"prompt": [asked], "chosen": replies[0], "rejected": replies[1]},
            }[kind]
        )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def load(model: Path) -> Any:
    """Load a model in float32."""
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


@torch.no_grad()
def loss_of(model: Path, rows: Sequences, network: Any = None) -> float:
    """The mean loss of the learned tokens of all rows, by transformers alone, row by row in float32."""
    network = network or load(model)
    samples = [rows[i] for i in range(len(rows))]
    count = sum(int(mask[1:].sum()) for _, mask in samples)
    found = 0.0
    for ids, mask in samples:
        labels = torch.tensor(np.where(mask == 1, ids, -100), dtype=torch.long)[None]
        inputs = torch.tensor(ids, dtype=torch.long)[None]
        found += network(inputs, labels=labels, num_items_in_batch=count).loss.item()
    return found
