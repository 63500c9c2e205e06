"""Simulates a cluster of 1 to 256 nodes, and compares the simulation with clusters that run on this machine.

    python benchmarks/studies/cluster_sim.py [--only PART ...] [--repeats N] [--nodes N ...] [--out FILE]

    paced        the processor time of a head; 1, 2 and 3 engines that answer at a fixed pace, behind it, against the
                 simulation
    real         the same with the bundled model, one thread for each engine. Where there are more engines than cores,
                 they wait for each other, which is not simulated
    nodes        throughput, first token, publishing, training and staleness by number of nodes and by scenario
    loss         one node is killed, or stands still until its lease ends

Times come from the records of other benchmarks; `lib/cluster/inputs.py` names the record of each. Figures of the parts
nodes and loss are those of a model. Takes half an hour on two cores, prints tables and writes JSON.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from benchmarks.lib import machine, report
from benchmarks.lib.cluster import compared, inputs, outcome
from benchmarks.lib.cluster.compared import Comparison
from benchmarks.lib.cluster.inputs import Inputs, RouterCost
from benchmarks.lib.cluster.nodes import small_model
from benchmarks.lib.cluster.outcome import Loss, Outcome
from benchmarks.lib.figures import Figure, errors, reported
from benchmarks.lib.peers import cancelled_by_sigterm
from benchmarks.lib.throughput import REQUESTS_PER_CLIENT, TOKENS

RECORD = report.RESULTS / "cluster_sim.json"
PARTS = ("paced", "real", "nodes", "loss")
NODES = (1, 2, 3, 8, 64, 256)
ENGINES = (1, 2, 3)
LOSS_NODES = (2, 3, 8)
HEADS = "tok/s", "first token", "99 %", "router", "to live", "updates/min", "trainer", "staleness", "dropped"
"""Of the tables by number of nodes. Router and trainer: the share of their time that they work."""
MOST_APART = 15.0
"""Per cent between a figure of the simulation and of the paced engines."""


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    before = machine.describe()
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    router, comparisons = asyncio.run(cancelled_by_sigterm(_compared(arguments)))
    measured = inputs.measured(router)
    outcomes = _simulated(measured, arguments.nodes) if "nodes" in arguments.only else []
    lost = outcome.losses(measured, LOSS_NODES) if "loss" in arguments.only else []
    figures = [*_of_comparisons(comparisons), *_of_serving(measured), *_of_nodes(outcomes)]
    report.show(figures, *_tables(outcomes), *_loss_tables(lost))
    record = {"router": asdict(router), "inputs": asdict(measured), "compared": [asdict(one) for one in comparisons]}
    record |= {"nodes": [asdict(one) for one in outcomes], "loss": [asdict(one) for one in lost]}
    report.write(arguments.out, {"machine": before, "setting": report.setting(arguments), **record}, figures)
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in figures))


async def _compared(arguments: argparse.Namespace) -> tuple[RouterCost, list[Comparison]]:
    """The router's cost, measured or from the last record, and the comparisons of the parts that were asked for."""
    asked = [kind for kind in ("paced", "real") if kind in arguments.only]
    if not asked:
        return inputs.recorded_router(RECORD), []
    machine.warn_if_busy()
    comparisons: list[Comparison] = []
    with tempfile.TemporaryDirectory(prefix="cluster_sim_") as created:
        folder = Path(created)
        model = small_model(folder / "model")
        router = await compared.router_cost(model, folder)
        for _ in range(arguments.repeats):
            if "paced" in asked:
                comparisons += [await compared.paced(model, folder, engines, router) for engines in ENGINES]
            if "real" in asked:
                node = await compared.real_node(folder, router)
                comparisons += [await compared.real(folder, engines, node) for engines in ENGINES]
    return router, comparisons


def _simulated(measured: Inputs, counts: Iterable[int]) -> list[Outcome]:
    return [outcome.simulate(scenario, nodes) for scenario in outcome.scenarios(measured) for nodes in counts]


def _of_comparisons(comparisons: list[Comparison]) -> Iterator[Figure]:
    for (kind, engines), runs in _grouped(comparisons).items():
        name = f"{kind} engines: {engines}"
        rates = [_apart(one.simulated_rate, one.real_rate) for one in runs]
        firsts = [_apart(one.simulated_first_token_s, one.real_first_token_s) for one in runs]
        limit = MOST_APART if kind == "paced" else None
        yield Figure(f"{name}: throughput", "tok/s", *reported([one.real_rate for one in runs]))
        yield Figure(f"{name}: simulated throughput, apart", "%", *reported(rates), limit)
        yield Figure(f"{name}: simulated first token, apart", "%", *reported(firsts), limit)
    if comparisons:
        yield errors("requests that failed", sum(one.errors for one in comparisons))


def _grouped(comparisons: list[Comparison]) -> dict[tuple[str, int], list[Comparison]]:
    groups: dict[tuple[str, int], list[Comparison]] = {}
    for one in comparisons:
        groups.setdefault((one.kind, one.engines), []).append(one)
    return groups


def _of_serving(measured: Inputs) -> Iterator[Figure]:
    for clients, real in inputs.served_rates().items():
        simulated = outcome.served_rate(measured, clients, TOKENS, clients * REQUESTS_PER_CLIENT[clients])
        yield Figure(f"one real server, {clients} clients: simulated, apart", "%", *reported([_apart(simulated, real)]))


def _of_nodes(outcomes: list[Outcome]) -> Iterator[Figure]:
    """Of the first scenario only. The record has all of them."""
    for one in outcomes:
        if one.scenario == outcomes[0].scenario:
            name = f"{one.scenario}, nodes: {one.nodes}"
            yield Figure(f"{name}: throughput", "tok/s", *reported([one.tokens_s]))
            yield Figure(f"{name}: update to live everywhere", "s", *reported([one.to_live_s]))


def _apart(simulated: float, real: float) -> float:
    """Per cent."""
    return 100 * abs(simulated / real - 1)


def _tables(outcomes: list[Outcome]) -> Iterator[Table]:
    for scenario in dict.fromkeys(one.scenario for one in outcomes):
        table = Table("nodes", title=scenario)
        for head in HEADS:
            table.add_column(head, justify="right")
        for one in outcomes:
            if one.scenario == scenario:
                table.add_row(*_cells(one))
        yield table


def _cells(one: Outcome) -> tuple[str, ...]:
    return (
        str(one.nodes),
        f"{one.tokens_s:,.0f}",
        f"{one.first_token_s:.2f} s",
        f"{one.first_token_p99_s:.2f} s",
        f"{one.router_busy:.0%}",
        f"{one.to_live_s:.2f} s",
        f"{one.updates_minute:.1f}",
        f"{one.trainer_busy:.0%}",
        f"{one.staleness:.2f}",
        f"{one.dropped:.0%}",
    )


def _loss_tables(lost: list[Loss]) -> Iterator[Table]:
    if not lost:
        return
    table = Table("nodes", title="One node is lost")
    for head in ("seen after", "retried", "broken", "throughput", "slowest first token"):
        table.add_column(head, justify="right")
    for one in lost:
        figures = f"{one.unseen_s:.1f} s", str(one.retried), str(one.broken), f"{one.rate_after:.2f} x"
        table.add_row(str(one.nodes), *figures, f"{one.slowest_first_token_s:.2f} s")
    yield table


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--nodes", nargs="+", type=int, default=NODES)
    parser.add_argument("--out", type=Path, default=RECORD)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
