"""Models and rows in a store: pinned to what lies there when the run begins, fetched once, by content."""

from __future__ import annotations

import json
import random
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError, HTTPClientError

from cosmos_core import cli_train
from cosmos_core.config.compose import load_pipeline
from cosmos_core.errors import ConfigError, DataError, UploadError
from cosmos_core.launch.check import check_stages_in_worker
from cosmos_core.launch.estimate import estimate_stages_in_worker
from cosmos_core.launch.worker import AttemptSettings
from cosmos_core.run.bucket import Bucket, translate_errors
from cosmos_core.run.directory import create_run, open_or_create_run, open_run
from cosmos_core.run.files import sha256
from cosmos_core.run.manifest import read_result
from cosmos_core.run.remote import append_content_digest, download_pinned_url, pin_urls
from cosmos_core.run.stage import Stage, load_stage
from cosmos_core.upload.bundle import encode_document, read_document
from cosmos_core.upload.transfer import FileTransfer, UploadJournal
from tasks.kinds import all_kinds
from tasks.layout import prepare_stage_folder
from tasks.stage import run_stage
from tests.store import KEY, Proxy, Request
from tests.unit.run_folder import fingerprint_of
from tests.unit.tiny_model import save_tiny_model

pytestmark = pytest.mark.usefixtures("here")


def put(url: str, **files: str) -> str:
    for name, text in files.items():
        Bucket("models").write(f"{url}/{name}", text.encode())
    return f"s3://models/{url}"


def reads(proxy: Proxy) -> list[str]:
    return [request.key.rpartition("/")[2] for request in proxy.requests if request.method == "GET" and request.key]


def test_the_same_content_is_fetched_once_wherever_it_lies(tmp_path: Path, proxy: Proxy) -> None:
    one, other = put("fetch-a", rows="1", more="2"), put("fetch-b", rows="1", more="2")
    pins = [append_content_digest(one), append_content_digest(other)]
    assert pins[0].partition("#")[2] == pins[1].partition("#")[2] and pins[0].startswith("s3://models/fetch-a#")
    proxy.reset()
    folder = download_pinned_url(pins[0], tmp_path)
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"rows": "1", "more": "2"}
    assert download_pinned_url(pins[1], tmp_path) == folder
    assert sorted(reads(proxy)) == ["more", "rows"]
    assert download_pinned_url(append_content_digest(f"{one}/rows"), tmp_path).read_text() == "1", (
        "an object alone is a file"
    )


def test_an_estimate_reads_the_models_and_rows_that_lie_in_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rows = put("estimate-model", config="{}"), f"{put('estimate-rows', rows='1')}/rows"
    (tmp_path / "sft.toml").write_text(
        f'[policy]\nmodel_name_or_path = "{model}"\n[train.train_policy]\ntype = "sft"\ndataset.name = "{rows}"\n'
    )
    stages: list[Stage] = []

    def estimate_nothing(settings: AttemptSettings) -> Any:
        stages.append(load_stage(settings.stage_path))
        return {"info": {"estimate": "nothing"}}

    monkeypatch.setattr("cosmos_core.launch.check.run_attempt", estimate_nothing)
    unpinned = load_pipeline(tmp_path / "sft.toml", ["pipeline.threads=1"], all_kinds())
    for pipeline in (unpinned, pin_urls(unpinned)):
        assert dict(estimate_stages_in_worker(pipeline, {})) == {"sft": "nothing"}
    for stage in stages:
        assert (Path(stage.model) / "config").read_text() == "{}"
        assert Path(stage.recipe.train.train_policy.dataset.name).read_text() == "1"


