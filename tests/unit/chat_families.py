"""Chat templates in the manner of public model families, and the text that each is expected to write, piece by piece.

The templates are short ones of our own with the habits of the real ones. Of each there are two versions that have to
agree: Jinja, and a generator of (text, whether the model has to write it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

Message = dict[str, str]
Pieces = Iterator[tuple[str, bool]]


class Family(NamedTuple):
    """A chat template with its tokens."""

    template: str
    pieces: Callable[[list[Message]], Pieces]
    end_token: str
    special: tuple[str, ...] = ()
    """Other tokens that stand for themselves."""
    refuses_system: bool = False


_ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)
_HELPFUL = "You are a helpful assistant."


def _after_thoughts(content: str) -> str:
    return content.rsplit("</think>", 1)[-1]


def _marked(
    head: str, end: str, after: str = "", *, start: str = "", before: str = "", trim: bool = False
) -> Callable[[list[Message]], Pieces]:
    """Turns that are marked alike, whoever speaks; `before` and `end` belong to what is said."""

    def pieces(messages: list[Message]) -> Pieces:
        yield start, False
        for m in messages:
            yield head.format(m["role"]), False
            yield before + (m["content"].strip() if trim else m["content"]) + end, m["role"] == "assistant"
            yield after, False

    return pieces


_chatml = _marked("<|im_start|>{}\n", "<|im_end|>", "\n")
CHATML = Family(
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    _chatml,
    "<|im_end|>",
    ("<|im_start|>",),
)


def _qwen2(messages: list[Message]) -> Pieces:
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": _HELPFUL}, *messages]
    yield from _chatml(messages)


QWEN2 = CHATML._replace(
    template="{% if messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}" + CHATML.template,
    pieces=_qwen2,
)


def _qwen3(messages: list[Message]) -> Pieces:
    last_question = max(i for i, m in enumerate(messages) if m["role"] == "user")
    for i, m in enumerate(messages):
        content = m["content"]
        if m["role"] == "assistant":
            thoughts = content.split("</think>")[0].split("<think>")[-1].strip("\n") if "</think>" in content else ""
            content = _after_thoughts(content).lstrip("\n")
            if i > last_question:
                content = f"<think>\n{thoughts}\n</think>\n\n{content}"
        yield f"<|im_start|>{m['role']}\n", False
        yield f"{content}<|im_end|>", m["role"] == "assistant"
        yield "\n", False


QWEN3 = CHATML._replace(
    template="{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set text = m.content %}{% if m.role == 'assistant' %}{% set thoughts = '' %}"
    "{% if '</think>' in text %}{% set thoughts = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set text = text.split('</think>')[-1] %}{% endif %}{% set text = text.lstrip('\n') %}"
    "{% if loop.index0 > ns.last %}{% set text = '<think>\n' + thoughts + '\n</think>\n\n' + text %}{% endif %}"
    "{% endif %}{{ '<|im_start|>' + m.role + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    pieces=_qwen3,
    special=("<|im_start|>", "<think>", "</think>"),
)


LLAMA3 = Family(
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    _marked("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>", start="<s>", trim=True),
    "<|eot_id|>",
    ("<|start_header_id|>", "<|end_header_id|>"),
)


def _llama2(messages: list[Message]) -> Pieces:
    system = ""
    if messages[0]["role"] == "system":
        system = f"<<SYS>>\n{messages[0]['content']}\n<</SYS>>\n\n"
        messages = messages[1:]
    for i, m in enumerate(messages):
        if m["role"] == "user":
            yield f"<s>[INST] {(system if i == 0 else '') + m['content'].strip()} [/INST]", False
        else:
            yield f" {m['content'].strip()} </s>", True


LLAMA2 = Family(
    "{% set system = '' %}{% if messages[0].role == 'system' %}"
    "{% set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}{% set messages = messages[1:] %}"
    "{% endif %}{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '<s>[INST] ' + (system if loop.first else '') + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' </s>' }}{% endif %}{% endfor %}",
    _llama2,
    "</s>",
)


def _mistral1(messages: list[Message]) -> Pieces:
    yield "<s>", False
    for m in messages:
        if m["role"] == "user":
            yield f"[INST] {m['content']} [/INST]", False
        else:
            yield f"{m['content']}</s>", True
            yield " ", False


MISTRAL1 = Family(
    _ALTERNATE + "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]'"
    " }}{% else %}{{ m.content + eos_token + ' ' }}{% endif %}{% endfor %}",
    _mistral1,
    "</s>",
    ("[INST]", "[/INST]"),
    refuses_system=True,
)


def _mistral3(messages: list[Message]) -> Pieces:
    system = messages[0]["content"] + "\n\n" if messages[0]["role"] == "system" else ""
    turns = messages[bool(system) :]
    last_question = max(i for i, m in enumerate(turns) if m["role"] == "user")
    yield "<s>", False
    for i, m in enumerate(turns):
        if m["role"] == "user":
            yield f"[INST] {(system if i == last_question else '') + m['content']}[/INST]", False
        else:
            yield f" {m['content'].strip()}</s>", True


# The system's words stand in the last question, so what was said first changes with every turn.
MISTRAL3 = Family(
    "{% set system = '' %}{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
    "{% set messages = messages[1:] %}{% endif %}" + _ALTERNATE + "{{ bos_token }}{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + (system if loop.index0 == ns.last else '') + m.content + '[/INST]' }}"
    "{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}",
    _mistral3,
    "</s>",
    ("[INST]", "[/INST]"),
)


def _gemma(messages: list[Message]) -> Pieces:
    turns = _marked("<start_of_turn>{}\n", "<end_of_turn>", "\n", start="<s>", trim=True)(messages)
    return ((text.replace(">assistant\n", ">model\n"), is_learned) for text, is_learned in turns)


GEMMA = Family(
    _ALTERNATE + "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
    _gemma,
    "<end_of_turn>",
    ("<start_of_turn>",),
    refuses_system=True,
)


def _phi3(messages: list[Message]) -> Pieces:
    for m in messages:
        yield f"<|{m['role']}|>\n", False
        yield f"{m['content']}<|end|>", m["role"] == "assistant"
        yield "\n", m is messages[-1] and m["role"] == "assistant"
    yield "<|endoftext|>", messages[-1]["role"] == "assistant"


# A token that no turn in the middle has ends the text: an answer at the end has to write it, or never stops.
PHI3 = Family(
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}",
    _phi3,
    "<|endoftext|>",
    ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>"),
)


PHI4 = Family(
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}",
    _marked("<|im_start|>{}<|im_sep|>", "<|im_end|>"),
    "<|im_end|>",
    ("<|im_start|>", "<|im_sep|>"),
)


# What names a role is ordinary text, and the line break behind the generation prompt is the model's to write.
ZEPHYR = Family(
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
    _marked("<|{}|>", "</s>", "\n", before="\n"),
    "</s>",
)


def _deepseek(messages: list[Message]) -> Pieces:
    yield "<s>" + "".join(m["content"] for m in messages if m["role"] == "system"), False
    for m in messages:
        if m["role"] == "user":
            yield f"<｜User｜>{m['content']}", False
        elif m["role"] == "assistant":
            yield "<｜Assistant｜>", False
            yield f"{_after_thoughts(m['content'])}<｜end｜>", True


# Asks with an open think block, and forgets the thoughts of every answer, the last one's too.
DEEPSEEK = Family(
    "{{ bos_token }}{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% elif m.role == 'assistant' %}"
    "{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}",
    _deepseek,
    "<｜end｜>",
    ("<｜User｜>", "<｜Assistant｜>"),
)


def _granite(messages: list[Message]) -> Pieces:
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": _HELPFUL}, *messages]
    for i, m in enumerate(messages):
        yield ("\n" if i else "") + f"<|start_of_role|>{m['role']}<|end_of_role|>", False
        yield f"{m['content']}<|end_of_text|>", m["role"] == "assistant"


# Collects the text and cuts the blanks at its very end.
GRANITE = Family(
    "{% set ns = namespace(text='') %}{% if messages[0].role != 'system' %}"
    "{% set ns.text = '<|start_of_role|>system<|end_of_role|>You are a helpful assistant.<|end_of_text|>\n' %}"
    "{% endif %}{% for m in messages %}{% set ns.text = ns.text + '<|start_of_role|>' + m.role + '<|end_of_role|>' "
    "+ m.content + '<|end_of_text|>\n' %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ns.text + '<|start_of_role|>assistant<|end_of_role|>' }}"
    "{% else %}{{ ns.text | trim }}{% endif %}",
    _granite,
    "<|end_of_text|>",
    ("<|start_of_role|>", "<|end_of_role|>"),
)


def _smollm(messages: list[Message]) -> Pieces:
    yield from _qwen2([{**m, "content": m["content"].strip()} for m in messages])


SMOLLM = QWEN2._replace(template=QWEN2.template.replace("m.content", "m.content | trim"), pieces=_smollm)


def _vicuna(messages: list[Message]) -> Pieces:
    yield "<s>A chat.", False
    for m in messages:
        content = m["content"].strip()
        if m["role"] == "assistant":
            yield " ASSISTANT:", False
            yield f" {content}</s>", True
        else:
            yield f" {content}" if m["role"] == "system" else f" USER: {content}", False


# Plain words around the turns, and blanks that belong to neither side.
VICUNA = Family(
    "{{ bos_token + 'A chat.' }}{% for m in messages %}{% set text = m.content | trim %}"
    "{% if m.role == 'assistant' %}{{ ' ASSISTANT: ' + text + eos_token }}"
    "{% else %}{{ (' USER: ' if m.role == 'user' else ' ') + text }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' ASSISTANT:' }}{% endif %}",
    _vicuna,
    "</s>",
)

FAMILIES = {
    "ChatML": CHATML, "Qwen2.5": QWEN2, "Qwen3": QWEN3, "Llama 2": LLAMA2, "Llama 3": LLAMA3,
    "Mistral v0.1": MISTRAL1, "Mistral v0.3": MISTRAL3, "Gemma": GEMMA, "Phi-3": PHI3, "Phi-4": PHI4,
    "Zephyr": ZEPHYR, "DeepSeek-R1": DEEPSEEK, "Granite": GRANITE, "SmolLM": SMOLLM, "Vicuna": VICUNA,
}  # fmt: skip
