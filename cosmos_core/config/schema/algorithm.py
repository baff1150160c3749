"""Base class of the tables `[train.train_policy]`: the keys that every algorithm has, and what an algorithm declares to
other modules.

Each algorithm has a subclass in the file of its name; `find_algorithm_name` returns the name for a recipe. Other
modules read these declarations rather than the name of the algorithm.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from cosmos_core.config.schema.clean import CleanConfig
from cosmos_core.config.schema.data_term import DataTermConfig
from cosmos_core.config.schema.dataset import DatasetConfig, SourceConfig
from cosmos_core.config.schema.diffusers import DiffusersConfig
from cosmos_core.config.schema.field_metadata import FieldUnit, OmittedIfEmpty, ReferenceKind, ResultNeutral
from cosmos_core.config.schema.remote_reward import RemoteRewardConfig
from cosmos_core.config.schema.table import Table
from cosmos_core.config.schema.value_types import Auto, ClampedInt, NameOrImportPath, RowCount
from cosmos_core.types import FlowSampling

DEFAULT_MINI_BATCH = 2


class AlgorithmConfig(Table):
    """Keys of `[train.train_policy]` that every algorithm has."""

    algorithm: ClassVar[str]
    """Value of the recipe key `trainer_type` that selects this algorithm."""
    rows: ClassVar[str]
    """Kind of rows that the `prepare` stage makes for the algorithm: the name of a file of
    `cosmos_core/data/kinds/`."""
    num_sequences_per_row: ClassVar[int] = 1
    """Number of token sequences that a training row contains, such as 2 for a pair of responses."""
    allows_validation_completions: ClassVar[bool] = True
    """Whether held-out rows are prompts that a model can complete, so that validation can score completions."""
    reports_rewards: ClassVar[bool] = True
    """Whether validation can report rewards even if `[validation]` names no reward functions."""
    modalities: ClassVar[tuple[str, ...]] = ("causal_lm",)
    """Names of the modalities, `Modality.name`, of the models that the algorithm can train."""
    has_rollouts: ClassVar[bool] = False
    """Whether the algorithm learns from rollouts: scored groups of completions, images or videos of one prompt."""
    precomputes_reference_logprobs: ClassVar[bool] = False
    """Whether reference log-probabilities of all rows are computed before the first step, so that no copy of the
    reference policy is needed during training."""

    trainer_type: str
    """Algorithm: a built-in name, or a user class `path/file.py:Class`, whose parameters are in `[custom]`."""
    dataset: DatasetConfig = DatasetConfig()
    """Settings of the data set of the training rows."""
    clean: Annotated[CleanConfig | None, OmittedIfEmpty] = None
    """Settings of the search of the training rows for duplicates and for text of benchmarks; None: no search."""
    datasets: Annotated[tuple[SourceConfig, ...], Field(strict=False), OmittedIfEmpty] = ()
    """Data sets that are mixed by weight, in place of `dataset`, for models of text. An epoch has as many rows as all
    of them together; a data set with fewer rows than its weight requires is repeated, in a new order each time."""
    data_packer: Annotated[NameOrImportPath | Literal[""], ReferenceKind.CODE] = ""
    """User class `path/file.py:Class` that converts a row of the data set: its `get_rollout_input(item)` returns the
    prompt of a row, its `sft_process_sample(item)` the tokens or turns; empty: rows are used unchanged."""
    mini_batch: RowCount | Auto = DEFAULT_MINI_BATCH
    """Rows per forward pass; changes speed and memory, not results. `auto`: the fastest number that fits into memory,
    measured in the first train step in at most a minute; forward passes before that and in other stages have 2 rows."""
    dataloader_shuffle: bool = True
    """Shuffle the rows in another order in each epoch; False: keep the order of the file."""
    dataloader_seed: int | None = None
    """Seed of the order of rows; None: `train.seed`."""
    dataloader_num_workers: Annotated[ClampedInt, FieldUnit("processes"), ResultNeutral] = 0
    """Number of processes that tokenise rows in the `prepare` stage; 0 or less: one. Images and videos are decoded by
    as many threads; 0 or less: four."""
    dataloader_batch_size: int = 1
    """Number of rows per batch that the controller of Cosmos-RL reads; 0 or less: all rows."""
    dataloader_prefetch_factor: int | None = None
    """Number of batches that a data loader prefetches."""

    @property
    def tables_by_dataset(self) -> dict[str, Self]:
        """Return a copy of this table for each data set of training rows, by the configuration key of the data set. In
        the copy, settings of the data set, such as its system prompt, replace those of the algorithm."""
        if not self.datasets:
            return {"train.train_policy.dataset": self}
        tables = (self.copy_with(datasets=(), dataset=each, **self._dataset_settings(each)) for each in self.datasets)
        return {f"train.train_policy.datasets.{i}": table for i, table in enumerate(tables)}

    @staticmethod
    def _dataset_settings(dataset: SourceConfig) -> dict[str, Any]:
        """Return the settings of a data set that replace settings of the algorithm, by the key that they replace."""
        dataset_settings: dict[str, Any] = {f"{name}_column_name": column for name, column in dataset.columns.items()}
        if dataset.system_prompt is not None:
            dataset_settings["system_prompt"] = dataset.system_prompt
        return dataset_settings | ({"reward_function": dataset.reward_function} if dataset.reward_function else {})

    def get_system_prompt(self, dataset_label: str) -> str:
        """Return the system prompt of the data set with the label `dataset_label`, by default that of the algorithm."""
        system_prompt = {each.label: each.system_prompt for each in self.datasets}.get(dataset_label)
        return str(getattr(self, "system_prompt", "")) if system_prompt is None else system_prompt

    @property
    def drops_last_rows(self) -> bool:
        """Return whether the last rows of an epoch are left out if they do not fill a train step."""
        return True

    @property
    def has_token_based_batches(self) -> bool:
        """Return whether micro-batches are filled up to a number of tokens rather than a number of rows."""
        return False

    @property
    def supervised_rows(self) -> DataTermConfig | None:
        """Return the settings of SFT rows that are trained on in addition to text rollouts; None: only rollouts."""
        return None

    @property
    def rewards(self) -> dict[str, float]:
        """Return the weight of each reward function by its name; empty if nothing is scored."""
        return {}

    @property
    def validation_rewards(self) -> dict[str, float]:
        """Return the reward functions, with their weights, that score completions in validation if `[validation]` names
        none."""
        return self.rewards

    @property
    def remote_reward_config(self) -> RemoteRewardConfig | None:
        """Return the settings of a reward service that replaces reward functions; None: no service."""
        return None

    @property
    def dynamic_sampling(self) -> tuple[Sequence[str], int] | None:
        """Return the settings of dynamic sampling, which replaces groups whose completions have equal rewards: the
        reward metrics to compare (empty: total reward) and the maximum number of rounds (0: no limit); None: off."""
        return None

    @property
    def has_group_relative_advantages(self) -> bool:
        """Return whether advantages compare the completions of a prompt, so that equal rewards teach nothing."""
        return True

    @property
    def rollout_lookahead(self) -> tuple[int, int, int | None]:
        """Return how far generation may run ahead of training: maximum age of the weights of a rollout in train steps,
        number of additional prompts, and maximum number of train steps with prompts in flight (None: unlimited)."""
        return 0, 0, None

    def flow_sampling_settings(self, diffusers_config: DiffusersConfig) -> FlowSampling | None:
        """Return the settings for sampling rollouts from a diffusion model; None: no rollouts, or rollouts of text."""
        return None

    @property
    def saves_reference_logprobs(self) -> bool:
        """Return whether training saves reference log-probabilities of held-out rows for later `validate` stages."""
        return self.precomputes_reference_logprobs and "reference" in self.auxiliary_model_names

    @property
    def auxiliary_model_names(self) -> tuple[str, ...]:
        """Return the names of the models that the algorithm needs in addition to the policy, such as `reference`."""
        return ()

    @field_validator("dataloader_prefetch_factor")
    @classmethod
    def _require_workers_for_prefetch(cls, prefetch_factor: int | None, info: ValidationInfo) -> int | None:
        return prefetch_factor if info.data.get("dataloader_num_workers") else None

    @model_validator(mode="after")
    def _check_datasets(self) -> Self:
        default_dataset = type(self.dataset)()
        changed_dataset_keys = [name for name, value in self.dataset if value != getattr(default_dataset, name)]
        if self.datasets and changed_dataset_keys:
            remedy = f"name all data sets in datasets, with their {', '.join(changed_dataset_keys)}, or leave it out"
            raise ValueError(f"datasets takes the place of dataset; {remedy}")
        if self.datasets and self.clean is not None:
            raise ValueError("clean searches the rows of one dataset, not of datasets; leave one of them out")
        dataset_labels = [dataset.label for dataset in self.datasets]
        if repeated_labels := [label for label in dataset_labels if dataset_labels.count(label) > 1]:
            raise ValueError(f"datasets: two are called {repeated_labels[0]!r} in metrics; give each a label")
        if len({dataset.weight is None for dataset in self.datasets}) > 1:
            raise ValueError("datasets: some have a weight and others none; give each a weight, or none of them")
        values_in_recipe = {name: getattr(self, name) for name in self.model_fields_set - {"datasets"}}
        for i, dataset_config in enumerate(self.datasets):
            dataset_settings = self._dataset_settings(dataset_config)
            if unknown_keys := [name for name in dataset_settings if name not in type(self).model_fields]:
                raise ValueError(f"datasets.{i}: {self.algorithm} has no {unknown_keys[0]}; leave it out")
            if "reward_function" in dataset_settings and self.remote_reward_config is not None:
                raise ValueError(f"datasets.{i}.reward_function excludes use_remote_reward; leave one of them out")
            try:
                type(self).model_validate({**values_in_recipe, **dataset_settings})
            except ValidationError as error:
                error_text = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise ValueError(f"datasets.{i}: {error_text}") from None
        return self

    @model_validator(mode="before")
    @classmethod
    def _refuse_keys_of_other_algorithms(cls, table: Any) -> Any:
        """Refuse a key of another algorithm with a message that names that algorithm."""
        for name in (name for name in table if name not in cls.model_fields) if isinstance(table, dict) else ():
            for other_algorithm in _algorithm_tables():
                if other_algorithm.__base__ in {cls, cls.__base__} and name in other_algorithm.model_fields:
                    rule = f"needs trainer_type = {other_algorithm.algorithm!r}, not {cls.algorithm!r}"
                    raise ValueError(f"{name} {rule}; set it or leave {name} out")
        return table


def find_algorithm_name(policy_table: Any) -> str:
    """Return the name of the algorithm in a table `[train.train_policy]`: its `trainer_type` or, if that is missing or
    a user's class, its `type`."""
    if isinstance(policy_table, AlgorithmConfig):
        return policy_table.algorithm
    policy_type, trainer_type = str(policy_table.get("type")), policy_table.get("trainer_type")
    algorithm_names = [table.algorithm for table in _algorithm_tables() if policy_type in _allowed_types(table)]
    return trainer_type if trainer_type in algorithm_names else policy_type


def policy_types() -> list[str]:
    """Return the values that `train.train_policy.type` accepts, sorted."""
    return sorted({policy_type for table in _algorithm_tables() for policy_type in _allowed_types(table)})


def _allowed_types(algorithm_table: type[AlgorithmConfig]) -> tuple[str, ...]:
    return get_args(algorithm_table.model_fields["type"].annotation)


def _algorithm_tables(base_class: type[AlgorithmConfig] = AlgorithmConfig) -> list[type[AlgorithmConfig]]:
    """Return `base_class` and its subclasses that declare an algorithm, in definition order."""
    own_classes = [base_class] if "algorithm" in vars(base_class) else []
    return [*own_classes, *(table for subclass in base_class.__subclasses__() for table in _algorithm_tables(subclass))]
