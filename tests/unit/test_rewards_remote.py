"""The client of a reward service: what it sends, what it makes of scores, and what it does when they do not come."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cosmos_core.config.schema.remote_reward import RemoteRewardConfig
from cosmos_core.errors import ConfigError, RewardError, StageFailed
from cosmos_core.rewards.exchange import ENQUEUE_URL_VARIABLE, FETCH_URL_VARIABLE, ping, read_service_endpoints
from cosmos_core.rewards.protocol import ProtocolError, decode_request, encode_request
from cosmos_core.rewards.remote import RemoteRewards
from cosmos_core.rewards.service.config import DecodeArgs, RewardArgs, ServiceConfig, read_config
from cosmos_core.types import Completion, Group, Prompt, Segment
from tests.unit.reward_server import Reply, RewardServer, Sent, reply, service, serving

# What the service of Cosmos-RL returns for two images (its README): keys, nesting and texts as they are there.
GEN_EVAL = {
    "scores": {
        "gen_eval_score": [0.5, 0.25],
        "gen_eval_reward": [1.0, 0.0],
        "gen_eval_strict": [0.0, 0.0],
        "gen_eval_group": {"single_object": [0.0, 0.0], "two_object": [-10.0, -10.0]},
    },
    "input_info": {"shape": [2, 4, 4, 3], "dtype": "torch.uint8", "min": "0.000", "max": "254.000"},
    "duration": "1.07",
    "decoded_duration": "0.00",
    "type": "gen_eval",
}
REASON = {
    **GEN_EVAL, "scores": {"prediction": ["Good", "Bad"], "no_score": [0.99, 0.2], "yes_logit": [17.5, 3.0]},
    "type": "cosmos_reason1",
}  # fmt: skip


def config(*functions: dict[str, Any], **settings: Any) -> RemoteRewardConfig:
    given: dict[str, Any] = {"reward_fns": functions or [{"name": "mean", "clip_max": 255.0}], "reward_clip_max": 255.0}
    return RemoteRewardConfig.model_validate({**given, **settings})


def images(*levels: int, size: int = 4) -> list[dict[str, Any]]:
    return [{"prompt": f"level {n}", "media": Image.new("RGB", (size, size), (n, n, n))} for n in levels]


def values(server: RewardServer, of: RemoteRewardConfig, requests: list[dict[str, Any]]) -> list[float | None]:
    return [score.value for score in RemoteRewards(of, server.service).score(requests)]


def says(said: dict[str, Any]) -> dict[str, Any]:
    return {"on_pull": lambda sent: reply(**said)}


def once(first: Reply) -> Any:
    """Reply so the first time, and as usual after that."""
    left = [first]
    return lambda sent: left.pop() if left else None


def test_an_image_request_is_byte_for_byte_that_of_the_original_client() -> None:
    with serving() as server:
        values(server, config({"name": "mean", "weight": 0.5}, batch_size=2), images(3, 7))
    [sent] = server.enqueued
    pixels = io.BytesIO()
    np.save(pixels, np.stack([np.full((4, 4, 3), n, np.uint8) for n in (3, 7)]), allow_pickle=False)
    line = b'{"prompts": ["level 3", "level 7"], "reward_fn": {"mean": 0.5}, "media_type": "image"}\n'
    assert sent.body == line + pixels.getvalue()
    assert sent.headers["Content-Type"] == "application/octet-stream"
    assert sent.headers["Authorization"] == "Bearer a secret token"
    [pull] = server.pulled
    assert (pull.form["type"], pull.headers["Content-Type"]) == ("mean", "application/x-www-form-urlencoded")


def test_a_video_is_sent_as_batch_channels_frames_height_width_with_its_rate() -> None:
    video = np.arange(2 * 4 * 6 * 3, dtype=np.uint8).reshape(2, 4, 6, 3)
    with serving() as server:
        values(server, config(), [{"prompt": "p", "media": video, "metadata": {"video_fps": 24.0}}])
    fields, array = server.enqueued[0].decoded
    assert list(fields)[2:] == ["media_type", "video_infos"]
    assert (fields["media_type"], fields["video_infos"]) == ("video", [{"video_fps": 24.0}])
    assert array.shape == (1, 3, 2, 4, 6)
    assert np.array_equal(array[0].transpose(1, 2, 3, 0), video)


def test_a_text_is_sent_within_the_json_with_its_reference() -> None:
    with serving() as server:
        values(server, config(), [{"prompt": "6 * 7 =", "to_be_evaluated": "42", "reference": "42"}])
    fields, array = server.enqueued[0].decoded
    assert (fields["media_type"], fields["completions"], fields["references"]) == ("text", ["42"], ["42"])
    assert array.shape == (1, 0)


def test_scores_are_clipped_weighted_summed_clipped_and_scaled() -> None:
    functions = [
        {"name": "a", "weight": 2.0, "score_key": "x+y", "clip_max": 1.5},
        {"name": "b", "weight": -1.0, "clip_min": -0.5},
    ]
    said = {"a": {"x": [1.0], "y": [2.0]}, "b": {"b": [-3.0]}}
    with serving(score=lambda fields, array, name: said[name]) as server:
        [score] = RemoteRewards(config(*functions, reward_clip_max=3.25, scale=10.0), server.service).score(images(0))
    assert score.value == 10.0 * 3.25  # 2 * min(3, 1.5) + 1 * 0.5 = 3.5
    assert score.metrics == {"a": 1.5, "a/x": 1.0, "a/y": 2.0, "b": -0.5}


def test_a_recorded_response_of_the_original_service_is_read() -> None:
    with serving(**says(GEN_EVAL)) as server:
        asked = config({"name": "gen_eval", "score_key": "gen_eval_score+gen_eval_reward"}, batch_size=2)
        assert values(server, asked, images(1, 2)) == [1.5, 0.25]
    asked = config({"name": "cosmos_reason1", "score_key": "no_score"}, batch_size=2)
    with serving(**says(REASON)) as server:
        assert values(server, asked, images(1, 2)) == [0.99, 0.2]


def test_a_key_that_is_not_there_ends_the_stage_and_names_those_that_are() -> None:
    refused = pytest.raises(RewardError, match=r"no 'overall'; .* gen_eval_reward, gen_")
    with serving(**says(GEN_EVAL)) as server, refused:
        values(server, config({"name": "gen_eval", "score_key": "overall"}, batch_size=2), images(1, 2))


def test_every_image_gets_its_own_score_whatever_the_batches() -> None:
    levels = [*range(0, 200, 7)]
    with serving() as server:
        requests = images(*levels[:20]) + images(*levels[20:], size=6)
        assert values(server, config(batch_size=3, max_in_flight=4), requests) == levels
    assert {array.shape[1:3] for _, array in (sent.decoded for sent in server.enqueued)} == {(4, 4), (6, 6)}
    assert len(server.enqueued) == 7 + 3


def test_it_asks_again_while_scores_are_not_ready_or_the_service_is_full_or_fails() -> None:
    pulls = [reply(400, {"X-Reward-State": "pending"}, message="Not found scores"), reply(503), reply(0)]
    enqueues = [reply(429, {"Retry-After": "0"}, message="full"), reply(500), reply(0)]
    with serving(
        on_pull=lambda sent: pulls.pop() if pulls else None,
        on_enqueue=lambda sent: enqueues.pop() if enqueues else None,
    ) as server:
        remote = RemoteRewards(config(), server.service)
        assert [score.value for score in remote.score(images(9))] == [9.0]
    assert not pulls and not enqueues
    assert len({sent.headers["Idempotency-Key"] for sent in server.enqueued}) == 1


def test_what_the_service_has_forgotten_is_sent_again_under_its_uuid() -> None:
    with serving(on_pull=once(reply(400, {"X-Reward-State": "unknown"}, message="Not found"))) as server:
        assert values(server, config(), images(9)) == [9.0]
    assert [sent.headers["Idempotency-Key"] for sent in server.enqueued] == [server.pulled[0].form["uuid"]] * 2


def test_a_pull_goes_to_the_replica_that_took_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(replica="replica-7") as server:
        values(server, config(), images(1))
        assert server.pulled[0].headers["X-Lepton-Replica-Target"] == "replica-7"
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("COSMOS_DISABLE_REMOTE_REWARD_USE_REPLICA", "1")
        RemoteRewards(config(), read_service_endpoints()).score(images(1))
        assert "X-Lepton-Replica-Target" not in server.pulled[1].headers


def test_several_replicas_take_requests_and_one_that_is_gone_is_left_out() -> None:
    with serving() as first, serving() as second, serving(on_enqueue=lambda sent: reply(0)) as dead:
        remote = RemoteRewards(config(max_in_flight=3), service(first, second, dead))
        assert [score.value for score in remote.score(images(*range(12)))] == [*range(12)]
    assert len(first.enqueued) + len(second.enqueued) == 12
    assert first.enqueued and second.enqueued


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"scores": None, "error": "[ocr] no text"}, "mean: .ocr. no text"),
        ({"scores": {"mean": [None]}, "errors": ["the process was killed"]}, "mean: the process was killed"),
        ({"scores": {"mean": ["Good"]}}, "no number"),
        ({"scores": {"mean": [1.0, 2.0]}}, "no number"),
        ({"scores": {}}, "no scores"),
    ],
)
def test_a_response_without_a_number_is_invalid_and_never_0(said: dict[str, Any], reason: str) -> None:
    with serving(**says(said)) as server:
        remote = RemoteRewards(config(missing_score="drop_group"), server.service)
        [score] = remote.score(images(1))
    assert score.value is None
    assert score.error and re.search(reason, score.error)


def test_a_function_of_weight_0_without_a_number_costs_its_metrics_alone() -> None:
    said: dict[str, dict[str, Any]] = {"mean": {"mean": [2.0]}, "watched": {"watched": [None]}}
    with serving(score=lambda fields, array, name: said[name]) as server:
        asked = config({"name": "mean", "clip_max": 255.0}, {"name": "watched", "weight": 0.0})
        remote = RemoteRewards(asked, server.service)
        [score] = remote.score(images(0))
    assert (score.value, score.metrics, score.error) == (2.0, {"mean": 2.0}, "")


def never(sent: Sent) -> Reply:
    return reply(400, {"X-Reward-State": "pending"}, message="Not found scores")


def test_a_score_that_does_not_come_is_asked_for_again_and_then_missing() -> None:
    with serving(on_pull=never) as server:
        remote = RemoteRewards(config(timeout_seconds=1.0, retries=2), server.service)
        [score] = remote.score(images(1))
    assert score.value is None and score.error.startswith("no score of 'mean' after 1 s")
    assert len(server.enqueued) == 3


def test_a_missing_score_fails_the_stage_where_that_is_asked_for() -> None:
    with serving(on_pull=never) as server, pytest.raises(StageFailed, match="1 completions have no score: no score of"):
        values(server, config(timeout_seconds=0.2, missing_score="fail"), images(1))


def test_the_whole_group_of_a_missing_score_is_dropped() -> None:
    def group(i: int) -> Group:
        made = tuple(Completion((Segment((2,), True, (-1.0,), 0),), "stop", text) for text in ("good", "bad")[: 2 - i])
        return Group(Prompt(i, (1,), "p", ""), made, 0)

    def score(fields: dict[str, Any], array: np.ndarray, name: str) -> dict[str, Any]:
        return {name: [None if text == "bad" else 1.0 for text in fields["completions"]]}

    with serving(score=score) as server:
        scored = RemoteRewards(config(missing_score="drop_group"), server.service).score_groups([group(0), group(1)])
    assert [[each.value for each in group.scores] for group in scored] == [[None, None], [1.0]]
    assert scored[0].scores[0].error.startswith("its group is dropped: mean: ")


@pytest.mark.parametrize("status", [401, 413, 400])
def test_a_refused_request_ends_the_stage_at_once(status: int) -> None:
    refused = pytest.raises(RewardError, match=f"refuses a request: status {status}: no")
    with serving(on_enqueue=lambda sent: reply(status, message="no")) as server, refused:
        values(server, config(timeout_seconds=7200.0), images(1, 2, 3))  # longer than a test may take
    assert len(server.enqueued) <= 3, "none is asked again"


def test_it_beats_while_it_waits_and_stops_when_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cosmos_core.rewards.process._FUTURES_POLL_SECONDS", 0.1)

    def beat() -> None:
        raise KeyboardInterrupt

    with serving(on_pull=never) as server, pytest.raises(KeyboardInterrupt):
        RemoteRewards(config(timeout_seconds=60.0), server.service, on_wait=beat).score(images(1))


def test_a_ping_is_a_form_with_json() -> None:
    with serving() as server:
        ping(server.service, ["mean"])
    (sent,) = server.sent
    assert (sent.path, json.loads(sent.form["info_data"])) == ("/api/reward/ping", {"reward_fn": {"mean": 1.0}})
    with pytest.raises(RewardError, match="is not there"):
        ping(server.service, ["mean"])


def test_the_environment_names_the_service() -> None:
    with pytest.raises(RewardError, match="set REMOTE_REWARD_ENQUEUE_URL and REMOTE_REWARD_FETCH_URL"):
        read_service_endpoints({})
    found = read_service_endpoints(
        {ENQUEUE_URL_VARIABLE: "http://a/enqueue, http://b/enqueue", FETCH_URL_VARIABLE: "http://a/pull,http://b/pull"}
    )
    assert found.replica_urls == (("http://a/enqueue", "http://a/pull"), ("http://b/enqueue", "http://b/pull"))


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "float64"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_comes_back_as_it_was_sent(dtype: str, order: str) -> None:
    array = np.asarray(np.arange(24).reshape(2, 3, 4), dtype=dtype, order=order)  # type: ignore[call-overload]
    fields, found = decode_request(encode_request({"prompts": ["ü"]}, array))
    assert fields == {"prompts": ["ü"]}
    assert found.dtype == array.dtype
    assert np.array_equal(found, array)


def npy(header: str, content: bytes = b"") -> bytes:
    text = header.encode() + b"\n"
    return b"{}\n\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + content


def pickled() -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return b"{}\n" + stream.getvalue()


NO_REQUESTS = [
    b"", b"{}", b"\n", b"[]\n", b"{\n", b'{"a": NaN}\n', b"{}\n", b"{}\nPK\x03\x04", pickled(),
    b"[" * 100_000 + b"\n", b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"\n",
    npy("{'descr': '|u1', 'fortran_order': False, 'shape': (4000000000, 4000000000)}"),
    npy("{'descr': '|u1', 'fortran_order': False, 'shape': (-1,)}"),
    npy("{'descr': '|u1', 'fortran_order': False, 'shape': (2,)}", b"1"),
    npy("{'descr': '|u1', 'fortran_order': False, 'shape': (2,)}", b"123"),
    npy("{'descr': '|u1', 'fortran_order': False, 'shape': ()}", b"1"), b'{"a": 1e999}\n',
    npy("{'descr': '|u1', 'fortran_order': False, 'shape': (1, 0, 4611686018427387904, 4611686018427387904)}"),
    npy("{'descr': '|u1', 'fortran_order': False, 'shape': (True, 2)}", b"12"),
    npy("{'descr': '|V9', 'fortran_order': False, 'shape': (1,)}", b"123456789"),
    npy("__import__('os').system('true')"), npy("(" * 3000), npy("{'descr': [('a', '|O')]}"),
    b"{}\n\x93NUMPY\x09\x00",
]  # fmt: skip


def test_what_is_no_request_is_refused_with_one_line() -> None:
    for body in NO_REQUESTS:
        with pytest.raises(ProtocolError) as caught:
            decode_request(body)
        assert str(caught.value).isprintable() and len(str(caught.value)) < 400, body[:80]


def test_metadata_that_is_too_large_names_the_limit_and_the_setting() -> None:
    body = encode_request({"prompts": [""] * 2, "metadata": [{"page": "x" * 2**23}] * 2}, np.zeros((2, 0), np.uint8))
    with pytest.raises(ProtocolError, match=r"JSON has more than 16 MiB; send fewer .*\(remote_reward\.batch_size\)"):
        decode_request(body)


def test_a_file_that_is_not_there_or_no_toml_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "rewards.toml"
    with pytest.raises(ConfigError, match=r"^\S+rewards\.toml: no such file$"):
        read_config(file)
    file.write_text("port = \n")
    with pytest.raises(ConfigError, match=r"^\S+rewards\.toml: not valid TOML: Invalid value \(at line 1, column 8\)$"):
        read_config(file)
    for text, message in (("prot = 1", "prot: unknown key; did you mean port?"), ("port = -1", "port = -1: input")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=rf"^\S+rewards\.toml: {re.escape(message)}"):
            read_config(file)


def test_a_file_of_the_original_service_is_read(tmp_path: Path) -> None:
    (tmp_path / "rewards.toml").write_text("""
