"""Code that names an algorithm, a model family, a stage kind, an engine or an upload target outside of its folder.

    python -m tests.unit.named            print every one that is left
    python -m tests.unit.named --shrink   lower the allow-list to what is left; it never grows by this

What the rest of the system has to know of one, it declares (its class, its registry entry); then a new one is a new
file. Looked for are whole string constants, docstrings and names of progress phases aside, and uses of the classes:
an import, an `isinstance`, an attribute that tells them apart. `allowed_names.toml` counts those that were there when
the rule came.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
ALLOWED = Path(__file__).with_name("allowed_names.toml")
HEAD = "# Names outside of their folder that are left; lower it with `python -m tests.unit.named --shrink`.\n"
SCHEMA = ("cosmos_core/config/schema/", "cosmos_core/config/compat/")


class Thing(NamedTuple):
    """What is added as one file, and where its name may stand."""

    names: frozenset[str]
    folders: tuple[str, ...]
    """Beginnings of the paths that may name it."""
    modules: tuple[str, ...]
    """Modules whose classes are of such a thing; the base classes of `base` are not."""
    attributes: frozenset[str] = frozenset()
    """Attributes that tell which of them it is; what follows from that is a property of the thing."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


MODELS = "cosmos_core/models/"
THINGS = {
    "algorithm": Thing(
        _words("sft dpo grpo gspo cispo rloo aipo dapo distill distillation nft diffusion_nft flow_grpo ddrl"),
        ("cosmos_core/algorithms/", MODELS, "tasks/stages/sft.py", *SCHEMA),
        tuple(f"cosmos_core.{folder}.{name}" for folder in ("algorithms", "config.schema")
              for name in ("sft", "dpo", "grpo", "grpo_updates", "distillation", "flow_rl", "nft")),
    ),
    "family": Thing(
        _words("qwen2 qwen2_5_vl qwen2_vl qwen3 qwen3_moe qwen3_vl llama llama4 llava mllama gemma gemma2 gemma3 "
               "mistral mixtral phi phi3 gpt2 gpt_oss deepseek_v3 sd3 sana sana_video cosmos_predict"),
        (MODELS, *SCHEMA),
        tuple(f"cosmos_core.models.{name}" for name in ("causal_lm", "sd3", "sana", "sana_video", "cosmos_predict")),
    ),
    "stage kind": Thing(
        _words("prepare sft rl validate evaluate export gate upload report custom"),
        ("tasks/", *SCHEMA),
        (),
    ),
    "engine": Thing(
        _words("vllm hf flow_sampler"),
        ("cosmos_core/rollout/", "cosmos_core/evaluate/engines.py", *SCHEMA),
        ("cosmos_core.rollout.vllm", "cosmos_core.rollout.hf", "cosmos_core.rollout.flow_sampler"),
    ),
    "upload target": Thing(
        _words("s3 hub"),
        ("cosmos_core/upload/", *SCHEMA),
        ("cosmos_core.upload.file", "cosmos_core.upload.s3", "cosmos_core.upload.hub"),
    ),
    "modality": Thing(frozenset(), (MODELS, *SCHEMA), (), _words("is_diffusers")),
}  # fmt: skip

OTHER_MEANINGS = {
    ("cosmos_core/algorithms/", "sft"): "a term of the DPO loss",
    ("cosmos_core/cluster/", "local"): "a launcher of ranks, and an address of Ray's",
    ("cosmos_core/observe/", "report"): "the file report.html",
    ("cosmos_core/observe/logs.py", "vllm"): "the library's logger",
    ("tasks/stages/rl.py", "distillation"): "the recipe's table [distillation]",
    ("cosmos_core/rewards/", "custom"): "the recipe's table [custom]",
    ("cosmos_core/run/", "vllm"): "the library, whose version is recorded",
    ("cosmos_core/run/", "custom"): "the recipe's table [custom]",
    ("cosmos_core/observe/", "gate"): "a heading of the report",
    ("cosmos_core/config/inputs.py", "hub"): "a form of inputs",
    ("cosmos_core/run/", "hub"): "a form of inputs",
    ("tasks/credentials.py", "hub"): "a form of inputs",
    ("cosmos_core/run/bucket.py", "s3"): "the service of boto3",
    ("cosmos_core/upload/", "upload"): "a line of the journal of parts",
    ("cosmos_core/run/progress.py", "export"): "a phase of the heartbeat",
    ("cosmos_core/run/progress.py", "prepare"): "a phase of the heartbeat",
    ("cosmos_core/run/progress.py", "validate"): "a phase of the heartbeat",
}
"""Strings that are no such name in the files whose paths begin so, and what they are."""


class Found(NamedTuple):
    """One name outside of its folder."""

    path: str
    line: int
    thing: str
    name: str


def uses() -> Iterator[Found]:
    """Yield every such name in the product."""
    for folder in ("cosmos_core", "flows", "tasks"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield from in_text(str(file.relative_to(ROOT)), file.read_text(encoding="utf-8"))


@cache
def parse(text: str) -> ast.Module:
    """Return the tree of a file's text, once."""
    return ast.parse(text)


def in_text(path: str, text: str) -> Iterator[Found]:
    """Yield every such name in the text of a file."""
    tree = parse(text)
    nodes = list(ast.walk(tree))
    skipped = {id(node) for node in _prose(nodes)}
    for node in nodes:
        if not isinstance(node, ast.Constant | ast.Attribute | ast.ImportFrom):
            continue
        for thing, (names, folders, modules, attributes) in THINGS.items():
            if path.startswith(folders):
                continue
            if isinstance(node, ast.Constant) and node.value in names and id(node) not in skipped:
                if any(path.startswith(prefix) and node.value == name for prefix, name in OTHER_MEANINGS):
                    continue
                yield Found(path, node.lineno, thing, repr(node.value))
            elif isinstance(node, ast.Attribute) and node.attr in attributes:
                yield Found(path, node.lineno, thing, node.attr)
            elif isinstance(node, ast.ImportFrom) and node.module in modules:
                yield Found(path, node.lineno, thing, ", ".join(alias.name for alias in node.names))


def _prose(nodes: list[ast.AST]) -> Iterator[ast.AST]:
    """Yield strings that name no thing: docstrings, and phases of the heartbeat."""
    for node in nodes:
        if isinstance(node, ast.Expr):
            yield node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "phase":
            yield from node.args


def counted() -> Counter[str]:
    """Return the number of names of each kind of thing."""
    return Counter(use.thing for use in uses())


def allowed() -> dict[str, int]:
    """Return how many names of each kind of thing there may be."""
    return tomllib.loads(ALLOWED.read_text(encoding="utf-8")) if ALLOWED.is_file() else {}


def main() -> None:
    """Print what is left, or lower the allow-list to it."""
    if "--shrink" not in sys.argv[1:]:
        for use in uses():
            if use.path.startswith(tuple(sys.argv[1:]) or ""):
                sys.stdout.write(f"{use.path}:{use.line}: {use.thing} {use.name}\n")
        return
    left = counted()
    lines = [f'"{thing}" = {min(count, left[thing])}' for thing, count in allowed().items() if left[thing]]
    ALLOWED.write_text("\n".join([HEAD, *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
