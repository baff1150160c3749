"""Blocks of Prefect that pipelines name: a reward service that runs already, and its token.

`cosmos bootstrap` registers the type; a block of it is filled in Prefect's UI, or by `RewardService(...).save(NAME)`,
and a stage says `reward_service = "block:NAME"`. Prefect keeps the token encrypted; here it goes from there into the
environment of the stage's worker, and nowhere else.
"""

from __future__ import annotations

from typing import Any

import httpx
from prefect.blocks.core import Block
from pydantic import Field, SecretStr

from cosmos_core.config.schema.pipeline import BLOCK
from cosmos_core.errors import ConfigError, StageFailed
from cosmos_core.launch.service_health import ENQUEUE_URL, FETCH_URL, TOKEN

SLUG = "cosmos-reward-service"
_PATHS = {ENQUEUE_URL: "enqueue", FETCH_URL: "pull"}


class RewardService(Block):
    """A reward service that runs already."""

    _block_type_name = "Cosmos reward service"
    _block_type_slug = SLUG
    _description = 'Where a reward service is, and its token; a stage says reward_service = "block:NAME".'

    url: str = Field(description="http://HOST:PORT; several replicas: separated by commas.")
    token: SecretStr = Field(default=SecretStr(""), description="Its bearer token; empty: it asks for none.")

    def environment(self) -> dict[str, str]:
        """Return the variables by which a client finds the service."""
        urls = [url.strip().rstrip("/") for url in self.url.split(",") if url.strip()]
        paths = {name: ",".join(f"{url}/api/reward/{path}" for url in urls) for name, path in _PATHS.items()}
        return {**paths, TOKEN: self.token.get_secret_value()}


def service_in_block(name: str) -> dict[str, str]:
    """Return the variables by which clients find the service of the block `block:NAME`.

    Raises:
        ConfigError: there is no such block, no server, or no address in it; or the server refuses us.
        StageFailed: the server does not respond, which may pass.
    """
    from prefect.client.orchestration import get_client
    from prefect.settings import get_current_settings

    own = name.removeprefix(BLOCK)
    if not get_current_settings().api.url:
        raise ConfigError(f"reward_service = {name!r}: PREFECT_API_URL is not set; blocks are kept by a Prefect server")
    try:
        with get_client(sync_client=True) as client:
            found = read_service(client, own)
    except Exception as error:  # whatever the client's transport raises, and what it wraps that in
        cause = error.__cause__ if isinstance(error, RuntimeError) else error
        is_refusal = isinstance(cause, httpx.HTTPStatusError) and cause.response.is_client_error
        kind = StageFailed if isinstance(cause, httpx.HTTPError) and not is_refusal else ConfigError
        raise kind(f"reward_service = {name!r}: the Prefect server does not tell: {error}") from error
    if found is None:
        raise ConfigError(
            f"reward_service = {name!r}: the server has no block {SLUG}/{own}; make it in Prefect's UI (cosmos "
            f"bootstrap registers its type)"
        )
    if not found[ENQUEUE_URL].startswith(("http://", "https://")):
        raise ConfigError(f"reward_service = {name!r}: its url is no http:// or https:// address")
    return found


def read_service(client: Any, name: str) -> dict[str, str] | None:
    """Return the variables of the service that a block of this name has; None: there is no such block."""
    from prefect.exceptions import ObjectNotFound

    try:
        document = client.read_block_document_by_name(name, SLUG)
    except ObjectNotFound:
        return None
    return RewardService(**document.data).environment()


def forget_service(client: Any, name: str) -> None:
    """Delete the block of this name, if there is one."""
    from prefect.exceptions import ObjectNotFound

    try:
        client.delete_block_document(client.read_block_document_by_name(name, SLUG).id)
    except ObjectNotFound:
        return
