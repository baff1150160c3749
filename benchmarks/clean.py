"""Rows a minute and memory of the search for duplicates and for text of a benchmark (`train.train_policy.clean`).

`python -m benchmarks.clean --data gsm8k/train.jsonl --against gsm8k/test.jsonl`: each row has each of its columns from
another row of the data, chosen at random, so that few rows are duplicates. One process searches.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import time
from pathlib import Path

from rich.console import Console

from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.clean import clean_training_rows
from cosmos_core.data.rows import load_rows
from cosmos_core.data.user_dataset import UserDatasetLoader
from cosmos_core.run.stage import Stage
from tasks.stages.prepare import KIND


def main() -> None:
    """Print one line per number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--against", required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 50_000])
    options = parser.parse_args()
    lines = [json.loads(line) for line in Path(options.data).read_text(encoding="utf-8").splitlines()]
    chooser, console = random.Random(0), Console(highlight=False)
    for count in options.rows:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            mixed = ({name: chooser.choice(lines)[name] for name in lines[0]} for _ in range(count))
            text = "".join(json.dumps(row) + "\n" for row in mixed)
            (folder / "rows.jsonl").write_text(text, encoding="utf-8")
            policy = {
                "type": "sft",
                "dataset": {"name": str(folder / "rows.jsonl")},
                "clean": {"decontaminate_against": [options.against], "action": "drop"},
            }
            recipe = Recipe.model_validate({"train": {"train_policy": policy}})
            stage = Stage(folder, StageConfig(name="prepare", kind="prepare"), recipe, "", None, {}, "f", KIND)
            began, busy = time.monotonic(), time.process_time()
            rows = load_rows(recipe.train.train_policy.dataset)
            _, found, _ = clean_training_rows(stage, rows, [], folder, UserDatasetLoader(recipe, lambda: None))
            seconds, busy = time.monotonic() - began, time.process_time() - busy
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        console.print(
            f"{count:,} rows: {60 * count / seconds:,.0f} rows a minute, {60 * count / busy:,.0f} by processor time, "
            f"peak {peak:,.0f} MiB; {found}"
        )


if __name__ == "__main__":
    main()
