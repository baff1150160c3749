"""Serve the reports of a folder of runs over HTTP, read-only, so that links to reports work from other machines.

The server returns only `/RUN/report.html` and the logs to which it links, and only to clients that send the token as
password of basic authentication, with any user name. Private runs, whose folders only their owners can read, are not
served. TLS requires a reverse proxy.
"""

import base64
import hmac
import os
import re
import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cosmos_core.errors import ConfigError
from cosmos_core.observe.report import REPORT_FILE

REPORTS_URL_VARIABLE = "COSMOS_REPORTS_URL"
"""Environment variable with the URL at which other machines reach the report server."""
TOKEN_VARIABLE = "COSMOS_REPORTS_TOKEN"
_MIN_TOKEN_LENGTH = 16
_MAX_LOG_BYTES = 16 * 2**20
_SEGMENT_REGEX = r"[A-Za-z0-9][\w.-]*"
_URL_PATH_PATTERN = re.compile(
    rf"/({_SEGMENT_REGEX})/({re.escape(REPORT_FILE)}|stages/{_SEGMENT_REGEX}/logs/{_SEGMENT_REGEX}\.log)", re.ASCII
)
_RESPONSE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; media-src data:",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def report_url(run_path: Path) -> str:
    """Return the URL of a run's report below COSMOS_REPORTS_URL; empty if it is unset or the run is private."""
    base_url = os.environ.get(REPORTS_URL_VARIABLE, "").rstrip("/")
    return f"{base_url}/{run_path.name}/{REPORT_FILE}" if base_url and not _is_run_private(run_path) else ""


class ReportServer(ThreadingHTTPServer):
    """HTTP server for the reports of the runs in the folder `output_dir`; call `serve_forever` to run it. The
    constructor raises ConfigError if the token has fewer than 16 characters, or the port cannot be used."""

    def __init__(self, output_dir: Path, token: str, host_and_port: tuple[str, int]) -> None:
        if len(token) < _MIN_TOKEN_LENGTH:
            raise ConfigError(f"{TOKEN_VARIABLE} has {len(token)} characters; at least {_MIN_TOKEN_LENGTH} are needed")
        self.output_dir, self.token = output_dir.resolve(), token
        self.address_family = socket.AF_INET6 if ":" in host_and_port[0] else socket.AF_INET
        try:
            super().__init__(host_and_port, _ReportRequestHandler)
        except OSError as error:
            port_problem = f"port {host_and_port[1]} of {host_and_port[0]}: {error.strerror or error}"
            raise ConfigError(f"{port_problem}; choose another with --port, 0 for any free one") from error


class _ReportRequestHandler(BaseHTTPRequestHandler):
    server: ReportServer
    timeout = 30.0  # timeout of a read in seconds, so that a silent client does not occupy a thread
    server_version, sys_version = "cosmos", ""

    def do_GET(self) -> None:
        http_status, response_body, headers = 404, b"there is no such report", dict(_RESPONSE_HEADERS)
        if not _is_authorized(self.headers.get("Authorization", ""), self.server.token):
            http_status, response_body, headers["WWW-Authenticate"] = 401, b"a token is needed", 'Basic realm="reports"'
        elif (file_content := self._read_requested_file()) is not None:
            http_status, response_body = 200, file_content
        content_subtype = "html" if http_status == 200 and self.path.endswith(REPORT_FILE) else "plain"
        headers["Content-Type"] = f"text/{content_subtype}; charset=utf-8"
        self.send_response(http_status)
        for name, value in (headers | {"Content-Length": str(len(response_body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(response_body)

    do_HEAD = do_GET

    def _read_requested_file(self) -> bytes | None:
        """Return the content of the requested file; None if it does not exist or must not be served."""
        if (url_match := _URL_PATH_PATTERN.fullmatch(self.path)) is None:
            return None
        run_path = self.server.output_dir / url_match[1]
        requested_file = run_path / url_match[2]
        try:  # refuse symbolic links, because they may lead to any file of the server's user
            if requested_file.resolve() != requested_file or _is_run_private(run_path):
                return None
            with requested_file.open("rb") as report_stream:
                if requested_file.suffix == ".log":
                    report_stream.seek(max(0, requested_file.stat().st_size - _MAX_LOG_BYTES))
                return report_stream.read()
        except OSError:
            return None


def _is_run_private(run_path: Path) -> bool:
    return not run_path.stat().st_mode & 0o077


def _is_authorized(authorization_header: str, token: str) -> bool:
    auth_scheme, _, encoded_credentials = authorization_header.partition(" ")
    try:
        password = base64.b64decode(encoded_credentials, validate=True).partition(b":")[2]
    except ValueError:
        return False
    return auth_scheme.lower() == "basic" and hmac.compare_digest(password, token.encode())
