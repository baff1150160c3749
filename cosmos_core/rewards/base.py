"""What a reward is: a function of a completion and its reference that returns a number, or a number and metrics.

    def gsm8k(to_be_evaluated: str, reference: str) -> float: ...
    def mine(completion, reference, prompt, num_tokens, difficulty, **others) -> tuple[float, dict[str, float]]: ...

Arguments are bound by name (`binding.py`): the completion, the reference, `KEYWORDS`, and columns of the row. An
exception means *unknown*, never 0. Not here: deadlines and processes (runner.py).

A function of a user's own may be `async def`. One that takes `completions`, as TRL's do, or any with
`group_reward_calculation`, is called once for all completions of a prompt: what differs between rows or completions is
a list, and it returns a list of what it would return.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cosmos_core.errors import ConfigError, CosmosError, RewardError, StageFailed
from cosmos_core.registry import import_user_code, is_import_path, location_of, offered_names, suggestion
from cosmos_core.rewards.binding import KEYWORDS as KEYWORDS
from cosmos_core.rewards.binding import Binding, bind
from cosmos_core.types import Group, Score

PENALTIES = frozenset({"overlong"})
"""Of the packaged rewards those that are 0 at best; all others may be 1."""

Scored = tuple[float, dict[str, float]]

_FOLDER = "cosmos_core.rewards"
_KEY = "train.train_policy.reward_function"


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function and how it is called."""

    name: str
    function: Callable[..., Any]
    binding: Binding

    @property
    def keywords(self) -> tuple[str, ...]:
        """Return the names of `binding.KEYWORDS` that the function wants."""
        return self.binding.keywords

    def __call__(self, fields: Mapping[str, Any]) -> Scored:
        """Score `fields`: `to_be_evaluated`, `reference` and any of `KEYWORDS`; a wanted one that is missing is None.

        Raises:
            ValueError: the function returned something that is no finite number.
            TypeError: a parameter cannot be bound.
            Exception: whatever the function raises.
        """
        if not self.binding.takes_lists:
            return _scored(self._called(self.binding.arguments(fields)))
        [scored] = self.of_group([fields])
        if not isinstance(scored, tuple):
            raise scored or ValueError("returned None: it does not apply to this row")
        return scored

    def of_group(self, fields: Sequence[Mapping[str, Any]]) -> list[Scored | ValueError | None]:
        """Score all completions of a prompt in one call; a value that is no finite number is an error of its own. None:
        the function says, as TRL's may, that it does not apply to the row.

        Raises:
            ValueError: the function returned something else than a list with a value for each.
            TypeError: a parameter cannot be bound.
            Exception: whatever the function raises.
        """
        results = self._called(self.binding.list_arguments(fields))
        if hasattr(results, "tolist"):  # numpy and torch
            results = results.tolist()
        if not isinstance(results, list | tuple) or len(results) != len(fields):
            found = f"{len(results)} values" if isinstance(results, list | tuple) else f"a {type(results).__name__}"
            raise ValueError(f"returned {found} for {len(fields)} completions; the rule is a list with one for each")
        scored: list[Scored | ValueError | None] = []
        for result in results:
            try:
                scored.append(None if result is None and self.binding.takes_lists else _scored(result))
            except ValueError as error:
                scored.append(error)
        return scored

    def _called(self, arguments: tuple[list[Any], dict[str, Any]]) -> Any:
        positional, named = arguments
        result = self.function(*positional, **named)
        return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result

    def location_of(self, error: BaseException) -> str:
        """Return the file and line of a user's function that an error came from, or of the function; empty for ours."""
        return location_of(error, self.function) if is_import_path(self.name) else ""


def request_of(group: Group, k: int) -> dict[str, Any]:
    """Return what rewards are told of completion `k` of a group."""
    completion = group.completions[k]
    return {
        "to_be_evaluated": completion.text,
        "reference": group.prompt.reference,
        "prompt": group.prompt.text,
        "media": getattr(completion, "media", None),
        "metadata": getattr(group.prompt, "metadata", None) or {},
        "turns": [{"role": turn.role, "content": turn.text} for turn in completion.turns]
        or [{"role": "assistant", "content": completion.text}],
        "num_tokens": completion.num_sampled,
        "completion_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
    }


