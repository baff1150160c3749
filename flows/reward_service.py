"""Flow `reward-service`: serve rewards for one stage, on the work pool of this flow, until the stage ends."""

import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit
from uuid import UUID

import httpx
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import TERMINAL_STATES
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings
from pydantic import SecretStr

from cosmos_core.launch.blocks import RewardService, delete_service_block, read_service_variables
from cosmos_core.launch.managed_service import managed_reward_service
from cosmos_core.launch.service_health import ENQUEUE_URL_VARIABLE, TOKEN_VARIABLE
from tasks.naming import flow_run_name

_POLL_SECONDS = 2.0
_MAX_UNREACHABLE_SECONDS = 600.0


@flow(name="reward-service", flow_run_name=flow_run_name)
def reward_service(config: str, block: str, of_flow_run: str = "") -> None:
    """Serve rewards until the Prefect block with the address is deleted, or the flow run of the stage has ended.

    Args:
        config: Configuration of the service, a TOML file that this pool's machines see
        block: Name of the block to create, with address and token
        of_flow_run: Flow run of the stage; empty: the service ends only when the block is deleted
    """
    with (
        tempfile.TemporaryDirectory(prefix="cosmos-rewards-") as folder,
        managed_reward_service(config, Path(folder), host=_get_local_address()) as service_variables,
        get_client(sync_client=True) as prefect_client,
    ):
        service_url = service_variables[ENQUEUE_URL_VARIABLE].partition("/api/")[0]
        RewardService(url=service_url, token=SecretStr(service_variables[TOKEN_VARIABLE])).save(block, overwrite=True)
        try:
            _wait_until_service_unneeded(partial(_is_service_needed, prefect_client, block, of_flow_run))
        finally:
            # Delete the block in any case, because the flow run of the stage may have been killed before it did so.
            with suppress(httpx.HTTPError):
                delete_service_block(prefect_client, block)


def _wait_until_service_unneeded(is_still_needed: Callable[[], bool]) -> None:
    """Wait until `is_still_needed` returns False, or until the Prefect server has not responded for ten minutes."""
    last_response_time = time.monotonic()
    while time.monotonic() - last_response_time < _MAX_UNREACHABLE_SECONDS:
        with suppress(httpx.HTTPError):
            if not is_still_needed():
                return
            last_response_time = time.monotonic()
        time.sleep(_POLL_SECONDS)


def _is_service_needed(prefect_client: SyncPrefectClient, block: str, of_flow_run: str) -> bool:
    try:
        if read_service_variables(prefect_client, block) is None:
            return False
        return not of_flow_run or prefect_client.read_flow_run(UUID(of_flow_run)).state_type not in TERMINAL_STATES
    except ObjectNotFound:  # the flow run that used the service was deleted
        return False


def _get_local_address() -> str:
    """Return the IP address of this machine in the network of the Prefect server."""
    server_url = urlsplit(get_current_settings().api.url or "http://127.0.0.1:4200/api")
    host, port = server_url.hostname or "127.0.0.1", server_url.port or 443
    address_infos = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    address_family, *_, address = min(address_infos, key=lambda info: info[0] != socket.AF_INET)  # prefer IPv4 to IPv6
    with socket.socket(address_family, socket.SOCK_DGRAM) as probe_socket:  # connecting a UDP socket sends nothing
        probe_socket.connect(address)
        return str(probe_socket.getsockname()[0])
