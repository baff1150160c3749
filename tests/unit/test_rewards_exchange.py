"""A client of reward replicas that fail, and of responses that are none: it goes elsewhere, and keeps its deadline."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import httpx
import numpy as np
import pytest
from PIL import Image

from cosmos_core.config.schema.remote_reward import RemoteRewardConfig
from cosmos_core.errors import RewardError
from cosmos_core.rewards import exchange
from cosmos_core.rewards.exchange import MissingScoresError, ReplicaState, ServiceEndpoints, ServiceRequest
from cosmos_core.rewards.remote import RemoteRewards
from cosmos_core.rewards.reward_model import replace_nonfinite
from tests.unit.reward_server import Reply, Sent, reply, service, serving


def config(**settings: Any) -> RemoteRewardConfig:
    function = {"name": "mean", "clip_max": 255.0}
    given = {"reward_fns": [function], "reward_clip_max": 255.0, "timeout_seconds": 0.6, "retries": 0}
    return RemoteRewardConfig.model_validate({**given, **settings})


def images(count: int) -> list[dict[str, Any]]:
    return [{"prompt": "p", "media": Image.new("RGB", (2, 2), (i, i, i))} for i in range(count)]


def test_what_a_row_says_is_sent_as_json_has_it() -> None:
    metadata = {"difficulty": np.int64(3), "scores": [float("nan"), np.float32(0.5)], "level": "hard"}
    with serving() as server:
        request = {"prompt": "p", "to_be_evaluated": "42", "metadata": metadata}
        RemoteRewards(config(), server.service).score([request])
    fields, _ = server.enqueued[0].decoded
    assert fields["metadata"] == [{"difficulty": 3, "scores": [None, 0.5], "level": "hard"}]


def test_a_row_of_geneval_keeps_its_other_columns() -> None:
    row = {"tag": "counting", "include": [{"class": "dog", "count": 2}], "level": 3}
    with serving() as server:
        RemoteRewards(config(), server.service).score([{**images(1)[0], "metadata": row}])
    fields, _ = server.enqueued[0].decoded
    assert fields["geneval_tags"] == ["counting"] and fields["geneval_includes"] == [row["include"]]
    assert fields["metadata"] == [{"level": 3}]


def test_a_video_whose_row_has_no_frame_rate_has_that_of_cosmos_rl() -> None:
    video = np.zeros((2, 4, 4, 3), np.uint8)
    with serving() as server:
        requests = [{"prompt": "p", "media": video, "metadata": row} for row in ({"video_fps": None}, {})]
        RemoteRewards(config(batch_size=2), server.service).score(requests)
    assert server.enqueued[0].decoded[0]["video_infos"] == [{"video_fps": 16.0}] * 2


def test_numbers_that_json_does_not_have_are_null_wherever_they_are() -> None:
    said = {"a": [1.0, float("inf")], "b": [[float("nan"), 2.0], {"c": np.float64("nan")}]}
    columns, errors = replace_nonfinite(said, 2)
    assert columns == {"a": [1.0, None], "b": [[None, 2.0], {"c": None}]}
    assert errors == ["", "a is inf"]


@contextmanager
def raw(pulled: bytes, *, drips: bool = False) -> Iterator[ServiceEndpoints]:
    """Serve these bytes, head and body, for each pull; with `drips` a byte of their end now and then."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.close_connection = True
            if self.path.endswith("enqueue"):
                self.wfile.write(ok(b'{"uuid": "a", "replica_id": "\xc3\xbc\\n"} ', b"Connection: close\r\n"))
                return
            self.wfile.write(pulled)
            while drips:  # until the client has gone
                self.wfile.write(b" ")
                time.sleep(0.05)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    server.handle_error = lambda *args: None  # type: ignore[method-assign, assignment]
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield ServiceEndpoints(((f"{url}/enqueue", f"{url}/pull"),))
    finally:
        server.shutdown()
        server.server_close()