def test_a_check_reads_the_teacher_in_a_store_also_behind_another_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = put("check-teacher", config="{}")
    recipe = '[policy]\nmodel_name_or_path = "model"\n[train.train_policy]\ndataset.name = "rows.jsonl"\n'
    (tmp_path / "sft.toml").write_text(recipe + 'type = "sft"\n')
    distillation = f'[distillation]\nenable = true\nmodel_name_or_path = "{teacher}"\n'
    (tmp_path / "rl.toml").write_text(recipe + f'type = "grpo"\nreward_function = "exact_match"\n{distillation}')
    (tmp_path / "both.toml").write_text(
        '[[pipeline.stages]]\nname = "sft"\nkind = "sft"\nrecipe = "sft.toml"\n'
        '[[pipeline.stages]]\nname = "rl"\nkind = "rl"\nrecipe = "rl.toml"\nafter = ["sft"]\nmodel = "stage:sft"\n'
    )
    teachers: dict[str, str] = {}

    def find_nothing(settings: AttemptSettings) -> Any:
        stage = load_stage(settings.stage_path)
        teachers[stage.name] = stage.recipe.distillation.model_name_or_path
        return {"info": {"found": "nothing"}}

    monkeypatch.setattr("cosmos_core.launch.check.run_attempt", find_nothing)
    list(check_stages_in_worker(load_pipeline(tmp_path / "both.toml", ["pipeline.threads=1"], all_kinds())))
    assert (Path(teachers["rl"]) / "config").read_text() == "{}"


def test_a_whole_bucket_is_a_folder(tmp_path: Path) -> None:
    bucket = Bucket("whole")
    bucket.s3_client.create_bucket(Bucket="whole")
    for key in ("rows", "deep/more"):
        bucket.write(key, key.encode())
    for url in ("s3://whole", "s3://whole/"):
        folder = download_pinned_url(append_content_digest(url), tmp_path)
        assert [(folder / key).read_text() for key in ("rows", "deep/more")] == ["rows", "deep/more"]


def test_what_was_changed_since_it_was_pinned_is_refused(tmp_path: Path) -> None:
    pin = append_content_digest(put("changed", rows="1"))
    put("changed", rows="2")
    with pytest.raises(DataError, match=r"^s3://models/changed was changed since the run began; start a new run$"):
        download_pinned_url(pin, tmp_path)
    put("changed", rows="1")
    assert (download_pinned_url(pin, tmp_path) / "rows").read_text() == "1"


def test_a_fetch_that_was_broken_off_goes_on_with_what_is_missing(
    tmp_path: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin = append_content_digest(put("broken", **{f"f{number}": str(number) for number in range(4)}))
    proxy.reset(lambda request: "403" if request.key.endswith("f3") else "")
    with pytest.raises(ConfigError, match="the store refuses the credentials"):
        download_pinned_url(pin, tmp_path)
    proxy.reset()
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1))  # as much as f3 has
    assert len(list(download_pinned_url(pin, tmp_path).iterdir())) == 4
    assert reads(proxy) == ["f3"]


@pytest.mark.parametrize("size", [300, 6 << 20])
def test_what_arrives_altered_is_fetched_again(tmp_path: Path, proxy: Proxy, size: int) -> None:
    (tmp_path / "m").mkdir()
    weights = tmp_path / "m" / "weights"
    weights.write_bytes(random.Random(0).randbytes(size))
    transfer = FileTransfer(Bucket("models"), part_bytes=5 << 20)  # the larger one is sent in parts and has no MD5
    transfer.send({f"altered-{size}/weights": (weights, sha256(weights))})
    pin = append_content_digest(put(f"altered-{size}", rows="1"))
    proxy.once("flip", lambda request: request.method == "GET" and request.key.endswith(("weights", "rows")), 2)
    folder = download_pinned_url(pin, tmp_path / "fetched")
    assert (folder / "weights").read_bytes() == weights.read_bytes() and (folder / "rows").read_text() == "1"
    assert len(reads(proxy)) == 4 and sum(request.fault == "flip" for request in proxy.requests) == 2


