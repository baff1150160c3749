"""The documents: every link leads somewhere, every page is in the site's navigation, every command exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import typer
import yaml

from cosmos_core.cli import app
from cosmos_core.data import messages, preferences

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])


def anchors(page: Path) -> set[str]:
    """Return what the headings of a page are linked by, as GitHub and mkdocs make it."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def links() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        text = re.sub(r"`[^`\n]*`", "", page.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text):
            if not re.match(r"[a-z]+:", target):
                yield page, target


def test_each_link_of_a_page_leads_to_a_file_and_a_heading() -> None:
    for page, target in links():
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        said = f"{page}: {target}:"
        assert file.exists(), f"{said} no such file"
        assert page.parent == ROOT or file.is_relative_to(DOCS), f"{said} the site has nothing outside of docs/"
        assert not anchor or anchor in anchors(file), f"{said} no such heading"


def test_each_table_of_a_page_has_a_header() -> None:
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
        assert [table[:80] for table in tables if not re.match(r".*\n\|[ :|-]+\|\n", table)] == [], page


def test_each_page_is_in_the_navigation_of_the_site() -> None:
    def files(entry: object) -> list[str]:
        children = entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ()
        return [entry] if isinstance(entry, str) else [file for child in children for file in files(child)]

    listed = files(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_each_command_and_option_in_the_documents_exists() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    wrong = []
    for page in PAGES:
        for name, rest in re.findall(
            r"(?:^|`|&& )cosmos ([a-z][\w-]*)([^`\n#]*)", page.read_text(encoding="utf-8"), re.MULTILINE
        ):
            command, words = commands.get(name), rest.split()
            if command is not None and hasattr(command, "commands"):
                command = command.commands.get(words[0]) if words else command
            known = {option for each in getattr(command, "params", ()) for option in each.opts} | {"--help"}
            missing = [
                w
                for w in words
                if re.match(r"\[?--[a-z]", w) and re.sub(r"[\[\]=].*|^\[", "", w.lstrip("[")) not in known
            ]
            if command is None or missing:
                wrong.append(f"{page.relative_to(ROOT)}: cosmos {name}{rest} {missing}")
    assert wrong == []


def test_each_function_and_method_that_the_architecture_names_exists() -> None:
    text = (DOCS / "explanation/architecture.md").read_text(encoding="utf-8")
    sources = {file: file.read_text(encoding="utf-8") for name in ("cosmos_core", "flows", "tasks")
               for file in (ROOT / name).rglob("*.py")}  # fmt: skip
    for path, name in re.findall(r"([\w/]+\.py): (\w+)", text):
        found = [source for file, source in sources.items() if str(file).endswith(f"/{path}")]
        assert any(re.search(rf"^(?:def|class) {name}\b", source, re.MULTILINE) for source in found), f"{path}: {name}"
    for owner, method in re.findall(r"`([A-Z]\w+)\.(\w+)`", text):
        found = [source.partition(f"class {owner}")[2] for source in sources.values()]
        assert any(f"def {method}(" in source for source in found), f"{owner}.{method}"
    page = (DOCS / "how-to/adding-a-diffusion-model.md").read_text(encoding="utf-8").partition("## The class")[2]
    family = sources[ROOT / "cosmos_core/models/diffusion.py"]
    names = re.findall(r"^(?:\| |- )?`(\w+)\(", page, re.MULTILINE) + re.findall(
        r"`(\w+)`", page.partition("and so have the attributes")[2].partition("## The checks")[0]
    )
    assert len(names) > 20 and [name for name in names if not re.search(rf"    (def )?{name}[:(]", family)] == []


def test_what_the_documents_say_of_a_stage_of_ones_own_is_there() -> None:
    page = (DOCS / "how-to/custom-code.md").read_text(encoding="utf-8")
    table = page.partition("The stage has:")[2].partition("The outcome has:")[0]
    stage = "".join((ROOT / f"cosmos_core/run/{name}.py").read_text() for name in ("stage", "workspace"))
    progress = (ROOT / "cosmos_core/run/progress.py").read_text()
    names, methods = re.findall(r"`stage\.(\w+)", table), re.findall(r"`(\w+)\(", table)
    assert len(names) > 8 and [name for name in names if not re.search(rf"    (?:def )?{name}[:(]", stage)] == []
    assert len(methods) > 3 and [name for name in methods if f"def {name}(" not in progress] == []


def test_the_readme_is_short_and_each_measured_result_links_to_its_proof() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    prose = re.sub(
        r"^```.*?^```|^\|.*?$|^#+ .*?$|<img.*?>|!\[.*?\]\(.*?\)", "\n\n", text, flags=re.MULTILINE | re.DOTALL
    )
    prose = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose)
    sentences = re.split(r"(?<=[.:;!?])\s|\n\s*\n|^- |·", prose, flags=re.MULTILINE)
    assert [each for each in sentences if len(each.split()) > 30] == []
    measured = text.partition("## What was measured")[2].partition("\n## ")[0]
    rows = [line for line in measured.splitlines() if line.startswith("|")][2:]
    assert len(rows) == 6 and all(re.search(r"\]\(docs/[\w-]+\.md#[\w-]+\) \|$", row) for row in rows)


def test_the_known_names_of_columns_stand_on_one_page_and_are_those_of_the_reader() -> None:
    page = (DOCS / "reference/columns.md").read_text(encoding="utf-8")
    names = {
        *messages._KNOWN_COLUMNS,
        *messages._SYSTEM_COLUMNS,
        *messages.REFERENCE_COLUMNS,
        *preferences._PROMPT_COLUMNS,
    }
    assert names <= set(re.findall(r"`(\w+)`", page))
    for first, second in messages._PAIR_COLUMNS:
        assert re.search(rf"`{first}` with (`\w+`(, | or )?)*`{second}`", page), f"{first} and {second}"
    lists = re.compile("`(instruction|question)`[^|\n]*`(output|problem|response)`")
    assert [
        p.name for p in PAGES if p.name not in {"columns.md", "configuration.md"} and lists.search(p.read_text())
    ] == []
