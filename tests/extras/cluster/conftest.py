"""One NATS server for the tests of a module."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from mlx_parallm.extras.cluster.connection import Connection, NatsAddress, connect
from mlx_parallm.extras.cluster.nats_server import NatsServer, nats_server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nats(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NatsServer]:
    async with nats_server(tmp_path_factory.mktemp("nats"), "127.0.0.1") as server:
        yield server


def address_of(server: NatsServer) -> NatsAddress:
    return NatsAddress(server.url, server.listening.token)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def connection(nats: NatsServer) -> AsyncIterator[Connection]:
    async with connect(address_of(nats), "test") as opened:
        yield opened