host = "localhost"
port = 8080
redis_host = "localhost"
redis_port = 6379
no_latent_decoder = true

[[reward_args]]
reward_type = "cosmos_reason1"
venv_python = "python"
model_path = "nvidia/Cosmos-Reason1-7B-Reward"
dtype = "float16"
enable = true

[[reward_args]]
reward_type = "hpsv3"
venv_python = "/root/hpsv3/bin/python"
model_path = ""
download_path = "/workspace"
device = "cuda"
enable = false

[[reward_args]]
reward_type  = "unified_reward"
venv_python = "python"
endpoint_url = "YOUR_ENDPOINT_URL"
endpoint_api_key = "YOUR_ENDPOINT_API_KEY"
setup_script = "unified_reward.sh"
work_dir = "evaluation_results"
tmp_dir = "/tmp"
enable = false

[decode_args]
model_path = "/workspace/tokenizer.pth"
dtype = "float16"
device = "cuda"
chunk_duration = 81
temporal_window = 16
load_mean_std = false
wan2pt2_model_path = ""
wan2pt2_credential_path = ""
""")
    config = read_config(tmp_path / "rewards.toml")
    assert [reward.reward_type for reward in config.rewards] == ["cosmos_reason1"]
    assert config.vae_path == "", "no_latent_decoder"
    decodes = config.model_copy(update={"no_latent_decoder": False})
    assert decodes.vae_path == "/workspace/tokenizer.pth"
    assert decodes.model_copy(update={"decode_args": DecodeArgs()}).vae_path.endswith("/resolve/main/Wan2.1_VAE.pth")
    assert ServiceConfig(reward_args=(RewardArgs(reward_type="ocr"),)).vae_path == ""
    assert (config.queue, config.read_token()) == ("memory", os.environ.get("REMOTE_REWARD_TOKEN", ""))
