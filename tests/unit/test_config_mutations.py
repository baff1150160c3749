"""Whatever is done to a valid configuration, it is still valid, or one line says what is wrong with it: exit code 64,
never a traceback. A key that no generation of recipes knows is always refused.

`COSMOS_MUTATIONS` sets the number of random mutations, 50 unless it is given; `make acceptance` takes 2000.
"""

from __future__ import annotations

import copy
import datetime
import math
import os
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_core.config.capabilities import check_capabilities, unique_notices
from cosmos_core.config.compat.translate import INEFFECTIVE_KEYS, RENAMED_KEYS
from cosmos_core.config.compose import Pipeline, load_pipeline
from cosmos_core.config.load import MAX_MESSAGE_LENGTH, merge_tables
from cosmos_core.config.schema.pipeline import PipelineConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.table import all_fields, find_table_classes
from cosmos_core.errors import EXIT_USAGE, ConfigError
from tasks.kinds import all_kinds
from tests.unit.config_recipes import WRITTEN, valid_configurations

MUTATIONS = int(os.environ.get("COSMOS_MUTATIONS", "50"))
BASES = valid_configurations()
SHIPPED = [name for name in BASES if name.endswith(".toml")]
FURTHER = {*SHIPPED} - {*SHIPPED[::16]}
LONG = {name for name in BASES if name.endswith("in full")}


def bases(*full: str) -> pytest.MarkDecorator:
    """Parametrise a test over the bases, of which some are `full`."""
    marks = {name: [pytest.mark.full] if name in full else [] for name in BASES}
    return pytest.mark.parametrize("base", [pytest.param(name, marks=marks[name]) for name in BASES])


Keys = tuple[str | int, ...]
Draw = Callable[[st.SearchStrategy[Any]], Any]

FIELDS = {key: field for key, _, field in (*all_fields(Recipe), *all_fields(PipelineConfig, "pipeline."))}
REMOTE = "train.train_policy.remote_reward"
OLDER = {*RENAMED_KEYS, *INEFFECTIVE_KEYS, f"{REMOTE}.reward_fn", f"{REMOTE}.score_key"}
KNOWN = {*FIELDS, *OLDER, "extends", "pipeline"}
OVERRIDES = "pipeline.stages.overrides"
FREE = {
    *INEFFECTIVE_KEYS,
    f"{REMOTE}.reward_fn",
    *(key for key, field in FIELDS.items() if "dict[" in str(field.annotation)),
}
FREE.remove(OVERRIDES)
NAMES = sorted({key.rpartition(".")[2] for key in KNOWN})
HOSTILE = [
    "", " ", "\n", "a\nb = 1", "\r\n", "\0", "\x1b[31mred\x1b[0m", "\x7f", "\u2028", "\u202eright to left", "größe",
    "数", "\ufeff", "a" * 5000, "a/" * 3000, "~nobody/x", "../x:y", "stage:", "stage:sft", "1h", "None", "*", "(", "[",
    "\ud800", "int", "s3://b/c",
]  # fmt: skip
NUMBERS = [0, -1, 1, -(2**31), 2**31, 2**63 - 1, -(2**63), 10**30, 1e308, -1e308, 5e-324, 0.5, math.nan, math.inf]


def load(file: Path, *overrides: str, over: Sequence[Path] = ()) -> Pipeline:
    return load_pipeline(file, overrides, all_kinds(), over)


def is_one_line(text: str) -> bool:
    """Fit for a terminal: no line break, no control character, an end in sight."""
    return text.isprintable() and 0 < len(text) <= MAX_MESSAGE_LENGTH


def told(file: Path, *overrides: str, over: Sequence[Path] = ()) -> str:
    """What is wrong with a configuration; empty: nothing is. What is accepted must come back from what a run saves."""
    try:
        pipeline = load(file, *overrides, over=over)
    except ConfigError as error:
        assert error.exit_code == EXIT_USAGE
        assert is_one_line(str(error)), str(error)
        return str(error)
    assert all(notice.isprintable() for notice in unique_notices(pipeline)), unique_notices(pipeline)
    try:
        check_capabilities(pipeline)
    except ConfigError as error:
        assert is_one_line(str(error)), str(error)
    saved = file.with_name(f"saved-{file.name}")
    saved.write_text(tomli_w.dumps(pipeline.as_toml()), encoding="utf-8")
    assert tomli_w.dumps(load(saved).as_toml()) == saved.read_text(encoding="utf-8")
    return ""


def in_file(text: str | bytes, file: Path) -> Path:
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


