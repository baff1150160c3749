"""`[pipeline]`: the graph of stages, the one root table that Cosmos-RL does not have."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationInfo, field_validator

from cosmos_core.config.conditions import parse_condition
from cosmos_core.config.schema.field_metadata import FieldUnit, ReferenceKind, ResultNeutral
from cosmos_core.config.schema.sweep import SweepConfig
from cosmos_core.config.schema.table import StageContext, Table
from cosmos_core.config.schema.value_types import Fraction, StringOrList
from cosmos_core.config.target import LOCAL_FOLDER_TARGET, PUBLICATION_TARGETS_FOLDER, split_publication_target
from cosmos_core.registry import is_import_path, list_defined_names

_DURATION_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d)")
_SECONDS_BY_UNIT = {"s": 1, "m": 60, "h": 3600, "d": 86400}
STAGE_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
MAX_STAGE_NAME_LENGTH = 64
BUDGET_KEYS = frozenset({"price_per_gpu_hour", "budget"})
"""Keys of `[pipeline]` whose values can be changed in an existing run."""
BLOCK_PREFIX = "block:"
"""Prefix of a value that names a Prefect block."""


def duration_in_seconds(duration_text: str) -> float:
    """Return the seconds of a duration such as `90s`, `15m`, `12h`, `2d`; raise `ValueError` for any other text."""
    duration_match = _DURATION_PATTERN.fullmatch(duration_text.strip())
    if not duration_match:
        raise ValueError(f"timeout = {duration_text!r} must be a number and a unit: 90s, 15m, 12h or 2d")
    return float(duration_match[1]) * _SECONDS_BY_UNIT[duration_match[2]]


class StageConfig(Table):
    """`[[pipeline.stages]]`: one stage of the pipeline."""

    name: str
    """Name of the stage, unique in the pipeline: the name of its folder, also used in `after` and `stage:NAME`."""
    kind: str
    """Kind of the stage: prepare, sft, rl, sample, validate, evaluate, merge, export, select, gate, upload, report or
    custom."""
    recipe: str = ""
    """Recipe file, relative to the pipeline's file; empty: the recipe tables of the pipeline's file."""
    overrides: dict[str, Any] = {}
    """Recipe tables for this stage only; they take precedence over `recipe`, which takes precedence over the recipe
    tables of the pipeline's file."""
    after: StringOrList = ()
    """Names of the stages that must be done before this stage starts."""
    model: Annotated[str, ReferenceKind.PATH] = ""
    """Model that the stage starts from: `stage:NAME` for the export of that stage, or a folder; empty:
    `policy.model_name_or_path`."""
    checkpoint: str = ""
    """Kind export: the checkpoint to export of the training that `model` names: `best` (by its validation) or a step;
    empty: the final model. A `validate` stage after the export measures that checkpoint."""
    format: Literal["", "bf16", "fp8", "int8", "w4a16"] = ""
    """Kinds evaluate and upload: the format to read of the export that `model` names, one of its `export.formats`;
    empty: the model without quantisation."""
    data: Annotated[str, ReferenceKind.PATH] = ""
    """Rows of the stage: `stage:NAME` for the rows that a stage of kind prepare, sample or custom wrote; empty: the
    recipe's dataset. Kind export: the prepared rows on which formats are compared; empty: the rows of the training
    before the export."""
    reward_service: Annotated[str, ReferenceKind.PATH] = ""
    """Kinds rl, sft, sample, validate and custom: configuration file of a reward service to run during the stage
    (`cosmos reward-service`), or `block:NAME` for a running service, whose address and token are in a Prefect block;
    empty: the service at `REMOTE_REWARD_ENQUEUE_URL`."""
    reward_service_pool: Annotated[str, Field(pattern=r"^[\w.-]*$")] = ""
    """With a configuration file in `reward_service`: Prefect work pool on which the service is started for the stage,
    through the deployment `reward-service/POOL`; its machines must be able to read that file. Empty: the machine of the
    stage."""
    work_pool: Annotated[str, Field(pattern=r"^[\w.-]*$")] = ""
    """Prefect work pool that runs the stage, through the deployment `stage/POOL`; its machines share the run directory,
    or exchange files through the `artifact_store`. Empty: the machine of the flow."""
    retries: NonNegativeInt = 2
    """Maximum number of consecutive attempts without progress before the stage fails. Preemptions do not count."""
    timeout: str = ""
    """Time limit of one attempt of the stage, e.g. `12h`; empty: no limit."""
    entry: Annotated[str, ReferenceKind.CODE] = ""
    """Kind custom: the function, `module:function` or `path/file.py:function`, called with the stage."""
    arguments: dict[str, Any] = {}
    """Kind custom: keyword arguments of the function in `entry`."""
    env: StringOrList = ()
    """Kind custom: names of environment variables that the function receives, such as the key of a service, in addition
    to those that every subprocess receives, such as PATH; their values are masked in logs."""
    require: StringOrList = ()
    """Kind gate: conditions that the model must meet, such as `validation/accuracy >= 0.6`, `validation/accuracy >=
    published - 0.01` or `evaluation/*/acc not worse than published by 0.02`, where `*` stands for every metric that
    matches. If several stages report a metric, that of the last stage in `after` counts; `STAGE.METRIC` names another
    stage."""
    confidence: Annotated[Fraction, Field(lt=1)] = 0.0
    """Kind gate: confidence level of comparisons with `published`: at 0.95 a model passes if its improvement exceeds
    the noise of both measurements in 95 of 100 cases. Available for accuracy, pass@k and reward, and for a metric that
    is reported with a metric `NAME_stderr`. Benchmarks of which both models have the results of the same items are
    compared per item. 0: values are compared directly."""
    target: Annotated[str, ReferenceKind.PUBLICATION_TARGET] = ""
    """Kinds upload and gate: where models are published: a folder, `s3://BUCKET/PREFIX`, `hub://OWNER/NAME` (or
    `hub://OWNER/NAME@BRANCH`), a registered model of MLflow, `mlflow://MODEL`, or a class of your own,
    `path/file.py:Class` or `path/file.py:Class://LOCATION`, with the methods of `PublicationTarget`."""

    sweep: SweepConfig | None = None
    """Run the stage once for each point of a grid, in parallel; stages after it use the best branch. None: once."""

    def unsupported_setting_errors(self, stage: StageContext) -> Iterator[str]:
        target_name, location = split_publication_target(self.target)
        if target_name == LOCAL_FOLDER_TARGET and location.startswith("~"):
            home = location.partition("/")[0]
            yield f"target = {self.target!r}: {home} is no user of this machine; write the whole path, or ./{location}"
        target_names = list_defined_names(PUBLICATION_TARGETS_FOLDER, "Target")
        if not is_import_path(target_name) and target_name not in target_names:
            remedy = f"give a folder, a URL of {', '.join(target_names)}, or a class of your own, path/file.py:Class"
            yield f"target = {self.target!r}: this version does not publish there; {remedy}"

    @field_validator("name")
    @classmethod
    def _check_stage_name(cls, name: str) -> str:
        if not STAGE_NAME_PATTERN.fullmatch(name) or len(name) > MAX_STAGE_NAME_LENGTH:
            rule = f"at most {MAX_STAGE_NAME_LENGTH} letters, digits, - and _, and start with a letter or digit"
            raise ValueError(f"stage name {name!r} must be {rule}")
        return name

    @field_validator("reward_service_pool")
    @classmethod
    def _require_service_file(cls, service_pool: str, info: ValidationInfo) -> str:
        reward_service = info.data.get("reward_service", "")
        if service_pool and (not reward_service or reward_service.startswith(BLOCK_PREFIX)):
            raise ValueError(f"reward_service_pool = {service_pool!r} needs the file of a service in reward_service")
        return service_pool

    @field_validator("checkpoint")
    @classmethod
    def _check_checkpoint_name(cls, checkpoint: str) -> str:
        if checkpoint not in {"", "best"} and not (checkpoint.isascii() and checkpoint.isdigit() and int(checkpoint)):
            raise ValueError(f"checkpoint = {checkpoint!r} must be 'best' or the number of a train step")
        return checkpoint

    @field_validator("timeout")
    @classmethod
    def _check_timeout(cls, timeout: str) -> str:
        if timeout and not duration_in_seconds(timeout):
            raise ValueError(f"timeout = {timeout!r} must be above 0; leave it out for no limit")
        return timeout

    @field_validator("require")
    @classmethod
    def _check_conditions(cls, conditions: tuple[str, ...]) -> tuple[str, ...]:
        for condition in conditions:
            parse_condition(condition)
        return conditions

    @property
    def timeout_seconds(self) -> float | None:
        """Return the time limit of one attempt in seconds; None: no limit."""
        return duration_in_seconds(self.timeout) if self.timeout else None


