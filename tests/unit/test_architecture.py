"""The shape of the code: what it may import, how long a thing may be, that every file says what it is for.

Nesting, arguments, formatting, types and the import contracts are held by `make lint`.
"""

from __future__ import annotations

import ast
import functools
import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit import named

pytestmark = pytest.mark.usefixtures("executed")

ROOT = Path(__file__).parents[2]
FORBIDDEN = ("torch", "transformers", "diffusers", "vllm", "ray", "peft", "accelerate", "datasets")
FRONT = (
    "cli", "cli_config", "cli_models", "cli_server", "cli_runs", "session",
    "config", "run", "launch", "upload", "observe",
    "errors", "types", "registry", "machine_properties", "environment",
)  # fmt: skip
FUNCTION_LINES = 60
FILE_LINES = 400
SCHEMA_LINES = 600  # tables with a docstring a field, and model adapters, may be longer
LONGER: dict[str, int] = {}  # `file` or `file:function` to its length today; entries only shrink or go


@functools.cache
def sources() -> list[Path]:
    """Every Python file of ours."""
    return sorted(path for top in ("cosmos_core", "flows", "tasks", "tests") for path in (ROOT / top).rglob("*.py"))


@functools.cache
def text_of(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def parsed(file: Path) -> ast.Module:
    return named.parse(text_of(file))


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """Look for no garbage among millions of nodes, which takes longer than to parse them; none is kept afterwards."""
    gc.disable()
    yield
    for cached in (named.parse, class_definitions, protocols):
        cached.cache_clear()
    gc.enable()


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """What is in a body, and the bodies in it: a tenth of what `ast.walk` yields."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            yield from statements(child)


def functions(file: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in statements(parsed(file)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def ceiling(place: str) -> int:
    if ":" in place:
        return LONGER.get(place, FUNCTION_LINES)
    usual = SCHEMA_LINES if place.startswith(("cosmos_core/config/", "cosmos_core/models/")) else FILE_LINES
    return LONGER.get(place, usual)


IN_QUOTES = re.compile(r'("""|\'\'\').*?\1', re.DOTALL)


def may_have_a_long_function(text: str) -> bool:
    """Whether a definition and the next one that is no deeper are far apart: what has none needs no tree."""
    lines = IN_QUOTES.sub(lambda quoted: "\n" * quoted[0].count("\n"), text).splitlines()
    starts = [(i, len(line) - len(line.lstrip())) for i, line in enumerate(lines) if "def " in line]
    ends = (next((j for j, other in starts if j > i and other <= depth), len(lines)) for i, depth in starts)
    return any(end - i > FUNCTION_LINES for (i, _), end in zip(starts, ends, strict=True))


def test_no_file_and_no_function_is_longer_than_its_ceiling() -> None:
    lengths = {}
    for file in sources():
        place = str(file.relative_to(ROOT))
        lengths[place] = len(text_of(file).splitlines())
        for node in functions(file) if may_have_a_long_function(text_of(file)) else ():
            assert node.end_lineno is not None
            lengths[f"{place}:{node.name}"] = node.end_lineno - node.lineno + 1
    assert {place: length for place, length in lengths.items() if length > ceiling(place)} == {}
    assert all(lengths.get(place) == length for place, length in LONGER.items()), "an exception shrank: lower it too"


def test_a_training_takes_the_parts_of_a_stage_and_not_the_whole() -> None:
    """A new function of `train/` takes its tables of the recipe or a `Workspace`; the number may only fall."""
    files = [file for file in sources() if file.parent.name == "train"]
    takers = [f"{file.name}:{node.name}" for file in files for node in functions(file)
              for each in (*node.args.args, *node.args.kwonlyargs)
              if each.annotation and ast.unparse(each.annotation) in {"Stage", "Recipe"}]  # fmt: skip
    assert len(takers) <= 15, takers


