"""A small Stable Diffusion 3 pipeline for images of 64 x 64 pixels, made from a folder of captioned images.

    python -m configs.demo.images FOLDER MODEL        writes the folder MODEL, in about two minutes on two CPU cores
    cosmos diffusion-sft --model MODEL --data FOLDER  trains it

`make` does the first as the entry of a custom stage. All classes are those of diffusers and transformers. The VAE
learns to reconstruct the images; the text encoders are random, which suffices to distinguish captions; the
transformer, random as well, is what SFT trains. Nothing is downloaded, and the seed determines every byte.
"""

from __future__ import annotations

import re
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from cosmos_core.config.schema.dataset import DatasetConfig
from cosmos_core.data.media_pixels import FrameSettings, decode_media
from cosmos_core.data.media_source import MediaContent, MediaItem, open_media_items
from cosmos_core.data.order import shuffled_indices
from cosmos_core.errors import DataError
from cosmos_core.run.files import replace_folder
from cosmos_core.run.stage import Stage
from cosmos_core.types import Outcome

SIZE = 64
"""Height and width of images in pixels."""
MAX_PROMPT_LENGTH = 32
"""Maximum number of words of a caption."""
_CHANNELS = (8, 16, 32)  # of the VAE, which halves height and width between two of them
_LATENT = SIZE // 2 ** (len(_CHANNELS) - 1)
_LATENT_CHANNELS = 4
_MOST_IMAGES, _BATCH, _KL = 2000, 8, 1e-4


def make(stage: Stage, *, width: int = 128, layers: int = 4, vae_steps: int = 300, seed: int = 0) -> Outcome:
    """Write `model/`, a pipeline for the data set of the recipe."""
    dataset = stage.recipe.train.train_policy.dataset
    with replace_folder(stage.path / "model") as folder:
        error = write_pipeline(dataset, folder, width=width, layers=layers, vae_steps=vae_steps, seed=seed)
    return Outcome(outputs=("model",), metrics={"vae/error": error}, info={"model": "model"})


def write_pipeline(
    dataset: DatasetConfig, folder: Path, *, width: int = 128, layers: int = 4, vae_steps: int = 300, seed: int = 0
) -> float:
    """Write a pipeline for the captioned images of a data set; return the root mean squared error of its VAE, for
    pixels in [-1, 1].

    Raises:
        DataError: the data set is missing or has no captioned image that can be read.
    """
    items = list(islice((item for item in open_media_items(dataset, "dataset")() if _is_image(item)), _MOST_IMAGES))
    images = [image for item in items if item.content and (image := _decode(item.content)) is not None]
    if not images:
        raise DataError(
            f"{dataset.local_dir or dataset.name}: no image with a caption; see docs/how-to/diffusion-data.md"
        )
    pixels = np.stack(images)
    t5 = _word_tokenizer([item.prompt for item in items])
    clip = _clip_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoders = [CLIPTextModelWithProjection(_clip_config(clip)).eval() for _ in range(2)]
        reader = T5EncoderModel(T5Config(vocab_size=len(t5), d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4))
        vae, error = _trained_vae(torch.from_numpy(pixels), vae_steps)
        transformer: Any = diffusers.SD3Transformer2DModel(
            sample_size=_LATENT, patch_size=2, in_channels=_LATENT_CHANNELS, out_channels=_LATENT_CHANNELS,
            num_layers=layers, attention_head_dim=32, num_attention_heads=width // 32, caption_projection_dim=width,
            joint_attention_dim=64, pooled_projection_dim=64, pos_embed_max_size=_LATENT, qk_norm="rms_norm",
        )  # fmt: skip
    diffusers.StableDiffusion3Pipeline(
        transformer=transformer.eval(), vae=vae, text_encoder=encoders[0], tokenizer=clip, text_encoder_2=encoders[1],
        tokenizer_2=_clip_tokenizer(), text_encoder_3=reader.eval(), tokenizer_3=t5,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0),
    ).save_pretrained(folder)  # fmt: skip
    return error


def _is_image(item: MediaItem) -> bool:
    return not item.problem and item.content is not None and not item.content.is_video


def _decode(content: MediaContent) -> np.ndarray | None:
    """Return the pixels of an image; None if it cannot be decoded, which a stage of kind `prepare` reports."""
    try:
        return decode_media(content, FrameSettings((SIZE, SIZE)), 0.0)
    except DataError:
        return None


def _trained_vae(pixels: torch.Tensor, steps: int) -> tuple[Any, float]:
    """Return a VAE trained on uint8 images (N, 64, 64, 3) and its error; mean and spread of its latents become its
    shift and its scale."""
    vae: Any = diffusers.AutoencoderKL(
        block_out_channels=_CHANNELS, down_block_types=("DownEncoderBlock2D",) * len(_CHANNELS),
        up_block_types=("UpDecoderBlock2D",) * len(_CHANNELS), layers_per_block=1, latent_channels=_LATENT_CHANNELS,
        norm_num_groups=8, use_quant_conv=False, use_post_quant_conv=False, mid_block_add_attention=False,
        sample_size=SIZE,
    )  # fmt: skip
    optimizer = torch.optim.Adam(vae.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for step in range(steps):
        batch = _floats(pixels[torch.from_numpy(shuffled_indices(len(pixels), step)[:_BATCH].copy())])
        posterior = vae.encode(batch).latent_dist
        loss = (vae.decode(posterior.sample()).sample - batch).square().mean() + _KL * posterior.kl().mean() / SIZE
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    vae.eval().requires_grad_(False)
    probe = _floats(pixels[:64])
    latents = vae.encode(probe).latent_dist.mean
    error = (vae.decode(latents).sample - probe).square().mean().sqrt().item()
    vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())
    return vae, error


def _floats(pixels: torch.Tensor) -> torch.Tensor:
    """Return uint8 images (N, H, W, 3) as floats (N, 3, H, W) in [-1, 1]."""
    return pixels.permute(0, 3, 1, 2).float() / 127.5 - 1


def _clip_config(tokenizer: Any) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        projection_dim=32, max_position_embeddings=tokenizer.model_max_length, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip


def _clip_tokenizer() -> CLIPTokenizer:
    letters = sorted(ByteLevel.alphabet())
    pieces = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], model_max_length=8)


def _word_tokenizer(captions: list[str]) -> T5Tokenizer:
    """Return a tokenizer with a token for each word of the captions, and characters for all other words."""
    words = sorted({word for caption in captions for word in re.findall(r"\S+", caption)})
    pieces = [(f"\u2581{word}", -1.0) for word in words]
    letters = [(letter, -10.0) for letter in ["\u2581", *map(chr, range(33, 127))]]
    vocab = dict([("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *letters, *pieces])
    return T5Tokenizer(vocab=list(vocab.items()), extra_ids=0, model_max_length=MAX_PROMPT_LENGTH)


def main() -> None:
    """Write a pipeline for the folder that the first argument names to the folder that the second one names."""
    if len(sys.argv) != 3:
        sys.exit("usage: python -m configs.demo.images FOLDER_OF_IMAGES MODEL_TO_WRITE")
    images, target = sys.argv[1:]
    if Path(target).exists():
        sys.exit(f"{target} exists; name another folder")
    try:
        with replace_folder(Path(target)) as folder:
            error = write_pipeline(DatasetConfig(name=images), folder)
    except DataError as wrong:
        sys.exit(str(wrong))
    sys.stdout.write(f"saved {target}, whose VAE has an error of {error:.3f} for pixels in [-1, 1]; train it with\n")
    sys.stdout.write(f"cosmos diffusion-sft --model {target} --data {images}\n")


if __name__ == "__main__":
    main()
