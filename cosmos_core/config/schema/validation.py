"""`[validation]`: validation on held-out rows, and when it runs."""

from collections.abc import Iterator
from typing import Annotated, Self

from pydantic import ValidationInfo, model_validator

from cosmos_core.config.schema.dataset import DatasetConfig
from cosmos_core.config.schema.marks import Needs, NoResult
from cosmos_core.config.schema.remote_reward import RemoteRewardConfig
from cosmos_core.config.schema.rewards import RewardWeights
from cosmos_core.config.schema.table import InStage, Table, say
from cosmos_core.config.schema.values import (
    Completions,
    Names,
    NonNegativeFloat,
    Nucleus,
    PositiveFloat,
    Rows,
    Steps,
    Tokens,
    TopK,
)


class HeldOutConfig(DatasetConfig):
    """Held-out rows, as training names its own."""

    test_size: int | float | None = None
    """Number or fraction of rows to hold out for validation, from the training data only."""


class ValidationConfig(Table):
    """`[validation]`"""

    enable: bool = False
    """Measure during training; a stage of kind `validate` measures whether or not this is set."""
    val_before_train: bool = False
    """Also before the first step."""
    freq: Steps = 20
    """Every N optimizer steps (SFT) or train steps (RL)."""
    batch_size: Rows | None = None
    """Rows per forward pass or prompts per generation call; None: as in training."""
    dataset: HeldOutConfig = HeldOutConfig()
    """Held-out rows; empty name: `test_size` rows of the training data."""
    max_rows: Rows | None = None
    """Maximum number of held-out rows, from the first; None: all. `dataset.split = "test[:200]"` selects other rows."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0: greedy."""
    top_p: Nucleus | None = None
    """None: as in `rollout.sampling_config`."""
    top_k: TopK = 1
    """Keep the k most likely tokens; -1: all."""
    repetition_penalty: PositiveFloat = 1.0
    """1: off."""
    n_generation: Completions = 1
    """Completions per prompt; accuracy is averaged over them, and with 2 or more there is `validation/pass@2`, `@4`
    and so on."""
    max_response_length: Tokens | None = None
    """None: as in `rollout`."""
    reward_function: RewardWeights = {}
    """Empty: the rewards of training. With SFT the held-out rows are completed and scored with it, and the loss is
    measured as well."""
    reward_env: Annotated[Names, NoResult] = ()
    """Names of environment variables that rewards receive in addition to those of `train.train_policy.reward_env`."""
    use_remote_reward: bool | None = None
    """Use the reward service; None: as in training, the only allowed value."""
    remote_reward: Annotated[RemoteRewardConfig | None, Needs("use_remote_reward")] = None
    """Requests to the reward service; None: as in training."""

    @model_validator(mode="after")
    def _says_what_is_greedy(self, info: ValidationInfo) -> Self:
        if self.top_k == 1 and self.temperature > 0:
            say(info, f"validation.temperature: {self.temperature:g} changes nothing, because top_k = 1 takes the most "
                "likely token; set validation.top_k = -1 to draw")  # fmt: skip
        return self

    def notices(self, stage: InStage) -> Iterator[str]:
        """See `Table.notices`: several completions of text that cannot differ, and long ones."""
        most, length = self.max_response_length or 0, stage.recipe.policy.model_max_length
        completes = stage.measures and stage.recipe.completes_held_out and not stage.recipe.policy.is_diffusers
        if completes and most >= length:
            yield (
                f"validation.max_response_length = {most}: a completion gets the tokens that its prompt leaves of "
                f"policy.model_max_length = {length}"
            )
        is_greedy = self.temperature == 0 or self.top_k == 1
        if self.n_generation > 1 and is_greedy and not stage.recipe.policy.is_diffusers:
            yield (
                f"validation.n_generation = {self.n_generation}: the completions of a prompt are the same: each "
                f"takes the likeliest token; set validation.temperature = 1 and validation.top_k = -1 to draw"
            )

    @property
    def remote_rewards(self) -> RemoteRewardConfig | None:
        """Return the settings of a reward service; None: no service."""
        return self.remote_reward if self.use_remote_reward else None
