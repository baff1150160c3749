"""`[judge]`: settings of the language model that the reward `judge` queries for a score."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from cosmos_core.config.schema.field_metadata import FieldUnit, ResultNeutral
from cosmos_core.config.schema.table import StageContext, Table
from cosmos_core.config.schema.value_types import TokenCount


class JudgeConfig(Table):
    """`[judge]`: settings of the reward `judge`."""

    endpoint: Annotated[str, Field(pattern=r"^(https?://[^\s]+)?$")] = ""
    """URL of the OpenAI-compatible server that runs the judge, such as `http://host:8000/v1`."""
    model: str = ""
    """Name of the language model on the server at `endpoint` that judges completions."""
    rubric: str = "Judge how correct and helpful the response is."
    """Instructions for the language model that judges completions. The form of its reply is added to them: a whole
    number from 0 to `highest_score`, with a reason before it."""
    template: str = "Prompt:\n{prompt}\n\nReference answer:\n{reference}\n\nResponse:\n{completion}"
    """Message to the judge for each completion, in which `{prompt}`, `{reference}` and `{completion}` are replaced."""
    highest_score: PositiveInt = 10
    """Highest score that the judge may give, by which its score is divided to give the reward."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature of the judge."""
    max_tokens: TokenCount = 512
    """Maximum number of tokens of the judge's reply."""
    timeout_seconds: Annotated[PositiveFloat, FieldUnit("seconds")] = 300.0
    """Time limit of the judge for all completions of one prompt, including the time that requests wait at the server;
    completions without a score are then invalid. `reward_timeout_seconds` does not apply to the judge."""
    key_env: Annotated[str, ResultNeutral] = "OPENAI_API_KEY"
    """Name of the environment variable with the API key of the judge's server, if the server needs one."""
    cache: Annotated[bool, ResultNeutral] = True
    """Keep replies in the cache folder of the user, so that the same completion is not judged twice."""

    def unsupported_setting_errors(self, stage: StageContext) -> Iterator[str]:
        if not (stage.kind.scores and stage.recipe.uses_judge):
            return
        if not (self.endpoint and self.model):
            yield "the reward judge needs judge.endpoint, the URL of a server, and judge.model, the name of its model"
        if "{completion}" not in self.template:
            yield "judge.template has no {completion}, without which the judge does not see what it judges"
