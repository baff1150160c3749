"""A chat template whose tool calls the parser does not read is refused: no call would be made."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from cosmos_core.data.chat import PromptRendering, ToolResultTokens
from cosmos_core.errors import ModelError
from cosmos_core.run.files import write_json
from cosmos_core.run.stage import CHECKED_PROMPTS_FILE
from cosmos_core.train.check import run
from tests.effects.change import GRPO, recipe, stage_of
from tests.unit.tiny_model import save_tiny_model

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HERMES = '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": ARGUMENTS}\n</tool_call>'

SETTINGS = {
    **GRPO, "train.train_policy.bypass_reward": True, "rollout.backend": "hf", "policy.model_max_length": 64,
    "rollout.multi_turn_config": {"enable": True, "enable_tools": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(save_tiny_model(tmp_path_factory.mktemp("tiny")))
    return found


def opened(tokenizer: PreTrainedTokenizerBase, call: str) -> ToolResultTokens:
    return ToolResultTokens(
        tokenizer, PromptRendering(template=TEMPLATE.replace("CALL", call)), [tokenizer.eos_token_id]
    )


@pytest.mark.parametrize(
    "call",
    [
        HERMES.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}"),
        HERMES.replace("ARGUMENTS", "{{ c.function.arguments }}"),  # a text, as some templates want it
        "<tool_call>{{ c.function | tojson }}</tool_call>",
        "",  # nothing is known of the form
    ],
)
def test_calls_that_are_read_are_taken(call: str, tokenizer: PreTrainedTokenizerBase) -> None:
    assert opened(tokenizer, call)


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}',  # Llama 3
        "[TOOL_CALLS] [{{ c.function | tojson }}]",  # Mistral
        "<tool_call>\n<function={{ c.function.name }}>\n<parameter=word>\nforty-two\n</parameter></tool_call>",
        "<tool_call>{{ c.function.name }}\n<arg_key>word</arg_key></tool_call>",  # GLM
        "to=functions.{{ c.function.name }} {{ c.function.arguments | tojson }}",
        "{% if m.content is none %}<tool_sep>{{ c.function.name }}\n```json{% endif %}",  # DeepSeek-R1
    ],
)
def test_another_form_is_refused_with_what_one_call_looks_like(call: str, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ModelError, match=r"writes a tool call as '.*look_up_word.*', which is not read"):
        opened(tokenizer, call)


def test_the_form_is_checked_where_no_reward_is_called_too(tmp_path: Path) -> None:
    """As in a distillation, whose completions a teacher judges."""
    model = save_tiny_model(tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE.replace("CALL", "[TOOL_CALLS] [{{ c.function | tojson }}]"))
    with pytest.raises(ModelError, match=r"enable_tools: the chat template .* writes a tool call as .*TOOL_CALLS"):
        run(stage_of(tmp_path / "stage", recipe(SETTINGS), kind="rl", model=model))


def test_tools_that_only_rows_describe_are_named(tmp_path: Path) -> None:
    """The column `tools` is what the policy is told, but functions that the recipe does not name cannot be called."""
    model = save_tiny_model(tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE.replace("CALL", ""))
    stage = stage_of(tmp_path / "stage", recipe(SETTINGS), kind="rl", model=model)
    rows = [{"metadata": {"tools": [{"type": "function", "function": {"name": "look_up"}}]}}, {"metadata": {}}]
    write_json(stage.path / CHECKED_PROMPTS_FILE, {"train": rows})
    assert "rows describe look_up in their column `tools`" in run(stage).info["found"]
