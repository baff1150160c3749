"""What a rollout engine is, what it is made of, and what all engines need.

Not here: which engine a recipe gets (`registry`), how weights reach it (`publish`), what groups are made of its
completions (`groups`), rewards, losses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cosmos_core.config.schema.rollout import RolloutConfig
from cosmos_core.errors import DataError, StageFailed
from cosmos_core.models.processor import Vision
from cosmos_core.rollout.flow_source import FlowSource
from cosmos_core.types import Completion, Group, Prompt, Sampling, Segment

Bucket = list[tuple[str, Tensor]]
"""Some of the weights, whole, by name. Their memory may be used again for the next bucket: an engine copies what it
keeps."""

WeightFormat = Literal["checkpoint", "module", "adapter", "shared"]
"""What an engine takes: weights under the names and in the shapes of a checkpoint, those of the transformers module,
the factors of an adapter alone, because it has the base weights, or none, because it computes with the trainer's own
modules."""


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is made of: the one argument of its class."""

    model: PreTrainedModel
    """The trainer's module. An engine of another format than `shared` reads no more than its config."""
    tokenizer: PreTrainedTokenizerBase
    folder: str
    """Folder or Hub id that the trainer loaded; the engine starts with its weights, as version 0."""
    rollout: RolloutConfig
    max_model_len: int
    """Longest sequence, prompt and completion together."""
    dtype: torch.dtype
    """What the engine computes in."""
    custom: Mapping[str, Any] = field(default_factory=dict)
    """The recipe's `[custom]` table, for an engine of a user's own."""
    is_apart: bool = False
    """The engine is in a process without the trainer's weights: `model` has shapes alone."""
    vision: Vision | None = None
    """Reads the images of prompts; None: no prompt shows one."""
    flow: FlowSource | None = None
    """Of a diffusion model; None: the model is of text."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The acknowledgement of a load."""

    version: int
    num_tensors: int
    """Tensors that the engine took."""


class Engine(Protocol):
    """Token ids in, token ids and their log-probabilities out. Generating never moves a global random state.

    A user's engine (`rollout.backend = "file.py:Class"`) is a class with these members, called with one
    `EngineSettings`. Of several ranks each has an engine. An engine in a process of its own may also have `step()`, one
    forward pass that returns what `completed` would, and `abort()`, which forgets what is in flight: weights then
    arrive between two passes, and not between two groups.
    """

    name: str
    weight_format: WeightFormat
    ranks_per_engine: int
    """Neighbouring ranks that have one engine together and give it the same calls; 1: each has its own."""

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> None:
        """Ask for `sampling.num_completions` completions of each prompt; more may be submitted before they are done.

        Raises:
            DataError: a prompt leaves no room for a completion.
            ConfigError: the engine cannot sample like that.
        """
        ...

    def completed(self) -> list[Group]:
        """Return groups that are done and were not returned before, in any order.

        Waits until there is one; an empty list means that nothing is in flight.
        """
        ...

    def load_weights(self, version: int, buckets: Iterable[Bucket]) -> Loaded:
        """Replace all weights, bucket by bucket, and forget all caches.

        Completions that are in flight go on with the new weights: what these draw is a segment of its own.

        Raises:
            StageFailed: a tensor is missing, or none of the model's.
        """
        ...

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token after the first, given those before it, at temperature 1."""
        ...

    def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Give back accelerator memory until `wake`; level 2: the weights too, which a load will replace before
        the next submission."""
        ...

    def wake(self) -> None:
        """Be ready to generate again."""
        ...

    def close(self) -> None:
        """Free everything; the engine cannot be used again."""
        ...


class Around:
    """An engine around another one; a subclass says what it does otherwise, `submit` and `completed` at least."""

    def __init__(self, inner: Engine) -> None:
        self._inner = inner
        self.name, self.weight_format, self.ranks_per_engine = inner.name, inner.weight_format, inner.ranks_per_engine

    def load_weights(self, version: int, buckets: Iterable[Bucket]) -> Loaded:
        """See `Engine.load_weights`."""
        return self._inner.load_weights(version, buckets)

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """See `Engine.logprobs`."""
        return self._inner.logprobs(token_ids)

    def sleep(self, level: Literal[1, 2] = 1) -> None:
        """See `Engine.sleep`."""
        self._inner.sleep(level)

    def wake(self) -> None:
        """See `Engine.wake`."""
        self._inner.wake()

    @property
    def slept(self) -> int:
        """Return the level of the deepest sleep since the last load, where the engine knows it."""
        return getattr(self._inner, "slept", 0)

    def close(self) -> None:
        """See `Engine.close`."""
        self._inner.close()


