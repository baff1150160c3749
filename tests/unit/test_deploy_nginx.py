# ruff: noqa: E501
"""`deploy/nginx/prefect.conf` before a server of a few lines: TLS, who is asked for a password, and what a viewer may do."""

from __future__ import annotations

import base64
import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from tests.conftest import wait_until
from tests.unit.test_deploy import DEPLOY

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin") or shutil.which("nginx")
pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed (apt-get install nginx)")
OWN = base64.b64encode(b"server:own-secret").decode()


class Upstream(BaseHTTPRequestHandler):
    """Says who it was asked as."""

    def reply(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        content = f"{self.command} {self.path} {self.headers['Authorization']}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PATCH = do_DELETE = do_PUT = reply

    def log_message(self, *args: object) -> None:
        pass


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, ssl.SSLContext]]:
    """The addresses of the proxy, with TLS and without, and who signed its certificate."""
    folder, secure, plain = tmp_path_factory.mktemp("nginx"), free_port(), free_port()
    command = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=x"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "certificate.pem"]
    subprocess.run(["openssl", *command.split(), *names], cwd=folder, check=True, capture_output=True)
    hashed = [
        subprocess.run(["openssl", "passwd", "-apr1", word], capture_output=True, text=True, check=True).stdout.strip()
        for word in ("right", "seen")
    ]
    (folder / "users").write_text(f"ada:{hashed[0]}\nviewer:{hashed[1]}\n")
    (folder / "authorization").write_text(f'proxy_set_header Authorization "Basic {OWN}";\n')
    upstream = ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
    threading.Thread(target=upstream.serve_forever, daemon=True).start()
    site = (DEPLOY / "nginx" / "prefect.conf").read_text().replace("/etc/nginx/prefect", str(folder))
    site = site.replace("127.0.0.1:4200", f"127.0.0.1:{upstream.server_address[1]}")
    site = site.replace("listen 443", f"listen 127.0.0.1:{secure}").replace("listen 80", f"listen 127.0.0.1:{plain}")
    user = "user root;\n" if os.geteuid() == 0 else ""  # the folders of a test are its user's alone
    places = "".join(
        f"{name}_temp_path {folder}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"{user}daemon off; pid {folder}/pid; error_log {folder}/error.log;\nevents {{}}\nhttp {{\naccess_log off;\n{places}{site}}}\n"
    )
    for name in ("users", "authorization", "certificate.pem", "key.pem"):
        (folder / name).chmod(0o644)
    folder.chmod(0o755)
    process = subprocess.Popen(
        [str(NGINX), "-p", str(folder), "-c", str(folder / "nginx.conf")], stderr=subprocess.PIPE
    )
    try:

        def listens() -> bool:
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", secure)) == 0

        wait_until(listens, 20, "nginx listens")
        trusted = ssl.create_default_context(cafile=str(folder / "certificate.pem"))
        yield f"https://127.0.0.1:{secure}", f"http://127.0.0.1:{plain}", trusted
    finally:
        process.terminate()
        process.wait(20)
        upstream.shutdown()
        upstream.server_close()


def test_nobody_is_let_in_without_a_password_and_plain_http_leads_to_tls(url: tuple[str, str, ssl.SSLContext]) -> None:
    secure, plain, trusted = url
    for auth in (None, ("ada", "wrong"), ("viewer", "right"), ("server", "own-secret")):
        assert httpx.get(f"{secure}/api/health", verify=trusted, auth=auth).status_code == 401
    moved = httpx.get(f"{plain}/api/flows")
    assert moved.status_code == 301 and moved.headers["Location"] == "https://127.0.0.1/api/flows"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{secure}/api/health")


def test_the_server_sees_its_own_credentials_alone(url: tuple[str, str, ssl.SSLContext]) -> None:
    secure, _, trusted = url
    found = httpx.post(f"{secure}/api/flow_runs/?a=b", verify=trusted, auth=("ada", "right"), content=b"{}")
    assert (found.status_code, found.text) == (200, f"POST /api/flow_runs/?a=b Basic {OWN}")
    assert "max-age" in found.headers["Strict-Transport-Security"]


ID = "0123abcd-0000-4000-8000-000000000000"
MAY = [("GET", "/api/flow_runs/" + ID), ("GET", "/runs"), ("POST", "/api/flow_runs/filter"), ("POST", "/api/logs/filter"),
       ("POST", "/api/flow_runs/count"), ("POST", "/api/ui/flow_runs/history"), ("POST", "/api/events/filter"),
       ("POST", "/api/deployments/paginate"), ("GET", "/api/events/out"), ("GET", "/api/admin/version"),
       ("GET", "/api/work_pools/my%20pool?x=%5F"), ("GET", "/api/work_pools/k%C3%BChl"),
       ("GET", "/api/work_pools/a%40b%7Cc"), ("GET", "/api/work_pools/gpu%3Ab")]  # fmt: skip
MAY_NOT = [
    ("POST", "/api/flow_runs/"), ("POST", f"/api/flow_runs/{ID}/set_state"), ("DELETE", f"/api/flow_runs/{ID}"),
    ("PATCH", f"/api/deployments/{ID}"), ("POST", f"/api/deployments/{ID}/create_flow_run"), ("PUT", "/api/admin/storage"),
    ("POST", "/api/block_documents/filter"), ("GET", f"/api/block_documents/{ID}?include_secrets=true"),
    ("GET", "/api/block_types/slug/secret/block_documents/name/x?include_secrets=true"), ("GET", "/api/events/in"),
    ("POST", f"/api/deployments/{ID}/create_flow_run?x=/filter"), ("POST", f"/api/flow_runs/{ID}/resume"),
    ("POST", "/api/deployments/%2e%2e/flow_runs/filter"), ("POST", "/api/events"),
    ("GET", f"/api/block%5Fdocuments/{ID}?include_secrets=true"), ("GET", f"/api%2fblock_documents/{ID}"),
    ("GET", f"/%61pi/block_documents/{ID}"), ("GET", "/api/block_types/slug/secret/block%5fdocuments/name/x"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "path", "status"), [(*each, 200) for each in MAY] + [(*each, 403) for each in MAY_NOT]
)
def test_a_viewer_looks_and_changes_nothing(
    method: str, path: str, status: int, url: tuple[str, str, ssl.SSLContext]
) -> None:
    secure, _, trusted = url
    request = httpx.Request(method, secure)
    request.url = request.url.copy_with(raw_path=path.encode())
    with httpx.Client(verify=trusted, auth=("viewer", "seen")) as client:
        assert client.send(request, auth=("viewer", "seen")).status_code == status
        whoever = client.send(httpx.Request(method, request.url), auth=("ada", "right"))
    assert whoever.status_code == 200
