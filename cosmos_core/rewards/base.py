"""Interface of rewards: a function of a completion and its reference that returns a number, or a number and metrics.

    def gsm8k(to_be_evaluated: str, reference: str) -> float: ...
    def mine(completion, reference, prompt, num_tokens, difficulty, **others) -> tuple[float, dict[str, float]]: ...

Arguments are bound by name (`binding.py`): the completion, the reference, `KEYWORDS`, and columns of the row. An
exception means that the score is unknown, never 0. Deadlines and processes are in `runner.py`.

A user function may be `async def`. A function with a parameter `completions`, as in TRL, or any function with
`group_reward_calculation`, is called once for all completions of a prompt: arguments that differ between rows or
completions are lists, and the function returns a list with one result per completion.
"""

import asyncio
import inspect
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeAlias

from cosmos_core.config.source_weights import weights_of
from cosmos_core.errors import ConfigError, CosmosError, RewardError, StageFailed
from cosmos_core.registry import import_user_code, is_import_path, location_of, offered_names, suggestion
from cosmos_core.rewards.binding import KEYWORDS as KEYWORDS
from cosmos_core.rewards.binding import ParameterBinding, bind
from cosmos_core.types import Group, Score

if TYPE_CHECKING:
    from cosmos_core.config.schema.remote_reward import RemoteRewardConfig

PENALTIES = frozenset({"overlong"})
"""Names of packaged rewards whose maximum is 0; all other rewards may reach 1."""

Rewards: TypeAlias = "dict[str, float] | RemoteRewardConfig"
"""Reward functions with their weights, or the rewards of a remote service."""

Scored = tuple[float, dict[str, float]]

_REWARDS_PACKAGE = "cosmos_core.rewards"


@dataclass(frozen=True, slots=True)
class Reward:
    """Reward function with the binding of its arguments."""

    name: str
    function: Callable[..., Any]
    binding: ParameterBinding

    def __call__(self, fields: Mapping[str, Any]) -> Scored:
        """Score one completion from `fields`: `to_be_evaluated`, `reference` and any of `KEYWORDS`, None if missing.

        Raises:
            ValueError: the function did not return a finite number.
            TypeError: a parameter cannot be bound.
            Exception: any error that the function raises.
        """
        if not self.binding.takes_group:
            return _parse_score(self._call([fields], as_lists=False))
        [result] = self.score_group([fields])
        if not isinstance(result, tuple):
            raise result or ValueError("returned None: it does not apply to this row")
        return result

    def score_group(self, fields: Sequence[Mapping[str, Any]]) -> list[Scored | ValueError | None]:
        """Score all completions of a prompt in one call. The result of a completion is a `ValueError` if its value is
        not a finite number, and None if the function does not apply to the row, as in TRL. Raise `ValueError` if the
        function did not return a list with one value per completion, and otherwise the errors of `__call__`."""
        results = self._call(fields, as_lists=True)
        if hasattr(results, "tolist"):  # convert a NumPy array or a torch tensor
            results = results.tolist()
        if not isinstance(results, list | tuple) or len(results) != len(fields):
            returned = f"{len(results)} values" if isinstance(results, list | tuple) else f"a {type(results).__name__}"
            raise ValueError(f"returned {returned} for {len(fields)} completions; the rule is a list with one for each")
        group_results: list[Scored | ValueError | None] = []
        for result in results:
            try:
                is_final_result = isinstance(result, ValueError) or (result is None and self.binding.takes_group)
                group_results.append(result if is_final_result else _parse_score(result))
            except Exception as error:  # noqa: BLE001 - a tensor of several numbers raises a RuntimeError
                group_results.append(error if isinstance(error, ValueError) else ValueError(error_on_one_line(error)))
        return group_results

    def _call(self, group: Sequence[Mapping[str, Any]], *, as_lists: bool) -> Any:
        positional_arguments, keyword_arguments = self.binding.arguments(group, as_lists=as_lists)
        result = self.function(*positional_arguments, **keyword_arguments)
        # `asyncio.run` requires a coroutine; `wait_for` wraps any awaitable in one.
        return asyncio.run(asyncio.wait_for(result, None)) if inspect.isawaitable(result) else result

    def location_of(self, error: BaseException) -> str:
        """Return the file and line of user code that raised an error; empty for packaged rewards."""
        return location_of(error, self.function) if is_import_path(self.name) else ""


def request_of(group: Group, k: int) -> dict[str, Any]:
    """Return the fields that rewards receive for completion `k` of a group."""
    completion = group.completions[k]
    return {
        "to_be_evaluated": completion.text, "reference": group.prompt.reference, "prompt": group.prompt.text,
        "media": getattr(completion, "media", None), "metadata": getattr(group.prompt, "metadata", None) or {},
        "turns": [{"role": turn.role, "content": turn.text} for turn in completion.turns]
        or [{"role": "assistant", "content": completion.text}],
        "num_tokens": completion.num_sampled, "completion_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
    }  # fmt: skip


