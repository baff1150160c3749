"""`[policy.parallelism]`, `[rollout.parallelism]`, `[distillation.parallelism]`: device meshes."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import PositiveInt, field_validator

from cosmos_core.config.schema.field_metadata import FieldUnit
from cosmos_core.config.schema.table import StageContext, Table
from cosmos_core.config.schema.value_types import RankCount


class ParallelismConfig(Table):
    """Sizes of a device mesh of pp x dp_replicate x dp_shard x cp x tp ranks; ep reuses dp_shard x cp."""

    n_init_replicas: Annotated[PositiveInt, FieldUnit("replicas")] = 1
    """Number of copies of the mesh, each with `train_batch_per_replica` rows per step; equivalent to a
    `dp_replicate_size` and a number of rows that are larger by this factor."""
    tp_size: RankCount = 1
    """Number of tensor-parallel ranks, which split the layers by the `tp_plan` of the model in transformers (Cosmos-RL:
    2 by default)."""
    cp_size: RankCount = 1
    """Number of context-parallel ranks, which share one sequence of packed rows (Ulysses), or with SANA-Video the
    tokens of a clip."""
    ep_size: RankCount = 1
    """Number of ranks, out of dp_shard_size x cp_size, over which the experts of every layer are distributed; each of
    these ranks has its own rows."""
    dp_shard_size: Annotated[int, FieldUnit("ranks")] = 1
    """Number of ranks that shard the parameters (FSDP). -1: so many that the mesh and the engines with GPUs of their
    own use all GPUs, which are `pipeline.gpus` or those of this machine."""
    pp_size: RankCount = 1
    """Number of pipeline-parallel ranks, each of which has some of the layers."""
    pp_dynamic_shape: bool = False
    """Allow pipeline micro-batches of different lengths."""
    pp_micro_batch_size: Annotated[PositiveInt, FieldUnit("rows")] = 1
    """Number of rows of one pipeline micro-batch; the pipeline is synchronised after `mini_batch` rows."""
    dp_replicate_size: RankCount = 1
    """Number of replicas of the sharded group (HSDP)."""
    pp_schedule: Literal["1F1B", "GPipe", "Interleaved1F1B"] = "Interleaved1F1B"
    """Pipeline schedule: the order of forward and backward passes. `1F1B` and `GPipe` form one pipeline stage from each
    rank's layers, `Interleaved1F1B` several; `GPipe` keeps the activations of all `mini_batch` rows."""
    pp_layers_per_stage: Annotated[PositiveInt, FieldUnit("layers")] = 2
    """Maximum number of layers of a pipeline stage under `Interleaved1F1B`: fewer layers mean less idle time, more
    messages."""

    @field_validator("dp_shard_size")
    @classmethod
    def _check_shard_size(cls, shard_size: int) -> int:
        if shard_size == 0 or shard_size < -1:
            raise ValueError(f"dp_shard_size = {shard_size} must be -1 (the rest of the world) or at least 1")
        return shard_size

    @property
    def world_size(self) -> int:
        """Return the number of ranks of one replica; dp_shard_size -1 counts as 1."""
        return self.tp_size * self.cp_size * self.pp_size * self.num_dp_ranks

    @property
    def num_dp_ranks(self) -> int:
        """Return the number of data-parallel ranks, each of which gets different samples of a train step."""
        return abs(self.dp_shard_size) * self.dp_replicate_size

    def num_pipeline_stages(self, num_layers: int) -> int:
        """Return the number of pipeline stages of a model: one per rank, or under `Interleaved1F1B` so
        many that no stage has more than `pp_layers_per_stage` layers."""
        if self.pp_schedule != "Interleaved1F1B" or self.pp_size == 1:
            return self.pp_size
        return self.pp_size * -(-num_layers // (self.pp_size * self.pp_layers_per_stage))


class RolloutParallelismConfig(ParallelismConfig):
    """`[rollout.parallelism]`: number and size of the rollout engines, on the ranks of `policy.parallelism` or in
    separate processes."""

    n_init_replicas: Annotated[PositiveInt, FieldUnit("replicas")] = 1
    """Number of engines in separate processes (see `mode`); how many run in the trainer's processes follows from the
    number of ranks."""
    tp_size: RankCount = 1
    """Number of ranks of one engine (Cosmos-RL: 2 by default): a divisor of the ranks of `policy.parallelism`; with
    `mode = "colocated_separated"`, processes on the GPUs of as many ranks on one machine; with `mode =
    "disaggregated"`, processes on as many separate GPUs of one machine."""


class PolicyParallelismConfig(ParallelismConfig):
    """`[policy.parallelism]`: the device mesh of the trainer; the rows of a train step are distributed over
    dp_replicate x dp_shard ranks."""

    def unsupported_axis_errors(self, setting: str, *, allows_tp: bool = False) -> Iterator[str]:
        """Yield an error for each mesh axis with more than one rank that splits layers, because `setting` needs whole
        layers on each rank. With `allows_tp`, tensor parallelism is accepted."""
        for axis in ("cp_size", "pp_size", "ep_size") if allows_tp else ("tp_size", "cp_size", "pp_size", "ep_size"):
            if getattr(self, axis) > 1:
                yield f"{setting} excludes policy.parallelism.{axis} = {getattr(self, axis)} here; set it to 1"

    def unsupported_setting_errors(self, stage: StageContext) -> Iterator[str]:
        if not stage.kind.has_mesh:
            return
        num_shards = abs(self.dp_shard_size)
        if stage.recipe.train.fsdp_offload and (self.ep_size > 1 or num_shards * self.cp_size == 1):
            ranks_text = f"dp_shard_size x cp_size = {num_shards} x {self.cp_size} ranks"
            yield f"train.fsdp_offload = true is for weights that {ranks_text} shard, with ep_size = 1; leave it out"

    def notices(self, stage: StageContext) -> Iterator[str]:
        config, num_dp_ranks = stage.recipe.train, self.num_dp_ranks
        policy, num_rows = config.train_policy, config.train_batch_per_replica
        if not policy.has_rollouts and num_dp_ranks > 1:
            ranks_text = f"of all {num_dp_ranks} data-parallel ranks together (Cosmos-RL: of each)"
            yield f"train.train_batch_per_replica = {num_rows}: rows of an optimizer step, {ranks_text}"
        if config.compile and "compile" in config.model_fields_set and self.tp_size > 1 and stage.kind.has_mesh:
            reason = f"torch does not compile weights that tp_size = {self.tp_size} splits for rows of any length"
            yield f"train.compile = true: the blocks run as they are, because {reason}"
        if config.rows_per_pass < self.pp_size * self.pp_micro_batch_size and self.pp_size > 1:
            limit_text = f"pp_size x pp_micro_batch_size = {self.pp_size} x {self.pp_micro_batch_size}"
            reason = f"rows that go through the pipeline between two waits, fewer than {limit_text}"
            yield f"train.train_policy.mini_batch = {policy.mini_batch}: {reason}; raise it to keep the ranks busy"
