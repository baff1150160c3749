"""The reward service as a process: its protocol, and every request scored exactly once whatever is killed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image

from benchmarks.reward_service import measure
from cosmos_core.config.schema.remote_reward import RemoteRewardConfig
from cosmos_core.errors import ConfigError
from cosmos_core.launch.service_health import write_health
from cosmos_core.rewards.exchange import ping
from cosmos_core.rewards.jpeg_size import jpeg_size
from cosmos_core.rewards.protocol import encode_request
from cosmos_core.rewards.remote import RemoteRewards
from cosmos_core.rewards.service.__main__ import serve
from cosmos_core.rewards.service.config import RewardArgs, ServiceConfig
from tests.conftest import DEMOS, wait_until
from tests.faults.reward_service import PROGRAM, TRUST, Running, counted, redis_server, running

REWARDS = [
    {"reward_type": "jpeg_size"},
    {"reward_type": "exact_match"},
    {"reward_type": "mean", "entry": f"{PROGRAM}:mean"},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("service")
    (folder / "scored").touch()
    config = {"reward_args": [*REWARDS, counted(folder)], "replica_id": "first", "max_body_bytes": 2**20}
    with running(folder, config) as found:
        yield found


def asked(*names: str, **settings: Any) -> RemoteRewardConfig:
    functions = [{"name": name, "clip_max": 1e6, "clip_min": -1e6} for name in names]
    given = {"reward_fns": functions, "reward_clip_max": 1e6, "reward_clip_min": -1e6, "timeout_seconds": 60.0}
    return RemoteRewardConfig.model_validate({**given, **settings})


def noise(count: int, size: int = 16) -> list[dict[str, Any]]:
    pixels = np.random.default_rng(0).integers(0, 256, (count, size, size, 3), np.uint8)
    return [{"prompt": str(i), "media": Image.fromarray(each)} for i, each in enumerate(pixels)]


def body(*prompts: str, **reward_fn: float) -> bytes:
    array = np.arange(len(prompts) * 12, dtype=np.uint8).reshape(-1, 2, 2, 3)
    fields = {"prompts": list(prompts), "reward_fn": reward_fn or {"mean": 1.0}, "media_type": "image"}
    return encode_request(fields, array)


def fetched(server: Running, key: str, name: str) -> httpx.Response:
    def pulled() -> httpx.Response | None:
        response = server.post("pull", data={"uuid": key, "type": name})
        return None if response.status_code == 400 else response

    return wait_until(pulled, 20, f"scores of {name}", pause=0.02)  # type: ignore[return-value]


def test_requests_and_responses_are_those_of_the_original_service(server: Running) -> None:
    headers = {"Content-Type": "application/octet-stream"}
    said = server.post("enqueue", content=body("a", "b"), headers=headers)
    assert (said.status_code, list(said.json())) == (200, ["uuid", "replica_id"])
    key = said.json()["uuid"]
    assert str(uuid.UUID(key)) == key and said.json()["replica_id"] == "first"
    response = fetched(server, key, "mean")
    found = response.json()
    assert list(found) == ["scores", "input_info", "duration", "decoded_duration", "type"]
    assert found["scores"] == {"mean": [5.5, 17.5], "largest": [11.0, 23.0]}
    assert found["input_info"] == {"shape": [2, 2, 2, 3], "dtype": "torch.uint8", "min": "0.000", "max": "23.000"}
    assert (found["decoded_duration"], found["type"]) == ("0.00", "mean")
    assert float(found["duration"]) >= 0 and len(found["duration"].partition(".")[2]) == 2
    assert response.content == json.dumps(found, separators=(",", ":")).encode()
    assert fetched(server, key, "mean").content == response.content, "it can be fetched again"
    nothing = server.post("pull", data={"uuid": str(uuid.uuid4()), "type": "mean"})
    assert nothing.status_code == 400 and nothing.json()["message"].startswith("Not found scores for ")
    assert server.post("ping", data={"info_data": "{}"}).json() == {"message": "Ping request received"}
    with pytest.raises(Exception, match="not served here: other"):
        ping(server.service, ["other"])


def test_videos_and_texts_are_scored_as_what_they_are(server: Running) -> None:
    infos = [{"video_fps": 8.0}]
    fields = {"prompts": ["p"], "reward_fn": {"mean": 1.0}, "media_type": "video", "video_infos": infos}
    content = encode_request(fields, np.full((1, 3, 2, 4, 4), 9, np.uint8))
    found = fetched(server, server.post("enqueue", content=content).json()["uuid"], "mean").json()
    assert found["scores"]["mean"] == [9.0] and found["input_info"]["video_infos"] == infos
    texts = [{"prompt": "p", "to_be_evaluated": text, "reference": "42"} for text in ("42", "41")]
    scores = RemoteRewards(asked("exact_match", batch_size=2), server.service).score(texts)
    assert [score.value for score in scores] == [1.0, 0.0]


def test_scores_are_those_of_the_same_reward_in_process_to_the_bit(server: Running) -> None:
    requests = noise(20)
    scores = RemoteRewards(asked("jpeg_size", batch_size=3), server.service).score(requests)
    assert [score.value for score in scores] == [jpeg_size("", "", media=each["media"]) for each in requests]


def test_an_item_that_cannot_be_scored_is_invalid_and_the_others_are_not(server: Running) -> None:
    requests = [*noise(2), {**noise(1)[0], "prompt": "raise"}]
    scores = RemoteRewards(asked("mean", batch_size=3, missing_score="drop_group"), server.service).score(requests)
    assert [score.value is None for score in scores] == [False, False, True]
    assert scores[2].error.startswith("mean: ValueError: nobody can score it (")


def test_a_request_that_is_sent_twice_is_scored_once(server: Running, tmp_path: Path) -> None:
    key = str(uuid.uuid4())
    for _ in range(3):
        said = server.post("enqueue", content=body("123", counted=1.0), headers={"Idempotency-Key": key})
        assert said.json()["uuid"] == key
    assert fetched(server, key, "counted").json()["scores"] == {"counted": [123.0]}
    assert Counter(scored(server))["123"] == 1


def scored(server: Running) -> list[str]:
    return (server.log.parent / "scored").read_text().split()


def test_every_image_is_scored_exactly_once_while_its_processes_are_killed(server: Running) -> None:
    requests, is_done = noise(100), threading.Event()

    def kill() -> None:
        for _ in range(3):
            # not before they have scored something again: a slow machine needs longer to start one
            known = len(scored(server))
            while len(scored(server)) <= known:
                if is_done.wait(0.05):
                    return
            for process in server.workers():
                process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        remote = RemoteRewards(asked("mean", "counted", batch_size=2, max_in_flight=16), server.service)
        scores = remote.score(requests)
    finally:
        is_done.set()
        killer.join()
    expected = [float(np.asarray(each["media"], np.float64).mean()) + i for i, each in enumerate(requests)]
    assert [score.value for score in scores] == pytest.approx(expected)


def test_health_metrics_and_page_show_how_it_goes(server: Running, tmp_path: Path) -> None:
    assert httpx.get(f"{server.url}/health").json()["rewards"].keys() == {"jpeg_size", "exact_match", "mean", "counted"}
    assert server.post("ping", data={"info_data": "{}"}, headers={"Authorization": "no"}).status_code == 401
    bearer = {"Authorization": f"Bearer {server.token}"}
    metrics = httpx.get(f"{server.url}/metrics", headers=bearer).text
    assert 'reward_items_total{reward="mean"} ' in metrics
    assert 'reward_restarts_total{reward="mean"}' in metrics
    enqueue = server.service.replica_urls[0][0]
    write_health(tmp_path, {"REMOTE_REWARD_ENQUEUE_URL": enqueue, "REMOTE_REWARD_TOKEN": server.token})
    [noted] = json.loads((tmp_path / "reward_service.json").read_text())["services"]
    assert noted["url"] == server.url and noted["status"] in {"ok", "degraded"}, "its processes were killed just now"
    assert noted["rewards"]["mean"]["items"] > 0 and noted["rewards"]["mean"]["restarts"] > 0
    assert noted["refused"]["401"] > 0 and "secret" not in (tmp_path / "reward_service.json").read_text()
    page = httpx.get(f"{server.url}/", auth=("anybody", server.token))
    assert page.status_code == 200 and "its process was killed by signal 9" in page.text
    assert [httpx.get(f"{server.url}/{path}").status_code for path in ("", "metrics")] == [401, 401]


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", "Basic d3Jvbmc=", "bearer a secret toke", "ü"])
def test_without_the_token_nothing_is_read(server: Running, header: str) -> None:
    headers = {"Authorization": header.encode()}
    before = len(scored(server))
    for path in ("enqueue", "pull", "ping", "latent_attr"):
        response = httpx.post(
            f"{server.url}/api/reward/{path}", content=body("1", counted=1.0), headers=headers, verify=TRUST
        )
        assert (response.status_code, response.json()) == (401, {"message": "a bearer token is needed"})
    assert len(scored(server)) == before


def test_what_is_too_large_is_refused_before_it_is_read(server: Running) -> None:
    with server.connect() as connection:
        connection.sendall(server.head(f"Content-Length: {2**40}"))
        reply = b""
        while b"max_body_bytes" not in reply and (chunk := connection.recv(65536)):
            reply += chunk
    assert b"413" in reply.split(b"\r\n")[0] and b"max_body_bytes" in reply
    chunked = server.post("enqueue", content=iter([b"{}\n"]))
    assert chunked.status_code == 411


def test_headers_without_end_are_not_kept(server: Running) -> None:
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    with server.connect() as client, pytest.raises(OSError):
        client.sendall(b"POST /api/reward/enqueue HTTP/1.1\r\nHost: x\r\n")
        for i in range(48):
            client.sendall(b"X-%d: " % i + b"a" * 2**20 + b"\r\n")
    assert process.memory_info().rss - before < 16 * 2**20
    assert server.is_alive()


@pytest.mark.parametrize("status", [401, 413])
def test_a_refusal_is_read_by_whoever_sent_a_large_body(server: Running, status: int) -> None:
    token = {401: "wrong", 413: server.token}[status]
    fields = {"prompts": ["p"], "reward_fn": {"mean": 1.0}, "media_type": "image"}
    content = encode_request(fields, np.zeros((1, 2304, 2304, 3), np.uint8))
    for _ in range(2):
        response = server.post("enqueue", content=content, headers={"Authorization": f"Bearer {token}"})
        reason = {401: "a bearer token is needed", 413: r"the body has \d+ bytes; at most 1048576 are read"}[status]
        assert response.status_code == status and re.search(reason, response.json()["message"])


def test_scores_under_no_uuid_are_not_there(server: Running) -> None:
    response = server.post("pull", data={"uuid": "no uuid", "type": "mean"})
    assert (response.status_code, response.headers["X-Reward-State"]) == (400, "unknown")
    assert response.json() == {"message": "Not found scores for no uuid"}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompts": ["a", "b"]}, "2 prompts and 1 items"),
        ({"prompts": []}, "prompts must be"),
        ({"prompts": [1]}, "prompts must be"),
        ({"reward_fn": {"other": 1.0}}, "'other' is not served here"),
        ({"reward_fn": {"mean": 0.0}}, "names no reward"),
        ({"reward_fn": ["mean"]}, "reward_fn must be"),
        ({"media_type": "audio"}, "media_type must be"),
        ({"media_type": "video"}, "videos are an array of batch, channels"),
        ({"media_type": "text"}, "a request of texts"),
        ({"references": ["a", "b"]}, "references must be a list"),
        ({"video_infos": [1]}, "video_infos must be a list of objects"),
        ({"ocr_use_gpu": 1}, "ocr_use_gpu must be"),
    ],
)
def test_a_malformed_request_is_refused_with_one_line(server: Running, fields: dict[str, Any], reason: str) -> None:
    given = {"prompts": ["a"], "reward_fn": {"mean": 1.0}, "media_type": "image", **fields}
    response = server.post("enqueue", content=encode_request(given, np.zeros((1, 2, 2, 3), np.uint8)))
    assert response.status_code == 400
    assert reason in response.json()["message"]


def test_latents_are_refused_where_no_decoder_is_configured(server: Running) -> None:
    fields = {"prompts": ["a"], "reward_fn": {"mean": 1.0}, "media_type": "video"}
    response = server.post("enqueue", content=encode_request(fields, np.zeros((1, 16, 2, 4, 4), np.float16)))
    assert (response.status_code, "decode_args.model_path" in response.text) == (400, True)
    assert server.post("latent_attr", data={"fields": "{}"}).status_code == 400


def test_random_requests_reach_no_reward_and_cost_nothing(server: Running) -> None:
    from tests.acceptance.reward_fuzz import fuzz

    before, process = len(scored(server)), psutil.Process(server.process.pid)
    memory = process.memory_info().rss
    statuses = fuzz(server.url, server.token, 200, random.Random(0))
    assert set(statuses) <= {200, 400, 401, 404, 405, 408, 411, 413, 422}, statuses
    assert statuses[200] < 20, "pings alone"
    assert server.is_alive() and len(scored(server)) == before
    assert process.memory_info().rss - memory < 64 * 2**20


def test_a_poisonous_request_gets_an_error_and_takes_no_other_with_it(tmp_path: Path) -> None:
    config = {"reward_args": [counted(tmp_path, timeout_seconds=1.0)], "attempts": 2, "batch_seconds": 0.1}
    with running(tmp_path, config) as server:
        requests = noise(4) + [{**noise(1)[0], "prompt": prompt} for prompt in ("die", "hang", "fault")]
        rewards = RemoteRewards(asked("counted", missing_score="drop_group"), server.service)
        scores, later = rewards.score(requests), rewards.score(noise(2))
    assert [score.value for score in scores] == [0.0, 1.0, 2.0, 3.0, None, None, None]
    assert "exited with code 3" in scores[4].error and "not done in 1 s" in scores[5].error
    assert "exited with code 1" in scores[6].error
    assert not any(score.is_permanent_error for score in scores), "another attempt of the stage may have better luck"
    assert [score.value for score in later] == [0.0, 1.0], "no process is kept whose device is of no use"


def test_beyond_its_room_it_says_when_to_come_back_and_the_client_does(tmp_path: Path) -> None:
    config = {"reward_args": [counted(tmp_path, options={"seconds": 0.4}, batch_size=1)], "max_pending": 1}
    with running(tmp_path, config) as server, ThreadPoolExecutor(8) as clients:
        said = clients.map(lambda _: server.post("enqueue", content=body("1", counted=1.0)), range(8))
        full = next(each for each in list(said) if each.status_code == 429)
        assert full.headers["Retry-After"].isdigit() and "Connection" not in full.headers, "it comes back on this one"
        remote = RemoteRewards(asked("counted", max_in_flight=4, batch_size=1), server.service)
        assert [score.value for score in remote.score(noise(2))] == [0.0, 1.0]


def test_a_stop_finishes_what_was_accepted_and_what_is_sent_just_then_and_takes_nothing_new(tmp_path: Path) -> None:
    content, late = body("8", counted=1.0), str(uuid.uuid4())
    with running(tmp_path, {"reward_args": [counted(tmp_path, options={"seconds": 0.1}, batch_size=1)]}) as server:
        keys = [server.post("enqueue", content=body(str(i), counted=1.0)).json()["uuid"] for i in range(8)]
        workers = server.workers()
        with server.connect() as client:
            headers = (f"Idempotency-Key: {late}", f"Content-Length: {len(content)}", "Expect: 100-continue")
            client.sendall(server.head(*headers))
            assert client.recv(65536).startswith(b"HTTP/1.1 100 "), "its head was read"
            client.sendall(content[:20])
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: httpx.get(f"{server.url}/health").json()["status"] == "draining", 5, "it takes no more")
            assert server.post("enqueue", content=body("9", counted=1.0)).status_code == 503
            found = [fetched(server, key, "counted").json()["scores"]["counted"] for key in keys]
            with pytest.raises(subprocess.TimeoutExpired):
                server.process.wait(0.5)
            client.sendall(content[20:])
            assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
        found.append(fetched(server, late, "counted").json()["scores"]["counted"])
        assert found == [[float(i)] for i in range(9)]
        assert server.process.wait() == 0
    wait_until(lambda: not any(process.is_running() for process in workers), 5, "rewards end with the service")


def test_with_redis_accepted_requests_and_scores_outlive_the_service(tmp_path: Path) -> None:
    reward = counted(tmp_path, options={"seconds": 0.05}, batch_size=1)
    with redis_server() as queue:
        config = {**queue, "replica_id": "first", "reward_args": [reward]}
        with running(tmp_path, config) as server:
            keys = [server.post("enqueue", content=body(str(i), counted=1.0)).json()["uuid"] for i in range(10)]
            fetched(server, keys[0], "counted")
            workers = server.workers()
            os.kill(server.process.pid, signal.SIGKILL)
            server.process.wait()
            wait_until(lambda: not any(process.is_running() for process in workers), 5, "rewards end with the service")
        with running(tmp_path, config) as server:
            found = [fetched(server, key, "counted").json()["scores"]["counted"] for key in keys]
            assert found == [[float(i)] for i in range(10)]
            again = server.post("enqueue", content=body("0", counted=1.0), headers={"Idempotency-Key": keys[0]}).json()
            assert again["uuid"] == keys[0]
            time.sleep(0.2)
            counts = Counter(scored(server))
            expect_half_a_character_to_cost_nothing(server)
        assert set(counts) == {str(i) for i in range(10)}
        assert sum(counts.values()) <= 11, "one may have been scored without being kept"


def expect_half_a_character_to_cost_nothing(server: Running) -> None:
    fields = {"prompts": ["7"], "reward_fn": {"counted": 1.0}, "media_type": "video", "video_infos": [{"x": "\ud800"}]}
    content = encode_request(fields, np.zeros((1, 3, 1, 2, 2), np.uint8))
    found = fetched(server, server.post("enqueue", content=content).json()["uuid"], "counted").json()
    assert found["scores"] == {"counted": [7.0]} and found["input_info"]["video_infos"] == [{"x": "?"}]
    key = server.post("enqueue", content=body("8", counted=1.0)).json()["uuid"]
    assert fetched(server, key, "counted").json()["scores"] == {"counted": [8.0]}, "the next one"
    wait_until(lambda: httpx.get(f"{server.url}/health").json()["pending"] == 0, 10, "nothing is pending")
    assert httpx.get(f"{server.url}/health").json()["status"] == "ok"


def test_beyond_this_machine_it_does_not_start_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REMOTE_REWARD_TOKEN", raising=False)
    config = ServiceConfig(host="0.0.0.0", reward_args=(RewardArgs(reward_type="jpeg_size"),))
    with pytest.raises(ConfigError, match="can be reached from other machines and REMOTE_REWARD_TOKEN is not set"):
        asyncio.run(serve(config))


@pytest.mark.full
def test_the_classifier_of_the_digits_gives_the_same_to_the_bit_behind_the_service(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="the extra digits is not installed")
    from configs.demo.digits import SIZE, WORDS, likeness

    requests = [{**each, "prompt": WORDS[i % 10]} for i, each in enumerate(noise(12, SIZE))]
    here = [likeness("", "", prompt=each["prompt"], media=each["media"]) for each in requests]
    entry = f"{DEMOS}/digits.py:likeness"
    with running(tmp_path, {"reward_args": [{"reward_type": "digits", "entry": entry}]}) as server:
        there = RemoteRewards(asked("digits", batch_size=5), server.service).score(requests)
    assert [score.value for score in there] == here


@pytest.mark.full
def test_under_load_kills_and_a_restart_every_image_gets_its_score_exactly_once(tmp_path: Path) -> None:
    """The short form of `benchmarks/reward_service.py`."""
    outcome = measure(tmp_path, images=80, clients=4, size=64, kill_seconds=1.0)
    assert (outcome.right, outcome.wrong, outcome.missing, outcome.restarts) == (80, 0, 0, 1), str(outcome)
