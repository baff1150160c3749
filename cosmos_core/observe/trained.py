"""Summary of each training of a run: base model, data with a sample row, learning rate, batch, steps and reward.

The summary uses the settings in `pipeline.toml` and the files of the stages. Unknown values are left out.
"""

from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from cosmos_core.config.difference import flatten_tables
from cosmos_core.observe.formatting import format_number
from cosmos_core.observe.record import RunRecord, StageRecord, read_stage_entries
from cosmos_core.run.files import read_json_object

_STAGE_REFERENCE_PREFIX = "stage:"
_DIGEST_LENGTH = 12
_MAX_SHOWN_TOKENS = 400
_PARTIAL_TRAINING_KEYS = ("policy.freeze_pattern", "policy.trainable_pattern", "policy.trainable_map")


def list_training_properties(run: RunRecord) -> list[tuple[StageRecord, list[tuple[str, str]]]]:
    """Return each training stage with its properties as pairs of name and text."""
    stage_entries = read_stage_entries(run.path)
    training_properties = []
    for stage in run.stages:
        stage_entry = stage_entries.get(stage.name)
        if not (stage.kind.trains_model and stage_entry and isinstance(stage_entry.get("overrides"), dict)):
            continue
        base_model, data_stage_names = _find_base_model(stage_entry), _trace_data_stages(stage_entries, stage.name)
        if base_model.startswith(_STAGE_REFERENCE_PREFIX):
            base_model = f"output of stage {base_model.removeprefix(_STAGE_REFERENCE_PREFIX)}"
        property_texts = [
            ("base model", base_model),
            ("digest of the model", _format_source_digests(run, data_stage_names[:1], "model")),
            ("data", _describe_dataset(run, stage_entries, data_stage_names)),
            ("digest of the data", _format_source_digests(run, data_stage_names, "data")),
            *_list_training_settings(stage, flatten_tables(stage_entry["overrides"])),
        ]
        training_properties.append((stage, [(name, value) for name, value in property_texts if value]))
    return training_properties


def decode_sample_rows(run: RunRecord) -> list[tuple[StageRecord, list[tuple[str, bool]]]]:
    """Return pairs of a stage that trains a model and its first training row. The row is a list of pairs: a segment of
    text, and whether the loss includes the segment. Of stages that read the same rows, only the first is returned."""
    stage_entries = read_stage_entries(run.path)
    stages = {stage.name: stage for stage in run.stages}
    row_by_data_stage: dict[str, tuple[StageRecord, list[tuple[str, bool]]]] = {}
    for stage in run.stages:
        stage_entry = stage_entries.get(stage.name)
        if not (stage.kind.trains_model and stage_entry):
            continue
        data_stages = [stages[name] for name in _trace_data_stages(stage_entries, stage.name) if name in stages]
        data_stage = next((each for each in data_stages if (each.path / "data").is_dir()), None)
        if data_stage is None or data_stage.name in row_by_data_stage:
            continue
        base_model = _find_base_model(stage_entry)
        is_stage_model = base_model.startswith(_STAGE_REFERENCE_PREFIX)
        model_stages = (stage, stages.get(base_model.removeprefix(_STAGE_REFERENCE_PREFIX)) if is_stage_model else None)
        model_paths = [each.path / str(each.info["model"]) for each in model_stages if each and each.info.get("model")]
        if row := _decode_sample_row(data_stage.path / "data", [*model_paths, base_model]):
            row_by_data_stage[data_stage.name] = (stage, row)
    return list(row_by_data_stage.values())


def _find_base_model(stage_entry: dict[str, Any]) -> str:
    overrides = flatten_tables(stage_entry.get("overrides") or {})
    return str(stage_entry.get("model") or overrides.get("policy.model_name_or_path", ""))


def _trace_data_stages(stage_entries: dict[str, dict[str, Any]], stage_name: str) -> list[str]:
    """Return the names of a stage and of the stages before it that prepared its rows, from the last to the first."""
    stage_names: list[str] = []
    while stage_name in stage_entries and stage_name not in stage_names:
        stage_names.append(stage_name)
        stage_name = str(stage_entries[stage_name].get("data") or "").removeprefix(_STAGE_REFERENCE_PREFIX)
    return stage_names


