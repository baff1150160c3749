"""What is wrong with a publication target is found before anything runs."""

from __future__ import annotations

import errno
import re
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from cosmos_core.config.capabilities import check_capabilities
from cosmos_core.config.compose import load_pipeline
from cosmos_core.errors import ConfigError, CosmosError, DamagedRecord, UploadError
from cosmos_core.upload.artifact_store import ArtifactStore, check_store
from cosmos_core.upload.base import check_targets
from cosmos_core.upload.file import FileTarget
from cosmos_core.upload.mlflow import MlflowTarget
from tasks.kinds import all_kinds
from tests.cells import full


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import gone_module\nclass Shelf: ...", "cannot be imported: .*'gone_module'"),
        ("class Shelf: ...", r"TypeError: Shelf\(\) takes no arguments"),
        ("class Shelf:\n    def __init__(self, place): ...\n    def check(self): raise OSError('no shelf')",
         r"OSError: no shelf \(.*mine\.py:3\)"),
        ("class Shelf:\n    def __init__(self, place): ...", ""),
        ("class Shelf:\n    def __init__(self, place): ...\n    def check(self): raise ConnectionError('closed')",
         "ConnectionError: closed"),
    ],
)  # fmt: skip
def test_a_users_target_that_cannot_be_opened_is_found_before_anything_runs(
    tmp_path: Path, code: str, said: str
) -> None:
    (tmp_path / "mine.py").write_text(code)
    stages = "[[pipeline.stages]]\nname = 'm'\nkind = 'custom'\nentry = 'json:loads'\n[[pipeline.stages]]\n"
    upload_settings = (
        f"name = 'up'\nkind = 'upload'\nafter = 'm'\nmodel = 'stage:m'\ntarget = '{tmp_path}/mine.py:Shelf'"
    )
    (tmp_path / "p.toml").write_text(stages + upload_settings)
    error = f"p.toml: stage 'up': target = '{tmp_path}/mine.py:Shelf': .*{said}"
    kind = UploadError if said.startswith("ConnectionError") else ConfigError
    with pytest.raises(kind, match=error) if said else nullcontext():
        check_targets(load_pipeline(tmp_path / "p.toml", [], all_kinds()))
    check_targets(load_pipeline(tmp_path / "p.toml", ["up.work_pool=elsewhere"], all_kinds()))


def test_the_folder_of_an_unknown_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(
        "[[pipeline.stages]]\nname = 'm'\nkind = 'custom'\nentry = 'json:loads'\n[[pipeline.stages]]\nname = 'up'\n"
        "kind = 'upload'\nafter = 'm'\nmodel = 'stage:m'\ntarget = '~nobody-here/x'\n"
    )
    said = (
        "stage 'up': target = '~nobody-here/x': ~nobody-here is no user of this machine; write the whole path, or ./~"
    )
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_capabilities(load_pipeline(tmp_path / "p.toml", [], all_kinds()))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TimeoutError("no response within 30 s"), UploadError), (UploadError("the Hub responds with 503"), UploadError),
        (DamagedRecord("published.json is damaged"), ConfigError), (ConfigError("no such bucket"), ConfigError),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stage", ["gate", "up"])
def test_an_outage_is_no_error_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception], stage: str
) -> None:
    def fail(_: FileTarget) -> None:
        raise error

    monkeypatch.setattr(FileTarget, "published" if stage == "gate" else "check", fail)
    target = f"target = '{tmp_path}/published'\n"
    (tmp_path / "p.toml").write_text(
        "[[pipeline.stages]]\nname = 'm'\nkind = 'custom'\nentry = 'json:loads'\n[[pipeline.stages]]\nname = 'gate'\n"
        f"kind = 'gate'\nafter = 'm'\nrequire = 'm.accuracy >= published'\n{target}[[pipeline.stages]]\nname = 'up'\n"
        f"kind = 'upload'\nafter = ['m', 'gate']\nmodel = 'stage:m'\n{target}"
    )
    with pytest.raises(kind, match=f"p.toml: stage '{stage}': target = '{tmp_path}/published': {error}$") as raised:
        check_targets(load_pipeline(tmp_path / "p.toml", [], all_kinds()))
    assert raised.type is kind


@pytest.mark.parametrize("kind", [UploadError, ConfigError])
def test_an_outage_of_the_artifact_store_is_none_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[CosmosError]
) -> None:
    def fail(_: ArtifactStore) -> None:
        raise kind("s3://bucket/x: no")

    monkeypatch.setattr(ArtifactStore, "check", fail)
    head = "[pipeline]\nartifact_store = 's3://bucket/x'\n[[pipeline.stages]]\nname = 'm'\nkind = 'custom'\n"
    (tmp_path / "p.toml").write_text(f"{head}entry = 'json:loads'\n")
    with pytest.raises(kind, match=r"p.toml: pipeline.artifact_store = 's3://bucket/x': s3://bucket/x: no") as raised:
        check_store(load_pipeline(tmp_path / "p.toml", [], all_kinds()))
    assert raised.type is kind


def test_a_folder_that_may_not_be_read_is_an_error_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "is_symlink", refuse)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        FileTarget(str(tmp_path)).published()


@pytest.mark.parametrize(
    ("status", "kind"), [(401, ConfigError), (503, UploadError), *full((403, ConfigError), (400, UploadError))]
)
def test_an_mlflow_server_that_refuses_the_credentials_is_an_error_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch, status: int, kind: type[CosmosError]
) -> None:
    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        do_POST = do_GET

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(kind) as raised:
            MlflowTarget("model").check()
        server.shutdown()
    assert raised.type is kind


@pytest.mark.parametrize("target", ["s3://bucket/x", "hub://team/x", "mlflow://x", "./published"])
def test_a_model_that_is_read_where_it_was_published_needs_a_folder(tmp_path: Path, target: str) -> None:
    (tmp_path / "p.toml").write_text(
        "[[pipeline.stages]]\nname = 'm'\nkind = 'custom'\nentry = 'json:loads'\n[[pipeline.stages]]\nname = 'up'\n"
        f"kind = 'upload'\nafter = 'm'\nmodel = 'stage:m'\ntarget = '{target}'\n[[pipeline.stages]]\nname = 'again'\n"
        "kind = 'export'\nafter = 'up'\nmodel = 'stage:up'\n"
    )
    said = "stage 'again': model = 'stage:up': a stage of kind 'upload' makes no model; name another stage"
    with nullcontext() if target == "./published" else pytest.raises(ConfigError, match=said):
        check_capabilities(load_pipeline(tmp_path / "p.toml", [], all_kinds()))
