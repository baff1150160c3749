"""Where a reward service is: URLs that mean no such place are refused at once, and the token goes nowhere else."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image
from prefect.settings import PREFECT_API_URL, temporary_settings

from cosmos_core.config.schema.remote_reward import RemoteRewardConfig
from cosmos_core.errors import ConfigError, RewardError
from cosmos_core.launch.service_health import _fetch_health
from cosmos_core.rewards.exchange import ping, read_service_endpoints
from cosmos_core.rewards.protocol import ProtocolError, encode_request
from cosmos_core.rewards.remote import RemoteRewards
from cosmos_core.rewards.service.app import _is_uuid
from cosmos_core.rewards.service.config import DecodeArgs, RewardArgs, ServiceConfig
from cosmos_core.rewards.service.request import parse_request
from flows import reward_service as flow
from tests.unit.reward_server import reply, serving

FUNCTION = {"name": "mean", "clip_max": 255.0}
CONFIG = RemoteRewardConfig.model_validate({"reward_fns": [FUNCTION], "reward_clip_max": 255.0})
IMAGE = {"prompt": "p", "media": Image.new("RGB", (2, 2), (3, 3, 3))}


def named(enqueue: str, fetch: str) -> dict[str, str]:
    return {"REMOTE_REWARD_ENQUEUE_URL": enqueue, "REMOTE_REWARD_FETCH_URL": fetch}


def test_a_url_may_end_in_slashes() -> None:
    with serving() as server:
        for end in ("", "/", "//", " ", "#here"):
            found = read_service_endpoints(named(f"{server.url}/enqueue{end}", f"{server.url}/pull{end}"))
            assert found.replica_urls == server.service.replica_urls
        ping(found, ["mean"])
        [score] = RemoteRewards(CONFIG, found).score([IMAGE])
    assert score.value == 3.0
    assert {sent.path for sent in server.sent} == {f"/api/reward/{name}" for name in ("ping", "enqueue", "pull")}


def test_a_token_from_a_file_may_end_with_a_newline(monkeypatch: pytest.MonkeyPatch) -> None:
    urls = named("http://host/enqueue", "http://host/pull")
    assert read_service_endpoints({**urls, "REMOTE_REWARD_TOKEN": "abc\n"}).token == "abc"
    monkeypatch.setenv("REMOTE_REWARD_TOKEN", "abc\n")
    assert ServiceConfig().read_token() == "abc"
    for token in ("a\nb", "\u043a\u043b\u044e\u0447"):
        with pytest.raises(RewardError, match=r"^the token in REMOTE_REWARD_TOKEN must be printable ASCII$"):
            read_service_endpoints({**urls, "REMOTE_REWARD_TOKEN": token})


@pytest.mark.parametrize("url", ["http://host", "https://host/", "http://host:8080//", "http://host?a=/b/c"])
def test_a_url_without_a_path_is_refused_before_the_token_is_sent_anywhere(url: str) -> None:
    for given in (named(url, "http://host/pull"), named("http://host/enqueue", url)):
        with pytest.raises(RewardError, match=r"_URL = .* has no path; the rule is http://HOST:PORT/api/reward/"):
            read_service_endpoints(given)


@pytest.mark.parametrize(
    "url", ["http:///api/reward/enqueue", "http://:80/x", "ftp://host/x", "host/x", "http://[::1/x", "http://h:x/y"]
)
def test_a_url_without_a_host_is_refused(url: str) -> None:
    with pytest.raises(RewardError, match="is no URL of a reward service"):
        read_service_endpoints(named(url, "http://host/pull"))


def test_a_ping_goes_to_the_host_of_the_url_alone() -> None:
    with serving() as server:
        root = server.url.removesuffix("/api/reward")
        ping(read_service_endpoints(named(f"{root}/enqueue?zone=a/b", f"{root}/pull")), ["mean"])
    assert [sent.path for sent in server.sent] == ["/ping?zone=a/b"]


@pytest.mark.parametrize("status", [302, 308])
def test_a_redirect_ends_the_stage_at_once_and_is_not_followed(status: int) -> None:
    moved = reply(status, {"Location": "http://elsewhere/"})
    for where in ("on_enqueue", "on_pull"):
        reason = f"status {status}: it redirects to http://elsewhere/"
        with serving(**{where: lambda sent: moved}) as server, pytest.raises(RewardError, match=reason):
            RemoteRewards(CONFIG, server.service).score([IMAGE])


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ssl.SSLContext]:
    folder = tmp_path_factory.mktemp("tls")
    kind = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=x -addext subjectAltName=IP:127.0.0.1"
    command = ["openssl", "req", "-x509", *kind.split(), "-keyout", "key", "-out", "ca.pem"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "ca.pem", folder / "key")
    return folder / "ca.pem", context


@pytest.mark.parametrize("variable", ["REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"])
def test_the_bundle_of_the_original_client_is_trusted(
    variable: str, certificate: tuple[Path, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, context = certificate
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    with serving(tls=context) as server:
        with pytest.raises(RewardError, match="CERTIFICATE_VERIFY_FAILED"):
            ping(server.service, ["mean"])
        monkeypatch.setenv(variable, str(bundle))
        ping(server.service, ["mean"])
        assert RemoteRewards(CONFIG, server.service).score([IMAGE])[0].value == 3.0
        assert _fetch_health(server.url, "")["status"] != "does not respond"
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/nowhere/ca.pem")
    with pytest.raises(ConfigError, match=r"REQUESTS_CA_BUNDLE = '/nowhere/ca.pem' is no bundle"):
        ping(server.service, ["mean"])


def test_an_idempotency_key_that_two_clients_may_choose_is_none() -> None:
    uuid = "0123ABCD-0000-4000-8000-000000000000"
    keys = ("12345", "a", "----", "0" * 32, "1" * 36, "00000000-0000-0000-0000-000000000000", f"{{{uuid}}}", uuid)
    assert [key for key in keys if _is_uuid(key)] == [uuid]


def test_a_limit_is_named_by_its_own_number() -> None:
    array = np.zeros((70000, 1, 1, 3), np.uint8)
    fields = {"prompts": [""] * 70000, "reward_fn": {"mean": 1.0}, "media_type": "image"}
    with pytest.raises(ProtocolError, match=r"^70000 items; at most 65536 are taken in one request"):
        parse_request("x", encode_request(fields, array), ["mean"])
    video = {**fields, "prompts": [""], "media_type": "video"}
    channels_last = encode_request(video, np.zeros((1, 8, 4, 4, 3), np.uint8))
    with pytest.raises(ProtocolError, match="pixels of a video are batch, 3, frames, height, width"):
        parse_request("x", channels_last, ["mean"])


def test_a_setting_without_effect_is_said_so() -> None:
    decode = DecodeArgs(wan2pt2_model_path="/w", load_mean_std=True, chunk_duration=81, temporal_window=4)
    disabled = RewardArgs(reward_type="b", setup_script="b", enable=False)
    rewards = (RewardArgs(reward_type="ocr", setup_script="a.sh"), disabled)
    assert ServiceConfig(reward_args=rewards, decode_args=decode).ineffective_settings == [
        "decode_args.temporal_window", "decode_args.load_mean_std", "decode_args.wan2pt2_model_path",
        "reward_args.ocr.setup_script",
    ]  # fmt: skip
    assert ServiceConfig(reward_args=rewards[1:]).ineffective_settings == []


@pytest.mark.parametrize(
    ("server", "expected"), [("127.0.0.1", "127.0.0.1"), ("[::1]", "::1"), ("localhost", "127.0.0.1")]
)
def test_a_service_for_another_pool_listens_where_the_server_is_reached(
    server: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if all(each.address != expected for found in psutil.net_if_addrs().values() for each in found):
        pytest.skip(f"this machine has no {expected}")
    with temporary_settings({PREFECT_API_URL: f"http://{server}:4200/api"}):
        assert flow._get_local_address() == expected
