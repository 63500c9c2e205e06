"""Measures the memory of training, and checks training while clients are served. It uses the bundled model.

    python benchmarks/studies/training.py [--updates 100] [--only memory load] [--out FILE]

`memory`: the additional memory that MLX holds once training has begun, and its peak. `load`: updates while 8 clients
are served and all their answers are trained on; then each stored logprob is recomputed with the version that sampled
it. Each part has a process of its own, without HTTP. It takes about 10 minutes on two cores, prints a table and writes
JSON, in which parts that --only leaves out keep their values.
"""

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.lib import machine, report
from benchmarks.lib.alone import alone
from benchmarks.lib.figures import Figure, errors, reported
from benchmarks.lib.training.rig import Rig, rig

import mlx.core as mx  # isort: skip  after training_rig, which chooses the BLAS
from mlx_parallm.config import Config, LoRAConfig, RLConfig, configure
from mlx_parallm.core.trajectories import GivenTrajectory
from mlx_parallm.train.data import UpdateOutcome
from mlx_parallm.train.jobs import Parts

PARTS = ("memory", "load")
MEMORY_LIMIT, LOGPROB_LIMIT = 1.1, 1e-4
CLIENTS, GROUP, TOKENS, BATCH = 8, 4, 8, 8
SETTLE_S = 1.5
"""Seconds until the engine's statistics are those of an idle server."""
SHARE = 0.5
"""Training time share, so that a hundred updates take some minutes."""
LORA = LoRAConfig(rank=16, alpha=32.0)
T = TypeVar("T", "Memory", "Load")
FACTS = {"rank": 16, "targets": "all seven linears", "clients": CLIENTS, "group": GROUP, "batch": BATCH}


@dataclass(frozen=True, slots=True)
class Memory:
    """MLX's bytes. `started` and `updating` are in addition to what serving alone holds, without the KV pool.

    `updating`: the most after any micro-step, with gradients but without activations, which are part of the peak.
    `bank`: the slots of served versions. `peak`: everything, with the base model and the activations of a micro-step.
    `peak_serving`: the peak before training.
    """

    adapter: int
    base: int
    started: int
    updating: int
    bank: int
    peak_serving: int
    peak: int

    @property
    def ratio(self) -> float:
        """Memory during an update, relative to adapter, gradients and AdamW's two moments."""
        return self.updating / (4 * self.adapter)


@dataclass(frozen=True, slots=True)
class Load:
    """Results of training under load. `worst_logprob`: largest difference between a stored and a recomputed logprob.
    `changed`: number of base arrays that are not the same objects with the same bits. `active` and `arrays`: MLX's
    bytes and number of arrays after 20 updates and at the end.
    """

    updates: int
    seconds: float
    requests: int
    trajectories: int
    versions: int
    untagged: int
    failed: list[str]
    skips: dict[str, int]
    worst_logprob: float
    changed: list[str]
    active: tuple[int, int]
    arrays: tuple[int, int]


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    before = machine.describe()
    machine.warn_if_busy()
    earlier = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    memory = alone(measure_memory) if "memory" in arguments.only else _known(Memory, earlier.get("memory"))
    load = alone(measure_load, arguments.updates) if "load" in arguments.only else _known(Load, earlier.get("load"))
    figures = [*(_of_memory(memory) if memory else ()), *(_of_load(load) if load else ())]
    report.show(figures)
    record: dict[str, Any] = {"machine": before, "facts": FACTS}
    record |= {"memory": asdict(memory) if memory else None, "load": asdict(load) if load else None}
    report.write(arguments.out, record, figures)
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in figures))


def _known(kind: type[T], record: dict[str, Any] | None) -> T | None:
    """The file's record of a part that is not measured now."""
    return None if record is None else kind(**record)


# ---- memory --------------------------------------------------------------------------------------


def measure_memory() -> Memory:
    """Runs this part in this process."""
    return asyncio.run(_memory())


