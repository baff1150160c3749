"""What goes over the wire between our client, Cosmos-RL's service, its clients and our service, restated from facts."""

from __future__ import annotations

import io
import json
import pickle
import struct
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import pytest
import torch

from cosmos_core.config.schema.remote_reward import RemoteRewardConfig
from cosmos_core.rewards.exchange import ServiceEndpoints, ping
from cosmos_core.rewards.protocol import ProtocolError, decode_request
from cosmos_core.rewards.remote import RemoteRewards
from cosmos_core.rewards.wan_latents import WanVae
from tests.tiny_pipelines import _wan_vae
from tests.unit.test_rewards_remote import images


def saved(thing: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(thing, stream)
    return b'{"prompts": ["a"]}\n' + stream.getvalue()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64])
def test_a_tensor_that_torch_saved_is_read_without_torch(dtype: torch.dtype) -> None:
    tensor = torch.arange(48).reshape(2, 3, 2, 4).to(dtype)
    for each in (tensor, tensor[1:], tensor.permute(0, 2, 3, 1), tensor[:, :, ::2, 1:3], tensor[:1, :1]):
        _, found = decode_request(saved(each))
        assert np.array_equal(found, each.numpy()) and found.dtype == each.numpy().dtype


def test_bfloat16_is_read_as_its_bytes_also_of_a_part_of_a_batch() -> None:
    latents = torch.randn(2, 16, 2, 4, 6).bfloat16()
    _, found = decode_request(saved(latents[1:]))
    assert (found.dtype, found.shape) == (np.uint8, (1, 16, 2, 4, 12))
    assert torch.equal(torch.from_numpy(found.copy()).view(torch.bfloat16), latents[1:])


def test_no_damage_to_a_saved_tensor_does_more_than_to_have_it_refused() -> None:
    body, random = saved(torch.zeros(1, 16, 2, 2, 2, dtype=torch.bfloat16)), np.random.default_rng(0)
    refused = 0
    for i in range(600):
        damaged = bytearray(body)
        for _ in range(1 + i % 6):
            start = 80 if random.random() < 0.5 else len(body) - 600
            damaged[start + int(random.integers(min(300, len(body) - start)))] = int(random.integers(256))
        try:
            _, found = decode_request(damaged)
            assert found.nbytes <= len(damaged)
        except ProtocolError as error:
            refused += 1
            assert str(error).isprintable()
    assert refused > 150


class Dangerous:
    def __reduce__(self) -> Any:
        return (open, ("/dev/null",))


def patched(old: bytes, new: bytes) -> bytes:
    body = saved(torch.zeros(2, 3))
    assert body.count(old) and len(old) == len(new)
    return body.replace(old, new)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (saved(Dangerous()), "none of a tensor|than one tensor|does more"),
        (saved([torch.zeros(2)]), "does more than to describe"),
        (saved({"a": torch.zeros(2)}), "does more than to describe"),
        (saved(torch.zeros(2, dtype=torch.int64)), "'LongStorage'"),
        (saved(torch.nn.Parameter(torch.zeros(2))), "something else|none of a tensor"),
        (saved(torch.zeros(2).to_sparse()), "something else|none of a tensor|does more"),
        (saved(torch.zeros(())), "has 0 axes"),
        (saved(torch.zeros(0, 3)), "it is empty"),
        (saved(torch.zeros(1, 1, 1, 1, 1, 1)), "has 6 axes"),
        (saved(torch.zeros(2, 3))[:-30], "no directory|damaged|cut off"),
        (saved(torch.zeros(1 << 16))[:5000], "no directory"),
        (patched(b"_rebuild_tensor_v2", b"_rebuild_tensor_v9"), "something else"),
        (patched(b"K\x02K\x03\x86", b"K\xffK\xff\x86"), "beyond its numbers"),
        (patched(b"K\x03K\x01\x86", b"K\xffK\x01\x86"), "beyond its numbers"),
        (b"{}\nPK\x03\x04" + b"PK\x05\x06" * 10, "directory"),
        (b"{}\nPK\x03\x04" + b"\0" * 40 + b"PK\x05\x06" + struct.pack("<6xHLL2x", 60_000, 30, 10), "damaged"),
    ],
)
def test_what_else_torch_saves_is_refused_and_never_unpickled(body: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason) as caught:
        decode_request(body)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 200
    assert pickle.dumps(str(caught.value))