def _format_source_digests(run: RunRecord, stage_names: list[str], source_kind: str) -> str:
    """Return the digests of the external models or data sets (`source_kind`) that some stages of a run have read."""
    stage_results = [stage.result for stage in run.stages if stage.name in stage_names and stage.result]
    sources_of_kind = [
        source for result in stage_results for source in result.get("sources", ()) if source["kind"] == source_kind
    ]
    return ", ".join(dict.fromkeys(source["digest"][:_DIGEST_LENGTH] for source in sources_of_kind))


def _describe_dataset(run: RunRecord, stage_entries: dict[str, dict[str, Any]], stage_names: list[str]) -> str:
    """Return the name of the data set that a chain of stages reads, and its number of rows."""
    data_source = ""
    for name in stage_names:
        stage_settings = flatten_tables(stage_entries[name].get("overrides") or {})
        dataset_names = [stage_settings.get(f"train.train_policy.dataset.{key}") for key in ("name", "local_dir")]
        dataset_mix = stage_settings.get("train.train_policy.datasets")
        datasets = [each for each in dataset_mix if isinstance(each, dict)] if isinstance(dataset_mix, list) else []
        mix_weights = [(each.get("name"), each.get("weight")) for each in datasets]
        dataset_names.append(", ".join(f"{each}{f' x {weight:g}' if weight else ''}" for each, weight in mix_weights))
        data_source = data_source or next((str(value) for value in dataset_names if value), "")
        data_stage_reference = str(stage_entries[name].get("data") or "")
        if not data_stage_reference.startswith(_STAGE_REFERENCE_PREFIX):
            data_source = data_source or data_stage_reference
    data_source = data_source or (f"output of stage {stage_names[-1]}" if len(stage_names) > 1 else "")
    statistics_paths = [stage.path / "data" / "statistics.json" for stage in run.stages if stage.name in stage_names]
    row_statistics = next((statistics for path in statistics_paths if (statistics := read_json_object(path))), {})
    dataset_description_parts = [data_source] if data_source else []
    for split_name, rows_suffix in (("train", ""), ("validation", " held out")):
        statistics_of_split = row_statistics.get(split_name)
        if isinstance(statistics_of_split, dict) and isinstance(statistics_of_split.get("rows"), int):
            dataset_description_parts.append(f"{format_number(statistics_of_split['rows'])} rows{rows_suffix}")
    return ", ".join(dataset_description_parts)


def _list_training_settings(stage: StageRecord, settings: dict[str, Any]) -> list[tuple[str, str]]:
    def format_setting(key: str, template: str = "{}") -> str:
        value = settings.get(f"train.{key}")
        return "" if value in {None, "", 0} else template.format(f"{value:g}" if isinstance(value, float) else value)

    policy_key_prefix = "train_policy."
    (step, max_step), has_rollouts = stage.step_and_total, stage.kind.feed == "rollouts"
    lora_rank, num_generations = settings.get("policy.lora.r"), settings.get("rollout.n_generation")
    lr_key_prefix = "train.optm_lr"
    lr_keys = [key for key in settings if key.startswith(lr_key_prefix) and isinstance(settings[key], int | float)]
    learning_rates = [(key.removeprefix(lr_key_prefix).removeprefix("."), settings[key]) for key in lr_keys]
    partial_training_settings = [value for key, value in settings.items() if key.startswith(_PARTIAL_TRAINING_KEYS)]
    freezes_weights = any(value not in ([], {}) for value in partial_training_settings)
    policy_type = format_setting(f"{policy_key_prefix}type")
    loss_variant = format_setting(f"{policy_key_prefix}variant")
    algorithm_name = format_setting(f"{policy_key_prefix}trainer_type") or policy_type
    is_warmup_in_steps = settings.get("train.optm_warmup_steps", 1) >= 1
    warmup_template = "warmup of {} steps" if is_warmup_in_steps else "warmup of {} of all steps"
    labelled_settings: list[tuple[str, list[Any]]] = [
        ("algorithm", [algorithm_name, loss_variant if algorithm_name == policy_type != loss_variant else ""]),
        ("trains", [f"LoRA of rank {lora_rank}" if lora_rank else "some weights" if freezes_weights else "all weights",
                    format_setting("param_dtype", "computed in {}")]),
        ("learning rate", [*(f"{rate:g}{path and f' for {path}'}" for path, rate in learning_rates),
                           format_setting("optm_name"), format_setting("optm_decay_type", "{} decay") or "constant",
                           format_setting("optm_warmup_steps", warmup_template)]),
        ("batch", [format_setting("train_batch_per_replica", "{} completions" if has_rollouts else "{} rows"),
                   f"{num_generations} of each prompt" if has_rollouts and num_generations else "",
                   format_setting(f"{policy_key_prefix}mini_batch", "micro-batch {}")]),
        ("steps", [f"{step} of {max_step}" if step and max_step else "", format_setting("epoch", "at most {} epochs")]),
        ("reward", _list_rewards(settings) if has_rollouts else []),
        ("seed", [str(seed) for seed in [settings.get("train.seed")] if seed is not None])
    ]  # fmt: skip
    return [(name, ", ".join(str(value) for value in values if value)) for name, values in labelled_settings]


