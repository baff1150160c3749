"""Propose settings of a recipe for rows, a model and a machine, each with its reason.

    python -m cosmos_core.train.propose JSON

The program behind commands such as `cosmos sft`, which write its settings to a recipe. It reads config.json, up to 500
rows and the size of the machine's memory; it loads no weights. It sets only keys for which it has a reason.
"""

import inspect
import json
import sys
from bisect import bisect
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil, gcd, inf, log2
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from pydantic import ValidationError

from cosmos_core.config.load import parse_table
from cosmos_core.config.schema.dataset import DatasetConfig
from cosmos_core.config.schema.diffusers import DiffusersConfig
from cosmos_core.config.schema.methods import TRAINING_METHODS, TrainingMethod
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.encoded_turns import decode_conversation, is_turn_list
from cosmos_core.data.formats import LocatedRow
from cosmos_core.data.kinds.registry import load_row_kind, load_tokenised_kind
from cosmos_core.data.media_source import open_media_items
from cosmos_core.data.messages import (
    PROMPT_COLUMNS,
    REFERENCE_COLUMNS,
    RESPONSE_COLUMNS,
    ColumnTrackingRow,
    Row,
    SkippedRow,
    describe_columns,
)
from cosmos_core.data.records import RecordSpec, find_image_root
from cosmos_core.data.rows import load_rows
from cosmos_core.errors import CosmosError, DataError, MissingColumn, ModelError
from cosmos_core.models.chat_templates import set_chat_template
from cosmos_core.models.families import find_family_class
from cosmos_core.models.hf import load_config, load_tokenizer, model_without_weights
from cosmos_core.models.pipeline_folder import PipelineFolder
from cosmos_core.registry import is_user_code
from cosmos_core.rewards.base import load_reward

ProposedSetting = tuple[str, Any, str]
"""A proposed setting of a recipe: dotted key, value, and the reason for the value."""

_MAX_SAMPLED_ROWS = 500
_MAX_SKIPPED_FRACTION = 0.2  # with more unusable samples, the data set probably has another layout
_MAX_SEEN_IMAGES = 2000  # number of images, counted over all epochs, that a training on a small data set uses
_BYTES_PER_GIB = 2**30
_BYTES_PER_WEIGHT = 16  # bytes per trained weight: weight, gradient and both moments of Adam, each in float32
_STATE_FRACTION = 0.7  # fraction of memory for weights and optimizer state; the rest is for activations
_TEXT_COLUMN_OPTIONS = ("prompt", "response", "chosen", "rejected")
_DATASET_KEY = "train.train_policy.dataset"


class CliOptions(NamedTuple):
    """Options of the command that proposes a recipe; an empty string means that the option is missing."""

    method: str
    model: str
    data: str
    prompt: str = ""
    response: str = ""
    reward: str = ""
    chosen: str = ""
    rejected: str = ""
    rows: dict[str, Any] = {}
    """Keys of the data set that select its rows, from `--set`: `subset`, `split` and `revision`."""
    custom: dict[str, Any] = {}
    """Table `[custom]` from `--set`, with the folder and the sizes of images."""
    model_class: str | None = None
    """Setting `policy.model_class` from `--set`."""
    lora_rank: int = 0
    """Rank of the adapter where `--set` has a key of `policy.lora`, otherwise 0."""

    @property
    def dataset(self) -> DatasetConfig:
        """Return the recipe's table of the data set, with the values of `--data` and `--set`; raise ConfigError if a
        value is invalid."""
        return parse_table(
            DatasetConfig, {"name": self.data, **self.rows}, error_prefix="--set", key_prefix=_DATASET_KEY
        )

    @property
    def reward_names(self) -> list[str]:
        """Return the reward names in the comma-separated option `--reward`."""
        return [name.strip() for name in self.reward.split(",")]


@dataclass(frozen=True)
class Hardware:
    """Hardware that the training will run on."""

    memory: int
    """Bytes of memory of one GPU; without a GPU, the available host memory."""
    num_gpus: int

    @property
    def memory_text(self) -> str:
        """Return the size of the memory as messages show it, such as "80 GiB of a GPU"."""
        return f"{self.memory / _BYTES_PER_GIB:.0f} GiB {'of a GPU' if self.num_gpus else 'of host memory, no GPU'}"


def detect_hardware() -> Hardware:
    """Return the memory and the number of GPUs of this machine."""
    if torch.cuda.is_available():
        return Hardware(torch.cuda.get_device_properties(0).total_memory, torch.cuda.device_count())
    return Hardware(psutil.virtual_memory().available, 0)