def write(file: Path, values: dict[str, Any]) -> Path:
    """A lone surrogate becomes bytes that are not UTF-8."""
    return in_file(tomli_w.dumps(values).encode("utf-8", "surrogatepass"), file)


def places(value: Any, keys: Keys = ()) -> Iterator[tuple[Any, Keys]]:
    """Every table or array with the path of each thing in it."""
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    for key, item in items:
        yield value, (*keys, key)
        if isinstance(item, dict | list):
            yield from places(item, (*keys, key))


scalars = (
    st.sampled_from([*NUMBERS, *HOSTILE, True, False, "sft", "grpo", "custom", "vllm"])
    | st.sampled_from([datetime.date(2020, 1, 1), datetime.time(12), datetime.datetime(1979, 5, 27, 7, 32)])
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
)
texts = st.sampled_from(HOSTILE) | st.text(max_size=8)
any_value = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=8
)


def drop(draw: Draw, table: Any, key: Any) -> None:
    del table[key]


def rename(draw: Draw, table: Any, key: Any) -> None:
    value = table[key]
    del table[key]
    if isinstance(table, dict):
        table[misspelt(str(key), draw(st.integers(0, 7)))] = value


def rename_to_known(draw: Draw, table: Any, key: Any) -> None:
    value = table[key]
    if isinstance(table, dict):
        del table[key]
        table[draw(st.sampled_from(NAMES) | texts)] = value
    else:
        table.append(value)


def retype(draw: Draw, table: Any, key: Any) -> None:
    table[key] = draw(any_value)


def alter(draw: Draw, table: Any, key: Any) -> None:
    """Another enumerated value, or another number."""
    value = table[key]
    table[key] = misspelt(value, draw(st.integers(0, 7))) if isinstance(value, str) else draw(st.sampled_from(NUMBERS))


def nest(draw: Draw, table: Any, key: Any) -> None:
    for _ in range(draw(st.integers(1, 40))):
        table[key] = draw(st.sampled_from([[table[key]], {str(key): table[key]}]))


def transplant(draw: Draw, table: Any, key: Any) -> None:
    """The whole of a base where one value was."""
    table[key] = copy.deepcopy(BASES[draw(st.sampled_from(sorted(BASES)))])


def misspelt(name: str, how: int) -> str:
    """Eight ways to get a name wrong."""
    middle = len(name) // 2
    return (
        f"{name}s", name[:-1], name[1:], f"{name[:middle]}_{name[middle:]}", name[:middle] + name[middle : middle + 1] +
        name[middle:], name[::-1], name.replace("a", "а"), name.swapcase(),
    )[how]  # fmt: skip


WAYS = [drop, rename, rename_to_known, retype, alter, nest, transplant]


def dotted(keys: Keys) -> str:
    """The key that the schema knows: without indices, without the way to a stage's own recipe."""
    path = ".".join(key for key in keys if isinstance(key, str))
    return path.removeprefix(f"{OVERRIDES}.")


def unknown(values: dict[str, Any]) -> list[str]:
    """The keys that no generation of recipes knows; below tables of the user's own every key is known."""
    found = {dotted(keys) for _, keys in places(values) if isinstance(keys[-1], str)}
    return [key for key in found if key not in KNOWN and not is_free(key)]


def is_free(key: str) -> bool:
    return any(key.startswith(f"{table}.") for table in FREE)


@cache
def first_bases() -> dict[str, str]:
    """Of each key the first base in `WRITTEN` that has it."""
    found: dict[str, str] = {}
    for base in WRITTEN:
        for _, keys in places(BASES[base]):
            found.setdefault(dotted(keys), base)
    return found


def mutated(draw: Draw, base: dict[str, Any]) -> dict[str, Any]:
    """The values after one to three mutations."""
    values = copy.deepcopy(base)
    for _ in range(draw(st.integers(1, 3))):
        found = list(places(values))
        if found:
            table, keys = found[draw(st.integers(0, len(found) - 1))]
            draw(st.sampled_from(WAYS))(draw, table, keys[-1])
    return values


@bases(*FURTHER, *LONG)
def test_what_is_mutated_is_valid(tmp_path: Path, base: str) -> None:
    assert told(write(tmp_path / "valid.toml", BASES[base])) == ""


def test_the_bases_set_every_table_of_the_schema() -> None:
    found: set[str] = set()
    for values in BASES.values():
        found |= {dotted(keys) for _, keys in places(values)}
    tables = {key for key, _, field in all_fields(Recipe) if find_table_classes(field.annotation)}
    assert tables - found == set()


