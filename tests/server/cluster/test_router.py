"""Which node answers a request, and what its client sees when that node fails."""

import asyncio
import time
from contextlib import aclosing
from dataclasses import replace

import pytest
from server.fakes import FakeEngine

from mlx_parallm.core.adapters import BASE_ADAPTER, AdapterRef
from mlx_parallm.core.requests import (
    GenerationRequest,
    RequestFailed,
    RequestFinished,
    RequestStarted,
    SamplingParams,
    SequenceOutput,
    StopParams,
)
from mlx_parallm.errors import InvalidRequestError, NodeFailedError, QueueTimeoutError
from mlx_parallm.extras.cluster.cards import Member, NodeInfo, NodeRole
from mlx_parallm.extras.cluster.http.counted import CountedEngine, tokens_of
from mlx_parallm.extras.cluster.http.remote import NodeUnreachableError
from mlx_parallm.extras.cluster.http.router import RoutedEngine

MATH = AdapterRef("math", 1)
REQUEST = GenerationRequest("r", ((1, 2, 3),), SamplingParams(), StopParams(5), adapter=MATH)


class Nodes:
    """The other nodes, as the cluster and as their engines. `fails`: by node, the error after so many events."""

    routes, token = True, "secret"

    def __init__(self, *names):
        infos = [NodeInfo(name, NodeRole.REPLICA, f"http://{name}", ready=True) for name in names]
        self.members = {info.id: Member(info, 0.0) for info in infos}
        self.engines = {name: FakeEngine() for name in names}
        self.holders = set(names)
        self.fails = {}
        self.asked = []

    def others_with(self, ref):
        return tuple(m for name, m in self.members.items() if ref == BASE_ADAPTER or name in self.holders)

    async def generate(self, member, request):
        name, sent = member.info.id, 0
        self.asked.append(name)
        after, error = self.fails.get(name, (None, None))
        async with aclosing(self.engines[name].generate(request)) as events:
            async for event in events:
                if sent == after:
                    if isinstance(error, NodeFailedError):
                        raise error
                    yield RequestFailed(error)
                    return
                sent += 1
                yield event


@pytest.fixture
def nodes():
    return Nodes("a", "b")


@pytest.fixture
def own():
    return FakeEngine()


@pytest.fixture
def routed(nodes, own):
    return RoutedEngine(CountedEngine(own), nodes, nodes, "base")


async def events_of(engine, request):
    events = [event async for event in engine.generate(request)]
    assert sum(isinstance(event, RequestStarted) for event in events) <= 1
    assert [isinstance(event, RequestFinished | RequestFailed) for event in events].index(True) == len(events) - 1
    return events


def requests_for(prompts, **fields):
    return [replace(REQUEST, request_id=str(at), prompts=(prompt,), **fields) for at, prompt in enumerate(prompts)]


def text_of(events):
    return "".join(event.text for event in events if isinstance(event, SequenceOutput))


async def all_at_once(routed, requests):
    return await asyncio.gather(*(events_of(routed, request) for request in requests))


async def test_requests_go_to_the_nodes_with_the_least_to_do(routed, nodes, own):
    await all_at_once(routed, requests_for((number,) * 3 for number in range(30)))
    assert [len(engine.requests) for engine in (own, *nodes.engines.values())] == [10, 10, 10]
    assert routed.load.tokens == 0


async def test_requests_that_begin_alike_meet_while_the_nodes_have_little_to_do(routed, nodes, own):
    for request in requests_for((7,) * 300 + (number,) for number in range(8)):
        await events_of(routed, request)
    assert sorted(len(engine.requests) for engine in (own, *nodes.engines.values())) == [0, 0, 8]


async def test_what_a_node_says_of_its_own_clients_counts(routed, nodes, own):
    for member in nodes.members.values():
        member.info = replace(member.info, outstanding_tokens=10_000)
    await events_of(routed, REQUEST)
    assert (len(own.requests), nodes.asked) == (1, [])


