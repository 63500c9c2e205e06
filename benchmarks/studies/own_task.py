"""Trains the bundled model on a task of the user's own, given by two files in an empty folder.

    python benchmarks/studies/own_task.py [--seeds 0 1] [--steps 24] [--out FILE]

`mlx_parallm_train` runs as a user runs it: with a file of tasks, a file with a reward function, and a file of held-out
tasks, all written to an empty folder. The control has random rewards, and its evaluation the same reward function. The
reward of 64 held-out tasks is compared before and after. About 5 minutes for each run on two cores.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib import machine, report
from benchmarks.lib.figures import Figure, reported
from benchmarks.lib.training.command import SHARE_OF_WORDS, SPLIT, checked, held_out_rows, logged, prepare, row, train
from benchmarks.lib.training.learning_tasks import HELD_OUT, questions

GAIN, CONTROL_GAIN = 0.5, 0.1
CONFIG = """\
rl_training:
  algorithm: dapo
  gradient_checkpointing: false
  loss:
    entropy_coef: 0.02
"""
"""As in `learning.py`: without the entropy bonus a small model soon gives one answer to everything."""

REWARDS = f'''\
import random

{SHARE_OF_WORDS}

def chance(sample):
    """Random rewards for training; held-out tasks have the real one."""
    return score(sample) if "held_out" in sample.metadata else random.random()
'''


@dataclass(frozen=True, slots=True)
class Run:
    """One run. `rewards`: mean reward of each update. `before`, `after`: mean held-out rewards."""

    seed: int
    control: bool
    before: float
    after: float
    seconds: float
    rewards: list[float]

    @property
    def gain(self) -> float:
        return self.after - self.before


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    before = machine.describe()
    runs = [_run(seed, arguments.steps, control=False) for seed in arguments.seeds]
    runs.append(_run(arguments.seeds[0], arguments.steps, control=True))
    figures = list(_figures(runs))
    report.show(figures)
    record = {"machine": before, "setting": report.setting(arguments), "runs": [asdict(run) for run in runs]}
    report.write(arguments.out, record, figures)
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in figures))


def _figures(runs: Sequence[Run]) -> Any:
    mine, (control,) = [run for run in runs if not run.control], [run for run in runs if run.control]
    yield Figure("held-out reward before", "", *reported([run.before for run in mine]))
    yield Figure("held-out reward after", "", *reported([run.after for run in mine]))
    yield Figure("gain", "", *reported([run.gain for run in mine]), GAIN, at_least=True)
    yield Figure("gain with random rewards", "", *reported([control.gain]), CONTROL_GAIN)
    yield Figure("minutes from the empty folder", "", *reported([run.seconds / 60 for run in mine]))


def _run(seed: int, steps: int, control: bool) -> Run:
    with tempfile.TemporaryDirectory(prefix="own_task_benchmark_") as name:
        folder = Path(name)
        tasks = [row(question) for question in questions(slice(0, SPLIT))]
        prepare(folder, CONFIG, REWARDS, tasks, held_out_rows(held_out=True))
        flags = {
            "reward": f"rewards.py:{'chance' if control else 'score'}",
            "eval-tasks": "held_out.jsonl",
            "eval-every": steps,
            "eval-size": HELD_OUT,
            "steps": steps,
            "learning-rate": 5e-4,
            "seed": seed,
        }
        began = time.monotonic()
        checked(train(folder, flags))
        seconds = time.monotonic() - began
        lines = logged(folder)
    return _of(lines, seed, control, seconds)


def _of(lines: Sequence[Mapping[str, Any]], seed: int, control: bool, seconds: float) -> Run:
    evaluations = [line["eval_mean"] for line in lines if "eval_mean" in line]
    rewards = [line["reward_mean"] for line in lines if line["kind"] == "update" and "reward_mean" in line]
    return Run(seed, control, evaluations[0], evaluations[-1], seconds, rewards)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1))
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--out", type=Path, default=report.RESULTS / "own_task.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
