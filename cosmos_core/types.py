"""Data types shared by several packages, without torch.

For pipelines: `StageKind` describes how a kind of stage runs, `Outcome` what a stage has produced.
For training: a `Prompt` gets a `Group` of `Completion`s, and rewards turn the group into a `ScoredGroup`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]


def is_below(key: str, prefixes: Iterable[str]) -> bool:
    """Return True if a dotted key equals one of the prefixes or is below one of them."""
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)


@dataclass(frozen=True, slots=True)
class StageKind:
    """Properties of one kind of stage: everything that the rest of the system has to know about the kind."""

    name: str
    entry: str
    """Import path `module:function` of the program, which is called with one `run.stage.Stage`; empty: each stage names
    its own program."""
    result_version: int
    """Part of the fingerprint; increased by hand when a change of code changes results."""
    makes: Literal["", "data", "model", "metrics", "publication", "page"] = ""
    """Product of the stage: prepared rows, a model with the architecture of its base model, metrics of a model, a
    published copy of a model, a page about the run. Empty: something else."""
    feed: Literal["", "dataset", "rollouts"] = ""
    """Training data of the stage: the rows of a data set, or rollouts scored by rewards. Empty: the stage does not
    train."""
    has_mesh: bool = False
    """True: the stage runs on the ranks of `policy.parallelism`."""
    has_engine: bool = False
    """True: the stage has no mesh, and generates with one engine in its own process, on the GPUs of
    `rollout.parallelism.tp_size`."""
    scores: bool = False
    """True: the stage may call the rewards of its recipe."""
    reads_model: Literal["", "tokenizer", "weights"] = ""
    """Part of the model that the stage reads: the model of its key `model`, otherwise of its recipe. `cosmos check`
    tests kinds that read one. Empty: the stage reads no model of its own."""
    reads_data: Literal["", "source", "prepared"] = ""
    """`source`: the stage reads the data set of its recipe, or of its key `data`. `prepared`: it reads rows that
    another stage prepared."""
    required_keys: dict[str, str] = field(default_factory=dict)
    """Keys of `[[pipeline.stages]]` that the stage needs, each with an example of its value."""
    allowed_keys: tuple[str, ...] = ()
    """Keys of `[[pipeline.stages]]` that are valid only for the kinds that list them."""
    is_numeric: bool = True
    """False: the result does not depend on threads or accelerator, so another machine may reuse it."""
    in_worker: bool = True
    """False: the stage does light work without torch, and runs in the flow's own process."""
    is_reusable: bool = True
    """False: the result depends on the outside world (a gate, an upload), so the stage runs each time."""
    recipe_tables: tuple[str, ...] = ()
    """Dotted prefixes of the recipe keys that this kind reads; only these keys enter its fingerprint."""
    unread: tuple[str, ...] = ()
    """Keys below `recipe_tables` that this kind does not read; `run.fingerprint.reads_of` adds keys that other settings
    disable."""
    reports: tuple[str, ...] = ("*",)
    """Patterns of the metrics that a result may have, in addition to those of held-out rows if the kind `scores`."""
    hands_on_metrics: bool = False
    """True: the result repeats the metrics of the stages in `after`."""
    chooses: bool = False
    """True: the stage passes on the model of one of the branches of its `sweep`."""
    table: str = ""
    """Recipe table that only this kind reads; its keys are also keywords of the task of the kind. Empty: none."""
    check: str = "cosmos_core.train.check:run"
    """Import path of the program with which `cosmos check` looks at a stage that reads a model."""
    extras: dict[str, str] = field(default_factory=dict)
    """Packages that the program needs in addition to those of every installation, each with the extra that installs
    it."""
    libraries: tuple[str, ...] = ()
    """Packages that affect the results of the program; their versions in the worker's interpreter enter the
    fingerprint."""

    def reads(self, key: str) -> bool:
        """Return True if a stage of this kind reads a key of its recipe."""
        return is_below(key, self.recipe_tables) and not is_below(key, self.unread)

    @property
    def trains(self) -> bool:
        """Return True if the stage changes weights."""
        return bool(self.feed)

    @property
    def completes_prompts(self) -> bool:
        """Return True if the stage completes and scores the prompts of its data set, not only held-out ones."""
        return self.feed == "rollouts" or (self.scores and not self.makes)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Return value of a stage program, which the worker writes to `result.json`."""

    outputs: tuple[str, ...] = ()
    """Files or folders relative to the stage directory; every file below a folder enters the manifest."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Final metrics that gates and the summary read, e.g. `validation/accuracy`."""
    info: dict[str, JsonValue] = field(default_factory=dict)
    """Further entries of the result: named outputs such as `model`, the checks of an export, notices."""


