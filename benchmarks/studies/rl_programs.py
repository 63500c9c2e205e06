"""Runs other people's RL programs against this server, and records what they learnt and how closely they agree with it.

    python benchmarks/studies/rl_programs.py [CLIENT ...] [--out FILE]

It runs the second stage `scripts/protocols`, whose tests report their figures, so a figure and the limit that a test
asserts are in one place. Every client is the published package in an environment of its own, and every curve is of the
bundled model unless its name says "tiny". Two tests run at a time with one BLAS thread each, for half an hour on two
cores. With names (`tinker`, `atropos`, ...) only their tests run, and the record keeps the others as they were.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.lib import machine, report
from benchmarks.lib.figures import Figure, errors, reported

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Test:
    """One test of the second stage. `module`: without `test_`. `figures`: what it reported, in the fields of
    `benchmarks.lib.figures.Figure`."""

    module: str
    name: str
    outcome: str
    seconds: float
    figures: list[dict[str, Any]]


def main() -> int:
    """Returns the exit code: 0 if every test passed and every figure keeps to its limit."""
    arguments = _arguments()
    before = machine.describe()
    tests = _kept(arguments.out, tuple(arguments.clients)) if arguments.clients else []
    tests += [test for client in arguments.clients or [""] for test in _run(client)]
    figures = list(_figures(tests))
    report.show(figures)
    record = {"machine": before, "setting": report.setting(arguments), "tests": [asdict(test) for test in tests]}
    report.write(arguments.out, record, figures)
    print(f"written to {arguments.out}")
    return int(any(figure.met is False for figure in figures))


def _kept(file: Path, clients: tuple[str, ...]) -> list[Test]:
    """The tests of an earlier record, but for those of these clients."""
    if not file.exists():
        return []
    tests = [Test(**test) for test in json.loads(file.read_text())["tests"]]
    return [test for test in tests if not test.module.startswith(clients)]


def _run(client: str) -> list[Test]:
    """The tests of one client; of all if `client` is empty."""
    with tempfile.TemporaryDirectory(prefix="rl_programs_benchmark_") as folder:
        file = Path(folder) / "tests.xml"
        command = ["scripts/protocols", *filter(None, [client]), "-v", f"--junit-xml={file}"]
        subprocess.run(command, cwd=ROOT, check=False)  # tests that fail are in the file
        return [_test(case) for case in ElementTree.parse(file).iter("testcase")]


def _test(case: ElementTree.Element) -> Test:
    found = [outcome for outcome in ("failure", "error", "skipped") if case.find(outcome) is not None]
    properties = case.iterfind("properties/property[@name='figure']")
    figures = [json.loads(one.attrib["value"]) for one in properties]
    module = case.attrib["classname"].rpartition(".test_")[2]
    return Test(module, case.attrib["name"], "".join(found[:1]) or "passed", float(case.attrib["time"]), figures)


def _figures(tests: list[Test]) -> Iterator[Figure]:
    for one in (figure for test in tests for figure in test.figures):
        yield Figure(one["name"], one["unit"], *reported([one["value"]]), one["limit"], one["at_least"])
    yield errors("tests that failed", sum(test.outcome in ("failure", "error") for test in tests))
    yield errors("tests that were skipped", sum(test.outcome == "skipped" for test in tests))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", metavar="CLIENT")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "rl_programs.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
