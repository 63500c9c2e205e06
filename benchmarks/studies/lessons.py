"""Gives the lessons of the dashboard's view Teach to the bundled model, each on a server of its own.

    python benchmarks/studies/lessons.py [--only "say banana" "ask back"] [--seeds 0 1] [--minutes 10] [--resume]
        [--out FILE]

A lesson is three prompts and a rule for the reward. The figures are the mean reward of the first answers and of the
last ones, and the time that it took. The curves are drawn into a PNG beside the record. At most 40 minutes on two
cores. After each lesson the record is written; --resume keeps the lessons that it has and makes the others.
"""

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.lib import machine, report
from benchmarks.lib.alone import alone
from benchmarks.lib.figures import Figure, reported
from benchmarks.lib.training.lessons import LESSONS, Taught, teach

GAIN = 0.3
"""Least gain of the mean reward."""


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    before = machine.describe()
    runs = _earlier(arguments.out) if arguments.resume else []
    done = {(run.lesson, run.seed) for run in runs}
    for lesson, seed in [(lesson, seed) for seed in arguments.seeds for lesson in arguments.only]:
        if (lesson, seed) not in done:
            runs.append(alone(_run, lesson, seed, 60 * arguments.minutes))
            print(runs[-1], flush=True)
            record = {"machine": before, "setting": report.setting(arguments), "runs": [asdict(run) for run in runs]}
            report.write(arguments.out, record, list(_figures(runs)))
            _draw(runs, arguments.out.with_suffix(".png"))
    figures = list(_figures(runs))
    report.show(figures)
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in figures))


def _run(lesson: str, seed: int, limit_s: float) -> Taught:
    return asyncio.run(teach(lesson, seed, limit_s))


def _earlier(file: Path) -> list[Taught]:
    """The lessons in the record."""
    record = json.loads(file.read_text()) if file.exists() else {}
    return [Taught(**run) for run in record.get("runs", [])]


def _figures(runs: Sequence[Taught]) -> Iterator[Figure]:
    for lesson in LESSONS:
        if some := [run for run in runs if run.lesson == lesson]:
            yield Figure(f"{lesson}: reward of the first answers", "", *reported([run.rewards[0] for run in some]))
            yield Figure(f"{lesson}: reward of the last answers", "", *reported([run.rewards[-1] for run in some]))
            gains = [run.gain for run in some]
            yield Figure(f"{lesson}: least gain", "", reported(gains)[0], min(gains), GAIN, at_least=True)
            yield Figure(f"{lesson}: updates", "", *reported([float(run.updates) for run in some]))
            yield Figure(f"{lesson}: time", "min", *reported([run.seconds / 60 for run in some]))


def _draw(runs: Sequence[Taught], file: Path) -> None:
    """Plots the curve of each lesson."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4))
    for run in runs:
        axes.plot(run.rewards, marker=".", label=f"{run.lesson}, seed {run.seed}", linewidth=1.2)
    axes.set(xlabel="point of the curve", ylabel="mean reward of the answers", ylim=(-0.02, 1.02))
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120, bbox_inches="tight")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=tuple(LESSONS), default=tuple(LESSONS))
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1))
    parser.add_argument("--minutes", type=float, default=10.0, help="after which a lesson is stopped")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "lessons.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