@bases(*FURTHER, *LONG)
def test_any_mutation_is_valid_or_one_line(tmp_path_factory: pytest.TempPathFactory, base: str) -> None:
    file = tmp_path_factory.mktemp("mutated") / "mutated.toml"

    @settings(max_examples=MUTATIONS // len(BASES) + 1, deadline=None, database=None, derandomize=True)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        values = mutated(data.draw, BASES[base])
        refused = told(write(file, values))
        assert refused or not unknown(values), unknown(values)

    check()


@bases(*SHIPPED, *LONG)
def test_a_misspelt_key_is_always_refused(tmp_path: Path, base: str) -> None:
    """Each key of the base that none before it has, each misspelt in another way; of shipped recipes every key."""
    file = tmp_path / "misspelt.toml"
    seen: set[str] = set()
    for table, (*path, name) in places(BASES[base]):
        key = dotted((*path, name))
        is_seen = key in seen or (base in WRITTEN and first_bases()[key] != base)
        if isinstance(table, list) or is_seen or is_free(key):
            continue
        ways = (misspelt(str(name), (len(seen) + number) % 8) for number in range(8))
        wrong = next(way for way in ways if dotted((*path, way)) not in KNOWN)
        values = copy.deepcopy(BASES[base])
        parent: Any = values
        for step in path:
            parent = parent[step]
        parent[wrong] = parent.pop(name)
        said = told(write(file, values))
        assert "unknown key" in said or "needs trainer_type" in said or (base == "deprecated" and said), (
            key,
            wrong,
            said,
        )
        seen.add(key)
    assert seen


@settings(max_examples=MUTATIONS // 4, deadline=None, database=None, derandomize=True)
@given(base=st.sampled_from(sorted(WRITTEN)), cut=st.floats(0, 1), skip=st.integers(0, 40), junk=st.binary(max_size=20))
def test_damaged_bytes_are_one_line(
    tmp_path_factory: pytest.TempPathFactory, base: str, cut: float, skip: int, junk: bytes
) -> None:
    content = WRITTEN[base].encode()
    place = int(cut * len(content))
    told(in_file(content[:place] + junk + content[place + skip :], tmp_path_factory.getbasetemp() / "damaged.toml"))


@pytest.mark.parametrize(
    "layer", [pytest.param(x, marks=[] if x in {"grpo", "pipeline"} else pytest.mark.full) for x in WRITTEN]
)
def test_a_file_means_the_same_on_top_of_another_and_extending_it(tmp_path: Path, layer: str) -> None:
    base, above = in_file(WRITTEN["grpo"], tmp_path / "base.toml"), in_file(WRITTEN[layer], tmp_path / "above.toml")
    extending = in_file(f"extends = 'base.toml'\n{WRITTEN[layer]}", tmp_path / "extending.toml")
    expected = load(base, "pipeline.name=x", over=[above])
    assert load(extending, "pipeline.name=x").as_toml() == expected.as_toml()


@settings(max_examples=MUTATIONS // 8, deadline=None, database=None, derandomize=True)
@given(data=st.data(), base=st.sampled_from(sorted(WRITTEN)), layer=st.sampled_from(sorted(WRITTEN)))
def test_any_files_on_top_of_each_other_are_valid_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, base: str, layer: str
) -> None:
    folder = tmp_path_factory.mktemp("layers")
    below, above = (mutated(data.draw, tomllib.loads(WRITTEN[name])) for name in (base, layer))
    first, second = write(folder / "first.toml", below), write(folder / "second.toml", above)
    refused = told(first, over=[second])
    assert refused or not unknown(merge_tables(below, above))  # what is replaced as a whole is not looked at
    told(write(second, {**above, "extends": "first.toml"}))


@settings(max_examples=MUTATIONS // 3, deadline=None, database=None, derandomize=True)
@given(
    base=st.sampled_from(["sft", "grpo", "pipeline"]),
    key=st.sampled_from(sorted(KNOWN)) | st.text(max_size=20),
    prefix=st.sampled_from(["", "", "sft.", "rl.", "grpo.", "pipeline.", "stages."]),
    how=st.none() | st.integers(0, 7),
    value=texts | st.sampled_from(["1", "-1", "1e999", "nan", "[1, 2]", "{a=1}", "2020-01-01", "0x" + "f" * 99]),
)
def test_any_setting_is_valid_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, base: str, key: str, prefix: str, how: int | None, value: str
) -> None:
    file = in_file(WRITTEN[base], tmp_path_factory.getbasetemp() / "setting.toml")
    wrong = key if how is None else misspelt(key, how)
    refused = told(file, f"{prefix}{wrong}={value}")
    assert refused or wrong in KNOWN or is_free(wrong), wrong
