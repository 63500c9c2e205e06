"""How many steps the curriculum saves where tasks differ in difficulty, and what it costs where they do not.

    python benchmarks/studies/curriculum.py [--only mixed equal] [--seeds 0 1] [--steps 40] [--out FILE]

`mlx_parallm_train` runs on two files of tasks, each with the curriculum and with its tasks drawn uniformly (`floor: 1`,
so that everything else is the same). In `mixed`, one level in four can be learnt: of the others, one is solved by any
answer, and two never are. In `equal`, all levels are alike. The reward of held-out tasks of the level that can be
learnt is evaluated after every second update. Compared is after how many steps of 4 groups it reaches the goal, between
two evaluations by a straight line; the evaluation that reaches it ends the run. The algorithm is plain grpo, which does
not replace groups without a signal. About 3 minutes for each of the 8 runs on two cores. The runs of other seeds that
the file has are kept.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from benchmarks.lib import machine, report
from benchmarks.lib.figures import Figure, reported
from benchmarks.lib.training.command import SPLIT, Line, checked, held_out_rows, logged, prepare, row, train
from benchmarks.lib.training.learning_tasks import questions

KINDS = ("mixed", "equal")
GOAL = 0.4
"""Mean held-out reward that is to be reached. One answer to everything gets 0.5, and when a model gets beyond that is a
matter of chance."""

SAVES, COSTS = 0.7, 1.05
HELD_OUT, EVERY = 64, 2
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
    """One run. `needed`: steps until the goal was reached; the number of steps if it was not. `evaluations`: mean
    held-out rewards, by step. `learnt_share`: of the tasks drawn until then, those of the level that can be learnt."""

    tasks: str
    seed: int
    curriculum: bool
    needed: float
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
    asked = [*product(arguments.only, arguments.seeds)]
    runs = [run for run in _earlier(arguments.out) if (run.tasks, run.seed) not in asked]
    for (tasks, seed), on in product(asked, (True, False)):
        runs.append(_run(tasks, seed, on, arguments.steps))
        print(runs[-1], flush=True)
    figures = list(_figures(runs))
    report.show(figures)
    record = {"machine": before, "setting": report.setting(arguments), "runs": [asdict(run) for run in runs]}
    report.write(arguments.out, record, figures)
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in figures))


def _earlier(file: Path) -> list[Run]:
    """The runs in the file."""
    return [Run(**run) for run in json.loads(file.read_text())["runs"]] if file.exists() else []


def _figures(runs: Sequence[Run]) -> Iterator[Figure]:
    for tasks, limit in zip(KINDS, (SAVES, COSTS), strict=True):
        drawn, uniform = ([run for run in runs if (run.tasks, run.curriculum) == (tasks, on)] for on in (True, False))
        yield Figure(f"{tasks}: steps with the curriculum", "", *reported([run.needed for run in drawn]))
        yield Figure(f"{tasks}: steps, drawn uniformly", "", *reported([run.needed for run in uniform]))
        ratio = sum(run.needed for run in drawn) / sum(run.needed for run in uniform)
        yield Figure(f"{tasks}: ratio of the steps of all seeds", "", *reported([ratio]), limit)
        missed = [run for run in drawn if not run.reached]
        yield Figure(f"{tasks}: runs with the curriculum below the goal", "", *reported([len(missed)]), 0)
    learnt = [run.learnt_share for run in runs if run.tasks == "mixed" and run.curriculum]
    yield Figure("mixed: share of the tasks that can be learnt", "", *reported(learnt))


def _run(tasks: str, seed: int, curriculum: bool, steps: int) -> Run:
    with tempfile.TemporaryDirectory(prefix="curriculum_benchmark_") as name:
        folder = Path(name)
        config = CONFIG.format(floor=0.2 if curriculum else 1.0)
        trained_on = {"mixed": _mixed, "equal": _equal}[tasks]()
        prepare(folder, config, REWARDS, trained_on, held_out_rows(HELD_OUT, kind=LEARNT))
        flags = {
            "reward": "rewards.py:score",
            "eval-tasks": "held_out.jsonl",
            "eval-every": EVERY,
            "eval-size": HELD_OUT,
            "steps": steps,
            "learning-rate": 1e-4,
            "seed": seed,
        }
        began = time.monotonic()
        checked(train(folder, flags, until=_is_learnt))
        seconds = time.monotonic() - began
        lines = logged(folder)
    return _of(lines, tasks, seed, curriculum, steps, seconds)


def _of(lines: Sequence[Line], tasks: str, seed: int, curriculum: bool, steps: int, seconds: float) -> Run:
    evaluations = _evaluations(lines)
    needed = _steps_to_goal(evaluations)
    last = next(line for line in reversed(lines) if line["kind"] == "update")
    levels = {name: value for name, value in last.items() if name.startswith("curriculum/")}
    drawn = {name: value for name, value in levels.items() if name.endswith("/drawn")}
    learnt = drawn.get(f"curriculum/{LEARNT}/drawn", 0.0) / sum(drawn.values())
    reached = needed is not None
    return Run(
        tasks, seed, curriculum, steps if needed is None else needed, reached, learnt, seconds, evaluations, levels
    )


def _is_learnt(lines: Sequence[Line]) -> bool:
    """Whether an evaluation after an update has reached the goal: what comes later changes no figure."""
    return _steps_to_goal(_evaluations(lines)) is not None


def _evaluations(lines: Sequence[Line]) -> list[tuple[int, float]]:
    """Mean rewards by the number of steps before, those without a signal included: their rollouts were drawn too."""
    steps, found = 0, []
    for line in lines:
        steps += line["kind"] == "update"
        if "eval_mean" in line:
            found.append((steps, float(line["eval_mean"])))
    return found


def _steps_to_goal(evaluations: Sequence[tuple[int, float]]) -> float | None:
    """After how many steps the goal is reached, on straight lines between evaluations; None if it is not."""
    for (before, low), (step, mean) in pairwise(evaluations):
        if mean >= GOAL:
            return step if low >= GOAL else before + (step - before) * (GOAL - low) / (mean - low)
    return None


# ---- tasks ---------------------------------------------------------------------------------------


def _mixed() -> Iterator[dict[str, Any]]:
    """As many tasks that can be learnt as tasks that are always solved, and twice as many that never are."""
    dice = random.Random(0)
    for question in questions(slice(0, SPLIT)):
        yield row(question, kind=LEARNT, level=LEARNT)
        yield {"prompt": f"Say something. {dice.random()}", "kind": "any answer", "level": "any answer"}
        for level in ("a guess", "another guess"):
            number = dice.randrange(10**5, 10**6)
            prompt = f"Which number do I think of? My hint is {dice.random()}"
            yield {"prompt": prompt, "answer": f"{number}", "kind": "a guess", "level": level}


def _equal() -> Iterator[dict[str, Any]]:
    """Tasks of one kind, whose levels are the things that they are about."""
    for question in questions(slice(0, SPLIT)):
        yield row(question, kind=LEARNT, level=question.thing)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=report.RESULTS / "curriculum.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
