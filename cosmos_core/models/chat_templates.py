"""Built-in chat templates for `policy.chat_template`, which replaces the chat template of a tokenizer or adds one."""

import os
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from cosmos_core.errors import ConfigError

CHAT_TEMPLATES = {
    "plain": (
        "{{ bos_token or '' }}{% for m in messages %}{% if m.role == 'assistant' %}{{ 'Assistant: ' + m.content "
        "+ eos_token }}{% else %}{{ m.role | capitalize + ': ' + m.content }}{% endif %}{{ '\n\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    ),
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
}


def set_chat_template(tokenizer: PreTrainedTokenizerBase, name: str | None) -> None:
    """Set the chat template of a tokenizer. `name` is a key of `CHAT_TEMPLATES`, or the path of a Jinja file; None:
    keep the template of the tokenizer. Raise ConfigError if the file is missing, empty or JSON, or if the tokenizer's
    vocabulary lacks tokens of the template."""
    if name is None:
        return
    if name not in CHAT_TEMPLATES:
        try:
            template_text = Path(os.path.expanduser(name)).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            templates = ", ".join(CHAT_TEMPLATES)
            raise ConfigError(f"policy.chat_template = {name!r} is none of {templates}, and no file: {error}") from None
        check_template_text("policy.chat_template", name, template_text)
        tokenizer.chat_template = template_text
        return
    required_tokens = ["<|im_start|>", "<|im_end|>"] if name == "chatml" else [tokenizer.eos_token or "eos_token"]
    if missing_tokens := [token for token in required_tokens if token not in tokenizer.get_vocab()]:
        problem = f"needs the token {missing_tokens[0]}, which the tokenizer does not have"
        raise ConfigError(f"policy.chat_template = {name!r} {problem}")
    tokenizer.chat_template = CHAT_TEMPLATES[name]


def check_template_text(setting_key: str, template_file: str, template_text: str) -> None:
    """Raise ConfigError if a file with a chat template is empty, or is JSON, whose syntax each rendered row would
    contain. `setting_key` is the recipe key that names the file, for the error message."""
    is_json_file = template_file.lower().endswith(".json")
    if is_json_file or not template_text.strip():
        problem = "is JSON; save the value of its chat_template" if is_json_file else "is empty; write a template"
        raise ConfigError(f"{setting_key} = {template_file!r} {problem} as a .jinja file")