def _list_rewards(settings: dict[str, Any]) -> list[str]:
    """Return the rewards of a training with their weights, from the reward service, the data sets or the algorithm."""
    policy_key_prefix = "train.train_policy."
    if settings.get(f"{policy_key_prefix}use_remote_reward"):
        reward_functions = settings.get(f"{policy_key_prefix}remote_reward.reward_fns", ())
        return [f"{each['name']} x {each['weight']:g} of a reward service" for each in reward_functions]
    reward_key_prefix = f"{policy_key_prefix}reward_function."
    default_reward_weights = {
        key.removeprefix(reward_key_prefix): weight
        for key, weight in settings.items()
        if key.startswith(reward_key_prefix)
    }
    dataset_tables = settings.get(f"{policy_key_prefix}datasets") or [{}]
    reward_weights_by_dataset = [dataset.get("reward_function") or default_reward_weights for dataset in dataset_tables]
    return list(
        dict.fromkeys(f"{name} x {weight:g}" for each in reward_weights_by_dataset for name, weight in each.items())
    )


def _decode_sample_row(data_folder: Path, model_folders: Iterable[str | Path]) -> list[tuple[str, bool]]:
    """Return the first training row in `data_folder` as segments of text, each with True if the loss includes it. The
    first `tokenizer.json` in `model_folders` decodes the row; without that file, or without a row, return no text."""
    tokenizer_file = next((file for name in model_folders if (file := Path(name) / "tokenizer.json").is_file()), None)
    if tokenizer_file is None or not (row := _read_first_row(data_folder / "train.arrow")):
        return []
    from tokenizers import Tokenizer

    try:
        decode_tokens = Tokenizer.from_file(str(tokenizer_file)).decode
    except Exception:  # noqa: BLE001 - for a damaged file, tokenizers raises the class Exception itself
        return []
    text_segments: list[tuple[str, bool]] = []
    for name in [name for name in row if name.endswith("_ids") and row[name]]:
        column = name.removesuffix("_ids")
        loss_mask = row.get("loss_mask" if column == "input" else f"{column}_mask") or [0] * len(row[name])
        text_segments += [(f"\n{column}: " if text_segments else f"{column}: ", False)] if column != "input" else []
        mask_token_pairs = list(zip(loss_mask, row[name], strict=False))[:_MAX_SHOWN_TOKENS]
        for is_in_loss, token_group in groupby(mask_token_pairs, key=itemgetter(0)):
            decoded_text = decode_tokens([token for _, token in token_group], skip_special_tokens=False)
            text_segments.append((decoded_text, bool(is_in_loss)))
        text_segments += [("…", False)] if len(row[name]) > _MAX_SHOWN_TOKENS else []
    return text_segments


def _read_first_row(arrow_file: Path) -> dict[str, Any]:
    """Return token ids and masks in the first row of an Arrow file by column name; empty if it cannot be read."""
    import pyarrow as pa

    try:
        with pa.memory_map(str(arrow_file)) as source:
            row_table = pa.ipc.open_file(source).get_batch(0).slice(0, 1)
            column_names = [name for name in row_table.schema.names if name.endswith(("_ids", "_mask"))]
            first_rows: list[dict[str, Any]] = row_table.select(column_names).to_pylist()
    except (OSError, pa.ArrowException, IndexError):
        return {}
    return first_rows[0] if first_rows else {}
