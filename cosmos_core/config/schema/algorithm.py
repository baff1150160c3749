"""Base of `[train.train_policy]`: keys that every algorithm has, and what an algorithm declares to other modules.

Each algorithm has a table of its own, a subclass in the file of its name; `algorithm_of` finds the one that a recipe
means. Nobody else asks which algorithm is running: they ask for these declarations.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import ValidationInfo, field_validator, model_validator

from cosmos_core.config.schema.data_term import DataTermConfig
from cosmos_core.config.schema.dataset import DatasetConfig
from cosmos_core.config.schema.marks import NoResult, Unit, Where
from cosmos_core.config.schema.remote_reward import RemoteRewardConfig
from cosmos_core.config.schema.table import Table
from cosmos_core.config.schema.values import Rows, Thing
from cosmos_core.types import FlowSampling

if TYPE_CHECKING:
    from cosmos_core.config.schema.diffusers import DiffusersConfig

REWARD_TIMEOUT_SECONDS = 10.0


class AlgorithmConfig(Table):
    """What every algorithm has."""

    algorithm: ClassVar[str]
    """The `trainer_type` that means this table."""
    rows: ClassVar[str]
    """The kind of rows that `prepare` makes: the name of a file of `cosmos_core/data/kinds/`."""
    sequences_per_row: ClassVar[int] = 1
    """Number of token sequences in a row."""
    completes_held_out: ClassVar[bool] = True
    """Whether held-out rows can be completed and scored by reward functions."""
    reports_rewards: ClassVar[bool] = True
    """Whether a validation without reward functions of its own may report more than the metrics of rows."""
    modalities: ClassVar[tuple[str, ...]] = ("causal_lm",)
    """The model adapters that accept the algorithm."""
    has_rollouts: ClassVar[bool] = False
    """Whether it learns from scored groups of what the policy makes of prompts."""
    scores_rows_once: ClassVar[bool] = False
    """Whether reference log-probabilities of all rows are computed before the first step, so that no copy of the
    reference policy is needed during training."""

    trainer_type: str
    """The algorithm: a name, or `path/file.py:Class` of a user's own, with its parameters in `[custom]`."""
    dataset: DatasetConfig = DatasetConfig()
    """Rows to learn from."""
    data_packer: Annotated[Thing | Literal[""], Where.CODE] = ""
    """A user's class, `path/file.py:Class`, whose `get_rollout_input(item)` returns the prompt of a row, or whose
    `sft_process_sample(item)` returns its tokens or its turns; empty: rows are used unchanged."""
    mini_batch: Rows = 2
    """Rows per forward pass; changes speed and memory, not results."""
    dataloader_shuffle: bool = True
    """Another order each epoch; False: the order of the file."""
    dataloader_seed: int | None = None
    """Seed of that order; None: `train.seed`."""
    dataloader_num_workers: Annotated[int, Unit("processes"), NoResult] = 0
    """Processes that tokenise in the `prepare` stage; 0 or less: one. Images and videos are decoded by as many threads;
    0 or less: four."""
    dataloader_batch_size: int = 1
    """Batch of the controller's iterator; 0 or less: all."""
    dataloader_prefetch_factor: int | None = None
    """Batches that a loader reads ahead."""

    @property
    def drops_last(self) -> bool:
        """Return whether rows that fill no train step are left out."""
        return True

    @property
    def balances_tokens(self) -> bool:
        """Return whether micro-batches are filled to a budget of tokens."""
        return False

    @property
    def real_rows(self) -> DataTermConfig | None:
        """Return the settings of SFT rows that are trained on in addition to text rollouts; None: there are no such
        rows."""
        return None

    @property
    def rewards(self) -> dict[str, float]:
        """Return the reward functions with their weights; empty if nothing is scored."""
        return {}

    @property
    def held_out_rewards(self) -> dict[str, float]:
        """Return the reward functions of validation, unless validation has its own."""
        return self.rewards

    @property
    def remote_rewards(self) -> RemoteRewardConfig | None:
        """Return the settings of a reward service that replaces reward functions; None: no service."""
        return None

    @property
    def reward_seconds(self) -> float:
        """Return how long one reward may take."""
        return REWARD_TIMEOUT_SECONDS

    @property
    def rewards_by_group(self) -> bool:
        """Return whether a user's own reward functions take all completions of a prompt at once."""
        return False

    @property
    def constants_of_rewards(self) -> dict[str, Any]:
        """Return what rewards may ask for by keyword of this table; see `rewards.base.KEYWORDS`."""
        return {}

    @property
    def dynamic_sampling(self) -> tuple[Sequence[str], int] | None:
        """Return the reward metrics (empty: the total reward) by which groups without a difference are dropped, and the
        maximum number of rounds that sample replacements (0: unlimited); None: no group is dropped."""
        return None

    @property
    def compares_groups(self) -> bool:
        """Return whether an advantage is a difference between completions of one prompt."""
        return True

    @property
    def lookahead(self) -> tuple[int, int, int | None]:
        """Return how far rollouts may run ahead of the training: train steps that their weights may be old, prompts
        beyond the window which that allows, and the most train steps of prompts at a time (None: no bound)."""
        return 0, 0, None

    @property
    def env_of_rewards(self) -> tuple[str, ...]:
        """Return the names of environment variables that rewards receive in addition to those that any program
        needs."""
        return ()

    def flow_sampling(self, diffusers: "DiffusersConfig") -> FlowSampling | None:
        """Return the settings for sampling from a diffusion model; None: there are no rollouts, or they are text."""
        return None

    @property
    def saves_reference(self) -> bool:
        """Whether training saves the reference log-probabilities of held-out rows, for stages that measure later."""
        return self.scores_rows_once and "reference" in self.named_weights

    @property
    def named_weights(self) -> tuple[str, ...]:
        """Return the names of the weights that the algorithm needs in addition to the policy's."""
        return ()

    @field_validator("dataloader_num_workers")
    @classmethod
    def _no_workers(cls, count: int) -> int:
        return max(0, count)

    @field_validator("dataloader_prefetch_factor")
    @classmethod
    def _of_workers(cls, batches: int | None, info: ValidationInfo) -> int | None:
        return batches if info.data.get("dataloader_num_workers") else None

    @model_validator(mode="before")
    @classmethod
    def _key_of_another(cls, values: Any) -> Any:
        """Name the algorithm that a key belongs to."""
        names = [] if not isinstance(values, dict) else [name for name in values if name not in cls.model_fields]
        for name in names:
            for other in _algorithms():
                if other.__base__ in {cls, cls.__base__} and name in other.model_fields:
                    raise ValueError(
                        f"{name} needs trainer_type = {other.algorithm!r}, not {cls.algorithm!r}; set it or leave "
                        f"{name} out"
                    )
        return values


def algorithm_of(values: Any) -> str:
    """Return the algorithm whose table a recipe means: that of `trainer_type`, else that of `type`, on which a path of
    the user's own builds."""
    if isinstance(values, AlgorithmConfig):
        return values.algorithm
    kind, name = str(values.get("type")), values.get("trainer_type")
    known = [table.algorithm for table in _algorithms() if kind in _kinds(table)]
    return name if name in known else kind


def kinds() -> list[str]:
    """Return the values of `type`."""
    return sorted({kind for table in _algorithms() for kind in _kinds(table)})


def _kinds(table: type[AlgorithmConfig]) -> tuple[str, ...]:
    found: tuple[str, ...] = table.model_fields["type"].annotation.__args__  # type: ignore[union-attr]
    return found


def _algorithms(parent: type[AlgorithmConfig] = AlgorithmConfig) -> list[type[AlgorithmConfig]]:
    """Return every table that names an algorithm, in the order of their definition."""
    found = [parent] if "algorithm" in vars(parent) else []
    return [*found, *(table for child in parent.__subclasses__() for table in _algorithms(child))]
