"""Interface of rollout engines, their settings, and helpers that all engines use; `registry` chooses an engine."""

import hashlib
from collections import deque
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
"""Part of a model's weights: pairs of name and complete (unsharded) tensor. The memory can be reused for the next
bucket, so an engine copies what it keeps."""

WeightFormat = Literal["checkpoint", "module", "adapter", "shared"]
"""Format of the weights that an engine loads. `checkpoint`: names and shapes of a checkpoint; `module`: names and
shapes of the transformers module; `adapter`: only the LoRA factors, because the engine has the base weights; `shared`:
no weights, because the engine uses the trainer's."""


@dataclass(frozen=True)
class EngineDenoiser:
    """The trainer's denoiser, with which the engine of a diffusion model samples, and a function that selects the
    weights of the denoiser."""

    model: "DiffusionModel"
    predict_velocity: Callable[..., Tensor]
    """Function `(latents, sigma_B, text, num_conditioning_B)` that returns the flow velocity for noise levels, text
    embeddings and numbers of conditioning frames; the velocity is 0 in conditioning frames."""
    use_weights: Callable[[str], AbstractContextManager[None]]
    """Function `(name)` whose context manager makes the denoiser use the weights with that name, such as `policy`, for
    inference."""
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
    """The recipe's `[custom]` table, for user-defined engines; its entry `vision` limits the sizes of images."""
    is_separate: bool = False
    """Whether the engine runs in a process without the trainer's weights, where `model` has only shapes."""
    vision: ImageReader | None = None
    """Processor for the images of prompts; None if no prompt has images."""
    flow: EngineDenoiser | None = None
    """Denoiser with which the engine of a diffusion model samples; None for a text model."""
    beat: Callable[[], None] = lambda: None
    """Function that the engine calls while it waits, for example for tools, to report that it is alive; an engine
    without progress is killed."""
    meta_copy: PreTrainedModel | None = None
    """Copy of the complete model without weights if `model` is distributed over ranks, where it can be only one
    pipeline stage; None: `model` is the complete model."""

    @property
    def complete_model(self) -> PreTrainedModel:
        """Return the model with all layers and their adapters; the result can be a copy without weights."""
        return self.model if self.meta_copy is None else self.meta_copy


@dataclass(frozen=True, slots=True)
class LoadReceipt:
    """Acknowledgement of an engine that it has loaded a version of the weights."""

    version: int
    num_tensors: int

    def verify(self, version: int, num_sent_tensors: int, engine_name: str) -> None:
        """Raise a `StageFailed` if the engine `engine_name` did not load all tensors of `version`."""
        if (self.version, self.num_tensors) != (version, num_sent_tensors):
            raise StageFailed(
                f"weight sync: {engine_name} acknowledges {self.num_tensors} tensors of version {self.version}, not "
                f"{num_sent_tensors} of version {version}"
            )


class Engine(Protocol):
    """Rollout engine: maps token ids to token ids and their log-probabilities, and never changes global random state.

    A user-defined engine (`rollout.backend = "file.py:Class"`) is a class with these members, constructed with one
    `EngineSettings`. With several ranks, each has an engine. An engine in a separate process can also have `step()`,
    one forward pass that returns finished groups as `completed` does, `abort()`, which discards requests in flight, and
    `link`, which receives weights by NCCL or CUDA IPC (`vllm_link.VllmWeightLink`). An engine with `step` can load
    weights between two forward passes, other engines only between two groups.
    """

    name: str
    weight_format: WeightFormat
    ranks_per_engine: int
    """Number of neighbouring ranks that form one engine and make the same calls; 1: each rank has its own engine."""

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> None:
        """Request `sampling.num_completions` completions of each prompt, also while earlier requests are in flight.
        Raise `DataError` if the length of a prompt leaves no room for a completion, and `ConfigError` for unsupported
        sampling settings."""

    def completed(self) -> list[Group]:
        """Wait until a group is complete, and return all complete groups that were not returned before, in any order;
        the list is empty if no request is in flight."""

    def load_weights(self, version: int, buckets: Iterable[Bucket]) -> LoadReceipt:
        """Replace all weights, bucket by bucket, and clear all caches. Completions in flight continue with the new
        weights, and their later tokens form a new `Segment`. Raise `StageFailed` if a tensor is missing or unknown to
        the model."""

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability at temperature 1 of each token after the first, given the tokens before it."""

    def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Release accelerator memory until `wake`. Level 2 also releases the weights, so new weights must be loaded
        before the next submission."""

    def wake(self) -> None:
        """Reallocate the memory that `sleep` released, so that the engine can generate again."""

    def close(self) -> None:
        """Free all resources of the engine, which cannot be used again."""