async def test_only_nodes_that_hold_the_version_answer(routed, nodes, own):
    nodes.holders = set()
    await all_at_once(routed, requests_for((number,) for number in range(9)))
    assert (len(own.requests), nodes.asked) == (9, [])


@pytest.mark.parametrize("change", [{"pooling": object()}, {"base": "another-model"}])
async def test_what_cannot_travel_is_answered_here(routed, nodes, own, change):
    await all_at_once(routed, requests_for(((number,) for number in range(9)), **change))
    assert (len(own.requests), nodes.asked) == (9, [])


async def ask_a_node(routed, own, request):
    """The events of a request that is not sent to the head's own engine first."""
    with routed.load.of(10_000):
        return await events_of(routed, request)


async def test_a_node_that_cannot_be_reached_is_left_out_for_a_while_and_one_that_refuses_is_not(
    routed, nodes, own, monkeypatch
):
    nodes.fails = {"a": (0, NodeUnreachableError("no route")), "b": (0, NodeFailedError("it is full"))}
    await ask_a_node(routed, own, REQUEST)
    await ask_a_node(routed, own, REQUEST)
    assert sorted(nodes.asked) == ["a", "b", "b"]
    nodes.fails, later = {}, time.monotonic() + 10
    monkeypatch.setattr("time.monotonic", lambda: later)
    await all_at_once(routed, requests_for((number,) * 3 for number in range(30)))
    assert [len(engine.requests) for engine in nodes.engines.values()] == [11, 12]


@pytest.mark.parametrize("error", [NodeFailedError("a is lost"), QueueTimeoutError("it waited")])
async def test_a_request_begins_anew_elsewhere_until_its_first_output(routed, nodes, own, error):
    nodes.fails = {"a": (1, error), "b": (1, error)}
    events = await ask_a_node(routed, own, REQUEST)
    assert text_of(events) == "Hi ä!"[:4]
    assert sorted(nodes.asked) == ["a", "b"]
    assert (routed.counts.retried, routed.counts.broken) == (2, 0)


async def test_a_stream_that_has_begun_ends_in_one_error(routed, nodes, own):
    nodes.fails = {name: (3, NodeFailedError("lost")) for name in nodes.members}
    events = await ask_a_node(routed, own, REQUEST)
    assert text_of(events) == "Hi"
    assert isinstance(events[-1].error, NodeFailedError)
    assert (len(nodes.asked), routed.counts.retried, routed.counts.broken) == (1, 0, 1)


async def test_an_answer_that_nobody_reads_before_its_end_begins_anew_until_then(routed, nodes, own):
    nodes.fails = {name: (5, NodeFailedError("lost")) for name in nodes.members}
    events = await ask_a_node(routed, own, replace(REQUEST, whole=True))
    assert text_of(events) == text_of(await events_of(FakeEngine(), REQUEST))
    assert (len(nodes.asked), routed.counts.retried, routed.counts.broken) == (2, 2, 0)


async def test_an_error_that_is_the_clients_own_is_not_tried_elsewhere(routed, nodes, own):
    nodes.fails = {name: (1, InvalidRequestError("it can never fit")) for name in nodes.members}
    events = await ask_a_node(routed, own, REQUEST)
    assert str(events[-1].error) == "it can never fit"
    assert len(nodes.asked) == 1


async def test_a_client_that_goes_ends_its_request_there_and_frees_its_load(routed, nodes, own):
    with routed.load.of(10_000):
        events = routed.generate(REQUEST)
        async for event in events:
            if isinstance(event, SequenceOutput):
                break
        (node,) = nodes.asked
        assert routed._sent[node].tokens == tokens_of(REQUEST)
        await events.aclose()
    assert routed._sent[node].tokens == 0
    assert nodes.engines[node].aborted == 1


async def test_an_answer_that_ends_too_soon_is_a_failure(routed, nodes, own):
    for engine in nodes.engines.values():
        engine._finished = lambda request, tokens: SequenceOutput(0, (), "")
    events = await ask_a_node(routed, own, REQUEST)
    assert isinstance(events[-1].error, NodeFailedError)
