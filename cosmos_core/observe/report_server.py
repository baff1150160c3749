"""Serve the reports of a folder of runs over HTTP, read-only, so that links to reports work from other machines.

The server returns only `/RUN/report.html`, and only to clients with the token as password of basic authentication and
any user name. The reports of private runs, whose folders only their owners can read, are not served. TLS requires a
reverse proxy.
"""

import base64
import hmac
import os
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cosmos_core.errors import ConfigError
from cosmos_core.observe.report import PAGE

URL = "COSMOS_REPORTS_URL"
"""Environment variable with the URL at which other machines reach the report server."""
TOKEN = "COSMOS_REPORTS_TOKEN"
_MIN_TOKEN_LENGTH = 16
_PATH = re.compile(rf"/([A-Za-z0-9][\w.-]*)/{re.escape(PAGE)}", re.ASCII)
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def report_url(run_path: Path) -> str:
    """Return the URL of a run's report on the server in COSMOS_REPORTS_URL; empty if the variable is unset or the run
    is private."""
    base = os.environ.get(URL, "").rstrip("/")
    return f"{base}/{run_path.name}/{PAGE}" if base and not _is_private(run_path) else ""


class ReportServer(ThreadingHTTPServer):
    """HTTP server for the reports of the runs in the folder `output_dir`; call `serve_forever` to run it.

    Raises:
        ConfigError: the token has fewer than 16 characters.
    """

    def __init__(self, output_dir: Path, token: str, address: tuple[str, int]) -> None:
        if len(token) < _MIN_TOKEN_LENGTH:
            raise ConfigError(f"{TOKEN} has {len(token)} characters; at least {_MIN_TOKEN_LENGTH} are needed")
        self.output_dir, self.token = output_dir.resolve(), token
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    timeout = 30.0  # timeout of a read in seconds, so that a silent client does not occupy a thread
    server_version, sys_version = "cosmos", ""

    def do_GET(self) -> None:
        status, content, headers = 404, b"there is no such report", dict(_HEADERS)
        if not _is_allowed(self.headers.get("Authorization", ""), self.server.token):
            status, content, headers["WWW-Authenticate"] = 401, b"a token is needed", 'Basic realm="reports"'
        elif page := self._page():
            status, content = 200, page
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET

    def _page(self) -> bytes | None:
        match = _PATH.fullmatch(self.path)
        file = self.server.output_dir / (match[1] if match else "") / PAGE
        try:  # symbolic links are not followed, because they may lead to any file of the server's user
            is_served = match and file.resolve() == file and not _is_private(file.parent)
            return file.read_bytes() if is_served else None
        except OSError:
            return None


def _is_private(run_path: Path) -> bool:
    return not run_path.stat().st_mode & 0o077


def _is_allowed(header: str, token: str) -> bool:
    scheme, _, value = header.partition(" ")
    try:
        password = base64.b64decode(value, validate=True).partition(b":")[2]
    except ValueError:
        return False
    return scheme.lower() == "basic" and hmac.compare_digest(password, token.encode())