class EngineWrapper:
    """Base class of engines that wrap another engine: attributes that the wrapper does not define are those of the
    wrapped engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, attribute_name: str) -> Any:
        return getattr(self._engine, attribute_name)


class ModuleEngine:
    """Base class of engines that sample from a module in their own process; `sleep` does not release the module's
    memory."""

    ranks_per_engine = 1

    def __init__(self, settings: EngineSettings) -> None:
        self._send_heartbeat, self._max_samples_per_pass = settings.beat, settings.rollout.n_generation_mini_batch
        self._version = 0
        self._submissions: deque[tuple[Sequence[Prompt], Sampling, int]] = deque()

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> None:
        """Queue prompts, whose completions are sampled as one batch by a call of `completed`."""
        if prompts:
            self._submissions.append((prompts, sampling, step))

    def completed(self) -> list[Group]:
        """Generate the groups of completions for the oldest submission of prompts; see `Engine.completed`."""
        return self._generate(*self._submissions.popleft()) if self._submissions else []

    def _generate(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> list[Group]:
        raise NotImplementedError

    def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Do nothing, because the module stays in memory."""

    def wake(self) -> None:
        """Do nothing, because `sleep` released no memory."""

    def close(self) -> None:
        """Do nothing: the model is freed with its last reference."""


