"""Interface of rollout engines, their settings, and helpers that all engines use; `registry` chooses an engine."""

import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cosmos_core.config.schema.rollout import RolloutConfig
from cosmos_core.errors import DataError, StageFailed
from cosmos_core.models.processor import ImageReader
from cosmos_core.parallel.mesh import Mesh
from cosmos_core.types import Completion, Group, Prompt, Sampling, Segment

if TYPE_CHECKING:
    from cosmos_core.models.diffusion import DiffusionModel

Bucket = list[tuple[str, Tensor]]
"""Part of a model's weights: pairs of name and complete (unsharded) tensor.

The memory may be reused for the next bucket, so an engine copies what it keeps.
"""

WeightFormat = Literal["checkpoint", "module", "adapter", "shared"]
"""Format of the weights that an engine loads.

`checkpoint`: names and shapes of a checkpoint; `module`: names and shapes of the transformers module; `adapter`: only
the LoRA factors, because the engine has the base weights; `shared`: no weights, because the engine uses the trainer's.
"""


@dataclass(frozen=True)
class FlowSource:
    """Denoiser and named weights that the engine of a diffusion model samples with."""

    model: "DiffusionModel"
    predict: Callable[..., Tensor]
    """Function `(latents, sigma_B, text, num_conditioning_B)` that returns the velocity of the trainer's denoiser,
    which is 0 in conditioning frames."""
    weights: Callable[[str], AbstractContextManager[None]]
    """Function that returns a context manager in which the denoiser uses named weights, no dropout and no gradients."""
    device: torch.device
    mesh: Mesh | None = None
    null_text: dict[str, Tensor] = field(default_factory=dict)
    """Embedding of the empty prompt, used for classifier-free guidance."""


@dataclass(frozen=True)
class EngineSettings:
    """Settings of a rollout engine, the only argument of an engine class."""

    model: PreTrainedModel
    """The trainer's module. An engine with a weight format other than `shared` reads only its config and shapes."""
    tokenizer: PreTrainedTokenizerBase
    folder: str
    """Folder or Hub id of the model that the trainer loaded; the engine starts with its weights as version 0."""
    rollout: RolloutConfig
    max_model_len: int
    """Maximum number of tokens in a sequence, prompt and completion together."""
    dtype: torch.dtype
    """Dtype that the engine computes in."""
    custom: Mapping[str, Any] = field(default_factory=dict)
    """The recipe's `[custom]` table, for user-defined engines, and with limits of the sizes of images."""
    is_separate: bool = False
    """Whether the engine runs in a process without the trainer's weights, where `model` has only shapes."""
    vision: ImageReader | None = None
    """Processor for the images of prompts; None if no prompt has images."""
    flow: FlowSource | None = None
    """Denoiser and named weights that the engine of a diffusion model samples with; None for a text model."""
    beat: Callable[[], None] = lambda: None
    """Function to call during waits, such as for tools; an engine without progress is killed."""


@dataclass(frozen=True, slots=True)
class LoadReceipt:
    """Acknowledgement of an engine that it has loaded a version of the weights."""

    version: int
    num_tensors: int
    """Number of tensors that the engine loaded."""

    def check(self, version: int, num_sent: int, engine: str) -> None:
        """Raise a `StageFailed` if `engine`, a name for messages, did not load all tensors of `version`."""
        if (self.version, self.num_tensors) != (version, num_sent):
            raise StageFailed(
                f"weight sync: {engine} acknowledges {self.num_tensors} tensors of version {self.version}, not "
                f"{num_sent} of version {version}"
            )


class Engine(Protocol):
    """Rollout engine: takes token ids, returns token ids and their log-probabilities, and never changes global random
    state.

    A user-defined engine (`rollout.backend = "file.py:Class"`) is a class with these members, constructed with one
    `EngineSettings`. With several ranks, each has an engine. An engine in a separate process may also have `step()`,
    one forward pass that returns finished groups as `completed` does, `abort()`, which discards requests in flight, and
    `link`, which receives weights without host memory (`vllm_link.VllmLink`). Weights can then be loaded between
    two passes rather than between two groups.
    """

    name: str
    weight_format: WeightFormat
    ranks_per_engine: int
    """Number of neighbouring ranks that form one engine and make the same calls; 1: each rank has its own engine."""

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> None:
        """Request `sampling.num_completions` completions of each prompt, also while earlier requests are in flight.

        Raises:
            DataError: a prompt leaves no tokens of the maximum length for a completion.
            ConfigError: the engine does not support the sampling settings.
        """
        ...

    def completed(self) -> list[Group]:
        """Return groups that are complete and were not returned before, in any order.

        The call waits until a group is complete; an empty list means that no request is in flight.
        """
        ...

    def load_weights(self, version: int, buckets: Iterable[Bucket]) -> LoadReceipt:
        """Replace all weights, bucket by bucket, and clear all caches.

        Completions in flight continue with the new weights; tokens sampled with new weights form a separate segment.

        Raises:
            StageFailed: a tensor is missing, or the model has no such tensor.
        """
        ...

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token after the first, conditioned on the tokens before it, at temperature
        1."""
        ...

    def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Release accelerator memory until `wake`.

        Level 2 also releases the weights, so new weights must be loaded before the next submission.
        """
        ...

    def wake(self) -> None:
        """Reallocate the memory that `sleep` released, so that the engine can generate again."""
        ...

    def close(self) -> None:
        """Free all resources; the engine cannot be used again."""
        ...