def test_every_module_says_what_it_is_for() -> None:
    silent = [file for file in sources() if file.name != "__init__.py"
              and not text_of(file).startswith('"""') and not ast.get_docstring(parsed(file))]  # fmt: skip
    assert silent == []
    of_packages = {file for file in sources() if file.name == "__init__.py"} - {
        ROOT / "cosmos_core/__init__.py",
        ROOT / "tasks/__init__.py",
    }
    assert not [file for file in of_packages if file.read_text(encoding="utf-8").strip()]


@functools.cache
def class_definitions() -> dict[str, list[ast.ClassDef]]:
    """Return the classes of the product by name."""
    classes: dict[str, list[ast.ClassDef]] = {}
    for file in sources():
        if not file.is_relative_to(ROOT / "tests"):
            for node in statements(parsed(file)):
                if isinstance(node, ast.ClassDef):
                    classes.setdefault(node.name, []).append(node)
    return classes


@functools.cache
def protocols() -> list[ast.ClassDef]:
    return [each for group in class_definitions().values() for each in group
            if any(ast.unparse(base).partition("[")[0] == "Protocol" for base in each.bases)]  # fmt: skip


def ancestors(node: ast.ClassDef, classes: dict[str, list[ast.ClassDef]]) -> Iterator[ast.ClassDef]:
    """Yield a class and its base classes in the product."""
    yield node
    for base in node.bases:
        name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
        for definition in classes.get(name, ()):
            if definition is not node:
                yield from ancestors(definition, classes)


def inherited_docstrings(node: ast.ClassDef, classes: dict[str, list[ast.ClassDef]]) -> set[str]:
    """Return the methods that a base class, or a protocol that the class implements, documents."""
    bases = list(ancestors(node, classes))
    names = {each.name for base in bases for each in base.body if isinstance(each, ast.FunctionDef)}
    names |= {each.target.id for base in bases for each in base.body
              if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)}  # fmt: skip
    names |= {each.attr for base in bases for each in ast.walk(base)
              if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)}  # fmt: skip
    implemented = [each for each in protocols()
                   if {part.name for part in each.body if isinstance(part, ast.FunctionDef)} <= names]  # fmt: skip
    members = [part for each in (*bases[1:], *implemented) for part in each.body if isinstance(part, ast.FunctionDef)]
    return {member.name for member in members if ast.get_docstring(member)}


def test_every_public_function_of_ours_has_a_sentence() -> None:
    silent, classes = [], class_definitions()
    for file in sources():
        if file.is_relative_to(ROOT / "tests"):
            continue
        for node in parsed(file).body:
            is_class = isinstance(node, ast.ClassDef) and node.name[0] != "_"
            names = [
                member.name
                for member in [node, *(node.body if is_class else [])]
                if isinstance(member, ast.FunctionDef)
                and member.name[0] != "_"
                and not ast.get_docstring(member)
                and not any(ast.unparse(decorator) == "overload" for decorator in member.decorator_list)
            ]
            described = inherited_docstrings(node, classes) if is_class and names else set()
            silent += [f"{file.relative_to(ROOT)}:{name}" for name in names if name not in described]
    assert silent == []


@pytest.mark.parametrize(
    ("name", "inherited"),
    [
        ("Denoiser", "collate"),  # a protocol that it implements
        ("KtoConfig", "auxiliary_model_names"),  # a base class of a base class
    ],
)
def test_an_override_needs_no_docstring_of_its_own(name: str, inherited: str) -> None:
    classes = class_definitions()
    [node] = classes[name]
    assert inherited in inherited_docstrings(node, classes)
    assert "no_such_method" not in inherited_docstrings(node, classes)


def test_no_file_is_called_utils() -> None:
    assert not [file for file in sources() if any("util" in part or part == "helpers.py" for part in
                                                  file.relative_to(ROOT).parts)]  # fmt: skip


def test_no_path_of_a_developers_machine_is_in_the_code() -> None:
    here = "/" + "work/"
    for file in sources():
        assert here not in text_of(file), file