@contextmanager
def original(
    scores: dict[str, Any], **also: Any
) -> Iterator[tuple[ServiceEndpoints, list[tuple[dict[str, Any], Any, bytes]]]]:
    """A service that says what Cosmos-RL's says: forms for all but the enqueue, 400 until scores are there, numbers
    that are not of images for latents, and nothing about headers that it does not know."""
    asked: list[tuple[dict[str, Any], Any, bytes]] = []
    pulls: dict[str, int] = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status, said = self.enqueue(body) if self.path.endswith("/enqueue") else self.form(body)
            content = json.dumps(said, separators=(",", ":")).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def enqueue(self, body: bytes) -> tuple[int, dict[str, Any]]:
            line, content = body.split(b"\n", 1)
            fields, array = json.loads(line), np.load(io.BytesIO(content), allow_pickle=False)
            if fields.get("media_type") == "image":
                info = {"shape": list(array.shape), "dtype": f"torch.{array.dtype}"}
            else:
                assert array.dtype == np.float16 and array.shape[1] == 16, "they would be taken for latents"
                info = {"shape": list(array.shape), "dtype": "torch.bfloat16", "video_infos": fields["video_infos"]}
            key = str(uuid.uuid4())
            asked.append((fields, array, body))
            pulls[key] = 0
            self.server.info = info  # type: ignore[attr-defined]
            return 200, {"uuid": key, "replica_id": "r-1"}

        def form(self, body: bytes) -> tuple[int, dict[str, Any]]:
            form = {name: value[0] for name, value in parse_qs(body.decode()).items()}
            if self.path.endswith("/ping"):
                return (200, {"message": "Ping request received"}) if "info_data" in form else (422, {"detail": []})
            pulls[form["uuid"]] += 1
            if pulls[form["uuid"]] < 3:
                return 400, {"message": f"Not found scores for {form['uuid']}"}
            assert self.headers["X-Lepton-Replica-Target"] == "r-1"
            info = self.server.info  # type: ignore[attr-defined]
            said = {"scores": scores, "input_info": info, "duration": "0.35", "decoded_duration": "0.00"}
            return 200, {**said, "type": form["type"], **also}

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/api/reward"
    try:
        yield ServiceEndpoints(((f"{url}/enqueue", f"{url}/pull"),), "a token"), asked
    finally:
        server.shutdown()
        server.server_close()


def config(name: str, **settings: Any) -> RemoteRewardConfig:
    function = {"name": name, **{key: settings.pop(key) for key in ("score_key", "weight") if key in settings}}
    return RemoteRewardConfig.model_validate({"reward_fns": [function], "batch_size": 4, **settings})


def test_images_are_scored_by_the_original_service() -> None:
    with original({"hpsv2": [0.25, 0.5]}) as (service, asked):
        ping(service, ["hpsv2"])
        scores = RemoteRewards(config("hpsv2"), service).score(images(1, 2))
    assert [score.value for score in scores] == [0.25, 0.5]
    [(fields, array, _)] = asked
    assert fields == {"prompts": ["level 1", "level 2"], "reward_fn": {"hpsv2": 1.0}, "media_type": "image"}
    assert (array.dtype, array.shape) == (np.uint8, (2, 4, 4, 3))


def videos(count: int) -> list[dict[str, Any]]:
    pixels = np.random.default_rng(0).integers(0, 256, (count, 5, 32, 32, 3), np.uint8)
    return [{"prompt": f"video {i}", "media": each, "metadata": {"video_fps": 8.0}} for i, each in enumerate(pixels)]


def test_videos_are_sent_to_the_original_service_as_the_latents_that_its_own_client_makes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    vae = _wan_vae()
    vae.save_pretrained(tmp_path / "vae")
    said = {"vq_reward": [-0.5, 1.0], "mq_reward": [0.25, 2.0], "ta_reward": [0.0, 0.0], "overall_reward": [1.0, 3.0]}
    asked_for = config("dance_grpo", score_key="vq_reward+mq_reward", video_vae=str(tmp_path / "vae"))
    with original(said) as (service, asked):
        scores = RemoteRewards(asked_for, service).score(videos(2))
    assert [score.value for score in scores] == [-0.25, 3.0]
    [(_, array, body)] = asked
    # The trainer's arithmetic: clips in [0, 1] of B, T, C, H, W become means of the posterior, normalised, in float16.
    clips = torch.stack([torch.from_numpy(each["media"]) for each in videos(2)]).permute(0, 1, 4, 2, 3) / 255
    with torch.no_grad():
        mean = vae.encode((clips.permute(0, 2, 1, 3, 4) - 0.5) * 2).latent_dist.mode()
    shift, spread = (
        torch.tensor(each).view(1, -1, 1, 1, 1) for each in (vae.config.latents_mean, vae.config.latents_std)
    )
    expected = ((mean - shift) / spread).to(torch.float16).numpy()
    assert array.shape == expected.shape == (2, 16, 2, 4, 4)
    assert np.allclose(array, expected, atol=2e-3, rtol=0)
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    line = {
        "prompts": ["video 0", "video 1"], "reward_fn": {"dance_grpo": 1.0},
        "media_type": "latent", "video_infos": [{"video_fps": 8.0}] * 2,
    }  # fmt: skip
    assert body == json.dumps(line).encode() + b"\n" + stream.getvalue()
    decoded = WanVae("x", str(tmp_path / "vae"), "cpu").decode(array)
    assert decoded.shape == (2, 3, 5, 32, 32)


