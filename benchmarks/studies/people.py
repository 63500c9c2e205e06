"""Measures what the bundled model learns from people alone: from thumbs, most of them late, and from corrections.

    python benchmarks/studies/people.py [--only thumbs corrections] [--seeds 0 1] [--questions N] [--resume]
        [--out FILE]

300 simulated users ask for the class of an adjective in one word, twice each (once where they correct the answer). Up
to an hour later, by a simulated clock, each gives a thumb, up if the answer has one word, or says what the class is.
They are right four times in five; in the control, as often as a coin. The figures are of 64 held-out prompts. About
half an hour on two cores. After each run, JSON is written; --resume keeps the runs that the file has and makes the
others.
"""

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks.lib import machine, report
from benchmarks.lib.alone import alone
from benchmarks.lib.figures import Figure, reported
from benchmarks.lib.training import people
from benchmarks.lib.training.people import QUESTIONS_EACH, USERS, Taught

QUESTIONS = {"thumbs": USERS * QUESTIONS_EACH, "corrections": USERS}
LEARNING_RATES = {"thumbs": 3e-4, "corrections": 1e-3}
GAIN = 0.2
"""Least gain of the mean score of held-out answers: 1 for one word; 1 for the right word, and -1 for the wrong one."""


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    before = machine.describe()
    runs = _earlier(arguments.out) if arguments.resume else []
    done = {(run.part, run.seed, run.control) for run in runs}
    wanted = [(part, seed, control) for part in arguments.only for seed in arguments.seeds for control in (False, True)]
    for each in wanted:
        if each not in done:
            runs.append(alone(_run, *each, arguments.questions or QUESTIONS[each[0]]))
            print(runs[-1], flush=True)
            record = {"machine": before, "setting": report.setting(arguments), "runs": [asdict(run) for run in runs]}
            report.write(arguments.out, record, list(_figures(runs)))
    figures = list(_figures(runs))
    report.show(figures)
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in figures))


def _earlier(file: Path) -> list[Taught]:
    """The runs in the file."""
    record = json.loads(file.read_text()) if file.exists() else {}
    return [Taught(**run) for run in record.get("runs", [])]


def _figures(runs: list[Taught]) -> Iterator[Figure]:
    for part in QUESTIONS:
        taught, control = ([run for run in runs if (run.part, run.control) == (part, each)] for each in (False, True))
        for name, some in ((part, taught), (f"{part}, control", control)):
            if some:
                yield Figure(f"{name}: held-out score before", "", *reported([run.before for run in some]))
                yield Figure(f"{name}: held-out score after", "", *reported([run.after for run in some]))
        if taught:
            gains = [run.after - run.before for run in taught]
            yield Figure(f"{part}: least gain", "", reported(gains)[0], min(gains), GAIN, at_least=True)
        if control:
            gains = [run.after - run.before for run in control]
            yield Figure(f"{part}, control: largest gain", "", reported(gains)[0], max(gains), GAIN)
    late = [run.learnt.get("late_feedback", {}).get("trained", 0) for run in runs if run.part == "thumbs"]
    in_time = [run.learnt.get("feedback", {}).get("trained", 0) for run in runs if run.part == "thumbs"]
    if late:
        yield Figure("thumbs: trained on in time", "answers", *reported(in_time))
        yield Figure("thumbs: trained on late", "answers", *reported(late))


def _run(part: str, seed: int, control: bool, questions: int) -> Taught:
    return asyncio.run(people.taught(part, seed, control, questions, LEARNING_RATES[part]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*QUESTIONS], default=[*QUESTIONS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--questions", type=int, help="of all users together; for a quick look")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "people.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
