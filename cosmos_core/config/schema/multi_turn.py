"""`[rollout.multi_turn_config]`: conversations of several turns, and the tools that are called between the turns."""

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field, PositiveFloat, PositiveInt, ValidationInfo, field_validator

from cosmos_core.config.schema.field_metadata import EnabledBy, FieldUnit, ReferenceKind, ResultNeutral
from cosmos_core.config.schema.table import StageContext, Table, add_notice
from cosmos_core.config.schema.value_types import NameOrImportPath, StringOrList

_TABLE_NAME = "rollout.multi_turn_config"


class MultiTurnRolloutConfig(Table):
    """`[rollout.multi_turn_config]`: settings of conversations of several turns, and of tools."""

    enabling_field: ClassVar[str] = "enable"

    enable: bool = False
    """Allow completions with more than one assistant turn, and apply the settings of this table to prompts."""
    enable_tools: bool = False
    """Execute the tool calls that end an assistant turn, in the format of Hermes (`<tool_call>{...}</tool_call>`), and
    insert their results before the next turn."""
    tools: Annotated[
        tuple[NameOrImportPath, ...], Field(strict=False), EnabledBy("enable_tools"), ReferenceKind.CODE
    ] = ()
    """Tools that the policy may call: functions decorated with `@tool` of `cosmos_core.tools.base`, as
    `path/file.py:function` or `module:function`. A row's column `tools` replaces the tools in its prompt."""
    tool_timeout_seconds: Annotated[PositiveFloat, FieldUnit("seconds"), EnabledBy("enable_tools")] = 10.0
    """Time limit of a tool call, after which the call is killed; its result is then an error message for the policy."""
    tool_env: Annotated[StringOrList, ResultNeutral, EnabledBy("enable_tools")] = ()
    """Names of environment variables that tools receive, such as the key of a service, in addition to those that every
    subprocess receives, such as PATH; their values are masked in logs."""
    enable_thinking: bool = False
    """Value that is passed to the chat template as its variable `enable_thinking`."""
    custom_chat_template_path: Annotated[str | None, ResultNeutral, ReferenceKind.PATH] = None
    """Jinja file of the chat template that renders prompts and tool results; None: the tokenizer's template. Exports
    keep the tokenizer's template."""
    max_assistant_turns: Annotated[PositiveInt, FieldUnit("turns")] = 5
    """Maximum number of assistant turns of a conversation."""
    add_generation_prompt: bool = True
    """Add the beginning of the assistant's turn after a prompt and after tool results; false: the policy generates
    it."""
    continue_final_message: bool = False
    """Leave the last message of a prompt open, so that the policy continues it; if it is an assistant message, it stays
    in the prompt. False if both `enable_tools` and `add_generation_prompt` are true, with a notice."""

    @property
    def enabled_tools(self) -> tuple[str, ...]:
        """Return the import paths of the tools that the policy may call; empty if tools are disabled."""
        return self.tools if self.enable and self.enable_tools else ()

    @field_validator("continue_final_message")
    @classmethod
    def _disable_message_continuation(cls, should_continue_message: bool, info: ValidationInfo) -> bool:
        if not (should_continue_message and info.data.get("enable_tools") and info.data.get("add_generation_prompt")):
            return should_continue_message
        conflict_text = "enable_tools and add_generation_prompt are set"
        add_notice(info, f"{_TABLE_NAME}.continue_final_message: false, because {conflict_text}")
        return False

    def unsupported_setting_errors(self, stage: StageContext) -> Iterator[str]:
        if self.continue_final_message and self.add_generation_prompt:
            yield f"{_TABLE_NAME}.continue_final_message excludes add_generation_prompt; set that to false"

    def notices(self, stage: StageContext) -> Iterator[str]:
        if not self.enable_tools:
            yield f"{_TABLE_NAME}.enable: without enable_tools every conversation ends with its first assistant turn"
        elif not self.tools:
            yield f"{_TABLE_NAME}.enable_tools: every call fails, because no function is named in {_TABLE_NAME}.tools"