def generate(engine: Engine, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> list[Group]:
    """Return the groups of these prompts in their order: submit, and drain the engine, which has nothing else to do."""
    engine.submit(prompts, sampling, step)
    found: dict[int, Group] = {}
    while groups := engine.completed():
        found.update((group.prompt.id, group) for group in groups)
    return [found[prompt.id] for prompt in prompts]


def request_seed(seed: int, step: int, prompt_id: int, k: int) -> int:
    """Return the seed of completion `k` of a prompt at a step: the same in every process and in every batch."""
    digest = hashlib.sha256(f"{seed}/{step}/{prompt_id}/{k}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # 63 bits: vLLM and torch take a signed 64-bit integer


def drawn_again(sampling: Sampling, times: int) -> Sampling:
    """Return how a prompt is sampled that its train step has drawn so many times before: with seeds of its own, since
    they are made of step and prompt."""
    return replace(sampling, seed=request_seed(sampling.seed, -times, 0, 0)) if times else sampling


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end a completion: those of the generation config and of the tokenizer."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    listed = configured if isinstance(configured, (list, tuple)) else [configured]
    return sorted({token for token in [*listed, tokenizer.eos_token_id] if token is not None})


def check_prompts(prompts: Sequence[Prompt], max_model_len: int) -> None:
    """Refuse prompts that leave no room for a completion.

    Raises:
        DataError: naming the first of them.
    """
    for prompt in prompts:
        if not 0 < len(prompt.token_ids) < max_model_len:
            raise DataError(
                f"prompt {prompt.id} has {len(prompt.token_ids)} tokens; it must have at least 1 and fewer than "
                f"policy.model_max_length = {max_model_len}; drop or shorten it"
            )


def completion(  # noqa: PLR0913 - what an engine knows of a completion
    tokenizer: PreTrainedTokenizerBase,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    *,
    version: int,
    is_stopped: bool,
    earlier: Sequence[tuple[int, int]] = (),
    vision: Vision | None = None,
) -> Completion:
    """Return a completion of one turn, with its text; `earlier`: how many of its tokens, from the first on, were drawn
    by the end of each version of the weights before the present one; with `vision` it is cut off before a token that
    stands for an image."""
    if vision is not None and (count := vision.num_before_images(token_ids)) < len(token_ids):
        token_ids, logprobs, is_stopped = token_ids[:count], logprobs[:count], False
    segments, start = [], 0
    for end, of_version in (*earlier, (len(token_ids), version)):
        end = min(end, len(token_ids))
        if end > start:
            segments.append(Segment(tuple(token_ids[start:end]), True, tuple(logprobs[start:end]), of_version))
        start = max(start, end)
    if not segments:
        segments = [Segment((), True, (), version)]
    return Completion(
        segments=tuple(segments),
        finish_reason="stop" if is_stopped else "length",
        text=str(tokenizer.decode(list(token_ids), skip_special_tokens=True)),
    )


def storage_of(tensor: Tensor) -> Hashable:
    """Return what is equal for two tensors that are the same memory, such as tied weights under their two names."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


class Receiver:
    """The receiving end of a load: hands out tensors one by one, and remembers what a whole model is.

    A tensor that does not come would leave the weights of another version, or uninitialised memory, in the engine.
    """

    def __init__(self) -> None:
        self._expected: frozenset[str] = frozenset()
        self._names: set[str] = set()

    def tensors(self, buckets: Iterable[Bucket]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of all buckets, each bucket being made when the one before is used up."""
        for bucket in self.buckets(buckets):
            yield from bucket

    def buckets(self, buckets: Iterable[Bucket]) -> Iterator[Bucket]:
        """Yield buckets, for who takes each as a whole."""
        self._names = set()
        for bucket in buckets:
            self._names.update(name for name, _ in bucket)
            yield bucket

    def loaded(self, version: int) -> Loaded:
        """Return the acknowledgement of what `tensors` has handed out.

        Raises:
            StageFailed: the first load had other tensors.
        """
        self._expected = self._expected or frozenset(self._names)
        if missing := self._expected - self._names:
            raise StageFailed(f"weight sync: {len(missing)} tensors did not come, such as {min(missing)}")
        if unknown := self._names - self._expected:
            raise StageFailed(f"weight sync: {len(unknown)} tensors came for the first time, such as {min(unknown)}")
        return Loaded(version, len(self._names))
