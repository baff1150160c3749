"""`[validation]`: validation on held-out rows, and when it runs."""

from collections.abc import Iterator
from typing import Annotated, Self

from pydantic import NonNegativeFloat, PositiveFloat, ValidationInfo, model_validator

from cosmos_core.config.schema.dataset import DatasetConfig
from cosmos_core.config.schema.field_metadata import EnabledBy, ResultNeutral
from cosmos_core.config.schema.remote_reward import RemoteRewardConfig
from cosmos_core.config.schema.table import StageContext, Table, add_notice
from cosmos_core.config.schema.value_types import (
    CompletionCount,
    RewardWeights,
    RowCount,
    StepCount,
    StringOrList,
    TokenCount,
    TopK,
    TopP,
)

_ROW_KEYS = {"name", "arguments", "subset", "revision", "split"}
"""Keys of a data set's settings that determine its rows."""


class HeldOutDatasetConfig(DatasetConfig):
    """Settings of the data set of held-out rows, with the keys of `train.train_policy.dataset`."""

    test_size: int | float | None = None
    """Number or fraction of rows to hold out; the key has an effect only in `train.train_policy.dataset`."""


class ValidationConfig(Table):
    """`[validation]`: validation on held-out rows, and when it runs."""

    enable: bool = False
    """Run validation during training; a stage of kind `validate` measures whether or not this is set."""
    val_before_train: bool = False
    """Run validation also before the first step."""
    freq: StepCount = 20
    """Number of optimizer steps (SFT) or train steps (RL) between two validations."""
    batch_size: RowCount | None = None
    """Number of rows per forward pass, or of prompts per generation call; None: as in training."""
    dataset: HeldOutDatasetConfig = HeldOutDatasetConfig()
    """Settings of the data set of the held-out rows; with an empty `name`: `test_size` rows of the training data."""
    max_rows: RowCount | None = None
    """Maximum number of held-out rows, from the first; None: all. `dataset.split = "test[:200]"` selects other rows."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature of validation; 0: greedy."""
    top_p: TopP | None = None
    """Probability mass of nucleus sampling; None: as in `rollout.sampling_config`."""
    top_k: TopK = 1
    """Number of most likely tokens from which a token is sampled; -1: all."""
    repetition_penalty: PositiveFloat = 1.0
    """Penalty on the logits of repeated tokens, which above 1 become less likely; 1: off."""
    n_generation: CompletionCount = 1
    """Number of completions per prompt; accuracy is averaged over them, and with 2 or more the metrics
    `validation/pass@2`, `@4` and so on are reported."""
    max_response_length: TokenCount | None = None
    """Maximum number of tokens of a completion; None: as in `rollout`."""
    reward_function: RewardWeights = {}
    """Reward functions of validation; empty: those of training. With SFT, held-out rows are completed and scored with
    these functions in addition to the loss."""
    reward_env: Annotated[StringOrList, ResultNeutral] = ()
    """Names of environment variables that reward functions receive in addition to those of
    `train.train_policy.reward_env`."""
    use_remote_reward: bool | None = None
    """Score completions in validation with the reward service; the value must be that of training. None: as in
    training."""
    remote_reward: Annotated[RemoteRewardConfig | None, EnabledBy("use_remote_reward")] = None
    """Settings of requests to the reward service; None: as in training."""

    @model_validator(mode="after")
    def _check_greedy_sampling(self, info: ValidationInfo) -> Self:
        if self.top_k == 1 and self.temperature > 0:
            greedy_reason = "top_k = 1 takes the most likely token; set validation.top_k = -1 to draw"
            add_notice(info, f"validation.temperature: {self.temperature:g} changes nothing, because {greedy_reason}")
        return self

    def notices(self, stage: StageContext) -> Iterator[str]:
        max_response_tokens, model_max_length = self.max_response_length or 0, stage.recipe.policy.model_max_length
        completes_prompts = stage.measures_held_out_rows and stage.recipe.has_validation_completions
        if completes_prompts and not stage.recipe.policy.is_diffusers and max_response_tokens >= model_max_length:
            limit = f"the tokens that its prompt leaves of policy.model_max_length = {model_max_length}"
            yield f"validation.max_response_length = {max_response_tokens}: a completion gets {limit}"
        is_greedy = self.temperature == 0 or self.top_k == 1
        if self.n_generation > 1 and is_greedy and not stage.recipe.policy.is_diffusers:
            reason = "the completions of a prompt are the same: each takes the likeliest token"
            remedy = "set validation.temperature = 1 and validation.top_k = -1 to draw"
            yield f"validation.n_generation = {self.n_generation}: {reason}; {remedy}"
        train_policy = stage.recipe.train.train_policy
        measures_named_rows = self.dataset.name and stage.kind.scores and stage.measures_held_out_rows
        for key, table in train_policy.tables_by_dataset.items() if measures_named_rows else ():
            rows = table.dataset
            have_same_folder = getattr(rows, "local_dir", "") == self.dataset.local_dir
            if have_same_folder and rows.model_dump(include=_ROW_KEYS) == self.dataset.model_dump(include=_ROW_KEYS):
                remedy = "name other rows or another split, or leave it out and hold rows out with test_size"
                yield f"validation.dataset.name = {self.dataset.name!r}: its rows are trained on too ({key}); {remedy}"
        is_default_reward = "reward_function" not in train_policy.model_fields_set and not self.reward_function
        has_dataset_rewards = any(each.reward_function for each in train_policy.datasets)
        is_scored = completes_prompts and train_policy.validation_rewards
        if is_scored and self.dataset.name and is_default_reward and has_dataset_rewards:
            yield (
                f"validation.dataset.name = {self.dataset.name!r}: the rewards of train.train_policy.datasets do not "
                f"score its rows, but the default of train.train_policy.reward_function; set validation.reward_function"
            )

    @property
    def remote_reward_config(self) -> RemoteRewardConfig | None:
        """Return the settings of the reward service that scores completions in validation; None: no service."""
        return self.remote_reward if self.use_remote_reward else None
