"""Translate configuration keys of older recipe generations; `keys.toml` lists renamed keys and keys without effect."""

import copy
import tomllib
from importlib.resources import files
from typing import Any

from cosmos_core.config.load import TomlTable, shorten_value
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.train import infer_training_type
from cosmos_core.errors import ConfigError

_KEY_TRANSLATIONS: dict[str, Any] = tomllib.loads(files(__package__).joinpath("keys.toml").read_text("utf-8"))
_TRAIN_POLICY_KEY = "train.train_policy"
_TOP_LEVEL_KEYS = {*Recipe.model_fields, "pipeline", "extends"}
_WFM_TABLE_NAMES = (
    "model", "optimizer", "scheduler", "dataloader_train", "dataloader_val", "trainer", "model_parallel", "job"
)  # fmt: skip
"""Names of the top-level tables of recipes that Cosmos-RL reads with its deprecated option `--wfm-mode`."""
RENAMED_KEYS: dict[str, str] = _KEY_TRANSLATIONS["moved"] | _KEY_TRANSLATIONS["moved_in_dpo"]
"""Current name of each configuration key of Cosmos-RL that has another name today, by its old name."""
INEFFECTIVE_KEYS: dict[str, str] = {key: effect for effect, keys in _KEY_TRANSLATIONS["dead"].items() for key in keys}
"""Intended effect of each key that occurs in public recipes but has no effect, by name of the key."""
_INEFFECTIVE_GRPO_KEYS = {key: effect for effect, keys in _KEY_TRANSLATIONS["dead_in_grpo"].items() for key in keys}

_SYSTEM_PROMPT_OF_ANNOTATIONS = "custom.dataset.system_prompt"
_VAL_BATCH_SIZE_KEYS = ("train.validation_batch_per_replica", "rollout.val_batch_size")


def with_current_keys(config_values: TomlTable, error_prefix: str, notices: list[str]) -> TomlTable:
    """Return a configuration with current key names in place of older ones; add a message for each change to `notices`.
    Raises `ConfigError` if an old and a new key of one setting have different values, or if the file has the deprecated
    `--wfm-mode` schema."""
    wfm_tables = [name for name in _WFM_TABLE_NAMES if isinstance(config_values.get(name), dict)]
    # A table `[model]` alone may belong to user code.
    has_wfm_tables_only = not _TOP_LEVEL_KEYS & config_values.keys()
    if wfm_tables and (has_wfm_tables_only or ("model" in wfm_tables and len(wfm_tables) > 1)):
        remedy = f"`python tools/convert_wfm.py {error_prefix.partition(': ')[0]}` prints a recipe that says the same"
        raise ConfigError(f"{error_prefix}: [{wfm_tables[0]}] is of the deprecated --wfm-mode schema; {remedy}")
    config_values = copy.deepcopy(config_values)
    _keep_applicable_batch_size(config_values, notices)
    old_key_by_new_key: dict[str, str] = {}
    for old_key, new_key in _KEY_TRANSLATIONS["moved"].items():
        table_of_old_key, old_key_name = find_parent_table(config_values, old_key)
        if old_key_name not in table_of_old_key:
            continue
        old_value = table_of_old_key.pop(old_key_name)
        table_of_new_key, new_key_name = find_parent_table(config_values, new_key, should_create=True)
        new_value = table_of_new_key.get(new_key_name, old_value)
        if new_value not in (old_value, None):
            old_text, new_value_text = f"{old_key} = {shorten_value(old_value)}", shorten_value(new_value)
            key_conflict_text = f"{old_text} is today's {new_key}, which says {new_value_text}"
            if other_old_key := old_key_by_new_key.get(new_key):
                key_conflict_text = f"{other_old_key} = {new_value_text} and {old_text} are both today's {new_key}"
            raise ConfigError(f"{error_prefix}: {key_conflict_text}; keep one of them")
        table_of_new_key[new_key_name], old_key_by_new_key[new_key] = old_value, old_key
        notices.append(f"{old_key} is today's {new_key}")
    _translate_remote_reward(config_values, notices)
    _remove_ineffective_keys(config_values, INEFFECTIVE_KEYS, notices)
    return config_values


def with_current_algorithm_keys(recipe_tables: TomlTable, notices: list[str]) -> TomlTable:
    """Return a recipe without the older keys of DPO and GRPO: they are renamed or, if they have no effect, removed.
    Keys such as `custom.dpo_beta` are renamed only for DPO, since they may otherwise belong to a user's algorithm.
    `custom.dataset.system_prompt` is copied to the algorithm's `system_prompt` only if `custom.dataset.annotation_path`
    names the rows.

    If the recipe sets an older key and its current key, the current key takes precedence.
    """
    recipe_tables = copy.deepcopy(recipe_tables)
    policy_table, _ = find_parent_table(recipe_tables, f"{_TRAIN_POLICY_KEY}.type")
    if policy_table.get("trainer_type") == "dpo":
        for old_key, new_key in _KEY_TRANSLATIONS["moved_in_dpo"].items():
            _rename_key(recipe_tables, old_key, new_key, notices)
    annotation_table, _ = find_parent_table(recipe_tables, _SYSTEM_PROMPT_OF_ANNOTATIONS)
    if annotation_table.get("annotation_path") and (system_prompt := annotation_table.get("system_prompt")):
        _rename_key(recipe_tables, _SYSTEM_PROMPT_OF_ANNOTATIONS, f"{_TRAIN_POLICY_KEY}.system_prompt", notices)
        annotation_table["system_prompt"] = system_prompt  # keep the old key, which user packers may read in `custom`
    if infer_training_type(policy_table) == "grpo":
        _remove_ineffective_keys(recipe_tables, _INEFFECTIVE_GRPO_KEYS, notices)
    return recipe_tables


