"""Runs paced engines behind a relay, and the same requests through the simulation."""

import asyncio
import random
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from lib.cluster.inputs import Inputs, RouterCost
from lib.cluster.model import Cluster
from lib.load import Body, Load, closed_loop, get_json, greedy
from lib.peers import Peer, program

PACE_S, ROWS, CLIENTS = 0.05, 8, 12
"""Seconds between two tokens of a row; rows, and clients, of each engine."""
TOKENS = (16, 48)
REQUESTS_A_CLIENT = 4
COST_PACE_S, COST_ROWS, COST_REQUESTS, COST_REPEATS, SHORT, LONG = 0.002, 8, 80, 3, 4, 68


@dataclass(frozen=True, slots=True)
class Comparison:
    """One run of paced engines beside its simulation: tokens per second, and the median time to the first token."""

    replicas: int
    real_rate: float
    simulated_rate: float
    real_first_token_s: float
    simulated_first_token_s: float
    errors: int


async def router_cost() -> RouterCost:
    """Processor time of the relay by request and by event, from many short answers and as many longer ones."""
    with tempfile.TemporaryDirectory(prefix="cluster_sim_") as logs:
        async with AsyncExitStack() as running:
            relay = await _started(running, 1, COST_PACE_S, COST_ROWS, Path(logs))
            await _cpu_s(relay, SHORT)  # the first requests open connections
            costs = [_cost(await _cpu_s(relay, SHORT), await _cpu_s(relay, LONG)) for _ in range(COST_REPEATS)]
    return RouterCost(median(cost.request_s for cost in costs), median(cost.token_s for cost in costs))


def _cost(short: float, long: float) -> RouterCost:
    """From the processor seconds of `COST_REQUESTS` answers of each length."""
    token_s = (long - short) / (COST_REQUESTS * (LONG - SHORT))
    return RouterCost(short / COST_REQUESTS - SHORT * token_s, token_s)


async def compare(replicas: int, router: RouterCost) -> Comparison:
    """The same answers, in the same order, from `replicas` paced engines and from as many simulated ones."""
    draw = random.Random(replicas)
    lengths = [draw.randint(*TOKENS) for _ in range(replicas * CLIENTS * REQUESTS_A_CLIENT)]
    load = await _run(replicas, lengths)
    simulated = Cluster(_as_paced(router), replicas)
    seconds = simulated.deliver(lengths, replicas * CLIENTS)
    return Comparison(
        replicas=replicas,
        real_rate=load.rate,
        simulated_rate=sum(lengths) / seconds,
        real_first_token_s=median(stream.first_token_s for stream in load.streams),
        simulated_first_token_s=median(taken for _, taken in simulated.log.first_tokens),
        errors=len(load.errors),
    )


async def _run(replicas: int, lengths: Sequence[int]) -> Load:
    with tempfile.TemporaryDirectory(prefix="cluster_sim_") as logs:
        async with AsyncExitStack() as running:
            relay = await _started(running, replicas, PACE_S, ROWS, Path(logs))
            return await closed_loop(relay.port, [_body(tokens) for tokens in lengths], replicas * CLIENTS)


async def _started(running: AsyncExitStack, replicas: int, pace_s: float, rows: int, logs: Path) -> Peer:
    """Starts the engines and the relay in front of them, and returns the relay."""
    flags = ["--pace", str(pace_s), "--rows", str(rows)]
    starting = (program("paced_engine", flags, logs) for _ in range(replicas))
    engines = [await running.enter_async_context(engine) for engine in starting]
    urls = [f"http://127.0.0.1:{engine.port}" for engine in engines]
    return await running.enter_async_context(program("relay", ["--engines", *urls], logs))


async def _cpu_s(relay: Peer, tokens: int) -> float:
    """Processor seconds that the relay takes for `COST_REQUESTS` answers. Raises RuntimeError if one fails."""
    before = await get_json(relay.port, "/health")
    load = await closed_loop(relay.port, [_body(tokens)] * COST_REQUESTS, COST_ROWS)
    if load.errors:
        raise RuntimeError(f"the relay fails: {load.errors[0]}")
    return float((await get_json(relay.port, "/health"))["cpu_s"] - before["cpu_s"])


def _body(tokens: int) -> Body:
    return {"prompt": "", **greedy(tokens)}


def _as_paced(router: RouterCost) -> Inputs:
    """A node that gives every row a token each `PACE_S`, at no cost of prompts, and never trains."""
    return Inputs(
        step_s={1: PACE_S},
        prompt_s=0.0,
        update_s=0.0,
        update_samples=1,
        group=1,
        stage_s=0.0,
        adapter_bytes=0,
        router=router,
        rows=ROWS,
    )


def run_all(replicas: Sequence[int]) -> tuple[RouterCost, list[Comparison]]:
    async def run() -> tuple[RouterCost, list[Comparison]]:
        cost = await router_cost()
        return cost, [await compare(count, cost) for count in replicas]

    return asyncio.run(run())