def propose(options: CliOptions, hardware: Hardware) -> Iterator[ProposedSetting]:
    """Yield the proposed settings of a recipe for the model and the rows that the options name. Raise `ModelError` or
    `DataError` if the model or the rows are unusable, or if the columns must be named by options, and `ConfigError` if
    the reward cannot be imported."""
    method = TRAINING_METHODS[options.method]
    yield "policy.model_name_or_path", options.model, "--model"
    yield from ((key, value, f"cosmos {method.command}") for key, value in method.settings.items())
    yield from ((f"{_DATASET_KEY}.{key}", value, "--set") for key, value in options.rows.items())
    for reward in filter(is_user_code, options.reward_names):  # import user code now: its errors end the command
        load_reward(reward)
    propose_settings = _propose_for_images if load_row_kind(method.rows).has_media else _propose_for_text
    yield from propose_settings(options, method, hardware)
    yield "train.ckpt.enable_checkpoint", True, "so that a killed run goes on from here"
    yield "train.ckpt.save_freq", 50, "steps"
    yield "train.ckpt.max_keep", 2, "older ones are removed"


def _propose_for_text(options: CliOptions, method: TrainingMethod, hardware: Hardware) -> Iterator[ProposedSetting]:
    dataset_rows = load_rows(options.dataset, _DATASET_KEY)
    sampled_rows = list(islice(dataset_rows, _MAX_SAMPLED_ROWS))
    if not sampled_rows:
        raise DataError(f"--data {options.data}: no rows")
    # Infer the columns from a row without nulls if there is one, because a null would count as a missing column.
    column_names = sampled_rows[0][1].keys()
    rows_without_nulls = (row for row in sampled_rows if all(row[1].get(name) is not None for name in column_names))
    located_row = next(rows_without_nulls, sampled_rows[0])
    column_by_option, reason = _infer_columns(options, method, *located_row)
    yield f"{_DATASET_KEY}.name", options.data, f"--data; {len(dataset_rows):,} rows"
    yield from ((f"train.train_policy.{name}_column_name", column, reason) for name, column in column_by_option.items())
    model_config, tokenizer = load_config(options.model), load_tokenizer(options.model)
    row_kind, recipe = load_tokenised_kind(method.rows), _make_recipe(options, column_by_option)
    image_folder = find_image_root(recipe, options.model, dataset_rows.folder)
    record_spec = RecordSpec(recipe, row_kind, sys.maxsize, options.model, image_folder)
    try:
        max_row_length = _find_max_row_length(tokenizer, record_spec, sampled_rows)
    except ModelError:  # rows with conversations need a chat template, which the model may lack
        if tokenizer.chat_template:
            raise
        template_name = "chatml" if {"<|im_start|>", "<|im_end|>"} <= tokenizer.get_vocab().keys() else "plain"
        set_chat_template(tokenizer, template_name)
        record_spec = replace(record_spec, recipe=_make_recipe(options, column_by_option, template_name))
        max_row_length = _find_max_row_length(tokenizer, record_spec, sampled_rows)
        yield "policy.chat_template", template_name, "the model has none, and the rows have turns"
    text_config, has_completions = model_config.get_text_config(), row_kind.is_prompt
    completion_tokens = (1024 if hardware.num_gpus else 256) * has_completions
    context_length = getattr(text_config, "max_position_embeddings", None) or 1 << 20
    max_length = min(context_length, 64 * ceil((max_row_length * 1.1 + completion_tokens) / 64))
    completion_tokens = min(completion_tokens, max_length // 2)
    reason = f"the longest of the first {len(sampled_rows):,} rows has {max_row_length:,} tokens"
    reason += f", a completion {completion_tokens:,}" * has_completions
    reason += f"; the model takes {context_length:,}" * (max_length == context_length)
    yield "policy.model_max_length", max_length, reason
    if has_completions:
        yield "rollout.max_response_length", completion_tokens, "raise it for longer reasoning"
        reward_setting = options.reward_names if options.reward_names[1:] else options.reward
        yield "train.train_policy.reward_function", reward_setting, "--reward"
    with torch.device("meta"):
        model = model_without_weights(options.model, dtype=torch.float32)
    num_weights = sum(weight.numel() for weight in model.parameters())
    yield from _propose_by_model_size(method, num_weights, hardware, options.lora_rank)
    # Bytes of activations per token with recomputation: the inputs of all layers, and the intermediates of one layer.
    activation_bytes_per_token = (text_config.num_hidden_layers + 40) * text_config.hidden_size * 4
    free_bytes = hardware.memory * 0.9 - min(num_weights * _BYTES_PER_WEIGHT, int(hardware.memory * _STATE_FRACTION))
    max_rows = max(1, int(free_bytes / (activation_bytes_per_token * max_length * len(row_kind.token_id_columns))))
    yield from _propose_batches(has_completions, len(dataset_rows), max_rows, max(1, hardware.num_gpus))
    if len(dataset_rows) >= 10:
        num_held_out_rows = max(1, min(200, len(dataset_rows) // 20))
        yield "train.train_policy.dataset.test_size", num_held_out_rows, f"held out of {len(dataset_rows):,} rows"
        yield from _propose_validation(f"the {'rewards' if has_completions else 'loss'} of held-out rows")


def _propose_validation(reason_text: str) -> Iterator[ProposedSetting]:
    yield "validation.enable", True, reason_text
    yield "validation.val_before_train", True, "so that the report has before and after"
    yield "validation.freq", 50, "steps"


def _infer_columns(options: CliOptions, method: TrainingMethod, location: str, row: Row) -> tuple[dict[str, str], str]:
    """Infer from `row`, an example row at `location`, which columns the recipe must name. Return their names, by the
    command-line option that would set each, and the reason as text. Raise DataError if they cannot be inferred."""
    row_kind = load_tokenised_kind(method.rows)
    column_by_option = {name: column for name in _TEXT_COLUMN_OPTIONS if (column := getattr(options, name))}
    try:
        with suppress(SkippedRow):
            row_kind.read(row, location, _make_recipe(options, column_by_option).train.train_policy)
    except (MissingColumn, ValidationError) as error:
        # The row lacks a column, or the recipe is invalid: infer the columns from the values of the row.
        turn_columns = {name for name, value in row.items() if is_turn_list(decode_conversation(value))}
        if len(turn_columns) == 1 and row_kind.has_one_response and {*column_by_option.values()} <= turn_columns:
            name = "prompt" if row_kind.is_prompt else "conversation"
            return {name: turn_columns.pop()}, "the only column of turns"
        text_columns = [name for name, value in row.items() if isinstance(value, str)]
        columns_with_letters = [name for name in text_columns if any(map(str.isalpha, row[name]))]
        text_columns = columns_with_letters if len(columns_with_letters) == 2 else text_columns
        if column_by_option or len(text_columns) != 2 or not row_kind.has_one_response:
            required_options = ("prompt", "response") if row_kind.has_one_response else ("prompt", "chosen", "rejected")
            options_text = " and ".join(f"--{name} COLUMN" for name in required_options)
            error_message = f"--data {options.data}: the columns are {describe_columns(row)}; name them: {options_text}"
            raise DataError(error_message) from error
        # If a name is known, put the prompt first: a row {"answer": ..., "problem": ...} begins with the response.
        prompt_column_names = {*PROMPT_COLUMNS, "instruction", "input"}
        response_names = {*RESPONSE_COLUMNS, *(REFERENCE_COLUMNS if row_kind.is_prompt else ())}
        sorted_columns = sorted(text_columns, key=lambda name: (name in response_names) - (name in prompt_column_names))
        inferred_columns = dict(zip(_TEXT_COLUMN_OPTIONS, sorted_columns, strict=False))
        reason_text = "in their order" if sorted_columns == text_columns else "by their names"
        return inferred_columns, f"the only two columns of text, {reason_text}"
    return column_by_option, "named by an option"


def _make_recipe(options: CliOptions, column_by_option: dict[str, str], chat_template: str | None = None) -> Recipe:
    policy_table = {key.rpartition(".")[2]: value for key, value in TRAINING_METHODS[options.method].settings.items()}
    policy_table |= {f"{name}_column_name": column for name, column in column_by_option.items()}
    recipe_tables = {"policy": {"chat_template": chat_template}, "train": {"train_policy": policy_table}}
    return Recipe.model_validate(dict(recipe_tables, custom=options.custom))


def _find_max_row_length(tokenizer: Any, record_spec: RecordSpec, sampled_rows: list[LocatedRow]) -> int:
    """Return the number of tokens, images included, that the longest of the rows `sampled_rows` has after `prepare`."""
    row_kind = record_spec.row_kind
    max_length, first_error = 0, None
    token_id_column_indices = [list(row_kind.columns).index(name) for name in row_kind.token_id_columns]
    for location, row in sampled_rows:
        try:
            column_tracking_row = ColumnTrackingRow(row, record_spec.column_names, location)
            record = row_kind.make_record(tokenizer, record_spec, column_tracking_row, location)
        except DataError as error:  # skip the row, also for `SkippedRow`, which is a subclass of `DataError`
            first_error = first_error or error
            continue
        max_length = max(max_length, *(len(record.values[index]) for index in token_id_column_indices))
    if not max_length and first_error:
        raise first_error
    return max_length


def _propose_by_model_size(
    method: TrainingMethod, num_weights: int, hardware: Hardware, lora_rank: int
) -> Iterator[ProposedSetting]:
    """Yield the settings that depend on memory and model size: adapter, learning rate, dtype, sharding."""
    if not hardware.num_gpus:
        yield "train.param_dtype", "float32", "no GPU here; a CPU is seldom faster in bfloat16"
    size_text = f"{num_weights / 1e9:.2f} billion" if num_weights >= 1e9 else f"{num_weights / 1e6:.3g} million"
    is_full_tuning = num_weights * _BYTES_PER_WEIGHT / max(1, hardware.num_gpus) <= hardware.memory * _STATE_FRACTION
    is_full_tuning = is_full_tuning and not lora_rank
    if not is_full_tuning:
        lora_reason = f"{size_text} weights x {_BYTES_PER_WEIGHT} bytes do not fit {hardware.memory_text}: an adapter"
        lora_reason = "an adapter, as --set policy.lora says" if lora_rank else lora_reason
        yield "policy.lora.r", lora_rank or 16, lora_reason
        yield "policy.lora.lora_alpha", 2.0 * (lora_rank or 16), "twice the rank"
    lr_index = bisect((1e8, 1e9), num_weights) if is_full_tuning else 3  # index 3: learning rate of adapters
    trained_weights_text = "all weights" if is_full_tuning else "an adapter"
    yield "train.optm_lr", method.learning_rates[lr_index], f"{trained_weights_text} of a model of {size_text} weights"
    if hardware.num_gpus > 1:
        yield "policy.parallelism.dp_shard_size", -1, f"all {hardware.num_gpus} GPUs"


def _propose_batches(has_completions: bool, num_rows: int, max_rows: int, num_ranks: int) -> Iterator[ProposedSetting]:
    """Yield batch sizes, epochs and learning-rate schedule; `max_rows` rows of maximum length fit in memory."""
    if has_completions:
        # The number of completions of a step, 8 of each prompt, must be a multiple of the number of ranks.
        prompt_count_divisor = num_ranks // gcd(num_ranks, 8)
        num_prompts = max(1, min(8, num_rows) // prompt_count_divisor) * prompt_count_divisor
        batch_size = 8 * num_prompts
        yield "rollout.n_generation", 8, "completions of a prompt, which are compared with each other"
        yield "rollout.batch_size", num_prompts, "prompts in the engine at a time"
        yield "train.train_batch_per_replica", batch_size, f"completions of a step: 8 of each of {num_prompts} prompts"
    else:
        batch_size = min(32, 2 ** max(0, int(log2(max(1, num_rows // 8)))))
        yield "train.train_batch_per_replica", batch_size, f"rows of an optimizer step; there are {num_rows:,}"
        yield "train.train_policy.dataloader_drop_last", False, "so that each row is learned in each epoch"
    micro_batch_size = 2 ** int(log2(min(max_rows, batch_size, 8)))
    if has_completions:
        micro_batch_size = gcd(micro_batch_size, batch_size // num_ranks)
    yield "train.train_policy.mini_batch", micro_batch_size, f"rows of one pass; about {max_rows:,} of the longest fit"
    has_few_rows = not has_completions and num_rows < 10_000
    yield "train.epoch", 3 if has_few_rows else 1, f"{num_rows:,} rows{' are few' * has_few_rows}"
    yield "train.optm_warmup_steps", 0.03, "a share of all steps"
    yield "train.optm_decay_type", "cosine", "common for fine-tuning"


def _propose_for_images(options: CliOptions, method: TrainingMethod, hardware: Hardware) -> Iterator[ProposedSetting]:
    """Yield the settings of a training of a diffusion model; its size is read from its configuration files."""
    if Path(options.model).is_dir() and not (Path(options.model) / "model_index.json").is_file():
        raise ModelError(f"--model {options.model}: no pipeline of diffusers; cosmos sft trains a language model")
    num_media, media_problems = 0, []
    for media_item in islice(open_media_items(options.dataset, _DATASET_KEY)(), _MAX_SEEN_IMAGES):
        num_media += media_item.content is not None and not media_item.problem
        media_problems += [media_item.problem] * bool(media_item.problem)
    if not num_media:
        remedy = [*media_problems, "give a folder with 0001.png and its caption in 0001.txt, or rows with images"][0]
        raise DataError(f"--data {options.data}: no image or video with a caption; {remedy}")
    key = "local_dir" if Path(options.data).is_dir() else "name"
    media_text = f"{num_media:,}{' or more' * (num_media == _MAX_SEEN_IMAGES)}"
    yield f"train.train_policy.dataset.{key}", options.data, f"--data; {media_text} images and videos with a caption"
    skipped_fraction = len(media_problems) / (num_media + len(media_problems))
    if DatasetConfig().max_skipped_fraction < skipped_fraction <= _MAX_SKIPPED_FRACTION:
        skipped_reason = f"left out: {len(media_problems)}; {media_problems[0]}"
        yield f"{_DATASET_KEY}.max_skipped_fraction", ceil(100 * skipped_fraction) / 100, skipped_reason
    num_weights, max_media_per_pass = 10**10, 4  # assumed size of a model on the Hub, which is not downloaded
    if Path(options.model).is_dir():
        pipeline_folder = PipelineFolder(options.model)
        pipeline = find_family_class(pipeline_folder, options.model_class)(pipeline_folder, DiffusersConfig())
        with torch.device("meta"):
            denoiser = pipeline_folder.build_component(pipeline.denoiser_name)
            num_weights = sum(weight.numel() for weight in denoiser.parameters())
        latent_size = pipeline_folder.settings(pipeline.denoiser_name).get("sample_size")
        pipeline_call_parameters = inspect.signature(pipeline_folder.pipeline_class.__call__).parameters
        if isinstance(latent_size, int) and not pipeline.is_video:
            image_size = latent_size * pipeline.pixels_per_latent[1]
            yield "policy.diffusers.inference_size", [image_size, image_size], "what the model was made for"
        elif pipeline.is_video:
            frame_size = [pipeline_call_parameters[name].default for name in ("height", "width")]
            yield "policy.diffusers.inference_size", frame_size, "what the pipeline draws by default"
            max_media_per_pass = 1  # one clip at a time: it has the activations of many images
        # A denoiser also attends to the padding after a prompt, so training pads as the pipeline does.
        prompt_parameter = pipeline_call_parameters.get("max_sequence_length")
        max_prompt_length = prompt_parameter.default if prompt_parameter else DiffusersConfig().max_prompt_length
        if (tokenizer_limit := _read_max_prompt_tokens(pipeline_folder.path)) < max_prompt_length:
            yield "policy.diffusers.max_prompt_length", tokenizer_limit, "tokens that the tokenizer takes"
        elif max_prompt_length != DiffusersConfig().max_prompt_length:
            yield "policy.diffusers.max_prompt_length", max_prompt_length, "what the pipeline reads by default"
    yield from _propose_by_model_size(method, num_weights, hardware, options.lora_rank)
    batch_size = min(16, 2 ** max(0, int(log2(max(1, num_media // 8)))))
    yield "train.train_batch_per_replica", batch_size, f"images of an optimizer step; there are {media_text}"
    yield "train.train_policy.mini_batch", min(batch_size, max_media_per_pass), "images or clips of one pass"
    num_epochs = max(3, min(100, _MAX_SEEN_IMAGES // num_media))
    yield "train.epoch", num_epochs, f"about {_MAX_SEEN_IMAGES:,} images seen in all, or three epochs"
    if num_media >= 10:
        num_held_out_rows = max(1, min(8, num_media // 20))
        yield "train.train_policy.dataset.test_size", num_held_out_rows, f"held out of {media_text}, and drawn"
        yield from _propose_validation("the loss of held-out images, and drawings of their captions")


def _read_max_prompt_tokens(model: Path) -> float:
    """Return the token limit of a pipeline's T5 tokenizer; infinity if the limit is unknown."""
    try:
        tokenizer_config = json.loads((model / "tokenizer_3" / "tokenizer_config.json").read_text(encoding="utf-8"))
        max_tokens = int(tokenizer_config["model_max_length"])
    except (OSError, KeyError, TypeError, ValueError):
        return inf
    return max_tokens if max_tokens > 0 else inf


def main() -> int:
    """Print the settings proposed for the options in the JSON argument, as JSON, and return 0. Report an error as one
    line on standard error, and return its exit code."""
    try:
        with redirect_stdout(sys.stderr):  # standard output is for the JSON, and reward code may print
            proposed_settings = list(propose(CliOptions(**json.loads(sys.argv[1])), detect_hardware()))
    except CosmosError as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
        return error.exit_code
    sys.stdout.write(json.dumps(proposed_settings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
