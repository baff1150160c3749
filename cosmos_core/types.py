"""Data types shared by several packages, without torch.

For pipelines: `StageKind` describes how a kind of stage runs, `Outcome` what a stage has produced.
For training: a `Prompt` gets a `Group` of `Completion`s, and rewards turn the group into a `ScoredGroup`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]


def is_key_within(key: str, key_prefixes: Iterable[str]) -> bool:
    """Return True if a dotted key equals one of the prefixes or is below one of them."""
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in key_prefixes)


@dataclass(frozen=True, slots=True)
class StageKind:
    """Properties of one kind of stage, such as `sft` or `export`: what stages of the kind read, make and need."""

    name: str
    entry: str
    """Import path `module:function` of the stage's program, which is called with one `run.stage.Stage`; empty: each
    stage of the kind names its program in `entry`."""
    result_version: int
    """Version of the kind's results, in the fingerprint; raised by hand when changed code changes results."""
    makes: Literal["", "data", "model", "metrics", "publication", "page"] = ""
    """Product of the stage: prepared rows, a model with the architecture of its base model, metrics of a model, a
    published copy of a model, a page about the run. Empty: something else."""
    feed: Literal["", "dataset", "rollouts"] = ""
    """Training data of the stage: the rows of a data set, or scored rollouts. Empty: the stage does not train."""
    has_mesh: bool = False
    """Whether the stage runs on the ranks of `policy.parallelism`."""
    has_engine: bool = False
    """Whether the stage generates with one rollout engine on `rollout.parallelism.tp_size` GPUs, without a mesh."""
    scores: bool = False
    """Whether the stage may call the reward functions of its recipe."""
    reads_model: Literal["", "tokenizer", "weights"] = ""
    """Part of the model that the stage reads; the model is named by the key `model` of the stage, otherwise by its
    recipe. `cosmos check` checks stages that read a model. Empty: the kind itself reads no model."""
    reads_data: Literal["", "source", "prepared"] = ""
    """Rows that the stage reads. `source`: the data set of its recipe, or of its key `data`. `prepared`: the rows that
    another stage prepared. Empty: no rows."""
    required_keys: dict[str, str] = field(default_factory=dict)
    """Keys of `[[pipeline.stages]]` that the stage needs, each with an example of its value."""
    allowed_keys: tuple[str, ...] = ()
    """Keys of `[[pipeline.stages]]` that are valid only for the kinds that list them."""
    is_numeric: bool = True
    """Whether the result depends on the number of threads and the accelerator; if not, any machine can reuse the
    result."""
    in_worker: bool = True
    """Whether the stage runs in a worker process; if not, it does light work without torch in the flow's process."""
    is_reusable: bool = True
    """Whether a result may be reused; a gate or an upload is run each time: it depends on more than its inputs."""
    recipe_tables: tuple[str, ...] = ()
    """Dotted prefixes of the recipe keys that this kind reads; only these keys enter its fingerprint."""
    keys_by_modality: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Recipe keys that this kind reads only for models of one modality, by the name of the modality."""
    unread: tuple[str, ...] = ()
    """Recipe keys that this kind does not read although they are below a prefix in `recipe_tables`."""
    reports: tuple[str, ...] = ("*",)
    """Patterns of the names of the metrics that a result can have, such as `export/*`. A kind with `scores` can have
    validation metrics too."""
    forwards_metrics: bool = False
    """Whether the result repeats the metrics of the stages in `after`."""
    selects_branch: bool = False
    """Whether the stage selects one branch of its `sweep`, and returns the model of that branch as its own."""
    table: str = ""
    """Recipe table that only this kind reads; its keys are also keywords of the task of the kind. Empty: no table."""
    check: str = "cosmos_core.train.check:run"
    """Import path of the program with which `cosmos check` checks a stage that reads a model."""
    libraries: tuple[str, ...] = ()
    """Packages that affect the results of the stage's program; the versions that its worker imports enter the
    fingerprint."""

    def reads_key(self, key: str) -> bool:
        """Return True if a stage of this kind reads a key of its recipe."""
        is_in_tables = any(is_key_within(key, keys) for keys in (self.recipe_tables, *self.keys_by_modality.values()))
        return is_in_tables and not is_key_within(key, self.unread)

    @property
    def trains_model(self) -> bool:
        """Return True if stages of this kind train: they change the weights of a model."""
        return bool(self.feed)

    @property
    def merges_models(self) -> bool:
        """Return True if stages of this kind merge the models of the stages in their key `after`."""
        return "after" in self.required_keys

    @property
    def completes_prompts(self) -> bool:
        """Return True if the stage completes and scores the prompts of its data set, not only held-out prompts."""
        return self.feed == "rollouts" or (self.scores and not self.makes)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Return value of a stage program, which the worker writes to `result.json`."""

    outputs: tuple[str, ...] = ()
    """Output files or folders, relative to the stage directory; every file below a folder enters the manifest."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Final metrics that gates and the summary read, e.g. `validation/accuracy`."""
    info: dict[str, JsonValue] = field(default_factory=dict)
    """Further entries of the result by name, such as the path of the `model`, the checks of an export, or notices."""