def modules_of_the_front_half() -> list[str]:
    files = [file for top in ("flows", "tasks") for file in (ROOT / top).rglob("*.py")]
    for name in FRONT:
        place = ROOT / "cosmos_core" / name
        files += list(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    names = [str(file.relative_to(ROOT).with_suffix("")).replace("/", ".") for file in files]
    return sorted(name.removesuffix(".__init__") for name in names)


def loaded_after(*imports: str) -> list[set[str]]:
    """Top-level names in `sys.modules` of a fresh interpreter after each of some imports, one behind the other."""
    told = "print(*{name.partition('.')[0] for name in sys.modules}, flush=True)"
    lines = ["import gc, os, sys", "gc.disable()", *(line for each in imports for line in (each, told)), "os._exit(0)"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [set(line.split()) for line in done.stdout.splitlines()]


@functools.cache
def loaded_by_the_front() -> list[set[str]]:
    """What the help and the check of a schema load, and what is loaded after the whole of the front half."""
    largest = max((ROOT / "configs").rglob("*.toml"), key=lambda file: file.stat().st_size)
    check = "from pathlib import Path\nimport cosmos_core.cli, cosmos_core.data.pool\n"
    check += f"cosmos_core.cli._compose_pipeline([Path({str(largest)!r})], [])"
    return loaded_after(check, "\n".join(f"import {name}" for name in modules_of_the_front_half()))


def test_the_front_half_loads_none_of_the_back_halfs_libraries() -> None:
    names = modules_of_the_front_half()
    assert {"cosmos_core.cli", "flows.post_train", "tasks.stage", "cosmos_core.config.compose"} <= set(names)
    _, loaded = loaded_by_the_front()
    assert loaded & set(FORBIDDEN) == set()
    assert {"prefect", "pydantic"} <= loaded, "the imports were made"


def test_the_help_and_the_check_of_a_schema_load_neither_torch_nor_prefect_nor_matplotlib() -> None:
    """Nor do processes that make rows: they log before they import what warns."""
    loaded, _ = loaded_by_the_front()
    assert loaded & {*FORBIDDEN, "prefect", "matplotlib"} == set()
    assert {"pydantic", "typer"} <= loaded, "the imports were made"


@pytest.mark.full  # seconds of imports
def test_a_process_that_trains_loads_no_library_that_only_others_ask_for() -> None:
    [loaded] = loaded_after("import cosmos_core.models.verify_export\nfrom transformers.loss import loss_utils")
    assert loaded & {"sklearn", "scipy", "pandas", "boto3", "matplotlib", "prefect", "vllm", "ray"} == set()
    assert {"torch", "transformers", "peft"} <= loaded, "the imports were made"


def test_nothing_that_is_added_as_one_file_is_named_elsewhere() -> None:
    kept = named.allowed()
    too_many = {
        thing: f"{count} times, {kept.get(thing, 0)} are allowed"
        for thing, count in named.counted().items()
        if count > kept.get(thing, 0)
    }
    assert too_many == {}, (
        "ask the algorithm, adapter, kind or engine; see them with: python -m tests.unit.named [PATH]"
    )


@pytest.mark.parametrize(
    ("path", "text", "things"),
    [
        ("cosmos_core/train/x.py", 'if policy.trainer_type == "dpo": pass', ["algorithm"]),
        ("cosmos_core/algorithms/x.py", 'if policy.trainer_type == "dpo": pass', []),
        ("cosmos_core/train/x.py", "from cosmos_core.config.schema.grpo import GrpoConfig", ["algorithm"]),
        ("cosmos_core/run/x.py", 'KINDS = ("gate", "validate")', ["stage kind", "stage kind"]),
        ("cosmos_core/train/x.py", 'progress.phase("validate")', []),
        ("cosmos_core/train/x.py", '"sft"\n"""Or gate."""', []),
        ("flows/x.py", 'backend = "vllm"', ["engine"]),
        ("tasks/x.py", 'target = "s3"', ["upload target"]),
        ("cosmos_core/run/x.py", "patterns = ALL if policy.is_diffusers else ()", ["modality"]),
    ],
)
def test_a_name_is_found_where_it_does_not_belong(path: str, text: str, things: list[str]) -> None:
    assert [use.thing for use in named.in_text(path, text)] == things
