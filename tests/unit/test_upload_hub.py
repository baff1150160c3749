"""Publishing to a Hub that is busy, breaks off and forgets to respond: one commit, private, with a card."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import Cancelled, ConfigError, DamagedRecord, Preempted, UploadError
from cosmos_core.run.files import sha256
from cosmos_core.run.stage import Stage
from cosmos_core.upload import hub
from cosmos_core.upload.base import open_target
from cosmos_core.upload.hub import HubTarget
from tasks.kinds import all_kinds
from tasks.stages import gate
from tests import hub as fake
from tests.hub import Hub


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with fake.hub() as found:
        yield found


@pytest.fixture(autouse=True)
def here(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.reset()
    server.repositories.clear()
    fake.use(server.url, monkeypatch)


def model(folder: Path, text: str = "weights") -> tuple[Path, dict[str, Any]]:
    (folder / "sub").mkdir(parents=True, exist_ok=True)
    contents = {"model.safetensors": text, "sub/config.json": "{}", "README.md": "---\na: b\n---\n# It\n"}
    for name, content in contents.items():
        (folder / name).write_text(content)
    files = {name: sha256(folder / name) for name in contents}
    metrics = {"validation/accuracy": 0.123456}
    return folder, {"version": text, "metrics": metrics, "files": files, "inputs": {"export": "abc"}}


def target(location: str = "team/sums") -> HubTarget:
    return HubTarget(location, retry_wait_seconds=0.01)


def test_a_version_is_one_commit_of_a_private_repository_with_a_tag_and_a_card(tmp_path: Path, server: Hub) -> None:
    folder, record = model(tmp_path / "m", "v1")
    assert target().published() is None
    assert target().publish(folder, "v1", record) == "hub://team/sums@v1"
    repository = server.repositories["team/sums"]
    assert repository.private
    assert [commit["message"] for commit in repository.commits] == ["first", "Publish v1"]
    files = repository.files("v1")
    assert files is not None
    assert files.keys() == {".gitattributes", "published.json", *record["files"]}
    assert files["model.safetensors"] == b"v1"
    card = files["README.md"].decode()
    assert card.startswith("---\na: b\n---\n# It\n") and "| validation/accuracy | 0.1235 |" in card
    assert "- from stage `export`: `abc`" in card and "## Published as `v1`" in card
    assert target().published() == record


def test_the_next_version_replaces_the_files_and_the_tag_keeps_the_old_one(tmp_path: Path, server: Hub) -> None:
    folder, record = model(tmp_path / "m", "v1")
    (folder / "old.txt").write_text("of v1 alone")
    record["files"]["old.txt"] = sha256(folder / "old.txt")
    target().publish(folder, "v1", record)
    second, other = model(tmp_path / "n", "v2")
    target().publish(second, "v2", other)
    assert target().damage(folder, "v1", record) == "", "v1 is whole though the branch has another version"
    repository = server.repositories["team/sums"]
    now, old = repository.files("main"), repository.files("v1")
    assert now is not None and "old.txt" not in now and now["model.safetensors"] == b"v2"
    assert old is not None and old["old.txt"] == b"of v1 alone"


@pytest.mark.parametrize(
    "damaged",
    ["sub/config.json", *(pytest.param(x, marks=pytest.mark.full) for x in ("model.safetensors", "published.json"))],
)
def test_a_branch_that_somebody_damaged_is_mended_by_publishing_the_same_version(
    tmp_path: Path, server: Hub, damaged: str
) -> None:
    folder, record = model(tmp_path / "m", "v1")
    target().publish(folder, "v1", record)
    assert target().damage(folder, "v1", record) == ""
    assert target().damage(folder, "v2", record) == "the revision v2 is missing"
    repository = server.repositories["team/sums"]
    repository.commit("main", dict(repository.files("v1") or {}) | {damaged: b"broken"}, "somebody")
    if damaged != "published.json":
        assert target().damage(folder, "v1", record) == f"{damaged} is missing or altered"
    assert target().publish(folder, "v1", record) == "hub://team/sums@v1"
    assert target().published() == record and repository.files("main") == repository.files("v1")


@pytest.mark.parametrize(
    ("fault", "part", "times"),
    [
        ("429", "POST /api/models/team/sums/commit", 2),
        ("lost", "POST /api/models/team/sums/commit", 1), ("drop", "POST /api/models/team/sums/commit", 1),
        ("500", "preupload", 1), ("lost", "POST /api/models/team/sums/tag", 1),
        ("drop", "PUT /blobs", 1), ("403", "PUT /blobs", 1),
        *(pytest.param(*each, 1, marks=pytest.mark.full) for each in (
            ("503", "POST /api/models/team/sums/commit"), ("429", "repos/create"), ("502", "GET /team/sums/resolve"),
        )),
    ],
)  # fmt: skip
def test_a_busy_hub_gets_each_version_once(fault: str, part: str, times: int, tmp_path: Path, server: Hub) -> None:
    folder, record = model(tmp_path / "m", f"{fault}{part[:9]}")
    server.blobs.clear()
    server.once(fault, part, times)
    target().publish(folder, "v1", record | {"version": "v1"})
    server.reset()
    target().publish(folder, "v1", record | {"version": "v1"})
    repository = server.repositories["team/sums"]
    assert [commit["message"] for commit in repository.commits] == ["first", "Publish v1"]
    assert repository.tags == {"v1": 1}
    files = repository.files("main")
    assert files is not None and files["model.safetensors"] == f"{fault}{part[:9]}".encode()


def test_an_upload_that_is_to_stop_does_not_wait_as_long_as_a_busy_hub_asks(
    tmp_path: Path, server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, record = model(tmp_path / "m", "v1")
    server.once("429", "repos/create", 99)
    server.retry_after = 7200  # longer than a test may take
    monkeypatch.setattr(hub, "_MAX_RETRY_DELAY_SECONDS", 7200.0)
    sums = target()

    def pause() -> None:
        if server.requests:
            raise Preempted("asked to stop")

    sums.prepare_upload(folder, pause)
    with pytest.raises(Preempted):
        sums.publish(folder, "v1", record)
    assert len(server.requests) == 1


def test_of_two_publications_at_once_each_tag_has_its_own_files(tmp_path: Path, server: Hub) -> None:
    first, second = model(tmp_path / "m", "v1"), model(tmp_path / "n", "v2")

    def choose(what: str) -> str:
        if what.startswith("POST") and "/tag/" in what:
            server.reset()
            target().publish(second[0], "v2", second[1])
        return ""

    server.choose = choose
    target().publish(first[0], "v1", first[1])
    repository = server.repositories["team/sums"]
    assert [(repository.files(tag) or {})["model.safetensors"] for tag in ("v1", "v2")] == [b"v1", b"v2"]


def test_a_token_that_may_only_read_is_refused_before_anything_runs(server: Hub) -> None:
    target().check()
    server.role = "read"
    with pytest.raises(ConfigError, match=r"^hub://team/sums: HF_TOKEN may only read; set it to one that may write$"):
        target().check()
    for name in ("team/two words", "team/a--b"):
        with pytest.raises(ConfigError, match=rf"^hub://{name}: .*[Rr]epo.?id"):
            target(name).check()


@pytest.mark.parametrize("name", ["team/sums", "me/sums", "sums"])
def test_a_token_that_may_not_write_there_is_refused_before_anything_runs(server: Hub, name: str) -> None:
    owner = name.rpartition("/")[0] or "me"

    def scope(kind: str, owner: str, *permissions: str) -> dict[str, Any]:
        return {"entity": {"_id": "1", "type": kind, "name": owner}, "permissions": ["repo.content.read", *permissions]}

    refused = rf"^hub://{name}: HF_TOKEN may not write to repositories of '{owner}'; set one that may, or name another"
    kind = "user" if owner == "me" else "org"
    for scopes in ([], [scope(kind, owner)], [scope("org", "others", "repo.write")]):
        server.role, server.scopes = "fineGrained", scopes
        with pytest.raises(ConfigError, match=refused):
            target(name).check()
    for scopes in ([scope(kind, owner, "repo.write")], [scope("model", "5f3", "repo.write")]):
        server.scopes = scopes
        target(name).check()
    server.role, server.scopes, server.organisations = "write", None, ["Team"]
    target(name).check()
    server.organisations = []
    with nullcontext() if owner == "me" else pytest.raises(ConfigError, match=refused):
        target(name).check()


def test_a_cancel_while_the_files_are_sent_makes_no_commit(tmp_path: Path, server: Hub) -> None:
    folder, record = model(tmp_path / "m", "v1")
    hub_target = target("team/cancelled")

    def pause() -> None:
        if any("preupload" in request for request in server.requests):
            raise Cancelled("its flow run was cancelled")

    hub_target.prepare_upload(folder, pause)
    with pytest.raises(Cancelled):
        hub_target.publish(folder, "v1", record)
    assert target("team/cancelled").published() is None


@pytest.mark.parametrize("branch", ["nightly", "team/nightly"])
def test_a_branch_and_the_account_of_the_token(branch: str, tmp_path: Path, server: Hub) -> None:
    folder, record = model(tmp_path / "m", "v1")
    assert target(f"sums@{branch}").publish(folder, "v1", record) == "hub://me/sums@v1"
    repository = server.repositories["me/sums"]
    assert repository.branches == {"main": 0, branch: 1}
    assert target(f"sums@{branch}").published() == record
    assert target("sums").published() is None


def test_what_does_not_pass_is_one_line_without_the_token(
    tmp_path: Path, server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, record = model(tmp_path / "m", "v1")
    server.once("503", "commit", 99)
    said = rf"^hub://team/sums: the Hub {server.url} responds with 503: no; nothing was published$"
    with pytest.raises(UploadError, match=said):
        target().publish(folder, "v1", record)
    assert len(server.repositories["team/sums"].commits) == 1
    server.once("503", "/tag", 99)
    with pytest.raises(UploadError, match=r"responds with 503: no; v1 was committed to main, and has no tag; resume$"):
        target().publish(folder, "v1", record)
    assert len(server.repositories["team/sums"].commits) == 2
    server.reset()
    monkeypatch.setenv("HF_TOKEN", "hf_of-somebody-else")
    with pytest.raises(ConfigError) as caught:
        target().check()
    remedy = "set HF_TOKEN to one that may write there"
    assert str(caught.value) == f"hub://team/sums: the Hub {server.url} refuses the token (401); {remedy}"
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ConfigError, match=r"^hub://team/sums: no token; set HF_TOKEN to one that may write$"):
        target().publish(folder, "v1", record)
    for wrong in ("hub://", "hub://a/b/c"):
        with pytest.raises(ConfigError, match="names no repository"):
            open_target(wrong)


def test_a_hub_that_is_away_is_named_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as away:
        url = f"http://127.0.0.1:{away.getsockname()[1]}"
    fake.use(url, monkeypatch)
    with pytest.raises(UploadError, match=rf"^hub://team/sums: the Hub {url}: .*refused.*; nothing was published$"):
        target().check()


def test_a_file_that_arrives_altered_is_told(tmp_path: Path, server: Hub) -> None:
    folder, record = model(tmp_path / "m", "v1")
    server.blobs[record["files"]["model.safetensors"]] = b"of another"
    said = r"^hub://team/sums: model.safetensors is missing or altered after the commit$"
    with pytest.raises(UploadError, match=said):
        target().publish(folder, "v1", record)
    assert server.repositories["team/sums"].tags == {}


def test_a_resumed_run_is_compared_with_the_version_before_its_own(tmp_path: Path, server: Hub) -> None:
    for version, accuracy in (("r1", 0.4), ("r2", 0.5)):
        folder, record = model(tmp_path / version, version)
        record |= {"metrics": {"accuracy": accuracy}, "run_id": tmp_path.name if version == "r2" else "older"}
        target().publish(folder, version, record)
    assert target().history() == ["r1", "r2"] and target().record_of("r1")["metrics"] == {"accuracy": 0.4}
    inputs = {"sft": {"metrics": {"accuracy": 0.5}}}
    config = StageConfig(name="gate", kind="gate", require=("accuracy > published",), target="hub://team/sums")
    stage = Stage(tmp_path / "stages/gate", config, Recipe(), "", None, inputs, "f" * 64, kind=all_kinds()["gate"])
    [condition] = gate.run(stage).info["conditions"]  # type: ignore[misc]
    assert condition["bound"] == 0.4, "not with itself"
    with pytest.raises(DamagedRecord, match=r"hub://team/sums@r3: published\.json is missing"):
        target().record_of("r3")


def test_a_token_may_end_with_a_line_break_and_the_address_of_the_hub_with_a_slash(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", f"{fake.TOKEN}\n")  # as a mounted secret does
    monkeypatch.setenv("HF_ENDPOINT", f"{server.url}/")
    target().check()
    assert server.requests == ["GET /api/whoami-v2"]


def test_a_gated_repository_that_the_token_may_not_read_is_not_taken_for_nothing(tmp_path: Path, server: Hub) -> None:
    server.blobs.clear()
    folder, record = model(tmp_path / "m", "v1")
    target().publish(folder, "v1", record)
    server.repositories["team/sums"].is_gated = True
    with pytest.raises(ConfigError, match=r"^hub://team/sums: .* refuses the token \(403: gated\); set HF_TOKEN"):
        target().published()


def test_what_the_library_of_the_hub_refuses_is_one_line(tmp_path: Path, server: Hub) -> None:
    folder, record = model(tmp_path / "m", "v1")
    (folder / ".git").mkdir()
    (folder / ".git/config").write_text("")
    record["files"][".git/config"] = sha256(folder / ".git/config")
    with pytest.raises(ConfigError, match=r"^hub://team/sums: Invalid `path_in_repo` .*'\.git/config'\)\.$"):
        target().publish(folder, "v1", record)


def test_the_tag_of_a_version_that_is_published_again_has_the_files_of_now(tmp_path: Path, server: Hub) -> None:
    server.blobs.clear()
    folder, record = model(tmp_path / "m", "v1")
    target().publish(folder, "v1", record)
    (folder / "generation_config.json").write_text("{}")  # no weights: run and fingerprint are the same
    record["files"]["generation_config.json"] = sha256(folder / "generation_config.json")
    assert target().publish(folder, "v1", record) == "hub://team/sums@v1"
    repository = server.repositories["team/sums"]
    assert repository.files("v1") == repository.files("main") and target().damage(folder, "v1", record) == ""


@pytest.mark.parametrize(("name", "library"), [("config.json", "transformers"), ("model_index.json", "diffusers")])
def test_a_model_without_a_card_gets_one_that_names_its_library(
    tmp_path: Path, server: Hub, name: str, library: str
) -> None:
    (tmp_path / name).write_text("{}")
    record = {"version": "v1", "metrics": {}, "files": {name: sha256(tmp_path / name)}}
    target().publish(tmp_path, "v1", record)
    files = server.repositories["team/sums"].files("main")
    assert files is not None and files["README.md"].startswith(f"---\nlibrary_name: {library}\n---\n".encode())
