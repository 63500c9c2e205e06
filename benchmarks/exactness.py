"""Checks the arithmetic of training on the bundled model: episodes of two turns, against plain forwards of mlx-lm.

    python benchmarks/exactness.py [--out FILE]

Logprobs are compared with a plain forward over the joined tokens; gradients, with tokens of weight 0, an advantage for
each token and what episodes share computed once, with a plain trainer's, whose rows are padded and share nothing. It
takes a minute on two cores, prints a table and writes JSON.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks.lib import machine, report
from benchmarks.lib.alone import alone
from benchmarks.lib.figures import Figure, reported
from benchmarks.lib.training import exactness
from benchmarks.lib.training.exactness import Exactness

MILLIONTHS_OF_A_NAT, MILLIONTHS_APART = 100, 10


def main() -> int:
    """Returns the exit code: 0 if every figure keeps to its limit, 1 if one does not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=report.RESULTS / "exactness.json")
    arguments = parser.parse_args()
    before = machine.describe()
    exact = alone(exactness.measure)
    figures = [*_figures(exact)]
    report.show(figures)
    report.write(arguments.out, {"machine": before, "exactness": asdict(exact)}, figures)
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in figures))


def _figures(exact: Exactness) -> Iterator[Figure]:
    logprob, gradient = reported([1e6 * exact.logprob]), reported([1e6 * exact.gradient])
    yield Figure("logprobs of two turns, to a plain forward", "1e-6 nats", *logprob, MILLIONTHS_OF_A_NAT)
    yield Figure("gradients of two turns, to padded rows", "1e-6", *gradient, MILLIONTHS_APART)
    yield Figure("their tokens that are computed", "%", *reported([100 * exact.computed / exact.tokens]))


if __name__ == "__main__":
    sys.exit(main())
