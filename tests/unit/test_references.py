"""Names in backticks in docstrings and comments of the product exist: a rename must not leave them behind."""

from __future__ import annotations

import ast
import builtins
import io
import re
import tokenize
from collections.abc import Iterator
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


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def docstrings(tree: ast.AST) -> list[ast.Constant]:
    values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    return [value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]


def names(tree: ast.AST) -> Iterator[str]:
    """Yield identifiers, and the words of strings that are no docstrings."""
    skipped = {id(each) for each in docstrings(tree)}
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            if isinstance(value := getattr(node, field, None), str):
                yield from words(value)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield from words(node.value)


def test_a_name_in_backticks_exists() -> None:
    files = [file for top in ("cosmos_core", "flows", "tasks") for file in (ROOT / top).rglob("*.py")]
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}
    known = EXTERNAL | {word for tree in trees.values() for word in names(tree)} | set(dir(builtins))
    known |= {word for file in files for part in file.parts for word in words(part)}
    for page in [*(ROOT / "docs").rglob("*.md"), *(ROOT / "configs").rglob("*.toml")]:
        known |= set(words(page.read_text(encoding="utf-8")))
    missing = []
    for file, tree in trees.items():
        tokens = tokenize.generate_tokens(io.StringIO(file.read_text(encoding="utf-8")).readline)
        prose = [token.string for token in tokens if token.type == tokenize.COMMENT]
        for text in [*(str(each.value) for each in docstrings(tree)), *prose]:
            for span in re.findall(r"`([\w.]+)(?:\(\))?`", text):
                if any(word not in known and not EXAMPLE.search(word) for word in words(span)):
                    missing.append(f"{file.relative_to(ROOT)}: {span}")
    assert missing == []