@dataclass(frozen=True, slots=True)
class ImageRef:
    """Reference to an image in prepared rows, without its pixels."""

    path: str | None
    """Path of the image file, relative to the folder of the media if it is below that folder; None: `content` has the
    file."""
    content: bytes | None
    """Bytes of the image file, if the data set contains them; None: the file at `path` is read."""
    sha256: str
    """SHA-256 of the image file, to detect that the file was replaced."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt for the policy to complete."""

    id: int
    """Row number in the prepared prompt file, the same in every process and epoch."""
    token_ids: tuple[int, ...]
    """Token ids of the rendered prompt, with the generation prompt of the chat template and each image as its
    tokens."""
    text: str
    """The rendered prompt as text, in which a placeholder stands for each image."""
    reference: str
    """The reference answer that rewards compare with; empty if there is none."""
    images: tuple[ImageRef, ...] = ()
    """The images of the prompt, in the order of their tokens."""
    embedding: dict[str, Any] = field(default_factory=dict)
    """For a diffusion model, the output of its text encoder: tensors by name, without a dimension for samples. The
    prompt then has no token ids."""
    conditioning_clip: Any = None
    """For a diffusion model of videos, clean latents of a clip whose first frames may condition a rollout; None: no
    clip."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The columns of the prompt's row, for rewards; for text models also the unrendered prompt, under `prompt`."""


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive stochastic steps of a sampler whose other steps are deterministic."""

    size: int
    """Number of stochastic steps."""
    first: int
    """Index of the earliest step that may be stochastic, counted from the noise."""
    end: int
    """Index after the latest step that may be stochastic."""
    moves_every: int = 0
    """Number of train steps after which the window moves one sampler step towards the data, from the last position back
    to the first (MixGRPO, arXiv 2507.21802); 0: its position is random for each train step (Flow-GRPO-Fast)."""


@dataclass(frozen=True, slots=True)
class FlowSampling:
    """Sampling parameters of a diffusion model, which integrates from noise to data along a schedule of noise
    levels."""

    num_steps: int = 40
    guidance_scale: float = 1.0
    """Scale of classifier-free guidance; up to 1: no guidance."""
    solver: Literal["euler", "dpm2"] = "euler"
    """Solver of the deterministic steps."""
    kernel: str = ""
    """Kernel of the stochastic steps, a key of `models.flow_steps.KERNELS`; empty: every step is deterministic."""
    eta: float = 0.7
    """Scale of the noise that stochastic steps add."""
    window: Window | None = None
    """The stochastic steps; None: all but the last step, which would leave its noise in the result."""
    trained_on: tuple[int, ...] = ()
    """Indices of the stochastic steps whose latents are kept for training."""
    keeps_means: bool = False
    """True: the means of the steps in `trained_on` are kept too."""
    schedule: str = ""
    """Schedule of noise levels, a key of `models.flow.SCHEDULES`; empty: the schedule of the model's family."""
    size: tuple[int, int] = (1024, 1024)
    """Height and width in pixels."""
    num_frames: int = 1
    """Number of frames of a video; 1, or a model of images: an image."""
    given_frames: tuple[int, int] = (0, 0)
    """Minimum and maximum number of conditioning latent frames, if the prompt has a clip and the model supports
    them."""
    same_noise: bool = False
    """True: all completions of a prompt start from the same noise."""
    weights: str = "policy"
    """Name of the weights with which the model samples."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of completions. `temperature` 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    repetition_penalty: float = 1.0
    max_tokens: int = 2048
    num_completions: int = 1
    seed: int = 0
    """Seed of the run; the engine samples completion k of prompt p at step s with the seed hash(seed, s, p, k)."""

    flow: FlowSampling | None = None
    """Sampling parameters of a diffusion model; None: the model samples tokens."""

    policy_temperature: float | None = None
    """Temperature by which the trainer divides logits; None: `temperature`."""

    may_be_outdated: bool = False
    """True: the weights may be those of an earlier train step than the step that trains on the tokens."""

    @property
    def is_off_policy(self) -> bool:
        """Return True if tokens may be sampled from another distribution than that of the policy that is trained on
        them."""
        return self.changes_distribution or self.may_be_outdated

    @property
    def changes_distribution(self) -> bool:
        """Return True if tokens are sampled from another distribution than the trainer's softmax(logits / T)."""
        is_cut = self.top_p < 1 or self.top_k > 0 or self.repetition_penalty != 1
        return is_cut or self.policy_temperature not in (None, self.temperature)


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of a completion with one origin: a turn of the policy, or a tool result."""

    token_ids: tuple[int, ...]
    is_sampled: bool
    """True: the policy sampled the tokens, including the end token, and may be trained on them."""
    logprobs: tuple[float, ...]
    """Natural-log probability of each token under the distribution from which it was sampled; () if not sampled."""
    version: int
    """Step N of the policy whose weights sampled the tokens, or were current when the tool was called."""

    def __post_init__(self) -> None:
        assert len(self.logprobs) == (len(self.token_ids) if self.is_sampled else 0), "one log-probability per draw"


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a conversation after its prompt, as text."""

    role: Literal["assistant", "tool"]
    text: str
    """Text of the turn; without special tokens for the role `assistant`."""
    is_error: bool = False
    """True: the tool could not be called, or failed."""


