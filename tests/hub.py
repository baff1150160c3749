"""A Hugging Face Hub on loopback that keeps repositories in memory, with faults on request. It has no Xet."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest

TOKEN = "hf_a-token-that-no-file-may-have"
_REGULAR = (".json", ".md", ".txt", ".jinja")


@dataclass
class Repository:
    """Commits of one repository, the newest last."""

    private: bool = False
    is_gated: bool = False
    commits: list[dict[str, Any]] = field(default_factory=list)
    branches: dict[str, int] = field(default_factory=dict)
    tags: dict[str, int] = field(default_factory=dict)

    def index(self, revision: str) -> int | None:
        by_id = {commit["oid"]: index for index, commit in enumerate(self.commits)}
        return (by_id | self.branches | self.tags).get(revision)

    def files(self, revision: str) -> dict[str, bytes] | None:
        index = self.index(revision)
        return None if index is None else self.commits[index]["files"]

    def commit(self, branch: str, files: dict[str, bytes], message: str) -> str:
        oid = hashlib.sha1(f"{len(self.commits)}".encode()).hexdigest()
        self.commits.append({"oid": oid, "files": files, "message": message})
        self.branches[branch] = len(self.commits) - 1
        return oid


@dataclass
class Hub:
    """The server: what it holds, and what it does wrong."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    choose: Callable[[str], str] = lambda what: ""
    """Of `METHOD /path` to "", a status, "drop": no response, or "lost": carried out and no response."""
    url: str = ""
    retry_after: int = 0
    """Seconds that it asks for when it responds with a fault."""
    role: str = "write"
    """Role of the token."""
    scopes: list[dict[str, Any]] | None = None
    """What a fine-grained token may do."""
    organisations: list[str] | None = None

    def once(self, fault: str, part: str, times: int = 1) -> None:
        left = [times]

        def choose(what: str) -> str:
            if left[0] and part in what:
                left[0] -= 1
                return fault
            return ""

        self.requests.clear()
        self.choose = choose

    def reset(self) -> None:
        self.requests.clear()
        self.choose, self.retry_after, self.role = lambda what: "", 0, "write"
        self.scopes = self.organisations = None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *arguments: object) -> None:
        pass

    def _any(self) -> None:
        what = f"{self.command} {unquote(self.path)}"
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append(what)
        fault = self.hub.choose(what)
        if fault == "drop":
            self.close_connection = True
            return
        if fault.isdigit():
            self._send(int(fault), {"error": "no"}, {"Retry-After": str(self.hub.retry_after)})
            return
        if self.headers.get("Authorization") != f"Bearer {TOKEN}" and "/blobs/" not in self.path:
            self._send(401, {"error": "no token"})
            return
        path = [unquote(part) for part in self.path.partition("?")[0].strip("/").split("/")]
        status, value, headers = self._respond(what, path, body)
        if fault == "lost":
            self.close_connection = True
            return
        self._send(status, value, headers)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _any

    def _send(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        usual = {"Content-Type": "application/json", "Content-Length": str(len(content))}
        for name, text in (usual | (headers or {})).items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _respond(self, what: str, path: list[str], body: bytes) -> tuple[int, Any, dict[str, str]]:
        if path[:2] == ["api", "whoami-v2"]:
            token = {"displayName": "t", "role": self.hub.role, "fineGrained": {"scoped": self.hub.scopes}}
            account: dict[str, Any] = {"name": "me", "type": "user"}
            if self.hub.organisations is not None:
                account["orgs"] = [{"name": name, "roleInOrg": "write"} for name in self.hub.organisations]
            return 200, account | {"auth": {"type": "access_token", "accessToken": token}}, {}
        if path[:2] == ["api", "validate-yaml"]:
            return 200, {"errors": [], "warnings": []}, {}
        if path[:3] == ["api", "repos", "create"]:
            return self._create(json.loads(body))
        if "blobs" in path:
            self.hub.blobs[path[-1]] = body
            return 200, {}, {}
        if what.startswith("DELETE") and path[4] == "tag":
            del self.hub.repositories["/".join(path[2:4])].tags[path[5]]
            return 200, {}, {}
        if path[:2] == ["api", "models"]:
            return self._api("/".join(path[2:4]), path[4:], body)
        if path[1].endswith(".git"):
            return self._lfs(json.loads(body))
        repository = self.hub.repositories.get("/".join(path[:2]))
        if repository and repository.is_gated:
            return 403, {"error": "gated"}, {"X-Error-Code": "GatedRepo"}
        files = repository.files(path[3]) if repository else None
        if files is None or "/".join(path[4:]) not in files:
            code = "EntryNotFound" if files is not None else "RevisionNotFound" if repository else "RepoNotFound"
            return 404, {"error": "none"}, {"X-Error-Code": code}
        return 200, files["/".join(path[4:])], {}

    def _create(self, wanted: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        name = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        if name in self.hub.repositories:
            return 409, {"url": f"{self.hub.url}/{name}", "error": "there"}, {}
        made = self.hub.repositories[name] = Repository(
            bool(wanted.get("private") or wanted.get("visibility") == "private")
        )
        made.commit("main", {".gitattributes": b""}, "first")
        return 200, {"url": f"{self.hub.url}/{name}", "id": name}, {}

    def _lfs(self, wanted: dict[str, Any]) -> tuple[int, Any, dict[str, str]]:
        objects = []
        for each in wanted["objects"]:
            link = {"upload": {"href": f"{self.hub.url}/blobs/{each['oid']}"}}
            objects.append(each | ({} if each["oid"] in self.hub.blobs else {"actions": link}))
        return 200, {"objects": objects, "transfer": "basic"}, {"Content-Type": "application/vnd.git-lfs+json"}

    def _api(self, name: str, rest: list[str], body: bytes) -> tuple[int, Any, dict[str, str]]:
        repository = self.hub.repositories.get(name)
        if repository is None:
            return 404, {"error": "none"}, {"X-Error-Code": "RepoNotFound"}
        match rest:
            case ["preupload", _]:
                files = [
                    {"path": each["path"], "shouldIgnore": False, "oid": None,
                     "uploadMode": "regular" if each["path"].endswith(_REGULAR) else "lfs"}
                    for each in json.loads(body)["files"]
                ]  # fmt: skip
                return 200, {"files": files}, {}
            case ["commit", branch]:
                return self._commit(name, branch, body)
            case ["tag", revision]:
                tag = json.loads(body)["tag"]
                if tag in repository.tags:
                    return 409, {"error": "there"}, {}
                repository.tags[tag] = repository.index(revision) or 0
                return 200, {}, {}
            case ["branch", branch]:
                if branch in repository.branches:
                    return 409, {"error": "there"}, {}
                repository.branches[branch] = repository.branches["main"]
                return 200, {}, {}
            case ["commits", branch]:
                commits = repository.commits[: (repository.index(branch) or 0) + 1][::-1]
                listed = [
                    {"id": each["oid"], "title": each["message"], "message": "", "authors": [],
                     "date": "2026-01-01T00:00:00.000Z"}
                    for each in commits
                ]  # fmt: skip
                return 200, listed, {}
        revision = rest[1] if rest[:1] == ["revision"] else "main"
        files = repository.files(revision)
        if files is None:
            return 404, {"error": "none"}, {"X-Error-Code": "RevisionNotFound"}
        oid = next(commit["oid"] for commit in repository.commits if commit["files"] is files)
        return 200, {"id": name, "sha": oid, "private": repository.private,
                     "siblings": [_described(path, data) for path, data in files.items()]}, {}  # fmt: skip

    def _commit(self, name: str, branch: str, body: bytes) -> tuple[int, Any, dict[str, str]]:
        repository = self.hub.repositories[name]
        head = repository.commits[repository.branches[branch]]
        files, message = dict(head["files"]), ""
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
                if value.get("parentCommit") not in {None, head["oid"]}:
                    return 412, {"error": "the branch has moved"}, {}
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        oid = repository.commit(branch, files, message)
        return 200, {"commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid, "success": True}, {}


def _described(path: str, data: bytes) -> dict[str, Any]:
    found = {"rfilename": path, "size": len(data), "blobId": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()}
    if not path.endswith(_REGULAR):
        found["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 1}
    return found


@contextmanager
def hub() -> Iterator[Hub]:
    """A Hub on a free port."""
    found = Hub()

    class Handler(_Handler):
        hub = found

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()


def use(url: str, patch: pytest.MonkeyPatch) -> None:
    """Let this process and those that it starts talk to the Hub; this one tries again at once."""
    import huggingface_hub.constants

    patch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda seconds: None))

    patch.setenv("HF_ENDPOINT", url)
    patch.setenv("HF_TOKEN", TOKEN)
    patch.setenv("HF_HUB_OFFLINE", "0")
    patch.setenv("HF_HUB_DISABLE_XET", "1")
    patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    patch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