def test_a_document_that_arrived_altered_is_not_sent_over_that_of_another(proxy: Proxy) -> None:
    bucket, key, methods = Bucket("models"), "altered-document", []
    etag = bucket.replace_if_unchanged(key, encode_document({"owner": "before"}), "")

    def choose(request: Request) -> str:
        methods.append(request.method)
        if methods == ["PUT", "PUT"]:
            Bucket("models").write(key, encode_document({"owner": "another"}))
        return "flip" if methods == ["PUT"] else ""

    proxy.reset(choose)
    assert bucket.replace_if_unchanged(key, encode_document({"owner": "this"}), etag) == ""
    proxy.reset()
    assert read_document(bucket, key)[0] == {"owner": "another"}


def test_what_arrives_altered_each_time_is_one_line_and_is_not_kept(tmp_path: Path, proxy: Proxy) -> None:
    pin = append_content_digest(put("bad", rows="1"))
    proxy.reset(lambda request: "flip" if request.key.endswith("rows") else "")
    with pytest.raises(DataError, match=r"^s3://models/bad: bad/rows arrived altered 3 times$"):
        download_pinned_url(pin, tmp_path)
    assert reads(proxy) == ["rows"] * 3
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".lock"]
    proxy.reset()
    assert (download_pinned_url(pin, tmp_path) / "rows").read_text() == "1"


def test_an_object_whose_name_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    pin = append_content_digest(put("sly", **{"rows": "1", "../../outside": "2"}))
    with pytest.raises(DataError, match=r"the object 'sly/../../outside' would lie outside of its folder"):
        download_pinned_url(pin, tmp_path / "a" / "b")
    assert not list(tmp_path.rglob("outside"))


def test_what_a_killed_download_left_is_no_part_of_the_content(tmp_path: Path) -> None:
    pin = append_content_digest(put("killed", **{"rows.jsonl": "1"}) + "/rows.jsonl")
    partial = tmp_path / f"{pin.partition('#')[2]}.partial"
    partial.mkdir()
    (partial / ".rows.jsonl.1-2.tmp").write_text("half")
    file = download_pinned_url(pin, tmp_path)
    assert file.name == "rows.jsonl" and [path.name for path in file.parent.iterdir()] == ["rows.jsonl"]
    (file.parent / ".rows.jsonl.1-2.tmp").write_text("left by an earlier version")
    assert download_pinned_url(pin, tmp_path) == file


def test_an_object_that_is_gone_is_no_missing_bucket(tmp_path: Path) -> None:
    with pytest.raises(UploadError, match=r"^s3://models: an object of it is gone$"), translate_errors("s3://models"):
        Bucket("models").sha256("never-there")


def test_latest_is_the_version_that_the_pointer_names(tmp_path: Path) -> None:
    put("shop/v7", weights="seven")
    put("shop", **{"latest.json": json.dumps({"version": "v7", "history": ["v7"]})})
    assert append_content_digest("s3://models/shop/latest").startswith("s3://models/shop/v7#")
    with pytest.raises(DataError, match=r"^s3://models/nothing: nothing lies there; give an object"):
        append_content_digest("s3://models/nothing")


def test_a_pointer_that_is_damaged_is_one_line() -> None:
    for text in ("{bad", "\xff", '["v7"]', '{"history": ["v7"]}', '{"version": 7}', '{"version": ""}'):
        Bucket("models").write("torn/latest.json", text.encode("latin-1"))
        with pytest.raises(
            DataError, match=r"^s3://models/torn/latest\.json is damaged; publish again, or name a version$"
        ):
            append_content_digest("s3://models/torn/latest")


RECIPE = """
[pipeline]
threads = 1
output_dir = "OUTPUTS"
[policy]
model_name_or_path = "s3://models/tiny"
model_max_length = 64
[train.train_policy]
type = "sft"
dataset = { name = "s3://models/data/rows.jsonl" }
"""


