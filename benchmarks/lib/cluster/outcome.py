"""Runs simulated clusters, and reduces what happened to figures."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace

from benchmarks.lib.cluster.inputs import GIGABIT, Inputs
from benchmarks.lib.cluster.model import ONE_HEAD, Cluster, Design
from benchmarks.lib.figures import percentile

WARM_UP_S, LENGTH_S = 30.0, 120.0
LOSS_AT_S, LOSS_WINDOW_S = 60.0, 10.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """Inputs and a design, under a name."""

    name: str
    inputs: Inputs
    design: Design = ONE_HEAD


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a cluster does from `WARM_UP_S` to `LENGTH_S`. Seconds are NaN where nothing was measured."""

    scenario: str
    nodes: int
    tokens_s: float
    first_token_s: float
    """Median."""
    first_token_p99_s: float
    router_busy: float
    """Share of its time that the busiest router works."""
    to_live_s: float
    """Median time from the end of an update until every node serves its version."""
    updates_minute: float
    trainer_busy: float
    staleness: float
    """Mean, in versions, of the trajectories that were trained on."""
    dropped: float
    """Share of the collected trajectories."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What the loss of one node does to the others."""

    nodes: int
    unseen_s: float
    retried: int
    broken: int
    rate_after: float
    """Tokens per second in the `LOSS_WINDOW_S` after the loss, relative to those before."""
    slowest_first_token_s: float
    """Of requests that were sent within `LOSS_WINDOW_S` before or after the loss."""


def scenarios(inputs: Inputs) -> list[Scenario]:
    network = replace(inputs, link_bytes_s=GIGABIT)
    fast = network.faster(10)
    return [
        Scenario("as measured", inputs),
        Scenario("over Gigabit Ethernet", network),
        Scenario("nodes 10 x as fast", fast),
        Scenario("10 x as fast, cells of 4", fast, Design(cell_nodes=4)),
        Scenario("10 x as fast, cells of 4, holders pass on", fast, Design(cell_nodes=4, holders_pass_on=True)),
    ]


def simulate(scenario: Scenario, nodes: int, seed: int = 0) -> Outcome:
    cluster = Cluster(scenario.inputs, nodes, scenario.design, seed)
    cluster.add_clients()
    cluster.run(WARM_UP_S)
    log = cluster.log
    before = len(log.published), len(log.staleness), log.dropped, log.training_s
    busy = [cell.router.busy_s for cell in cluster.cells]
    cluster.run(LENGTH_S)
    length = LENGTH_S - WARM_UP_S
    firsts = [seconds for sent, seconds in log.first_tokens if sent >= WARM_UP_S]
    published, used, dropped = log.published[before[0] :], log.staleness[before[1] :], log.dropped - before[2]
    routers = [cell.router.busy_s - then for cell, then in zip(cluster.cells, busy, strict=True)]
    return Outcome(
        scenario=scenario.name,
        nodes=nodes,
        tokens_s=_tokens(cluster, WARM_UP_S, LENGTH_S) / length,
        first_token_s=percentile(firsts, 50),
        first_token_p99_s=percentile(firsts, 99),
        router_busy=max(routers) / length,
        to_live_s=percentile(published, 50),
        updates_minute=60 * len(used) / scenario.inputs.update_samples / length,
        trainer_busy=(log.training_s - before[3]) / length,
        staleness=statistics.fmean(used) if used else float("nan"),
        dropped=dropped / max(1, dropped + len(used)),
    )


def lose_one(inputs: Inputs, nodes: int, unseen_s: float, seed: int = 0) -> Loss:
    cluster = Cluster(inputs, nodes, seed=seed)
    cluster.add_clients()
    cluster.lose_one(LOSS_AT_S, unseen_s)
    cluster.run(LOSS_AT_S + 3 * LOSS_WINDOW_S)
    before, after = (_tokens(cluster, begun, begun + LOSS_WINDOW_S) for begun in (LOSS_AT_S - LOSS_WINDOW_S, LOSS_AT_S))
    near = [taken for sent, taken in cluster.log.first_tokens if abs(sent - LOSS_AT_S) <= LOSS_WINDOW_S]
    return Loss(nodes, unseen_s, cluster.log.retried, cluster.log.broken, after / before, max(near))


def served_rate(inputs: Inputs, clients: int, tokens: int, requests: int) -> float:
    """Tokens per second of one node without a router, as `serving.py` measures a real one."""
    alone = replace(inputs, rows=32, router=replace(inputs.router, request_s=0.0, token_s=0.0))
    return tokens * requests / Cluster(alone, 1).deliver([tokens] * requests, clients)


def losses(inputs: Inputs, counts: Iterable[int]) -> list[Loss]:
    """One node killed, which its broken connections show at once, and one that stands still until its lease ends."""
    return [lose_one(inputs, nodes, unseen) for nodes in counts for unseen in (0.0, inputs.lease_s)]


def _tokens(cluster: Cluster, begin: float, end: float) -> int:
    return sum(tokens for at, tokens in cluster.log.delivered if begin <= at < end)
