"""`[train.train_policy]` with `type = "sft"`: learn from conversations, plain text or preferences."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from cosmos_core.config.schema.dataset import DatasetConfig
from cosmos_core.config.schema.dpo import DpoConfig
from cosmos_core.config.schema.table import (
    LATER,
    Needs,
    NoResult,
    Only,
    PositiveInt,
    Rows,
    Table,
    Tokens,
    Unit,
    no_effect,
)

PREPARED = no_effect("the prepare stage keeps its rows and reuses them")
MAPPED = no_effect("prepared rows are memory-mapped, so nothing is loaded ahead")
POSITIONS = no_effect("each rank reads the rows of its own positions")


class SFTDataConfig(Table):
    """`type = "sft"`: learn the assistant's turns of conversations, or all of plain text."""

    type: Literal["sft"]
    """Which kind of training."""
    trainer_type: Annotated[
        str, Field(min_length=1), Only(("sft", "dpo"), "this version trains with 'sft' and 'dpo'"), LATER
    ] = "sft"
    """Loss: `sft`, `dpo` (rows are a prompt with a chosen and a rejected answer), `pi_sft` or a registered name."""
    dpo: DpoConfig = DpoConfig()
    """How answers are compared, with `trainer_type = "dpo"`."""
    dataset: DatasetConfig = DatasetConfig()
    """Rows to learn."""
    mini_batch: Rows = 2
    """Rows per forward pass, with `dpo` pairs; changes speed and memory, not results."""
    dataloader_shuffle: bool = True
    """Another order each epoch; False: the order of the file."""
    dataloader_seed: Annotated[int, LATER] = 0
    """Seed of that order."""
    dataloader_batch_size: Annotated[int, POSITIONS, LATER] = 1
    """Batch of the controller's iterator."""
    enable_dataset_cache: Annotated[bool, PREPARED] = False
    """Keep processed rows on disk."""
    dataloader_num_workers: Annotated[int, Unit("processes"), NoResult] = 0
    """Processes that tokenise in the `prepare` stage; 0 or less: one."""
    dataloader_prefetch_factor: Annotated[int | None, MAPPED] = None
    """Batches that a loader reads ahead."""
    dataloader_drop_last: Annotated[bool, LATER] = True
    """True: rows that fill no batch wait for another epoch; False: the last batch of an epoch may be smaller."""
    data_dispatch_as_rank_in_mesh: Annotated[bool, POSITIONS, LATER] = False
    """Hand out rows by global rank."""
    conversation_column_name: str = "conversations"
    """Column of the conversation; rows without it may have `messages`, `conversation`, `text` or `prompt` +
    `response`. With `dpo` that of the prompt, or `prompt`, beside `chosen` and `rejected`."""
    system_prompt: str = ""
    """Put before conversations that have no system turn; empty: none."""
    balance_dp_token: Annotated[
        bool, no_effect("losses are always divided by the tokens of all ranks together"), LATER
    ] = True
    """Divide by the tokens of all data-parallel ranks."""
    enable_dp_load_balancing: Annotated[bool, LATER] = False
    """Fill micro-batches to a budget of tokens; `train_batch_per_replica` and `dataloader_drop_last` mean nothing
    then."""
    load_balanced_pool_size: Annotated[PositiveInt, Unit("rows"), Needs("enable_dp_load_balancing"), LATER] = 32
    """Rows that are looked at to find the next one of a micro-batch."""
    load_balanced_max_tokens_for_batch: Annotated[Tokens | None, Needs("enable_dp_load_balancing"), LATER] = None
    """Budget of a micro-batch, padding counted unless `sequence_packing`; a longer row stands alone. None: `mini_batch`
    x `policy.model_max_length`."""
    load_balanced_batching_strategy: Annotated[str, Needs("enable_dp_load_balancing"), LATER] = "prefer_closest"
    """Which of equally cheap rows comes next: `prefer_first` the one that waits longest, `prefer_closest` the one
    nearest in length to the longest so far."""
    load_balanced_batches_per_optimizer_step: Annotated[
        int, Unit("micro-batches"), Needs("enable_dp_load_balancing"), LATER
    ] = 1
    """Micro-batches of one optimizer step, all ranks together; the last step of an epoch may have fewer."""
    dataloader_broadcast: Annotated[bool, POSITIONS, LATER] = False
    """One rank loads for its group."""

    @model_validator(mode="after")
    def _loaders(self) -> SFTDataConfig:
        if self.dataloader_num_workers <= 0:
            self.settle(dataloader_num_workers=0, dataloader_prefetch_factor=None)
        return self

    @model_validator(mode="after")
    def _preferences(self) -> SFTDataConfig:
        if self.trainer_type != "dpo" and self.dpo != DpoConfig():
            raise ValueError(f"dpo needs trainer_type = 'dpo', not {self.trainer_type!r}; set it or leave dpo out")
        return self

    @model_validator(mode="after")
    def _balanced(self) -> SFTDataConfig:
        if not self.enable_dp_load_balancing:
            return self
        if self.load_balanced_batching_strategy not in {"prefer_first", "prefer_closest"}:
            raise ValueError(
                f"load_balanced_batching_strategy = {self.load_balanced_batching_strategy!r} must be 'prefer_first' "
                f"or 'prefer_closest'"
            )
        if self.load_balanced_batches_per_optimizer_step < 1:
            raise ValueError(
                f"load_balanced_batches_per_optimizer_step = {self.load_balanced_batches_per_optimizer_step} must be "
                f"at least 1"
            )
        return self
