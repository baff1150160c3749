"""Interface of rewards: a function of a completion and its reference that returns a number, or a number and metrics.

    def gsm8k(to_be_evaluated: str, reference: str) -> float: ...
    def mine(completion, reference, prompt, num_tokens, difficulty, **others) -> tuple[float, dict[str, float]]: ...

Arguments are bound by name (`binding.py`): the completion, the reference, `REWARD_PARAMETERS`, and columns of the row.
An exception means that the score is unknown, never 0. Deadlines and processes are in `runner.py`.

A user function may be `async def`. A function with a parameter `completions`, as in TRL, or any function with
`group_reward_calculation`, is called once for all completions of a prompt: arguments that differ between rows or
completions are lists, and the function returns a list with one result per completion.
"""

import asyncio
import inspect
import math
import sys
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from cosmos_core import registry
from cosmos_core.config.source_weights import reward_weights_of_source
from cosmos_core.error_handling import convert_errors
from cosmos_core.errors import ConfigError, CosmosError, RewardError, StageFailed
from cosmos_core.rewards.binding import REWARD_PARAMETERS as REWARD_PARAMETERS
from cosmos_core.rewards.binding import ParameterBinding, RequestFields, bind_parameters
from cosmos_core.types import Group, Score

if TYPE_CHECKING:
    from cosmos_core.config.schema.remote_reward import RemoteRewardConfig

PENALTY_REWARDS = frozenset({"overlong"})
"""Names of packaged reward functions that are penalties: the best value of a penalty is 0, that of others is 1."""

RewardConfig: TypeAlias = "dict[str, float] | RemoteRewardConfig"
"""Reward functions with their weights in the total reward, or the settings of the rewards of a remote service."""

ScoreAndMetrics = tuple[float, dict[str, float]]

REWARDS_PACKAGE = "cosmos_core.rewards"
_RETURN_TYPE_MESSAGE = "the rule is a number, or (number, dict of numbers)"
_thread_local_data = threading.local()


@dataclass(frozen=True, slots=True)
class Reward:
    """Reward function, whose arguments are bound by parameter name."""

    name: str
    function: Callable[..., Any]
    binding: ParameterBinding

    def __call__(self, request_fields: Mapping[str, Any]) -> ScoreAndMetrics:
        """Score one completion; `request_fields` has `to_be_evaluated`, `reference` and values of `REWARD_PARAMETERS`.
        Raise `ValueError` if the function does not return a finite number, `TypeError` if a parameter cannot be bound,
        and any error that the function raises."""
        if not self.binding.takes_whole_group:
            return _parse_score(self._call_function([request_fields], takes_lists=False))
        [score_or_error] = self.score_group([request_fields])
        if not isinstance(score_or_error, tuple):
            raise score_or_error or ValueError("returned None: it does not apply to this row")
        return score_or_error

    def score_group(self, requests: Sequence[RequestFields]) -> list[ScoreAndMetrics | ValueError | None]:
        """Score all completions of a prompt in one call. The result of a completion is a `ValueError` if its value is
        not a finite number, and None if the function does not apply to the row, as in TRL. Raise `ValueError` if the
        function did not return a list with one value per completion, and the other errors that `__call__` raises."""
        returned_values = self._call_function(requests, takes_lists=True)
        if hasattr(returned_values, "tolist"):  # convert a NumPy array or a torch tensor to a list
            returned_values = returned_values.tolist()
        returned_values = list(returned_values) if isinstance(returned_values, Iterator) else returned_values
        returns_list = isinstance(returned_values, list | tuple)
        if not returns_list or len(returned_values) != len(requests):
            returned_text = f"{len(returned_values)} values" if returns_list else f"a {type(returned_values).__name__}"
            expected_return_text = "the rule is a list with one for each"
            raise ValueError(f"returned {returned_text} for {len(requests)} completions; {expected_return_text}")
        scores_or_errors: list[ScoreAndMetrics | ValueError | None] = []
        for returned_value in returned_values:
            try:
                is_error_or_none = isinstance(returned_value, ValueError) or (
                    returned_value is None and self.binding.takes_whole_group
                )
                scores_or_errors.append(returned_value if is_error_or_none else _parse_score(returned_value))
            except Exception as error:  # noqa: BLE001 - a tensor of several numbers raises a RuntimeError
                value_error = error if isinstance(error, ValueError) else ValueError(error_on_one_line(error))
                scores_or_errors.append(value_error.with_traceback(error.__traceback__))
        return scores_or_errors

    def _call_function(self, requests: Sequence[Mapping[str, Any]], *, takes_lists: bool) -> Any:
        positional_arguments, keyword_arguments = self.binding.bind_arguments(requests, takes_lists=takes_lists)
        return_value = self.function(*positional_arguments, **keyword_arguments)
        return wait_for_result(return_value) if inspect.isawaitable(return_value) else return_value

    def find_user_code_location(self, error: BaseException) -> str:
        """Return the file and line of user code that raised an error; empty for packaged rewards."""
        return registry.find_error_location(error, self.function) if registry.is_import_path(self.name) else ""


