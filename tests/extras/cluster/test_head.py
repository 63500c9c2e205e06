"""The head over a real NATS server: who may join, what it keeps, and when a version goes live."""

import asyncio
import hashlib
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from extras.cluster.test_archive import CONFIG as ADAPTER_CONFIG
from extras.cluster.test_archive import GOOD, WEIGHTS, file, tar
from extras.cluster.test_follower import Adapters, until

from mlx_parallm import __version__
from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.errors import ConflictError, InvalidRequestError, StorageError, UnknownModelError
from mlx_parallm.extras.cluster.cards import BaseFile, Joining, Member, NodeInfo, NodeRole, SharedBase, SharedVersion
from mlx_parallm.extras.cluster.head import HeadSettings, head
from mlx_parallm.extras.cluster.head_client import HeadClient, HeadUnreachableError
from mlx_parallm.extras.cluster.node import NodeReport, id_of, running
from mlx_parallm.extras.cluster.publisher import Publisher
from mlx_parallm.extras.cluster.replica import Replica
from mlx_parallm.extras.cluster.versions import Versions

CONFIG = b'{"model_type": "llama"}'
OTHER = tar(file(ADAPTER_CONFIG), file(WEIGHTS, b"y"))
SUM = hashlib.sha256(GOOD).hexdigest()
REF = AdapterRef("math", 3)
NODE = NodeInfo("replica-1", NodeRole.REPLICA, "http://127.0.0.1:9", ready=True)


@pytest.fixture
async def node(tmp_path):
    base = tmp_path / "base"
    (base / "images").mkdir(parents=True)
    (base / "config.json").write_bytes(CONFIG)
    (base / ".cache").write_bytes(b"no part of the model")
    settings = HeadSettings(tmp_path / "head", SharedBase("tiny", "f1"), base, "127.0.0.1")
    async with head(settings, Adapters()) as started:
        yield started


def joining(fingerprint=None, version=__version__):
    return Joining(NodeRole.REPLICA, "http://127.0.0.1:9", fingerprint, version)


async def test_a_node_gets_the_base_model_unless_it_has_it(node):
    joined = await node.join(joining(), "::1")
    assert joined.base.files == (BaseFile("config.json", len(CONFIG), hashlib.sha256(CONFIG).hexdigest()),)
    assert joined.nats_url.startswith("nats://[::1]:")
    assert (await node.base_file("config.json")).read_bytes() == CONFIG
    for no_file in ("images", ".cache", "../head/token", "other"):
        with pytest.raises(InvalidRequestError):
            await node.base_file(no_file)
    assert (await node.join(joining("f1"), "127.0.0.1")).base == SharedBase("tiny", "f1")
    with pytest.raises(ConflictError, match="start it without --model-path"):
        await node.join(joining("f2"), "127.0.0.1")
    with pytest.raises(ConflictError, match="install the same"):
        await node.join(joining("f1", "0.0.1"), "127.0.0.1")


async def test_a_replica_that_joins_again_from_another_network_says_where_it_is_now(tmp_path):
    """Meanwhile it serves its own clients: finding out may take as long as a name is looked for."""
    places = iter(["http://10.0.0.5:8000", "http://10.0.0.5:8000", "http://192.168.1.7:8000"])
    urls, found = [], threading.Event()

    def where():
        assert not urls or found.wait(10)
        return next(places)

    async def join(joining):
        urls.append(joining.url)
        asyncio.get_running_loop().call_later(0.6, found.set)  # after the pause before it joins again
        raise HeadUnreachableError("the network is another one")

    client = SimpleNamespace(join=join)
    replica = Replica(client, "f1", "secret", Adapters(), tmp_path)
    replica.serve(where, lambda: NodeReport(ready=True, outstanding_tokens=0))
    first = replica.id
    async with running(replica.run()):
        await until(lambda: len(urls) == 2)
    assert urls == ["http://10.0.0.5:8000", "http://192.168.1.7:8000"]
    assert replica.id == id_of(NodeRole.REPLICA, urls[1]) != first


async def test_what_is_uploaded_is_kept_until_a_trainer_with_an_older_lease_sends_more(node):
    version = await node.put_adapter(REF, GOOD, SUM, fence=5)
    assert version == SharedVersion("math", 3, SUM, len(GOOD), 5)
    assert (await node.adapter_file(REF)).read_bytes() == GOOD
    assert await node.fetch(version) == GOOD
    with pytest.raises(UnknownModelError):
        await node.adapter_file(AdapterRef("math", 4))
    with pytest.raises(ConflictError, match="another content"):
        await node.put_adapter(REF, OTHER, hashlib.sha256(OTHER).hexdigest(), fence=5)
    assert await node.fetch(version) == GOOD
    await node._versions.go_live(version, None)
    await until(lambda: "math" in node.follower.state.live)
    with pytest.raises(ConflictError, match="lost its lease"):
        await node.put_adapter(AdapterRef("math", 4), GOOD, SUM, fence=4)


async def test_an_upload_that_failed_before_its_end_does_not_take_the_number_of_its_version(node, monkeypatch):
    async def fails(version):
        raise StorageError("NATS stands still")

    with monkeypatch.context() as patch:
        patch.setattr(node._versions, "stage", fails)
        with pytest.raises(StorageError):
            await node.put_adapter(REF, OTHER, hashlib.sha256(OTHER).hexdigest(), fence=5)
    version = await node.put_adapter(REF, GOOD, SUM, fence=6)
    assert await node.fetch(version) == GOOD


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("patient", [True, False])
async def test_a_version_goes_live_when_the_nodes_hold_it_or_after_some_time(connection, caplog, patient):
    name = f"math-{patient}"
    version, members = SharedVersion(name, 1, SUM, len(GOOD)), [Member(NODE, 0.0)]
    await Versions(connection).stage(version)
    seen = SimpleNamespace(present=lambda: members)
    publisher = Publisher(None, Versions(connection), seen, patience_s=60.0 if patient else 0.05)
    publishing = asyncio.create_task(publisher.make_live(version, None))
    if patient:
        await asyncio.sleep(0.3)
        assert await Versions(connection).live(name) is None
        members[0] = Member(replace(NODE, holds=(f"{name}@1",)), 0.0)
    assert (await publishing).version == version
    assert ("missing on replica-1" in caplog.text) is not patient


async def test_a_head_that_stands_still_is_asked_again_unless_it_reads_a_base_model(monkeypatch):
    monkeypatch.setattr("mlx_parallm.extras.cluster.head_client._SILENT_S", 0.1)

    async def silent(reader, writer):
        await reader.read()
        writer.close()

    standing = await asyncio.start_server(silent, "127.0.0.1", 0)
    address = f"127.0.0.1:{standing.sockets[0].getsockname()[1]}"
    async with standing, HeadClient(address, "secret") as client:
        with pytest.raises(HeadUnreachableError):
            await client.join(joining("f1"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await client.join(joining())
