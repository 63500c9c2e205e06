"""Measures the cost of training for served requests, and its memory. Prints two tables and their figures.

    python benchmarks/serve_and_train.py [--quick] [--repeats 3] [--only serving publish update memory] [--out FILE]

`serving`: a real server with 8 clients; inference only and training at 5, 12, 25 and 50 % of the time take turns.
`publish`: the time from an optimizer step to the first request that uses its version. `update`: the training part of an
update, compared with a plain trainer. `memory`: MLX's memory, compared with a serving process and a separate trainer.
Each part has processes of its own. It takes about 40 minutes on two cores with --repeats 2, a quarter of an hour with
--quick. Nothing else should run on the machine meanwhile.
"""

import argparse
import asyncio
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lib import machine, report
from benchmarks.lib.alone import alone
from benchmarks.lib.figures import Figure
from benchmarks.lib.peers import PROGRAMS
from benchmarks.lib.training import batch as rl_batch
from benchmarks.lib.training import figures as rl_figures
from benchmarks.lib.training import memory as rl_memory
from benchmarks.lib.training import publish as rl_publish
from benchmarks.lib.training import served as rl_served
from benchmarks.lib.training import tables as rl_tables
from benchmarks.lib.training import update as rl_update
from benchmarks.lib.training.memory import ADAPTERS, SERVING, TRAINER, TRAINING, Load, Memory
from benchmarks.lib.training.publish import Live
from benchmarks.lib.training.served import Served
from benchmarks.lib.training.update import Cost

PARTS = ("serving", "publish", "update", "memory")
PUBLISHES, QUICK_PUBLISHES = 20, 4
BUNDLED, BUNDLED_LOAD = "bundled model", Load(rows=8, tokens=64, updates=2)
WIDE, WIDE_LOAD = "random model, 2 GB", Load(rows=4, tokens=16, updates=1)


@dataclass(slots=True)
class Results:
    """The measurements of the parts that ran."""

    served: Served | None = None
    lives: list[Live] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    memories: list[Memory] = field(default_factory=list)

    def judged(self) -> Iterator[Figure]:
        if self.served:
            yield from rl_figures.of_served(self.served)
        if self.lives:
            yield from rl_figures.of_publish(self.lives)
        yield from rl_figures.of_update(self.costs)
        yield from rl_figures.of_memory(self.memories)

    def record(self) -> dict[str, Any]:
        """The measurements as JSON, with one value per repeat."""
        return {
            "serving": asdict(self.served) if self.served else None,
            "publish": [asdict(live) for live in self.lives],
            "update": [asdict(cost) for cost in self.costs],
            "memory": [asdict(memory) for memory in self.memories],
        }


@dataclass(frozen=True, slots=True)
class Bench:
    """The settings of one run. `folder`: where logs and models are written."""

    arguments: argparse.Namespace
    folder: Path

    def run(self) -> Results:
        results = Results()
        parts = {
            "serving": self._serving,
            "publish": self._publish,
            "update": self._update,
            "memory": self._memory,
        }
        for name in self.arguments.only:
            print(name, flush=True)
            parts[name](results)
        return results

    def _serving(self, results: Results) -> None:
        results.served = asyncio.run(rl_served.measure(self.folder, self._repeats, self.arguments.quick))

    def _publish(self, results: Results) -> None:
        results.lives = alone(rl_publish.measure, QUICK_PUBLISHES if self.arguments.quick else PUBLISHES)

    def _update(self, results: Results) -> None:
        results.costs = alone(rl_update.measure, self._repeats)

    def _memory(self, results: Results) -> None:
        model = self._model("model_dir.py")
        kinds = (SERVING, ADAPTERS, TRAINING, TRAINER)
        results.memories.append(rl_memory.measure(BUNDLED, model, BUNDLED_LOAD, kinds))
        if not self.arguments.quick:
            model = self._model("wide_model.py")
            results.memories.append(rl_memory.measure(WIDE, model, WIDE_LOAD, (SERVING, TRAINING, TRAINER)))

    def _model(self, script: str) -> Path:
        """Runs a script of `lib/programs` that writes a model directory. Returns the directory."""
        folder = self.folder / Path(script).stem
        subprocess.run([sys.executable, str(PROGRAMS / script), str(folder)], check=True)
        return folder

    @property
    def _repeats(self) -> int:
        return 1 if self.arguments.quick else self.arguments.repeats


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # kills all child processes, as Ctrl-C does
    before = machine.describe()
    machine.warn_if_busy()
    with tempfile.TemporaryDirectory(prefix="serve_and_train_benchmark_") as folder:
        results = Bench(arguments, Path(folder)).run()
    judged = list(results.judged())
    report.show(judged)
    rl_tables.show(results.served, results.memories)
    setting = report.setting(arguments) | {"batch": rl_batch.FACTS}
    report.write(arguments.out, {"machine": before, "setting": setting, **results.record()}, judged)
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in judged))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repeat, shorter windows, 4 publishes, no wide model")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path, default=report.RESULTS / "serve_and_train.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
