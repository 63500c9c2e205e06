"""The routes of a node: who may use them, and a request that another node answers over HTTP."""

import asyncio
from dataclasses import replace

import pytest
from server.asking import eventually, refusal
from server.fake_cluster import TOKEN, FakeCluster, app_of
from server.fakes import CARD, FakeEngine

from mlx_parallm.core.adapters import AdapterRef
from mlx_parallm.core.requests import GenerationRequest, RequestFinished, SamplingParams, SequenceOutput, StopParams
from mlx_parallm.errors import NodeFailedError, QueueTimeoutError
from mlx_parallm.extras.cluster.cards import Member, NodeInfo, NodeRole
from mlx_parallm.extras.cluster.http.remote import NodeUnreachableError, RemoteEngines
from mlx_parallm.server.address import bind
from mlx_parallm.server.run import DrainingServer

REQUEST = GenerationRequest("r", ((1, 2, 3),), SamplingParams(), StopParams(50))
JOIN = {"role": "replica", "url": "http://10.0.0.2:8000", "fingerprint": "f", "version": "1"}


SIGNED = {"authorization": f"Bearer {TOKEN}"}
ROUTES = [
    ("POST", "/v1/cluster/join"),
    ("GET", "/v1/cluster/base/config.json"),
    ("PUT", "/v1/cluster/adapters/math/1"),
    ("GET", "/v1/cluster/adapters/math/1"),
    ("POST", "/v1/cluster/generate"),
    ("POST", "/v1/cluster/sample"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("sent", [None, "", "Bearer wrong", f"Basic {TOKEN}", "Bearer é"])
async def test_nodes_need_the_token_of_the_cluster(head, method, path, sent):
    headers = {} if sent is None else {"authorization": sent.encode()}
    error = await refusal(head.request(method, path, headers=headers, content=b"{}"), 401)
    assert "token of the cluster" in error["message"]
    assert head.cluster.calls == []


async def test_the_status_has_nodes_versions_and_counts(head):
    assert (await head.get("/v1/cluster")).json() == {
        "object": "cluster",
        "node": "head",
        "connected": True,
        "nodes": [
            {
                "id": "head",
                "role": "head",
                "url": "http://10.0.0.1:8000",
                "holds": ["math@1"],
                "outstanding_tokens": 7,
                "ready": True,
                "requests": 0,
            }
        ],
        "versions": [{"name": "math", "version": 1, "sha256": "ab", "bytes": 5, "fence": 2, "live": True}],
        "unusable": {"a@1": "why"},
        "waiting": {"math": 6},
        "nodes_lost": 3,
        "requests_retried": 0,
        "streams_broken": 0,
    }


async def test_a_node_joins_and_one_with_another_base_does_not(head):
    joined = await head.post("/v1/cluster/join", json=JOIN, headers=SIGNED)
    assert joined.json()["nats_url"] == "nats://localhost:4222"
    await refusal(
        head.post("/v1/cluster/join", json={**JOIN, "fingerprint": "g"}, headers=SIGNED), 409, param="fingerprint"
    )


async def test_an_upload_has_its_checksum_and_its_fence_beside_it(head):
    headers = {**SIGNED, "x-sha256": "ab", "x-fence": "4"}
    kept = await head.put("/v1/cluster/adapters/poet/2", content=b"bytes", headers=headers)
    assert (kept.json()["name"], kept.json()["version"]) == ("poet", 2)
    assert head.cluster.calls == [(AdapterRef("poet", 2), b"bytes", "ab", 4)]
    assert (await head.put("/v1/cluster/adapters/poet/2", content=b"bytes", headers=SIGNED)).status_code == 400


# -- requests to the engine of another node ------------------------------------------------------


@pytest.fixture
async def replica(engine, adapters):
    """A node on a port, as `Member`, and what asks its engine."""
    listening = bind("127.0.0.1", 0)
    started = asyncio.Event()
    server = DrainingServer(app_of(engine, adapters, FakeCluster(routes=False)), started.set)
    task = asyncio.create_task(server.serve(sockets=[listening]))
    await started.wait()
    info = NodeInfo("replica-1", NodeRole.REPLICA, f"http://127.0.0.1:{listening.getsockname()[1]}", ready=True)
    yield Member(info, 0.0)
    server.should_exit = True
    await task


async def events_of(member, request, token=TOKEN):
    return [event async for event in RemoteEngines(token).generate(member, request)]


async def test_another_node_answers_as_the_engine_here_does(replica, engine):
    engine.text = "Grüße\n\x00"
    request = replace(REQUEST, sampling=SamplingParams(top_logprobs=2), n=2)
    alone = FakeEngine()
    alone.text = engine.text
    here = [event async for event in alone.generate(request)]
    there = await events_of(replica, request)
    outputs = [event for event in there if isinstance(event, SequenceOutput)]
    assert outputs == [
        replace(event, logprobs=tuple(replace(each, top=list(each.top)) for each in event.logprobs))
        for event in here
        if isinstance(event, SequenceOutput)
    ]
    assert engine.requests[0] == request


async def test_a_version_that_the_node_does_not_hold_is_refused_there(replica):
    with pytest.raises(NodeFailedError, match="refuses the request"):
        await events_of(replica, replace(REQUEST, adapter=AdapterRef("nobody", 1)))


async def test_another_token_is_refused_there(replica):
    with pytest.raises(NodeFailedError, match="token"):
        await events_of(replica, REQUEST, token="another")


async def test_a_request_that_is_too_long_for_the_node_is_refused_there(replica):
    with pytest.raises(NodeFailedError, match="has room for"):
        await events_of(replica, replace(REQUEST, stopping=StopParams(CARD.context_length)))


async def test_a_failure_there_arrives_with_its_kind(replica, engine):
    engine.fail_before, engine.error = 2, QueueTimeoutError("it waited")
    events = await events_of(replica, REQUEST)
    assert isinstance(events[-1].error, QueueTimeoutError)


async def test_a_node_that_is_lost_ends_the_events(replica, engine):
    engine.pause_before = 2
    events = RemoteEngines(TOKEN).generate(replica, REQUEST)
    await anext(events)
    await engine.paused.wait()
    replica.lost.set()
    with pytest.raises(NodeFailedError, match="is lost"):
        [event async for event in events]
    await until_idle(engine)


@pytest.fixture
def quick_beats(monkeypatch):
    for module in ("remote", "route"):
        monkeypatch.setattr(f"mlx_parallm.extras.cluster.http.{module}.BEAT_S", 0.05)


async def test_a_node_whose_packets_do_not_arrive_any_more_ends_the_events(quick_beats):
    """NATS still hears it, and its connection stays open."""

    async def answer(reader, writer):
        writer.write(b'HTTP/1.0 200 OK\r\n\r\n{"clock": 1.0}\n\n')
        await reader.read()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as silent, asyncio.timeout(10):
        url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        with pytest.raises(NodeUnreachableError, match="nothing has come from node replica-1"):
            await events_of(Member(NodeInfo("replica-1", NodeRole.REPLICA, url, ready=True), 0.0), REQUEST)


async def test_a_node_that_computes_for_long_is_not_taken_for_a_silent_one(replica, engine, quick_beats):
    engine.pause_before = 2
    asking = asyncio.create_task(events_of(replica, REQUEST))
    await engine.paused.wait()
    await asyncio.sleep(0.5)
    assert not asking.done()
    engine.go_on.set()
    assert isinstance((await asking)[-1], RequestFinished)


async def test_closing_the_events_ends_the_request_there(replica, engine):
    engine.pause_before = 2
    events = RemoteEngines(TOKEN).generate(replica, REQUEST)
    await anext(events)
    await engine.paused.wait()
    await events.aclose()
    await until_idle(engine)
    assert engine.aborted == 1


async def until_idle(engine):
    async with asyncio.timeout(10):
        await eventually(lambda: not engine.live)


async def test_nothing_at_the_address_is_a_failure():
    info = NodeInfo("replica-1", NodeRole.REPLICA, "http://127.0.0.1:9", ready=True)
    with pytest.raises(NodeFailedError, match="replica-1"):
        await events_of(Member(info, 0.0), REQUEST)


async def test_of_a_program_between_that_knows_no_such_answer_its_status_is_the_reason():
    async def refuse(reader, writer):
        await reader.readline()
        writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Type: text/html\r\n\r\n<html></html>")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as proxy:
        url = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        with pytest.raises(NodeFailedError, match="502 Bad Gateway"):
            await events_of(Member(NodeInfo("replica-1", NodeRole.REPLICA, url, ready=True), 0.0), REQUEST)


async def test_a_server_that_is_no_node_says_how_to_make_it_one(client):
    error = await refusal(client.get("/v1/cluster"), 409)
    assert "--share-model" in error["message"]
