"""What the simulation of a cluster is fed with: figures of other benchmarks' records, and assumptions, each named."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.lib.report import RESULTS

CONTEXT = 64
"""Tokens of context at which steps were measured, about those of the simulated requests."""
GIGABIT = 118e6
"""Bytes a second of a payload over Gigabit Ethernet. Assumed: nothing here was run over a network."""


@dataclass(frozen=True, slots=True)
class RouterCost:
    """Processor seconds of the head of a cluster, whose replica answers: `cluster_sim.json`."""

    request_s: float
    token_s: float
    """For each event of a streamed answer, which has one token."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Times in seconds. The docstring under a field names the record that it is from, or says that it is assumed."""

    step_s: Mapping[int, float]
    """Decode step by number of rows: `step.json`, contexts of 64 tokens."""
    prompt_s: float
    """What a prompt adds to a step: the first token of 1 client in `serving.json`, less a step of one row."""
    update_s: float
    """One update on a node that does nothing else: `serve_and_train.json`."""
    update_samples: int
    """Trajectories of such an update: `serve_and_train.json`."""
    group: int
    """Samples of one prompt, which is computed once for all of them: `serve_and_train.json`."""
    stage_s: float
    """From an adapter in memory to its slot, beside rows that decode: `adapters.json`."""
    adapter_bytes: int
    """A file of rank 16 on all linears: `adapters.json`."""
    router: RouterCost
    link_bytes_s: float = 40e6 / 0.083
    """Bytes a second that one node sends. 20 MB were pulled and checked by two processes in 83 ms over loopback, in a
    trial without a record."""
    registry_s: float = 0.00094
    """From a change of a NATS key to its watcher, in the same trial."""
    lease_s: float = 3.3
    """Until a node that stands still counts as lost, in the same trial with leases of 3 s."""
    rows: int = 16
    """Rows of a node. Assumed."""
    live_clients: int = 11
    """Clients of each node that wait for each answer before they ask again. Their answers are streamed. Assumed."""
    rollout_clients: int = 5
    """The same, of rollouts, whose answers are sent whole: about 0.3 of the rows, a server's default share."""
    live_tokens: tuple[int, int] = (24, 72)
    """Least and most tokens of a live answer, all equally likely. Assumed."""
    rollout_tokens: tuple[int, int] = (8, 16)
    """The same of a rollout, about the 12 tokens that an update of `serve_and_train.json` trains on."""
    max_staleness: int = 1
    """Versions. The default of rl_training.max_staleness."""
    buffer: int = 1000
    """Trajectories. The default of rl_training.trajectory_buffer_size."""

    def step(self, rows: int) -> float:
        """Seconds of a decode step, interpolated between the measured numbers of rows."""
        counts = sorted(self.step_s)
        return float(np.interp(rows, counts, [self.step_s[count] for count in counts]))

    def faster(self, times: float) -> "Inputs":
        """The same cluster of nodes that compute `times` as fast. Router and network stay as they are."""
        return replace(
            self,
            step_s={rows: seconds / times for rows, seconds in self.step_s.items()},
            prompt_s=self.prompt_s / times,
            update_s=self.update_s / times,
            stage_s=self.stage_s / times,
        )


def measured(router: RouterCost) -> Inputs:
    """The inputs that the records hold."""
    step, serving, adapters, training = (_record(name) for name in ("step", "serving", "adapters", "serve_and_train"))
    steps = {rows: _step_ms(step, rows) / 1e3 for rows in step["setting"]["rows"]}
    alone = next(point for point in serving["throughput"] if point["concurrency"] == 1)
    batch = training["setting"]["batch"]
    return Inputs(
        step_s=steps,
        prompt_s=fmean(alone["ours"]["first_token_s"]) - steps[1],
        update_s=60 / _median(training, "no requests: updates a minute"),
        update_samples=batch["samples"],
        group=batch["group"],
        stage_s=_median(adapters, "publish: staging, all of it"),
        adapter_bytes=next(kind["file"] for kind in adapters["memory"] if kind["name"] == "all linears, rank 16"),
        router=router,
    )


def served_rates() -> dict[int, float]:
    """Tokens per second of one real server by number of clients: `serving.json`."""
    return {point["concurrency"]: fmean(point["ours"]["rates"]) for point in _record("serving")["throughput"]}


def recorded_router(record: Path) -> RouterCost:
    """The router's cost in an older record of the simulation. Raises SystemExit if there is none."""
    if not record.exists():
        raise SystemExit(f"{record} does not exist, so the router's cost is unknown: leave out --only")
    return RouterCost(**json.loads(record.read_text())["router"])


def _record(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _step_ms(record: dict[str, Any], rows: int) -> float:
    return float(record["times_ms"][f"{rows} {'row' if rows == 1 else 'rows'} at {CONTEXT}"]["step"])


def _median(record: dict[str, Any], figure: str) -> float:
    return next(float(found["value"]["median"]) for found in record["figures"] if found["name"] == figure)