class EngineWrapper:
    """Base class of engines that wrap another engine, whose other methods they have; subclasses define at least
    `submit` and `completed`."""

    def __init__(self, inner: Engine) -> None:
        self._inner = inner
        self.name, self.weight_format, self.ranks_per_engine = inner.name, inner.weight_format, inner.ranks_per_engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def generate(engine: Engine, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> list[Group]:
    """Generate the groups of prompts with an engine that has no request in flight, in the order of the prompts."""
    engine.submit(prompts, sampling, step)
    groups_by_prompt: dict[int, Group] = {}
    while groups := engine.completed():
        groups_by_prompt.update((group.prompt.id, group) for group in groups)
    return [groups_by_prompt[prompt.id] for prompt in prompts]


def request_seed(seed: int, step: int, prompt_id: int, k: int) -> int:
    """Return the seed of completion `k` of a prompt at a step, which is the same in every process and every batch."""
    digest = hashlib.sha256(f"{seed}/{step}/{prompt_id}/{k}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # 63 bits, since vLLM and torch take seeds as int64


def reseed(sampling: Sampling, num_repeats: int) -> Sampling:
    """Return sampling settings with another seed for a prompt that the train step has already sampled `num_repeats`
    times, because seeds depend only on settings, step and prompt."""
    return replace(sampling, seed=request_seed(sampling.seed, -num_repeats, 0, 0)) if num_repeats else sampling


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end a completion, from the generation config and the tokenizer."""
    eos_config = getattr(model.generation_config, "eos_token_id", None)
    configured_ids = eos_config if isinstance(eos_config, (list, tuple)) else [eos_config]
    return sorted({token_id for token_id in [*configured_ids, tokenizer.eos_token_id] if token_id is not None})


def check_prompts(prompts: Sequence[Prompt], max_model_len: int) -> None:
    """Raise a `DataError` if a prompt is empty, or not shorter than the maximum sequence length."""
    for prompt in prompts:
        if not 0 < len(prompt.token_ids) < max_model_len:
            raise DataError(
                f"prompt {prompt.id} has {len(prompt.token_ids)} tokens; it must have at least 1 and fewer than "
                f"policy.model_max_length = {max_model_len}; drop or shorten it"
            )


def completion(  # noqa: PLR0913 - one parameter per property of a completion
    tokenizer: PreTrainedTokenizerBase,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    *,
    version: int,
    ends_with_stop: bool,
    earlier: Sequence[tuple[int, int]] = (),
    vision: ImageReader | None = None,
) -> Completion:
    """Return a completion of one turn, with its text; `vision` truncates it before the first image placeholder token.

    `earlier` has, for each earlier version of the weights, the number of tokens sampled up to its replacement, and the
    version.
    """
    if vision is not None and (num_text_tokens := vision.num_tokens_before_images(token_ids)) < len(token_ids):
        token_ids, logprobs, ends_with_stop = token_ids[:num_text_tokens], logprobs[:num_text_tokens], False
    segments, start = [], 0
    for end, segment_version in (*earlier, (len(token_ids), version)):
        end = min(end, len(token_ids))
        if end > start:
            segments.append(Segment(tuple(token_ids[start:end]), True, tuple(logprobs[start:end]), segment_version))
        start = max(start, end)
    return Completion(
        segments=tuple(segments) or (Segment((), True, (), version),),
        finish_reason="stop" if ends_with_stop else "length",
        text=str(tokenizer.decode(list(token_ids), skip_special_tokens=True)),
    )


@dataclass
class UnfinishedGroup:
    """Group of which some completions are not finished yet."""

    prompt: Prompt
    sampling: Sampling
    step: int
    completions: dict[int, Completion] = field(default_factory=dict)
    earlier: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Earlier versions of the weights for each completion: number of tokens sampled by the end of a version, and the
    version."""

    def complete_group(self) -> Group | None:
        """Return the group if all its completions are finished, else None."""
        if len(self.completions) < self.sampling.num_completions:
            return None
        return Group(self.prompt, tuple(self.completions[k] for k in range(self.sampling.num_completions)), self.step)


def storage_of(tensor: Tensor) -> Hashable:
    """Return a key that is equal for two tensors in the same memory, such as tied weights under their two names."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


class Receiver:
    """Receiving side of weight loads, which checks that every load has the same tensor names; otherwise a missing
    tensor would leave old weights or uninitialized memory in the engine."""

    def __init__(self) -> None:
        self._expected_names: frozenset[str] = frozenset()
        self._received_names: set[str] = set()

    def tensors(self, buckets: Iterable[Bucket]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of all buckets; a bucket is requested when the previous bucket's tensors were consumed."""
        for bucket in self.buckets(buckets):
            yield from bucket

    def buckets(self, buckets: Iterable[Bucket]) -> Iterator[Bucket]:
        """Yield the buckets of a weight load, and record the names of the tensors in the buckets."""
        self._received_names = set()
        for bucket in buckets:
            self._received_names.update(name for name, _ in bucket)
            yield bucket

    def receipt(self, version: int) -> LoadReceipt:
        """Return the acknowledgement of the load whose tensors `tensors` or `buckets` has yielded; raise a
        `StageFailed` if the tensor names differ from those of the first load."""
        self._expected_names = self._expected_names or frozenset(self._received_names)
        if missing_names := self._expected_names - self._received_names:
            raise StageFailed(f"weight sync: {len(missing_names)} tensors did not come, such as {min(missing_names)}")
        if unknown_names := self._received_names - self._expected_names:
            raise StageFailed(
                f"weight sync: {len(unknown_names)} tensors came for the first time, such as {min(unknown_names)}"
            )
        return LoadReceipt(version, len(self._received_names))