def test_the_vae_is_read_as_wan_publishes_it(tmp_path: Path) -> None:
    from diffusers import AutoencoderKLWan
    from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers

    vae = AutoencoderKLWan(base_dim=4)
    parts = ["conv1", "conv2"]
    inner = [f"{i}.{part}" for i in range(16) for part in (
        *(f"residual.{k}" for k in (0, 2, 3, 6)), "shortcut", "resample.1", "time_conv", "norm", "to_qkv", "proj"
    )]  # fmt: skip
    for side in ("encoder", "decoder"):
        parts += [f"{side}.conv1", f"{side}.head.0", f"{side}.head.2", *(f"{side}.middle.{each}" for each in inner)]
        parts += [f"{side}.{'down' if side == 'encoder' else 'up'}samples.{each}" for each in inner]
    names = [f"{part}.{kind}" for part in parts for kind in ("weight", "bias", "gamma")]
    ours = vae.state_dict()
    published = {
        old: ours[new] for new, old in convert_wan_vae_to_diffusers({n: n for n in names}).items() if new in ours
    }
    assert len(published) == len(ours)
    torch.save(published, tmp_path / "Wan2.1_VAE.pth")
    vae.save_pretrained(tmp_path / "vae")
    video = videos(1)[0]["media"]
    by_file, by_folder = (WanVae("x", str(tmp_path / n), "cpu").encode([video]) for n in ("Wan2.1_VAE.pth", "vae"))
    assert np.array_equal(by_file, by_folder)


@pytest.mark.parametrize(
    ("name", "key", "said", "also"),
    [
        ("cosmos_reason1", "no_score", {"prediction": ["Error"], "no_score": [-1.0], "yes_logit": [-1.0]}, {}),
        ("dance_grpo", "overall_reward", {f"{part}_reward": [-1.0] for part in ("vq", "mq", "ta", "overall")}, {}),
        ("hpsv3", "hpsv3", None, {"error": "[hpsv3] model is not initialized."}),
    ],
)
def test_an_error_of_the_original_service_is_no_score(name: str, key: str, said: Any, also: dict[str, Any]) -> None:
    with original(said, **also) as (service, _):
        asked = config(name, score_key=key, missing_score="drop_group")
        [score] = RemoteRewards(asked, service).score(images(1))
    assert score.value is None and name in score.error


@pytest.mark.parametrize("seed", range(2))
def test_scores_make_the_reward_that_the_trainer_of_the_original_makes(seed: int) -> None:
    random = np.random.default_rng(seed)
    said = {key: random.normal(0, 4, 3).round(3).tolist() for key in ("a", "b", "a+b", "c")}
    if seed % 2:
        del said["a+b"]
    given: dict[str, Any] = {"scale": 3.0, "reward_clip_min": -2.0, "reward_clip_max": 4.0, "batch_size": 3}
    functions = [
        {"name": "one", "score_key": "a+b", "weight": 0.5, "clip_min": -3.0, "clip_max": 6.0},
        {"name": "two", "score_key": " c + a ", "weight": 2.0, "clip_min": -1.0, "clip_max": 1.5},
    ]
    total = torch.zeros(3)
    for each in functions:
        column, parts = str(each["score_key"]), [part.strip() for part in str(each["score_key"]).split("+")]
        score = torch.tensor(said[column]) if column in said else sum(torch.tensor(said[part]) for part in parts)
        total += torch.clamp(score, each["clip_min"], each["clip_max"]) * each["weight"]  # type: ignore[call-overload]
    expected = torch.clamp(total, -2.0, 4.0) * 3.0
    with original(said) as (service, _):
        asked = RemoteRewardConfig.model_validate({"reward_fns": functions, **given})
        scores = RemoteRewards(asked, service).score(images(1, 2, 3))
    assert [score.value for score in scores] == pytest.approx(expected.tolist(), rel=1e-6)
