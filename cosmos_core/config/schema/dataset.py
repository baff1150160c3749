"""`dataset` and `datasets` of `[train.train_policy]`, and `[validation.dataset]`: where rows come from."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import PositiveFloat, field_validator, model_validator

from cosmos_core.config.conditions import parse_pass_rate_range
from cosmos_core.config.schema.field_metadata import OmittedIfEmpty, ReferenceKind, ResultNeutral
from cosmos_core.config.schema.table import StageContext, Table
from cosmos_core.config.schema.value_types import Fraction, RewardWeights, SplitNames
from cosmos_core.registry import is_user_code

_TEXT_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
_COMPRESSED_SUFFIXES = tuple(f"{text}{suffix}" for text in _TEXT_SUFFIXES for suffix in (".gz", ".bz2", ".xz"))
DATA_SUFFIXES = (*_TEXT_SUFFIXES, ".parquet", ".arrow", *_COMPRESSED_SUFFIXES)
"""Suffixes of the names of data files."""
REASONING_GYM_PREFIX = "reasoning-gym:"
"""Prefix of the names of data sets that the package `reasoning-gym` generates."""
PASS_RATES_FILE = "pass_rates.jsonl"
"""Name of the file in which stages that complete prompts record the pass rate of each prompt."""


def reasoning_gym_generator(name: str) -> str:
    """Return the `reasoning-gym` generator, such as `chain_sum`, of a data set name; empty if there is none."""
    return name.removeprefix(REASONING_GYM_PREFIX) if name.startswith(REASONING_GYM_PREFIX) else ""


def data_suffix(name: str) -> str:
    """Return the suffix in `DATA_SUFFIXES` that a file name ends with, in upper or lower case; empty if there is
    none."""
    return next((suffix for suffix in DATA_SUFFIXES if name.lower().endswith(suffix)), "")


class RowsConfig(Table):
    """Keys that every data set of rows has, such as its name and split."""

    name: Annotated[str, ResultNeutral, ReferenceKind.PATH] = ""
    """Path of a file of rows (.jsonl or .ndjson, .json, .csv, .tsv, also compressed as .gz, .bz2 or .xz, .parquet,
    .arrow), a folder of such files, a `save_to_disk` folder, a URL of one of these in a store (`s3://BUCKET/KEY`), a
    Hub id, a user's data set class, `path/file.py:Class`, or a generator of the package `reasoning-gym`, such as
    `reasoning-gym:chain_sum`; the fingerprint includes the content, or the version of the package."""
    arguments: Annotated[dict[str, Any], OmittedIfEmpty] = {}
    """Arguments of the generator of `reasoning-gym:NAME`: `size` (number of rows, 500 if left out), `seed` (0 if left
    out), and those of the generator itself."""
    subset: str = ""
    """Configuration name of the data set on the Hub, or in the `configs` of a folder's README.md, or a sub-folder of
    the folder; empty: the default configuration or, if the folder itself has no data files, its only sub-folder with
    data files."""
    revision: str = ""
    """Commit, tag or branch of the data set on the Hub; empty: the newest commit."""
    split: SplitNames = ("train",)
    """Split or list of splits, concatenated in this order; empty: `train`, the only split of a single local file.
    `train[:48]`, `train[100:]` and `train[:10%]` select a part, as in `datasets`."""
    test_size: int | float | None = None
    """Number, or fraction below 1, of rows to hold out for validation if `validation.dataset.name` is empty. None or 0:
    no rows."""
    max_skipped_fraction: Fraction = 0.01
    """Maximum fraction of rows that may be skipped because they cannot be read or the chat template refuses them; above
    it the `prepare` stage fails and reports the first such row. Rows without trained tokens do not count."""
    keep: Annotated[str, OmittedIfEmpty] = ""
    """Range of pass rates of the rows to keep, such as `0.1 <= pass_rate <= 0.9`, from the rows' column `pass_rate` or
    from `pass_rates`; other rows are skipped and counted, an unknown rate (null) excludes no row. Rows that `test_size`
    holds out are all kept. Empty: all rows."""
    pass_rates: Annotated[str, ResultNeutral, ReferenceKind.PATH] = ""
    """File with the pass rates of prompts, by which `keep` selects prompts, or `stage:NAME` of a stage of kind `rl` or
    `sample` that completes the same prompts. A prompt without a rate counts as an unreadable row. Empty: the rates are
    in the column `pass_rate` of the data set."""

    @model_validator(mode="after")
    def _check_pass_rates_and_arguments(self) -> Self:
        if self.keep:
            parse_pass_rate_range(self.keep)
        elif self.pass_rates:
            raise ValueError("pass_rates needs keep = '0.1 <= pass_rate <= 0.9' or another range; set it")
        if self.arguments and not reasoning_gym_generator(self.name):
            example_text = f"name = '{REASONING_GYM_PREFIX}NAME'"
            raise ValueError(f"arguments are for a generator, {example_text}, not {self.name!r}; remove them")
        return self

    def unsupported_setting_errors(self, stage: StageContext) -> Iterator[str]:
        rows_key = next((key for key, dataset in stage.recipe.datasets.items() if dataset is self), "dataset")
        if self.keep and stage.recipe.policy.is_diffusers:
            yield f"{rows_key}.keep: only prompts of text have pass rates; leave it out for a diffusion model"
        folder, is_diffusion_model = getattr(self, "local_dir", ""), stage.recipe.policy.is_diffusers
        if folder and not (is_diffusion_model or is_user_code(self.name)):
            yield f"{rows_key}.local_dir = {folder!r}: only diffusion models read it; name the rows in {rows_key}.name"
        if self.pass_rates and not stage.recipe.train.train_policy.has_rollouts:
            yield f"{rows_key}.pass_rates: the rates of prompts to complete (RL); rows to learn have a column pass_rate"

    @field_validator("test_size")
    @classmethod
    def _check_test_size(cls, size: int | float | None) -> int | float | None:
        if isinstance(size, bool) or (size is not None and (size < 0 or (isinstance(size, float) and size >= 1))):
            raise ValueError(f"test_size = {size} must be a count of at least 1 or a fraction between 0 and 1")
        return size or None


class DatasetConfig(RowsConfig):
    """Settings of a data set: a local file or folder, or the name of a data set on the Hugging Face Hub."""

    local_dir: Annotated[str, ResultNeutral, ReferenceKind.PATH] = ""
    """Diffusion models: folder of prompts (`*.json`) and media, in place of `name`; empty: `name`. `name` may also be
    such a folder, a folder with `metas` and `videos`, webdataset shards, rows with a column of images, rows of prompts,
    or a built-in list of prompts: `ocr`, `pickscore`, `geneval` or `dance_grpo_t2v`."""
    aspect_ratio_buckets: bool = False
    """Resize images and clips to the nearest of the sizes that have the area of `policy.diffusers.inference_size` and
    an aspect ratio from 1:2 to 2:1; False: crop all of them to that size."""
    frame_sampling: Literal["random", "first", "middle", "uniform"] = "random"
    """Rule that selects `policy.diffusers.train_frames` frames of a longer video: `random` (consecutive frames from a
    start that the content of the video determines), `first` or `middle` (consecutive frames), or `uniform` (frames at
    equal distances over the whole video)."""


class SourceConfig(RowsConfig):
    """`[[train.train_policy.datasets]]`: one of several data sets that are mixed."""

    label: str = ""
    """Name of the data set in metrics, such as `reward/LABEL/mean`; empty: the last part of `name`."""
    weight: PositiveFloat | None = None
    """Weight of this data set among the training rows, relative to the weights of the others. None: its number of rows
    is the weight; either all data sets have None or none of them."""
    columns: dict[str, str] = {}
    """Columns of this data set in place of the algorithm's: `prompt = "question"` replaces `prompt_column_name`, and so
    for each key that ends with `_column_name`."""
    system_prompt: str | None = None
    """System prompt of this data set; None: the system prompt of the algorithm."""
    reward_function: RewardWeights = {}
    """Reward functions of this data set; empty: those of the algorithm, or `reasoning_gym` for generated rows if the
    algorithm's are left out."""

    @model_validator(mode="after")
    def _set_default_label(self) -> Self:
        """Refuse an invalid `name` or `label`, and derive a `label` that is empty from the name. The label is set here,
        because fingerprints do not include the name."""
        if not self.name.strip():
            raise ValueError("name is empty; give a file, a folder or a Hub id")
        if re.fullmatch(r"[\w.-]*", self.label) is None:
            raise ValueError(f"label = {self.label!r} must consist of letters, digits, '.', '_' and '-'")
        label = reasoning_gym_generator(self.name) or self.name.rstrip("/").rpartition("/")[2]
        label = label[: len(label) - len(data_suffix(label))].rpartition(":")[2]
        return self.copy_with(label=self.label or re.sub(r"[^\w.-]+", "-", label))
