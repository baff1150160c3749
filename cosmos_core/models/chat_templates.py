"""Built-in chat templates for `policy.chat_template`, which replaces the chat template of a tokenizer or adds one."""

import os
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from cosmos_core.errors import ConfigError

_KEY = "policy.chat_template"
TEMPLATES = {
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


def set_template(tokenizer: PreTrainedTokenizerBase, name: str | None) -> None:
    """Set the chat template of a tokenizer. `name` is a key of `TEMPLATES`, or the path of a Jinja file; None: keep the
    template of the tokenizer. Raise ConfigError if there is no such file, or if the tokenizer lacks a token of the
    template."""
    if name is None:
        return
    if name not in TEMPLATES:
        try:
            tokenizer.chat_template = Path(os.path.expanduser(name)).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{_KEY} = {name!r} is none of {', '.join(TEMPLATES)}, and no file: {error}") from None
        return
    needed_tokens = ["<|im_start|>", "<|im_end|>"] if name == "chatml" else [tokenizer.eos_token or "eos_token"]
    if missing_tokens := [token for token in needed_tokens if token not in tokenizer.get_vocab()]:
        raise ConfigError(f"{_KEY} = {name!r} needs the token {missing_tokens[0]}, which the tokenizer does not have")
    tokenizer.chat_template = TEMPLATES[name]