def load_reward(name: str) -> Reward:
    """Return the reward of `cosmos_core/rewards/<name>.py`, or a user function `module:function` or `file.py:function`.
    Raise `RewardError` if it is missing, cannot be imported, takes no completion, or has an unsupported parameter."""
    if not is_import_path(name) and name not in (reward_names := offered_names(_REWARDS_PACKAGE)):
        raise RewardError(
            f"there is no reward {name!r}; one of your own is module:function or path/file.py:function"
            f"{suggestion(name, reward_names)}"
        )
    try:
        function = import_user_code(name if is_import_path(name) else f"{_REWARDS_PACKAGE}.{name}:{name}")
        if not callable(function):
            raise RewardError(f"{name!r} is a {type(function).__name__}, not a function")
        return Reward(name, function, bind(name, function))
    except (ConfigError, RewardError) as error:
        raise RewardError(f"reward {error}") from error


def metric_names(rewards: Iterable[str]) -> dict[str, str]:
    """Return a unique metric name for each reward: its function name, with file and folders if rewards share it."""
    parts_by_reward = {reward: _parts(reward) for reward in rewards}
    suffixes = Counter(tuple(parts[i:]) for parts in parts_by_reward.values() for i in range(len(parts)))
    names = {}
    for reward, parts in parts_by_reward.items():
        unique_lengths = (n for n in range(1, len(parts)) if suffixes[tuple(parts[-n:])] == 1)
        names[reward] = ".".join(parts[-next(unique_lengths, len(parts)) :])
    return names


def _parts(reward: str) -> list[str]:
    """Return the folders, the file and the function in `path/file.py:function`, or the same of `module:function`."""
    if not is_import_path(reward):
        return [reward]
    module, _, function = reward.rpartition(":")
    path = module.removesuffix(".py")
    return [*(path.split("/" if path != module else ".")), function]


def require_reference(reference: str) -> str:
    """Return `reference` without surrounding whitespace; raise `ValueError` if nothing is left to compare with."""
    if not reference or not reference.strip():
        raise ValueError("the reference answer is empty")
    return reference.strip()


def to_json_value(value: Any) -> Any:
    """Return a value as JSON types: numbers of numpy and torch as Python numbers, and non-finite numbers as None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: to_json_value(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(element) for element in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def error_on_one_line(error: BaseException, location: str = "") -> str:
    """Return the class and message of an error on one line of at most 500 characters, with its location."""
    try:
        text = " ".join(f"{type(error).__name__}: {error}".split())
    except Exception:  # noqa: BLE001 - the `__str__` of a user's exception may fail
        text = f"{type(error).__name__} without a message"
    return (text if len(text) <= 500 else text[:497] + "...") + f" ({location})" * bool(location)


def all_invalid(description: str, scores: Iterable[Score]) -> CosmosError:
    """Return the error for invalid scores: a permanent `RewardError` if a function failed, else `StageFailed`."""
    first_invalid = next((score for score in scores if score.value is None), None)
    message = f"{description}; the first: {first_invalid.error if first_invalid else 'none is learned from'}"
    return RewardError(message) if first_invalid is not None and first_invalid.is_raised else StageFailed(message)


def _parse_score(result: Any) -> Scored:
    if isinstance(result, Mapping) and "score" in result:  # verl's format, in which text values are only for logs
        metrics = {k: v for k, v in result.items() if k != "score" and isinstance(v, Real)}
        result = (result["score"], metrics)
    value, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not isinstance(metrics, Mapping):
        raise ValueError(
            f"returned a tuple with a {type(metrics).__name__}; the rule is a number, or (number, dict of numbers)"
        )
    return _to_finite_float(value, "returned"), {
        str(key): _to_finite_float(metric, f"returned metric {key!r} =") for key, metric in metrics.items()
    }


def _to_finite_float(value: Any, description: str) -> float:
    if hasattr(value, "item"):  # a scalar of numpy or torch
        value = value.item()
    if value is None:
        raise ValueError(f"{description} nothing; the rule is a number, or (number, dict of numbers)")
    if not isinstance(value, int | float):
        raise ValueError(f"{description} a {type(value).__name__}; the rule is a number, or (number, dict of numbers)")
    if not abs(value) <= sys.float_info.max:  # also true for NaN, and for an integer that no float can hold
        raise ValueError(f"{description} {value}; the rule is a finite number")
    return float(value)


def full_value(rewards: Rewards, source: str = "") -> float | None:
    """Return the reward of a completion for which every reward function returns 1 and no penalty applies; None if no
    reward function distinguishes completions."""
    if not isinstance(rewards, dict):
        return rewards.max_total
    weights = [weight for name, weight in weights_of(rewards, source).items() if name not in PENALTIES]
    return sum(weights) if any(weights) else None


def has_full_reward(value: float, full: float) -> bool:
    """Return whether a reward equals the full reward (see `full_value`), except for a rounding error."""
    return value >= full - 1e-9
