"""Membership of this machine, such as the pod of a stage, in the Ray cluster at `RAY_ADDRESS`.

A Ray driver connects to a raylet on its own machine and to every actor, so it cannot run outside of the cluster. This
module adds the machine as a node with 0 CPUs and 0 GPUs, so that ranks and engines run on other nodes. The access token
of the cluster comes from the environment (`RAY_AUTH_MODE=token`, `RAY_AUTH_TOKEN` or `RAY_AUTH_TOKEN_PATH`).
"""

import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from cosmos_core.environment import mask_text
from cosmos_core.errors import StageFailed

logger = logging.getLogger(__name__)
# Maximum seconds for the node to start, and to end; Ray drains an ending node for up to 30 seconds.
_NODE_START_TIMEOUT_SECONDS, _NODE_EXIT_TIMEOUT_SECONDS = 120.0, 40.0
_OBJECT_STORE_BYTES = 128 << 20
_GCS_ADDRESS_FLAG = "--gcs-address="


def is_cluster_node(address: str) -> bool:
    """Return True if this machine runs a raylet of the Ray cluster with the address `host:port`."""
    cluster_address = _resolve_address(address)
    local_addresses = {each.address for interface in psutil.net_if_addrs().values() for each in interface}
    if cluster_address[0].startswith("127.") or cluster_address[0] in local_addresses:
        # The address of the cluster is an address of this machine, so this machine is its head node.
        return True
    argv_items = (each for process in psutil.process_iter(["cmdline"]) for each in process.info["cmdline"] or ())
    gcs_addresses = (each.removeprefix(_GCS_ADDRESS_FLAG) for each in argv_items if each.startswith(_GCS_ADDRESS_FLAG))
    return any(_resolve_address(raylet_address) == cluster_address for raylet_address in gcs_addresses)


@contextmanager
def join_cluster(has_joined: Callable[[str], bool] = is_cluster_node) -> Iterator[None]:
    """Add this machine as a node to the Ray cluster at `RAY_ADDRESS` for the duration of a `with` block. Do nothing if
    `has_joined`, called with the address, returns True: then the machine is in the cluster already. Raises
    `StageFailed` if the machine cannot join."""
    address = os.environ.get("RAY_ADDRESS", "")
    # An address such as `auto` (a cluster on this machine) or `ray://HOST:PORT` (Ray Client) needs no local node.
    if ":" not in address or "://" in address or has_joined(address):
        yield
        return
    start_command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={address}", "--num-cpus=0", "--num-gpus=0",
        f"--object-store-memory={_OBJECT_STORE_BYTES}", "--disable-usage-stats", "--block",
    ]  # fmt: skip
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    with tempfile.TemporaryFile() as output_file:
        node_process = subprocess.Popen(start_command, env=environment, stdout=output_file, stderr=subprocess.STDOUT)
        try:
            _wait_until_running(node_process, output_file, address)
            yield
        finally:
            node_process.terminate()
            try:
                node_process.wait(_NODE_EXIT_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                node_process.kill()
                node_process.wait()


def _wait_until_running(node_process: subprocess.Popen[bytes], output_file: Any, address: str) -> None:
    deadline = time.monotonic() + _NODE_START_TIMEOUT_SECONDS
    while True:
        output_file.seek(0)
        output_text = output_file.read().decode(errors="replace")
        if "Ray runtime started" in output_text:
            logger.info("this machine is a node of the Ray cluster at %s, without CPUs and GPUs", address)
            return
        if node_process.poll() is not None or time.monotonic() > deadline:
            output_lines = [line.strip() for line in output_text.splitlines() if line.strip()] or ["it says nothing"]
            raise StageFailed(
                f"RAY_ADDRESS = {address!r}: this machine cannot join the cluster: "
                f"{mask_text(output_lines[-1])[:300]}; its network, its version of Ray and Python, and RAY_AUTH_MODE "
                f"and RAY_AUTH_TOKEN must be the cluster's"
            )
        time.sleep(0.1)


def _resolve_address(address: str) -> tuple[str, str]:
    """Return host and port of an address `host:port`, with the host resolved to an IP address if possible."""
    host_name, _, port = address.rpartition(":")
    host_name = host_name.strip("[]")  # remove the brackets, which an IPv6 address needs only before a port
    try:
        return socket.gethostbyname(host_name), port
    except OSError:
        return host_name, port
