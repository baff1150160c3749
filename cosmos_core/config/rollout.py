"""`[rollout]`: how completions are generated."""

from __future__ import annotations

from typing import Annotated, Literal

from cosmos_core.config.table import (
    Fraction,
    NonNegativeFloat,
    NoResult,
    Nucleus,
    PositiveFloat,
    PositiveInt,
    Table,
    TopK,
)


class SamplingConfig(Table):
    """`[rollout.sampling_config]`"""

    temperature: NonNegativeFloat = 1.0
    """Softmax temperature; 0: greedy. Must equal `train.train_policy.temperature`."""
    top_p: Nucleus = 1.0
    """Nucleus mass; below 1 the engine's log-probabilities are normalised over fewer tokens than the trainer's."""
    top_k: TopK = -1
    """Keep the k most likely tokens; -1: all."""
    repetition_penalty: PositiveFloat = 1.0
    """Above 1 repeats become less likely; 1: off."""


class RolloutConfig(Table):
    """`[rollout]`"""

    backend: Literal["vllm", "hf"] = "vllm"
    """`vllm`, with `hf` (transformers `generate`) in its place, said once, where vLLM cannot be imported."""
    max_response_length: PositiveInt = 2048
    """Most tokens of one completion."""
    n_generation: PositiveInt = 16
    """Completions per prompt: the group size."""
    batch_size: PositiveInt = 1
    """Prompts per generation call; changes speed, not results."""
    seed: int | None = None
    """Sampling seed; None: `train.seed`."""
    enforce_eager: Annotated[bool, NoResult] = True
    """vLLM without compiled graphs."""
    gpu_memory_utilization: Annotated[Fraction, NoResult] = 0.8
    """Share of a GPU's memory that vLLM may take; no meaning on CPU."""
    sampling_config: SamplingConfig = SamplingConfig()
    """How tokens are drawn in training."""
