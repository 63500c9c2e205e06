"""Runs nodes behind the router of a head, and the same requests through the simulation."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks.lib.cluster import routing
from benchmarks.lib.cluster.inputs import Inputs, RouterCost
from benchmarks.lib.cluster.model import Cluster
from benchmarks.lib.cluster.nodes import Paced, cluster
from benchmarks.lib.load import Body, Load, closed_loop, greedy
from benchmarks.lib.machine import processor_seconds
from benchmarks.lib.peers import Peer

COST_PACE_S, COST_ROWS, COST_REQUESTS, COST_REPEATS, SHORT, LONG = 0.002, 8, 80, 3, 4, 68
STEP_ROWS, STEP_TOKENS, STEP_REPEATS = (1, 4, 8, 12, 16), 48, 3
MOST_ROWS = 64
"""Rows of a real node in the simulation: more than it has clients."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One run beside its simulation: tokens per second, and the median time to the first token. `load_average`: of the
    machine when the run ended, which has one process for each engine."""

    kind: str
    engines: int
    real_rate: float
    simulated_rate: float
    real_first_token_s: float
    simulated_first_token_s: float
    errors: int
    load_average: float


async def router_cost(model: Path, folder: Path) -> RouterCost:
    """Processor time of a head by request and by streamed token, from many short answers and as many longer ones. Its
    replica answers all of them."""
    async with cluster(model, 1, folder, Paced(COST_PACE_S, COST_ROWS, passes_on=True)) as nodes:
        await _cpu_s(nodes.head, SHORT)  # the first requests open connections
        costs = [_cost(await _cpu_s(nodes.head, SHORT), await _cpu_s(nodes.head, LONG)) for _ in range(COST_REPEATS)]
    return RouterCost(median(cost.request_s for cost in costs), median(cost.token_s for cost in costs))


async def paced(model: Path, folder: Path, engines: int, router: RouterCost) -> Comparison:
    """The same answers, in the same order, from so many paced engines and from as many simulated ones."""
    return _compared("paced", engines, await routing.paced_rate(model, folder, engines), _as_paced(router))


async def real(folder: Path, engines: int, node: Inputs) -> Comparison:
    """The same with the bundled model. `node`: see `real_node`."""
    async with cluster(None, engines - 1, folder) as nodes:
        return _compared("real", engines, await routing.rate(nodes, engines), node)


async def real_node(folder: Path, router: RouterCost) -> Inputs:
    """The times of one node with the bundled model: a step by its rows, and a prompt."""
    steps: dict[int, float] = {}
    async with cluster(None, 0, folder) as nodes:
        await _streams(nodes.head, 1)
        for rows in STEP_ROWS:
            steps[rows] = median([median(_gaps(await _streams(nodes.head, rows))) for _ in range(STEP_REPEATS)])
        firsts = [(await _streams(nodes.head, 1)).streams[0].first_token_s for _ in range(STEP_REPEATS)]
    return replace(_as_paced(router), step_s=steps, prompt_s=max(0.0, median(firsts) - steps[1]), rows=MOST_ROWS)


def _compared(kind: str, engines: int, load: Load, node: Inputs) -> Comparison:
    lengths = routing.rate_lengths(engines)
    simulated = Cluster(node, engines)
    seconds = simulated.deliver(lengths, engines * routing.RATE_CLIENTS)
    return Comparison(
        kind=kind,
        engines=engines,
        real_rate=load.rate,
        simulated_rate=sum(lengths) / seconds,
        real_first_token_s=median(stream.first_token_s for stream in load.streams),
        simulated_first_token_s=median(taken for _, taken in simulated.log.first_tokens),
        errors=len(load.errors),
        load_average=os.getloadavg()[0],
    )


def _as_paced(router: RouterCost) -> Inputs:
    """A node that gives every row a token each `RATE_PACE_S`, at no cost of prompts, and never trains."""
    return Inputs(
        step_s={1: routing.RATE_PACE_S},
        prompt_s=0.0,
        update_s=0.0,
        update_samples=1,
        group=1,
        stage_s=0.0,
        adapter_bytes=0,
        router=router,
        rows=routing.RATE_ROWS,
    )


def _cost(short: float, long: float) -> RouterCost:
    """From the processor seconds of `COST_REQUESTS` answers of each length."""
    token_s = (long - short) / (COST_REQUESTS * (LONG - SHORT))
    return RouterCost(short / COST_REQUESTS - SHORT * token_s, token_s)


async def _cpu_s(head: Peer, tokens: int) -> float:
    """Processor seconds that the head takes for `COST_REQUESTS` answers. Raises RuntimeError if one fails."""
    before = processor_seconds(head.process.pid)
    load = await closed_loop(head.port, [_body(tokens)] * COST_REQUESTS, COST_ROWS)
    if load.errors:
        raise RuntimeError(f"the head fails: {load.errors[0]}")
    return processor_seconds(head.process.pid) - before


async def _streams(node: Peer, rows: int) -> Load:
    return await closed_loop(node.port, [_body(STEP_TOKENS)] * rows, rows)


def _gaps(load: Load) -> Sequence[float]:
    """The times between two tokens, while all streams run."""
    begin = max(stream.arrivals[0] for stream in load.streams)
    end = min(stream.arrivals[-1] for stream in load.streams)
    pairs = (pair for stream in load.streams for pair in pairwise(stream.arrivals))
    return [later - earlier for earlier, later in pairs if begin <= earlier and later <= end]


def _body(tokens: int) -> Body:
    return {"prompt": "1", "ignore_eos": True, **greedy(tokens)}
