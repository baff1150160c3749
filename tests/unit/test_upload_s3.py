"""Publishing to a store through a bad network: complete and read back, or one line and the old version."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from cosmos_core.cli_models import rollback
from cosmos_core.errors import Cancelled, ConfigError, DamagedRecord, UploadError
from cosmos_core.upload.base import open_target
from cosmos_core.upload.s3 import S3Target
from cosmos_core.upload.transfer import FileTransfer
from tests import store
from tests.cells import full
from tests.conftest import wait_until
from tests.store import Proxy, Request

PART = 64 << 10


@pytest.fixture
def target(here: Proxy, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> S3Target:
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", PART)  # 5 MiB in S3
    found = S3Target(f"models/{request.node.name[:60]}", read_timeout_seconds=1)
    found.file_transfer.part_bytes = PART
    return found


def model(folder: Path, *, size: int = 1000, seed: int = 0) -> tuple[Path, dict[str, Any]]:
    (folder / "sub").mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(random.Random(seed).randbytes(size))
    (folder / "sub" / "config.json").write_text("{}")
    files = {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest()
             for f in sorted(folder.rglob("*")) if f.is_file()}  # fmt: skip
    return folder, {"metrics": {"accuracy": 0.5}, "files": files}


def content(target: S3Target, version: str) -> dict[str, str]:
    """SHA-256 of each file of a version, as it lies in the store."""
    head = f"{target.prefix}/{version}/"
    return {each.key.removeprefix(head): target.bucket.sha256(each.key) for each in target.bucket.list_objects(head)}


def test_a_version_holds_every_file_and_the_pointer_moves_last(tmp_path: Path, target: S3Target, proxy: Proxy) -> None:
    folder, record = model(tmp_path / "m", size=2 * PART + 77)
    assert target.published() is None
    proxy.reset()
    url = target.publish(folder, "v1", record)
    assert url == f"s3://models/{target.prefix}/v1"
    written = [request.key for request in proxy.requests if request.method in {"PUT", "POST"}]
    assert written[-2:] == [f"{target.prefix}/v1/published.json", f"{target.prefix}/latest.json"]
    assert target.published() == record
    found = content(target, "v1")
    assert found.pop("published.json") and found == record["files"]
    assert target.history() == ["v1"]
    _, second = model(folder, seed=2)
    target.publish(folder, "v2", second)
    assert target.published() == second and target.history() == ["v1", "v2"]
    target.point_to("v1", ["v1"])
    assert target.versions() == ["v1", "v2"], "the one that a rollback left behind too"


def test_two_publications_at_once_are_both_in_the_history(tmp_path: Path, target: S3Target, proxy: Proxy) -> None:
    folder, record = model(tmp_path / "m")
    # On a busy machine the other publication takes seconds, in which no client may give up and send again.
    target, other = (S3Target(f"models/{target.prefix}", read_timeout_seconds=60) for _ in range(2))
    target.publish(folder, "v1", record)

    def choose(request: Request) -> str:
        if request.method == "PUT" and request.key.endswith("latest.json"):
            proxy.reset()
            other.publish(folder, "v3", record)
        return ""

    proxy.reset(choose)
    target.publish(folder, "v2", record)
    assert target.history() == ["v1", "v3", "v2"]
    with pytest.raises(UploadError, match="'v2' was published meanwhile; the pointer was not moved"):
        target.point_to("v1", ["v1"])  # a rollback that read the history before
    assert target.history() == ["v1", "v3", "v2"]


def test_a_store_that_refuses_every_conditional_write_ends_a_publication(
    tmp_path: Path, target: S3Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, record = model(tmp_path / "m")
    monkeypatch.setattr(target.bucket, "replace_if_unchanged", lambda key, data, etag: "")
    monkeypatch.setattr("cosmos_core.upload.s3._MAX_POINTER_ATTEMPTS", 5)
    with pytest.raises(UploadError, match=r"latest.json: the store refused 5 writes .*; the pointer was not moved"):
        target.publish(folder, "v1", record)


def test_a_cancel_at_any_moment_before_the_pointer_moves_publishes_nothing(tmp_path: Path, target: S3Target) -> None:
    folder, record = model(tmp_path / "m")
    calls: list[int] = []
    for last in range(1, 10):
        calls.clear()

        def pause(last: int = last) -> None:
            calls.append(0)
            if len(calls) == last:
                raise Cancelled("its flow run was cancelled")

        target.prepare_upload(tmp_path, pause)
        with suppress(Cancelled):
            target.publish(folder, f"v{last}", record)
            break
        assert target.published() is None
    assert last == 4, "it is called for each of two files, and before the pointer moves"


def test_publishing_again_sends_nothing_and_mends_what_was_damaged(
    tmp_path: Path, target: S3Target, proxy: Proxy
) -> None:
    folder, record = model(tmp_path / "m")
    target.prepare_upload(tmp_path, lambda: None)
    target.publish(folder, "v1", record)
    proxy.reset()
    target.publish(folder, "v1", record)
    assert not any(request.key.endswith("safetensors") and request.method != "HEAD" for request in proxy.requests)
    target.bucket.write(f"{target.prefix}/v1/model.safetensors", b"damaged")
    target.bucket.write(f"{target.prefix}/v1/left-over.bin", b"of another try")
    target.publish(folder, "v1", record)
    found = content(target, "v1")
    assert found.pop("published.json") and found == record["files"]


def test_damage_is_what_is_gone_or_other_than_it_was_sent(tmp_path: Path, target: S3Target) -> None:
    folder, record = model(tmp_path / "m")
    target.publish(folder, "v1", record)
    assert target.damage(folder, "v1", record) == ""
    key = f"{target.prefix}/v1/model.safetensors"
    is_sent = {"sha256": record["files"]["model.safetensors"]}
    target.bucket.s3_client.put_object(Bucket="models", Key=key, Body=b"cut off", Metadata=is_sent)
    assert target.damage(folder, "v1", record) == "model.safetensors is missing or altered"
    target.bucket.write(key, (folder / "model.safetensors").read_bytes())
    assert target.damage(folder, "v1", record) == "model.safetensors is missing or altered", "nobody says what it holds"
    target.bucket.remove(key)
    assert target.damage(folder, "v1", record) == "model.safetensors is missing or altered"


def test_a_damaged_pointer_or_record_is_replaced_by_publishing_again(tmp_path: Path, target: S3Target) -> None:
    folder, record = model(tmp_path / "m")
    target.publish(folder, "v1", record)
    for name, text in (
        ("latest.json", b"{bad"), ("latest.json", b'{"history": []}'), ("v1/published.json", b"[]"),
        ("v1/published.json", b'{"version": "v1", "metrics": {}}'),
    ):  # fmt: skip
        target.bucket.write(f"{target.prefix}/{name}", text)
        with pytest.raises(DamagedRecord, match=r"publish again"):
            target.published()
        target.publish(folder, "v1", record)
        assert target.published() == record and target.history() == ["v1"]


def test_a_pointer_that_cannot_be_read_now_keeps_its_history(tmp_path: Path, target: S3Target, proxy: Proxy) -> None:
    folder, record = model(tmp_path / "m")
    target.publish(folder, "v1", record)
    proxy.reset(lambda request: "500" if request.method == "GET" and request.key.endswith("latest.json") else "")
    with pytest.raises(UploadError, match="the store responds with"):
        target.publish(folder, "v2", record)
    proxy.reset()
    assert target.history() == ["v1"]


def is_weights(request: Request) -> bool:
    return request.method == "PUT" and request.key.endswith("safetensors")


def is_part(number: int) -> Callable[[Request], bool]:
    return lambda request: request.part == number


def is_read(request: Request) -> bool:
    return request.method == "GET" and request.key.endswith("safetensors")


def is_end_of_parts(request: Request) -> bool:
    return request.method == "POST" and "uploadId" in request.path


def is_pointer(request: Request) -> bool:
    return request.key.endswith("latest.json") and request.method == "PUT"


@pytest.mark.parametrize(
    ("size", "faults"),
    [
        (5 * PART + 5, [("500", is_part(1), 2), ("reset", is_part(2), 1), ("flip", is_part(3), 1),
                        ("stall", is_part(4), 1), ("lost", is_part(5), 1), ("lost", is_end_of_parts, 1),
                        ("truncate", is_read, 1), ("lost", is_read, 1), ("lost", is_pointer, 1)]),
        (1000, [("503", is_weights, 2), ("501", is_pointer, 1)]),
        *full((1000, [("flip", is_weights, 3)])),
    ],
)  # fmt: skip
def test_what_a_bad_network_does_is_mended(
    size: int, faults: list[tuple[str, Any, int]], tmp_path: Path, target: S3Target, proxy: Proxy
) -> None:
    folder, record = model(tmp_path / "m", size=size)
    left, lock = [list(each) for each in faults], threading.Lock()

    def choose(request: Request) -> str:
        with lock:
            for each in left:
                fault, is_wanted, times = each
                if times and is_wanted(request):
                    each[2] -= 1
                    return fault
        return ""

    proxy.reset(choose)
    target.publish(folder, "v1", record)
    assert [times for *_, times in left] == [0] * len(faults), "each of them came"
    proxy.reset()
    found = content(target, "v1")
    assert found.pop("published.json") and found == record["files"]
    assert target.published() == record


def test_a_store_that_alters_every_object_gets_no_pointer(tmp_path: Path, target: S3Target, proxy: Proxy) -> None:
    folder, record = model(tmp_path / "m")
    target.publish(folder, "v1", record)
    _, second = model(folder, seed=2)
    proxy.reset(lambda request: "flip" if is_weights(request) else "")
    with pytest.raises(UploadError, match=r"v2/model.safetensors arrived altered 3 times: its sha256 is not that of"):
        target.publish(folder, "v2", second)
    assert target.history() == ["v1"]
    assert "model.safetensors" not in content(target, "v2"), "what arrived altered is not left there"


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        ("403", ConfigError, "the store refuses the credentials (403); set AWS_ACCESS_KEY_ID and"),
        ("400", ConfigError, "has another region or address (400); set AWS_ACCESS_KEY_ID and"),
        *full(("503", UploadError, "the store responds with 503; the pointer was not moved")),
    ],
)
def test_what_does_not_pass_is_one_line(
    fault: str, error: type[Exception], said: str, tmp_path: Path, target: S3Target, proxy: Proxy
) -> None:
    folder, record = model(tmp_path / "m")
    proxy.reset(lambda request: fault)
    with pytest.raises(error) as caught:
        target.publish(folder, "v1", record)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert store.SECRET not in str(caught.value) and store.KEY not in str(caught.value)


def test_what_is_wrong_with_the_target_is_found_before_anything_runs(
    target: S3Target, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    target.check()
    pending = target.bucket.s3_client.list_multipart_uploads(Bucket="models", Prefix=target.prefix)
    assert target.versions() == [] and "Uploads" not in pending
    proxy.reset(lambda request: "403" if request.method == "POST" else "")
    with pytest.raises(ConfigError, match=r"^s3://models: the store refuses the credentials \(InvalidAccessKeyId\)"):
        target.check()
    proxy.reset(lambda request: "403" if request.method == "HEAD" and request.key else "")
    with pytest.raises(ConfigError, match=r"refuses the credentials \(403\); .* that may list, read and write there$"):
        target.check()
    proxy.reset()
    with pytest.raises(ConfigError, match=r"^s3://nowhere-at-all: there is no such bucket; make it, or name another$"):
        open_target("s3://nowhere-at-all/x").check()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="names no bucket"):
        open_target("s3://")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    with pytest.raises(ConfigError, match=r"^s3://models: no credentials; set AWS_ACCESS_KEY_ID and"):
        open_target("s3://models/x").check()  # type: ignore[attr-defined]


def test_an_account_that_may_list_one_prefix_only_is_enough(tmp_path: Path, target: S3Target, proxy: Proxy) -> None:
    def refuse_elsewhere(request: Request) -> str:  # what a policy with the condition s3:prefix does
        listed = parse_qs(urlsplit(request.path).query).get("prefix", [""])[0]
        return "403" if not request.key and not listed.startswith(f"{target.prefix}/") else ""

    proxy.reset(refuse_elsewhere)
    target.check()
    folder, record = model(tmp_path / "m")
    target.publish(folder, "v1", record)
    assert target.history() == target.versions() == ["v1"]
    with pytest.raises(ConfigError, match=r"refuses the credentials \(InvalidAccessKeyId\)"):
        open_target("s3://models/elsewhere").check()  # type: ignore[attr-defined]


def test_the_variables_of_cosmos_rl_win(proxy: Proxy, target: S3Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    for name, value in {"ACCESS_KEY_ID": "mine", "SECRET_ACCESS_KEY": "also-mine", "ENDPOINT_URL": proxy.url,
                        "REGION_NAME": "eu-west-1"}.items():  # fmt: skip
        monkeypatch.setenv(f"PROD_S3_CHECKPOINT_{name}", value)
    S3Target("models/x").check()
    assert "HEAD" in {request.method for request in proxy.requests}


PUBLISH = """
import json, sys
from pathlib import Path
from cosmos_core.upload.s3 import S3Target
folder, location, notes = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
target = S3Target(location)
target.file_transfer.part_bytes = 64 << 10
target.prepare_upload(notes, lambda: None)
target.publish(folder, "v2", json.loads(sys.argv[4]))
"""


def test_after_a_kill_no_part_that_arrived_is_sent_again(tmp_path: Path, target: S3Target, proxy: Proxy) -> None:
    folder, record = model(tmp_path / "m", size=9 * PART + 100)
    arguments = [str(folder), f"models/{target.prefix}", str(tmp_path), json.dumps(record)]
    proxy.reset(lambda request: "slow" if request.part else "")
    own = set(proxy.connections)

    def num_parts() -> int:
        return sum(request.part > 0 for request in list(proxy.requests))

    process = subprocess.Popen([sys.executable, "-c", PUBLISH, *arguments], cwd=Path(__file__).parents[2])
    wait_until(lambda: process.poll() is not None or num_parts() >= 3, 60, "some parts are sent")
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it was killed in the middle"
    wait_until(lambda: proxy.connections <= own, 5, "all that it sent has arrived")
    assert target.history() == [], "nothing is published half"
    before = Counter(request.part for request in proxy.requests if request.part)
    assert 3 <= len(before) < 10
    proxy.reset()
    target.prepare_upload(tmp_path, lambda: None)
    target.publish(folder, "v2", record)
    after = Counter(request.part for request in proxy.requests if request.part)
    assert not before.keys() & after.keys() and len(before) + len(after) == 10
    found = content(target, "v2")
    assert found.pop("published.json") and found == record["files"]
    left = target.bucket.s3_client.list_multipart_uploads(Bucket="models", Prefix=f"{target.prefix}/").get(
        "Uploads", []
    )
    assert left == []


def test_two_machines_that_send_the_same_content_do_not_end_what_the_other_has_begun(
    tmp_path: Path, target: S3Target, proxy: Proxy
) -> None:
    file, key = tmp_path / "tokenizer", f"{target.prefix}/objects/ab"
    file.write_bytes(random.Random(0).randbytes(2 * PART))
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    is_first = threading.Lock()

    def uploads() -> int:
        return len(target.bucket.s3_client.list_multipart_uploads(Bucket="models", Prefix=key).get("Uploads", []))

    def other() -> None:
        """Between our parts: the other machine sends all of it."""
        if uploads() and is_first.acquire(blocking=False):
            FileTransfer(target.bucket, part_bytes=PART).send({key: (file, sha256)})
            assert uploads() == 1, "ours goes on"

    FileTransfer(target.bucket, part_bytes=PART, check_cancellation=other).send({key: (file, sha256)})
    assert is_first.locked() and target.bucket.sha256(key) == sha256 and uploads() == 0


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", ["PROD_S3_CHECKPOINT_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", *full("AWS_ENDPOINT_URL")])
def test_an_endpoint_without_a_scheme_is_one_line_that_names_the_variable(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name.startswith("PROD"):
        for key in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
            monkeypatch.setenv(f"PROD_S3_CHECKPOINT_{key}", "of-cosmos-rl")
    for other in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "localhost:9000")
    with pytest.raises(ConfigError) as caught:
        S3Target("models/x").check()
    assert str(caught.value) == f"{name} = 'localhost:9000' is no URL; write http://HOST:PORT or https://HOST"


def test_a_rollback_whose_response_is_lost_goes_back_one_version(
    tmp_path: Path, target: S3Target, proxy: Proxy
) -> None:
    folder, record = model(tmp_path / "m")
    for version in ("v1", "v2", "v3"):
        target.publish(folder, version, record)
    proxy.once("lost", is_pointer)
    rollback(f"s3://models/{target.prefix}")
    assert target.history() == ["v1", "v2"]
