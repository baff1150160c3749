"""A world small enough for a laptop: a random Qwen3 of half a million parameters, and sums for it to learn.

`make` is the entry of a custom stage. Everything is made here, nothing is downloaded, and
the seed decides every byte. It shows that the pipeline works, not how to teach arithmetic.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from cosmos_core.data.order import shuffled_indices
from cosmos_core.errors import ConfigError
from cosmos_core.run.files import replace_folder
from cosmos_core.run.stage import Stage
from cosmos_core.types import Outcome

_SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>", "<unk>")
_ROLES = ("system", "user", "assistant")  # one token each, which makes a row a third shorter
_CHARACTERS = "0123456789+=-*/?.,:'\n ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MAX_LENGTH = 64

Sum = tuple[int, int]


def make(  # noqa: PLR0913 - keys of a stage's `arguments`, each with a default
    stage: Stage,
    *,
    train_rows: int = 20_000,
    heldout_rows: int = 200,
    digits: int = 2,
    hidden_size: int = 128,
    layers: int = 2,
    seed: int = 0,
) -> Outcome:
    """Write `model/` (random weights and a character tokenizer) and `data/` (`train.jsonl`, `validation.jsonl`).

    A row has `question` and `answer` for reinforcement learning, and the same as `messages` for fine-tuning. No
    held-out sum is among the training sums; these repeat when more are asked for than there are.

    Raises:
        ConfigError: more held-out rows than sums, or a width that the heads do not divide.
    """
    num_sums = _num_summands(digits) ** 2
    if not 0 < heldout_rows < num_sums:
        raise ConfigError(f"heldout_rows = {heldout_rows} must be below the {num_sums} sums of {digits}-digit numbers")
    with replace_folder(stage.path / "model") as folder:
        tokenizer = make_tokenizer()
        tokenizer.save_pretrained(folder)
        make_model(tokenizer, hidden_size, layers, seed).save_pretrained(folder)
    train, heldout = _sums(train_rows, heldout_rows, digits, seed)
    with replace_folder(stage.path / "data") as folder:
        _write_rows(folder / "train.jsonl", train)
        _write_rows(folder / "validation.jsonl", heldout)
    return Outcome(
        outputs=("model", "data"),
        metrics={"data/train_rows": float(len(train)), "data/heldout_rows": float(len(heldout))},
        info={"model": "model", "data": "data"},
    )


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character and per role, ChatML, `<|im_end|>` as the end token."""
    vocabulary = {token: index for index, token in enumerate((*_SPECIAL, *_ROLES, *_CHARACTERS))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    # Not `.`, which would leave out line breaks.
    tokenizer.pre_tokenizer = Split(Regex("|".join([*_ROLES, r"[\s\S]"])), "isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=_CHAT_TEMPLATE,
        model_max_length=_MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, hidden_size: int, layers: int, seed: int) -> Qwen3ForCausalLM:
    """Return a random Qwen3 in float32 with tied embeddings and four heads.

    Raises:
        ConfigError: the heads do not divide the width into even parts.
    """
    heads = 4
    if hidden_size % (2 * heads):
        raise ConfigError(f"hidden_size = {hidden_size} must be a multiple of {2 * heads}: {heads} heads, even rotary")
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden_size // heads,
        max_position_embeddings=_MAX_LENGTH,
        initializer_range=hidden_size**-0.5,  # the usual 0.02 is for wide models: here it learns ten times slower
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def _sums(train_rows: int, heldout_rows: int, digits: int, seed: int) -> tuple[list[Sum], list[Sum]]:
    """Return pairs of summands to train on and, disjoint from them, to hold out; 34+12 and 12+34 are two sums."""
    smallest, count = 10 ** (digits - 1), _num_summands(digits)
    numbers = shuffled_indices(count**2, seed).tolist()
    pairs = [(smallest + number // count, smallest + number % count) for number in numbers]
    heldout, known = pairs[:heldout_rows], pairs[heldout_rows:]
    return [known[i % len(known)] for i in range(train_rows)], heldout


def _num_summands(digits: int) -> int:
    return 9 * 10 ** (digits - 1)


def _write_rows(path: Path, sums: list[tuple[int, int]]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for left, right in sums:
            question, result = f"{left}+{right}=", str(left + right)
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": result}]
            file.write(json.dumps({"messages": messages, "question": question, "answer": result}) + "\n")
