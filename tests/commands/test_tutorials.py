"""Each command of the tutorials, run as a reader types it, with tiny models in place of those of the Hub."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from transformers import AutoModelForCausalLM

from tests.conftest import Workspace
from tests.unit.tiny_model import save_tiny_model

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"


def blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a page in a language."""
    text = (TUTORIALS / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def follow(page: str, workspace: Workspace) -> list[str]:
    """Run the commands of a page in order; return what each printed."""
    printed, first = [], ""
    for line in "".join(blocks(page, "bash")).splitlines():
        program, *words = shlex.split(line.replace("RUN_ID", first).replace("Qwen/Qwen3-0.6B", "tiny"))
        if program == "cosmos":
            printed.append(workspace.cosmos(*words).stdout)
            first = first or (workspace.run.name if (workspace.path / "outputs").is_dir() else "")
        else:
            assert program == "python"
            subprocess.run([sys.executable, *words], cwd=workspace.path, env={**workspace.environment}, check=True)
    return printed


def grown(rows: list[str], count: int) -> str:
    """Return a header, or nothing, and `count` rows like the last two."""
    return "".join(row + "\n" for row in rows[:-2] + rows[-2:] * (count // 2))


def exported(workspace: Workspace, name: str) -> Path:
    [folder] = (workspace.path / "outputs" / name / "stages/export/safetensors").glob("step_*")
    return folder


@pytest.mark.full
def test_rows_of_ones_own(workspace: Workspace) -> None:
    save_tiny_model(workspace.path / "tiny")
    [rows] = blocks("own-rows.md", "csv")
    workspace.write("rows.csv", grown(rows.splitlines(), 20))
    trained, checked, completed, again, page = follow("own-rows.md", workspace)
    assert "saved as rows-sft.toml" in trained and "learned: 'Das ist" in checked and completed.strip()
    names = sorted(folder.name for folder in (workspace.path / "outputs").glob("2*"))
    assert len(names) == 2 and "reused" in again, "the rows are prepared once"
    AutoModelForCausalLM.from_pretrained(exported(workspace, names[0]))
    assert page.strip() == "compare.html"
    assert "train.optm_lr" in (html := (workspace.path / "compare.html").read_text())
    assert (
        all(name in html for name in names)
        and "What the loss includes" in (workspace.path / "outputs" / names[0] / "report.html").read_text()
    )


@pytest.mark.full
def test_a_reward_of_ones_own(workspace: Workspace) -> None:
    save_tiny_model(workspace.path / "tiny")
    [rows], [code] = blocks("own-reward.md", "json"), blocks("own-reward.md", "python")
    workspace.write("questions.jsonl", grown(rows.splitlines(), 20))
    workspace.write("reward.py", code)
    shown, trained, samples = follow("own-reward.md", workspace)
    assert "reward.py:near" in shown and "saved as questions-grpo.toml" in trained and "reward" in samples
    AutoModelForCausalLM.from_pretrained(exported(workspace, workspace.run.name))


@pytest.mark.full
def test_images_of_ones_own(workspace: Workspace) -> None:
    for index in range(24):
        colour = ("red", "green", "blue")[index % 3]
        workspace.write(f"images/{index}.txt", f"a {colour} circle")
        Image.new("RGB", (80, 64), colour).save(workspace.path / f"images/{index}.png")
    trained, drawn = follow("images-of-your-own.md", workspace)
    assert "saved as images-diffusion-sft.toml" in trained and ".png" in drawn
    assert (exported(workspace, workspace.run.name) / "model_index.json").is_file()