@dataclass(frozen=True, slots=True)
class ImageRef:
    """Reference to an image in prepared rows, without its pixels."""

    path: str | None
    """Path of the image file, relative to the media folder if it is below that folder; None: `content` has the file."""
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
    """Token ids of the rendered prompt, with generation prompt and the tokens of each image."""
    text: str
    """Text of the rendered prompt, with a placeholder for each image; in later turns the text of the first turn."""
    reference: str
    """Reference response with which reward functions compare; empty if there is none."""
    images: tuple[ImageRef, ...] = ()
    """Images of the prompt, in the order of their tokens."""
    later_turn_token_ids: tuple[int, ...] = ()
    """Token ids at the end of `token_ids` that follow those of `text`; empty in the first turn of a conversation."""
    embedding: dict[str, Any] = field(default_factory=dict)
    """Output of a diffusion model's text encoder: tensors by name, for one sample. The prompt then has no token ids."""
    conditioning_clip: Any = None
    """Clean latents of a clip whose first frames may condition a rollout of a video model; None: no clip."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Columns of the prompt's row, for reward functions; for text models also the unrendered prompt, under `prompt`."""
    source: str = ""
    """Name of the prompt's data set in a mixture of data sets; empty: there is one data set."""


@dataclass(frozen=True, slots=True)
class StepWindow:
    """Window of consecutive stochastic steps of a sampler whose other steps are deterministic."""

    size: int
    """Number of stochastic steps in the window."""
    first_step: int
    """Index of the earliest sampler step that may be stochastic, counted from the noise."""
    end_step: int
    """First sampler step after those that may be stochastic (exclusive bound)."""
    steps_per_move: int = 0
    """Number of train steps after which the window moves one sampler step towards the data, from the last position back
    to the first (MixGRPO, arXiv 2507.21802); 0: its position is random for each train step (Flow-GRPO-Fast)."""


