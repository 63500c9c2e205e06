"""Measures answers that must follow a JSON schema: how many are finished and valid, and the cost of the masks.

    python benchmarks/studies/structured.py [--quick] [--repeats 3] [--only schemas throughput] [--out FILE]

`schemas`: a real server of the bundled model answers with each of 200 schemas (lib/structured/schemas.json), 16 at a
time, with at most 256 tokens each. Every finished answer is validated. `throughput`: decoding of 16 rows, each with a
schema of its own, compared with 16 rows without one. It takes about 8 minutes on two cores. Nothing else should run on
the machine meanwhile.
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

from benchmarks.lib import machine, report
from benchmarks.lib.alone import alone
from benchmarks.lib.figures import Figure, errors, ratios, reported
from benchmarks.lib.structured import answers as structured_answers
from benchmarks.lib.structured import decode as structured_decode
from benchmarks.lib.structured.answers import Answered
from benchmarks.lib.structured.decode import BOUND, FREE, Rates

SCHEMAS = Path(__file__).parents[1] / "lib" / "structured" / "schemas.json"
PARTS = ("schemas", "throughput")
FINISHED, KEPT = 0.9, 0.8


@dataclass(slots=True)
class Results:
    """The measurements of the parts that ran."""

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
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # kills all child processes, as Ctrl-C does
    before = machine.describe()
    machine.warn_if_busy()
    results = _run(arguments)
    judged = list(results.judged())
    report.show(judged)
    report.write(arguments.out, {"machine": before, "setting": report.setting(arguments), **asdict(results)}, judged)
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in judged))


def _run(arguments: argparse.Namespace) -> Results:
    results = Results()
    if "schemas" in arguments.only:
        schemas = json.loads(SCHEMAS.read_text())["schemas"]
        with tempfile.TemporaryDirectory(prefix="structured_benchmark_") as logs:
            chosen = schemas[::10] if arguments.quick else schemas
            results.answers = asyncio.run(structured_answers.measure(Path(logs), chosen))
    if "throughput" in arguments.only:
        results.rates = alone(structured_decode.measure, 1 if arguments.quick else arguments.repeats)
    return results


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="every tenth schema, one repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path, default=report.RESULTS / "structured.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