def load_reward(name: str) -> Reward:
    """Return the reward `cosmos_core/rewards/<name>.py:<name>`, or a user's `module:function` or `file.py:function`.

    Raises:
        RewardError: it does not exist, cannot be imported, takes no completion or wants what is not offered.
    """
    function = _function(name)
    try:
        return Reward(name, function, bind(name, function))
    except RewardError as error:
        raise RewardError(f"{_KEY}: {error}") from None


def metric_names(rewards: Iterable[str]) -> dict[str, str]:
    """Return a short name for the metrics of each reward: its function's, with the file's where two share it."""
    full = {reward: _parts(reward) for reward in rewards}
    found = {}
    for reward, parts in full.items():
        short = next(
            (n for n in range(1, len(parts)) if sum(other[-n:] == parts[-n:] for other in full.values()) == 1),
            len(parts),
        )
        found[reward] = ".".join(parts[-short:])
    return found


def _parts(reward: str) -> list[str]:
    """Return folders or packages, file or module, and function of `path/file.py:function` or `module:function`."""
    if not is_import_path(reward):
        return [reward]
    module, _, function = reward.rpartition(":")
    path = module.removesuffix(".py")
    return [*(path.split("/" if path != module else ".")), function]


def require_reference(reference: str) -> str:
    """Return `reference` without surrounding blanks; an empty one is unknown: nothing can be right or wrong against it.

    Raises:
        ValueError: there is no reference.
    """
    if not reference or not reference.strip():
        raise ValueError("the reference answer is empty")
    return reference.strip()


def _function(name: str) -> Callable[..., Any]:
    if not is_import_path(name) and name not in (known := offered_names(_FOLDER)):
        raise RewardError(
            f"{_KEY}: there is no reward {name!r}; one of your own is module:function or path/file.py:function"
            f"{suggestion(name, known)}"
        )
    try:
        function = import_user_code(name if is_import_path(name) else f"{_FOLDER}.{name}:{name}")
    except ConfigError as error:
        raise RewardError(f"{_KEY}: {error}") from error
    if not callable(function):
        raise RewardError(f"{_KEY}: {name!r} is a {type(function).__name__}, not a function")
    return function


def plain(value: Any) -> Any:
    """Return a value as JSON has it: numbers of numpy and torch as Python's, and None for what is not finite."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def one_line(error: BaseException, location: str = "") -> str:
    """Return class and message of an error on one line of bounded length, and where it was raised."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return (text if len(text) <= 500 else text[:497] + "...") + f" ({location})" * bool(location)


def all_invalid(what: str, scores: Iterable[Score]) -> CosmosError:
    """Return what to raise when no score is valid: nothing that may pass where a function raised, it would again."""
    first = next((score for score in scores if score.value is None), None)
    message = f"{what}; the first: {first.error if first else 'none is learned from'}"
    return RewardError(message) if first is not None and first.is_raised else StageFailed(message)


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def _scored(result: Any) -> Scored:
    if isinstance(result, Mapping) and "score" in result:  # as verl's; what is no number there is text to read
        metrics = {k: v for k, v in result.items() if k != "score" and isinstance(v, int | float)}
        result = (result["score"], metrics)
    value, metrics = result if isinstance(result, tuple) else (result, {})
    return _finite(value, "returned"), {
        str(key): _finite(metric, f"returned metric {key!r} =") for key, metric in metrics.items()
    }


def _finite(value: Any, what: str) -> float:
    if hasattr(value, "item"):  # numpy and torch scalars
        value = value.item()
    if value is None:
        raise ValueError(f"{what} nothing; the rule is a number, or (number, dict of numbers)")
    if not isinstance(value, int | float):
        raise ValueError(f"{what} a {type(value).__name__}; the rule is a number, or (number, dict of numbers)")
    if not math.isfinite(value):
        raise ValueError(f"{what} {value}; the rule is a finite number")
    return float(value)