@dataclass(frozen=True, slots=True)
class FlowSampling:
    """Sampling parameters of a diffusion model, which integrates from noise to data along a noise schedule."""

    num_steps: int = 40
    guidance_scale: float = 1.0
    """Scale of classifier-free guidance; 1 or less: no guidance."""
    solver: Literal["euler", "dpm2"] = "euler"
    """Solver of the differential equation for deterministic steps."""
    stochastic_solver: str = ""
    """Solver of the stochastic steps, a key of `models.flow_steps.STOCHASTIC_STEPS`; empty: all are deterministic."""
    noise_scale: float = 0.7
    """Scale of the noise that stochastic steps add."""
    window: StepWindow | None = None
    """Window of the stochastic steps; None: all steps but the last, which would leave its noise in the result."""
    trained_steps: tuple[int, ...] = ()
    """Indices of the stochastic steps whose latents are kept for training."""
    keeps_transition_means: bool = False
    """Whether the means of the distributions of the steps in `trained_steps` are kept for training."""
    schedule: str = ""
    """Schedule of noise levels, a key of `models.flow.SIGMA_SCHEDULES`; empty: the schedule of the model's family."""
    size: tuple[int, int] = (1024, 1024)
    """Height and width of an image or video in pixels."""
    num_frames: int = 1
    """Number of frames of a video; 1: an image. An image model ignores the number."""
    conditioning_frame_range: tuple[int, int] = (0, 0)
    """Minimum and maximum number of latent frames that condition a video, for a prompt with a clip and a model that
    supports conditioning frames."""
    has_common_initial_noise: bool = False
    """Whether all samples of a prompt start from the same noise."""
    weights_name: str = "policy"
    """Name of the weights with which the model samples: `policy`, or `old` for the old policy of DiffusionNFT."""


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

    may_use_old_weights: bool = False
    """Whether the weights that sample can be older than the train step that trains on the tokens."""

    @property
    def is_off_policy(self) -> bool:
        """Return True if the distribution from which tokens are sampled may differ from the distribution of the policy
        that is trained on them."""
        changes_sampling = self.top_p < 1 or self.top_k > 0 or self.repetition_penalty != 1
        return changes_sampling or self.policy_temperature not in (None, self.temperature) or self.may_use_old_weights


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of a completion with one origin: a turn of the policy, or a tool result."""

    token_ids: tuple[int, ...]
    is_sampled: bool
    """Whether the policy sampled the tokens, including the end token; only such tokens may be trained on."""
    logprobs: tuple[float, ...]
    """Natural log-probability of each token under its sampling distribution; () if they were not sampled."""
    version: int
    """Train step of the weights that sampled the tokens, or that were current when the tool was called."""

    def __post_init__(self) -> None:
        assert len(self.logprobs) == (len(self.token_ids) if self.is_sampled else 0), "one log-probability per draw"


@dataclass(frozen=True, slots=True)
class Turn:
    """Turn of a conversation after its prompt, as text."""

    role: Literal["assistant", "tool"]
    text: str
    """Text of the turn; for the role `assistant` without special tokens, unless these mark its tool calls."""
    is_error: bool = False
    """Whether the tool could not be called, or failed."""


@dataclass(frozen=True, slots=True)
class DiffusionSample:
    """Image or video that a diffusion model has generated, with the denoising steps that are trained on. Tensors are on
    the CPU. Latents are float32, since rounding changes probability ratios by more than the width of clip ranges."""

    pixels: Any
    """uint8 tensor with the dimensions height, width, 3 for an image, and frames in front of them for a video."""
    latents: Any
    """Clean latents from which the pixels were decoded."""
    sigmas: tuple[float, ...]
    """Noise levels of the sampling path, from noise to 0."""
    version: int
    """Train step of the weights that generated the sample."""
    steps: tuple[int, ...] = ()
    """Indices of the kept stochastic steps; the fields `latents_before` to `log_probs` have an entry for each."""
    latents_before: Any = None
    """Latents before each kept step."""
    latents_after: Any = None
    """Latents after each kept step."""
    transition_means: Any = None
    """Mean of the distribution from which each latent in `latents_after` was sampled."""
    log_probs: tuple[float, ...] = ()
    """Log-probability of each latent in `latents_after`, averaged over its elements."""
    num_conditioning_frames: int = 0
    """Number of conditioning latent frames at the beginning of the video."""


@dataclass(frozen=True, slots=True)
class Completion:
    """Completion of a prompt: the segments that follow it, as token ids, so that no text is tokenised a second time.

    One turn under one version of the weights is one segment; a turn during which the weights were updated is two.
    """

    segments: tuple[Segment, ...]
    finish_reason: Literal["stop", "length"]
    """Reason for the end of the completion. `stop`: the policy sampled an end token. `length`: the completion was
    truncated, in a turn or between two turns."""
    text: str
    """Decoded text without special tokens; if there are several turns, the last turn of the policy."""
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

        pixel_array = self.diffusion_sample.pixels.numpy()
        return Image.fromarray(pixel_array) if pixel_array.ndim == 3 else pixel_array

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return the token ids of all segments."""
        return tuple(token_id for segment in self.segments for token_id in segment.token_ids)

    @property
    def loss_mask(self) -> tuple[int, ...]:
        """Return 1 for each token that the policy sampled, and 0 for each token of a tool result."""
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
        """Return the train step of the oldest weights that sampled any token of the completion."""
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
        """Return the train step of the oldest weights that sampled any token of the group."""
        return min(completion.version for completion in self.completions)


@dataclass(frozen=True, slots=True)
class Score:
    """Score of one completion: its total reward. If `value` is None, the score is invalid: unknown, never zero."""

    value: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    """Unweighted value of each reward function, by its name."""
    error: str = ""
    """Reason why the score is invalid, one line."""
    is_permanent_error: bool = False
    """Whether a reward function raised an exception that a retry would raise again, unlike a crash or a timeout."""


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group with one score for each completion, in the same order."""

    group: Group
    scores: tuple[Score, ...]
