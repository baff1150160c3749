"""Record the health of a reward service at the end of a stage, from its `/health` and `/metrics`, for the report.

A reward service of Cosmos-RL has neither endpoint, and is reported as such. An error here never makes the stage fail.
"""

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cosmos_core.environment import make_tls_verify, mask_text
from cosmos_core.errors import ConfigError
from cosmos_core.run.files import write_text

logger = logging.getLogger(__name__)

HEALTH_FILE = "reward_service.json"
ENQUEUE_URL_VARIABLE, FETCH_URL_VARIABLE = "REMOTE_REWARD_ENQUEUE_URL", "REMOTE_REWARD_FETCH_URL"
TOKEN_VARIABLE = "REMOTE_REWARD_TOKEN"
_RESPONSE_TIMEOUT_SECONDS = 2.0
_ENQUEUE_PATH = "/api/reward/enqueue"
_REWARD_METRIC_PATTERN = re.compile(r'^reward_(\w+?)(?:_total)?\{reward="([^"]+)"\} (\S+)$', re.M)
_RESPONSE_METRIC_PATTERN = re.compile(r'^reward_responses_total\{path="([^"]+)",status="(\d+)"\} (\S+)$', re.M)


def write_health(folder: Path, environment: Mapping[str, str], num_restarts: int = 0) -> None:
    """Write a file with the health of the reward services at the URLs in `environment`, and `num_restarts`, how often
    the service that was started for the stage was restarted."""
    if services := fetch_service_health(environment):
        try:
            health_text = json.dumps({"services": services, "restarts": num_restarts}, indent=1)
            write_text(folder / HEALTH_FILE, mask_text(health_text))
        except OSError as error:
            logger.warning("how the reward service was cannot be noted: %s", error)


def fetch_service_health(environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the health of each reward service at the comma-separated URLs in `environment`."""
    enqueue_urls, token = environment.get(ENQUEUE_URL_VARIABLE, "").split(","), environment.get(TOKEN_VARIABLE, "")
    service_urls = [url.strip().rstrip("/") for url in enqueue_urls if url.strip()]
    return [_fetch_health(url.removesuffix(_ENQUEUE_PATH), token) for url in service_urls]


def _fetch_health(url: str, token: str) -> dict[str, Any]:
    import httpx

    auth_header = {"Authorization": f"Bearer {token}"} if token else {}
    health: dict[str, Any] = {"url": url, "status": "does not respond", "rewards": {}, "refused": {}}
    try:
        tls_verify = make_tls_verify()
        response = httpx.get(f"{url}/health", timeout=_RESPONSE_TIMEOUT_SECONDS, verify=tls_verify)
        report = response.json() if response.headers.get("Content-Type", "").startswith("application/json") else {}
        health["status"] = str(report.get("status") or "tells nothing") if isinstance(report, dict) else "tells nothing"
        metrics_response = httpx.get(
            f"{url}/metrics", headers=auth_header, timeout=_RESPONSE_TIMEOUT_SECONDS, verify=tls_verify
        )
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, ConfigError):
        return health
    if metrics_response.status_code == 200:
        for name, reward_name, value in _REWARD_METRIC_PATTERN.findall(metrics_response.text):
            health["rewards"].setdefault(reward_name, {})[name] = float(value)
        for _, http_status, count in _RESPONSE_METRIC_PATTERN.findall(metrics_response.text):
            if http_status not in {"200", "400"}:
                # Count all other statuses as refused requests; 400 only means that the scores are not ready yet.
                health["refused"][http_status] = health["refused"].get(http_status, 0.0) + float(count)
    return health
