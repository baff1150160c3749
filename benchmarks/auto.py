"""How near the settings that `auto` chooses are to the fastest of all: `mini_batch` and `num_threads`, on a CPU.

    python -m benchmarks.auto [--case short ragged ...] [--rounds 2]

For each case the settings are chosen as a training chooses them, in its first step. Then every setting of the grid is
measured `--rounds` times, in turns, and the fastest one and the chosen one ten times more, since the least of many
measurements on a busy machine is too low. Printed are what was chosen, how long that took, what is fastest, and the
median seconds of a gradient with the chosen settings, and with the default ones, over those with the fastest ones.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

from cosmos_core.algorithms.grpo import Grpo
from cosmos_core.algorithms.sft import Sft
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.data.sample import Sample
from cosmos_core.models.causal_lm import CausalLM, InputProcessing
from cosmos_core.run.workspace import Workspace
from cosmos_core.train.feeds import SampleFeed
from cosmos_core.train.trainer import SpeedSettings, Trainer
from cosmos_core.train.tuning import SpeedTuning, _Measurement

LengthFn = Callable[[np.random.Generator], int]


@dataclass(frozen=True)
class Case:
    """A model, and the rows of an optimizer step."""

    num_rows: int
    length: LengthFn
    hidden: int = 256
    layers: int = 4
    vocabulary: int = 2048
    prompt: int = 0
    """Tokens of a prompt that eight rows share; 0: the rows of SFT, which share nothing."""
    train: dict[str, Any] = field(default_factory=dict)

    def samples(self) -> list[Sample]:
        """Return the rows of the step."""
        random, found = np.random.default_rng(0), []
        for row in range(self.num_rows):
            if row % 8 == 0:
                prompt = random.integers(0, self.vocabulary, self.prompt)
            length = self.length(random)
            ids = np.concatenate([prompt, random.integers(0, self.vocabulary, length)])
            mask = np.concatenate([np.zeros(len(prompt), dtype=np.uint8), np.ones(length, dtype=np.uint8)])
            found.append(Sample(ids, mask, float(random.normal()), 1.0, -random.random(length).astype(np.float32)))
        return found

    def tuning(self, folder: Path) -> SpeedTuning:
        """Return the choice of the settings of a training of the case."""
        kind = "grpo" if self.prompt else "sft"
        values = {
            "param_dtype": "float32",
            "train_batch_per_replica": self.num_rows,
            "num_threads": "auto",
            **self.train,
        }
        train = TrainConfig.model_validate({**values, "train_policy": {"type": kind, "mini_batch": "auto"}})
        model = Qwen3ForCausalLM(
            Qwen3Config(  # type: ignore[call-arg]
                vocab_size=self.vocabulary, hidden_size=self.hidden, intermediate_size=3 * self.hidden,
                num_hidden_layers=self.layers, num_attention_heads=self.hidden // 32, head_dim=32,
                num_key_value_heads=self.hidden // 64, max_position_embeddings=2048, attn_implementation="sdpa",
            )
        )  # fmt: skip
        workspace = Workspace(folder)
        trainer = Trainer(CausalLM(model, train, InputProcessing(0)), train, workspace.progress)
        make_algorithm: Any = Grpo if self.prompt else Sft
        algorithm = make_algorithm(train.train_policy)
        algorithm.has_separate_gradients = True
        return SpeedTuning(trainer, SampleFeed(), algorithm, train, workspace)


def evenly(low: int, high: int) -> LengthFn:
    """Return a function that draws lengths between two."""
    return lambda random: int(random.integers(low, high + 1))


CASES = {
    "tiny": Case(64, evenly(24, 32), hidden=64, layers=2),
    "short": Case(64, evenly(24, 32)),
    "ragged": Case(32, evenly(20, 400)),
    "padded": Case(32, evenly(20, 400), train={"sequence_packing": False}),
    "long": Case(8, evenly(900, 1024)),
    "vocabulary": Case(16, evenly(40, 60), layers=2, vocabulary=151_936),
    "half": Case(16, evenly(100, 200), train={"param_dtype": "bfloat16"}),
    "prompts": Case(32, evenly(16, 64), prompt=256),
    "completions": Case(64, evenly(1, 256), prompt=16, train={"sequence_packing": False}),
}


def measure_grid(tuning: SpeedTuning, measurement: _Measurement, rounds: int) -> dict[SpeedSettings, float]:
    """Return the least seconds of every setting, by settings."""
    seconds: dict[SpeedSettings, list[float]] = {}
    grid = [SpeedSettings(*values) for values in itertools.product(tuning._row_counts, tuning._thread_counts)]
    for settings in grid * rounds:
        seconds.setdefault(settings, []).append(measurement.measure(settings))
    return {settings: min(values) for settings, values in seconds.items()}


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    torch.manual_seed(0)
    table = Table("case", "chosen", "after, s", "fastest", "of settings", "chosen / fastest", "default / fastest")
    for name in options.case:
        case, folder = CASES[name], Path(tempfile.mkdtemp())
        samples, tuning = case.samples(), case.tuning(folder)
        _, metrics = tuning.choose(samples)
        chosen = SpeedSettings(int(metrics["tuning/rows_per_pass"]), int(metrics["tuning/num_threads"]))
        measurement = _Measurement(tuning, samples)
        seconds = measure_grid(tuning, measurement, options.rounds)
        default = SpeedSettings(2, tuning._thread_counts[-1])
        fastest = min(seconds, key=lambda settings: seconds[settings])
        rivals: dict[SpeedSettings, list[float]] = {settings: [] for settings in (fastest, chosen, default)}
        for settings in [*rivals] * 10:
            rivals[settings].append(measurement.measure(settings))
        medians = {settings: statistics.median(values) for settings, values in rivals.items()}
        table.add_row(
            name, f"{chosen[0]}, {chosen[1]}", f"{metrics['time/tuning']:.0f}", f"{fastest[0]}, {fastest[1]}",
            str(len(seconds)), f"{medians[chosen] / medians[fastest]:.2f}",
            f"{medians[default] / medians[fastest]:.2f}",
        )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