def wait_for_result(awaitable: Awaitable[Any]) -> Any:
    """Return the result of an awaitable of user code. All calls of a thread use one event loop, because semaphores and
    clients of services that user code keeps between calls belong to the loop of their first use."""
    if not hasattr(_thread_local_data, "event_loop"):
        _thread_local_data.event_loop = asyncio.new_event_loop()
    return _thread_local_data.event_loop.run_until_complete(awaitable)


def make_reward_request(group: Group, k: int) -> dict[str, Any]:
    """Return the fields of completion `k` of a group, such as its text and reference, that reward functions receive."""
    completion = group.completions[k]
    return {
        "to_be_evaluated": completion.text, "reference": group.prompt.reference, "prompt": group.prompt.text,
        "images": group.prompt.images, "media": getattr(completion, "media", None),
        "metadata": getattr(group.prompt, "metadata", None) or {},
        "turns": [{"role": turn.role, "content": turn.text} for turn in completion.turns]
        or [{"role": "assistant", "content": completion.text}],
        "num_tokens": completion.num_sampled, "completion_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
    }  # fmt: skip


def load_reward(name: str) -> Reward:
    """Return the reward of `cosmos_core/rewards/<name>.py`, or a user function `module:function` or `file.py:function`.
    Raise `RewardError` if it is missing, cannot be imported, takes no completion, or has an unsupported parameter."""
    is_user_code = registry.is_import_path(name)
    if not is_user_code and name not in (reward_names := registry.list_defined_names(REWARDS_PACKAGE)):
        raise RewardError(
            f"there is no reward {name!r}; one of your own is module:function or path/file.py:function"
            f"{registry.suggest_names(name, reward_names)}"
        )
    try:
        reward_function = registry.import_user_code(name if is_user_code else f"{REWARDS_PACKAGE}.{name}:{name}")
        # A reward class, as in ms-swift, must be instantiated; a reward function, as in TRL, is used as it is.
        if is_class := inspect.isclass(reward_function):
            error_text = f"{name!r} is a class that cannot be made"
            with convert_errors(lambda e: RewardError(f"{error_text}: {error_on_one_line(e)}; name an object of it")):
                reward_function = reward_function()
        if not callable(reward_function):
            raise RewardError(f"{name!r} is a {type(reward_function).__name__}, not a function")
        return Reward(name, reward_function, bind_parameters(name, reward_function, passes_text_completions=is_class))
    except (ConfigError, RewardError) as error:
        raise RewardError(f"reward {error}") from error


def metric_names(rewards: Iterable[str]) -> dict[str, str]:
    """Return a unique metric name for each reward: the name of its function, preceded by names of its file and folders
    if several rewards have functions of that name."""
    name_parts_by_reward = {reward: _split_reward_name(reward) for reward in rewards}
    name_suffix_counts = Counter(tuple(each[i:]) for each in name_parts_by_reward.values() for i in range(len(each)))
    metric_name_by_reward = {}
    for reward, name_parts in name_parts_by_reward.items():
        unique_suffix_sizes = (k for k in range(1, len(name_parts)) if name_suffix_counts[tuple(name_parts[-k:])] == 1)
        metric_name_by_reward[reward] = ".".join(name_parts[-next(unique_suffix_sizes, len(name_parts)) :])
    return metric_name_by_reward


def _split_reward_name(reward: str) -> list[str]:
    """Return the parts of a reward's name in a recipe: folders, module and function for a user-defined reward; for a
    packaged reward, the name as a whole."""
    if not registry.is_import_path(reward):
        return [reward]
    module_name, _, function_name = reward.rpartition(":")
    module_path = module_name.removesuffix(".py")
    return [*(module_path.split("/" if module_path != module_name else ".")), function_name]


def require_reference(reference: str) -> str:
    """Return `reference` without surrounding whitespace; raise `ValueError` if nothing is left to compare with."""
    if not reference or not reference.strip():
        raise ValueError("the reference answer is empty")
    return reference.strip()


