"""What the router of a head adds to an answer: time, memory, and the throughput of more nodes.

Engines are paced, so that the processor time of a model hides nothing.
"""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.lib.cluster.nodes import Nodes, Paced, cluster, node
from benchmarks.lib.figures import percentile
from benchmarks.lib.load import Body, Load, Stream, closed_loop, greedy
from benchmarks.lib.machine import resident_bytes
from benchmarks.lib.peers import Peer

STREAMS, TOKENS, PACE_S, ROUNDS = 64, 48, 0.1, 3
"""Streams at a time, tokens of each, seconds between two of them, and streams one after another."""
RATE_ROWS, RATE_CLIENTS, RATE_REQUESTS, RATE_TOKENS, RATE_PACE_S = 8, 12, 96, (16, 48), 0.05
"""Of each engine, in the comparison of one with several. Answers differ in length, or rows would end in step."""


@dataclass(slots=True)
class Delays:
    """Seconds from a request to its first token, less the pace; and from the making of each token to its arrival."""

    first: list[float] = field(default_factory=list)
    each: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Added:
    """What a router adds, in seconds, in one pair of runs."""

    first_median: float
    first_p99: float
    each_median: float
    each_p99: float


class TimedStream(Stream):
    """A stream whose tokens are the times at which they were made."""

    def __init__(self, port: int, body: Body) -> None:
        super().__init__(port, body)
        self.delays: list[float] = []

    def _take(self, event: Body, now: float) -> None:
        super()._take(event, now)
        text = "".join(str(choice.get("text") or "") for choice in event["choices"])
        self.delays += [now - float(made) for made in text.split()]


async def added(model: Path, folder: Path, repeats: int) -> list[Added]:
    """Streams through the head of a cluster with one replica, and streams to that replica, in turns."""
    async with cluster(model, 1, folder, Paced(PACE_S, STREAMS, passes_on=True)) as nodes:
        (replica,) = nodes.replicas
        for peer in (nodes.head, replica):
            await _streams(peer)  # the first requests open connections
        return [_difference(await _streams(nodes.head), await _streams(replica)) for _ in range(repeats)]


async def memory(model: Path, folder: Path) -> float:
    """How many bytes a head with one replica takes more than a server alone, both after `STREAMS` streams."""
    paced = Paced(PACE_S, STREAMS)
    async with node(model, [], folder, paced) as alone:
        await _streams(alone)
        before = resident_bytes(alone.process.pid)
    async with cluster(model, 1, folder, Paced(PACE_S, STREAMS, passes_on=True)) as nodes:
        await _streams(nodes.head)
        return resident_bytes(nodes.head.process.pid) - before


async def paced_rate(model: Path, folder: Path, engines: int) -> Load:
    """Clients of a head with `engines - 1` replicas, all of them paced."""
    async with cluster(model, engines - 1, folder, Paced(RATE_PACE_S, RATE_ROWS)) as nodes:
        return await rate(nodes, engines)


def rate_lengths(engines: int) -> list[int]:
    """Tokens of each answer, in the order in which they are asked for."""
    draw = random.Random(0)
    return [draw.randint(*RATE_TOKENS) for _ in range(engines * RATE_REQUESTS)]


async def rate(nodes: Nodes, engines: int) -> Load:
    """As many clients as so many engines need, and different prompts."""
    bodies = [_body(number, tokens) for number, tokens in enumerate(rate_lengths(engines))]
    return await closed_loop(nodes.head.port, bodies, engines * RATE_CLIENTS)


def steady_rate(load: Load) -> float:
    """Tokens per second while every client has a request: from the first token until the last request is sent. After
    that rows run empty, one after another, and how long that takes depends on the lengths of the last answers."""
    begin = min(stream.arrivals[0] for stream in load.streams)
    end = max(stream.sent for stream in load.streams)
    tokens = 0.0
    for stream in load.streams:
        within = sum(begin < arrival <= end for arrival in stream.arrivals)
        tokens += stream.tokens * within / len(stream.arrivals)
    return tokens / (end - begin)


async def _streams(peer: Peer) -> Delays:
    """Of `STREAMS` clients that begin evenly apart. The streams while not all of them have begun are left out."""
    streams = [[TimedStream(peer.port, _body(number, TOKENS)) for _ in range(ROUNDS)] for number in range(STREAMS)]
    async with asyncio.TaskGroup() as clients:
        for number, own in enumerate(streams):
            clients.create_task(_one_after_another(own, number * TOKENS * PACE_S / STREAMS))
    delays = Delays()
    for stream in (stream for own in streams for stream in own[1:]):
        delays.first.append(stream.first_token_s - PACE_S)
        delays.each += stream.delays
    return delays


async def _one_after_another(streams: Sequence[Stream], begin_s: float) -> None:
    await asyncio.sleep(begin_s)
    for stream in streams:
        await stream.run()


def _difference(routed: Delays, direct: Delays) -> Added:
    def apart(ours: Sequence[float], theirs: Sequence[float], percent: int) -> float:
        return percentile(ours, percent) - percentile(theirs, percent)

    return Added(
        apart(routed.first, direct.first, 50),
        apart(routed.first, direct.first, 99),
        apart(routed.each, direct.each, 50),
        apart(routed.each, direct.each, 99),
    )


def _body(number: int, tokens: int) -> Body:
    return {"prompt": json.dumps(number), "ignore_eos": True, **greedy(tokens)}
