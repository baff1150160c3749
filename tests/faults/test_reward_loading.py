"""A reward service whose processes are killed while they load, and latents that its decoder cannot take."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import requests

from cosmos_core.rewards.protocol import encode_request
from tests.conftest import wait_until
from tests.faults.reward_service import Running, counted, running
from tests.tiny_pipelines import _wan_vae


def scores_of(server: Running, prompt: int) -> list[float]:
    """Score as the client of Cosmos-RL does: no key, and whatever is not 200 is asked again."""
    headers = {"Authorization": f"Bearer {server.token}"}
    fields = {"prompts": [str(prompt)], "reward_fn": {"counted": 1.0}, "media_type": "image"}
    body = encode_request(fields, np.zeros((1, 2, 2, 3), np.uint8))

    def ask(path: str, data: Any) -> dict[str, Any]:
        def said() -> dict[str, Any] | None:
            response = requests.post(f"{server.url}/api/reward/{path}", headers=headers, timeout=60, data=data)
            return response.json() if response.status_code == 200 else None

        found: dict[str, Any] = wait_until(said, 60, path, pause=0.02)
        return found

    key = ask("enqueue", body)["uuid"]
    found: list[float] = ask("pull", {"uuid": key, "type": "counted"})["scores"]["counted"]
    return found


def kill_while_loading(service: subprocess.Popen[bytes], loads: Path, times: int) -> None:
    """Kill the reward's process each time that it says it loads; where a shell started it, not the shell."""
    for _ in range(times):
        wait_until(loads.exists, 60, "it loads", pause=0.02)
        loads.unlink()
        for process in psutil.Process(service.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has ended since; a zombie is one of these
                if "worker" in " ".join(process.cmdline()) and process.name() != "bash":
                    process.kill()


@pytest.mark.parametrize("by_a_shell", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_process_that_is_killed_while_it_loads_is_started_again(by_a_shell: bool, tmp_path: Path) -> None:
    """Also of an interpreter of its own, which finds our package, that a shell starts and then exits with 128 + the
    signal."""
    settings: dict[str, Any] = {"options": {"load_seconds": 0.3}}
    if by_a_shell:
        python = tmp_path / "python"
        python.write_text(f'#!/bin/bash\nunset PYTHONPATH; touch {tmp_path}/used\n{sys.executable} "$@"\nexit $?\n')
        python.chmod(0o755)
        settings |= {"venv_python": str(python)}
    config = {"reward_args": [counted(tmp_path, **settings)]}
    loads = tmp_path / "scored"
    with running(tmp_path, config, while_loading=lambda service: kill_while_loading(service, loads, 1)) as server:
        assert [scores_of(server, i) for i in range(5)] == [[float(i)] for i in range(5)]
        assert loads.read_text().split() == list("01234"), "each once"
        assert server.log.read_text().count("its process was killed by signal 9") == 1
    assert (tmp_path / "used").exists() is by_a_shell


@pytest.mark.full
def test_of_a_thousand_rewards_each_has_one_score_under_kills_at_any_moment(tmp_path: Path) -> None:
    """Kills while a process loads, waits, or scores; the client is that of Cosmos-RL."""
    moments, done, kills = random.Random(1), threading.Event(), []

    def kill() -> None:
        while not done.wait(moments.uniform(0.05, 1.5)):
            for process in server.workers():
                process.kill()
                kills.append(process.pid)

    config = {"reward_args": [counted(tmp_path, options={"load_seconds": 0.2, "seconds": 0.01})], "attempts": 1000}
    kill_first = partial(kill_while_loading, loads=tmp_path / "scored", times=2)
    with running(tmp_path, config, while_loading=kill_first) as server, ThreadPoolExecutor(8) as clients:
        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        found = list(clients.map(partial(scores_of, server), range(1000)))
        done.set()
        killer.join()
        assert found == [[float(i)] for i in range(1000)] and len(kills) >= 10
        assert server.is_alive()


def test_a_reward_whose_processes_never_live_to_load_ends_the_service(tmp_path: Path) -> None:
    config = {"reward_args": [counted(tmp_path, options={"load_seconds": 30.0})], "attempts": 2}
    kill = partial(kill_while_loading, loads=tmp_path / "scored", times=2)
    reason = "the reward 'counted' cannot be loaded: its process was killed by signal 9"
    with pytest.raises(AssertionError, match=reason), running(tmp_path, config, while_loading=kill):
        pass


@pytest.mark.full
def test_latents_of_another_vae_are_refused_when_they_arrive(tmp_path: Path) -> None:
    _wan_vae().save_pretrained(tmp_path / "vae")
    config = {"reward_args": [counted(tmp_path)], "decode_args": {"model_path": str(tmp_path / "vae"), "device": "cpu"}}
    with running(tmp_path, config) as server:
        for channels, status in ((48, 400), (8, 400), (16, 200)):
            fields = {"prompts": ["1"], "reward_fn": {"counted": 1.0}, "media_type": "latent"}
            said = server.post("enqueue", content=encode_request(fields, np.zeros((1, channels, 1, 2, 2), np.float16)))
            assert said.status_code == status, said.text
            assert status == 200 or f"latents of {channels} channels; the VAE here" in said.json()["message"]
