"""How many updates the curriculum saves where tasks differ in difficulty, and what it costs where they do not.

    python benchmarks/curriculum.py [--seeds 0 1] [--steps 40] [--out FILE]

`mlx_parallm_train` runs on two files of tasks, each with the curriculum and with its tasks drawn uniformly (`floor: 1`,
so that everything else is the same). In `mixed`, one level in four can be learnt: of the others, one is solved by any
answer, and two never are. In `equal`, all levels are alike. The reward of held-out tasks of the level that can be
learnt is evaluated after every second update. Compared is after how many updates it reaches the goal, between two
evaluations by a straight line. The algorithm is plain grpo, which does not replace groups without a signal. About 10
minutes for each of the 8 runs on two cores.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from lib import machine, report
from lib.figures import Figure, reported
from lib.training.learning_tasks import NEGATIVE, POSITIVE, THINGS

HERE = Path(__file__).parent
GOAL = 0.6
"""Mean held-out reward that counts as learnt."""

SAVES, COSTS = 0.7, 1.05
SPLIT, HELD_OUT, EVERY = 16, 32, 2
LEARNT = "one word"

CONFIG = """\
rl_training:
  algorithm: grpo
  gradient_checkpointing: false
  loss:
    entropy_coef: 0.02
  curriculum:
    enabled: true
    floor: {floor}
"""

REWARDS = '''\
import re


def score(sample):
    """By level: the right word's share of the answer, or 1 for any answer, or 0 for all but a number that is drawn."""
    kind, words = sample.metadata["kind"], re.findall("[a-z0-9]+", sample.text.lower())
    if kind == "any answer":
        return float(bool(words))
    if kind == "a guess":
        return float(words == [sample.metadata["answer"]])
    answer = sample.metadata["answer"]
    wrong = {"positive": "negative", "negative": "positive"}[answer]
    if answer not in words or wrong in words:
        return 0.0
    return (1.0 if sample.finish_reason == "stop" else 0.5) / len(words)
