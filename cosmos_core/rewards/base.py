"""What a reward is: a function of a completion and its reference that returns a number, or a number and metrics.

    def gsm8k(to_be_evaluated: str, reference: str) -> float: ...
    def mine(to_be_evaluated, reference, prompt, num_tokens, **others) -> tuple[float, dict[str, float]]: ...

As in Cosmos-RL, beyond the first two a reward is given by keyword those things that it declares (all of them with
`**kwargs`); `KEYWORDS` lists them. Cosmos-RL's `tokenizer`, `config` and `data_packer` are not offered: rewards run in
child processes without torch. An exception means *unknown*, never 0. Not here: deadlines and processes (runner.py).

A function of a user's own may be `async def`. With `group_reward_calculation` it is called once for all completions of
a prompt: the first two and what differs between completions are lists, and it returns a list of what it would return.
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
from cosmos_core.types import Group, Score

KEYWORDS = {
    "prompt": "the rendered prompt, a string",
    "media": "the image (PIL.Image) or video (uint8 array of frames, height, width and 3) that was made; None: text",
    "metadata": "what the row of the prompt says beside it, a dict",
    "turns": "the turns behind the prompt, a list of {'role': 'assistant' or 'tool', 'content': text}",
    "num_tokens": "sampled tokens of the completion, the end token included",
    "finish_reason": "'stop' or 'length'",
    "max_tokens": "most tokens that a completion may have",
    "overlong": "the recipe's table [train.train_policy.overlong_reward]",
    "custom": "the recipe's [custom] table",
}

PENALTIES = frozenset({"overlong"})
"""Of the packaged rewards those that are 0 at best; all others may be 1."""

_OF_A_COMPLETION = ("prompt", "media", "turns", "num_tokens", "finish_reason")
"""Those of them that are lists for a function of a group."""

Scored = tuple[float, dict[str, float]]

_FOLDER = "cosmos_core.rewards"
_KEY = "train.train_policy.reward_function"


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function and the keywords that it wants."""

    name: str
    function: Callable[..., Any]
    keywords: tuple[str, ...]

    def __call__(self, fields: Mapping[str, Any]) -> Scored:
        """Score `fields`: `to_be_evaluated`, `reference` and any of `KEYWORDS`; a wanted one that is missing is None.

        Raises:
            ValueError: the function returned something that is no finite number.
            Exception: whatever the function raises.
        """
        return _scored(self._called(fields))

    def of_group(self, fields: Sequence[Mapping[str, Any]]) -> list[Scored | ValueError]:
        """Score all completions of a prompt in one call; a value that is no finite number is an error of its own.

        Raises:
            ValueError: the function returned something else than a list with a value for each.
            Exception: whatever the function raises.
        """
        shared = {keyword: value for keyword, value in fields[0].items() if keyword not in _OF_A_COMPLETION}
        lists = ("to_be_evaluated", "reference", *_OF_A_COMPLETION)
        results = self._called(shared | {name: [each.get(name) for each in fields] for name in lists})
        if hasattr(results, "tolist"):  # numpy and torch
            results = results.tolist()
        if not isinstance(results, list | tuple) or len(results) != len(fields):
            found = f"{len(results)} values" if isinstance(results, list | tuple) else f"a {type(results).__name__}"
            raise ValueError(f"returned {found} for {len(fields)} completions; the rule is a list with one for each")
        scored: list[Scored | ValueError] = []
        for result in results:
            try:
                scored.append(_scored(result))
            except ValueError as error:
                scored.append(error)
        return scored

    def _called(self, fields: Mapping[str, Any]) -> Any:
        keywords = {keyword: fields.get(keyword) for keyword in self.keywords}
        result = self.function(fields["to_be_evaluated"], fields["reference"], **keywords)
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
        "finish_reason": completion.finish_reason,
    }


def load_reward(name: str) -> Reward:
    """Return the reward `cosmos_core/rewards/<name>.py:<name>`, or a user's `module:function` or `file.py:function`.

    Raises:
        RewardError: it does not exist, cannot be imported, or wants a keyword that is not offered.
    """
    function = _function(name)
    return Reward(name, function, _keywords(name, function))


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


def _keywords(name: str, function: Callable[..., Any]) -> tuple[str, ...]:
    signature = inspect.signature(function)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    named = [
        p.name for p in list(signature.parameters.values())[2:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    keywords = tuple(keyword for keyword in KEYWORDS if takes_all or keyword in named)
    try:
        signature.bind("", "", **dict.fromkeys(keywords))
    except TypeError as error:
        raise RewardError(
            f"{_KEY}: {name!r} cannot be called as f(to_be_evaluated, reference"
            f"{''.join(f', {k}=' for k in keywords)}): {error}; offered keywords: {', '.join(KEYWORDS)}"
        ) from error
    return keywords


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