@dataclass(frozen=True, slots=True)
class DiffusionSample:
    """Sample of a diffusion model, and the steps of its path that are trained on. Tensors are on the CPU, latents in
    float32, because rounding the latents changes probability ratios by more than the width of clip ranges."""

    pixels: Any
    """uint8 tensor with the dimensions height, width, 3 for an image, and frames in front of them for a video."""
    latents: Any
    """The clean latents from which the pixels were decoded."""
    sigmas: tuple[float, ...]
    """The noise levels of the path, from noise to 0."""
    version: int
    """Step N of the policy whose weights generated the sample."""
    steps: tuple[int, ...] = ()
    """Indices of the stochastic steps that were kept; the fields `before` to `log_probs` have an entry for each."""
    before: Any = None
    """Latents before each kept step."""
    after: Any = None
    """Latents after each kept step."""
    means: Any = None
    """Mean of the distribution from which `after` was sampled."""
    log_probs: tuple[float, ...] = ()
    """Log-probability of `after`, averaged over its elements."""
    num_given: int = 0
    """Number of conditioning latent frames at the beginning of the video."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The segments that follow a prompt, as token ids: no text is tokenised a second time.

    One turn under one version of the weights is one segment; a turn during which the weights were updated is two.
    """

    segments: tuple[Segment, ...]
    finish_reason: Literal["stop", "length"]
    """`stop`: the policy sampled an end token. `length`: the completion was truncated, in a turn or between two
    turns."""
    text: str
    """Text decoded without special tokens; of several turns, the last turn of the policy."""
    turns: tuple[Turn, ...] = ()
    """Turns of a conversation, in order; () if the engine supports only one turn."""
    diffusion_sample: DiffusionSample | None = None
    """Sample of a diffusion model, which has no segments; None: the completion is text."""

    @property
    def media(self) -> Any:
        """Return the image as `PIL.Image`, or the video as an array of frames; None for text."""
        if self.diffusion_sample is None:
            return None
        from PIL import Image

        array = self.diffusion_sample.pixels.numpy()
        return Image.fromarray(array) if array.ndim == 3 else array

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return the tokens of all segments."""
        return tuple(token for segment in self.segments for token in segment.token_ids)

    @property
    def loss_mask(self) -> tuple[int, ...]:
        """Return for each token 1 if the policy sampled it, 0 if it was inserted."""
        return tuple(int(segment.is_sampled) for segment in self.segments for _ in segment.token_ids)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Return the log-probability of each sampled token, in order."""
        return tuple(logprob for segment in self.segments for logprob in segment.logprobs)

    @property
    def num_sampled(self) -> int:
        """Return the number of tokens that the policy sampled: the completion length for rewards and metrics."""
        return sum(len(segment.logprobs) for segment in self.segments)

    @property
    def version(self) -> int:
        """Return the oldest version of the weights that sampled any of its tokens."""
        if self.diffusion_sample is not None:
            return self.diffusion_sample.version
        return min(segment.version for segment in self.segments if segment.is_sampled)


@dataclass(frozen=True, slots=True)
class Group:
    """All completions of one prompt for one train step, identified by the prompt's id and the step."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    step: int
    """Train step for which the group was requested; part of the seeds of its completions."""

    @property
    def version(self) -> int:
        """Return the oldest version of the weights that sampled any of its tokens."""
        return min(completion.version for completion in self.completions)


@dataclass(frozen=True, slots=True)
class Score:
    """Reward of one completion. An invalid score (`value is None`) is unknown, never zero."""

    value: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    """Unweighted value of each reward function, by its name."""
    error: str = ""
    """Reason why the score is invalid, one line."""
    is_raised: bool = False
    """True: a reward function raised an exception and would raise it again, unlike after a crash or a timeout."""


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group with one score for each completion, in the same order."""

    group: Group
    scores: tuple[Score, ...]
