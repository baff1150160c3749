"""Clients of Cosmos-RL against our service: each sends what it builds, by its own HTTP library, and reads as it reads.

The requests are restated here from what those clients do: the trainer of three releases, the example clients and the
latency benchmark of its reward service.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import requests
import torch

from cosmos_core.rewards.remote import RemoteRewards
from cosmos_core.rewards.wan_latents import WanVae
from tests.faults.reward_service import PROGRAM, Running, counted, running
from tests.tiny_pipelines import _wan_vae
from tests.unit.test_reward_interchange import config, videos

LATENTS = torch.randn(2, 16, 2, 4, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
"""Normalised, as encoders of Cosmos-RL give them."""
INFO = [{"video_fps": 16.0}] * 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("interchange")
    torch.manual_seed(0)
    _wan_vae().save_pretrained(folder / "vae")
    rewards = [{"reward_type": "mean", "entry": f"{PROGRAM}:mean"}, counted(folder)]
    decode = {"model_path": str(folder / "vae"), "device": "cpu"}
    with running(folder, {"reward_args": rewards, "decode_args": decode, "replica_id": "r-1"}) as found:
        yield found


@pytest.fixture(scope="module")
def pixels(server: Running) -> np.ndarray:
    """The videos of the latents, by diffusers alone."""
    from diffusers import AutoencoderKLWan

    vae = AutoencoderKLWan.from_pretrained(server.log.parent / "vae")
    shift, spread = (
        torch.tensor(each).view(1, -1, 1, 1, 1) for each in (vae.config.latents_mean, vae.config.latents_std)
    )
    with torch.no_grad():
        decoded = vae.decode(LATENTS.float() * spread + shift)[0]
    found: np.ndarray = ((1 + decoded.clamp(-1, 1)) / 2 * 255).to(torch.uint8).double().mean((1, 2, 3, 4)).numpy()
    return found


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()


def torch_saved(tensor: torch.Tensor) -> bytes:
    stream = io.BytesIO()
    torch.save(tensor, stream)
    return stream.getvalue()


def scored(server: Running, fields: dict[str, Any], content: bytes, **headers: str) -> dict[str, dict[str, Any]]:
    """What a client of Cosmos-RL gets: it enqueues, then pulls each reward until the status is 200."""
    sent = {"Authorization": f"Bearer {server.token}", **headers}
    response = requests.post(
        f"{server.url}/api/reward/enqueue", data=json.dumps(fields).encode("utf-8") + b"\n" + content,
        headers={"Content-Type": "application/octet-stream", **sent}, timeout=(100.0, 60.0),
    )  # fmt: skip
    assert response.status_code == 200, response.text
    key, replica = response.json()["uuid"], response.json().get("replica_id")
    found = {}
    for name in fields["reward_fn"]:
        while True:
            pulled = requests.post(
                f"{server.url}/api/reward/pull", data={"uuid": key, "type": name},
                headers={**sent, "X-Lepton-Replica-Target": replica},
            )  # fmt: skip
            if pulled.status_code == 200:
                break
            assert (pulled.status_code, pulled.json()) == (400, {"message": f"Not found scores for {key}"})
            time.sleep(0.05)
        assert pulled.headers["Content-Type"] == "application/json"
        found[name] = pulled.json()
    return found


def test_the_trainers_images(server: Running) -> None:
    """The newest sends uint8 of B, H, W, C; one before it float16."""
    images = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3)
    fields = {"prompts": ["5", "ü 6"], "reward_fn": {"mean": 1.0, "counted": 0.5}, "media_type": "image"}
    for array, dtype in ((images, "torch.uint8"), (images.astype(np.float16), "torch.float16")):
        found = scored(server, fields, npy(array))
        assert list(found["mean"]) == ["scores", "input_info", "duration", "decoded_duration", "type"]
        assert found["mean"]["scores"]["mean"] == [float(each.mean()) for each in images]
        info = {"shape": [2, 4, 4, 3], "dtype": dtype, "min": "0.000", "max": "95.000"}
        assert found["mean"]["input_info"] == info and list(found["mean"]["input_info"]) == list(info)
        assert (found["counted"]["type"], found["counted"]["decoded_duration"]) == ("counted", "0.00")


@pytest.mark.parametrize("media_type", ["latent", "video", None])
def test_the_trainers_latents(server: Running, pixels: np.ndarray, media_type: str | None) -> None:
    """The newest says `latent`, earlier ones `video`, the first nothing; float16 of B, C, T, H, W."""
    fields = {"prompts": ["5", "6"], "reward_fn": {"mean": 1.0, "counted": 1.0}, "video_infos": INFO}
    fields |= {"media_type": media_type} if media_type else {}
    array = LATENTS.to(torch.float16).numpy()
    found = scored(server, fields, npy(array))
    assert found["mean"]["scores"]["mean"] == pytest.approx(pixels.tolist(), abs=0.05)
    assert found["counted"]["scores"] == {"counted": [5.0, 6.0]}
    info = {
        "shape": [2, 16, 2, 4, 4], "dtype": "torch.bfloat16", "min": f"{LATENTS.min():.3f}",
        "max": f"{LATENTS.max():.3f}", "video_infos": INFO,
    }  # fmt: skip
    assert found["mean"]["input_info"] == info and list(found["mean"]["input_info"]) == list(info)
    assert float(found["mean"]["decoded_duration"]) > 0, "it says how long the decoder took"
    assert found["mean"]["decoded_duration"] == found["counted"]["decoded_duration"], "they were decoded once"


def test_the_example_clients_latents(server: Running, pixels: np.ndarray) -> None:
    """They send what torch.save writes of bfloat16, or its bytes as uint8."""
    fields = {"media_type": "latent", "prompts": ["5"], "reward_fn": {"mean": 1.0}, "video_infos": INFO[:1]}
    for content in (torch_saved(LATENTS[0:1].cpu()), npy(LATENTS[0:1].view(torch.uint8).numpy())):
        found = scored(server, fields, content)
        assert found["mean"]["scores"]["mean"] == pytest.approx(pixels[:1].tolist(), abs=0.05)
        info = found["mean"]["input_info"]
        assert (info["shape"], info["dtype"]) == ([1, 16, 2, 4, 4], "torch.bfloat16")
        assert (info["min"], info["max"]) == (f"{LATENTS[:1].min():.3f}", f"{LATENTS[:1].max():.3f}")


def test_ping_and_latent_attr(server: Running) -> None:
    """Forms with JSON; another VAE cannot be named from outside."""
    headers = {"Authorization": f"Bearer {server.token}"}

    def post(path: str, **data: str) -> requests.Response:
        return requests.post(f"{server.url}/api/reward/{path}", data=data, headers=headers)

    info = {"media_type": "image", "prompts": ["a"], "reward_fn": {"mean": 1.0}}
    said = post("ping", info_data=json.dumps(info))
    assert (said.status_code, said.content) == (200, b'{"message":"Ping request received"}')
    attributes = {"chunk_duration": 81, "load_mean_std": False, "temporal_window": 16, "device": "cuda", "fps": 16}
    said = post("latent_attr", fields=json.dumps({**attributes, "num_frames": 93, "height": 432, "width": 768}))
    assert (said.status_code, said.content) == (200, b'{"message":"Latent attributes set successfully"}')
    assert post("latent_attr", fields=json.dumps({"vae_pth": "/etc/passwd"})).status_code == 400


def test_our_own_client_may_send_latents_too(server: Running) -> None:
    vae = str(server.log.parent / "vae")
    function = {"name": "mean", "clip_max": 255.0}
    asked = config("mean", video_vae=vae, reward_fns=[function], reward_clip_max=255.0)
    scores = RemoteRewards(asked, server.service).score(videos(2))
    wan = WanVae("x", vae, "cpu")
    expected = wan.decode(wan.encode([each["media"] for each in videos(2)])).mean((1, 2, 3, 4))
    assert [score.value for score in scores] == pytest.approx(expected.tolist(), abs=0.05)
