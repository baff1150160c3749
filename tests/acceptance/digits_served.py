"""The digits demo with its classifier behind the reward service ends with the same bits as with it in process."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from cosmos_core.run.progress import read_metrics
from tests.acceptance import demo
from tests.acceptance.page import Proof, table
from tests.acceptance.seeds import SEEDS, settings
from tests.conftest import Workspace

CONFIG = Path(__file__).parents[2] / "configs" / "demo" / "digits.toml"
REWARDS = f"""
[[reward_args]]
reward_type = "likeness"
entry = "{CONFIG.parent}/digits.py:likeness"
device = "cpu"
"""
_IN_PROCESS = 'reward_function = "digits.py:likeness"'
_SERVED = 'use_remote_reward = true\nremote_reward = { reward_fns = [{ name = "likeness" }], batch_size = 12 }'
_STAGE = 'name = "nft"\n'
_TIMED = ("time", "throughput", "memory")


def served(text: str) -> str:
    """Return the demo's pipeline with the reward of its nft stage asked of a service beside it."""
    assert text.count(_IN_PROCESS) == text.count(_STAGE) == 1
    text = text.replace(_IN_PROCESS, _SERVED).replace('"digits.py:', f'"{CONFIG.parent}/digits.py:')
    return text.replace(_STAGE, f'{_STAGE}reward_service = "rewards.toml"\n')


def prove(folder: Path) -> Proof:
    """Run the demo both ways with one seed."""
    began = time.monotonic()
    seed, found, seconds = SEEDS[0], [], []
    for name in ("in process", "served"):
        workspace = Workspace(folder / name.replace(" ", "_"))
        workspace.path.mkdir(parents=True, exist_ok=True)
        config = CONFIG
        if name == "served":
            workspace.write("rewards.toml", REWARDS)
            config = workspace.write("digits.toml", served(CONFIG.read_text()))
        seconds.append(demo.run_to_end(workspace, settings(seed), config).seconds)
        published = workspace.path / "outputs" / "published" / "digits" / "latest"
        found.append((_lines(workspace), _digests(published.resolve())))
    (here, model), (there, other) = found
    is_met = bool(here) and here == there and bool(model) and model == other
    rows = [
        ["steps of the nft stage with the same metrics", f"{sum(map(_same, here, there))} of {len(here)}"],
        ["files of the published pipeline with the same bytes", f"{sum(model[k] == other.get(k) for k in model)} of "
         f"{len(model)}"],
        ["wall time in process, served", f"{seconds[0]:.0f} s, {seconds[1]:.0f} s"],
    ]  # fmt: skip
    return Proof(
        title="The digits demo with its classifier behind the service",
        is_met=is_met,
        claim="The metrics of each step (but for times) and the published weights are the same to the bit.",
        commands=["python -m tests.acceptance digits_served"],
        body=table(["what", "found"], rows),
        seconds=time.monotonic() - began,
    )


def _same(one: object, other: object) -> bool:
    return one == other


def _lines(workspace: Workspace) -> list[dict[str, object]]:
    """Return what each step of the nft stage logged, without times."""
    lines = read_metrics(workspace.stage("nft") / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key.partition("/")[0] not in _TIMED} for line in lines]


def _digests(folder: Path) -> dict[str, str]:
    files = sorted(file for file in folder.rglob("*.safetensors") if file.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
