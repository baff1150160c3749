"""The nouns that cross folders, torch-free, on one page.

Pipeline side: `StageKind` says how a kind of stage runs, `Outcome` what it left behind.
Training side: a `Prompt` is followed by a `Group` of `Completion`s, rewards turn it into a `ScoredGroup`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]


def is_below(key: str, prefixes: Iterable[str]) -> bool:
    """Return whether a dotted key is one of the prefixes or below one."""
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)


@dataclass(frozen=True, slots=True)
class StageKind:
    """The policy of one kind of stage: everything that the rest of the system has to know about it."""

    name: str
    entry: str
    """Import path `module:function` of the program; called with one `run.stage.Stage`. Empty: the stage names it."""
    result_version: int
    """Part of the fingerprint; raised by hand when a change of code changes results."""
    makes: Literal["", "data", "model", "metrics", "publication", "page"] = ""
    """What the stage is run for: prepared rows, a model of the architecture that it started from, measurements of a
    model, a published copy of it, a page about the run. Empty: something else."""
    feed: Literal["", "dataset", "rollouts"] = ""
    """What the stage trains on: the rows of a data set, or rollouts scored by rewards. Empty: it does not train."""
    has_mesh: bool = False
    """True: it runs on the ranks of `policy.parallelism`."""
    scores: bool = False
    """True: it may call the rewards of its recipe."""
    reads_model: Literal["", "tokenizer", "weights"] = ""
    """How much of the model it reads; without `model` it is that of the recipe. A kind that reads one is looked at by
    `cosmos check`. Empty: it reads none of its own."""
    reads_data: Literal["", "source", "prepared"] = ""
    """`source`: it reads the data set of its recipe, or what `data` names. `prepared`: it reads rows that another stage
    prepared."""
    required_keys: dict[str, str] = field(default_factory=dict)
    """Keys of `[[pipeline.stages]]` that the stage needs, and how a value looks."""
    allowed_keys: tuple[str, ...] = ()
    """Keys of `[[pipeline.stages]]` that have a meaning only with this kind and others that list them."""
    is_numeric: bool = True
    """False: its result does not depend on threads or accelerator, so another machine may reuse it."""
    in_worker: bool = True
    """False: light work that runs in the flow's own process (no torch)."""
    is_reusable: bool = True
    """False: the outside world decides (a gate, an upload), so it runs each time."""
    recipe_tables: tuple[str, ...] = ()
    """The recipe keys that this kind reads, as dotted prefixes; only they enter its fingerprint."""
    unread: tuple[str, ...] = ()
    """Keys below them that it does not read; `run.fingerprint.reads_of` adds those that other settings leave unread."""
    reports: tuple[str, ...] = ("*",)
    """Patterns of the metrics that its result can have, beside those of held-out rows where it `scores`."""
    hands_on_metrics: bool = False
    """True: its result has the metrics of the stages in `after`."""
    chooses: bool = False
    """True: it hands on the model of one of the branches that are named in its `sweep`."""
    libraries: tuple[str, ...] = ()
    """The packages that its program computes with; their versions in the worker's interpreter enter the fingerprint."""

    def reads(self, key: str) -> bool:
        """Return whether a stage of this kind reads a key of its recipe."""
        return is_below(key, self.recipe_tables) and not is_below(key, self.unread)

    @property
    def trains(self) -> bool:
        """Return whether the stage changes weights."""
        return bool(self.feed)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a stage program returns; the worker turns it into `result.json`."""

    outputs: tuple[str, ...] = ()
    """Files or folders relative to the stage directory; every file below them enters the manifest."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Final metrics that gates and the summary read, e.g. `validation/accuracy`."""
    info: dict[str, JsonValue] = field(default_factory=dict)
    """Anything else worth keeping: named outputs such as `model`, the checks of an export, notices."""


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image as prepared rows hold it: never its pixels."""

    path: str | None
    """Of the file, relative to the folder of the media where it lies below it; None: `content` has it all."""
    content: bytes | None
    """The file itself, where the data set holds bytes; None: read `path`."""
    sha256: str
    """Of the file, so that another file under the same name is noticed."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem that the policy is asked to complete."""

    id: int
    """Row number in the prepared prompt file: the same problem in every process and epoch."""
    token_ids: tuple[int, ...]
    """The rendered prompt, with the generation prompt of the chat template and each image as its tokens."""
    text: str
    """The same as text, in which a word stands for each image."""
    reference: str
    """The reference answer that rewards compare with; empty when there is none."""
    images: tuple[ImageRef, ...] = ()
    """What the tokens of images stand for, in their order."""
    embedding: dict[str, Any] = field(default_factory=dict)
    """Of a diffusion model, what its text encoder made of the prompt: tensors by name, without a dimension for samples;
    then there are no token ids."""
    given: Any = None
    """Of a diffusion model of videos, clean latents of a clip whose first frames rollouts may be given; None: none."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The columns of the prompt's row, for rewards; of text with the prompt, as the row has it, under `prompt`."""


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive steps of a sampler that are stochastic, all others being deterministic."""

    size: int
    """How many."""
    first: int
    """The earliest step that may be one, counted from the noise."""
    end: int
    """The step behind the latest."""
    moves_every: int = 0
    """The window moves one step from noise to data every so many train steps, and begins again behind the last
    (MixGRPO, arXiv 2507.21802); 0: it is drawn anew for each train step (Flow-GRPO-Fast)."""


@dataclass(frozen=True, slots=True)
class FlowSampling:
    """How a diffusion model draws: from noise to data along a table of noise levels."""

    num_steps: int = 40
    guidance_scale: float = 1.0
    """Of classifier-free guidance; up to 1: none."""
    solver: Literal["euler", "dpm2"] = "euler"
    """What takes the deterministic steps."""
    kernel: str = ""
    """What takes the stochastic ones, a key of `models.flow_steps.KERNELS`; empty: every step is deterministic."""
    eta: float = 0.7
    """How much noise these add."""
    window: Window | None = None
    """Which steps are stochastic; None: all but the last, which would leave its noise in the result."""
    trained_on: tuple[int, ...] = ()
    """Stochastic steps whose latents are kept, to be learned from."""
    keeps_means: bool = False
    """The means of these steps are kept too."""
    schedule: str = ""
    """Table of noise levels, a key of `models.flow.SCHEDULES`; empty: that of the model's family."""
    size: tuple[int, int] = (1024, 1024)
    """Height and width in pixels."""
    num_frames: int = 1
    """Of a video; 1, or a model of images: an image."""
    given_frames: tuple[int, int] = (0, 0)
    """Fewest and most latent frames that are given, where the prompt has some and the network takes them."""
    same_noise: bool = False
    """All completions of a prompt start from the same noise."""
    weights: str = "policy"
    """The named weights that draw."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are drawn. `temperature` 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    repetition_penalty: float = 1.0
    max_tokens: int = 2048
    num_completions: int = 1
    seed: int = 0
    """Run seed; the engine draws completion k of prompt p at step s from hash(seed, s, p, k)."""

    flow: FlowSampling | None = None
    """How a diffusion model draws; None: tokens are drawn."""

    policy_temperature: float | None = None
    """What the trainer divides logits by; None: `temperature`."""

    may_be_outdated: bool = False
    """The weights may be those of an earlier train step than the one that learns from the tokens."""

    @property
    def is_off_policy(self) -> bool:
        """Return whether tokens may be drawn from another distribution than that of the policy that learns of them."""
        return self.changes_distribution or self.may_be_outdated

    @property
    def changes_distribution(self) -> bool:
        """Return whether tokens are drawn from another distribution than the trainer's softmax(logits / T)."""
        is_cut = self.top_p < 1 or self.top_k > 0 or self.repetition_penalty != 1
        return is_cut or self.policy_temperature not in (None, self.temperature)


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of a completion that have one origin: a turn of the policy, or a tool result."""

    token_ids: tuple[int, ...]
    is_sampled: bool
    """True: the policy drew the tokens, the end token included, and may learn from them."""
    logprobs: tuple[float, ...]
    """Natural-log probability of each token under the distribution that it was drawn from; () if not sampled."""
    version: int
    """Step N of the policy whose weights drew the tokens, or were current when the tool was called."""

    def __post_init__(self) -> None:
        assert len(self.logprobs) == (len(self.token_ids) if self.is_sampled else 0), "one log-probability per draw"


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a conversation behind its prompt, as text."""

    role: Literal["assistant", "tool"]
    text: str
    """Of an assistant's turn without special tokens."""
    is_error: bool = False
    """A tool could not be called, or failed."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a diffusion model made of a prompt, and the steps of it that are learned from. Tensors are on the CPU,
    latents in float32, because rounding them moves ratios of probabilities further than clip ranges are wide."""

    pixels: Any
    """uint8 tensor: height, width and 3 of an image, frames before them of a video."""
    latents: Any
    """The clean latents that the pixels were decoded from."""
    sigmas: tuple[float, ...]
    """The table of noise levels, from noise to 0."""
    version: int
    """Step N of the policy whose weights drew it."""
    steps: tuple[int, ...] = ()
    """Indices of the stochastic steps that were kept; what follows has an entry for each."""
    before: Any = None
    """Latents before each."""
    after: Any = None
    """Latents after each."""
    means: Any = None
    """Mean of the distribution that `after` was drawn from."""
    log_probs: tuple[float, ...] = ()
    """Log-probability of `after`, a mean over its elements."""
    num_given: int = 0
    """Latent frames that were given, from the first on."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The segments that follow a prompt. Token ids in, token ids out: nothing is tokenised twice.

    One turn under one version of the weights is one segment; a turn that was interrupted by new weights is two.
    """

    segments: tuple[Segment, ...]
    finish_reason: Literal["stop", "length"]
    """`stop`: the policy drew an end token. `length`: it was cut off, in a turn or between two."""
    text: str
    """Decoded without special tokens; of several turns the last that the policy took."""
    turns: tuple[Turn, ...] = ()
    """Of a conversation, in order; () where there is one turn by the nature of the engine."""
    drawn: Drawn | None = None
    """Of a diffusion model, which has no segments; None: text."""

    @property
    def media(self) -> Any:
        """Return the image as `PIL.Image`, or the video as an array of frames; None: text."""
        if self.drawn is None:
            return None
        from PIL import Image

        array = self.drawn.pixels.numpy()
        return Image.fromarray(array) if array.ndim == 3 else array

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return the tokens of all segments."""
        return tuple(token for segment in self.segments for token in segment.token_ids)

    @property
    def loss_mask(self) -> tuple[int, ...]:
        """Return for each token 1 where the policy drew it, 0 where it was put there."""
        return tuple(int(segment.is_sampled) for segment in self.segments for _ in segment.token_ids)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Return the log-probability of each sampled token, in order."""
        return tuple(logprob for segment in self.segments for logprob in segment.logprobs)

    @property
    def num_sampled(self) -> int:
        """Return how many tokens the policy drew: the length that rewards and metrics mean."""
        return sum(len(segment.logprobs) for segment in self.segments)

    @property
    def version(self) -> int:
        """Return the oldest version of the weights that drew one of its tokens."""
        if self.drawn is not None:
            return self.drawn.version
        return min(segment.version for segment in self.segments if segment.is_sampled)


@dataclass(frozen=True, slots=True)
class Group:
    """All completions of one prompt for one train step; the prompt's id and the step name it."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    step: int
    """Train step that it was submitted for; a part of the seeds of its completions."""

    @property
    def version(self) -> int:
        """Return the oldest version of the weights that drew one of its tokens."""
        return min(completion.version for completion in self.completions)


@dataclass(frozen=True, slots=True)
class Score:
    """The reward of one completion. An invalid score (`value is None`) is unknown, never zero."""

    value: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    """Each reward function's own unweighted value by name."""
    error: str = ""
    """Why it is invalid, one line."""
    is_raised: bool = False
    """A reward function raised, and would again: no crash and no deadline."""


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group with one score for each completion, in the same order."""

    group: Group
    scores: tuple[Score, ...]
