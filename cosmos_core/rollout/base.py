"""What a rollout engine is, how its random numbers are fixed, and what all engines need.

Not here: which engine a recipe gets (`choose`), scoring answers (`rewards`), losses (`algorithms`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cosmos_core.errors import DataError
from cosmos_core.types import Completion, Group, Prompt, Sampling


class Engine(Protocol):
    """Token ids in, token ids and their log-probabilities out. Generating never moves a global random state."""

    name: str

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> list[Group]:
        """Answer each prompt `sampling.num_completions` times, in the order of `prompts`.

        Raises:
            DataError: a prompt leaves no room for an answer.
            ConfigError: the engine cannot sample like that.
        """
        ...

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> str:
        """Take over the trainer's weights under their checkpoint names, forget all caches, return the checksum.

        Raises:
            StageFailed: the engine does not compute what the trainer computes.
        """
        ...

    def sleep(self) -> None:
        """Give back accelerator memory until `wake`."""
        ...

    def wake(self) -> None:
        """Be ready to generate again."""
        ...

    def close(self) -> None:
        """Free everything; the engine cannot be used again."""
        ...


def request_seed(seed: int, step: int, prompt_id: int, k: int) -> int:
    """Seed of completion `k` of a prompt at a step: the same in every process, whatever else is in the batch."""
    digest = hashlib.sha256(f"{seed}/{step}/{prompt_id}/{k}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # 63 bits: vLLM and torch take a signed 64-bit integer


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end an answer: those of the generation config and of the tokenizer."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    listed = configured if isinstance(configured, (list, tuple)) else [configured]
    return sorted({token for token in [*listed, tokenizer.eos_token_id] if token is not None})


def check_prompts(prompts: Sequence[Prompt], max_model_len: int) -> None:
    """Refuse prompts that leave no room for an answer.

    Raises:
        DataError: naming the first of them.
    """
    for prompt in prompts:
        if not 0 < len(prompt.token_ids) < max_model_len:
            raise DataError(
                f"prompt {prompt.id} has {len(prompt.token_ids)} tokens; it must have at least 1 and fewer than "
                f"policy.model_max_length = {max_model_len}; drop or shorten it"
            )


def completion(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], logprobs: Sequence[float], *, stopped: bool
) -> Completion:
    """A finished answer with its text."""
    return Completion(
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs),
        finish_reason="stop" if stopped else "length",
        text=str(tokenizer.decode(list(token_ids), skip_special_tokens=True)),
    )