'''


@dataclass(frozen=True, slots=True)
class Run:
    """One run. `updates`: until the goal was reached; the number of steps if it was not. `evaluations`: mean held-out
    rewards, by step. `learnt_share`: of the tasks drawn, those of the level that can be learnt."""

    tasks: str
    seed: int
    curriculum: bool
    updates: float
    reached: bool
    learnt_share: float
    seconds: float
    evaluations: list[tuple[int, float]]
    levels: dict[str, float]


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    before = machine.describe()
    asked = product(("mixed", "equal"), arguments.seeds, (True, False))
    runs = [_run(tasks, seed, on, arguments.steps) for tasks, seed, on in asked]
    figures = list(_figures(runs))
    report.show(figures)
    record = {"machine": before, "setting": report.setting(arguments), "runs": [asdict(run) for run in runs]}
    report.write(arguments.out, record, figures)
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in figures))


def _figures(runs: Sequence[Run]) -> Iterator[Figure]:
    for tasks, limit in (("mixed", SAVES), ("equal", COSTS)):
        drawn, uniform = ([run for run in runs if (run.tasks, run.curriculum) == (tasks, on)] for on in (True, False))
        yield Figure(f"{tasks}: updates with the curriculum", "", *reported([run.updates for run in drawn]))
        yield Figure(f"{tasks}: updates, drawn uniformly", "", *reported([run.updates for run in uniform]))
        ratio = sum(run.updates for run in drawn) / sum(run.updates for run in uniform)
        yield Figure(f"{tasks}: ratio of the updates of all seeds", "", *reported([ratio]), limit)
        missed = [run for run in drawn if not run.reached]
        yield Figure(f"{tasks}: runs with the curriculum below the goal", "", *reported([len(missed)]), 0)
    learnt = [run.learnt_share for run in runs if run.tasks == "mixed" and run.curriculum]
    yield Figure("mixed: share of the tasks that can be learnt", "", *reported(learnt))


def _run(tasks: str, seed: int, curriculum: bool, steps: int) -> Run:
    with tempfile.TemporaryDirectory(prefix="curriculum_benchmark_") as name:
        folder = Path(name)
        (folder / "rewards.py").write_text(REWARDS)
        (folder / "config.yaml").write_text(CONFIG.format(floor=0.2 if curriculum else 1.0))
        _write(folder / "tasks.jsonl", {"mixed": _mixed, "equal": _equal}[tasks]())
        held_out = [*_one_word(slice(SPLIT, None))]
        _write(folder / "held_out.jsonl", random.Random(0).sample(held_out, HELD_OUT))
        flags = {
            "config": "config.yaml",
            "environment": "tasks.jsonl",
            "reward": "rewards.py:score",
            "eval-tasks": "held_out.jsonl",
            "eval-every": EVERY,
            "eval-size": HELD_OUT,
            "steps": steps,
            "max-tokens": 12,
            "learning-rate": 1e-4,
            "seed": seed,
            "checkpoint-dir": "run",
            "log": "metrics.jsonl",
        }
        command = [sys.executable, "-m", "mlx_parallm", "train"]
        command += [part for flag, value in flags.items() for part in (f"--{flag}", str(value))]
        began = time.monotonic()
        subprocess.run(command, cwd=folder, check=True)
        seconds = time.monotonic() - began
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return _of(lines, tasks, seed, curriculum, steps, seconds)


def _of(lines: Sequence[dict[str, Any]], tasks: str, seed: int, curriculum: bool, steps: int, seconds: float) -> Run:
    evaluations = [(int(line["step"]), float(line["eval_mean"])) for line in lines if "eval_mean" in line]
    updates = _updates_to_goal(evaluations)
    levels = {name: value for name, value in lines[-1].items() if name.startswith("curriculum/")}
    drawn = {name: value for name, value in levels.items() if name.endswith("/drawn")}
    learnt = drawn.get(f"curriculum/{LEARNT}/drawn", 0.0) / sum(drawn.values())
    reached = updates is not None
    return Run(
        tasks, seed, curriculum, steps if updates is None else updates, reached, learnt, seconds, evaluations, levels
    )


def _updates_to_goal(evaluations: Sequence[tuple[int, float]]) -> float | None:
    """After how many updates the goal is reached, on straight lines between evaluations; None if it is not."""
    for (before, low), (step, mean) in pairwise(evaluations):
        if mean >= GOAL:
            return step if low >= GOAL else before + (step - before) * (GOAL - low) / (mean - low)
    return None


# ---- tasks ---------------------------------------------------------------------------------------


def _mixed() -> Iterator[dict[str, Any]]:
    """As many tasks that can be learnt as tasks that are always solved, and twice as many that never are."""
    dice = random.Random(0)
    for task in _one_word(slice(0, SPLIT)):
        yield {**task, "level": LEARNT}
        yield {"prompt": f"Say something. {dice.random()}", "kind": "any answer", "level": "any answer"}
        for level in ("a guess", "another guess"):
            number = dice.randrange(10**5, 10**6)
            prompt = f"Which number do I think of? My hint is {dice.random()}"
            yield {"prompt": prompt, "answer": f"{number}", "kind": "a guess", "level": level}


def _equal() -> Iterator[dict[str, Any]]:
    """Tasks of one kind, whose levels are the things that they are about."""
    for task in _one_word(slice(0, SPLIT)):
        yield {**task, "level": task["thing"]}


def _one_word(part: slice) -> Iterator[dict[str, Any]]:
    for answer, adjectives in (("positive", POSITIVE[part]), ("negative", NEGATIVE[part])):
        for adjective, thing in product(adjectives, THINGS):
            prompt = f"The {thing} was {adjective}. Positive or negative?"
            yield {"prompt": prompt, "answer": answer, "kind": LEARNT, "thing": thing}


def _write(file: Path, tasks: Sequence[dict[str, Any]] | Iterator[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(task) + "\n" for task in tasks))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "curriculum.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
