"""`[sample]`: the completions that a stage of kind `sample` keeps as rows."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from cosmos_core.config.schema.field_metadata import EnabledBy, ResultNeutral
from cosmos_core.config.schema.table import StageContext, Table, bounds_validator
from cosmos_core.config.schema.value_types import Fraction


class KeepConfig(Table):
    """`[sample.keep]`: which completions of a prompt become training rows."""

    best: NonNegativeInt = 0
    """Number of completions of each prompt to keep, those with the highest rewards; 0: all that pass the other keys.
    Without any key of `[sample.keep]` it is 1."""
    min_reward: float | None = None
    """Lowest reward of a kept completion; None: any valid reward."""
    unique: bool = True
    """If several completions of a prompt have the same text, keep only one of them."""
    finished: bool = True
    """Keep only completions that ended before `rollout.max_response_length`."""
    max_per_prompt: NonNegativeInt = 0
    """Maximum number of completions of a prompt to keep, chosen at random among those that pass the other keys; 0: no
    limit."""
    min_pass_rate: Fraction = 0.0
    """Lowest pass rate of a prompt whose completions are kept: the fraction of its completions with the full reward."""
    max_pass_rate: Fraction = 1.0
    """Highest pass rate of a prompt whose completions are kept; below 1, prompts that are too easy are left out."""

    _check_pass_rates = bounds_validator("min_pass_rate", "max_pass_rate")


class SampleStageConfig(Table):
    """`[sample]`: the completions that a stage of kind `sample` keeps as rows."""

    keep: KeepConfig = KeepConfig(best=1)
    """Selection of the completions that become rows. `rollout.n_generation` is the number of completions per prompt."""
    pairs: Literal["", "best-worst"] = ""
    """Format of the rows. Empty: a conversation for SFT. `best-worst`: a pair for DPO, of the best completion that
    passes `keep` and the worst completion of the same prompt."""
    min_margin: Annotated[NonNegativeFloat, EnabledBy("pairs")] = 0.0
    """With `pairs`: difference of rewards that the two completions of a pair must exceed."""
    endpoint: Annotated[str, Field(pattern=r"^(https?://[^\s]+)?$")] = ""
    """URL of an OpenAI-compatible server that completes the prompts, such as `http://host:8000/v1`; the model of the
    stage then only supplies the tokenizer. Empty: the model of the stage completes them."""
    endpoint_model: str = ""
    """With `endpoint`: name of the model with which the server completes prompts."""
    endpoint_key_env: Annotated[str, EnabledBy("endpoint"), ResultNeutral] = "OPENAI_API_KEY"
    """With `endpoint`: name of the environment variable with the API key of the server, if the server needs one."""
    endpoint_requests: Annotated[PositiveInt, EnabledBy("endpoint"), ResultNeutral] = 32
    """With `endpoint`: maximum number of requests at a time."""

    def unsupported_setting_errors(self, stage: StageContext) -> Iterator[str]:
        train_policy = stage.recipe.train.train_policy
        if stage.kind.table != "sample":
            return
        if not train_policy.has_rollouts:
            reason = "kind sample completes prompts and scores them"
            remedy = "set train.train_policy.type = 'grpo' and name its reward_function"
            yield f"train.train_policy.type = {train_policy.type!r}: {reason}; {remedy}"
        if stage.recipe.policy.is_diffusers:
            yield "policy.is_diffusers = true: kind sample writes rows of text; take a language model"
        if self.pairs and stage.recipe.rollout.n_generation < 2:
            yield f"sample.pairs = {self.pairs!r} compares completions of a prompt; set rollout.n_generation above 1"
        if self.endpoint and stage.recipe.rollout.multi_turn_config.enable:
            reason = "a server of sample.endpoint completes one turn, in its own chat template and without tools"
            yield f"rollout.multi_turn_config.enable = true: {reason}; set it to false, or leave sample.endpoint out"

    def notices(self, stage: StageContext) -> Iterator[str]:
        recipe = stage.recipe
        num_completions = recipe.rollout.batch_size * recipe.rollout.n_generation * recipe.policy.parallelism.world_size
        has_endpoint_requests = self.endpoint and self.is_set("endpoint_requests")
        if stage.kind.table == "sample" and has_endpoint_requests and self.endpoint_requests > num_completions:
            problem = f"sample.endpoint_requests = {self.endpoint_requests} has no effect above {num_completions}"
            reason = "prompts are completed in batches of rollout.batch_size x rollout.n_generation"
            yield f"{problem}: {reason}; raise rollout.batch_size"
        if stage.kind.table == "sample" and any(dataset.weight for dataset in stage.recipe.train.train_policy.datasets):
            yield "train.train_policy.datasets.weight has no effect here: kind sample completes each prompt once"

    @model_validator(mode="after")
    def _require_endpoint_model(self) -> Self:
        if bool(self.endpoint) != bool(self.endpoint_model):
            settings_text = f"endpoint = {self.endpoint!r} and endpoint_model = {self.endpoint_model!r}"
            raise ValueError(f"{settings_text}: name both, or neither")
        return self
