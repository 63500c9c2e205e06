"""Answers that must follow a JSON schema: how many are finished and valid, and what the masks cost.

    python benchmarks/structured.py [--quick] [--repeats 3] [--only schemas throughput] [--out FILE]

`schemas`: a real server of the bundled model is asked for an answer to each of 200 schemas (`schemas.json`), 16 at a
time, at most 256 tokens each; every answer that is finished is validated. `throughput`: decode of 16 rows with a schema
of their own each, and of 16 free rows, in turns. About 8 minutes on two cores. Leave the machine alone meanwhile.
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import machine
import report
import structured_answers
import structured_decode
from alone import alone
from figures import Figure, errors, reported
from spread import ratios
from structured_answers import Answered
from structured_decode import BOUND, FREE, Rates

HERE = Path(__file__).parent
PARTS = ("schemas", "throughput")
FINISHED, KEPT = 0.9, 0.8


@dataclass(slots=True)
class Results:
    """What the parts that ran have measured."""

    answers: list[Answered] = field(default_factory=list)
    rates: Rates = field(default_factory=dict)

    def judged(self) -> Iterator[Figure]:
        if self.answers:
            yield from _of_answers(self.answers)
        if self.rates:
            kept = ratios(self.rates[BOUND], self.rates[FREE])
            yield Figure("16 rows with schemas against 16 free ones", "x", kept, kept.median, KEPT, at_least=True)
            yield Figure("16 rows with schemas", "tok/s", *reported(self.rates[BOUND]))
            yield Figure("16 free rows", "tok/s", *reported(self.rates[FREE]))


def _of_answers(answers: list[Answered]) -> Iterator[Figure]:
    finished = [answer for answer in answers if answer.finished]
    yield Figure("schemas", "", *reported([len(answers)]))
    share = len(finished) / len(answers)
    yield Figure("answers finished within the tokens", "", *reported([share]), FINISHED, at_least=True)
    yield errors("finished answers that the schema does not allow", sum(not answer.valid for answer in finished))
    yield errors("requests that failed", sum(bool(answer.error) for answer in answers))
    yield Figure("tokens of a finished answer", "", *reported([answer.tokens for answer in finished]))


def main() -> int:
    """Exit code 0 when every figure that was judged is met, 1 when one is not."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: every child is killed on the way out
    before = machine.describe()
    machine.warn_if_busy()
    results = _run(arguments)
    judged = list(results.judged())
    report.show([], {}, judged)
    report.write(arguments.out, {"machine": before, "setting": _setting(arguments), **asdict(results)}, judged)
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in judged))


def _run(arguments: argparse.Namespace) -> Results:
    results = Results()
    if "schemas" in arguments.only:
        schemas = json.loads((HERE / "schemas.json").read_text())["schemas"]
        with tempfile.TemporaryDirectory(prefix="structured_benchmark_") as logs:
            chosen = schemas[::10] if arguments.quick else schemas
            results.answers = asyncio.run(structured_answers.measure(Path(logs), chosen))
    if "throughput" in arguments.only:
        results.rates = alone(structured_decode.measure, 1 if arguments.quick else arguments.repeats)
    return results


def _setting(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(arguments).items() if name != "out"}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="every tenth schema, one repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "structured.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
