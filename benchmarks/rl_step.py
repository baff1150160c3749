"""What the arrangement of completions saves in a train step of GRPO: the same step with and without it, in turns.

    python -m benchmarks.rl_step [--case idle padded shared] [--rounds 5] [--hidden 256] [--layers 6]

`idle`: half of the groups have equal rewards, so that their gradient is 0 and they are not run. `padded`: completions
of very different lengths in padded rows (`sequence_packing = false`), cut where lengths change. `shared`: prompts of
1,024 tokens with 8 completions of 64 tokens, each prompt run once for its completions.

Both variants are in one process and take one step after the other, round after round; the processor time of a step is
counted, which other processes on the machine change little. Printed are the medians, their ratio, the tokens that went
through the model, padding included, and how far losses and gradients are apart.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from cosmos_core.algorithms.grpo import Grpo
from cosmos_core.config.schema.grpo import GrpoConfig
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.data.sample import Sample
from cosmos_core.models.causal_lm import CausalLM, InputProcessing
from cosmos_core.run.progress import ProgressWriter
from cosmos_core.train.trainer import Trainer

VOCABULARY, GROUP, GROUPS, MINI_BATCH = 2048, 8, 4, 16
CASES = ("idle", "padded", "shared")


def completions(case: str) -> list[Sample]:
    """Return the completions of a train step, with advantages."""
    random = np.random.default_rng(0)
    found = []
    for group in range(2 * GROUPS if case == "padded" else GROUPS):
        prompt = random.integers(0, VOCABULARY, 1024 if case == "shared" else 16)
        for _ in range(GROUP):
            length = min(512, int(random.geometric(1 / 64))) if case == "padded" else 64
            ids = np.concatenate([prompt, random.integers(0, VOCABULARY, length)])
            mask = np.concatenate([np.zeros(len(prompt), dtype=np.uint8), np.ones(length, dtype=np.uint8)])
            advantage = 0.0 if case == "idle" and group % 2 else float(random.normal())
            found.append(Sample(ids, mask, advantage, 1.0, -random.random(length).astype(np.float32)))
    return found


class Variant:
    """A trainer that arranges completions, or one that does not."""

    def __init__(self, case: str, model: PreTrainedModel, folder: Path, *, arranges: bool) -> None:
        self.model = copy.deepcopy(model)
        values = {
            "param_dtype": "float32", "optm_lr": 1e-9, "sequence_packing": case != "padded",
            "train_batch_per_replica": 4 * MINI_BATCH,
            "train_policy": {"type": "grpo", "mini_batch": MINI_BATCH, "log_entropy": False},
        }  # fmt: skip
        train = TrainConfig.model_validate(values)
        adapter: Any = CausalLM(self.model, train, InputProcessing(0))
        if not arranges:
            adapter._merges_prompts, adapter.arrange_micro_batches = False, lambda *_: None
        self.trainer = Trainer(adapter, train, ProgressWriter(folder / "progress.json"))
        assert isinstance(train.train_policy, GrpoConfig)
        self.algorithm = Grpo(train.train_policy)
        self.algorithm.has_separate_gradients = arranges
        self.seconds: list[float] = []
        self.num_tokens = 0
        self.model.get_input_embeddings().register_forward_hook(self._count)

    def _count(self, module: Any, inputs: Any, output: torch.Tensor) -> None:
        self.num_tokens += output.shape[:-1].numel()

    def step(self, samples: list[Sample]) -> float:
        """Take a train step and return its loss."""
        self.num_tokens = 0
        began = time.process_time()
        (update,) = self.algorithm.updates(samples, self.trainer)
        metrics = self.trainer.update(update)
        self.seconds.append(time.process_time() - began)
        return metrics["loss"]


def measure(case: str, options: argparse.Namespace, table: Table) -> None:
    """Add the line of a case to the table."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=options.hidden, intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 64, head_dim=64,
        num_key_value_heads=max(1, options.hidden // 128), tie_word_embeddings=False, max_position_embeddings=2048,
    )  # fmt: skip
    model, samples = Qwen3ForCausalLM(config), completions(case)
    with tempfile.TemporaryDirectory() as folder:
        variants = [Variant(case, model, Path(folder), arranges=arranges) for arranges in (False, True)]
        losses = [variant.step(samples) for variant in variants]
        pairs = zip(*(variant.model.parameters() for variant in variants), strict=True)
        apart = max((a.grad - b.grad).abs().max().item() for a, b in pairs if a.grad is not None and b.grad is not None)
        for variant in variants:
            variant.seconds.clear()  # the first step allocates
        for _ in range(options.rounds):
            for variant in variants:
                variant.step(samples)
    plain, arranged = (statistics.median(variant.seconds) for variant in variants)
    useful = sum(len(sample.input_ids) for sample in samples)
    table.add_row(
        case, f"{plain:.2f}", f"{arranged:.2f}", f"{plain / arranged:.2f}", f"{useful:,}",
        *(f"{variant.num_tokens:,}" for variant in variants), f"{abs(losses[0] - losses[1]):.0e}", f"{apart:.0e}",
    )  # fmt: skip


def main() -> None:
    """Run the cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="*", choices=CASES, default=CASES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    options = parser.parse_args()
    table = Table("case", "before, s", "now, s", "ratio", "tokens", "run before", "run now", "loss apart", "grad apart")
    for case in options.case:
        measure(case, options, table)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