async def _memory() -> Memory:
    async with rig(_config(), GROUP, TOKENS) as made:
        await asyncio.gather(*(made.complete(collect=False) for _ in range(CLIENTS)))
        await asyncio.sleep(SETTLE_S)
        base, _ = await made.on_device(made.footprint)
        peak_serving = made.trainer.peak_bytes
        await made.training.start_adapter("default")
        started = (await made.on_device(made.footprint))[0] - base
        held = _watched(made)
        given = [
            GivenTrajectory(prompt[:50], tuple(range(1000 + at, 1012 + at)), float(at % 8), group_id=str(at // 8))
            for at, prompt in enumerate([made.prompts[0]] * 32)
        ]
        await made.training.update(None, given)
        bank = made.served.adapters.stats().bank_bytes
        await made.load(CLIENTS, lambda: made.status().updates_total >= 4)
        peak = made.trainer.peak_bytes
        adapter = 4 * made.training.parts.learner.trainer.policies["default"].parameters
        return Memory(adapter, base, started, max(held) - base, bank, peak_serving, peak)


def _watched(made: Rig) -> list[int]:
    """MLX's bytes when the gradients of the first update are there, and its step has not begun."""
    held: list[int] = []
    jobs = made.trainer._jobs
    step = jobs._step

    def watched(*of_step: Any) -> Parts[UpdateOutcome]:
        if not made.served.adapters.stats().bank_bytes:
            held.append(mx.get_active_memory() - made.pool_bytes)
        return step(*of_step)

    jobs._step = watched  # type: ignore[method-assign]
    return held


def _of_memory(memory: Memory) -> Iterator[Figure]:
    yield _megabytes("adapter, float32", memory.adapter)
    yield _megabytes("held more when training has begun: adapter and optimizer", memory.started)
    yield _megabytes("held more in an update, gradients too", memory.updating)
    ratio = reported([memory.ratio])
    yield Figure("in an update, to adapter + gradients + optimizer", "x", *ratio, MEMORY_LIMIT)
    yield _megabytes("the bank's slots of served versions", memory.bank)
    yield _megabytes("base model and what serving holds", memory.base)
    yield _megabytes("peak before training", memory.peak_serving)
    yield _megabytes("peak with training", memory.peak)


def _megabytes(name: str, count: int) -> Figure:
    return Figure(name, "MB", *reported([count / 1e6]))


# ---- load ----------------------------------------------------------------------------------------


def measure_load(updates: int) -> Load:
    """In this process."""
    return asyncio.run(_load(updates))


async def _load(updates: int) -> Load:
    async with rig(_config(), GROUP, TOKENS) as made:
        base = await made.on_device(made.base_arrays)
        await made.training.start_adapter("default")
        began = time.monotonic()
        footprints = []
        for target in (min(20, updates), updates):
            await made.load(CLIENTS, lambda target=target: _reached(made, target))  # type: ignore[misc]
            while made.status().state == "updating":
                await asyncio.sleep(0.05)
            footprints.append(await made.on_device(made.footprint))
        seconds, status = time.monotonic() - began, made.status()
        after = await made.on_device(made.base_arrays)
        return Load(
            updates=status.updates_total,
            seconds=seconds,
            requests=next(made.requests),
            trajectories=len(made.drawn),
            versions=len({trajectory.adapter for trajectory in made.drawn}),
            untagged=sum(trajectory.adapter not in made.weights for trajectory in made.drawn),
            failed=made.failed,
            skips=dict(status.skips),
            worst_logprob=await made.on_device(made.worst_logprob),
            changed=[name for name in base if after[name] != base[name]],
            active=(footprints[0][0], footprints[1][0]),
            arrays=(footprints[0][1], footprints[1][1]),
        )


def _reached(made: Rig, target: int) -> bool:
    done = made.status().updates_total
    if done and done % 10 == 0:
        print(f"  {done} updates\r", end="", flush=True)
    return done >= target


def _of_load(load: Load) -> Iterator[Figure]:
    yield Figure(f"updates beside {CLIENTS} clients", "", *reported([load.updates]))
    yield Figure("minutes", "", *reported([load.seconds / 60]))
    yield Figure("requests", "", *reported([load.requests]))
    yield Figure("trajectories", "", *reported([load.trajectories]))
    yield Figure("versions that drew them", "", *reported([load.versions]))
    yield errors("requests that failed", len(load.failed))
    yield errors("trajectories of an unknown version", load.untagged)
    yield errors("base arrays that are others or have changed", len(load.changed))
    yield Figure("worst stored logprob, computed again", "nats", *reported([load.worst_logprob]), LOGPROB_LIMIT)
    yield Figure(
        "active bytes at the end, to those after 20 updates", "x", *reported([load.active[1] / load.active[0]])
    )
    yield Figure("arrays at the end, to those after 20 updates", "x", *reported([load.arrays[1] / load.arrays[0]]))


def _config() -> Config:
    rl = RLConfig(algorithm="dapo", learning_rate=1e-4, batch_size=BATCH, max_staleness=8)
    return configure(None, LORA, rl, rl_training__training_time_share=SHARE)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path, default=report.RESULTS / "training.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