def test_a_run_reads_its_model_and_its_rows_from_a_store(tmp_path: Path) -> None:
    bucket = Bucket("models")
    for file in filter(Path.is_file, save_tiny_model(tmp_path / "tiny").rglob("*")):
        bucket.write(f"tiny/{file.name}", file.read_bytes())
    rows = [{"text": "a b c"}] * 4
    bucket.write("data/rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    (tmp_path / "r.toml").write_text(RECIPE.replace("OUTPUTS", str(tmp_path / "outputs")))
    pipeline = load_pipeline(tmp_path / "r.toml", (), all_kinds())
    run = create_run(pipeline, run_id="one")
    assert "s3://models/data/rows.jsonl#" in (run.path / "pipeline.toml").read_text()
    result, was_reused = run_stage(run, "prepare")
    assert not was_reused and read_result(run.stage_path("prepare"))
    names = {source["name"].partition("#")[0] for source in result["sources"]}
    assert names == {"s3://models/tiny", "s3://models/data/rows.jsonl"}
    assert open_or_create_run(pipeline, run_id="one").path == run.path
    # Elsewhere, the same content: nothing is prepared again. Other content: it is.
    bucket.write("copy/rows.jsonl", bucket.read("data/rows.jsonl") or b"")
    moved = load_pipeline(
        tmp_path / "r.toml", ["train.train_policy.dataset.name=s3://models/copy/rows.jsonl"], all_kinds()
    )
    assert run_stage(create_run(moved), "prepare")[1]
    bucket.write("copy/rows.jsonl", (bucket.read("data/rows.jsonl") or b"") * 2)
    assert not run_stage(create_run(moved), "prepare")[1]


def test_a_run_that_was_moved_fetches_into_the_folder_where_it_is_now(tmp_path: Path) -> None:
    put("moved", **{"rows.jsonl": '{"text": "a b c"}\n' * 4})
    recipe = RECIPE.replace("OUTPUTS", str(tmp_path / "outputs")).replace("data/rows", "moved/rows")
    (tmp_path / "r.toml").write_text(recipe.replace("s3://models/tiny", str(save_tiny_model(tmp_path / "tiny"))))
    create_run(load_pipeline(tmp_path / "r.toml", (), all_kinds()), run_id="one")
    (tmp_path / "outputs").rename(tmp_path / "elsewhere")
    run = open_run(tmp_path / "elsewhere/one", all_kinds())
    stage = prepare_stage_folder(run, run.pipeline.stage("prepare"), fingerprint_of(run.pipeline, "prepare"))
    assert Path(stage.recipe.train.train_policy.dataset.name).is_relative_to(tmp_path / "elsewhere/.cosmos")
    assert not (tmp_path / "outputs").exists()


def test_commands_that_write_a_recipe_or_try_a_model_read_from_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in filter(Path.is_file, save_tiny_model(tmp_path / "tiny").rglob("*")):
        Bucket("models").write(f"tried/{file.name}", file.read_bytes())
    data = put("asked", **{"rows.jsonl": '{"prompt": "a", "response": "b"}\n' * 4}) + "/rows.jsonl"
    cli_train.sft(model="s3://models/tried", data=data, dry_run=True)
    recipe = tomllib.loads(capsys.readouterr().out)
    assert recipe["policy"]["model_name_or_path"] == "s3://models/tried"
    assert recipe["train"]["train_policy"]["dataset"]["name"] == data
    executed: list[list[str]] = []
    monkeypatch.setattr(cli_train.os, "execv", lambda _, arguments: executed.append(arguments))
    cli_train.try_model(["s3://models/tried"])
    assert (Path(executed[0][-1]) / "config.json").is_file()


def test_headers_in_capitals_hold_the_same_metadata(
    tmp_path: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a proxy in Go writes them, such as Traefik."""
    monkeypatch.setattr(proxy, "rewrite_header", lambda name, value: (name.title(), value))
    (tmp_path / "weights").write_bytes(b"weights")
    digest = sha256(tmp_path / "weights")
    FileTransfer(Bucket("models")).send({"capitals": (tmp_path / "weights", digest)})
    found = Bucket("models").head("capitals")
    assert found is not None and found["metadata"] == {"sha256": digest}


def test_an_etag_that_is_no_md5_is_not_compared(tmp_path: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Azure makes them, behind a gateway that speaks S3."""

    def rewrite(name: str, value: str) -> tuple[str, str]:
        return name, '"0x8DC"' if name.lower() == "etag" else value

    monkeypatch.setattr(proxy, "rewrite_header", rewrite)
    (tmp_path / "weights").write_bytes(b"weights")
    proxy.reset()
    FileTransfer(Bucket("models")).send({"azure/weights": (tmp_path / "weights", sha256(tmp_path / "weights"))})
    Bucket("models").write("azure/published.json", b"{}")
    assert [request.key for request in proxy.requests if request.method == "PUT"] == [
        "azure/weights", "azure/published.json"
    ]  # fmt: skip
    assert Bucket("models").read("azure/weights") == b"weights"


@pytest.mark.parametrize(("fault", "num_parts_sent_again"), [("503", 1), ("501", 3), ("403", 3)])
def test_parts_are_sent_again_only_if_the_store_does_not_list_them(
    tmp_path: Path, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, fault: str, num_parts_sent_again: int
) -> None:
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1000)
    file, key = tmp_path / "weights", f"parts-{fault}"
    file.write_bytes(random.Random(0).randbytes(3000))

    def send() -> None:
        transfer = FileTransfer(Bucket("models"), UploadJournal(tmp_path / "journal"), part_bytes=1000)
        transfer.send({key: (file, sha256(file))})

    proxy.reset(lambda request: "reset" if request.part == 3 else "")
    with pytest.raises(HTTPClientError):
        send()
    proxy.reset(lambda request: fault if request.method == "GET" and "uploadId=" in request.path else "")
    if fault == "503":
        with pytest.raises(ClientError, match="SlowDown"):
            send()
        proxy.reset()
    send()
    assert sum(request.part > 0 for request in proxy.requests) == num_parts_sent_again
    assert Bucket("models").read(key) == file.read_bytes()


def test_half_of_the_credentials_is_one_line_and_a_token_alone_hides_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", f"{KEY}\n")  # as a mounted secret ends
    Bucket("models").check_write_access("x")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ConfigError, match=r"^s3://models: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET"):
        Bucket("models").check_write_access("x")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "left over")
    (tmp_path / "file").write_text("[default]\naws_access_key_id = of-file\naws_secret_access_key = secret-of-file\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "file"))
    Bucket("models").check_write_access("x")


def test_region_and_addressing_of_a_profile_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def address() -> str:
        request = {"Params": {"Bucket": "models", "Key": "x"}}
        return str(Bucket("models").s3_client.generate_presigned_url("get_object", **request)).partition("?")[0]

    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://store.example")
    assert address() == "https://store.example/models/x"
    profile = "[profile lab]\nregion = cn-north-1\ns3 =\n  addressing_style = virtual\n"
    keys = "aws_access_key_id = of-lab\naws_secret_access_key = secret-of-lab\n"
    (tmp_path / "config").write_text(profile + keys)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    assert Bucket("models").s3_client.meta.region_name == "cn-north-1"
    assert address() == "https://models.store.example/x"
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert Bucket("models").s3_client.meta.region_name == "eu-west-1"


def test_credentials_that_a_program_renews_in_a_file_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "file"))
    monkeypatch.setattr("cosmos_core.run.bucket._MAX_CLIENT_AGE_SECONDS", -1.0, raising=False)
    bucket, keys = Bucket("models"), []
    for key in ("first", "second"):
        (tmp_path / "file").write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = of-{key}\n")
        keys.append(bucket.s3_client._request_signer._credentials.access_key)
    assert keys == ["first", "second"]


@pytest.mark.parametrize("url", ["s3://models/number #3/m", "s3://models/number #3/m/rows"])
def test_a_name_may_have_a_number_sign(tmp_path: Path, url: str) -> None:
    put("number #3/m", rows="1")
    pin = append_content_digest(url)
    path = download_pinned_url(pin, tmp_path)
    assert (path if path.is_file() else path / "rows").read_text() == "1"
    assert download_pinned_url(url, tmp_path) == path
