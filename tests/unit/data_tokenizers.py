"""Tokenizers and chat templates for tests of the data side, made here without a download."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from itertools import groupby

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

CORPUS = [
    "What is the answer to the question? The answer is forty two, and that is the answer.",
    "system user assistant\n\nYou are a helpful assistant. Be brief.\nHello there, how are you today?",
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May.",
] * 3

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}{% if loop.index0 % 2 == 1 %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "[INST] {{ m.content }}[/INST]{% elif m.role == 'assistant' %} {{ m.content }}</s>"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
# Cuts the blanks at the very end, so that no beginning of a conversation is a beginning of the whole.
TRIMS_THE_END = (
    "{% set ns = namespace(text='') %}{% for m in messages %}"
    "{% set ns.text = ns.text + '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n\n' %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ns.text }}<|im_start|>assistant\n{% else %}{{ ns.text | trim }}{% endif %}"
)
# As Qwen3 and others do: thoughts of earlier turns are forgotten, the last turn always has a think block.
FORGETS_THOUGHTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% set parts = m.content.split('</think>') %}"
    "{% if loop.last %}<think>\n{{ parts[0].split('<think>')[-1].strip() if parts | length > 1 else '' }}\n</think>\n\n"
    "{% endif %}{{ parts[-1].lstrip() }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# No token closes a turn: the words around it are ordinary text.
PLAIN_WORDS = (
    "{% for m in messages %}{{ '### ' + m.role + ':\n' + m.content + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\n' }}{% endif %}"
)


@cache
def _trained(num_merges: int) -> str:
    """The JSON of a tokenizer that is trained on the corpus, without special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=256 + num_merges, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str()


def byte_tokenizer(
    template: str | None,
    *,
    end_token: str = "<|im_end|>",
    num_merges: int = 300,
    trim_offsets: bool = False,
    special: Sequence[str] | None = None,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer; `special`, or every <|...|> and [...] of the template, becomes one token each."""
    tokenizer = Tokenizer.from_str(_trained(num_merges))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    found = re.findall(r"<\|\w+\|>|\[/?INST\]|</s>", template or "") if special is None else special
    special = sorted({"<|endoftext|>", "<s>", end_token, *found})
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token=end_token,
        pad_token="<|endoftext|>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def learned(tokenizer: PreTrainedTokenizerBase, ids: list[int], mask: list[int]) -> list[str]:
    """The runs of learned tokens, decoded."""
    return _runs(tokenizer, ids, mask, 1)


def unlearned(tokenizer: PreTrainedTokenizerBase, ids: list[int], mask: list[int]) -> list[str]:
    """The runs of the other tokens, decoded."""
    return _runs(tokenizer, ids, mask, 0)


def _runs(tokenizer: PreTrainedTokenizerBase, ids: list[int], mask: list[int], wanted: int) -> list[str]:
    runs = groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
    return [str(tokenizer.decode([i for i, _ in run])) for bit, run in runs if bit == wanted]
