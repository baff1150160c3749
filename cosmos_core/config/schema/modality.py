"""Properties of the two modalities of models, text and diffusion, for the code that runs before a worker starts."""

from dataclasses import dataclass

from cosmos_core.config.schema.dataset import DATA_SUFFIXES

ALL_FILES: tuple[str, ...] = ("*",)
TOKENIZER_FILES = (
    "tokenizer*", "vocab*", "merges*", "*.jinja", "special_tokens_map.json", "added_tokens.json",
    "*processor_config.json", "chat_template.json", "*.model", "tekken.json", "*.tiktoken",
)  # fmt: skip
"""Patterns of the files that tokenisation depends on; prepared rows stay valid when only weights change."""
DATA_FILE_PATTERNS = tuple(f"*{suffix}" for suffix in DATA_SUFFIXES)
_IMAGE_FILES = ("*.png", "*.jpg", "*.jpeg", "*.webp", "*.bmp", "*.gif", "*.tif", "*.tiff", "*.PNG", "*.JPG", "*.JPEG")


@dataclass(frozen=True)
class Modality:
    """Properties of all models of one modality; see `run.content.matches_patterns` for the syntax of file patterns."""

    name: str
    """Name of the modality in the declarations of algorithms and stage kinds; also the name of the modules that open
    and evaluate its models."""
    encoder_files: tuple[str, ...]
    """Patterns of the files of a model folder that prepared rows depend on."""
    data_files: tuple[str, ...]
    """Patterns of the files that are read in a data folder."""
    media_files: tuple[str, ...]
    """Patterns of the files that are read in a media folder."""
    is_media_decoded_by_checks: bool
    """Whether `cosmos check` would have to decode images or videos to check the first rows; the check is then skipped,
    because decoding takes long."""
    accepts_prompt_set_names: bool
    """Whether the name of a data set can be that of a built-in list of prompts, see `config.prompt_sets`."""
    has_text_engines: bool
    """Whether rollout engines generate text and can run in processes of their own."""
    supports_cost_estimates: bool
    """Whether `cosmos plan --estimate` supports the modality."""
    evaluation_libraries: tuple[str, ...]
    """Packages that evaluations of the modality need in addition to common packages."""


CAUSAL_LM = Modality(
    "causal_lm", TOKENIZER_FILES, DATA_FILE_PATTERNS, _IMAGE_FILES,
    is_media_decoded_by_checks=False, accepts_prompt_set_names=False, has_text_engines=True,
    supports_cost_estimates=True, evaluation_libraries=(),
)  # fmt: skip
_DENOISER_FOLDERS = ("transformer", "transformer_2", "unet", "scheduler", "lora")
# All files of a data folder are inputs of a diffusion model, because media, prompts and embeddings have many types.
DIFFUSION = Modality(
    "diffusion", tuple(f"!{folder}/*" for folder in _DENOISER_FOLDERS), ALL_FILES, ALL_FILES,
    is_media_decoded_by_checks=True, accepts_prompt_set_names=True, has_text_engines=False,
    supports_cost_estimates=False, evaluation_libraries=("diffusers",),
)  # fmt: skip
