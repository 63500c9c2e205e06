"""Measures served tokens per second without adapters, with one adapter for all requests, and with 8 and 64 at once.

One server has all 64 adapters in slots. The kinds take turns, and all kinds of one repeat get the same prompts.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.lib import peers, throughput
from benchmarks.lib.adapters.files import write_adapters
from benchmarks.lib.alone import alone
from benchmarks.lib.load import Body, closed_loop, get_json
from benchmarks.lib.peers import Peer
from benchmarks.lib.prompts import short_prompts
from benchmarks.lib.throughput import TOKENS, WARM_UP_CLIENTS, WARM_UP_TOKENS, Side, body

NAMES = [f"random-{number:02}" for number in range(64)]
NONE = "no adapter"
KINDS = {NONE: 0, "one adapter": 1, "8 adapters": 8, "64 adapters": 64}
REQUESTS_PER_CLIENT = {1: 4, 16: 2, 64: 1}


@dataclass(slots=True)
class ServedPoint:
    """The measurements of all kinds of load at one concurrency."""

    concurrency: int
    sides: dict[str, Side] = field(default_factory=lambda: {kind: Side(kind) for kind in KINDS})


async def measure(model: Path, folder: Path, repeats: int, quick: bool) -> list[ServedPoint]:
    """Measures a server of the model directory `model`. Writes the adapters (1.3 GB) to the new folder `folder`."""
    alone(write_adapters, folder, NAMES)
    flags = ["--adapter-dir", str(folder), "--max-loras", str(len(NAMES))]
    points = [ServedPoint(clients) for clients in REQUESTS_PER_CLIENT]
    async with peers.our_server(model, folder.parent, flags) as server:
        await throughput.warm_up(server)
        with server.awake():
            await _stage_all(server)
            for repeat in range(repeats):
                for point in points:
                    await _take_turns(server, point, repeat, quick)
    return points


async def _stage_all(server: Peer) -> None:
    """Makes the server stage all adapters. Raises RuntimeError if one is not in a slot afterwards."""
    prompts = short_prompts(len(NAMES), "stage")
    bodies = [{**_body(prompt, WARM_UP_TOKENS), "model": name} for prompt, name in zip(prompts, NAMES, strict=True)]
    load = await closed_loop(server.port, bodies, WARM_UP_CLIENTS)
    used = (await get_json(server.port, "/v1/adapters"))["slots"]["used"]
    if load.errors or used != len(NAMES):
        raise RuntimeError(f"{used} of {len(NAMES)} adapters are staged, with errors {load.errors[:1]}")


async def _take_turns(server: Peer, point: ServedPoint, repeat: int, quick: bool) -> None:
    """Measures all kinds of load once. The kind that goes first changes with the repeat."""
    sides = list(point.sides.values())
    for side in sides if repeat % 2 == 0 else reversed(sides):
        bodies = _bodies(point.concurrency, KINDS[side.name], repeat, quick)
        side.add(await closed_loop(server.port, bodies, point.concurrency))
        print(f"  {point.concurrency:>2} clients  {side.name:<12} {side.rates[-1]:6.1f} tok/s", flush=True)


def _bodies(concurrency: int, adapters: int, repeat: int, quick: bool) -> Sequence[Body]:
    """The requests, which name the adapters in turn, starting with another adapter in each repeat."""
    count = concurrency * (1 if quick else REQUESTS_PER_CLIENT[concurrency])
    bodies = [_body(prompt, TOKENS) for prompt in short_prompts(count, f"adapters {concurrency} {repeat}")]
    if adapters == 0:
        return bodies
    names = random.Random(repeat).sample(NAMES[:adapters], adapters)
    return [{**each, "model": names[number % adapters]} for number, each in enumerate(bodies)]


def _body(prompt: str, max_tokens: int) -> Body:
    """A request that ignores the end-of-sequence token, which a random adapter may make likely."""
    return {**body(prompt, max_tokens), "ignore_eos": True}