def to_json_value(raw_value: Any) -> Any:
    """Return a value as JSON types: numbers of numpy and torch as Python numbers, and non-finite numbers as None."""
    if hasattr(raw_value, "tolist"):
        raw_value = raw_value.tolist()
    if isinstance(raw_value, dict):
        return {key: to_json_value(element) for key, element in raw_value.items()}
    if isinstance(raw_value, list | tuple):
        return [to_json_value(element) for element in raw_value]
    return None if isinstance(raw_value, float) and not math.isfinite(raw_value) else raw_value


def error_on_one_line(error: BaseException, error_location: str = "") -> str:
    """Return the class and message of an error on one line of at most 500 characters, then `error_location`."""
    try:
        message = " ".join(f"{type(error).__name__}: {error}".split())
    except Exception:  # noqa: BLE001 - the `__str__` of a user's exception may fail
        message = f"{type(error).__name__} without a message"
    return (message if len(message) <= 500 else message[:497] + "...") + f" ({error_location})" * bool(error_location)


def invalid_scores_error(problem_summary: str, scores: Iterable[Score]) -> CosmosError:
    """Return the error to raise if all scores are invalid: `RewardError` if all have a permanent error, such as an
    exception of the reward function; else `StageFailed`, after which the stage is retried."""
    invalid_scores = (score for score in scores if score.value is None)
    invalid_score = min(invalid_scores, key=lambda score: score.is_permanent_error, default=None)
    message = f"{problem_summary}; the first: {invalid_score.error if invalid_score else 'none is learned from'}"
    is_permanent_error = invalid_score is not None and invalid_score.is_permanent_error
    return RewardError(message) if is_permanent_error else StageFailed(message)


def _parse_score(returned_value: Any) -> ScoreAndMetrics:
    # Reward functions of verl may return a dict, whose other numbers become metrics.
    if isinstance(returned_value, Mapping) and "score" in returned_value:
        raw_metrics = {
            k: v.item() if getattr(v, "ndim", None) == 0 else v for k, v in returned_value.items() if k != "score"
        }
        metrics = {k: v for k, v in raw_metrics.items() if isinstance(v, int | float) and abs(v) <= sys.float_info.max}
        returned_value = (returned_value["score"], metrics)
    is_pair = isinstance(returned_value, tuple) and len(returned_value) == 2
    raw_score, metrics = returned_value if is_pair else (returned_value, {})
    if not isinstance(metrics, Mapping):
        raise ValueError(f"returned a tuple with a {type(metrics).__name__}; {_RETURN_TYPE_MESSAGE}")
    return _to_finite_float(raw_score, "returned"), {
        str(key): _to_finite_float(raw_metric, f"returned metric {key!r} =") for key, raw_metric in metrics.items()
    }


def _to_finite_float(returned_number: Any, error_prefix: str) -> float:
    if hasattr(returned_number, "item"):  # convert a scalar of NumPy or torch to a Python number
        returned_number = returned_number.item()
    if returned_number is None:
        raise ValueError(f"{error_prefix} nothing; {_RETURN_TYPE_MESSAGE}")
    if not isinstance(returned_number, int | float):
        raise ValueError(f"{error_prefix} a {type(returned_number).__name__}; {_RETURN_TYPE_MESSAGE}")
    if not abs(returned_number) <= sys.float_info.max:  # refuse NaN, infinity, and integers beyond the range of floats
        raise ValueError(f"{error_prefix} {returned_number}; the rule is a finite number")
    return float(returned_number)


def full_reward(
    rewards: RewardConfig, data_source: str = "", metrics: Mapping[str, float] = MappingProxyType({})
) -> float | None:
    """Return the total reward of a completion for which each reward function of positive weight returns 1, without
    penalties; None if there is no such function. `data_source`, the name of the prompt's data set, selects the weights.
    Unless `metrics`, the metrics of the completion, is empty, only functions with a metric in `metrics` count; a
    function of negative weight adds its weight times its metric."""
    if not isinstance(rewards, dict):
        return rewards.compute_full_reward(metrics)
    metric_name_by_reward, weight_by_reward = metric_names(rewards), reward_weights_of_source(rewards, data_source)
    weight_by_metric = {metric_name_by_reward[r]: w for r, w in weight_by_reward.items() if r not in PENALTY_REWARDS}
    positive_weights = [w for name, w in weight_by_metric.items() if w > 0 and (not metrics or name in metrics)]
    weighted_penalties = [w * metrics.get(name, 0.0) for name, w in weight_by_metric.items() if w < 0]
    return sum(positive_weights) + sum(weighted_penalties) if positive_weights else None


def has_full_reward(reward: float, full_reward: float | None) -> bool:
    """Return whether a reward reaches the full reward (see the function `full_reward`), except for a rounding error;
    False if the full reward is None."""
    return full_reward is not None and reward >= full_reward - 1e-9
