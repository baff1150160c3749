"""Names in backticks in docstrings and comments of the product exist, and so do the parameters that examples of the
documentation pass: a rename must not leave them behind."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXTERNAL = {
    "ClickException", "CosmosAttnProcessor2_0", "SanaLinearAttnProcessor3_0", "GPUModelRunner", "on_failure", "ps",
    "HuggingFaceStorageWriter", "get_model_state_dict", "get_optimizer_state_dict", "save_distributed", "zero_",
    "WANDB_BASE_URL", "WANDB_MODE", "PROD_S3_CHECKPOINT_ENDPOINT_URL", "gen_eval_reward", "gen_eval_strict",
    "_default_template_yaml",
}  # fmt: skip
"""Names of other libraries, programs and services."""
EXAMPLE = re.compile(r"some_?name|^NAME_|^NameReward$|^SLOT$|^optm_learnrate$|^train_1$|^\d", re.IGNORECASE)
"""Names that only illustrate a form."""


PROSE = re.compile(
    r'(?P<doc>^[ \t]*r?"""(?:[^"\\]|\\.|"(?!""))*"""[ \t]*$)|(?P<comment>#[^\n]*)|"""(?:[^"\\]|\\.|"(?!""))*"""'
    r'|"(?:[^"\\\n]|\\.)*"' + r"|'(?:[^'\\\n]|\\.)*'",
    re.DOTALL | re.MULTILINE,
)
"""Docstrings, comments, and the strings in which neither begins; to take all tokens apart takes ten times as long."""


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def read(source: str) -> tuple[set[str], list[str]]:
    """Return the identifiers of a file with the words of its strings, and its docstrings and comments."""
    prose = [match.group() for match in PROSE.finditer(source) if match.lastgroup]
    return set(words(PROSE.sub(lambda match: "" if match.lastgroup else match.group(), source))), prose


def missing(prose: list[str], known: set[str]) -> list[str]:
    """Return the names in backticks that have a word which is not known."""
    spans = [span for text in prose for span in re.findall(r"`([\w.]+)(?:\(\))?`", text)]
    return [span for span in spans if any(word not in known and not EXAMPLE.search(word) for word in words(span))]


def test_a_name_in_backticks_exists() -> None:
    files = [file for top in ("cosmos_core", "flows", "tasks") for file in (ROOT / top).rglob("*.py")]
    sources = {str(file.relative_to(ROOT)): read(file.read_text(encoding="utf-8")) for file in files}
    known = EXTERNAL | set(dir(builtins)) | {word for path in sources for word in words(path)}
    known |= {word for names, _ in sources.values() for word in names}
    for page in [*(ROOT / "docs").rglob("*.md"), *(ROOT / "configs").rglob("*.toml")]:
        known |= set(words(page.read_text(encoding="utf-8")))
    found = {path: spans for path, (_, prose) in sources.items() if (spans := missing(prose, known))}
    assert found == {}


def test_a_name_that_was_renamed_is_found() -> None:
    source = 'def f():\n    """Call `run.step` and `gone`."""\n    return "`no`"  # see `old.step()`\n'
    assert missing(read(source)[1], {"run", "step"}) == ["gone", "old.step"]


def unknown_arguments(page: str) -> list[str]:
    """Return the keyword arguments that Python blocks of a page pass to functions of the product that have no such
    parameter."""
    found = []
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        nodes = list(ast.walk(ast.parse(block)))
        imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
        origins = {alias.asname or alias.name: (each.module, alias.name) for each in imports for alias in each.names}
        for call in nodes:
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in origins):
                continue
            module, name = origins[call.func.id]
            if module is None or not module.startswith(("cosmos_core", "tasks")):
                continue
            parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
            takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
            keywords = [] if takes_any else [keyword.arg for keyword in call.keywords if keyword.arg]
            found += [f"{name}({keyword}=)" for keyword in keywords if keyword not in parameters]
    return found


def test_examples_of_the_documentation_pass_arguments_that_exist() -> None:
    pages = {file: unknown_arguments(file.read_text(encoding="utf-8")) for file in (ROOT / "docs").rglob("*.md")}
    assert {str(file): found for file, found in pages.items() if found} == {}
    block = "```python\nfrom cosmos_core.rollout.base import completion\ncompletion(version=1, is_stopped=True)\n```"
    assert unknown_arguments(block) == ["completion(is_stopped=)"]
