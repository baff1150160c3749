"""Interface of reward models, which are loaded once and score batches of items, in a training or the reward service.

    class PickscoreReward:
        def __init__(self, settings: RewardModelSettings) -> None: ...          # loads
        def score(self, items: Sequence[RewardInput]) -> ScoreColumns: ...       # {"pickscore": [0.9, None, ...]}

`cosmos_core/rewards/NAME.py` has the class `NameReward`; packaged text rewards and user functions are wrapped. None
means that an item has no score; the score is never set to 0. Other interpreters (`venv_python`) also import this file
and the reward models, so they import large packages only when a model is loaded.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isclass
from typing import Any, Protocol, cast

from cosmos_core.error_handling import convert_errors
from cosmos_core.errors import RewardError
from cosmos_core.registry import import_user_code, list_defined_names, load_class, suggest_names
from cosmos_core.rewards.base import REWARDS_PACKAGE, Reward, error_on_one_line, load_reward, to_json_value
from cosmos_core.transient import is_transient

_OPTION_PARAMETERS = ("max_tokens", "overlong")
"""Parameters of reward functions whose values come from the recipe in training, and from `options` in the service."""
ScoreColumns = dict[str, Any]
"""Scores of a batch of items by the name of the score; each value is a list with one number or text per item, or a dict
of such lists."""


@dataclass
class RewardInput:
    """Input of a reward model: one prompt with its image, video or text."""

    prompt: str = ""
    media: Any = None
    """An image (PIL.Image), a video (uint8 array of frames, height, width and 3), or None for a text."""
    to_be_evaluated: str = ""
    """Text to score; empty for an image or video."""
    reference: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    """Additional fields: `video_fps`, GenEval's `tag` and `include`, and columns of the prompt's row."""


@dataclass(frozen=True)
class RewardModelSettings:
    """Settings with which a reward model is loaded."""

    model_path: str = ""
    download_path: str = ""
    dtype: str = "float32"
    device: str = "cpu"
    endpoint_url: str = ""
    endpoint_api_key: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


class Scorer(Protocol):
    """Interface of reward models, which score batches of items."""

    def score(self, items: Sequence[RewardInput]) -> ScoreColumns:
        """Return the scores of all items by the name of the score; image rewards score the middle frame of a video."""


class FunctionReward:
    """Reward model that calls a reward function once per item."""

    def __init__(self, name: str, reward: Reward, settings: RewardModelSettings) -> None:
        self._reward_name, self._reward, self._options = name, reward, dict(settings.options)
        self._option_values = {name: self._options[name] for name in _OPTION_PARAMETERS if name in self._options}
        self.errors: list[str] = []

    def score(self, items: Sequence[RewardInput]) -> ScoreColumns:
        """Return the values of the reward function for all items, with each further metric under a separate key."""
        score_columns: ScoreColumns = {self._reward_name: [None] * len(items)}
        self.errors = [""] * len(items)
        for i, item in enumerate(items):
            request_fields = {
                **item.info, **self._option_values, "to_be_evaluated": item.to_be_evaluated, "custom": self._options,
                "reference": item.reference, "prompt": item.prompt, "media": item.media, "metadata": item.info,
            }  # fmt: skip
            try:
                reward_value, metrics = self._reward(request_fields)
            except Exception as error:  # noqa: BLE001 - user code may raise any error; the client receives its text
                self.errors[i] = error_on_one_line(error, self._reward.find_user_code_location(error))
                continue
            score_columns[self._reward_name][i] = reward_value
            for metric_name, metric in metrics.items():
                # A metric named like the reward gets another key, so that it does not replace the value of the reward.
                is_reward_name = metric_name == self._reward_name
                column_name = f"{metric_name}/{metric_name}" if is_reward_name else metric_name
                score_columns.setdefault(column_name, [None] * len(items))[i] = metric
        return score_columns


def load_scorer(name: str, import_path: str, settings: RewardModelSettings) -> Scorer:
    """Load a reward model by name, or by the `import_path` of user code. Raise `RewardError` if the reward is
    missing or cannot be loaded; the message names the packages to install."""
    if import_path:
        imported_object = import_user_code(import_path)
        if isclass(imported_object) and hasattr(imported_object, "score"):
            return cast(Callable[[RewardModelSettings], Scorer], imported_object)(settings)
        return FunctionReward(name, load_reward(import_path), settings)
    if is_model_reward(name):
        return load_class(name, REWARDS_PACKAGE, "Reward")(settings)
    reward_names = sorted({*list_defined_names(REWARDS_PACKAGE, "Reward"), *list_defined_names(REWARDS_PACKAGE)})
    if name not in reward_names:
        raise RewardError(
            f"reward_type = {name!r}: there is no such reward; one of your own is named by entry = "
            f'"path/file.py:thing"{suggest_names(name, reward_names)}'
        )
    text_reward = load_reward(name)
    if "judge_config" in text_reward.binding.declared_parameters:
        raise RewardError(f"reward_type = {name!r} has its settings in recipes alone; name it in reward_function there")
    required_options = [option for option in _OPTION_PARAMETERS if option in text_reward.binding.declared_parameters]
    if missing_options := [f"options.{option}" for option in required_options if option not in settings.options]:
        raise RewardError(
            f"the reward {name!r} needs {' and '.join(missing_options)}, which no request has; for example options = "
            "{ max_tokens = 1024, overlong = { buffer_length = 256, penalty_factor = 1.0 } }"
        )
    return FunctionReward(name, text_reward, settings)


def replace_nonfinite(score_columns: ScoreColumns, num_items: int) -> tuple[ScoreColumns, list[str]]:
    """Return the score columns with None for numbers that are not finite, and one text per item, which names such a
    number of the item and is empty if there is none. Raise `ValueError` if the length of a column is not the number of
    items."""
    errors = [""] * num_items
    return {key: _nonfinite_to_none(key, column, num_items, errors) for key, column in score_columns.items()}, errors


def _nonfinite_to_none(score_name: str, column: Any, num_items: int, item_errors: list[str]) -> Any:
    if isinstance(column, dict):
        return {k: _nonfinite_to_none(f"{score_name}.{k}", v, num_items, [""] * num_items) for k, v in column.items()}
    column_values = to_json_value(column)
    if not isinstance(column_values, list) or len(column_values) != num_items:
        raise ValueError(f"returned no list of {num_items} values as {score_name!r}")
    for i, (raw_value, json_value) in enumerate(zip(column, column_values, strict=True)):
        if json_value is None and raw_value is not None:
            item_errors[i] = item_errors[i] or f"{score_name} is {raw_value}"
    return column_values


def require_packages(reward: str, install_hint: str, *module_names: str) -> None:
    """Raise `RewardError`, which says what to install, if a package of a reward is not installed."""
    if missing_names := [module for module in module_names if importlib.util.find_spec(module) is None]:
        raise RewardError(f"the reward {reward!r} needs {', '.join(missing_names)}, not installed here; {install_hint}")


def is_model_reward(reward_name: str) -> bool:
    """Return whether a built-in reward function scores with a model, which `open_model` loads."""
    return reward_name in list_defined_names(REWARDS_PACKAGE, "Reward")


def open_model(reward_name: str, custom_table: Mapping[str, Any] | None) -> Scorer:
    """Return the model of a built-in reward with the settings in `[custom.NAME]`, loaded once per process."""

    def make_reward_error(error: Exception) -> Exception:
        error_prefix = f"the reward {reward_name!r} cannot be loaded with the settings in [custom.{reward_name}]"
        return error if is_transient(error) else RewardError(f"{error_prefix}: {error_on_one_line(error)}")

    with convert_errors(make_reward_error):
        settings = dict((custom_table or {}).get(reward_name) or {})
        cache_key = (reward_name, repr(sorted(settings.items())))
        if cache_key not in _loaded_models:
            field_values = {k: settings.pop(k) for k in list(settings) if k in RewardModelSettings.__dataclass_fields__}
            model_options = settings | dict(field_values.pop("options", {}))
            model_settings = RewardModelSettings(**field_values, options=model_options)
            _loaded_models[cache_key] = load_class(reward_name, REWARDS_PACKAGE, "Reward")(model_settings)
        return _loaded_models[cache_key]


def score_item(
    reward_name: str, item: RewardInput, custom_table: Mapping[str, Any] | None
) -> tuple[float, dict[str, float]]:
    """Return an item's score by the model of a built-in reward, and the further scores of the item by name; raise
    `ValueError` if the item has no score."""
    score_columns, item_errors = replace_nonfinite(open_model(reward_name, custom_table).score([item]), 1)
    score_by_key = {k: v[0] for k, v in score_columns.items() if isinstance(v, list) and isinstance(v[0], int | float)}
    main_score = score_by_key.pop(next(iter(score_columns)), None)
    if main_score is None:
        raise ValueError(item_errors[0] or "it has no score")
    return float(main_score), {k: float(v) for k, v in score_by_key.items()}


_loaded_models: dict[tuple[str, str], Scorer] = {}
