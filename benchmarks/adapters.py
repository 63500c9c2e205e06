"""Measures the cost of many adapters in one batch, and of publishing a version while requests run.

    python benchmarks/adapters.py [--quick] [--repeats 3] [--only decode served publish memory] [--out FILE]

`decode`, `publish` and `memory` each drive the bundled model in a process of their own, without HTTP; `served` sends
requests to a real server. It takes about 20 minutes on two cores, 6 with --quick, prints a table and writes JSON.
Nothing else should run on the machine meanwhile.
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
from benchmarks.lib.adapters import decode as adapter_decode
from benchmarks.lib.adapters import figures as adapter_figures
from benchmarks.lib.adapters import memory as adapter_memory
from benchmarks.lib.adapters import publish as adapter_publish
from benchmarks.lib.adapters import served as adapter_served
from benchmarks.lib.adapters.decode import DecodeCost
from benchmarks.lib.adapters.memory import AdapterMemory
from benchmarks.lib.adapters.publish import Churn
from benchmarks.lib.adapters.served import ServedPoint
from benchmarks.lib.alone import alone
from benchmarks.lib.figures import Figure
from benchmarks.lib.peers import PROGRAMS

PARTS = ("decode", "served", "publish", "memory")
PUBLISHES, QUICK_PUBLISHES = 200, 12


@dataclass(slots=True)
class Results:
    """The measurements of the parts that ran."""

    decode: DecodeCost | None = None
    served: list[ServedPoint] = field(default_factory=list)
    publish: Churn | None = None
    memory: list[AdapterMemory] = field(default_factory=list)

    def judged(self) -> Iterator[Figure]:
        if self.decode:
            yield from adapter_figures.of_decode(self.decode)
        if self.served:
            yield from adapter_figures.of_served(self.served)
        if self.publish:
            yield from adapter_figures.of_publish(self.publish)
        yield from adapter_figures.of_memory(self.memory)

    def record(self) -> dict[str, Any]:
        """The measurements as JSON, with one value per repeat where there are repeats."""
        return {
            "decode": asdict(self.decode) if self.decode else None,
            "served": [asdict(point) for point in self.served],
            "publish": self.publish.record() if self.publish else None,
            "memory": [asdict(kind) for kind in self.memory],
        }


@dataclass(frozen=True, slots=True)
class Bench:
    """The settings of one run."""

    arguments: argparse.Namespace

    def run(self) -> Results:
        results = Results()
        parts = {
            "decode": self._decode,
            "served": self._served,
            "publish": self._publish,
            "memory": self._memory,
        }
        for name in self.arguments.only:
            print(name, flush=True)
            parts[name](results)
        return results

    def _decode(self, results: Results) -> None:
        results.decode = alone(adapter_decode.measure, adapter_decode.ROUNDS_A_REPEAT * self._repeats)

    def _served(self, results: Results) -> None:
        with tempfile.TemporaryDirectory(prefix="adapters_benchmark_") as folder:
            model, adapters = Path(folder) / "model", Path(folder) / "adapters"
            subprocess.run([sys.executable, str(PROGRAMS / "model_dir.py"), str(model)], check=True)
            results.served = asyncio.run(adapter_served.measure(model, adapters, self._repeats, self.arguments.quick))

    def _publish(self, results: Results) -> None:
        results.publish = alone(adapter_publish.measure, QUICK_PUBLISHES if self.arguments.quick else PUBLISHES)

    def _memory(self, results: Results) -> None:
        results.memory = alone(adapter_memory.measure)

    @property
    def _repeats(self) -> int:
        return 1 if self.arguments.quick else self.arguments.repeats


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # kills all child processes, as Ctrl-C does
    before = machine.describe()
    machine.warn_if_busy()
    results = Bench(arguments).run()
    judged = list(results.judged())
    report.show(judged)
    report.write(arguments.out, {"machine": before, "setting": report.setting(arguments), **results.record()}, judged)
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in judged))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one repeat, fewer and shorter requests, 12 publishes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path, default=report.RESULTS / "adapters.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
