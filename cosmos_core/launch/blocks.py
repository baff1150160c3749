"""Prefect block for a reward service that is already running, with its URL and token.

`cosmos bootstrap` registers the block type. A block is created in Prefect's UI or with `RewardService(...).save(NAME)`,
and a stage refers to it by `reward_service = "block:NAME"`. Prefect stores the token encrypted; this module copies it
only into the environment of the stage's worker.
"""

from contextlib import suppress
from typing import Any

import httpx
from prefect.blocks.core import Block
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings
from pydantic import Field, SecretStr

from cosmos_core.config.schema.pipeline import BLOCK_PREFIX
from cosmos_core.errors import ConfigError, StageFailed
from cosmos_core.launch.service_health import ENQUEUE_URL_VARIABLE, FETCH_URL_VARIABLE, TOKEN_VARIABLE

BLOCK_SLUG = "cosmos-reward-service"
_API_PATHS = {ENQUEUE_URL_VARIABLE: "enqueue", FETCH_URL_VARIABLE: "pull"}


class RewardService(Block):
    """Prefect block with the address of a reward service that is already running."""

    _block_type_name = "Cosmos reward service"
    _block_type_slug = BLOCK_SLUG
    _description = 'Where a reward service is, and its token; a stage says reward_service = "block:NAME".'

    url: str = Field(description="http://HOST:PORT; several replicas: separated by commas.")
    token: SecretStr = Field(default=SecretStr(""), description="Its bearer token; empty: it asks for none.")

    def environment(self) -> dict[str, str]:
        """Return the environment variables that tell a client the address and token of this block's reward service."""
        urls = [url.strip().rstrip("/") for url in self.url.split(",") if url.strip()]
        service_urls = {name: ",".join(f"{url}/api/reward/{path}" for url in urls) for name, path in _API_PATHS.items()}
        return {**service_urls, TOKEN_VARIABLE: self.token.get_secret_value()}


def load_service_variables(name: str) -> dict[str, str]:
    """Return the environment variables that tell clients the address and token of the service in the Prefect block
    `block:NAME`. Raises `ConfigError` if no Prefect server is configured, the block or its address is missing, or the
    server refuses the request, and `StageFailed` if the server does not respond, which can be transient."""
    block_name = name.removeprefix(BLOCK_PREFIX)
    if not get_current_settings().api.url:
        raise ConfigError(f"reward_service = {name!r}: PREFECT_API_URL is not set; blocks are kept by a Prefect server")
    try:
        with get_client(sync_client=True) as prefect_client:
            service_variables = read_service_variables(prefect_client, block_name)
    except Exception as error:  # Prefect's client raises errors of many types, some wrapped in RuntimeError
        root_cause = error.__cause__ if isinstance(error, RuntimeError) else error
        is_client_error = isinstance(root_cause, httpx.HTTPStatusError) and root_cause.response.is_client_error
        error_class = StageFailed if isinstance(root_cause, httpx.HTTPError) and not is_client_error else ConfigError
        raise error_class(f"reward_service = {name!r}: the Prefect server does not tell: {error}") from error
    if service_variables is None:
        raise ConfigError(
            f"reward_service = {name!r}: the server has no block {BLOCK_SLUG}/{block_name}; make it in Prefect's UI "
            f"(cosmos bootstrap registers its type)"
        )
    if not service_variables[ENQUEUE_URL_VARIABLE].startswith(("http://", "https://")):
        raise ConfigError(f"reward_service = {name!r}: its url is no http:// or https:// address")
    return service_variables


def read_service_variables(prefect_client: Any, block_name: str) -> dict[str, str] | None:
    """Return the environment variables for clients of the reward service in a Prefect block; None: no such block."""
    try:
        block_document = prefect_client.read_block_document_by_name(block_name, BLOCK_SLUG)
    except ObjectNotFound:
        return None
    return RewardService(**block_document.data).environment()


def delete_service_block(prefect_client: Any, block_name: str) -> None:
    """Delete the Prefect block `block_name` of the type `RewardService`, if it exists."""
    with suppress(ObjectNotFound):
        prefect_client.delete_block_document(prefect_client.read_block_document_by_name(block_name, BLOCK_SLUG).id)
