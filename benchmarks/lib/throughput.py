"""Measures served tokens per second and the time to the first token, of this server and of mlx_lm.server.

Each client sends its next request when its last one has finished. Both sides take turns with the same prompts, and each
repeat has prompts of its own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from benchmarks.lib.load import Body, Load, closed_loop, greedy
from benchmarks.lib.peers import Peer
from benchmarks.lib.prompts import short_prompts

TOKENS = 48
PEER_ATTEMPTS = 20
REQUESTS_PER_CLIENT = {1: 4, 8: 3, 16: 2, 32: 2}
WARM_UP_CLIENTS, WARM_UP_TOKENS = 8, 8


@dataclass(slots=True)
class Side:
    """One server at one concurrency. The lists have one value per repeat; rates are in tokens per second.

    `short` counts answers with fewer tokens than requested, `resets` failed attempts that were retried.
    """

    name: str
    rates: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    slowest_first_token_s: list[float] = field(default_factory=list)
    requests: int = 0
    short: int = 0
    resets: int = 0
    errors: list[str] = field(default_factory=list)
    client_cpu: list[float] = field(default_factory=list)

    def add(self, load: Load) -> None:
        firsts = [stream.first_token_s for stream in load.streams if stream.arrivals] or [math.nan]
        self.rates.append(load.rate)
        self.first_token_s.append(median(firsts))
        self.slowest_first_token_s.append(max(firsts))
        self.requests += len(load.streams)
        self.short += sum(stream.tokens != TOKENS for stream in load.streams)
        self.resets += load.resets
        self.errors += load.errors
        self.client_cpu.append(load.client_cpu)


@dataclass(slots=True)
class Point:
    """The measurements of both sides at one concurrency."""

    concurrency: int
    ours: Side
    theirs: Side


def body(prompt: str | list[int], max_tokens: int) -> Body:
    """A greedy streaming request with a token count at the end. Both servers accept it, unless the prompt is token
    ids."""
    return {"prompt": prompt, **greedy(max_tokens)}


async def warm_up(peer: Peer) -> None:
    """Sends the first requests, which load a model, start threads and compile kernels. Raises RuntimeError if one
    fails."""
    bodies = [body(prompt, WARM_UP_TOKENS) for prompt in short_prompts(2 * WARM_UP_CLIENTS, f"warm up {peer.name}")]
    with peer.awake():
        first = await closed_loop(peer.port, bodies[:1], 1, PEER_ATTEMPTS)
        rest = await closed_loop(peer.port, bodies[1:], WARM_UP_CLIENTS, PEER_ATTEMPTS)
    if failed := first.errors + rest.errors:
        raise RuntimeError(f"{peer.name} fails at its first requests: {failed[0]}")


async def measure(ours: Peer, theirs: Peer, repeats: int, quick: bool) -> list[Point]:
    """Measures all concurrencies in each repeat. The sides take turns, and the side that goes first alternates."""
    points = [Point(clients, Side(ours.name), Side(theirs.name)) for clients in REQUESTS_PER_CLIENT]
    for repeat in range(repeats):
        for point in points:
            bodies = _bodies(point.concurrency, repeat, quick)
            turns = [(ours, point.ours, 1), (theirs, point.theirs, PEER_ATTEMPTS)]
            for peer, side, attempts in turns if repeat % 2 == 0 else reversed(turns):
                with peer.awake():
                    side.add(await closed_loop(peer.port, bodies, point.concurrency, attempts))
                print(f"  {point.concurrency:>2} clients  {side.name:<20} {side.rates[-1]:6.1f} tok/s", flush=True)
    return points


def _bodies(concurrency: int, repeat: int, quick: bool) -> Sequence[Body]:
    count = concurrency * (1 if quick else REQUESTS_PER_CLIENT[concurrency])
    return [body(prompt, TOKENS) for prompt in short_prompts(count, f"throughput {concurrency} {repeat}")]