def _rename_key(config_values: TomlTable, old_key: str, new_key: str, notices: list[str]) -> None:
    old_table, old_key_name = find_parent_table(config_values, old_key)
    if old_key_name not in old_table:
        return
    old_value = old_table.pop(old_key_name)
    new_table, new_key_name = find_parent_table(config_values, new_key, should_create=True)
    if new_table.setdefault(new_key_name, old_value) == old_value:
        notices.append(f"{old_key} is today's {new_key}")
    else:
        old_value_text, new_value_text = shorten_value(old_value), shorten_value(new_table[new_key_name])
        notices.append(f"{old_key} = {old_value_text} is ignored: today's {new_key} says {new_value_text}")


def _keep_applicable_batch_size(config_values: TomlTable, notices: list[str]) -> None:
    """If a recipe sets different values for the two older keys of the validation batch size, keep only the key that
    applies to the recipe's type of training, RL or SFT."""
    tables_and_key_names = [find_parent_table(config_values, key) for key in _VAL_BATCH_SIZE_KEYS]
    validation_batch_sizes = [table[name] for table, name in tables_and_key_names if name in table]
    if len(validation_batch_sizes) < 2 or validation_batch_sizes[0] == validation_batch_sizes[1]:
        return
    policy_table, _ = find_parent_table(config_values, f"{_TRAIN_POLICY_KEY}.type")
    is_rl = infer_training_type(policy_table) == "grpo" if policy_table else True
    table, name = tables_and_key_names[not is_rl]
    ignored_key, used_key = _VAL_BATCH_SIZE_KEYS[not is_rl], _VAL_BATCH_SIZE_KEYS[is_rl]
    removed_value_text = shorten_value(table.pop(name))
    notices.append(f"{ignored_key} = {removed_value_text} is ignored: {used_key} is that of this type of training")


def _remove_ineffective_keys(config_values: TomlTable, effect_by_key: dict[str, str], notices: list[str]) -> None:
    for key, intended_effect in effect_by_key.items():
        table, name = find_parent_table(config_values, key)
        # At the root of a file remove only tables; the schema refuses any other value as an unknown key.
        if name in table and (table is not config_values or isinstance(table[name], dict)):
            notices.append(_ignored_key_message(key, table.pop(name), intended_effect))


def _ignored_key_message(key: str, ignored_value: Any, intended_effect: str) -> str:
    return f"{key} = {shorten_value(ignored_value)} is ignored; it would have meant {intended_effect}"


def _translate_remote_reward(config_values: TomlTable, notices: list[str]) -> None:
    """Replace the table `remote_reward.reward_fn = {name = weight}` and its `score_key` by the list `reward_fns`."""
    old_key = f"{_TRAIN_POLICY_KEY}.remote_reward.reward_fn"
    reward_table, name = find_parent_table(config_values, old_key)
    if not isinstance(reward_table.get(name), dict):
        return  # leave a value that is no table unchanged, because the schema refuses it with an error
    score_key_entry = {"score_key": reward_table.pop("score_key")} if "score_key" in reward_table else {}
    weights = reward_table.pop(name)
    reward_table["reward_fns"] = [{"name": key, "weight": weight, **score_key_entry} for key, weight in weights.items()]
    notices.append(f"{old_key} is today's {old_key}s")


def current_key(key: str) -> str:
    """Return the current name of a dotted key, or the key unchanged if neither it nor a table that contains it was
    renamed. The key can begin with a stage name, `STAGE.KEY`."""
    for old_key, new_key in _KEY_TRANSLATIONS["moved"].items():
        stage_prefix, is_below_old_key = _match_stage_prefix(key, old_key)
        if is_below_old_key:
            key = f"{stage_prefix}{new_key}{key.removeprefix(stage_prefix + old_key)}"
    return key


def no_effect_message(key: str, ignored_value: Any) -> str:
    """Return a notice that the value `ignored_value` of a dotted key (`KEY` or `STAGE.KEY`) has no effect; empty if the
    key has an effect."""
    for old_key, intended_effect in INEFFECTIVE_KEYS.items():
        if "." in old_key and _match_stage_prefix(key, old_key)[1]:
            return _ignored_key_message(key, ignored_value, intended_effect)
    return ""


def _match_stage_prefix(key: str, table_key: str) -> tuple[str, bool]:
    """Split the dotted key `key` into a prefix `STAGE.` and a key, unless `key` itself is `table_key` or a key below
    it. Return the prefix, or "" without a prefix, and whether the other part is `table_key` or a key below it."""
    if f"{key}.".startswith(f"{table_key}."):
        return "", True
    stage_name, _, key_below_first_name = key.partition(".")
    return f"{stage_name}.", stage_name != "custom" and f"{key_below_first_name}.".startswith(f"{table_key}.")


def find_parent_table(config_values: TomlTable, key: str, *, should_create: bool = False) -> tuple[TomlTable, str]:
    """Return the table in which a dotted key lies, and the last part of the key. A missing table is returned as an
    empty table, and added to `config_values` if `should_create`; a value that is no table counts as missing."""
    *parent_table_names, name = key.split(".")
    for parent_name in parent_table_names:
        parent_table = config_values.setdefault(parent_name, {}) if should_create else config_values.get(parent_name)
        config_values = parent_table if isinstance(parent_table, dict) else {}
    return config_values, name
