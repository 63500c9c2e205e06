"""Trains reward models on preferences about adjectives, and asks how often they agree with held-out ones.

    python benchmarks/studies/reward_model.py [--seeds 0 1] [--preferences 192] [--held-out 128] [--out FILE]

Each preference is about a question of the task `sentiment`, whose right answer is preferred to the wrong one, both in
the same wording, which differs from question to question. The adjectives of the held-out preferences are not trained
on. The bundled model sees each preference once, in steps of eight. `control`: the same with preferences that a coin
decides, which should agree with the same held-out preferences as often as not. About 4 minutes on two cores.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.lib import machine, report
from benchmarks.lib.figures import Figure, reported
from benchmarks.lib.training.learning_tasks import NEGATIVE, POSITIVE, THINGS

WANTED = 0.8
CHANCE = (0.35, 0.65)
TRAINED = slice(0, 16)
"""Of the adjectives of each side; the rest is held out."""
QUESTIONS = (
    "The {thing} was {adjective}. Positive or negative?",
    "Is this review positive or negative? The {thing} was {adjective}.",
    "Classify the sentiment: what a {adjective} {thing}!",
    "Somebody says that the {thing} was {adjective}. Did they like it?",
)
ANSWERS = ("{word}", "It is {word}.", "I would say {word}.", "The sentiment is {word}.", "That sounds {word} to me.")
_AGREEMENT = re.compile(r"held-out preferences: ([0-9.]+)")


@dataclass(frozen=True, slots=True)
class Run:
    """One reward model. `agreement`: the share of the held-out preferences, 0 to 1."""

    seed: int
    control: bool
    agreement: float
    seconds: float


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    before = machine.describe()
    runs = [
        _run(seed, control, arguments.preferences, arguments.held_out)
        for seed in arguments.seeds
        for control in (False, True)
    ]
    figures = list(_figures(runs))
    report.show(figures)
    record = {"machine": before, "setting": report.setting(arguments), "runs": [asdict(run) for run in runs]}
    report.write(arguments.out, record, figures)
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in figures))


def _figures(runs: Sequence[Run]) -> Iterator[Figure]:
    learnt = [run.agreement for run in runs if not run.control]
    yield Figure("agreement with held-out preferences", "", *reported(learnt), WANTED, at_least=True)
    controls = [run.agreement for run in runs if run.control]
    yield Figure("the same, trained on a coin's preferences", "", *reported(controls))
    low, high = CHANCE
    outside = sum(not low <= agreement <= high for agreement in controls)
    yield Figure(f"controls outside {low:g} to {high:g}", "", *reported([outside]), 0)


def _run(seed: int, control: bool, count: int, held_out: int) -> Run:
    print(f"seed {seed}{', control' if control else ''}", flush=True)
    with tempfile.TemporaryDirectory(prefix="reward_model_benchmark_") as place:
        folder = Path(place)
        _write(folder / "train.jsonl", TRAINED, count, seed, control)
        _write(folder / "held_out.jsonl", slice(TRAINED.stop, None), held_out, seed + 1000)
        command = [sys.executable, "-m", "mlx_parallm", "reward-model", "sentiment", "--seed", str(seed)]
        command += ["--preferences", "train.jsonl", "--held-out", "held_out.jsonl", "--adapter-dir", "adapters"]
        command += ["--epochs", "1", "--batch-size", "8"]
        began = time.monotonic()
        done = subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
        print(done.stdout, flush=True)
        found = _AGREEMENT.search(done.stdout)
        assert found is not None
        return Run(seed, control, float(found[1]), time.monotonic() - began)


def _write(file: Path, adjectives: slice, count: int, seed: int, by_coin: bool = False) -> None:
    """Writes different preferences about these adjectives. `by_coin`: which answer is preferred is random."""
    randomly = random.Random(seed)
    sides = (("positive", "negative", POSITIVE[adjectives]), ("negative", "positive", NEGATIVE[adjectives]))
    cases = [
        (question.format(thing=thing, adjective=adjective), answer, right, wrong)
        for right, wrong, words in sides
        for adjective in words
        for thing in THINGS
        for question in QUESTIONS
        for answer in ANSWERS
    ]
    with file.open("w") as lines:
        for question, answer, right, wrong in randomly.sample(cases, count):
            words = [right, wrong]
            if by_coin:
                randomly.shuffle(words)
            chosen, rejected = (answer.format(word=word) for word in words)
            lines.write(json.dumps({"prompt": question, "chosen": chosen, "rejected": rejected}) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--preferences", type=int, default=192, help="that each reward model is trained on")
    parser.add_argument("--held-out", type=int, default=128)
    parser.add_argument("--out", type=Path, default=report.RESULTS / "reward_model.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
