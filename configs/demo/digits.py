"""A world of images small enough for a laptop: scikit-learn's handwritten digits, and a pipeline that can draw them.

`make` is the entry of a custom stage. The pipeline is a StableDiffusion3Pipeline of the real
classes: its text encoders are random, which suffices to tell ten prompts apart, its VAE learns here to keep 8 x 8
pixels, and its transformer, random as well, is what the stages behind this one train. Nothing is downloaded, and the
seed decides every byte. `likeness` is a reward, and `judge` another one, of digits that `likeness` never saw.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import diffusers
import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.svm import SVC
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from cosmos_core.data.order import shuffled_indices
from cosmos_core.run.files import replace_folder
from cosmos_core.run.stage import Stage
from cosmos_core.types import Outcome

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
"""The prompts."""
SIZE = 8
"""Height and width of a digit in pixels."""
_TEXT_TOKENS = 8  # of each encoder: the cost of a step is in them
_VAE_BATCH, _KL = 128, 1e-4
_HALF_SEED = 7


def make(
    stage: Stage,
    *,
    train_images: int = 1500,
    width: int = 64,
    layers: int = 4,
    vae_steps: int = 400,
    seed: int = 0,
) -> Outcome:
    """Write `model/`, a pipeline, `data/train`, images with their prompts, and `data/validation`, the ten prompts."""
    images, labels = _digits()
    order = shuffled_indices(len(images), seed)[:train_images]
    with replace_folder(stage.path / "data") as folder:
        write_images(folder / "train", images[order], labels[order])
        write_prompts(folder / "validation")
    with replace_folder(stage.path / "model") as folder:
        pipeline, error = make_pipeline(width, layers, vae_steps, seed)
        pipeline.save_pretrained(folder)
    return Outcome(
        outputs=("model", "data"),
        metrics={"data/train_rows": float(len(order)), "vae/error": error},
        info={"model": "model", "data": "data"},
    )


def write_images(folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Write NAME.json with the prompt and NAME.png with the digit (N, 8, 8) of values from 0 to 16."""
    folder.mkdir(parents=True)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        name = f"{number:04}"
        (folder / f"{name}.json").write_text(json.dumps({"prompt": WORDS[label], "label": int(label)}) + "\n")
        Image.fromarray(np.repeat(_bytes(image)[..., None], 3, -1)).save(folder / f"{name}.png")


def write_prompts(folder: Path) -> None:
    """Write NAME.json with each prompt."""
    folder.mkdir(parents=True)
    for label, word in enumerate(WORDS):
        (folder / f"{label}.json").write_text(json.dumps({"prompt": word, "label": label}) + "\n")


def make_pipeline(width: int, layers: int, vae_steps: int, seed: int) -> tuple[Any, float]:
    """Return the pipeline, and the error of its VAE: root of the mean squared difference of pixels in [-1, 1]."""
    clip, t5 = _clip_tokenizer(), _t5_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoders = [CLIPTextModelWithProjection(_clip_config(clip)) for _ in range(2)]
        reader = T5EncoderModel(T5Config(vocab_size=len(t5), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4))
        vae, error = _trained_vae(vae_steps)
        transformer: Any = diffusers.SD3Transformer2DModel(
            sample_size=SIZE, patch_size=2, in_channels=1, out_channels=1, num_layers=layers, attention_head_dim=16,
            num_attention_heads=width // 16, caption_projection_dim=width, joint_attention_dim=32,
            pooled_projection_dim=32, pos_embed_max_size=SIZE, qk_norm="rms_norm",
        )  # fmt: skip
    pipeline = diffusers.StableDiffusion3Pipeline(
        transformer=transformer.eval(), vae=vae, text_encoder=encoders[0].eval(), tokenizer=clip,
        text_encoder_2=encoders[1].eval(), tokenizer_2=_clip_tokenizer(), text_encoder_3=reader.eval(), tokenizer_3=t5,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0),
    )  # fmt: skip
    return pipeline, error


def _trained_vae(steps: int) -> tuple[Any, float]:
    """Return a VAE that has learned to keep digits, with the mean and the spread of its latents as its shift and its
    scale; and its error."""
    vae: Any = diffusers.AutoencoderKL(
        block_out_channels=(16,), down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",),
        layers_per_block=1, latent_channels=1, norm_num_groups=8, use_quant_conv=False, use_post_quant_conv=False,
        mid_block_add_attention=False, sample_size=SIZE,
    )  # fmt: skip
    pixels = torch.from_numpy(_digits()[0]).float()[:, None].expand(-1, 3, -1, -1) / 8 - 1
    optimizer = torch.optim.Adam(vae.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for step in range(steps):
        batch = pixels[shuffled_indices(len(pixels), step)[:_VAE_BATCH]]
        posterior = vae.encode(batch).latent_dist
        error = (vae.decode(posterior.sample()).sample - batch).square().mean()
        (error + _KL * posterior.kl().mean()).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    with torch.no_grad():
        latents = vae.encode(pixels).latent_dist.mean
        error = (vae.decode(latents).sample - pixels).square().mean().sqrt()
    vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())
    return vae.eval().requires_grad_(False), error.item()


def likeness(to_be_evaluated: str, reference: str, *, prompt: str, media: Any) -> float:
    """Return how likely the image shows the digit that the prompt names, to a logistic regression: a reward."""
    return float(_classifier().predict_proba(_features(media))[0, _label(prompt)])


def judge(to_be_evaluated: str, reference: str, *, prompt: str, media: Any) -> float:
    """Return 1 where a support vector machine sees the digit that the prompt names, else 0: for validation. It has
    learned from the digits that `likeness` has not."""
    return float(_judge().predict(_features(media))[0] == _label(prompt))


@lru_cache(maxsize=1)
def _classifier() -> Any:
    images, labels = _half(first=True)
    return LogisticRegression(C=0.02, max_iter=500).fit(images, labels)


@lru_cache(maxsize=1)
def _judge() -> Any:
    images, labels = _half(first=False)
    return SVC(gamma=0.001, C=10).fit(images, labels)


def _half(*, first: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return one half of all digits, flat, and what they are."""
    images, labels = _digits()
    order = shuffled_indices(len(images), _HALF_SEED)
    chosen = order[: len(order) // 2] if first else order[len(order) // 2 :]
    return images[chosen].reshape(len(chosen), -1), labels[chosen]


def _features(image: Any) -> np.ndarray:
    """Return an image as scikit-learn has digits: 64 values from 0 to 16."""
    grey = np.asarray(image, dtype=np.float64).reshape(SIZE, SIZE, 3).mean(-1)
    return (grey / 255 * 16).reshape(1, -1)


def _label(prompt: str) -> int:
    return WORDS.index(prompt)


@lru_cache(maxsize=1)
def _digits() -> tuple[np.ndarray, np.ndarray]:
    found = load_digits()
    return cast(np.ndarray, found.images), cast(np.ndarray, found.target)


def _bytes(image: np.ndarray) -> np.ndarray:
    return (image / 16 * 255).round().astype(np.uint8)


def _clip_config(tokenizer: Any) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        projection_dim=16, max_position_embeddings=_TEXT_TOKENS, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip


def _clip_tokenizer() -> Any:
    letters = sorted(ByteLevel.alphabet())
    pieces = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], model_max_length=_TEXT_TOKENS)


def _t5_tokenizer() -> Any:
    pieces = ["<pad>", "</s>", "<unk>", "\u2581", *map(chr, range(33, 127))]
    return T5Tokenizer(vocab=[(piece, 0.0) for piece in pieces], extra_ids=0, model_max_length=_TEXT_TOKENS)
