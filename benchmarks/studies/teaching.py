"""Measures what the bundled model learns from preferences alone, and from a teacher.

    python benchmarks/studies/teaching.py [--only preferences distillation] [--seeds 0 1] [--resume] [--out FILE]

`preferences`: DPO on up to 200 pairs of the base model's answers, of which the shorter is preferred; how often the
policy's answers to 64 held-out prompts are preferred to the base model's. `distillation`: an adapter imitates the base
model with a prompt of some 200 tokens before each question, a system message and eight examples; rewards of 64 held-out
questions without it. About two hours on two cores. After each run, JSON is written; --resume keeps the runs that the
file has and makes the others.
"""

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lib import machine, report
from benchmarks.lib.alone import alone
from benchmarks.lib.figures import Figure, reported
from benchmarks.lib.training import teaching
from benchmarks.lib.training.teaching import Distilled, Preferred

PARTS = ("preferences", "distillation")
WIN_RATE = 0.8
APART = 0.1
"""Largest difference between the reward of the adapter and that of the base model with the long prompt."""


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    before = machine.describe()
    results = _earlier(arguments.out) if arguments.resume else _Results()
    for part in arguments.only:
        runs: list[Any] = getattr(results, part)
        for seed in set(arguments.seeds) - {run.seed for run in runs}:
            runs.append(alone(_run, part, seed))
            record = {"machine": before, "setting": report.setting(arguments), **asdict(results)}
            report.write(arguments.out, record, results.figures())
    figures = results.figures()
    report.show(figures)
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in figures))


@dataclass(frozen=True, slots=True)
class _Results:
    """The runs that were made, of each part."""

    preferences: list[Preferred] = field(default_factory=list)
    distillation: list[Distilled] = field(default_factory=list)

    def figures(self) -> list[Figure]:
        return [*_of_preferences(self.preferences), *_of_distillation(self.distillation)]


def _earlier(file: Path) -> _Results:
    """The runs in the file."""
    record = json.loads(file.read_text()) if file.exists() else {}
    preferences = [Preferred(**run) for run in record.get("preferences", [])]
    return _Results(preferences, [Distilled(**run) for run in record.get("distillation", [])])


def _of_preferences(runs: list[Preferred]) -> Iterator[Figure]:
    if runs:
        yield Figure("preferences: win rate before", "", *reported([run.before for run in runs]))
        yield Figure("preferences: win rate after", "", *reported([run.after for run in runs]), WIN_RATE, at_least=True)
        yield Figure("preferences: tokens of an answer before", "", *reported([run.tokens_before for run in runs]))
        yield Figure("preferences: tokens of an answer after", "", *reported([run.tokens_after for run in runs]))


def _of_distillation(runs: list[Distilled]) -> Iterator[Figure]:
    if runs:
        short = [run.teacher - run.pupil for run in runs]
        yield Figure("distillation: base model", "", *reported([run.base for run in runs]))
        yield Figure("distillation: base model with the long prompt", "", *reported([run.teacher for run in runs]))
        yield Figure("distillation: adapter without it", "", *reported([run.pupil for run in runs]))
        yield Figure("distillation: how much less than the base model with it", "", *reported(short), APART)


def _run(part: str, seed: int) -> Any:
    return asyncio.run({"preferences": teaching.preferences, "distillation": teaching.distillation}[part](seed))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "teaching.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
