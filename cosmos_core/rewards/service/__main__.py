"""Program `python -m cosmos_core.rewards.service`, which the command `cosmos reward-service` runs."""

import argparse
import asyncio
import logging
import signal
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import uvicorn

from cosmos_core.environment import mask_secrets
from cosmos_core.errors import EXIT_CRASH, EXIT_OK, CosmosError
from cosmos_core.rewards.service.app import HttpInterface
from cosmos_core.rewards.service.config import ServiceConfig, read_config
from cosmos_core.rewards.service.connection import ConnectionWithTimeout
from cosmos_core.rewards.service.engine import Engine
from cosmos_core.run.files import write_text

log = logging.getLogger("cosmos.rewards")


def main() -> int:
    """Run the reward service until a signal ends it, or with `--self-test` test each reward; return the exit code."""
    parser = argparse.ArgumentParser(prog="cosmos reward-service", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("--ready", type=Path, help="file that gets the URL once requests are taken")
    cli_arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    mask_secrets()
    try:
        config = read_config(cli_arguments.config, host=cli_arguments.host, port=cli_arguments.port)
        if cli_arguments.self_test:
            from cosmos_core.rewards.service.self_test import self_test

            return asyncio.run(self_test(config))
        return asyncio.run(serve(config, cli_arguments.ready))
    except CosmosError as error:
        sys.stderr.write(f"cosmos: {error}\n")
        return error.exit_code


async def serve(config: ServiceConfig, ready_file: Path | None = None) -> int:
    """Run the HTTP server of the reward service until a signal, then finish the accepted requests; return the exit
    code. The URL of the service is written to `ready_file` when the service accepts requests."""
    token = config.read_token()
    for setting in config.ineffective_settings:
        log.warning("%s has no effect in this service", setting)
    engine = Engine(config)
    http_interface = HttpInterface(engine, token)
    server = _Server(
        uvicorn.Config(
            http_interface.build_app(), config.host, config.port, access_log=False, log_config=None,
            timeout_keep_alive=30, server_header=False, timeout_graceful_shutdown=5, lifespan="off", backlog=512,
            http=ConnectionWithTimeout, ws="none",
        ),
        engine,
    )  # fmt: skip
    server_task = asyncio.create_task(server.serve())
    try:
        start_task = asyncio.create_task(engine.start())
        await asyncio.wait({server_task, start_task}, return_when=asyncio.FIRST_COMPLETED)
        if start_task.done():
            start_task.result()
        else:
            start_task.cancel()
        if not server_task.done():
            while not server.started and not server_task.done():
                await asyncio.sleep(0.01)
            _announce_url(server, config, ready_file)
        await server_task
    finally:
        server.should_exit = True
        await asyncio.gather(server_task, return_exceptions=True)
        await engine.close()
    return EXIT_OK if server.started else EXIT_CRASH


def _announce_url(server: uvicorn.Server, config: ServiceConfig, ready_file: Path | None) -> None:
    port = server.servers[0].sockets[0].getsockname()[1]
    host = {"0.0.0.0": "127.0.0.1", "localhost": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    host_in_url = f"[{host.strip('[]')}]" if ":" in host else host
    url = f"http://{host_in_url}:{port}"
    log.info("rewards %s are served at %s", ", ".join(reward.reward_type for reward in config.rewards), url)
    if ready_file:
        write_text(ready_file, url, fsync=False)


class _Server(uvicorn.Server):
    """HTTP server of the reward service. After a signal it continues until the accepted requests are finished; a second
    signal ends it at once."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self._engine, self._event_loop = engine, asyncio.get_running_loop()
        self._drain_future: Future[None] | None = None

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Finish the accepted requests after the first signal, and exit then; exit at once after a second signal.
        uvicorn calls this method on a signal."""
        if self._drain_future is None and self.started:
            log.info("%s: finishing %d requests", signal.Signals(sig).name, len(self._engine.pending_requests))
            self._drain_future = asyncio.run_coroutine_threadsafe(self._drain_and_exit(), self._event_loop)
        else:
            self.should_exit = self.force_exit = True

    async def _drain_and_exit(self) -> None:
        await self._engine.drain()
        self.should_exit = True


if __name__ == "__main__":
    sys.exit(main())
