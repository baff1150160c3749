"""`[train.train_policy]` with `type = "sft"`: keys of supervised training with any loss."""

from typing import Annotated, Literal, Self

from pydantic import PositiveInt, model_validator

from cosmos_core.config.schema.algorithm import AlgorithmConfig
from cosmos_core.config.schema.field_metadata import EnabledBy, FieldUnit
from cosmos_core.config.schema.value_types import TokenCount

_RequiresLoadBalancing = EnabledBy("enable_dp_load_balancing")


class SupervisedConfig(AlgorithmConfig):
    """Keys that SFT, DPO and KTO share."""

    type: Literal["sft"]
    """Kind of training: supervised fine-tuning."""
    dataloader_drop_last: bool = True
    """Leave out the rows of an epoch that do not fill a batch, and use them in another epoch; False: the last batch of
    an epoch may be smaller."""
    conversation_column_name: str = "conversations"
    """Column of the conversation; rows without it may have columns of other known names, which
    docs/reference/columns.md lists. In rows of pairs it is the column of the prompt, or rows have the column `prompt`.
    An assistant turn with `weight = 0`, or `loss`, `train`, `trainable` or `loss_mask` = 0, is not learned."""
    system_prompt: str = ""
    """System prompt for conversations without a system turn and without a column `system`; empty: no system prompt."""
    enable_dp_load_balancing: bool = False
    """Fill micro-batches up to a number of tokens rather than of rows; `train_batch_per_replica` and
    `dataloader_drop_last` then have no effect."""
    load_balanced_pool_size: Annotated[PositiveInt, FieldUnit("rows"), _RequiresLoadBalancing] = 32
    """Number of waiting rows among which the next row of a micro-batch is selected."""
    load_balanced_max_tokens_for_batch: Annotated[TokenCount | None, _RequiresLoadBalancing] = None
    """Maximum number of tokens of a micro-batch, including padding unless `sequence_packing`; a longer row forms its
    own micro-batch. None: `mini_batch` x `policy.model_max_length`."""
    load_balanced_batching_strategy: Annotated[str, _RequiresLoadBalancing] = "prefer_closest"
    """Rule that selects the next row of a micro-batch among rows of equal cost: `prefer_first` takes the row that has
    waited longest, `prefer_closest` the row nearest in length to the longest row of the micro-batch."""
    load_balanced_batches_per_optimizer_step: Annotated[int, FieldUnit("micro-batches"), _RequiresLoadBalancing] = 1
    """Number of micro-batches of one optimizer step, all ranks together; the last step of an epoch may have fewer."""

    @property
    def column_names(self) -> dict[str, str]:
        """Return the column names that the recipe sets, by the default name of each column."""
        default_names = ("prompt", "response", "chosen", "rejected", "label")
        name_by_default = {name: getattr(self, f"{name}_column_name", "") for name in default_names}
        return {
            name: each for name, each in name_by_default.items() if each and (name in default_names[:2] or each != name)
        }

    @model_validator(mode="after")
    def _check_columns_and_load_balancing(self) -> Self:
        prompt_column = getattr(self, "prompt_column_name", "")
        # A resolved recipe sets every key, so a value counts as set by the user only if it is not the default.
        default_conversation_column = type(self).model_fields["conversation_column_name"].default
        if prompt_column and self.conversation_column_name != default_conversation_column:
            columns_text = f"{prompt_column!r} and conversation_column_name = {self.conversation_column_name!r}"
            raise ValueError(f"prompt_column_name = {columns_text} both name what is asked; leave one out")
        if not self.enable_dp_load_balancing:
            return self
        if self.load_balanced_batching_strategy not in {"prefer_first", "prefer_closest"}:
            strategy = self.load_balanced_batching_strategy
            rule = "must be 'prefer_first' or 'prefer_closest'"
            raise ValueError(f"load_balanced_batching_strategy = {strategy!r} {rule}")
        if self.load_balanced_batches_per_optimizer_step < 1:
            num_batches = self.load_balanced_batches_per_optimizer_step
            raise ValueError(f"load_balanced_batches_per_optimizer_step = {num_batches} must be at least 1")
        return self

    @property
    def drops_last_rows(self) -> bool:
        return self.dataloader_drop_last

    @property
    def has_token_based_batches(self) -> bool:
        return self.enable_dp_load_balancing