class PipelineConfig(Table):
    """`[pipeline]`: settings of a run, and the graph of its stages."""

    name: str = "pipeline"
    """Name of the pipeline in logs, in Prefect and in the report."""
    output_dir: str = ""
    """Folder of all runs, relative to the current folder; empty: `train.output_dir`, which defaults to ./outputs."""
    threads: PositiveInt | None = None
    """Number of CPU threads of a stage's worker; None: all cores. The fingerprint includes this number, because it
    changes the order of sums and thereby the last bits of results."""
    gpus: Annotated[PositiveInt | None, FieldUnit("GPUs"), ResultNeutral] = None
    """Maximum number of GPUs of one stage; None: not checked."""
    gpus_per_node: Annotated[PositiveInt, FieldUnit("GPUs"), ResultNeutral] = 8
    """Number of GPUs of one machine, for `plan --estimate`."""
    gpu_memory: Annotated[PositiveFloat | None, FieldUnit("GiB"), ResultNeutral] = None
    """Memory of one GPU, with which `plan --estimate` decides whether a stage fits. None: the memory of the GPU of
    `--on`, otherwise of this machine's GPU, or the host memory if it has no GPU."""
    gpu_tflops: Annotated[PositiveFloat | None, FieldUnit("TFLOP/s"), ResultNeutral] = None
    """Sustained throughput of one GPU in training, for `plan --estimate` of a stage that was never run. None: 40 % of
    the data sheet value of the GPU that `--on` names, otherwise half of the throughput of a matrix product on this
    machine."""
    price_per_gpu_hour: Annotated[PositiveFloat | None, ResultNeutral] = None
    """Price of one GPU for an hour, in any currency, with which `plan --estimate`, `runs --cost`, the report and the
    card of a run show costs. What counts is the time for which a stage holds GPUs, in all its attempts; on a machine
    without GPUs each rank and each engine with a GPU of its own in the placement counts as one. None: no costs."""
    budget: Annotated[PositiveFloat | None, ResultNeutral] = None
    """Maximum cost of a run, in the currency of `price_per_gpu_hour`: a run that reaches it saves a checkpoint and
    stops with exit code 75; `cosmos resume RUN --budget AMOUNT` continues it. Stages without GPUs are not stopped.
    None: no limit."""
    grace_seconds: Annotated[PositiveFloat, ResultNeutral] = 20.0
    """Time in seconds between SIGTERM and SIGKILL, in which a worker saves its checkpoint. The duration of the longest
    step so far is added, because the worker first finishes its step; when the flow itself is killed, its workers have
    at most 10 s."""
    python: Annotated[str, ResultNeutral] = ""
    """Path of the Python interpreter of the workers; empty: the interpreter of the command."""
    artifact_store: Annotated[str, Field(pattern=r"^(s3://[^/\s#]+(/[^\s#]+)?)?$"), ResultNeutral] = ""
    """URL of a shared store, `s3://BUCKET/PREFIX`, for machines that share no disk: outputs of stages and checkpoints
    of trainings are pushed there under content hashes, and pulled by the stages that read them. Empty: the machines of
    all work pools share the folder of runs."""
    private: Annotated[bool | None, ResultNeutral] = None
    """Restrict the run to its user. True: only the user can read the run directory (0700) and the files of its workers,
    and no samples are sent to the Prefect server. False: the umask decides. None: true if the umask allows no other
    reader when the run starts; the choice then holds on every machine of the run."""
    stages: Annotated[tuple[StageConfig, ...], Field(strict=False)] = ()
    """Stages of the pipeline, in any order."""

    @field_validator("budget")
    @classmethod
    def _check_budget_has_price(cls, budget: float | None, info: ValidationInfo) -> float | None:
        if budget is not None and info.data.get("price_per_gpu_hour") is None:
            raise ValueError(f"budget = {budget:g} needs price_per_gpu_hour, with which costs are computed")
        return budget
