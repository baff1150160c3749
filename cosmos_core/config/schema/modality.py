"""Properties of the two modalities of models, text and diffusion, for the code that runs before a worker starts."""

from dataclasses import dataclass

from cosmos_core.config.schema.dataset import DATA_SUFFIXES

ALL: tuple[str, ...] = ("*",)
TOKENIZER_FILES = (
    "tokenizer*", "vocab*", "merges*", "*.jinja", "special_tokens_map.json", "added_tokens.json",
    "*processor_config.json", "chat_template.json", "*.model",
)  # fmt: skip
"""Patterns of the files that tokenisation depends on. They include no weights, so prepared rows stay valid when only
weights change."""
DATA_FILES = tuple(f"*{suffix}" for suffix in DATA_SUFFIXES)
_IMAGES = ("*.png", "*.jpg", "*.jpeg", "*.webp", "*.bmp", "*.gif", "*.tif", "*.tiff", "*.PNG", "*.JPG", "*.JPEG")


@dataclass(frozen=True)
class Modality:
    """Properties of all models of one modality; `run.content.matches_patterns` defines the file patterns."""

    name: str
    """Name of the modality in the declarations of algorithms and stage kinds; also the name of the modules that open
    and evaluate its models."""
    encoder_files: tuple[str, ...]
    """Patterns of the files of a model folder that prepared rows depend on."""
    data_files: tuple[str, ...]
    """Patterns of the files of a data folder that are read."""
    media_files: tuple[str, ...]
    """Patterns of the files of a media folder that are read."""
    decodes_media: bool
    """Whether a check of the first rows decodes media, which takes long."""
    names_prompt_sets: bool
    """Whether the name of a data set may be that of a built-in list of prompts, see `config.prompt_sets`."""
    has_engines_of_text: bool
    """Whether rollout engines generate text and may run in processes of their own."""
    is_estimated: bool
    """Whether `cosmos plan --estimate` supports the modality."""
    evaluation_libraries: tuple[str, ...]
    """Packages that evaluations of the modality need in addition to common packages."""


CAUSAL_LM = Modality(
    "causal_lm", TOKENIZER_FILES, DATA_FILES, _IMAGES,
    decodes_media=False, names_prompt_sets=False, has_engines_of_text=True, is_estimated=True,
    evaluation_libraries=(),
)  # fmt: skip
_DENOISER_FOLDERS = ("transformer", "transformer_2", "unet", "scheduler", "lora")
# A diffusion model reads media, prompts and embeddings, which have many file types: no file of a data folder is left
# out.
DIFFUSION = Modality(
    "diffusion", tuple(f"!{part}/*" for part in _DENOISER_FOLDERS), ALL, ALL,
    decodes_media=True, names_prompt_sets=True, has_engines_of_text=False, is_estimated=False,
    evaluation_libraries=("diffusers",),
)  # fmt: skip
