"""Types of configuration values that several tables have in common."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from cosmos_core.config.schema.field_metadata import FieldUnit, ReferenceKind, ResultNeutral
from cosmos_core.registry import is_import_path

DType = Literal["float32", "bfloat16", "float16"]

ClampedInt = Annotated[int, AfterValidator(lambda number: max(0, number))]
"""Integer that is replaced by 0 if it is negative."""
Fraction = Annotated[float, Field(ge=0, le=1)]

StepCount = Annotated[int, Field(gt=0), FieldUnit("train steps")]
TokenCount = Annotated[int, Field(gt=0), FieldUnit("tokens")]
RowCount = Annotated[int, Field(gt=0), FieldUnit("rows")]
CompletionCount = Annotated[int, Field(gt=0), FieldUnit("completions")]
RankCount = Annotated[int, Field(gt=0), FieldUnit("ranks")]

Auto = Literal["auto"]
"""Value of a setting that a training chooses by measurement in its first train step."""

TopP = Annotated[float, Field(gt=0, le=1)]
"""Probability mass of nucleus sampling; 1: all tokens."""


def _normalise_top_k(top_k: int) -> int:
    if top_k == 0:
        return -1
    if top_k != -1 and top_k < 1:
        raise ValueError(f"{top_k} must be -1 (all tokens) or at least 1")
    return top_k


TopK = Annotated[int, AfterValidator(_normalise_top_k), FieldUnit("tokens")]
"""Number of most likely tokens from which a token is sampled; -1 or 0: all."""


def _check_import_path(name: str) -> str:
    if is_import_path(name) and not all(name.rpartition(":")[::2]):
        raise ValueError(f"{name!r} is no import path; write module:thing or path/file.py:thing")
    return name


NameOrImportPath = Annotated[str, Field(min_length=1), AfterValidator(_check_import_path)]
"""Name of a built-in class or function, or the import path of user code, `module:thing` or `path/file.py:thing`; a
field of this type has the metadata `ReferenceKind.CODE`."""

StringOrList = Annotated[
    tuple[str, ...],
    BeforeValidator(
        lambda value: tuple(filter(None, [value])) if isinstance(value, str) else value,
        json_schema_input_type=str | tuple[str, ...],
    ),
    Field(strict=False),
]
"""One string or a list of strings; an empty string is an empty list."""

SplitNames = Annotated[StringOrList, AfterValidator(lambda names: tuple(filter(None, names)) or ("train",))]
"""Names of the splits of a data set; empty: `train`."""
StringList = Annotated[tuple[str, ...], Field(strict=False)]
"""List of strings."""


def parse_reward_weights(rewards: Any) -> Any:
    """Return the weights of reward functions by name: 1 for a single name and for each name in a list. In a table,
    integers become floats; any other value is returned unchanged."""
    if isinstance(rewards, str):
        return {rewards: 1.0}
    if isinstance(rewards, list | tuple) and all(isinstance(name, str) for name in rewards):
        return dict.fromkeys(rewards, 1.0)
    if isinstance(rewards, dict):
        return {name: float(w) if isinstance(w, int) and not isinstance(w, bool) else w for name, w in rewards.items()}
    return rewards


RewardWeights = Annotated[
    dict[str, float],
    BeforeValidator(parse_reward_weights, json_schema_input_type=str | list[str] | dict[str, float]),
    ReferenceKind.CODE,
]
"""Weight of each reward function by its name or import path `module:function`; a string or list means weight 1."""


def _require_model_name(name: str) -> str:
    if not name.strip():
        raise ValueError("model_name_or_path is empty; give a folder or a Hub id")
    return name


ModelName = Annotated[str, AfterValidator(_require_model_name), ResultNeutral, ReferenceKind.PATH]
"""Name of a model in a key `model_name_or_path`, such as a folder or a Hub id; an empty name is refused."""


def check_regexes(patterns: Any) -> Any:
    """Return `patterns`, which are regular expressions or a table with them as keys, unchanged; raise `ValueError` if
    one is not a regular expression."""
    for pattern in patterns or ():
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return patterns