def generate(engine: Engine, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> list[Group]:
    """Return the groups of completions of `prompts`, in order, from an engine that has no request in flight."""
    engine.submit(prompts, sampling, step)
    groups_by_prompt: dict[int, Group] = {}
    while groups := engine.completed():
        groups_by_prompt.update((group.prompt.id, group) for group in groups)
    return [groups_by_prompt[prompt.id] for prompt in prompts]


def request_seed(seed: int, step: int, prompt_id: int, k: int) -> int:
    """Return the seed of completion `k` of a prompt in a train step; it depends on no other completion or process."""
    seed_digest = hashlib.sha256(f"{seed}/{step}/{prompt_id}/{k}".encode()).digest()
    return int.from_bytes(seed_digest[:8], "big") >> 1  # 63 bits, since vLLM and torch take seeds as int64


def reseed(sampling: Sampling, num_repeats: int) -> Sampling:
    """Return sampling settings with another seed if the train step sampled the prompt before (`num_repeats` > 0)."""
    return replace(sampling, seed=request_seed(sampling.seed, -num_repeats, 0, 0)) if num_repeats else sampling


def stop_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end a completion, from the generation config and the tokenizer."""
    configured_eos = getattr(model.generation_config, "eos_token_id", None)
    configured_eos_ids = configured_eos if isinstance(configured_eos, (list, tuple)) else [configured_eos]
    end_token_ids = {*configured_eos_ids, tokenizer.eos_token_id} - {None}
    # Leave out ids that vLLM refuses: the configs of some published models have -1 for a missing token, or the ids of a
    # larger vocabulary.
    vocab_size = getattr(model.config.get_text_config(), "vocab_size", None) or max(end_token_ids, default=0) + 1
    return sorted(token_id for token_id in end_token_ids if 0 <= token_id < vocab_size)


def check_prompts(prompts: Sequence[Prompt], max_model_len: int) -> None:
    """Raise a `DataError` if a prompt is empty, or not shorter than the maximum sequence length."""
    for prompt in prompts:
        if not 0 < len(prompt.token_ids) < max_model_len:
            raise DataError(
                f"prompt {prompt.id} has {len(prompt.token_ids)} tokens; it must have at least 1 and fewer than "
                f"{max_model_len}, the smaller of policy.model_max_length and the positions of the model; prepare the "
                f"rows with policy.model_max_length = {max_model_len}, which leaves it out"
            )


def completion(  # noqa: PLR0913 - one parameter per property of a completion
    tokenizer: PreTrainedTokenizerBase,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    *,
    version: int,
    ends_with_stop: bool,
    replaced_versions: Sequence[tuple[int, int]] = (),
    vision: ImageReader | None = None,
) -> Completion:
    """Return a completion of one turn, truncated before the first image placeholder token if the image reader `vision`
    is set. `ends_with_stop`: whether the last token is a stop token. `replaced_versions` has, for each version of the
    weights that was replaced during the completion, the number of tokens at that time and the version."""
    if vision is not None and (num_text_tokens := vision.count_tokens_before_images(token_ids)) < len(token_ids):
        token_ids, logprobs, ends_with_stop = token_ids[:num_text_tokens], logprobs[:num_text_tokens], False
    segments, segment_start = [], 0
    for segment_end, segment_version in (*replaced_versions, (len(token_ids), version)):
        segment_end = min(segment_end, len(token_ids))
        if segment_end > segment_start:
            span = slice(segment_start, segment_end)
            segments.append(Segment(tuple(token_ids[span]), True, tuple(logprobs[span]), segment_version))
        segment_start = max(segment_start, segment_end)
    return Completion(
        segments=tuple(segments) or (Segment((), True, (), version),),
        finish_reason="stop" if ends_with_stop else "length",
        text=str(tokenizer.decode(list(token_ids), skip_special_tokens=True)),
    )


@dataclass
class UnfinishedGroup:
    """Group of completions of a prompt, of which some are not finished yet."""

    prompt: Prompt
    sampling: Sampling
    step: int
    completions: dict[int, Completion] = field(default_factory=dict)
    replaced_versions: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Versions of the weights that were replaced during a completion, by number of the completion: pairs of the number
    of tokens at that time, and the version."""

    def to_group(self) -> Group | None:
        """Return the group if all its completions are finished; None: some are missing."""
        if len(self.completions) < self.sampling.num_completions:
            return None
        return Group(self.prompt, tuple(self.completions[k] for k in range(self.sampling.num_completions)), self.step)


def get_storage_key(tensor: Tensor) -> Hashable:
    """Return a key that is equal for tensors in the same memory, such as tied weights."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


class WeightReceiver:
    """Receiver of weight loads, which checks that each load has the same tensors, so that no old weights remain."""

    def __init__(self) -> None:
        self._expected_tensor_names: frozenset[str] = frozenset()
        self._received_tensor_names: set[str] = set()

    def buckets(self, buckets: Iterable[Bucket]) -> Iterator[Bucket]:
        """Yield the buckets of a weight load, and record the names of their tensors."""
        self._received_tensor_names = set()
        for bucket in buckets:
            self._received_tensor_names.update(name for name, _ in bucket)
            yield bucket

    def acknowledge(self, version: int) -> LoadReceipt:
        """Return the receipt of a weight load after its last tensor; raise a `StageFailed` if the tensor names differ
        from those of earlier loads."""
        self._expected_tensor_names = self._expected_tensor_names or frozenset(self._received_tensor_names)
        if missing_names := self._expected_tensor_names - self._received_tensor_names:
            raise StageFailed(f"weight sync: {len(missing_names)} tensors did not come, such as {min(missing_names)}")
        if unknown_names := self._received_tensor_names - self._expected_tensor_names:
            raise StageFailed(
                f"weight sync: {len(unknown_names)} tensors came for the first time, such as {min(unknown_names)}"
            )
        return LoadReceipt(version, len(self._received_tensor_names))