def ok(content: bytes, headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\n%bContent-Length: %d\r\n\r\n%b" % (headers, len(content), content)


@pytest.mark.parametrize(
    "refusal", [reply(429, {"Retry-After": "30"}, message="full"), reply(503, {"Retry-After": "30"}), reply(500)]
)
def test_what_one_replica_does_not_take_another_takes_at_once(refusal: Reply, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_REPLICA_COOLDOWN_SECONDS", 30.0)
    with serving(on_enqueue=lambda sent: refusal) as broken, serving() as well:
        remote = RemoteRewards(config(max_in_flight=2, timeout_seconds=25.0), service(broken, well))
        assert [score.value for score in remote.score(images(12))] == [*range(12)]
    assert len(well.enqueued) == 12 and len(broken.enqueued) <= 4, "it is not asked again while another is free"


def test_where_all_replicas_are_full_it_waits_and_asks_again() -> None:
    left = [reply(429, {"Retry-After": "0"}, message="full")] * 3
    busy = {"on_enqueue": lambda sent: left.pop() if left else None}
    with serving(**busy) as first, serving(**busy) as second:
        remote = RemoteRewards(config(timeout_seconds=20.0), service(first, second))
        assert [score.value for score in remote.score(images(1))] == [0.0]
    assert not left


def test_a_service_that_forgets_each_request_is_given_up_at_the_deadline() -> None:
    with serving(on_pull=lambda sent: reply(400, {"X-Reward-State": "unknown"}, message="Not found")) as server:
        [score] = RemoteRewards(config(), server.service).score(images(1))
    assert score.value is None and score.error.startswith("the reward service forgets each request that it takes")
    assert len(server.enqueued) <= 6, "pauses grow"


def test_a_function_of_weight_0_whose_score_does_not_come_costs_its_metrics_alone() -> None:
    def pull(sent: Sent) -> Reply | None:
        is_watched = sent.form["type"] == "watched"
        return reply(400, {"X-Reward-State": "pending"}, message="Not found scores") if is_watched else None

    functions = [{"name": "watched", "weight": 0.0}, {"name": "mean", "clip_max": 255.0}]
    with serving(on_pull=pull) as server:
        [_, score] = RemoteRewards(config(reward_fns=functions, batch_size=2), server.service).score(images(2))
    assert (score.value, score.metrics, score.error) == (1.0, {"mean": 1.0}, "")


@pytest.mark.parametrize("status", [404, 405, 422])
def test_a_url_that_has_no_scores_ends_the_stage_and_is_named(status: int) -> None:
    reason = rf"http://\S+/pull is no URL to fetch scores from: status {status}: no such page; set REMOTE_REWARD_FETCH"
    no_page = reply(status, message="no such page")
    with serving(on_pull=lambda sent: no_page) as server, pytest.raises(RewardError, match=reason):
        RemoteRewards(config(timeout_seconds=20.0), server.service).score(images(1))


def test_a_wrong_token_is_one_line_with_its_variable() -> None:
    refusal = reply(401, message="a bearer token is needed")
    for refused in ({"on_enqueue": lambda sent: refusal}, {"on_pull": lambda sent: refusal}):
        said = "status 401: a bearer token is needed; set REMOTE_REWARD_TOKEN to its token$"
        with serving(**refused) as server, pytest.raises(RewardError, match=said):
            RemoteRewards(config(timeout_seconds=20.0), server.service).score(images(1))


def test_the_last_status_is_in_the_reason() -> None:
    with serving(on_pull=lambda sent: reply(502, message="no upstream")) as server:
        [score] = RemoteRewards(config(), server.service).score(images(1))
    assert score.error.startswith("no score of 'mean' after 0.6 s; the last response: status 502: no upstream")


def test_a_page_of_a_proxy_in_place_of_scores_costs_no_retry() -> None:
    pages = [reply(message="log in")] * 4
    with serving(on_pull=lambda sent: pages.pop() if pages else None) as server:
        assert RemoteRewards(config(timeout_seconds=20.0), server.service).score(images(1))[0].value == 0.0
    assert len(server.enqueued) == 1 and not pages


def test_a_response_that_drips_ends_at_the_deadline() -> None:
    with raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9000\r\n\r\n", drips=True) as found:
        [score] = RemoteRewards(config(timeout_seconds=1.0), found).score(images(1))
    assert re.search(r"/pull gives no whole response within [\d.]+ s$", score.error)


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (ok(b"no gzip", b"Content-Encoding: gzip\r\n"), "DecodingError"),
        (ok(b"[" * 200_000), "no score of 'mean' after 3 s; the last response: status 200: [["),
        (ok(b'{"scores": {"mean": [1' + b"0" * 400 + b"]}}"), "mean: the response has no number for it"),
        (ok(b'{"scores": {}, "error": "oops"}'), "mean: oops"),
    ],
)
def test_a_response_that_is_none_is_a_missing_score_and_no_traceback(response: bytes, reason: str) -> None:
    with raw(response) as found:
        [score] = RemoteRewards(config(timeout_seconds=3.0), found).score(images(1))
    assert score.value is None and reason in score.error


def test_an_attempt_that_the_deadline_cuts_off_hides_no_error_before_it() -> None:
    class Failing:
        attempts = 0

        async def post(self, *_: object, **__: object) -> None:
            self.attempts += 1
            if self.attempts == 1:
                raise httpx.DecodingError("no gzip")
            await asyncio.Event().wait()

    async def post_twice() -> None:
        client = cast(httpx.AsyncClient, Failing())
        request = ServiceRequest(ServiceEndpoints((("http://a/", "http://b/"),)), client, 3.0, ReplicaState([0]))
        for _ in range(2):
            await request._try_post("http://b/", 9.0)

    with pytest.raises(MissingScoresError, match=r"DecodingError: no gzip; then it gives no whole response within 2"):
        asyncio.run(post_twice())
